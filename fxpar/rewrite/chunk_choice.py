"""What of a step is computed in chunks of rows, in how many, and what that saves.

Enters: a step of one rank, and the symbol of its rows. Leaves: the nodes that are computed in chunks; and by number of
chunks and phase, the seconds for which ranks wait, and those that chunks cost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod

import sympy
from torch import fx

from fxpar.cost.communication import Collective, collectives, symbol_sizes
from fxpar.cost.flops import computed_part, matmul_flops
from fxpar.cost.seconds import Sending, filled_part, materialised, sending
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.operators import axes_of
from fxpar.ir.program import Program, ScalarType, has_note, note, operands, output_types
from fxpar.ir.step import PARAMETER
from fxpar.layout.symbolic_sizes import divide, evaluate, names
from fxpar.mesh.axes import PURPOSES, Cuts
from fxpar.ops.attention import attention_backward
from fxpar.ops.collectives import COERCION_OF
from fxpar.ops.token_chunks import SUMMED
from fxpar.rewrite.row_cuts import RowCut, RowCuts
from fxpar.signatures.op_call import SIZED


@dataclass(frozen=True)
class Chosen:
    """What is computed in chunks.

    Attributes:
        cuts: how, by node.
        sends: those that communicate.
        products: matrix products that are no sums over rows.
        late: sums over rows, and what leads up to them alone.
    """

    cuts: Mapping[fx.Node, RowCut]
    sends: frozenset[fx.Node]
    products: frozenset[fx.Node]
    late: frozenset[fx.Node]


class ChunkChoice:
    """What of a program is computed in chunks, however many these are."""

    def __init__(self, program: Program, rows: sympy.Symbol) -> None:
        self._program, self._rows = program, rows
        self._nodes = [n for n in program.graph.nodes if n.op == "call_function"]
        weights = weights_of(program.graph, [program.node(p.node) for p in program.parameters])
        products = [node for node, _ in matmul_flops(program)]
        mixing = {node for node in products if weights.isdisjoint(operands(node))}
        mixing.update(node for node in self._nodes if node.target is attention_backward)
        rules = RowCuts(program, rows, _SOME)
        self._cuts: dict[fx.Node, RowCut] = {}
        known: dict[fx.Node, Sequence[int | None]] = {}
        for node in program.graph.nodes:
            if node.op == "output" or not has_note(node) or isinstance(note(node).type, ScalarType):
                continue
            whole = node in weights or note(node).phase == PARAMETER or not self._is_sized(node)
            whole = whole or (node.target is operator.getitem and node.args[0] not in self._cuts)
            cut = None if whole else rules.of(node, known)
            if cut is not None and not _is_sum(cut) and node in mixing:
                cut = None
            if cut is not None:
                self._cuts[node] = cut
            known[node] = rules.rows_of(node) if cut is None else cut.outputs
        sent = {collective.node for collective in collectives(program)}
        self._sends = {n for n in self._cuts if n.name in sent and n.target in COERCION_OF and _is_of_layer(n)}
        self._products = {node for node in products if node in self._cuts and not _is_sum(self._cuts[node])}
        self._multiplied = frozenset(products)

    def _is_sized(self, node: fx.Node) -> bool:
        """Returns whether the number of rows among the sizes of a view is one that a chunk can have."""
        sizes = [read for read in node.all_input_nodes if isinstance(note(read).type, ScalarType)]
        return node.target not in SIZED or all(_can_be_cut(size, self._rows) for size in sizes)

    def chosen(self, phases: Collection[str] | None = None) -> Chosen:
        """Returns what is chosen.

        Args:
            phases: those whose layers are computed in chunks; all by default.
        """
        before, after = self._before, self._after
        sends = {node for node in self._sends if phases is None or note(node).phase in phases}
        behind = _reached(self._nodes, sends, before)
        ahead = _reached(self._nodes[::-1], sends, after)
        # What leads from a collective to a product, and from a product to a collective.
        to_products = _reached(self._nodes[::-1], behind & self._products, after) & behind
        of_products = _reached(self._nodes, ahead & self._products, before) & ahead
        chosen = (behind & ahead) | sends | to_products | of_products
        for node in reversed(self._nodes):  # what nothing else reads
            users = after(node)
            if users and len(users) == len(node.users) and node not in self._products and chosen.issuperset(users):
                chosen.add(node)
        late = self._late(chosen, phases)
        chosen |= late
        # Parts of a tuple are of each chunk where it is.
        parts = {node for node in self._nodes if node.target is operator.getitem and node in self._cuts}
        chosen = (chosen - parts) | {node for node in parts if node.args[0] in chosen}
        cuts = {node: self._cuts[node] for node in self._nodes if node in chosen}
        return Chosen(cuts, frozenset(sends), frozenset(self._products & chosen), frozenset(late))

    def _late(self, chosen: Set[fx.Node], phases: Collection[str] | None) -> set[fx.Node]:
        """Returns the sums over rows of what is chosen, and what leads up to them alone; of a forward none.

        The table of an embedding is larger than what is added to it: chunk by chunk, that would be written once more.
        """
        sums = {
            node
            for node, cut in self._cuts.items()
            if _is_sum(cut) and (phase := note(node).phase) and self._is_small(node)
            if phases is None or phase in phases
        }
        open_to = self._cuts.keys() - self._products - self._sends - chosen | sums
        ahead = _reached(self._nodes[::-1], sums, lambda node: [user for user in self._after(node) if user in open_to])
        of_chosen: set[fx.Node] = set()
        for node in self._nodes:
            reads = node.all_input_nodes
            if node in open_to and node in ahead and not (chosen.isdisjoint(reads) and of_chosen.isdisjoint(reads)):
                of_chosen.add(node)
        return of_chosen - chosen

    def _is_small(self, node: fx.Node) -> bool:
        """Returns whether a node is a product, or has fewer elements than its operands, at the example's sizes."""
        values = symbol_sizes(self._program, None)

        def count(nodes: Sequence[fx.Node]) -> int:
            return sum(evaluate(prod(kind.shape), values) for read in nodes for kind in output_types(read))

        return node in self._multiplied or count([node]) < count(operands(node))

    def _before(self, node: fx.Node) -> list[fx.Node]:
        return [read for read in node.all_input_nodes if self._follows(read, node)]

    def _after(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self._follows(node, user)]

    def _follows(self, node: fx.Node, user: fx.Node) -> bool:
        """Returns whether both treat rows apart, in one phase."""
        return node in self._cuts and user in self._cuts and note(node).phase == note(user).phase


