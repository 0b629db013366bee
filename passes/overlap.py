"""overlap: collectives travel while gradients of weights are computed."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxpar.cost.seconds import Estimates, estimates
from fxpar.ir.program import Program, ScalarType, note
from fxpar.ir.properties import Property
from fxpar.ir.regions import Region, inlined, region_of
from fxpar.ir.step import PARAMETER
from fxpar.manager import register_pass
from fxpar.ops.token_chunks import add_chunks

# Seconds of postponed work that may wait for a collective: what it reads stays in memory for so long.
_BACKLOG = 2e-3


@register_pass("overlap", requires={Property.STEP}, preserves="dataflow")
def overlap(program: Program) -> Program:
    """Moves products that nobody waits for after the start of a collective.

    Before::

        %dw = aten.mm.default(%dy_t, %x) : f32[16, 8] tp:S(0) {phase=backward}
        %dx = aten.mm.default(%dy, %w) : f32[4, 8] tp:P {phase=backward}
        %dx_sum = fxpar.all_reduce[tp](%dx) : f32[4, 8] tp:P→R {phase=backward}
        %dh = aten.relu.default(%dx_sum) : f32[4, 8] tp:R {phase=backward}

    After::

        %dx = aten.mm.default(%dy, %w) : f32[4, 8] tp:P {phase=backward}
        %dx_sum = fxpar.all_reduce[tp](%dx) : f32[4, 8] tp:P→R {phase=backward}
        %dw = aten.mm.default(%dy_t, %x) : f32[16, 8] tp:S(0) {phase=backward}
        %dh = aten.relu.default(%dx_sum) : f32[4, 8] tp:R {phase=backward}

    A collective starts where it stands and is waited for in front of its first reader. A forward has little that does
    not wait for its collectives. A backward has: the gradient of a weight is needed by nobody but the optimizer.

    Terms: a *run* is what stands between two boundaries of calls in one phase, or inside of a region; it is ordered by
    itself. A node is *listened to* if a collective of its run needs it.

    Algorithm: nodes keep their order but for products that are not listened to, with what follows from them. Those are
    postponed, first in first out: as many of them follow a collective as take its time, by the plan's constants at the
    example's sizes, less that of products which stand in front of its first reader anyway. Where those are too few,
    products that stand there stay. Of what is postponed beyond two milliseconds the oldest run at once. A run without
    collectives keeps its order.

    What sends gradients once a step starts behind the run that computes the last of them, so that it travels while
    earlier layers are differentiated::

        %layer_backward_1 = region.layer_backward(%g, %w_2) gives %dw_2, %dx {phase=backward}
        %dw_2_sum = fxpar.reduce_scatter[dp](%dw_2) : f32[16, 8] dp:P→S(0) {phase=parameter}
        %layer_backward_2 = region.layer_backward(%dx, %w_1) gives %dw_1, %dx_1 {phase=backward}
    """
    whole = inlined(program)
    seconds = estimates(whole)
    written = {node.name: node for node in whole.graph.nodes}
    by_call: dict[str, list[fx.Node]] = {}
    for node in whole.graph.nodes:
        if node.op == "call_function" and note(node).region:
            by_call.setdefault(note(node).region, []).append(node)
    ordered: dict[Region, Region] = {}
    for node in program.graph.nodes:
        region = region_of(node)
        if region is not None and region not in ordered:
            inside = dict(zip(by_call[node.name], region.body, strict=True))
            # All calls of a region have one order, since they share one compiled unit: that of the first call.
            order = [inside[inner] for inner in _Order(seconds).of(list(inside))]
            ordered[region] = region if order == region.body else region.reordered(order)[0]
        if region is not None:
            node.target = ordered[region]
    for run in _runs(program):
        originals = {written[node.name]: node for node in run}
        _place(run[0].prev, [originals[node] for node in _Order(seconds).of(list(originals))])
    _send_gradients(program, seconds)
    return program


def _send_gradients(program: Program, seconds: Estimates) -> None:
    """Moves what sends gradients once a step behind the last run or call that computes one of them."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    bodies = [inner for node in nodes if (region := region_of(node)) is not None for inner in region.body]
    # A collective must be waited for in the graph that has it, and nothing that a graph leaves out may stand between.
    if program.plan.cuda_graphs.impl == "partial" and any(note(node).uncaptured for node in (*nodes, *bodies)):
        return
    ends = {node: node for node in nodes}
    ends |= {node: run[-1] for run in _runs(program) for node in run}
    for node in nodes:
        if region_of(node) is not None:
            *_, last = node.users
            ends |= dict.fromkeys(node.users, last)
    places = {node: place for place, node in enumerate(nodes)}
    behind: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        reads = [read for read in node.all_input_nodes if read.op == "call_function"]
        is_first = reads and all(note(read).phase != PARAMETER for read in reads)
        if note(node).phase == PARAMETER and node.name in seconds.sends and is_first:
            end = max((ends[read] for read in reads), key=places.__getitem__)
            behind.get(end, end).append(node)
            behind[end] = node


