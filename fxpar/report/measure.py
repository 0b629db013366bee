"""One training step without memory: what it keeps for the backward, what it holds at most, what it sends.

Enters: a lowered program and sizes. Leaves: `Measured`. The very module that a rank runs is run on fake tensors, which
have types, shapes, strides and storages but no elements, so that the counts are those of eager execution by
construction. Collectives of fake tensors talk to nobody: no process group is needed. What a kernel uses inside, and the
allocator's rounding, come on top.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.errors import InputError
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbols import evaluate
from fxpar.ops.lower import Lowered
from fxpar.ops.recompute import apply_recompute
from fxpar.passes.assign_rng import RNG_PATH
from fxpar.program.mixed import held_type
from fxpar.program.program import Program, has_note, note, output_layouts, tensor_type

_UNCOUNTABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# What a collective moves in the terms of `analysis.collectives`: the operand, or what all ranks' operands make up.
_NAMES: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Place:
    """Where a step is: phase (forward, backward, recompute) and module, which the backward does not tell."""

    phase: str
    module: str


@dataclass(frozen=True)
class Kept:
    """A storage that autograd keeps for the backward: its bytes, and where it was first asked for."""

    place: Place
    bytes: int


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes are alive, besides parameters, buffers and inputs; and the operator that ran."""

    bytes: int
    place: Place
    operator: str


@dataclass(frozen=True)
class Checkpointed:
    """A region that keeps its inputs only: its number in the nodes' notes; collectives forward, and of these again."""

    number: int
    forward: int
    again: int


@dataclass(frozen=True)
class Measured:
    """One step on one rank.

    Attributes:
        kept: in the order in which autograd asks for them.
        gradients: names of the placeholders that have a gradient afterwards.
        peak: of the whole step, gradients included, which do not exist at its start.
        largest: the largest storage that is made, where and by which operator.
        collectives: how often, by name and bytes of the whole value.
        regions: the checkpointed regions in the order in which they ran.
    """

    kept: tuple[Kept, ...]
    gradients: frozenset[str]
    peak: Peak
    largest: Peak
    collectives: Mapping[tuple[str, int], int]
    regions: tuple[Checkpointed, ...]


class Ledger(TorchDispatchMode):
    """Counts live bytes and collectives of everything that runs under it; `own` are storages that do not count."""

    def __init__(self, own: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = own
        self.place = Place("forward", "")
        self.peak = self.largest = Peak(0, self.place, "")
        self.collectives: Counter[tuple[str, int]] = Counter()
        self.sent = 0
        self._live = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and enters its results."""
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as on devices, where it is the tensor itself
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self._send(func, args, out)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._enter(leaf.untyped_storage(), str(func))
        return out

    def _send(self, func: Any, args: Any, out: Any) -> None:
        name = _NAMES.get(func._opname)
        if name is None:
            return
        whole = out if name == "all_gather" else args[0]
        ranks = len(args[1]) if name == "all_to_all" else 1
        self.collectives[name, whole.nbytes * ranks] += 1
        self.sent += 1

    def _enter(self, storage: torch.UntypedStorage, operator: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.own or key in self._storages:
            return

        def leave(_: Any) -> None:
            del self._storages[key]
            self._live -= size

        self._storages[key] = weakref.ref(storage, leave)
        self._live += size
        if self._live > self.peak.bytes:
            self.peak = Peak(self._live, self.place, operator)
        if size > self.largest.bytes:
            self.largest = Peak(size, self.place, operator)


class _Walk(fx.Interpreter):
    """Runs a module node by node, so that the ledger knows where it is; a checkpointed region is one node."""

    def __init__(self, module: fx.GraphModule, ledger: Ledger, regions: list[_Region]) -> None:
        super().__init__(module)
        self.ledger, self.regions = ledger, regions

    def run_node(self, n: fx.Node) -> Any:
        """Notes the place."""
        if has_note(n):
            self.ledger.place = Place("forward", note(n).fqn)
        return super().run_node(n)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Descends into plain parts, calls regions."""
        part: Any = self.fetch_attr(target)
        if isinstance(part, fx.GraphModule):
            return _Walk(part, self.ledger, self.regions).run(*args)
        self.regions.append(_Region(part, self.ledger))
        return super().call_module(target, args, kwargs)


class _Region:
    """A checkpointed region: the graph inside runs once forward, and again in the backward."""

    def __init__(self, part: nn.Module, ledger: Ledger) -> None:
        self.body = next(module for module in part.modules() if isinstance(module, fx.GraphModule))
        noted = [node for node in self.body.graph.nodes if node.op == "call_function" and has_note(node)]
        self.number = next((note(node).recompute for node in noted), 0)
        self.home = Place("forward", _common([note(node).fqn for node in noted]))
        self.ledger, self.sent = ledger, list[int]()
        self._before, self._start = ledger.place, 0
        ledger.place = self.home
        # A recomputation is broken off as soon as nothing more is needed of it.
        self.handles = [
            self.body.register_forward_pre_hook(self._enter),
            self.body.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, *_: Any) -> None:
        self._before, self._start = self.ledger.place, self.ledger.sent
        self.ledger.place = replace(self.home, phase="recompute" if self.sent else "forward")

    def _leave(self, *_: Any) -> None:
        self.sent.append(self.ledger.sent - self._start)
        self.ledger.place = self._before

    def summary(self) -> Checkpointed:
        """How it went."""
        return Checkpointed(self.number, sum(self.sent[:1]), sum(self.sent[1:]))


def _common(modules: Sequence[str]) -> str:
    """The module that all of these are in."""
    parts = [module.split(".") for module in modules if module]
    found = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        found.append(level[0])
    return ".".join(found)


def measure(
    program: Program,
    lowered: Lowered,
    sizes: Mapping[str, int],
    device: torch.device,
    *,
    backward: bool = True,
) -> Measured:
    """Runs one step on fake tensors.

    Args:
        program: with property `local`, or without mesh axes.
        lowered: the program as a rank runs it, on `device`.
        sizes: values of the program's symbols.
        device: decides which kernels attention chooses, and with it what they keep.
        backward: whether to differentiate; else only `kept` is counted, which is quicker.

    Raises:
        InputError: an operator's result has a size that only its values tell.
    """
    run = apply_recompute(lowered.module)
    assert isinstance(run, fx.GraphModule)
    regions: list[_Region] = []
    kinds = {p.node: p.type for p in program.parameters}
    try:
        with FakeTensorMode(), torch.enable_grad():
            values = _placeholders(program, lowered, sizes, device)
            indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in lowered.indices]
            # Cast for this step or for an earlier one: they are there at its start.
            copies = [torch.empty_like(values[name], dtype=kinds[name].dtype) for name in lowered.copies]
            own = [*values.values(), *copies, *indices]
            ledger = Ledger({value.untyped_storage()._cdata for value in own})
            with ledger if backward else contextlib.nullcontext(), _packed(ledger) as packed:
                state = _random_state(program, device)  # kept by the module until the next step
                given = [{**values, **state}[name] for name in lowered.inputs]
                roots = _forward(program, lowered, _Walk(run, ledger, regions), (*given, *copies, *indices))
            # What belongs to outputs that nothing differentiates has gone with them.
            kept = tuple(entry for entry, storage in packed if storage() is not None)
            if backward and roots:
                ledger.place = Place("backward", "")
                with ledger:
                    torch.autograd.backward(*roots)
            gradients = frozenset(name for name, value in values.items() if value.grad is not None)
    except _UNCOUNTABLE as error:
        raise InputError(
            f"its memory cannot be counted without values: {str(error).splitlines()[0]}",
            where="report",
            remedy="keep sizes that depend on values out of the model",
        ) from error
    finally:
        for region in regions:
            for handle in region.handles:
                handle.remove()
    checkpointed = tuple(region.summary() for region in regions)
    return Measured(kept, gradients, ledger.peak, ledger.largest, dict(ledger.collectives), checkpointed)


