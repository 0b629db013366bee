"""The segments of a lowered step: what stands between two boundaries of calls, in one phase.

Enters: a lowered step, whose notes name the calls that nodes were written out of. Leaves: segments in order, and for
one of the forward with one of the backward a text that is equal where they compute the same.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from fxpar.ir.program import ScalarType, TensorType, has_note, note
from fxpar.ir.step import BACKWARD, ONCE, PARAMETER, WEIGHT, phase_of
from fxpar.ops.lowering_context import Identity


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes of one phase that follow each other in a lowered graph, and belong to one call or to none.

    Attributes:
        nodes: in order; numbers of sizes and of the rank's indices stand in each segment that reads them.
        region: name of the call; empty for what stands between calls.
        uncaptured: why no CUDA graph can hold it; empty where one can.
        phase: of the nodes.
        eager: whether it runs as it is, between what is compiled.
        again: those of the nodes that another segment computes too, which gives them to whoever else reads them.
    """

    nodes: tuple[fx.Node, ...]
    region: str
    uncaptured: str = ""
    phase: str = ""
    eager: bool = False
    again: frozenset[fx.Node] = frozenset()

    @cached_property
    def inner(self) -> frozenset[fx.Node]:
        """Returns the nodes as a set."""
        return frozenset(self.nodes)

    @cached_property
    def outer(self) -> tuple[fx.Node, ...]:
        """Returns what it reads of others, in the order of first use."""
        return tuple(dict.fromkeys(r for node in self.nodes for r in node.all_input_nodes if r not in self.inner))


def is_number(node: fx.Node) -> bool:
    """Returns whether a node of a lowered graph is a number, which any segment makes itself."""
    return node.op == "call_function" and (not has_note(node) or isinstance(note(node).type, ScalarType))


def segments(graph: fx.Graph, phases: Collection[str], *, at_regions: bool = True) -> list[Segment]:
    """Returns the segments of some phases, in order.

    Args:
        at_regions: whether they are cut where calls of regions, phases and what is not compiled begin, too, and not
            only at what no CUDA graph can hold.
    """
    nodes = [
        node for node in graph.nodes if node.op == "call_function" and not is_number(node) and phase_of(node) in phases
    ]
    if at_regions:  # what is compiled takes and gives tensors, and no tuples of them
        inside = set(nodes)
        groups = ((node, *(user for user in node.users if user.target is operator.getitem)) for node in nodes)
        nodes = list(dict.fromkeys(node for group in groups for node in group if node in inside))
    segments = []
    for (region, phase, eager, _), run in itertools.groupby(nodes, key=_place if at_regions else _capture_place):
        members = list(run)
        ordered = _ordered(graph, _numbers(members), members)
        segments.append(Segment(ordered, region, note(members[0]).uncaptured, phase, eager))
    return segments


