"""Programs on fake tensors: bytes that a rank holds, what is kept for the backward, what a step sends.

Enters: a program as all ranks run it, and sizes. Leaves: `Storages` of a forward, `Measured` of a step. The very
operators that a rank runs are run on fake tensors, which have types, shapes, strides and storages but no elements, so
that the counts are those of eager execution by construction. Collectives of fake tensors talk to nobody: no process
group is needed. What a kernel uses inside, and the allocator's rounding, come on top. For GPUs on a machine without
one, the tensors are those of the meta device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.cost.communication import symbol_sizes
from fxpar.cost.figures import Moment
from fxpar.errors import InputError
from fxpar.ir.grad_flow import plain
from fxpar.ir.program import Program, ScalarType, has_note, note, output_layouts, tensor_type
from fxpar.ir.step import ONCE, RECOMPUTE, RNG_PATH, output_of, parameter_gradients, phase_of
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.counter import without_bits
from fxpar.ops.lower import Lowered, lower
from fxpar.ops.lowering_context import Identity
from fxpar.ops.process_group import Group

_UNCOUNTABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextlib.contextmanager
def _on_fakes(reason: str, where: str, remedy: str) -> Iterator[None]:
    """Has operators run on fake tensors; refuses what has a size that only values tell, for a reason."""
    try:
        with FakeTensorMode(), torch.no_grad(), without_bits(counts_memory=False):
            yield
    except _UNCOUNTABLE as error:
        text = f"{reason} cannot be counted without values: {str(error).splitlines()[0]}"
        raise InputError(text, where=where, remedy=remedy) from error


def _placeholders(program: Program, sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Returns what a rank has of all inputs and parameters, as programs take them, by name of the node."""
    tensors = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            kind = tensor_type(node)
            shape = [evaluate(size, sizes) for size in local_shape(kind.shape, output_layouts(node)[0], program.axes)]
            tensors[node.name] = torch.empty(shape, dtype=kind.dtype, device=device)
    return tensors


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


# ---------------------------------------------------------------------- forwards


@dataclass(frozen=True)
class Storages:
    """Of one rank, by name of the node.

    Attributes:
        of: numbers of the storages in which a value is, without those of parameters and inputs.
        bytes: of each storage.
        sizes: bytes of the values themselves, those of parameters and inputs too.
    """

    of: Mapping[str, frozenset[int]]
    bytes: tuple[int, ...]
    sizes: Mapping[str, int]

    def total(self, storages: Iterable[int]) -> int:
        """Returns bytes of several storages."""
        return sum(self.bytes[storage] for storage in storages)


def storages(forward: Program, owned: frozenset[str]) -> Storages:
    """Returns the storages of a forward, for inputs of the example's sizes.

    Args:
        forward: with property `local`, or without mesh axes.
        owned: names of placeholders that are kept as values of the program are, and not by the caller.

    Raises:
        InputError: a result has a size that only values tell.
    """
    joined = {str(node.kwargs["axis"]) for node in forward.graph.nodes if "axis" in node.kwargs}
    groups = {name: Group(name, len(forward.mesh.groups(name)[0])) for name in (*forward.axes, *sorted(joined))}
    lowered = lower(forward, groups)
    remedy = "keep sizes that depend on values out of the model, or choose Recompute('none')"
    # The address of a storage is its own while it lives.
    run = fx.Interpreter(lowered.module, garbage_collect_values=False)
    with _on_fakes("what is kept for the backward", "recompute", remedy):
        inputs = _placeholders(forward, symbol_sizes(forward, None), torch.device("cpu"))
        indices = [torch.zeros((), dtype=torch.int64) for _ in lowered.places]
        run.run(*(inputs[name] for name in lowered.inputs), *indices)
    values = {node.name: _tensors(value) for node, value in run.env.items()}
    return _numbered(values, {n.name for n in lowered.module.graph.nodes if n.op == "placeholder"} - owned)


def _numbered(values: Mapping[str, list[Tensor]], foreign: set[str]) -> Storages:
    without = {tensor.untyped_storage()._cdata for name in foreign for tensor in values[name]}
    known: dict[int, int] = {}
    size: list[int] = []
    of: dict[str, frozenset[int]] = {}
    for name, tensors in values.items():
        numbers = set()
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key: Any = storage._cdata
            if key not in without:
                if key not in known:
                    known[key] = len(size)
                    size.append(storage.nbytes())
                numbers.add(known[key])
        of[name] = frozenset(numbers)
    return Storages(of, tuple(size), {name: sum(tensor.nbytes for tensor in leaves) for name, leaves in values.items()})


# What a collective moves in the terms of `fxpar.cost.communication`: the operand, or what all ranks' operands make up.
_NAMES: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class SavedStorage:
    """A storage that is kept for the backward: its bytes, and the module in which it was made."""

    module: str
    bytes: int