def _placeholders(
    program: Program, lowered: Lowered, sizes: Mapping[str, int], device: torch.device
) -> dict[str, Tensor]:
    """A rank's parameters, as the module holds them, and the batch."""
    trained = {p.node for p in program.parameters if p.trainable}
    drawn = {entry.node for entry in program.inputs if entry.path == RNG_PATH}
    found = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in drawn:
            kind = tensor_type(node)
            shape = [evaluate(size, sizes) for size in local_shape(kind.shape, output_layouts(node)[0], program.axes)]
            wants = node.name in trained and kind.is_float
            dtype = held_type(program.plan, kind).dtype if node.name in lowered.copies else kind.dtype
            found[node.name] = torch.empty(shape, dtype=dtype, device=device, requires_grad=wants)
    return found


def _random_state(program: Program, device: torch.device) -> dict[str, Tensor]:
    """The state of the random numbers, which is made for each step."""
    drawn = [entry.node for entry in program.inputs if entry.path == RNG_PATH]
    return {name: torch.zeros(3, dtype=torch.int64, device=device) for name in drawn}


def _forward(
    program: Program, lowered: Lowered, run: _Walk, values: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]] | None:
    """What is differentiated, with upstream gradients: the loss, without one all outputs. Other outputs are let go."""
    results = run.run(*values)
    outputs = dict(zip(lowered.outputs, results, strict=True))
    roots = [value for name, value in outputs.items() if name == program.loss or not program.loss]
    roots = [value for value in roots if value.requires_grad]
    return (roots, [torch.ones_like(value) for value in roots]) if roots else None


@contextlib.contextmanager
def _packed(ledger: Ledger) -> Iterator[list[tuple[Kept, weakref.ref[Any]]]]:
    """Lists the storages that autograd saves meanwhile: each once, views with what they are views of."""
    found: list[tuple[Kept, weakref.ref[Any]]] = []
    # An address is a storage's own only as long as it lives.
    seen: dict[int, weakref.ref[Any]] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in ledger.own and (key not in seen or seen[key]() is None):
            seen[key] = weakref.ref(storage)
            found.append((Kept(ledger.place, storage.nbytes()), seen[key]))
        return value

    def unpack(value: Tensor) -> Tensor:
        return value

    with saved_tensors_hooks(pack, unpack):
        yield found
