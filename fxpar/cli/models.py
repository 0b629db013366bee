"""Models named on the command line.

Enters: `hf:TYPE[,key=value…]`, `module:function` or `file.py:function`. Leaves: a `LoadedModel` in the mode asked for,
or an `InputError` that says what cannot be used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.cli.hf_models import OWN, REFUSALS, first_line, make_example, small_config
from fxpar.cli.output import is_file
from fxpar.errors import InputError, PassError
from fxpar.ir.program import Program
from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.text.stored_traces import state_of

_FORMS = "hf:TYPE[,key=value…], module:function, file.py:function or the file of a program's text"

# What faulty code of a user raises while it is imported or called.
_USER_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class LoadedModel:
    """A model in the mode to capture.

    Attributes:
        model: the module.
        batch: an example, as `fxpar.parallelize` takes it.
        loss: as `fxpar.parallelize` takes it.
        name: the words it was loaded by.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | str | None
    name: str

    @property
    def has_memory(self) -> bool:
        """Returns whether the model holds values: large ones are built on the meta device."""
        return not any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers()))


# Rows of an example that is made here.
SAMPLES = 3


def is_built(spec: str) -> bool:
    """Returns whether the model and its example are made here, and not by a function of the user's."""
    return spec.startswith("hf:")


def load_model(spec: str, batch: int | None, seq: int | None, seed: int, train: bool) -> LoadedModel:
    """Loads a model by name.

    Args:
        spec: `hf:TYPE[,key=value…]`, `module:function` or `file.py:function`.
        batch: samples of the example; None for 3 of an `hf:` model, and for those of a function's example.
        seq: tokens a sample; None for 16.
        seed: of random weights and the example.
        train: training mode, else evaluation.

    Raises:
        InputError: the name has another form, or what it names cannot be loaded.
    """
    if spec.startswith("hf:"):
        pass

        built = build(spec.removeprefix("hf:"), batch, seq, seed)
        return LoadedModel(built.model.train(train), built.batch, built.loss, spec)
    if seq is not None:
        raise InputError(
            "--seq sizes the example of hf: models only", where=spec, remedy="change the function that makes the batch"
        )
    function = load_attribute(spec)
    if not callable(function):
        raise InputError(f"must be a function, got a {type(function).__name__}", where=spec, remedy="name a function")
    with torch.random.fork_rng(devices=[]), user_code(spec):
        torch.manual_seed(seed)
        result = function()
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise InputError(
            "the function returns no (model, batch) or (model, batch, loss)",
            where=spec,
            remedy="return an nn.Module and an example batch",
        )
    loss = result[2] if len(result) == 3 else None
    if loss is not None and not isinstance(loss, str) and not callable(loss):
        raise InputError(
            f"the loss must be a callable or a name, got a {type(loss).__name__}",
            where=spec,
            remedy="return a callable (outputs, batch)",
        )
    example = result[1] if batch is None else with_rows(result[1], batch, spec)
    return LoadedModel(result[0].train(train), example, loss, spec)


def rows_of(example: Any) -> int | None:
    """Returns how many rows all tensors of an example have in their first dimension; None where they differ."""
    rows = {value.shape[0] for value in pytree.tree_leaves(example) if isinstance(value, Tensor) and value.dim()}
    return rows.pop() if len(rows) == 1 else None


def with_rows(example: Any, rows: int, where: str) -> Any:
    """Returns an example of another number of rows: the first ones, or all of them again and again.

    Raises:
        InputError: its tensors have other numbers of rows each, so that it is not known which dimension they are.
    """
    had = rows_of(example)
    if had is None:
        raise InputError(
            "the tensors of the example differ in their first dimension, so that --batch says nothing of them",
            where=where,
            remedy="change the function that makes the batch",
        )
    if rows < 1:
        raise InputError(f"{rows} is too small", where=f"{where} --batch", remedy="give at least 2")
    chosen = torch.arange(rows) % had

    def resized(value: Tensor) -> Tensor:
        return value.index_select(0, chosen.to(value.device)) if value.dim() else value

    return pytree.tree_map_only(Tensor, resized, example)


