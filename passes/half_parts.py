"""The halves of what a rank has of a batch, and the whole of two halves.

Enters: a value of which data ranks may have parts, and the cut of its halves inside of these. Leaves: nodes behind it.
A helper of `interleave_halves`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.layout.layout import Layout, Placement, shard
from fxpar.layout.symbols import Size, divide, product
from fxpar.ops.sizes import size
from fxpar.program.halves import HALF_OF
from fxpar.program.program import Note, ScalarType, TensorType, note, output_layouts, set_note, tensor_type, update

aten = torch.ops.aten


def taken_apart(
    graph: fx.Graph, whole: fx.Node, cut: Placement, names: Sequence[str], axes: Mapping[str, int]
) -> tuple[fx.Node, ...]:
    """The parts of a value, in the order of the cut's ranks.

    Args:
        whole: its layout speaks of the other axes.
        cut: one run, of what the other axes leave.
        names: of the parts.
        axes: sizes of the other axes.
    """
    own = _Cut(graph, whole, tensor_type(whole), output_layouts(whole)[0], cut, len(names), axes)
    dim, n = cut.dim, own.ranks
    rows = own.call("parts", aten.unflatten.int, (whole, dim, own.sizes(whole, [n, own.parts])), own.apart, dim)
    found = []
    for index, name in enumerate(names):
        part = own.call(name, aten.select.int, (rows, dim + (n > 1), index), own.one, dim)
        update(part, origin=HALF_OF[index])
        if n > 1:
            part = own.call(name, aten.flatten.using_ints, (part, dim, dim + 1), own.half, dim)
        found.append(part)
    return tuple(found)


def joined(
    graph: fx.Graph,
    parts: Sequence[fx.Node],
    cut: Placement,
    whole: tuple[TensorType, Layout],
    name: str,
    axes: Mapping[str, int],
) -> fx.Node:
    """The value of which these are the parts.

    Args:
        cut: as of `taken_apart`, and so `axes`.
        whole: type and layout of the result.
        name: of the result.
    """
    own = _Cut(graph, parts[0], *whole, cut, len(parts), axes)
    dim, n = cut.dim, own.ranks
    given = list(parts)
    if n > 1:
        sizes = own.sizes(parts[0], [n])
        given = [own.call("rows", aten.unflatten.int, (part, dim, sizes), own.one, dim) for part in parts]
    stacked = own.call("parts", aten.stack.default, (given, dim + (n > 1)), own.apart, dim)
    return own.call("whole", aten.flatten.using_ints, (stacked, dim, dim + 1 + (n > 1)), own.shape, dim, name)


class _Cut:
    """Shapes of a value, [.., n * parts * k, ..] of n ranks, on the way to its parts."""

    def __init__(
        self,
        graph: fx.Graph,
        like: fx.Node,
        kind: TensorType,
        layout: Layout,
        cut: Placement,
        parts: int,
        axes: Mapping[str, int],
    ) -> None:
        self.graph, self.like, self.layout, self.parts, self.axes = graph, like, layout, parts, axes
        self.dtype, self.shape, dim = kind.dtype, kind.shape, cut.dim
        self.ranks = int(product(axes[axis] for axis, p in layout if p.is_shard and p.dim == dim))
        each = divide(kind.shape[dim], self.ranks * parts)
        assert each is not None, "the batch is a multiple of its parts"
        self.each: Size = each
        before, behind = kind.shape[:dim], kind.shape[dim + 1 :]
        self.one = (*before, *((self.ranks,) if self.ranks > 1 else ()), each, *behind)
        self.apart = (*before, *((self.ranks,) if self.ranks > 1 else ()), parts, each, *behind)
        self.half = (*before, self.ranks * each, *behind)

    def sizes(self, source: fx.Node, leading: Sequence[int]) -> list[Any]:
        """Sizes of the dimensions that one becomes, alike on all ranks: that of the ranks is the one left open."""
        if self.ranks == 1:
            return [*leading[1:], -1]
        dim = self._dim(source)
        return [-1, *leading[1:], self._number(source, dim, int(product(leading)))]

    def _dim(self, source: fx.Node) -> int:
        return next(p.dim for _, p in output_layouts(source)[0] if p.is_shard)

    def _number(self, source: fx.Node, dim: int, by: int) -> Any:
        if isinstance(self.each, int):
            return self.each
        whole = tensor_type(source).shape[dim]
        number = self.graph.create_node("call_function", size, (source, dim), name=f"{source.name}_rows")
        fqn, line = note(source).fqn, note(source).source
        set_note(number, Note(type=ScalarType(whole), fqn=fqn, source=line))
        each = self.graph.create_node("call_function", operator.floordiv, (number, by), name=f"{source.name}_each")
        return set_note(each, Note(type=ScalarType(self.each), fqn=fqn, source=line))

    def call(
        self, suffix: str, target: Any, args: tuple[Any, ...], shape: Sequence[Size], dim: int, name: str = ""
    ) -> fx.Node:
        """An operation behind all others; ranks cut the first of the dimensions that one becomes."""
        new = self.graph.create_node("call_function", target, args, name=name or f"{self.like.name}_{suffix}")
        moved = len(shape) - len(self.shape)
        layout = Layout(tuple((axis, self._moved(p, shape, dim, moved)) for axis, p in self.layout))
        kept = Note(
            type=TensorType(self.dtype, tuple(shape)),
            layout=layout,
            fqn=note(self.like).fqn,
            source=note(self.like).source,
        )
        return set_note(new, kept)

    def _moved(self, placement: Placement, shape: Sequence[Size], dim: int, by: int) -> Placement:
        if not placement.is_shard or placement.dim < dim:
            return placement
        if placement.dim > dim:
            return replace(placement, dim=placement.dim + by)
        return shard(dim, shape[dim])
