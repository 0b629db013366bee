"""Captures, and passes of ranks, that all processes of a test run share: the same model is captured once, whatever
plans, ranks and workers read it. What is shared is the program's text; where that does not say all, nothing is shared.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fxpar.capture import capture as module_of_capture
from fxpar.capture.capture import Captured
from fxpar.errors import TextError
from fxpar.ir.program import Program
from fxpar.manager import PassManager
from fxpar.passes.annotate import _LAYOUTS
from fxpar.passes.differentiate import is_differentiable
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.stored_traces import whole_text
from fxpar.verify.faithful import compare

Result = TypeVar("Result")

# What captures a model, whatever stands in its place.
CAPTURE = module_of_capture._capture
# What runs passes, likewise.
PASSES = PassManager.run
# How a test has changed passes.
_changes: list[tuple[Any, ...]] = []
# What pickle raises of a class inside a function, a lock, a parametrized module; and what `whole_text` does.
_UNKNOWN = (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError, TextError)


@contextlib.contextmanager
def captured_once(folder: Path) -> Iterator[None]:
    """While active, a model of the same code and values is captured once, and the capture compared with it once; each
    capture gets a program of its own.

    Args:
        folder: where programs are written, for all processes that read them.
    """

    def once(model: nn.Module, batch: Any, plan: Plan, loss: Any, fixed: frozenset[tuple[int, int]]) -> Captured:
        def run() -> Captured:
            return CAPTURE(model, batch, plan, loss, fixed)

        def entry(captured: Captured) -> Any:
            fields = ("spec", "how", "unwalked", "findings", "fixed")
            return whole_text(captured.program), {name: getattr(captured, name) for name in fields}

        def read(entry: Any) -> Captured:
            function = loss if callable(loss) else None
            return Captured(program=parse_program(entry[0]).with_(plan=plan), loss=function, **entry[1])

        def key() -> Any:
            return "capture", _model_key(model, loss), batch, sorted(fixed), _read_of(plan), _modes()

        return _shared(folder, key, run, entry, read)

    def compared_once(captured: Captured, model: nn.Module, batch: Any, runs: bool) -> str:
        def run() -> str:
            return compare(captured, model, batch, runs)

        def key() -> Any:
            how = captured.how, captured.spec, sorted(captured.fixed)
            return "compared", _model_key(model, captured.loss), batch, whole_text(captured.program), how, _modes()

        return _shared(folder, key, run, str, str) if runs else run()

    with (
        mock.patch.object(module_of_capture, "_capture", once),
        mock.patch("fxpar.runtime.programs.compare", compared_once),
    ):
        yield


@contextlib.contextmanager
def captured_each_time() -> Iterator[None]:
    """While active, every process captures for itself: a model whose forward depends on the rank."""
    with mock.patch.object(module_of_capture, "_capture", CAPTURE):
        yield


@contextlib.contextmanager
def passes_run_once(folder: Path) -> Iterator[None]:
    """While active, the same passes run on the same program once, if nothing looks at what they do.

    Args:
        folder: as of `captured_once`.
    """

    def once(manager: PassManager, program: Program, *, until: str | None = None) -> Program:
        def run() -> Program:
            return PASSES(manager, program, until=until)

        def entry(result: Program) -> Any:
            return whole_text(result), result.history[len(program.history) :]

        def read(entry: Any) -> Program:
            return parse_program(entry[0]).with_(history=(*program.history, *entry[1]))

        def key() -> Any:
            passes = [(item.name, item.run, item.when) for item in manager.passes]
            if not all(run.__module__.startswith("fxpar.") for _, run, _ in passes):
                raise pickle.PicklingError  # what a test puts in a pass's place may count its calls
            checks = [item.name for item in manager.verifiers], manager.checked
            layouts = sorted(_LAYOUTS.get({}).items())
            return "passes", whole_text(program), _modes(), passes, checks, layouts, until, _changes

        if manager.dump or manager.on_pass or manager.on_program:
            return run()
        return _shared(folder, key, run, entry, read)

    def asked_once(program: Program) -> bool:
        def run() -> bool:
            return is_differentiable(program)

        return _shared(folder, lambda: ("derivatives", whole_text(program), _modes()), run, bool, bool)

    with (
        mock.patch.object(PassManager, "run", once),
        mock.patch("fxpar.compile.is_differentiable", asked_once),
    ):
        yield


@contextlib.contextmanager
def passes_changed(*what: Any) -> Iterator[None]:
    """While active, passes are those that a test has changed; where `what` is equal, they are changed alike."""
    _changes.append(what)
    try:
        yield
    finally:
        _changes.pop()


def _shared(
    folder: Path,
    key: Callable[[], Any],
    run: Callable[[], Result],
    entry: Callable[[Result], Any],
    read: Callable[[Any], Result],
) -> Result:
    """Returns what `run` does, as it is read from the entry that the first process to come here writes.

    Args:
        folder: of the entries.
        key: returns all that it depends on. Where that is known by its identity alone, it runs.
    """
    description = io.BytesIO()
    try:
        _Description(description, protocol=5).dump(key())
    except _UNKNOWN:
        return run()
    path = folder / hashlib.sha256(description.getvalue()).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            result = run()
            try:
                written = pickle.dumps(entry(result))
            except _UNKNOWN:
                return result
            new = path.with_suffix(".new")
            new.write_bytes(written)
            new.replace(path)  # a rank may be killed at any time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of a nest's description that is read
        return read(pickle.loads(path.read_bytes()))


def _read_of(plan: Plan) -> Any:
    """What a capture reads of a plan."""
    kinds, refusals = (plan.precision, plan.cast_inputs), (plan.batch_norm, plan.loss_reduction)
    return *kinds, plan.data_ranks > 1, *refusals, plan.operators, plan.experts.expert_modules


def _modes() -> Any:
    """What else changes the meaning of operations.

    Raises:
        RuntimeError: something looks at operations while they run.
    """
    if _get_current_dispatch_mode_stack() or torch.overrides._get_current_function_mode_stack():
        raise RuntimeError
    backends: Any = torch.backends
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")],
        [getattr(backends.cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "math", "mem_efficient")],
        backends.mha.get_fastpath_enabled(),
        backends.opt_einsum.is_available(),
    )


def _model_key(model: nn.Module, loss: Any) -> Any:
    """What a model and a loss are told apart by."""
    files = {_file_of(value) for value in (*model.modules(), loss)}
    numbers: dict[int, int] = {}
    modules = model.named_modules(remove_duplicate=False)
    places = [(name, numbers.setdefault(id(module), len(numbers))) for name, module in modules]
    return model, places, loss, sorted(files)


def _file_of(value: Any) -> tuple[str, int]:
    """The file with the code of a value, and when it was written."""
    module = sys.modules.get(getattr(value, "__module__", None) or type(value).__module__)
    file = getattr(module, "__file__", None) or ""
    return file, os.stat(file).st_mtime_ns if file else 0


class _Description(pickle.Pickler):
    """Writes tensors by their types, sharing and values, and functions by their places and what they enclose."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.fast = True  # without it, which of two equal strings is the same one shows
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if type(obj) not in (Tensor, nn.Parameter) or obj.layout is not torch.strided or obj.grad_fn is not None:
            raise pickle.PicklingError
        self._tensors.append(obj)  # no other one gets its identity meanwhile
        numbers = self._numbers
        same = [numbers.setdefault(key, len(numbers)) for key in (id(obj), obj.untyped_storage()._cdata)]
        kind = type(obj).__name__, obj.dtype, obj.device.type, obj.requires_grad
        return *same, *kind, tuple(obj.shape), obj.stride(), obj.storage_offset(), vars(obj), _values(obj)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.FunctionType):
            return NotImplemented
        inside = [cell.cell_contents for cell in obj.__closure__ or ()]
        place = obj.__module__, obj.__qualname__, obj.__code__.co_firstlineno, *_file_of(obj)
        return tuple, ((place, inside, obj.__defaults__, obj.__kwdefaults__),)


def _values(tensor: Tensor) -> str:
    if tensor.is_meta:
        return ""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
