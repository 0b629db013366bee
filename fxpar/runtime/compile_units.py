"""The units in which a step is compiled: which segment of the backward goes with which of the forward.

Enters: a lowered step. Leaves: units in the order of their forward and of their backward, and what each gives.

A backward may read what another forward made than that of its unit: a norm in front of a layer is computed by the unit
of the layer before, with the residual connection that it reads. PyTorch's min-cut sees one unit and would keep all of
it. So what the norm keeps is computed again where it is read, as far as that costs no memory
(`fxpar.runtime.recompute_copies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.ir.program import has_note, note
from fxpar.ir.step import WEIGHT
from fxpar.runtime.recompute_copies import computing_again
from fxpar.runtime.segments import Segment, Unit, is_number, segments


@dataclass(frozen=True)
class StepUnits:
    """The units of a step.

    Attributes:
        forward: those with a forward, in its order.
        backward: those with a backward, in its order.
        results: of each unit, positions of the nodes whose values it gives, in the forward and in the backward; units
            of one text give the same.
    """

    forward: tuple[Unit, ...]
    backward: tuple[Unit, ...]
    results: Mapping[Unit, tuple[tuple[int, ...], tuple[int, ...]]]


def units_of(graph: fx.Graph, phases: Collection[str], needed: Collection[str], *, paired: bool) -> StepUnits:
    """Pairs the segments of a step.

    Args:
        graph: the lowered step.
        phases: those of the backward.
        needed: names of the values that are wanted at the end.
        paired: whether a backward is compiled with its forward, so that what is cheap is computed again, and not kept.
    """
    first, second = segments(graph, ("",)), segments(graph, phases)
    # What is put off is no partner: its forward's would be kept for it alone.
    pairs = _pairs(first, [segment for segment in second if segment.phase != WEIGHT]) if paired else {}
    partners = {backward: forward for forward, backward in pairs.items()}
    whole = {segment: computing_again(segment, partners.get(segment), first) for segment in second}
    second, pairs = (
        [whole[segment] for segment in second],
        {forward: whole[segment] for forward, segment in pairs.items()},
    )
    of_backward = {backward: forward for forward, backward in pairs.items()}
    place = {node: i for i, segment in enumerate(first) for node in segment.nodes if node.op == "call_function"}

    def unit(forward: Segment | None, backward: Segment | None) -> Unit:
        outer = dict.fromkeys(node for segment in (forward, backward) if segment is not None for node in segment.outer)
        if forward is None:
            return Unit(None, backward, tuple(node.name for node in outer), ())
        at = first.index(forward)
        inside = forward.inner
        early = [n for n in outer if n not in inside and _is_early(n, place, at)]
        late = [n for n in outer if n not in inside and not _is_early(n, place, at)]
        return Unit(forward, backward, tuple(n.name for n in early), tuple(n.name for n in late))

    units = {segment: unit(segment, pairs.get(segment)) for segment in first}
    backward = [units[of_backward[segment]] if segment in of_backward else unit(None, segment) for segment in second]
    forward = tuple(units[segment] for segment in first)
    return StepUnits(forward, tuple(backward), _results((*forward, *backward), needed))


def _is_early(node: fx.Node, place: Mapping[fx.Node, int], at: int) -> bool:
    """Whether a value is there when the segment of that number runs."""
    if node.op == "placeholder":
        return not has_note(node) or note(node).phase == ""
    return place.get(node, at) < at


def _pairs(first: Sequence[Segment], second: Sequence[Segment]) -> dict[Segment, Segment]:
    """Each segment of the backward with that of the forward of which it reads most, no two with one."""
    home = {node: segment for segment in first for node in segment.nodes}
    pairs: dict[Segment, Segment] = {}
    taken: set[Segment] = set()
    counts: list[tuple[int, int, Segment, Segment]] = []
    for i, backward in enumerate(second):
        reads = Counter(home[node] for node in backward.outer if node in home)
        alike = {segment: count for segment, count in reads.items() if segment.uncaptured == backward.uncaptured}
        counts += [(-count, i, forward, backward) for forward, count in alike.items()]
    for _, _, forward, backward in sorted(counts, key=lambda candidate: candidate[:2]):
        if forward not in pairs and backward not in taken:
            pairs[forward] = backward
            taken.add(backward)
    return pairs


def _results(units: Sequence[Unit], needed: Collection[str]) -> dict[Unit, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What is used of a unit outside of it, of any of its text."""
    used: dict[str, tuple[set[int], set[int]]] = {}
    # Not users of the graph: a number is a node of every segment that reads it, and what it reads is taken there too.
    taken = {name for unit in units for name in (*unit.early, *unit.late)}
    for unit in dict.fromkeys(units):
        parts = used.setdefault(unit.text, (set(), set()))
        for part, segment in zip(parts, (unit.forward, unit.backward), strict=True):
            for node in segment.nodes if segment is not None else ():
                if is_number(node) or (segment is not None and node in segment.again):
                    continue
                if node.name in needed or node.name in taken:
                    part.add(unit.position(node.name))
    results = {}
    for unit in dict.fromkeys(units):
        forward, backward = used[unit.text]
        results[unit] = (tuple(sorted(forward)), tuple(sorted(backward - forward)))
    return results