@dataclass(frozen=True)
class Measured:
    """One step on one rank.

    Attributes:
        saved: in the order in which they are made.
        gradients: names of the placeholders that have a gradient afterwards.
        peaks: when most bytes are alive in each phase, in the order in which they begin, besides parameters, buffers
            and inputs; gradients included, which do not exist at the step's start.
        largest: the largest storage that is made, where and by which operator.
        collectives: how often, by name and bytes of the whole value.
        live: of each operation in order its phase, and the most bytes that are alive while it runs, counted as `peaks`.
    """

    saved: tuple[SavedStorage, ...]
    gradients: frozenset[str]
    peaks: tuple[Moment, ...]
    largest: Moment
    collectives: Mapping[tuple[str, int], int]
    live: tuple[tuple[str, int], ...] = ()

    @property
    def peak(self) -> Moment:
        """Returns the moment of the whole step."""
        nothing = Moment(0, "forward", "", "")
        return max(self.peaks, key=lambda peak: peak.bytes, default=nothing)


def stand_in(device: torch.device) -> torch.device:
    """Returns the device of tensors that are counted for `device`: PyTorch needs a GPU to fake one of its."""
    return torch.device("meta") if device.type == "cuda" and not torch.cuda.is_available() else device


class Ledger(TorchDispatchMode):
    """Counts live bytes and collectives of everything that runs under it; `own` are storages that do not count.

    Attributes:
        highest: the most bytes alive since `restart`.
    """

    def __init__(self, storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = storages
        self.phase, self.module = "forward", ""
        self.peaks: dict[str, Moment] = {}
        self.largest = Moment(0, "forward", "", "")
        self.collectives: Counter[tuple[str, int]] = Counter()
        self.sent = 0
        self.highest = 0
        self._live = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns runs an operator and enters its results."""
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as on devices, where it is the tensor itself
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self._send(func, args, out)
        for leaf in _tensors(out):
            self._enter(leaf.untyped_storage(), str(func))
        return out

    def restart(self) -> None:
        """Counts the `highest` from here on."""
        self.highest = self._live

    def _send(self, func: Any, args: Any, out: Any) -> None:
        name = _NAMES.get(func._opname.removesuffix("_coalesced"))
        if name is None:
            return
        whole = out if name == "all_gather" else args[0]
        ranks = len(args[1]) if name == "all_to_all" else 1
        for value in _tensors(whole):
            self.collectives[name, value.nbytes * ranks] += 1
            self.sent += 1

    def leaves_out(self, key: int) -> bool:
        """Returns whether a storage does not count."""
        return key in self.own

    def _enter(self, storage: torch.UntypedStorage, operator: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if self.leaves_out(key) or key in self._storages:
            return
        if self.phase == ONCE:  # whole parameters, which are listed apart
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key))
            return

        def leave(_: Any) -> None:
            del self._storages[key]
            self._live -= size

        # The reference dies with the last tensor in the storage, which is when its bytes are free.
        self._storages[key] = weakref.ref(storage, leave)
        self._live += size
        self.highest = max(self.highest, self._live)
        known = self.peaks.get(self.phase)
        if known is None or self._live > known.bytes:
            self.peaks[self.phase] = Moment(self._live, self.phase, self.module, operator)
        if size > self.largest.bytes:
            self.largest = Moment(size, self.phase, self.module, operator)


class _Walk(fx.Interpreter):
    """Runs a lowered step node by node, so that the ledger knows where it is, and frees what nobody needs any more.

    Attributes:
        saved: what is there for the backward where the forward ends.
        live: as in `Measured`.
    """

    def __init__(self, module: fx.GraphModule, ledger: Ledger, *, backward: bool) -> None:
        super().__init__(module)
        self.ledger, self.saved, self._backward = ledger, list[SavedStorage](), backward
        self.live: list[tuple[str, int]] = []
        self._made: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._gathered: dict[int, Any] = {}
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
            phase = RECOMPUTE if node_note.origin == RECOMPUTE and node_note.phase else phase_of(n) or "forward"
            self.ledger.phase, self.ledger.module = phase, node_note.fqn
        self.ledger.restart()
        output = super().run_node(n)
        tensors = _tensors(output) if n.op == "call_function" else []
        if tensors:  # numbers of the backward may stand in front of the forward
            self.live.append((self.ledger.phase, self.ledger.highest))
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if has_note(n) and phase_of(n) == ONCE:
                    self._gathered[storage._cdata] = storage  # while it lives no other has its address
                known = self._made.get(storage._cdata)
                if known is None or known[0]() is None:  # an address is a storage's own only as long as it lives
                    self._made[storage._cdata] = weakref.ref(storage), self.ledger.module
        return output

    def _keep(self) -> None:
        """Lists the storages that are alive and that the backward reads: each once, views with what they are of."""
        seen: set[int] = set()
        for node, value in self.env.items():
            if node.op == "call_function" and not has_note(node):
                continue  # a number of the rank's indices, which the backward makes itself
            is_read = not (has_note(node) and note(node).phase)  # a tangent is none of the forward's
            is_read = is_read and any(has_note(user) and note(user).phase for user in node.users)
            for leaf in _tensors(value) if is_read else ():
                key = leaf.untyped_storage()._cdata
                if not self.ledger.leaves_out(key) and key not in seen and key not in self._gathered:
                    seen.add(key)
                    # What no operator made is the random state.
                    module = self._made[key][1] if key in self._made else ""
                    self.saved.append(SavedStorage(module, leaf.untyped_storage().nbytes()))


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
    with _on_fakes("its memory", "report", "keep sizes that depend on values out of the model"):
        values = _placeholders(program, sizes, device)
        indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in lowered.places]
        # Tangents and the state of the random numbers are made for each step.
        fresh = {entry.node for entry in program.inputs if output_of(entry.path) or entry.path == RNG_PATH}
        owned = [*(value for name, value in values.items() if name not in fresh), *indices]
        ledger = Ledger({value.untyped_storage()._cdata for value in owned})
        walk = _Walk(lowered.module, ledger, backward=backward)
        counted = ledger if backward else contextlib.nullcontext()
        with counted, without_bits(counts_memory=backward), contextlib.suppress(_Stopped):
            values |= {name: torch.empty_like(values[name]) for name in fresh}
            walk.run(*[values[name] for name in lowered.inputs], *indices)
    return Measured(
        tuple(walk.saved),
        _trained(program),
        tuple(ledger.peaks.values()),
        ledger.largest,
        dict(ledger.collectives),
        tuple(walk.live),
    )


def _trained(program: Program) -> frozenset[str]:
    known = parameter_gradients(program)
    return frozenset(p.node for p in program.parameters if p.fqn in known)


@dataclass
class Measurer:
    """Measures steps of one plan: of those that do the same, as stages of equal layers do, the first alone is run."""

    _known: dict[Hashable, tuple[tuple[str, ...], Measured]] = field(default_factory=dict)

    def of(self, program: Program, lowered: Lowered, device: torch.device) -> Callable[..., Measured]:
        """Returns what measures a step, as `measure` does, for sizes and with or without its backward."""
        form, modules = _form(program, lowered)

        def measured(sizes: Mapping[str, int], *, backward: bool = True) -> Measured:
            key = (form, device, tuple(sizes.items()), backward)
            if key not in self._known:
                self._known[key] = modules, measure(program, lowered, sizes, device, backward=backward)
            names, one = self._known[key]
            return one if names == modules else _renamed(one, dict(zip(names, modules, strict=True)), program)

        return measured


def _form(program: Program, lowered: Lowered) -> tuple[Hashable, tuple[str, ...]]:
    """Returns all of a step that decides what is measured, without names, and its modules in order."""
    modules: dict[str, int] = {"": 0}
    numbers: dict[fx.Node, int] = {}
    lines: list[Hashable] = []
    for node in lowered.module.graph.nodes:
        noted: Hashable = None
        if has_note(node):
            one = note(node)
            module = modules.setdefault(one.fqn, len(modules))
            noted = (one.type, one.phase, one.origin == RECOMPUTE, module)
        # What a node of another kind runs is known by its name in the module.
        target = object() if node.op in ("call_module", "get_attr") else "" if node.op == "placeholder" else node.target
        arguments = map_aggregate((node.args, node.kwargs), lambda one: Identity() if type(one) is Identity else one)
        lines.append((node.op, target, plain(arguments, numbers.__getitem__), noted))
        numbers[node] = len(numbers)
    fresh = {entry.node for entry in program.inputs if output_of(entry.path) or entry.path == RNG_PATH}
    taken = [(tensor_type(n), output_layouts(n), n.name in fresh) for n in map(program.node, lowered.inputs)]
    form = (tuple(lines), tuple(taken), lowered.indices, lowered.takes_rows, tuple(program.axes.items()))
    try:
        hash(form)
    except TypeError:  # what no key can be made of is like nothing else
        return object(), tuple(modules)
    return form, tuple(modules)


def _renamed(one: Measured, names: Mapping[str, str], program: Program) -> Measured:
    """Returns what was measured of a step as that of another one, whose modules have other names."""

    def moment(at: Moment) -> Moment:
        return replace(at, module=names[at.module])

    saved = tuple(SavedStorage(names[storage.module], storage.bytes) for storage in one.saved)
    peaks = tuple(map(moment, one.peaks))
    return replace(one, saved=saved, gradients=_trained(program), peaks=peaks, largest=moment(one.largest))
