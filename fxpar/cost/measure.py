"""One training step without memory: what it keeps for the backward, what it holds at most, what it sends.

Enters: a lowered step and sizes. Leaves: `Measured`. The very operators that a rank runs are run on fake tensors, which
have types, shapes, strides and storages but no elements, so that the counts are those of eager execution by
construction. Collectives of fake tensors talk to nobody: no process group is needed. What a kernel uses inside, and the
allocator's rounding, come on top. For GPUs on a machine without one, the tensors are those of the meta device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.errors import InputError
from fxpar.ir.program import Program, ScalarType, has_note, note, output_layouts, tensor_type
from fxpar.ir.step import RECOMPUTE, RNG_PATH, output_of, parameter_gradients
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.lower import Lowered

_UNCOUNTABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# What a collective moves in the terms of `fxpar.cost.communication`: the operand, or what all ranks' operands make up.
_NAMES: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class StepLocation:
    """Where a step is: phase (forward, backward, recompute, parameter) and module."""

    phase: str
    module: str


@dataclass(frozen=True)
class Kept:
    """A storage that is kept for the backward: its bytes, and where it was made."""

    place: StepLocation
    bytes: int


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes are alive, besides parameters, buffers and inputs; and the operator that ran."""

    bytes: int
    place: StepLocation
    operator: str


@dataclass(frozen=True)
class Measured:
    """One step on one rank.

    Attributes:
        saved: in the order in which they are made.
        gradients: names of the placeholders that have a gradient afterwards.
        peaks: of each phase in the order in which they begin, gradients included, which do not exist at the step's
            start.
        largest: the largest storage that is made, where and by which operator.
        collectives: how often, by name and bytes of the whole value.
    """

    saved: tuple[Kept, ...]
    gradients: frozenset[str]
    peaks: tuple[Peak, ...]
    largest: Peak
    collectives: Mapping[tuple[str, int], int]

    @property
    def peak(self) -> Peak:
        """Of the whole step."""
        nothing = Peak(0, StepLocation("forward", ""), "")
        return max(self.peaks, key=lambda peak: peak.bytes, default=nothing)


def stand_in(device: torch.device) -> torch.device:
    """The device of tensors that are counted in place of those of `device`: PyTorch needs a GPU to fake one of its."""
    return torch.device("meta") if device.type == "cuda" and not torch.cuda.is_available() else device