def _runs(program: Program) -> Iterator[list[fx.Node]]:
    """Yields what stands between calls, phase by phase; numbers go with what stands in front of them."""
    key = 0
    phase: str | None = None
    keys: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        of_call = region_of(node) is not None or any(region_of(read) is not None for read in node.all_input_nodes)
        if of_call:
            phase = None
            continue
        node_phase = phase if isinstance(note(node).type, ScalarType) else note(node).phase
        if node_phase != phase:
            key, phase = key + 1, node_phase
        keys[node] = key
    for _, run in itertools.groupby(keys, key=keys.__getitem__):
        yield list(run)


def _place(behind: fx.Node, order: Sequence[fx.Node]) -> None:
    for node in order:
        behind.append(node)
        behind = node


@dataclass
class _Order:
    """The order of one run.

    Attributes:
        seconds: of collectives and products.
    """

    seconds: Estimates
    # Of the last collective: seconds that nothing hides yet, and the place of its first reader.
    _bare: tuple[float, int] = (0.0, 0)
    _placed: dict[fx.Node, None] = field(default_factory=dict)
    _postponed: dict[fx.Node, float] = field(default_factory=dict)

    def of(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        sends = self.seconds.sends
        run, listened = frozenset(nodes), self._listened(nodes)
        if not listened:
            return list(nodes)
        products, parts = self._products(run, listened)
        beside, readers = self._beside(nodes, listened)
        for place, node in enumerate(nodes):
            if node in self._placed or node in parts:
                continue
            # What reads a postponed product must follow it, or nothing would be
            # postponed for longer than to its first reader.
            is_free = node in products or any(read in self._postponed for read in node.all_input_nodes)
            if is_free and node not in listened:
                seconds, reader = self._bare
                if seconds > 0 and place < reader and node in products:
                    self._bare = seconds - products[node], reader
                    self._place(run, node)
                    continue
                self._postponed[node] = products.get(node, 0.0)
                self._run_postponed(run, sum(self._postponed.values()) - _BACKLOG)
                continue
            self._place(run, node)
            # Order is what this pass can give, and needs free multiprocessors to hide anything. After one full wave of
            # a product NCCL waits all the same, and copy engines do not.
            if node in beside:
                bare = sum(send.seconds for send in sends[node.name]) - beside[node]
                self._bare = self._run_postponed(run, bare), readers[node]
        for node in (*self._postponed, *nodes):
            self._place(run, node)
        return list(self._placed)

    def _products(
        self, run: Collection[fx.Node], listened: Collection[fx.Node]
    ) -> tuple[dict[fx.Node, float], set[fx.Node]]:
        """Returns the seconds of products, and of sums of chunks' products; and what of chunks goes with its sum.

        Products of chunks that are added up run one after the other, where the sum is (`fxpar.ops.small_operators`).
        """
        products, parts = dict(self.seconds.products), set()
        for node in run:
            if node.target is add_chunks and node not in listened:
                added = [n for n in node.all_input_nodes if n in products and n in run and len(n.users) == 1]
                products[node] = sum(map(products.__getitem__, added))
                parts.update(added)
        return products, parts

    def _listened(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Returns collectives and what they need."""
        listened: set[fx.Node] = set()
        for node in reversed(nodes):
            if node.name in self.seconds.sends or any(user in listened for user in node.users):
                listened.add(node)
        return listened

    def _beside(
        self, nodes: Sequence[fx.Node], listened: Collection[fx.Node]
    ) -> tuple[dict[fx.Node, float], dict[fx.Node, int]]:
        """Returns for each collective the seconds of listened products in front of its first reader, and its place.

        That is what other chunks of tokens compute meanwhile.
        """
        products = [self.seconds.products.get(node, 0.0) if node in listened else 0.0 for node in nodes]
        places, before = {node: place for place, node in enumerate(nodes)}, [0.0, *itertools.accumulate(products)]
        readers = {
            node: min((places[user] for user in node.users if user in places), default=len(nodes))
            for node in nodes
            if node.name in self.seconds.sends
        }
        return {node: before[reader] - before[places[node]] for node, reader in readers.items()}, readers

    def _run_postponed(self, run: frozenset[fx.Node], seconds: float) -> float:
        """Runs the oldest until so many seconds are hidden; returns what is left of these."""
        while self._postponed and seconds > 0:
            node = next(iter(self._postponed))
            seconds -= self._postponed[node]
            self._place(run, node)
        return seconds

    def _place(self, run: frozenset[fx.Node], node: fx.Node) -> None:
        """Places a node after what it reads."""
        stack = [node]
        while stack:
            last = stack[-1]
            missing = [read for read in last.all_input_nodes if read in run and read not in self._placed]
            if missing:
                stack += missing
                continue
            stack.pop()
            self._placed[last] = None
            self._postponed.pop(last, None)
