"""exchange: collectives become copies between the memories of the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from fxpar.cost.buffer_reuse import Handshakes, copyable, handshakes, is_shot, is_sum
from fxpar.cost.seconds import travels
from fxpar.ir.program import Program, note, update
from fxpar.ir.properties import Property
from fxpar.ir.regions import Region, inlined, region_of
from fxpar.manager import Pass, register_pass
from fxpar.peer_memory.compiler.symmetric_buffer import BUFFERS


@register_pass("exchange", requires={Property.STEP}, preserves="dataflow")
def exchange(program: Program) -> Program:
    """Gives large collectives a buffer, through which the ranks copy into each other's memory.

    Before::

        %dx_sum = fxpar.all_reduce[tp](%dx) : f32[4, 8] tp:P→R {phase=backward}
        %dh = aten.mm.default(%dx_sum, %w) : f32[4, 8] tp:P {phase=backward}
        %dh_sum = fxpar.all_reduce[tp](%dh) : f32[4, 8] tp:P→R {phase=backward}

    After::

        %dx_sum = fxpar.all_reduce[tp](%dx) : f32[4, 8] tp:P→R {buffer=1, phase=backward}
        %dh = aten.mm.default(%dx_sum, %w) : f32[4, 8] tp:P {phase=backward}
        %dh_sum = fxpar.all_reduce[tp](%dh) : f32[4, 8] tp:P→R {buffer=2, phase=backward}

    Copies are the work of a GPU's copy engines: products keep all multiprocessors. What is smaller than the plan's
    `cost.least_copy` stays with the process group, whose latency is less, and so does what is sent once a step.

    A sum next to which nothing is computed, or less than the plan's `cost.copy_latency`, is `one_shot`, however small:
    one kernel writes into the others' memory, waits for what comes from there and adds. It needs multiprocessors, which
    are free then. So is what ranks send of tokens that others need, in any case: which these are a kernel alone sees.

    Terms: see `fxpar.cost.buffer_reuse`, which says what may share a buffer. A node of a region stands for all that
    it is in the calls.

    Algorithm: in order, each takes the first buffer that it may share with all that have it. What both opens and closes
    its part of the step, and what in a region would need another buffer in each call, is left out; then all is numbered
    anew, since others may have relied on it, until nothing is left out.
    """
    return _exchanged(program, None if program.plan.communication.collective_transport == "copy" else ())


def exchange_over(axes: Collection[str]) -> Pass:
    """Returns the pass, for collectives over these axes and joined axes (`dp-tp`) alone."""
    return replace(exchange, run=partial(_exchanged, axes=frozenset(axes)))


def _exchanged(program: Program, axes: Collection[str] | None) -> Program:
    """Gives collectives over `axes` their buffers; all collectives where it is None."""
    if axes is not None and not axes:
        return program
    whole = inlined(program)
    origins = _origins(program, whole)
    could = {node: n for node, n in copyable(whole).items() if axes is None or node.kwargs["axis"] in axes}
    alone = _alone(whole, could, origins)
    chosen = [node for node, size in could.items() if size >= program.plan.cost.least_copy or origins[node] in alone]
    # It ends, since each round leaves out at least one collective.
    while True:
        buffers, refused = _numbered(handshakes(whole, chosen), origins)
        if not refused:
            return _with(program, buffers, alone)
        chosen = [node for node in chosen if origins[node] not in refused]


def _alone(whole: Program, could: Iterable[fx.Node], origins: Mapping[fx.Node, fx.Node]) -> frozenset[fx.Node]:
    """Sums alongside which almost nothing is computed, in any of the calls of a region, and what is one call anyway."""
    least = whole.plan.cost.copy_latency
    beside = {travel.collective.node: sum(seconds for _, seconds in travel.beside) for travel in travels(whole)}
    pairs = [node for node in could if is_sum(node)]
    alone = {origins[n] for n in pairs} - {origins[n] for n in pairs if beside[n.name] >= least}
    return frozenset(alone | {origins[n] for n in could if is_shot(n)})


def _origins(program: Program, whole: Program) -> dict[fx.Node, fx.Node]:
    """Returns for each node that is written out, the one of the program or of a region that it is."""
    origins: dict[fx.Node, fx.Node] = {}
    nodes = {node.name: node for node in program.graph.nodes}
    left = {
        node.name: list(reversed(region.body)) for node in nodes.values() if (region := region_of(node)) is not None
    }
    for node in whole.graph.nodes:
        call = note(node).region if node.op == "call_function" else ""
        origins[node] = left[call].pop() if call else nodes[node.name]
    return origins


def _numbered(
    known: Sequence[Handshakes], origins: Mapping[fx.Node, fx.Node]
) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """Returns a buffer for each node of the program or of a region, and those for which there is none."""
    buffers: dict[fx.Node, int] = {}
    refused = set()
    for group in known:
        alike: dict[fx.Node, list[fx.Node]] = {}
        for node in group.bits:
            alike.setdefault(origins[node], []).append(node)
        for origin, nodes in alike.items():
            others = [n for n in alike if n in buffers]
            buffer = _first(group, nodes, [(buffers[n], alike[n]) for n in others])
            if buffer is None:
                refused.add(origin)
            else:
                buffers[origin] = buffer
    return buffers, refused


def _first(group: Handshakes, nodes: Sequence[fx.Node], others: Sequence[tuple[int, Sequence[fx.Node]]]) -> int | None:
    """Returns the first buffer for all of the nodes; None where each would need its own."""
    opens, closes = any(map(group.opens, nodes)), any(map(group.closes, nodes))
    if (opens and closes) or not all(group.are_apart(a, b) for a, b in itertools.combinations(nodes, 2)):
        return None
    taken = {buffer for buffer, holders in others if not all(group.are_apart(a, b) for a in nodes for b in holders)}
    # What opens a call may follow what closed the one before, with no
    # collective between: so openers are odd, closers even.
    free = (n for n in range(1, BUFFERS) if n not in taken and not (opens and n % 2 == 0) and not (closes and n % 2))
    return next(free, None)


def _with(program: Program, buffers: Mapping[fx.Node, int], alone: Collection[fx.Node]) -> Program:
    """Returns the program with these buffers, and these in one shot; regions stay, for whoever else has them."""
    rewritten: dict[Region, Region] = {}
    for node in program.graph.nodes:
        region = region_of(node)
        if node in buffers:
            update(node, buffer=buffers[node], one_shot=node in alone)
        elif region is not None:
            if region not in rewritten:
                rewritten[region] = _rewritten(region, buffers, alone)
            node.target = rewritten[region]
    return program


def _rewritten(region: Region, buffers: Mapping[fx.Node, int], alone: Collection[fx.Node]) -> Region:
    if buffers.keys().isdisjoint(region.body):
        return region
    rewritten, copies = region.reordered(region.body)
    for node in buffers.keys() & copies.keys():
        update(copies[node], buffer=buffers[node], one_shot=node in alone)
    return rewritten