def _numbers(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Returns the numbers that nodes read, and those that these are made of."""
    numbers: set[fx.Node] = set()
    pending = [read for node in nodes for read in node.all_input_nodes if is_number(read)]
    while pending:
        node = pending.pop()
        if node not in numbers:
            numbers.add(node)
            pending += [read for read in node.all_input_nodes if is_number(read)]
    return numbers


def _ordered(graph: fx.Graph, numbers: Collection[fx.Node], nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Puts numbers in front of the segment's nodes, but those that are sizes of what it makes itself after that.

    Of those in front many segments read the same ones, which the first made: left where they are, they would make its
    text another than that of its like.
    """
    if not numbers:
        return tuple(nodes)
    front, behind, inner = [], [], set(nodes)
    for node in graph.nodes:
        if node in numbers and inner.isdisjoint(node.all_input_nodes):
            front.append(node)
        elif node in numbers or node in inner:
            behind.append(node)
            inner.add(node)
    return (*front, *behind)


def _place(node: fx.Node) -> tuple[str, str, bool, str | bool]:
    # A scope may end between a tuple and its items, and no unit takes a tuple.
    noted = note(node.args[0]) if node.target is operator.getitem else note(node)  # type: ignore[arg-type]
    # Where the parameter phase is part of the backward, it is one with it.
    phase = BACKWARD if noted.phase == PARAMETER else noted.phase
    # One call of all that is not compiled: its nodes have several reasons to be in no graph.
    return noted.region, phase, noted.eager, bool(noted.uncaptured) if noted.eager else noted.uncaptured


def _capture_place(node: fx.Node) -> tuple[str, str, bool, str | bool]:
    return "", "", False, note(node).uncaptured


@dataclass(frozen=True, eq=False)
class Unit:
    """A segment of the forward with the one of the backward that differentiates it, or one of either alone.

    Attributes:
        early: names of the values that are there when its forward runs, as operands; `late` are those that come later.
    """

    forward: Segment | None
    backward: Segment | None
    early: tuple[str, ...]
    late: tuple[str, ...]

    @property
    def uncaptured(self) -> str:
        """Returns why no CUDA graph can hold it, forward and backward alike."""
        return self._first.uncaptured

    @property
    def eager(self) -> bool:
        """Returns whether it runs as it is, between what is compiled."""
        return self._first.eager

    @property
    def _first(self) -> Segment:
        segment = self.forward or self.backward
        assert segment is not None
        return segment

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Returns the nodes of both; a number that both make stands once."""
        parts = (segment.nodes for segment in (self.forward, self.backward) if segment is not None)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(parts)))

    @cached_property
    def identities(self) -> tuple[int, ...]:
        """Returns the identities of its draws, in the order of first use."""
        return tuple(
            dict.fromkeys(identity for node in self.nodes for identity in _identities((node.args, node.kwargs)))
        )

    @cached_property
    def text(self) -> str:
        """Returns what is equal for units that compute the same of their operands, in the same order of these."""
        names = {name: f"${i}" for i, name in enumerate((*self.early, "late", *self.late))}
        names |= {node.name: f"%{i}" for i, node in enumerate(self.nodes)}
        count = len(self.forward.nodes) if self.forward is not None else 0
        lines = [f"{len(self.early)} {len(self.late)} {count} {bool(self.uncaptured)} {self.eager}"]
        # The identity of a draw differs from layer to layer. Written as a position it leaves the text
        # of equal layers equal, and comes as an operand at run time.
        random = {identity: f"?{i}" for i, identity in enumerate(self.identities)}
        for node in self.nodes:
            mapped = fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: _written(leaf, names, random))
            lines.append(f"{_function(node.target)} {mapped}")
        return "\n".join(lines)

    def position(self, name: str) -> int:
        """Returns the position of the node of that name."""
        return self._positions[name]

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}


def graph_of(unit: Unit, results: Sequence[Sequence[int]], sizes: Sequence[str]) -> fx.GraphModule:
    """Returns what a unit computes, as a function of sizes, its early operands, its identities and its late operands.

    Args:
        sizes: names of those that are symbols; nothing reads them, but what is compiled knows the symbols by them.
        results: positions of the nodes whose values it gives: of the forward, then of the backward. They are dense:
            of a repeated or sliced one Inductor chooses the strides, and whoever takes it is compiled for them.
    """
    graph = fx.Graph()
    for i, _ in enumerate(sizes):
        graph.placeholder(f"size_{i}")
    nodes: dict[str, fx.Node] = {name: graph.placeholder(f"early_{i}") for i, name in enumerate(unit.early)}
    random = {identity: graph.placeholder(f"identity_{i}") for i, identity in enumerate(unit.identities)}
    nodes |= {name: graph.placeholder(f"late_{i}") for i, name in enumerate(unit.late)}

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return nodes[leaf.name]
        return random[int(leaf)] if isinstance(leaf, Identity) else leaf

    for node in unit.nodes:
        args, kwargs = (fx.node.map_aggregate(operands, argument) for operands in (node.args, node.kwargs))
        nodes[node.name] = graph.create_node(node.op, node.target, args, kwargs)  # type: ignore[arg-type]
    outputs = [nodes[unit.nodes[i].name] for part in results for i in part]
    graph.output(tuple(graph.call_function(dense, (value,)) for value in outputs))
    return fx.GraphModule(nn.Module(), graph)


def dense(value: Any) -> Any:
    """Returns a tensor whose elements stand in memory one by one, without gaps, in any order of its dimensions."""
    if not isinstance(value, torch.Tensor) or (type(value) is torch.Tensor and value.is_contiguous()):
        return value  # of a symbolic size, `is_contiguous` would be a guard
    count = 1
    for stride, size in sorted(zip(map(_number, value.stride()), map(_number, value.shape), strict=True)):
        if size != 1 and stride != count:
            return value.contiguous()
        count *= size
    return value


def _number(size: Any) -> int:
    """Returns a symbolic size as it is in the call that it is compiled for."""
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def _identities(value: Any) -> Iterator[int]:
    if isinstance(value, Identity):
        yield int(value)
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _identities(element)
    elif isinstance(value, dict):
        yield from _identities(list(value.values()))


class _Word:
    """An argument in the text of a unit."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _written(value: Any, names: Mapping[str, str], random: Mapping[int, str]) -> Any:
    if isinstance(value, fx.Node):
        return _Word(names[value.name])
    if isinstance(value, Identity):
        return _Word(random[int(value)])
    return _Word(f"tensor {id(value)}") if isinstance(value, torch.Tensor) else value


def _function(target: Any) -> str:
    """Returns the text of a function, which is equal to itself alone, whatever its name."""
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"{target} {id(target)}"


# What a segment of a backward computes again, of what forwards made that are not compiled with it.
#
# What is made of each element alone needs no memory where what it is made of is there anyway: a number of each row,
# what the backward reads besides, and what goes into the forward of its unit. A cast, and a value times what a norm
# found of its row, are such.


def computing_again(backward: Segment, partner: Segment | None, forward: Sequence[Segment]) -> Segment:
    """Returns the segment, which computes again what it need not have kept.

    Args:
        partner: the segment of the forward that is compiled with it, of which the min-cut chooses what is kept.
        forward: the segments of the forward.
    """
    # Numbers that are there at the start; what one of them is the size of has to be there, too.
    numbers = tuple(itertools.takewhile(is_number, backward.nodes))
    sized = {read for number in numbers for read in number.all_input_nodes}
    computed = {
        node for segment in forward if segment is not partner for node in segment.nodes if not is_number(node)
    } - sized
    order = [node for segment in forward for node in segment.nodes if node in computed]
    reads, of_partner = set(backward.outer), {*partner.outer, *partner.inner} if partner is not None else set()
    needed = [node for node in order if node in reads and node not in of_partner]
    large = [node for node in needed if _is_large(node) and _owner(node) in computed]
    there = reads.difference(large) | of_partner
    again: set[fx.Node] = set()
    for node in large:  # after what it is made of
        copies, sources = _copies(node, computed, there, numbers)
        if len(sources) == 1 and _is_smaller(sources[0], node):
            there.add(sources[0])
        elif sources:
            there.add(node)
            continue
        again.update(copies)
    if not again:
        return backward
    nodes = (*numbers, *(node for node in order if node in again), *backward.nodes[len(numbers) :])
    return replace(backward, nodes=nodes, again=frozenset(again))


def _copies(
    root: fx.Node, computed: Collection[fx.Node], there: Collection[fx.Node], numbers: Collection[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns all that is computed again for a value, and what is kept for that and is not there."""
    copies: dict[fx.Node, None] = {}
    sources: dict[fx.Node, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        copies[node] = None
        for read in node.all_input_nodes:
            is_there = read in (numbers if is_number(read) else there) or read in copies
            if is_there or read.op == "placeholder" or _has_one_column(read):
                continue
            large = [operand for operand in read.all_input_nodes if not _has_one_column(operand)]
            if read in computed and _is_elementwise(read) and len(large) == 1:
                pending.append(read)
            else:
                sources[read] = None
    return list(copies), list(sources)


def _is_elementwise(node: fx.Node) -> bool:
    """Returns whether a node computes each element, or is its operand in other words; none that draws or changes
    anything."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or note(node).uncaptured:
        return False
    return torch.Tag.pointwise in target.tags or target.is_view or target is torch.ops.aten._to_copy.default


def _is_large(node: fx.Node) -> bool:
    return _is_elementwise(node) and not _has_one_column(node)


def _owner(node: fx.Node) -> fx.Node | None:
    """Returns what computes the memory of a value that is one of the element-wise; a view has that of another one."""
    while _is_elementwise(node) and node.target.is_view:  # type: ignore[union-attr]
        node = node.all_input_nodes[0]
    return node if _is_elementwise(node) else None


def _has_one_column(value: fx.Node) -> bool:
    """Returns whether a value is a number of each row."""
    kind = note(value).type if has_note(value) else None
    return isinstance(kind, TensorType) and kind.shape[-1:] == (1,)


def _is_smaller(one: fx.Node, other: fx.Node) -> bool:
    """Returns whether a value takes fewer bytes than another one of as many elements."""
    kinds = [note(node).type if has_note(node) else None for node in (one, other)]
    kind, whole = kinds
    if not isinstance(kind, TensorType) or not isinstance(whole, TensorType):
        return False
    return kind.shape == whole.shape and kind.dtype.itemsize < whole.dtype.itemsize


# The units in which a step is compiled: which segment of the backward goes with which of the forward.
#
# A backward may read what another forward made than that of its unit: a norm in front of a layer is computed by the
# unit of the layer before, with the residual connection that it reads. PyTorch's min-cut sees one unit and would keep
# all of it. So what the norm keeps is computed again where it is read, as far as that costs no memory.


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
    whole = {s: s if s.eager else computing_again(s, partners.get(s), first) for s in second}
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
    # A pair is one object in both lists, since it is compiled once and its halves are called apart.
    backward = [units[of_backward[segment]] if segment in of_backward else unit(None, segment) for segment in second]
    forward = tuple(units[segment] for segment in first)
    return StepUnits(forward, tuple(backward), _results((*forward, *backward), needed))


def _is_early(node: fx.Node, place: Mapping[fx.Node, int], at: int) -> bool:
    """Returns whether a value is there when the segment of that number runs."""
    if node.op == "placeholder":
        return not has_note(node) or note(node).phase == ""
    return place.get(node, at) < at or (has_note(node) and phase_of(node) == ONCE)


def _pairs(first: Sequence[Segment], second: Sequence[Segment]) -> dict[Segment, Segment]:
    """Returns each segment of the backward with that of the forward of which it reads most, no two with one."""
    home = {node: segment for segment in first if not segment.eager for node in segment.nodes}
    pairs: dict[Segment, Segment] = {}
    taken: set[Segment] = set()
    counts: list[tuple[int, int, Segment, Segment]] = []
    for i, backward in enumerate(segment for segment in second if not segment.eager):
        reads = Counter(home[node] for node in backward.outer if node in home)
        # A unit is captured as a whole or not at all, so both halves must be of one kind.
        alike = {segment: count for segment, count in reads.items() if segment.uncaptured == backward.uncaptured}
        counts += [(-count, i, forward, backward) for forward, count in alike.items()]
    # Greedy from the largest count is enough: any pairing is right, and a bad one only keeps more values.
    for _, _, forward, backward in sorted(counts, key=lambda candidate: candidate[:2]):
        if forward not in pairs and backward not in taken:
            pairs[forward] = backward
            taken.add(backward)
    return pairs


def _results(units: Sequence[Unit], needed: Collection[str]) -> dict[Unit, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns what is used of a unit outside of it, of any of its text."""
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
        # All instances give the union of what any of them is asked for. Otherwise a layer with one
        # more reader would be another unit, and compiled again.
        results[unit] = (tuple(sorted(forward)), tuple(sorted(backward - forward)))
    return results
