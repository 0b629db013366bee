"""Programs as files: texts, dump folders and the values next to them.

Enters: file names, models to capture. Leaves: programs to start from, and what is needed to check them by value.

A dump folder holds `00-capture.txt`, one `NN-pass.txt` a pass and, where the model has memory, `values.safetensors`
with its parameters, buffers and constants (`state/NAME`) and the example's tensors (`input/PATH`); `functions.json`
says where the autograd functions are that the texts name.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fxpar.capture.capture import Captured, check_samples
from fxpar.capture.prepared_model import cast_parameters
from fxpar.cli.models import (
    SAMPLES,
    LoadedModel,
    is_built,
    load_model,
    module_states,
    rows_of,
    trace_key,
    user_code,
)
from fxpar.cli.output import Ui, is_file, write_text
from fxpar.cli.plan_flags import EXAMPLE_FLAGS, MODE_FLAG, PLAN_FLAGS, Request
from fxpar.compile import capture_differentiable
from fxpar.errors import InputError
from fxpar.ir.program import DTYPE_NAMES, Input, PassRecord, Program
from fxpar.ir.step import RNG_PATH, output_of
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.manager import Pass, PassManager, without_collections
from fxpar.ops.small_operators import function
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import VERSION, print_program
from fxpar.text.stored_traces import find_trace, store_trace, traces_folder
from fxpar.verify.faithful import ON_META, compare, findings
from fxpar.verify.static import STATIC
from fxpar.verify.values import call_inputs, program_state

# The files of the autograd functions that a dump's texts name, so that the texts are read wherever one stands.

FUNCTIONS = "functions.json"


def save_functions(folder: Path, program: Program) -> None:
    """Notes where the modules of a program's functions are; nothing of a program without any."""
    calls = [node for node in program.graph.nodes if node.target is function]
    names = {str(node.kwargs["path"]).rpartition(".")[0] for node in calls}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(names)}
    paths = {name: file for name, file in files.items() if file}
    (folder / FUNCTIONS).unlink(missing_ok=True)  # of an earlier dump
    if paths:
        write_text(folder / FUNCTIONS, json.dumps(paths, indent=1) + "\n")


def import_functions(folder: Path) -> None:
    """Imports what a dump's texts need and Python does not find.

    Raises:
        InputError: the note is damaged, or a file is gone or faulty.
    """
    path = folder / FUNCTIONS
    if not path.is_file():
        return
    try:
        files = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"cannot be read: {error}", where=str(path), remedy="dump the model again") from None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise InputError("must be {module: file}", where=str(path), remedy="dump the model again")
    for name, file in files.items():
        if name not in sys.modules and not _is_found(name):
            if not Path(file).is_file():
                raise InputError(f"{file} of the module {name} is gone", where=str(path), remedy="put it back")
            with user_code(file):
                _import(name, Path(file))


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _import(name: str, file: Path) -> None:
    """Imports from the folder above its package; a file that was run under another name by itself."""
    *packages, last = name.split(".")
    root = str(file.parents[len(packages)]) if len(packages) < len(file.parents) else ""
    sys.path.insert(0, root)
    try:
        if last == file.stem:
            importlib.import_module(name)
            return
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(root)


CAPTURE, VALUES = "00-capture.txt", "values.safetensors"
_DUMPED = re.compile(r"(\d\d)-(.+)\.txt")