class Ledger(TorchDispatchMode):
    """Counts live bytes and collectives of everything that runs under it; `own` are storages that do not count."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = storages
        self.place = StepLocation("forward", "")
        self.peaks: dict[str, Peak] = {}
        self.largest = Peak(0, self.place, "")
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
        known = self.peaks.get(self.place.phase)
        if known is None or self._live > known.bytes:
            self.peaks[self.place.phase] = Peak(self._live, self.place, operator)
        if size > self.largest.bytes:
            self.largest = Peak(size, self.place, operator)


class _Walk(fx.Interpreter):
    """Runs a lowered step node by node, so that the ledger knows where it is, and frees what nobody needs any more.

    Attributes:
        saved: what is there for the backward where the forward ends.
    """

    def __init__(self, module: fx.GraphModule, ledger: Ledger, *, backward: bool) -> None:
        super().__init__(module)
        self.ledger, self.saved, self._backward = ledger, list[Kept](), backward
        self._made: dict[int, tuple[weakref.ref[Any], StepLocation]] = {}
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        # Numbers of the backward may stand in front of the forward.
        nodes = [node for node in nodes if has_note(node) and not isinstance(note(node).type, ScalarType)]
        self._first = next((node for node in nodes if note(node).phase), None)

    def run_node(self, n: fx.Node) -> Any:
        """Notes the place."""
        if n is self._first:
            self._keep()
            if not self._backward:
                raise _Stopped
        if has_note(n) and n.op == "call_function":
            node_note = note(n)
            phase = RECOMPUTE if node_note.origin == RECOMPUTE and node_note.phase else node_note.phase or "forward"
            self.ledger.place = StepLocation(phase, node_note.fqn)
        output = super().run_node(n)
        if n.op == "call_function":
            for value in pytree.tree_leaves(output):
                if isinstance(value, Tensor):
                    storage = value.untyped_storage()
                    known = self._made.get(storage._cdata)
                    if known is None or known[0]() is None:  # an address is a storage's own only as long as it lives
                        self._made[storage._cdata] = weakref.ref(storage), self.ledger.place
        return output

    def _keep(self) -> None:
        """Lists the storages that are alive and that the backward reads: each once, views with what they are of."""
        seen: set[int] = set()
        for node, value in self.env.items():
            if node.op == "call_function" and not has_note(node):
                continue  # a number of the rank's indices, which the backward makes itself
            is_read = not (has_note(node) and note(node).phase)  # a tangent is none of the forward's
            is_read = is_read and any(has_note(user) and note(user).phase for user in node.users)
            for leaf in pytree.tree_leaves(value) if is_read else ():
                key = leaf.untyped_storage()._cdata if isinstance(leaf, Tensor) else None
                if key is not None and key not in self.ledger.own and key not in seen:
                    seen.add(key)
                    place = (
                        self._made[key][1] if key in self._made else StepLocation("forward", "")
                    )  # else the random state
                    self.saved.append(Kept(place, leaf.untyped_storage().nbytes()))


class _Stopped(Exception):
    """The forward has ended."""


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
        program: a step, with property `local`, or without mesh axes; or a forward alone.
        lowered: the program as a rank runs it, on the `stand_in` of `device`.
        sizes: values of the program's symbols.
        device: decides which kernels attention chooses, and with it what they keep.
        backward: whether to differentiate; else only `kept` is counted, which is quicker.

    Raises:
        InputError: an operator's result has a size that only its values tell.
    """
    device = stand_in(device)
    try:
        with FakeTensorMode(), torch.no_grad():
            values = _placeholders(program, sizes, device)
            indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in lowered.places]
            tangents = {entry.node for entry in program.inputs if output_of(entry.path)}  # made for each step
            inputs = [*(value for name, value in values.items() if name not in tangents), *indices]
            ledger = Ledger({value.untyped_storage()._cdata for value in inputs})
            walk = _Walk(lowered.module, ledger, backward=backward)
            with ledger if backward else contextlib.nullcontext(), contextlib.suppress(_Stopped):
                state = _random_state(program, device)  # kept by the module until the next step
                state |= {name: torch.empty_like(values[name]) for name in tangents}
                walk.run(*[{**values, **state}[name] for name in lowered.inputs], *indices)
    except _UNCOUNTABLE as error:
        raise InputError(
            f"its memory cannot be counted without values: {str(error).splitlines()[0]}",
            where="report",
            remedy="keep sizes that depend on values out of the model",
        ) from error
    trained = {p.node for p in program.parameters if p.fqn in parameter_gradients(program)}
    return Measured(
        tuple(walk.saved), frozenset(trained), tuple(ledger.peaks.values()), ledger.largest, dict(ledger.collectives)
    )


def _placeholders(program: Program, sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """A rank's parameters, as programs take them, the batch and tangents."""
    drawn = {entry.node for entry in program.inputs if entry.path == RNG_PATH}
    tensors = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in drawn:
            kind = tensor_type(node)
            shape = [evaluate(size, sizes) for size in local_shape(kind.shape, output_layouts(node)[0], program.axes)]
            tensors[node.name] = torch.empty(shape, dtype=kind.dtype, device=device)
    return tensors


def _random_state(program: Program, device: torch.device) -> dict[str, Tensor]:
    """The state of the random numbers, which is made for each step."""
    drawn = [entry.node for entry in program.inputs if entry.path == RNG_PATH]
    return {name: torch.zeros(3, dtype=torch.int64, device=device) for name in drawn}
