"""Seconds of a training step on one rank, by the constants of `Cost`.

Enters: FLOPs, bytes and elements; or a step with the calls of its regions written out. Leaves: seconds of products, of
memory and of collectives; of a step what each collective takes, the products next to which it travels, and the seconds
for which a rank waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, prod
from typing import Any

import torch
from torch import fx

from fxpar.cost.communication import Collective, collectives, symbol_sizes
from fxpar.cost.flops import attention_backward_flops, computed_part, matmul_flops
from fxpar.ir.program import Program, ScalarType, note, output_layouts, output_types
from fxpar.ir.step import ONCE, PARAMETER, phase_of
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.layer_prefetch import move_between_layers
from fxpar.ops.registry import COMPOSITE_OF
from fxpar.plan.cost import Cost

aten = torch.ops.aten

# Forward, and gradients of both operands.
_PASSES = 3
# Bytes that the optimizer moves for each parameter: weight, gradient and two moments, in 4 bytes each.
_OPTIMIZER = 16
# An activation is written and read in the forward pass, and its gradient in the backward pass.
_ACCESSES = 4


def product_seconds(flops: float, part: float, cost: Cost) -> float:
    """Returns the seconds of a matrix product and its backward, of which a rank computes a part.

    Args:
        flops: of the whole forward.
    """
    return _PASSES * flops * part / cost.flops


def access_seconds(size: float, part: float, cost: Cost) -> float:
    """Returns the seconds in which an activation is stored and read, and its gradient.

    Args:
        size: bytes of the whole.
        part: what a rank holds of it.
    """
    return _ACCESSES * size * part / cost.memory


def optimizer_seconds(elements: float, part: float, cost: Cost) -> float:
    """Returns the seconds in which the optimizer moves a parameter.

    Args:
        elements: of the whole.
        part: what a rank holds of it.
    """
    return _OPTIMIZER * elements * part / cost.memory


def again_seconds(flops: float, moved: float, cost: Cost) -> float:
    """Returns the seconds in which an operation of the forward is computed once more.

    Args:
        flops: those of a rank.
        moved: bytes that a rank reads and writes.
    """
    return flops / cost.flops + moved / cost.memory


# By a ring of n ranks, each sends (n - 1)/n of the whole value's bytes in a round; the whole value is what an
# all-gather yields and what a reduction takes in (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
# clusters of workstations", JPDC 2009).


# An all-reduce is a reduce-scatter and an all-gather.
ROUNDS: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def sent(op: str, n: int) -> float:
    """Returns the bytes that each of n ranks sends for each byte of the whole value."""
    return ROUNDS[op] * (n - 1) / n


def collective_seconds(op: str, n: int, size: float, cost: Cost, latency: float) -> float:
    """Returns the seconds of a collective whose every round starts anew.

    Args:
        size: bytes of the whole value.
        latency: seconds before a round's first byte.
    """
    return ROUNDS[op] * (latency + (n - 1) / n * size / cost.bandwidth)


# A compiled program stores these results and reads them again. Others are computed on the fly inside a kernel;
# counting each of them would make a norm that is spelt out dearer than the same norm as one operation.


# Operations that a compiler does not merge with their neighbours besides matrix products.
_KERNELS: Set[object] = frozenset(
    {
        aten.layer_norm.default,
        aten.native_layer_norm.default,
        aten.rms_norm.default,
        aten.group_norm.default,
        aten.dropout.default,
        *COMPOSITE_OF,
    }
)
_VIEWS: Set[object] = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
    }
)


def materialised(program: Program, products: Set[fx.Node], weights: Set[fx.Node]) -> set[fx.Node]:
    """Returns the nodes whose values are stored.

    They are results and operands of products, norms, dropout, lookups and losses, and what several operations read
    (residual streams).

    Args:
        products: matrix products and attention.
        weights: values made from parameters alone; they are none of these.
    """
    stored = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or node in weights or node.target in _VIEWS:
            continue
        if not any(kind.is_float for kind in output_types(node)):
            continue
        readers = _readers(node)
        kernels = [other for other in (node, *readers) if other in products or other.target in _KERNELS]
        if kernels or len(readers) > 1:
            stored.add(node)
    return stored


def _readers(node: fx.Node) -> set[fx.Node]:
    """Returns the operations that read a value, also through views of it."""
    readers, pending = set(), list(node.users)
    for user in pending:
        if user.target in _VIEWS:
            pending.extend(user.users)
        elif user.op == "call_function":
            readers.add(user)
    return readers


# Collectives, and matrix products in waves of multiprocessors; anything else takes next to nothing.


# Products whose results are cut into tiles, and those of them whose leading dimensions are a number of matrices.
_BATCHED = ("aten.bmm.default", "aten.baddbmm.default")
_ATTENTION = ("aten.scaled_dot_product_attention.default", "fxpar.attention_forward")
_OF_TILES = ("aten.mm.default", "aten.addmm.default", "aten.linear.default", *_BATCHED, *_ATTENTION)


@dataclass(frozen=True)
class Sending:
    """A collective, and the seconds that it takes alone.

    Attributes:
        hideable: of its seconds those in which products can run alongside it: all of what copy engines carry, which of
            sums over more than two ranks is the first half of the way, none of what is sent in one shot, and of what
            the process group sends the part `Cost.hidden`.
    """

    collective: Collective
    seconds: float
    hideable: float


@dataclass(frozen=True)
class Estimates:
    """Seconds on a rank.

    Attributes:
        sends: of the nodes that communicate, by name; most have one collective.
        products: of matrix products and attention.
    """

    sends: Mapping[str, Sequence[Sending]]
    products: Mapping[fx.Node, float]


def estimates(program: Program, sizes: Mapping[str, int] | None = None) -> Estimates:
    """Returns the seconds that the nodes of a step take.

    Args:
        program: with property `local` and without calls of regions.
        sizes: of the inputs by symbol; the example's by default.
    """
    sends: dict[str, list[Sending]] = {}
    notes = {node.name: note(node) for node in program.graph.nodes if node.op == "call_function"}
    for collective in collectives(program, sizes):
        how = notes[collective.node]
        priced = sending(program, collective, copies=bool(how.buffer), one_shot=how.one_shot)
        sends.setdefault(collective.node, []).append(priced)
    values = symbol_sizes(program, sizes)
    rate = program.plan.cost.flops
    products = {
        node: evaluate(flops, values) * computed_part(node, program.axes) / (rate * filled_part(program, node, values))
        for node, flops in matmul_flops(program)
    }
    return Estimates(sends, products)


def _with_attention_backward(seconds: Estimates, program: Program, sizes: Mapping[str, int] | None) -> Estimates:
    """Returns the seconds with those of the backward of attention, which no pass moves or cuts into chunks."""
    values, rate = symbol_sizes(program, sizes), program.plan.cost.flops
    more = {
        node: evaluate(flops, values) * computed_part(node, program.axes) / rate
        for node, flops in attention_backward_flops(program)
    }
    return replace(seconds, products={**seconds.products, **more})


def sending(program: Program, sent: Collective, *, copies: bool, one_shot: bool = False) -> Sending:
    """Prices a collective: by copies or in one shot, or through the process group."""
    axes = sent.axis.split("-")
    cost, ranks = program.plan.cost.on(axes), prod(program.axes[axis] for axis in axes)
    if not copies:
        seconds = collective_seconds(sent.op, ranks, sent.bytes, cost, cost.latency)
        return Sending(sent, seconds, cost.hidden * seconds)
    alone = collective_seconds(sent.op, ranks, sent.bytes * sent.part, cost, 0.0)
    if one_shot:
        return Sending(sent, alone + cost.latency, 0.0)
    carried = alone / 2 if ranks > 2 and sent.op == "all_reduce" else alone
    return Sending(sent, alone + cost.copy_latency, carried + cost.copy_latency)


def filled_part(program: Program, node: fx.Node, values: Mapping[str, int], chunks: int = 1) -> float:
    """Returns the part of its time in which a product computes; 1 where it is neither of two matrices nor attention.

    Args:
        values: of the symbols, as of `fxpar.cost.communication.symbol_sizes`.
        chunks: in which its rows are computed one after the other.
    """
    target = str(node.target)
    if target not in _OF_TILES:
        return 1.0
    shape = local_shape(output_types(node)[0].shape, output_layouts(node)[0], program.axes)
    *leading, rows, columns = (1, *(evaluate(size, values) for size in shape))
    matrices = prod(leading)
    if target in _ATTENTION:  # a matrix for each head of each row of the batch
        matrices = ceil(matrices / chunks)
    elif target in _BATCHED:
        rows = ceil(rows / chunks)
    else:
        matrices, rows = 1, ceil(matrices * rows / chunks)
    return filled(matrices, rows, columns, program.plan.cost.multiprocessors)


# Rows and columns of a tile, and its rate over that of the largest.
TILES: Mapping[tuple[int, int], float] = {
    (128, 256): 1.0,
    (256, 128): 1.0,
    (192, 192): 1.0,
    (128, 192): 0.97,
    (192, 128): 0.97,
    (128, 128): 0.9,
    (64, 256): 0.85,
    (256, 64): 0.85,
    (64, 128): 0.75,
    (128, 64): 0.75,
    (64, 64): 0.65,
}


@lru_cache(maxsize=4096)
def filled(matrices: int, rows: int, columns: int, multiprocessors: int) -> float:
    """Returns the part of its time in which a product computes, by the tiles with which that is most; at most 1.

    Args:
        matrices: results of a batched product, each of `rows` by `columns` elements.
        multiprocessors: of the GPU; 1 where there are no waves.
    """
    elements = matrices * rows * columns
    if multiprocessors == 1 or not elements:
        return 1.0
    return max(
        rate * elements / (_rounds(matrices * ceil(rows / high) * ceil(columns / wide), multiprocessors) * high * wide)
        for (high, wide), rate in TILES.items()
    )


def _rounds(tiles: int, multiprocessors: int) -> int:
    """Returns for how many tiles there is time in as many waves as these need."""
    # The last wave takes as long as a full one: 133 tiles on the 132 multiprocessors of an H100 take the time of 264.
    return ceil(tiles / multiprocessors) * multiprocessors


# Time passes in matrix products and for collectives; those of an axis travel one after the other, and each is waited
# for in front of its first reader, at the latest at the end of its run (`fxpar.passes.overlap`). What of a collective
# cannot be hidden, since its kernel takes the products' multiprocessors, passes where it starts.


@dataclass(frozen=True)
class Travel:
    """A collective on its way.

    Attributes:
        collective: what is sent.
        seconds: by the plan's constants.
        beside: names of the products between its start and its first reader, with the seconds of each.
        exposed: seconds for which a rank waits for it.
        start: when its first byte is sent, in seconds from the start of the step.
    """

    collective: Collective
    seconds: float
    beside: tuple[tuple[str, float], ...]
    exposed: float
    start: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns a plain mapping."""
        beside = [{"node": name, "seconds": seconds} for name, seconds in self.beside]
        return {**self.collective.to_json(), "seconds": self.seconds, "beside": beside, "exposed": self.exposed}