@dataclass(frozen=True)
class Values:
    """Tensors by name: what the program owns (`state`) and the example's (`inputs`, by path)."""

    state: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]

    def check(self, program: Program, where: str) -> None:
        """Refuses a program that owns or takes something else.

        Raises:
            InputError: a tensor is missing or has another type or shape.
        """
        sizes = {}
        for s in program.symbols:
            if s.path not in self.inputs or s.dim >= self.inputs[s.path].dim():
                raise InputError(
                    f"has no size '{s.path}.{s.dim}' for the symbol {s.name}",
                    where=where,
                    remedy="dump the model again",
                )
            sizes[s.name] = int(self.inputs[s.path].shape[s.dim]) // s.multiple
        expected = [(f"state/{p.fqn}", self.state.get(p.fqn), p.type) for p in program.parameters]
        expected += [(f"input/{i.path}", self.inputs.get(i.path), i.type) for i in _given(program)]
        for name, tensor, kind in expected:
            if tensor is None:
                raise InputError(f"has no tensor '{name}'", where=where, remedy="dump the model again")
            try:
                shape = [evaluate(size, sizes) for size in kind.shape]
            except ValueError as error:
                raise InputError(f"'{name}' has no definite shape: {error}", where=where, remedy="dump again") from None
            if list(tensor.shape) != shape or tensor.dtype != kind.dtype:
                actual = f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}"
                raise InputError(
                    f"'{name}' is {actual}, the program wants {kind}", where=where, remedy="dump the model again"
                )


@dataclass(frozen=True)
class Start:
    """A program to work on.

    Attributes:
        program: captured, or read from a text.
        name: the words it was named by.
        captured: how it was captured; None for a text, and where the trace was on disk.
        loaded: the model; None for a text.
        path: the text; None for a model.
        how: as `Captured` says, or `text`.
        unwalked: as `Captured` says.
    """

    program: Program
    name: str
    captured: Captured | None = None
    loaded: LoadedModel | None = None
    path: Path | None = None
    how: str = "text"
    unwalked: str = ""

    def values(self) -> Values:
        """Returns what checks by value need.

        Raises:
            InputError: the model has no memory, or no values stand next to the text.
        """
        if self.path is not None:
            return load_values(self.path.parent)
        assert self.captured is not None
        assert self.loaded is not None
        need_memory(self.loaded)
        model, batch = self.loaded.model, self.loaded.batch
        return Values(program_state(self.program, model), call_inputs(self.captured, model, batch))


def need_memory(loaded: LoadedModel) -> None:
    """Refuses models without values.

    Raises:
        InputError: the model is on the meta device.
    """
    if not loaded.has_memory:
        raise InputError(
            "the model has no values: it was built without memory",
            where=loaded.name,
            remedy="use --level static, or a smaller model",
        )


def is_text(spec: str) -> bool:
    """Returns whether the word names an existing file that starts as a program's text does."""
    try:
        with open(spec, encoding="utf-8") as stream:
            return stream.readline().startswith("fxpar ")  # of another version too, which is told when it is read
    except (OSError, UnicodeDecodeError, ValueError):
        return False


def open_start(ui: Ui, request: Request, *, needs_values: bool = False) -> Start:
    """Reads the text or loads and captures the model that the request names.

    Args:
        needs_values: whether the values of a model that has memory are looked at too, which takes a capture.

    Raises:
        InputError: it cannot be loaded or captured, or options were given that say nothing of it.
    """
    if is_text(request.model):
        refuse_flags(request)
        path = Path(request.model)
        return Start(read_text(path), request.model, path=path)
    with without_collections():
        loaded = open_model(ui, request)
        folder = traces_folder() if request.cache and is_built(request.model) else None
        words = (request.model, request.batch, request.seq, request.train)
        key = trace_key(words, request.plan) if folder is not None else None
        if folder is not None and key is not None and not (needs_values and loaded.has_memory):
            stored = find_trace(folder, key)
            if stored is not None:
                trace, program = stored
                return Start(program, request.model, loaded=loaded, how=trace.how, unwalked=trace.unwalked)
        with ui.working(f"capturing {request.model}"):
            captured = capture_differentiable(loaded.model, loaded.batch, request.plan, loaded.loss)
        if folder is not None and key is not None:
            refusal = store_trace(folder, key, captured.program, captured.how, captured.unwalked, module_states())
            if refusal:
                ui.warn(f"{folder}: the trace cannot be left here: {refusal}; give --no-cache, or set XDG_CACHE_HOME")
    return Start(captured.program, request.model, captured, loaded, how=captured.how, unwalked=captured.unwalked)