def load_attribute(spec: str) -> Any:
    """Returns what `module:name` or `file.py:name` names.

    Raises:
        InputError: the module or file cannot be imported, or has no such name.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise InputError("names no model and no existing file", where=spec, remedy=f"write {_FORMS}")
    with user_code(place):
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [*vars(module)], 1)
        remedy = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"the module has no {name}", where=spec, remedy=f"{remedy}name a function of the module")
    return getattr(module, name)


def _load_file(path: Path) -> ModuleType:
    """Runs a file as a module of its own name, or of a name of its own where that one is taken; once a process."""
    if not is_file(path):
        raise InputError("there is no such file", where=str(path), remedy="check the path")
    hashed_name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    for name in (path.stem, hashed_name):
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
            return known
    name = path.stem if path.stem not in sys.modules and importlib.util.find_spec(path.stem) is None else hashed_name
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError("must be a Python file", where=str(path), remedy="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # autograd functions are found again by their module's name
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    complete = False
    try:
        spec.loader.exec_module(module)
        complete = True
    finally:
        sys.path.remove(folder)
        if not complete:
            del sys.modules[name]
    return module


@contextlib.contextmanager
def user_code(where: str) -> Iterator[None]:
    """Turns what a user's code raises into an `InputError` with its line."""
    try:
        yield
    except _USER_FAULTS as error:
        raise InputError(_fault(error), where=where, remedy="correct the code") from None
    except SystemExit as error:
        raise InputError(
            f"the code called sys.exit({error.code!r})", where=where, remedy="guard it by if __name__ == '__main__'"
        ) from None


def _fault(error: BaseException) -> str:
    """Returns the error with the deepest line that is neither a library's nor fxpar's."""
    here = str(Path(__file__).resolve().parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(("<", here))]
    user_frames = [f for f in frames if not {"site-packages", "importlib"} & set(Path(f.filename).parts)]
    place = f" at {Path(user_frames[-1].filename).name}:{user_frames[-1].lineno}" if user_frames else ""
    first = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}{place}: {first}"


def load_passes(spec: str | None) -> tuple[Pass, ...]:
    """Returns the default passes, or those of `module:ATTR` with the faults of their code turned into `PassError`.

    Raises:
        InputError: there is no such list.
        PassError: an entry is no registered pass.
    """
    if spec is None:
        return DEFAULT_PASSES
    passes = load_attribute(spec)
    if not isinstance(passes, (list, tuple)) or not passes:
        raise InputError("must be a list of passes", where=spec, remedy="name a list of functions under @register_pass")
    for item in passes:
        if not isinstance(item, Pass):
            raise PassError(
                f"must have passes alone, got {item!r}", where=spec, remedy="decorate it with @fxpar.register_pass"
            )
    return tuple(p if p in DEFAULT_PASSES else dataclasses.replace(p, run=_guarded(p)) for p in passes)


def _guarded(item: Pass) -> Callable[[Program], Program]:
    def run(program: Program) -> Program:
        try:
            return item.run(program)
        except _USER_FAULTS as error:
            raise PassError(_fault(error), where=item.name, remedy="correct the pass") from None

    run.__doc__ = item.run.__doc__
    return run


# Small random models of transformers' architectures.

SEQUENCE = 16
LARGEST = 200_000_000