@dataclass(frozen=True)
class StepTimes:
    """When a rank computes and sends, in seconds from the start of a step.

    Attributes:
        travels: all collectives, in the order in which they start.
        products: of each product by name, when it starts and how long it takes.
        before: seconds in front of the forward, once a step, however many microbatches it has.
        forward: when the forward ends.
        after: seconds of what is made of gradients once a step.
        seconds: when the step ends.
    """

    travels: tuple[Travel, ...]
    products: Mapping[str, tuple[float, float]]
    before: float
    forward: float
    after: float
    seconds: float

    @property
    def of_microbatch(self) -> tuple[float, float]:
        """Returns the seconds of a microbatch's forward and of its backward."""
        return self.forward - self.before, self.seconds - self.forward - self.after


def step_times(program: Program, sizes: Mapping[str, int] | None = None) -> StepTimes:
    """Returns when a step computes and sends.

    Args:
        program: a step, with property `local` and without calls of regions.
        sizes: of the inputs by symbol; the example's by default.
    """
    program = program.copy()
    moved = move_between_layers(program)
    seconds = _with_attention_backward(estimates(program, sizes), program, sizes)
    clock = _Clock(seconds, frozenset(moved))
    passed = dict.fromkeys((ONCE, "", PARAMETER), 0.0)
    forward = 0.0
    for run in _runs(program):
        began, phase = clock.now, phase_of(run[0])
        clock.run(run)
        passed[phase] = passed.get(phase, 0.0) + clock.now - began
        forward = clock.now if phase in (ONCE, "") else forward
    began = clock.now
    clock.finish()
    after = passed[PARAMETER] + clock.now - began
    return StepTimes(tuple(clock.done), clock.products, passed[ONCE], forward, after, clock.now)