def compared(ui: Ui, start: Start) -> tuple[str, ...]:
    """Returns what was checked of a capture, as sentences, its values compared with the model's before; none of a text.

    Raises:
        CheckFailed: they differ.
    """
    if start.loaded is None:
        return ()
    if start.captured is None:  # of a trace on disk that needs no values, since there are none
        return findings(start.how, start.unwalked, ON_META)
    with ui.working(f"comparing {start.name}"):
        different = compare(start.captured, start.loaded.model, start.loaded.batch)
    return findings(start.how, start.unwalked, different)


def refuse_flags(request: Request) -> None:
    """Refuses options that a text fixes."""
    request.refuse(PLAN_FLAGS, "the plan stands in the text", "edit its plan line, or dump the model again")
    request.refuse((*EXAMPLE_FLAGS, MODE_FLAG), "the text is of a captured model", "dump the model again")


def open_model(ui: Ui, request: Request) -> LoadedModel:
    """Loads the model that the request names, in the plan's precision.

    Raises:
        InputError: it cannot be loaded.
    """
    if is_file(Path(request.model)) and ":" not in request.model:
        raise InputError(
            f"must be a program's text, which starts with '{VERSION}'",
            where=request.model,
            remedy="name a file that 'fxpar run --dump' or 'fxpar trace --out' wrote, or file.py:function",
        )
    with ui.working(f"loading {request.model}"):
        rows, ranks = request.batch, request.plan.data_ranks
        if ranks > 1 and (rows is not None or is_built(request.model)):
            rows = (SAMPLES if rows is None else rows) * ranks
        loaded = load_model(request.model, rows, request.seq, request.plan.seed, request.train)
        check_samples(loaded.batch)
        _check_rows(loaded, request.plan)
        cast_parameters(loaded.model, request.plan)
        return loaded


def _check_rows(loaded: LoadedModel, plan: Plan) -> None:
    """Refuses an example whose rows data ranks cannot share out, before it is traced.

    Raises:
        InputError: says how many rows there are; where the plan says which dimension they are, the trace knows.
    """
    rows, ranks = rows_of(loaded.batch), plan.data_ranks
    if rows is not None and rows % ranks and not plan.batch_dims:
        raise InputError(
            f"its example has {rows} rows, which {ranks} data ranks (dp={plan.dp}) cannot share out",
            where=loaded.name,
            remedy=f"give --batch {max(2, -(-rows // ranks))} (rows for each data rank), or change its function",
        )


