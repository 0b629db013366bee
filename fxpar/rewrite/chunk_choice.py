"""What of a step is computed in chunks of rows, in how many, and what that saves.

Enters: a step of one rank, and the symbol of its rows. Leaves: the nodes that are computed in chunks; and by number of
chunks and phase, the seconds for which ranks wait, and those that chunks cost.
"""

from __future__ import annotations

import copy
import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod

import sympy
from scipy.cluster.hierarchy import DisjointSet
from torch import fx

from fxpar.cost.communication import Collective, collectives, symbol_sizes, value_bytes
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
        # Of a backward, gradients of weights hide what is sent.
        left_whole = {node for node in mixing if note(node).phase}
        left_whole.update(node for node in self._nodes if node.target is attention_backward)
        rules = RowCuts(program, rows, _SOME)
        self._cuts: dict[fx.Node, RowCut] = {}
        known: dict[fx.Node, Sequence[int | None]] = {}
        for node in program.graph.nodes:
            if node.op == "output" or not has_note(node) or isinstance(note(node).type, ScalarType):
                continue
            whole = node in weights or note(node).phase == PARAMETER or not self._is_sized(node)
            whole = whole or (node.target is operator.getitem and node.args[0] not in self._cuts)
            cut = None if whole else rules.of(node, known)
            if cut is not None and not _is_sum(cut) and node in left_whole:
                cut = None
            if cut is not None:
                self._cuts[node] = cut
            known[node] = rules.rows_of(node) if cut is None else cut.outputs
        sent = {collective.node for collective in collectives(program)}
        self._sends = {n for n in self._cuts if n.name in sent and n.target in COERCION_OF and _is_of_layer(n)}
        self._products = {node for node in products if node in self._cuts and not _is_sum(self._cuts[node])}
        self._multiplied = frozenset(products)
        # What mixes the tokens of a row of the batch, as attention does.
        self.mixing = self._products & mixing

    def _is_sized(self, node: fx.Node) -> bool:
        """Returns whether the number of rows among the sizes of a view is one that a chunk can have."""
        sizes = [read for read in node.all_input_nodes if isinstance(note(read).type, ScalarType)]
        return node.target not in SIZED or all(_can_be_cut(size, self._rows) for size in sizes)

    def _without_mixing(self) -> ChunkChoice:
        """Returns the choice in which what mixes the tokens of a row is computed of all rows."""
        other = copy.copy(self)
        whole = self.mixing | {user for node in self.mixing for user in node.users if user.target is operator.getitem}
        other._cuts = {node: cut for node, cut in self._cuts.items() if node not in whole}
        other._products = self._products - whole
        return other

    def chosen(self, phases: Collection[str] | None = None, *, attention: bool = True) -> Chosen:
        """Returns what is chosen.

        Args:
            phases: those whose layers are computed in chunks; all by default.
            attention: whether that is, too, and what else mixes the tokens of a row.
        """
        if not attention:
            return self._without_mixing().chosen(phases)
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