def _reached(order: Sequence[fx.Node], starts: Set[fx.Node], near: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    """Returns what is reached from some nodes, themselves among it.

    Args:
        order: in which what is near a node stands in front of it.
    """
    reached: set[fx.Node] = set()
    for node in order:
        if node in starts or any(other in reached for other in near(node)):
            reached.add(node)
    return reached


def _is_sum(cut: RowCut) -> bool:
    """Returns whether the results of all chunks are to be added."""
    return all(dim == SUMMED for dim in cut.outputs)


def _is_of_layer(node: fx.Node) -> bool:
    """Returns whether a node communicates over axes that do not cut the batch."""
    return all(PURPOSES[axis].cuts is not Cuts.BATCH for axis in axes_of(node))


def _can_be_cut(size: fx.Node, rows: sympy.Symbol) -> bool:
    """Returns whether a number is a product or a share of a multiple of the rows, or has nothing to do with them."""
    kind = note(size).type
    assert isinstance(kind, ScalarType)
    if str(rows) not in names([kind.value]):
        return True
    parts = [read for read in size.all_input_nodes if depends(read, rows)]
    if parts:
        return len(parts) == 1 and size.target in (operator.mul, operator.floordiv) and _can_be_cut(parts[0], rows)
    return isinstance(divide(kind.value, rows), int)


def depends(size: fx.Node, rows: sympy.Symbol) -> bool:
    """Returns whether a node is a number that depends on the rows."""
    kind = note(size).type if has_note(size) else None
    return isinstance(kind, ScalarType) and str(rows) in names([kind.value])


# What chunks save and cost, in seconds of a phase.
#
# Without chunks the products that no collective waits for, gradients of weights, are all that a collective can hide
# behind. With C chunks it can hide behind the products of the C - 1 others, too. Chunks cost: products of fewer rows
# fill their last wave less well; each has its own kernels; and a sum that nothing hides is one kernel with the norm
# that follows (`fxpar.passes.exchange`), where chunks send it by copies and read it from memory once more.

COUNTS = (2, 4, 8)
# Of chunks; which operations treat rows apart does not depend on it.
_SOME = 2
# Accesses of memory by the kernel that adds a sum to the residual stream and normalises it.
_ACCESSES = 5
# Kernels of a product: what counts its tiles is zeroed by one of its own.
_KERNELS = 2
# Part of a phase's seconds below which a gain is none: the model is not more exact.
_LEAST = 0.01


@dataclass(frozen=True)
class ChunkPrice:
    """What a number of chunks does to one phase, in seconds.

    Attributes:
        count: of chunks.
        phase: empty for the forward.
        products: those of the phase, without chunks.
        whole: for which ranks wait for layers' collectives without chunks.
        chunked: for which they wait with chunks.
        more: that chunks cost besides.
    """

    count: int
    phase: str
    products: float
    whole: float
    chunked: float
    more: float

    @property
    def gain(self) -> float:
        """Returns the seconds that chunks save; 0 where that is too little to be known."""
        gain = self.whole - self.chunked - self.more
        return gain if gain > _LEAST * (self.products + self.whole) else 0.0


def cheapest(prices: Sequence[ChunkPrice]) -> tuple[int, tuple[str, ...]]:
    """Returns the number of chunks that saves most, and the phases in which it saves something; 1 where none does."""
    gains: dict[int, float] = {1: 0.0}
    for price in prices:
        gains[price.count] = gains.get(price.count, 0.0) + price.gain
    count = max(gains, key=lambda count: (gains[count], -count))
    return count, tuple(price.phase for price in prices if price.count == count and price.gain)


def chunk_prices(program: Program, rows: sympy.Symbol, chosen: Chosen) -> list[ChunkPrice]:
    """Returns the prices of `COUNTS`, as far as there are as many rows at the example's sizes, phase by phase.

    Args:
        chosen: of all phases.
    """
    values, rate = symbol_sizes(program, None), program.plan.cost.flops
    flops = {node: evaluate(size, values) * computed_part(node, program.axes) for node, size in matmul_flops(program)}
    kernels = materialised(program, set(flops), set()) & chosen.cuts.keys()
    sends = {node.name: node for node in chosen.cuts if node in chosen.sends}
    sent = [collective for collective in collectives(program) if collective.node in sends]
    counts = [count for count in COUNTS if count <= evaluate(rows, values)]
    prices = []
    for phase in dict.fromkeys(note(node).phase for node in sends.values()):
        mine = [one for one in sent if note(sends[one.node]).phase == phase]
        products = [node for node in flops if note(node).phase == phase]
        seconds = {
            count: {node: flops[node] / (rate * filled_part(program, node, values, count)) for node in products}
            for count in (1, *counts)
        }
        listened = _listened(program, {sends[one.node] for one in mine})
        cut = [node for node in products if node in chosen.products]
        number = _KERNELS * len(cut) + len([node for node in kernels if note(node).phase == phase]) + 2 * len(mine)
        # What a forward computes after its last collective needs that.
        free = sum(seconds[1][node] for node in products if phase and node not in listened)
        whole = _exposed(_sendings(program, mine, 1), free, 0.0)
        for count in counts:
            in_chunks = sum(seconds[count][node] for node in cut)
            chunked = _exposed(_sendings(program, mine, count), free, in_chunks * (count - 1) / count, count == 2)
            more = in_chunks - sum(seconds[1][node] for node in cut) + _overhead(program, mine, count, number, free)
            prices.append(ChunkPrice(count, phase, sum(seconds[1].values()), whole, chunked, more))
    return prices


def _overhead(program: Program, sent: Sequence[Collective], count: int, kernels: int, free: float) -> float:
    """Returns the seconds of more kernels, and of sums that are in memory for the norm that follows.

    Args:
        kernels: of what is computed in chunks.
        free: seconds of products behind which collectives hide without chunks.
    """
    cost = program.plan.cost
    seconds = cost.kernel_latency * (count - 1) * kernels
    if free < sum(one.hideable for one in _sendings(program, sent, 1)):
        sums = sum(one.bytes for one in sent if one.op == "all_reduce" and _copies(program, one))
        seconds += _ACCESSES * sums / cost.memory
    return seconds


def _listened(program: Program, sends: Set[fx.Node]) -> set[fx.Node]:
    """Returns the collectives and what they need."""
    listened: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node in sends or any(user in listened for user in node.users):
            listened.add(node)
    return listened


def _exposed(sendings: Sequence[Sending], free: float, of_chunks: float, is_pair: bool = False) -> float:
    """Returns the seconds of collectives that products beside them leave bare.

    Args:
        free: seconds of products that no collective waits for.
        of_chunks: seconds of other chunks' products.
        is_pair: whether there are two chunks. While one's scatter is on its way, the other's products run; when it
            has come, what is gathered of it needs a third chunk beside it.
    """
    gathers = sum(one.hideable for one in sendings if is_pair and one.collective.op == "all_gather")
    hideable = sum(one.hideable for one in sendings)
    hidden = min(of_chunks, hideable - gathers)
    return sum(one.seconds for one in sendings) - hidden - min(free, hideable - hidden)


def _sendings(program: Program, sent: Sequence[Collective], count: int) -> list[Sending]:
    parts = [replace(collective, bytes=collective.bytes // count) for collective in sent for _ in range(count)]
    return [sending(program, part, copies=_copies(program, part)) for part in parts]


def _copies(program: Program, sent: Collective) -> bool:
    """Returns whether ranks copy into each other's memory: as the plan says, or where `auto` does so on GPUs."""
    transport, axes = program.plan.communication.collective_transport, sent.axis.split("-")
    is_pair = prod(program.axes[axis] for axis in axes) == 2
    return sent.bytes >= program.plan.cost.least_copy and (transport == "copy" or (transport == "auto" and is_pair))