def read_text(path: Path) -> Program:
    """Returns the program of a text file.

    Raises:
        InputError: the file cannot be read or is no program.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(error.strerror), where=str(path), remedy="name a program's text file") from None
    except ValueError:  # or a name with a zero byte
        raise InputError("must be text in UTF-8", where=str(path), remedy="name a program's text file") from None
    import_functions(path.parent)
    return parse_program(text, where=str(path))


def load_values(folder: Path) -> Values:
    """Returns the values of a dump folder.

    Raises:
        InputError: there are none, or the file is damaged.
    """
    for name in (CAPTURE, VALUES):
        if not (folder / name).is_file():
            raise InputError(
                f"a check by value needs {CAPTURE} and {VALUES} in one folder with the text, and {name} is missing",
                where=str(folder),
                remedy="dump a model that has memory with 'fxpar run MODEL --dump DIR', or use --level static",
            )
    try:
        tensors = load_file(folder / VALUES)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", where=str(folder / VALUES), remedy="dump it again") from None
    groups: dict[str, dict[str, Tensor]] = {"state": {}, "input": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        if group not in groups:
            raise InputError(f"holds '{name}'", where=str(folder / VALUES), remedy="dump it again")
        groups[group][rest] = tensor
    return Values(groups["state"], groups["input"])


def save_values(folder: Path, values: Values) -> None:
    """Writes the values of a dump folder.

    Raises:
        InputError: that is not possible.
    """
    tensors = {f"state/{name}": t for name, t in values.state.items()}
    tensors |= {f"input/{name}": t for name, t in values.inputs.items()}
    copies = {name: torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t) for name, t in tensors.items()}
    try:
        save_file(copies, folder / VALUES)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"cannot be written: {error}", where=str(folder / VALUES), remedy="choose another folder"
        ) from None


def dumped(folder: Path) -> list[tuple[int, str, Path]]:
    """Returns number, pass and file of every text in a dump folder, in order.

    Raises:
        InputError: there is none.
    """
    texts = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _DUMPED.fullmatch(path.name)
        if match is not None:
            texts.append((int(match[1]), match[2], path))
    if not texts:
        raise InputError("holds no NN-pass.txt", where=str(folder), remedy="name a folder of 'fxpar run --dump'")
    return texts


def passes_done(passes: Sequence[Pass], properties: frozenset[str]) -> int:
    """Returns how many of the passes have already run on a program with these properties."""
    behind = [i for i, item in enumerate(passes, 1) if item.provides and item.provides <= properties]
    return max(behind, default=0)


def _given(program: Program) -> list[Input]:
    """Returns the inputs that a dump holds: neither the random state nor gradients of outputs."""
    return [entry for entry in program.inputs if entry.path != RNG_PATH and not output_of(entry.path)]


def run_passes(
    ui: Ui,
    start: Start,
    passes: Sequence[Pass],
    until: str | None = None,
    folder: Path | None = None,
    print_after: Sequence[str] = (),
    before: int = 0,
) -> tuple[Program, dict[str, str]]:
    """Returns the program after the passes it has not had yet, and the texts after the passes in `print_after`.

    Args:
        before: number of the pass that made the program, where the folder holds what led to it.

    Raises:
        InputError: there is no pass `until`, or it ran before.
        FxparError: a pass or a static check refused the program.
    """
    position = passes_done(passes, start.program.properties)
    todo = list(passes[position:])
    for option, names in (("--until", [until] if until else []), ("--print-after", print_after)):
        _check_names(passes, todo, start.program, option, names)
    behind = sum(item.when(start.program) for item in passes[:position])  # those left out have no number
    if folder is not None and not before:
        _prepare(folder, start)
        save_functions(folder, start.program)
    program, texts = start.program, dict[str, str]()
    names = [item.name for item in todo]
    with ui.working(start.name) as update:

        def progress(record: PassRecord) -> None:
            done = names.index(record.name) + 1
            update(f"{record.name} done in {record.seconds:.2f} s ({done} of {len(names)} passes)")

        def note(program: Program) -> None:
            name = program.history[-1].name if program.history else "capture"
            if name in print_after:
                texts[name] = print_program(program)

        manager = PassManager(todo, STATIC, on_pass=progress, on_program=note, dump=folder, first=before or behind)
        is_new = not before and (not behind or bool(program.history))
        program = replace(manager, dumps_first=is_new).run(program, until=until)
    return program, texts


def _check_names(
    passes: Sequence[Pass], todo: Sequence[Pass], program: Program, option: str, names: Sequence[str]
) -> None:
    left_out = {item.name: item.condition for item in todo if not item.when(program)}
    ahead = [item.name for item in todo if item.name not in left_out]
    for name in names:
        if name not in ahead:
            behind = name in [item.name for item in passes]
            reason = "the program has this pass behind it" if behind else "there is no such pass"
            if name in left_out:
                reason = f"the pass runs where {left_out[name]}"
            remedy = f"choose from {', '.join(ahead)}" if ahead else "all passes have run on this program"
            raise InputError(reason, where=f"{option} {name}", remedy=remedy)


def _prepare(folder: Path, start: Start) -> None:
    """Puts next to the texts what makes them checkable by value."""
    if start.loaded is not None:
        write_text(folder / CAPTURE, print_program(start.program))
        for _, _, path in dumped(folder)[1:]:
            path.unlink()  # of an earlier dump
        (folder / VALUES).unlink(missing_ok=True)
        if start.loaded.has_memory:
            save_values(folder, start.values())
    elif start.path is not None and start.path.parent.resolve() != folder.resolve():
        write_text(folder / start.path.name, print_program(start.program))
        for name in (CAPTURE, VALUES):
            if (start.path.parent / name).is_file():
                shutil.copyfile(start.path.parent / name, folder / name)