@dataclass(frozen=True)
class Built:
    """A model, its example batch and the loss where the model has none of its own."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[Any, Any], Tensor] | None


def build(spec: str, batch: int | None, seq: int | None, seed: int) -> Built:
    """Returns the model and example for `TYPE[,key=value…]`.

    Args:
        spec: without the leading `hf:`.
        batch: samples, at least 2; None for 3.
        seq: tokens a sample; None for 16.
        seed: of the weights and the example.

    Raises:
        InputError: transformers is missing, does not know the type or a key, or refuses the sizes.
    """
    try:
        import transformers
    except ImportError:
        raise InputError(
            "transformers is not installed", where=f"hf:{spec}", remedy="pip install 'fxpar[hf]'"
        ) from None
    where = f"hf:{spec}"
    kind, *pairs = _split(spec)
    known = list(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        near = difflib.get_close_matches(kind, known, 3) or ["gpt2", "bert", "llama", "vit", "t5"]
        raise InputError(
            f"transformers {transformers.__version__} has no model type '{kind}'",
            where=where,
            remedy=f"try {', '.join(near)}",
        )
    samples, length = SAMPLES if batch is None else batch, SEQUENCE if seq is None else seq
    for option, value in (("--batch", samples), ("--seq", length)):
        if value < 2:
            raise InputError(f"{value} is too small", where=f"{where} {option}", remedy="give at least 2")
    config = small_config(transformers.CONFIG_MAPPING[kind], pairs, length, where)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, has_loss = _model(transformers, config, where)
        torch.manual_seed(seed + 1)
        try:
            example = make_example(model, config, samples, length, has_loss, where)
        except RuntimeError as error:  # no numbers below a size of 0
            raise InputError(first_line(error), where=where, remedy="give other sizes") from None
    return Built(model, example, None if has_loss else distance)


def distance(outputs: Any, batch: Any) -> Tensor:
    """Returns a loss for models without one: the mean square distance of the first output from a wave.

    The mean square of the output alone is constant after a norm: it would have no gradient to look at.
    """
    first: Tensor = outputs[0].float()
    return (first - torch.arange(first.shape[-1], device=first.device).float().cos()).square().mean()


def _split(spec: str) -> list[str]:
    """Returns the parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for sign in spec:
        depth += (sign in "[{(") - (sign in ")}]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _model(transformers: Any, config: Any, where: str) -> tuple[nn.Module, bool]:
    """Returns the model in the class that trains it, and whether it returns a loss."""
    try:
        cls, has_loss = _class_of(transformers, config)
        if cls is None:
            raise InputError("transformers has no text or image model of this type", where=where, remedy=OWN)
        with torch.device("meta"):
            model = cls(config)
        if sum(p.numel() for p in model.parameters()) <= LARGEST:
            model = cls(config)
    except ImportError as error:
        raise InputError(first_line(error), where=where, remedy="install what is missing") from None
    except REFUSALS as error:
        raise InputError(first_line(error), where=where, remedy="give other sizes") from None
    if "loss_type" in vars(model) and model.loss_type is None:
        model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    for parameter in model.parameters():
        # Biases of zero and norm weights of one would hide one that is added twice or left out.
        if parameter.dim() == 1 and not parameter.is_meta:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model, has_loss


def _class_of(transformers: Any, config: Any) -> tuple[Any, bool]:
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    decoder = getattr(config, "is_decoder", False)
    order = [
        (transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, encoder_decoder),
        (transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, encoder_decoder),
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, decoder),
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, True),
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, True),
        (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, True),
        (transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, True),
        (transformers.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING, True),
    ]
    for mapping, applies in order:
        if applies and type(config) in mapping:
            entry = mapping[type(config)]
            return (entry[0] if isinstance(entry, tuple) else entry), True
    base = transformers.MODEL_MAPPING
    if type(config) not in base:
        return None, False
    entry = base[type(config)]
    return (entry[0] if isinstance(entry, tuple) else entry), False


# What a trace of `hf:TYPE` depends on, as one key for traces on disk. Code of the user's own has no key: what it reads
# (files by native code, modules that are not there yet) nobody can list.

# Of the shell and the terminal; they change from call to call.
_OF_THE_SHELL = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES"})
# A file that is younger may be another one than the process has imported.
_STARTED = time.time_ns()


def trace_key(words: tuple[Any, ...], plan: Plan) -> str | None:
    """Returns the key of a model's trace; None where a file of fxpar changed while this process ran.

    Args:
        words: of the command line that name the model, its mode and its example.
    """
    package = Path(__file__).parents[1]
    sources = sorted(str(path) for folder in (package, package / "passes") for path in folder.rglob("*.py"))
    if any(os.stat(name).st_mtime_ns >= _STARTED for name in sources):
        return None
    states = [state_of(name, is_installed=False) for name in sources]
    environment = sorted((name, value) for name, value in os.environ.items() if name not in _OF_THE_SHELL)
    # All that is installed: transformers imports other kernels where it finds them.
    installed = sorted(f"{one.metadata['Name']} {one.version}" for one in importlib.metadata.distributions())
    versions = (sys.version, sys.prefix, sys.flags, torch.__version__, torch.version.git_version, installed)
    text = repr((versions, environment, sources, states, words, plan.to_yaml()))
    return hashlib.sha256(text.encode()).hexdigest()


def module_states() -> dict[str, str]:
    """Returns size and time of all files that modules were imported from, besides fxpar's."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] != "fxpar"]
    files = [getattr(module, "__file__", None) for module in modules]
    names = {os.path.abspath(name) for name in files if isinstance(name, str)}
    return {name: state_of(name, is_installed=True) for name in sorted(names)}