def travels(program: Program, sizes: Mapping[str, int] | None = None) -> list[Travel]:
    """Returns all collectives of a step in the order in which they start; arguments as of `step_times`."""
    return list(step_times(program, sizes).travels)


def _runs(program: Program) -> Iterator[list[fx.Node]]:
    """Yields what is computed at a stretch, in order: each phase, cut at the boundaries of calls."""
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and not isinstance(note(n).type, ScalarType)]
    for _, run in itertools.groupby(nodes, key=lambda node: (note(node).phase, note(node).region)):
        yield list(run)


@dataclass
class _Clock:
    """The time of a rank and of what travels, while runs are computed in order.

    Attributes:
        moved: what travels beside other layers than its own.
        products: as in `StepTimes`.
        now: seconds from the start of the step.
    """

    seconds: Estimates
    moved: Set[fx.Node]
    done: list[Travel] = field(default_factory=list)
    products: dict[str, tuple[float, float]] = field(default_factory=dict)
    now: float = 0.0
    _free: dict[str, float] = field(default_factory=dict)
    _under_way: dict[fx.Node, int] = field(default_factory=dict)
    _ends: list[float] = field(default_factory=list)

    def run(self, order: Sequence[fx.Node]) -> None:
        for node in order:
            for read in node.all_input_nodes:
                self._wait(read)
            self._start(node)
            if node in self.seconds.products:
                self._compute(node, self.seconds.products[node])
        for node in list(self._under_way):
            if phase_of(node) not in (ONCE, PARAMETER) and node not in self.moved:
                self._wait(node)

    def finish(self) -> None:
        for node in list(self._under_way):
            self._wait(node)

    def _start(self, node: fx.Node) -> None:
        for sending in self.seconds.sends.get(node.name, ()):
            self._wait(node)  # of several collectives of a node each needs the one before
            one = sending.collective
            start = max(self.now, self._free.get(one.axis, 0.0))
            end = self._free[one.axis] = start + sending.seconds
            self._under_way[node] = len(self.done)
            stalled = sending.seconds - sending.hideable
            self.now += stalled
            self.done.append(Travel(one, sending.seconds, (), stalled, start))
            self._ends.append(end)

    def _compute(self, node: fx.Node, seconds: float) -> None:
        self.products[node.name] = self.now, seconds
        self.now += seconds
        for index in self._under_way.values():
            one = self.done[index]
            # Not by `replace`, which takes longer: a sum of gradients is beside thousands of products.
            beside = (*one.beside, (node.name, seconds))
            self.done[index] = Travel(one.collective, one.seconds, beside, one.exposed, one.start)

    def _wait(self, node: fx.Node) -> None:
        index = self._under_way.pop(node, None)
        if index is None:
            return
        one, waited = self.done[index], max(0.0, self._ends[index] - self.now)
        self.now += waited
        self.done[index] = replace(one, exposed=one.exposed + waited)
