"""The segments of a lowered step: what stands between two boundaries of calls, in one phase.

Enters: a lowered step, whose notes name the calls that nodes were written out of. Leaves: segments in order, and for
one of the forward with one of the backward a text that is equal where they compute the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from fxpar.ir.program import ScalarType, has_note, note
from fxpar.ir.step import BACKWARD, PARAMETER
from fxpar.ops.lowering_context import Identity


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes of one phase that follow each other in a lowered graph, and belong to one call or to none.

    Attributes:
        nodes: in order; numbers of sizes and of the rank's indices stand in each segment that reads them.
        region: name of the call; empty for what stands between calls.
        uncaptured: why no CUDA graph can hold it; empty where one can.
        phase: of the nodes.
        again: those of the nodes that another segment computes too, which gives them to whoever else reads them.
    """

    nodes: tuple[fx.Node, ...]
    region: str
    uncaptured: str = ""
    phase: str = ""
    again: frozenset[fx.Node] = frozenset()

    @cached_property
    def inner(self) -> frozenset[fx.Node]:
        """The nodes as a set."""
        return frozenset(self.nodes)

    @cached_property
    def outer(self) -> tuple[fx.Node, ...]:
        """What it reads of others, in the order of first use."""
        return tuple(dict.fromkeys(r for node in self.nodes for r in node.all_input_nodes if r not in self.inner))


def is_number(node: fx.Node) -> bool:
    """Whether a node of a lowered graph is a number, which any segment makes itself."""
    return node.op == "call_function" and (not has_note(node) or isinstance(note(node).type, ScalarType))


def segments(graph: fx.Graph, phases: Collection[str]) -> list[Segment]:
    """The segments of some phases, in order."""
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function" and not is_number(node) and note(node).phase in phases
    ]
    segments = []
    # Where the parameter phase is part of the backward, it is one with it.
    for (region, uncaptured, phase), run in itertools.groupby(nodes, key=_place):
        members = list(run)
        numbers = _numbers(members)
        segments.append(Segment(_ordered(graph, numbers, members), region, uncaptured, phase))
    return segments


def _numbers(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The numbers that nodes read, and those that these are made of."""
    numbers: set[fx.Node] = set()
    pending = [read for node in nodes for read in node.all_input_nodes if is_number(read)]
    while pending:
        node = pending.pop()
        if node not in numbers:
            numbers.add(node)
            pending += [read for read in node.all_input_nodes if is_number(read)]
    return numbers


def _ordered(graph: fx.Graph, numbers: Collection[fx.Node], nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Numbers in front of the segment's nodes, but those that are sizes of what it makes itself behind that.

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


def _place(node: fx.Node) -> tuple[str, str, str]:
    noted = note(node)
    return noted.region, noted.uncaptured, BACKWARD if noted.phase == PARAMETER else noted.phase


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
        """Why no CUDA graph can hold it, forward and backward alike."""
        segment = self.forward or self.backward
        return segment.uncaptured if segment is not None else ""

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Of both; a number that both make stands once."""
        parts = (segment.nodes for segment in (self.forward, self.backward) if segment is not None)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(parts)))

    @cached_property
    def identities(self) -> tuple[int, ...]:
        """Of its draws, in the order of first use."""
        return tuple(
            dict.fromkeys(identity for node in self.nodes for identity in _identities((node.args, node.kwargs)))
        )

    @cached_property
    def text(self) -> str:
        """Equal for units that compute the same of their operands, in the same order of these."""
        names = {name: f"${i}" for i, name in enumerate((*self.early, "late", *self.late))}
        names |= {node.name: f"%{i}" for i, node in enumerate(self.nodes)}
        count = len(self.forward.nodes) if self.forward is not None else 0
        lines = [f"{len(self.early)} {len(self.late)} {count} {bool(self.uncaptured)}"]
        random = {identity: f"?{i}" for i, identity in enumerate(self.identities)}
        for node in self.nodes:
            mapped = fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: _written(leaf, names, random))
            lines.append(f"{_function(node.target)} {mapped}")
        return "\n".join(lines)

    def position(self, name: str) -> int:
        """Of the node of that name."""
        return self._positions[name]

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}


def graph_of(unit: Unit, results: Sequence[Sequence[int]], sizes: Sequence[str]) -> fx.GraphModule:
    """What a unit computes, as a function of sizes, its early operands, its identities and its late operands.

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
    """A tensor whose elements stand in memory one by one, without gaps, in any order of its dimensions."""
    if not isinstance(value, torch.Tensor):
        return value
    count = 1
    for stride, size in sorted(zip(map(_number, value.stride()), map(_number, value.shape), strict=True)):
        if size != 1 and stride != count:
            return value.contiguous()
        count *= size
    return value


def _number(size: Any) -> int:
    """A symbolic size as it is in the call that it is compiled for."""
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
    """A function is equal to itself alone, whatever its name."""
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"{target} {id(target)}"