def stages(nodes: Sequence[fx.Node], chosen: Chosen) -> dict[fx.Node, tuple[int, int, bool]]:
    """Returns for each node where its chain begins, how many heavy stages are before its own, and if that is heavy."""
    chains = DisjointSet(node for node in chosen.cuts if node not in chosen.late)
    number: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        reads = [r for r in node.all_input_nodes if r in number and note(r).phase == note(node).phase]
        is_chosen = node in chosen.cuts and node not in chosen.late
        # What is computed of all chunks in between is a stage of its own.
        before = (number[read] + (read in chosen.sends or (is_chosen and read not in chosen.cuts)) for read in reads)
        if reads or is_chosen:
            number[node] = max(before, default=0)
        for read in reads if is_chosen else ():
            if read in chosen.cuts and read not in chosen.late:
                chains.merge(read, node)
    places = {node: place for place, node in enumerate(nodes)}
    steps: dict[fx.Node, tuple[int, int, bool]] = {}
    for chain in chains.subsets():
        heavy = sorted({number[node] for node in chain if node in chosen.products})
        start = min(places[node] for node in chain)
        for node in chain:
            steps[node] = start, bisect_left(heavy, number[node]), number[node] in heavy
    return steps


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
        attention: whether that is in chunks, too, and what else mixes the tokens of a row.
        products: those of the phase, without chunks.
        whole: for which ranks wait for layers' collectives without chunks.
        chunked: for which they wait with chunks.
        more: that chunks cost besides.
    """

    count: int
    phase: str
    attention: bool
    products: float
    whole: float
    chunked: float
    more: float

    @property
    def gain(self) -> float:
        """Returns the seconds that chunks save; 0 where that is too little to be known."""
        gain = self.whole - self.chunked - self.more
        return gain if gain > _LEAST * (self.products + self.whole) else 0.0


def cheapest(prices: Sequence[ChunkPrice]) -> tuple[int, tuple[str, ...], bool]:
    """Returns the number of chunks that saves most, the phases in which it saves something, and whether of attention.

    The number is 1 where none does.
    """
    best: dict[tuple[int, str], ChunkPrice] = {}
    for price in prices:
        key = price.count, price.phase
        if key not in best or price.gain > best[key].gain:
            best[key] = price
    gains = defaultdict[int, float](float, {1: 0.0})
    for price in best.values():
        gains[price.count] += price.gain
    count = max(gains, key=lambda count: (gains[count], -count))
    chosen = [price for price in best.values() if price.count == count and price.gain]
    return count, tuple(price.phase for price in chosen), any(price.attention for price in chosen)


def chunk_prices(program: Program, rows: sympy.Symbol, choice: ChunkChoice) -> list[ChunkPrice]:
    """Returns the prices of `COUNTS`, as far as there are as many rows at the example's sizes, phase by phase.

    A phase that mixes the tokens of a row has two: without that in chunks, and with it.
    """
    prices = _Prices(program, rows, choice.mixing)
    of_attention = prices.of(choice.chosen(), attention=True) if choice.mixing else []
    return prices.of(choice.chosen(attention=False), attention=False) + of_attention


class _Prices:
    """The prices of what is chosen of a program."""

    def __init__(self, program: Program, rows: sympy.Symbol, mixing: Set[fx.Node]) -> None:
        self._program, self._mixing = program, mixing
        self._values = symbol_sizes(program, None)
        axes = program.axes
        self._flops = {n: evaluate(f, self._values) * computed_part(n, axes) for n, f in matmul_flops(program)}
        self._stored = materialised(program, set(self._flops), set())
        self._sent = {collective.node: collective for collective in collectives(program)}
        self._counts = [count for count in COUNTS if count <= evaluate(rows, self._values)]

    def of(self, chosen: Chosen, *, attention: bool) -> list[ChunkPrice]:
        """Returns those of each phase, with attention of those that have some."""
        order = stages(list(self._program.graph.nodes), chosen)
        sends = [node for node in chosen.cuts if node in chosen.sends]
        prices = []
        for phase in dict.fromkeys(note(node).phase for node in sends):
            if attention and not any(note(node).phase == phase for node in self._mixing):
                continue
            mine = {node: self._sent[node.name] for node in sends if note(node).phase == phase}
            products = {node: self._seconds(node) for node in self._flops if note(node).phase == phase}
            listened = _listened(self._program, set(mine))
            # What a forward computes after its last collective needs that.
            free = sum(seconds for node, seconds in products.items() if phase and node not in listened)
            sendings = _sendings(self._program, list(mine.values()), 1)
            hideable = sum(one.hideable for one in sendings)
            whole = sum(one.seconds for one in sendings) - min(free, hideable)
            for count in self._counts:
                seconds = {node: self._seconds(node, count) for node in products if node in chosen.products}
                by_stage = {node: _sendings(self._program, [one], count) for node, one in mine.items()}
                chunked = _exposed(by_stage, seconds, order, free)
                more = sum(seconds.values()) - sum(map(products.__getitem__, seconds))
                more += self._overhead(chosen, phase, count, free < hideable)
                prices.append(ChunkPrice(count, phase, attention, sum(products.values()), whole, chunked, more))
        return prices

    def _seconds(self, node: fx.Node, count: int = 1) -> float:
        rate = self._program.plan.cost.flops * filled_part(self._program, node, self._values, count)
        return self._flops[node] / rate

    def _overhead(self, chosen: Chosen, phase: str, count: int, is_bare: bool) -> float:
        """Returns the seconds of more kernels, of sums that are in memory for a norm, and of copies for a backward.

        Args:
            is_bare: whether collectives do not hide without chunks.
        """
        cost, nodes = self._program.plan.cost, {node for node in chosen.cuts if note(node).phase == phase}
        sent = [self._sent[node.name] for node in nodes & chosen.sends]
        kernels = _KERNELS * len(nodes & chosen.products) + len(nodes & self._stored) + 2 * len(sent)
        moved = sum(one.bytes for one in sent if one.op == "all_reduce" and _copies(self._program, one)) * is_bare
        # What attention gives of each chunk is copied together.
        joined = sum(value_bytes(self._program, node, self._values) for node in nodes & self._mixing)
        return cost.kernel_latency * (count - 1) * kernels + (_ACCESSES * moved + 2 * joined) / cost.memory


def _listened(program: Program, sends: Set[fx.Node]) -> set[fx.Node]:
    """Returns the collectives and what they need."""
    listened: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node in sends or any(user in listened for user in node.users):
            listened.add(node)
    return listened


def _exposed(
    sendings: Mapping[fx.Node, Sequence[Sending]],
    products: Mapping[fx.Node, float],
    order: Mapping[fx.Node, tuple[int, int, bool]],
    free: float,
) -> float:
    """Returns the seconds of collectives of chunks that products beside them leave bare.

    Args:
        sendings: of the nodes that communicate, those of each chunk.
        products: seconds of all chunks.
        order: as `stages` gives it.
        free: seconds of products that no collective waits for.
    """
    chains: dict[int, _Chain] = {}
    stalled, count = 0.0, 1
    for node, time in products.items():
        start, stage, _ = order[node]
        chains.setdefault(start, _Chain()).products[stage] += time
    for node, ones in sendings.items():
        start, stage, is_heavy = order[node]
        hideable, count = sum(one.hideable for one in ones), len(ones)
        stalled += sum(one.seconds for one in ones) - hideable
        chains.setdefault(start, _Chain()).sent[stage, is_heavy] += hideable
    bare = sum(chain.waited(count) for chain in chains.values())
    return stalled + bare - min(free, bare)


@dataclass(frozen=True)
class _Chain:
    """What follows each other in chunks.

    Attributes:
        products: seconds of the heavy stages.
        sent: those of what a heavy stage sends, and of what is sent in front of one.
    """

    products: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[tuple[int, bool], float] = field(default_factory=lambda: defaultdict(float))

    def waited(self, count: int) -> float:
        """Returns the seconds of waiting in so many chunks, in the order of `step_of`.

        What is sent travels one after the other. It is waited for in front of what comes next of the same chunk.
        """
        last = max((*self.products, *(stage for stage, _ in self.sent)))
        parts = [
            (stage, index, heavy) for stage in range(last + 1) for index in range(count) for heavy in (False, True)
        ]
        now = waited = 0.0
        line = 0.0  # when what has been sent is there
        arrivals: dict[tuple[int, int], float] = {}
        for stage, index, heavy in sorted(parts, key=lambda part: step_of(part[0], part[1], part[2], count)):
            there = arrivals.get((stage, index), 0.0)
            waited += max(0.0, there - now)
            now = max(there, now) + (self.products[stage] / count if heavy else 0.0)
            if time := self.sent[stage, heavy] / count:
                line = max(now, line) + time
                arrivals[stage + heavy, index] = line
        return waited + max(0.0, line - now)


def step_of(stage: int, index: int, is_heavy: bool, count: int) -> float:
    """Returns when a chunk of a stage runs: heavy stages chunk by chunk, a light one after the next chunk's heavy one.

    Args:
        stage: the number of heavy stages before it.
        index: of the chunk.
        count: of chunks.
    """
    return stage * count + index if is_heavy else (stage - 1) * count + index + 1.5


def _sendings(program: Program, sent: Sequence[Collective], count: int) -> list[Sending]:
    parts = [replace(collective, bytes=collective.bytes // count) for collective in sent for _ in range(count)]
    return [sending(program, part, copies=_copies(program, part)) for part in parts]


def _copies(program: Program, sent: Collective) -> bool:
    """Returns whether ranks copy into each other's memory: as the plan says, or where `auto` does so on GPUs."""
    transport, axes = program.plan.communication.collective_transport, sent.axis.split("-")
    is_pair = prod(program.axes[axis] for axis in axes) == 2
    return sent.bytes >= program.plan.cost.least_copy and (transport == "copy" or (transport == "auto" and is_pair))
