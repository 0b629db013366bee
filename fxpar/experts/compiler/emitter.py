"""Adds typed operations to a graph: what is written for routed rows in place of an author's operations."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.ir.program import ScalarType, TensorType, insert_call, note, tensor_type
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.ops.rank_dim import shard_over

aten = torch.ops.aten


def part_of(size: Size, part: Fraction) -> Size:
    """Returns a part of a size, rounded up."""
    of = part.denominator
    return simplify(sympy.floor((size * part.numerator + of - 1) / sympy.Integer(of)))


class Emitter:
    """Adds nodes in front of a place, each with a note like that of the operation it stands for."""

    def __init__(self, graph: fx.Graph, place: fx.Node) -> None:
        self.graph, self._place = graph, place
        self._note = replace(note(place), type=None, layout=None, needs=(), random=0)

    def like(self, node: fx.Node) -> None:
        """Has nodes stand in front of this one from here on, and for it."""
        self._place = node
        self._note = replace(note(node), type=None, layout=None, needs=(), random=0)

    def stand(self, place: fx.Node) -> None:
        """Has nodes stand in front of this one from here on, for what they stood for."""
        self._place = place

    def call(self, target: Any, args: Sequence[Any], kind: Any, **kwargs: Any) -> fx.Node:
        """Adds an operation."""
        return insert_call(self._place, target, args, replace(self._note, type=kind), **kwargs)

    def several(self, target: Any, args: Sequence[Any], kinds: tuple[TensorType, ...]) -> list[fx.Node]:
        """Adds an operation of several results, and returns these."""
        source = self.call(target, args, kinds)
        return [self.call(operator.getitem, (source, index), kind) for index, kind in enumerate(kinds)]

    def view(self, x: fx.Node, sizes: Sequence[Any], shape: Sequence[Size]) -> fx.Node:
        """Returns the same elements in another shape.

        Args:
            sizes: numbers, nodes and at most one -1.
            shape: the same in symbols.
        """
        kind = tensor_type(x)
        if tuple(shape) == kind.shape:
            return x
        return self.call(aten.view.default, (x, list(sizes)), TensorType(kind.dtype, tuple(shape)))

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Returns dimensions in another order; in memory the elements stay where they are."""
        kind = tensor_type(x)
        if list(dims) == list(range(len(kind.shape))):
            return x
        shape = tuple(kind.shape[dim] for dim in dims)
        return self.call(aten.permute.default, (x, list(dims)), TensorType(kind.dtype, shape))

    def over(self, x: fx.Node, dim: int, axis: str) -> fx.Node:
        """Returns the value, cut there."""
        return self.call(shard_over, (x, dim), tensor_type(x), axis=axis)

    def size(self, x: fx.Node, dim: int) -> Any:
        """Returns a dimension's size as a number, or as a node where it is symbolic."""
        size = tensor_type(x).shape[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, (x, dim), ScalarType(size))

    def number(self, target: Any, left: Any, right: int) -> Any:
        """Computes with a size."""
        if isinstance(left, int):
            return target(left, right)
        kind = note(left).type
        assert isinstance(kind, ScalarType)
        value = (
            sympy.floor(kind.value / sympy.Integer(right)) if target is operator.floordiv else target(kind.value, right)
        )
        return self.call(target, (left, right), ScalarType(simplify(value)))

    def part(self, number: Any, size: Size, part: Fraction) -> tuple[Any, Size]:
        """Returns a part of a size, rounded up: as a number or node, and in symbols."""
        times, of = part.numerator, part.denominator
        rows = number if times == 1 else self.number(operator.mul, number, times)
        if of > 1:
            rows = self.number(operator.floordiv, self.number(operator.add, rows, of - 1), of)
        return rows, part_of(size, part)

    def shifted(self, node: fx.Node, others: Mapping[fx.Node, fx.Node], kind: Any, count: int) -> fx.Node:
        """Adds an operation on rows, of rows after `count` more dimensions.

        Args:
            others: what takes the place of its operands.
            kind: type of the result.
        """
        args: tuple[Any, ...] = fx.map_arg(node.args, lambda arg: others.get(arg, arg))
        kwargs: dict[str, Any] = fx.map_arg(node.kwargs, lambda arg: others.get(arg, arg))
        names = [a.name for a in node.target._schema.arguments] if hasattr(node.target, "_schema") else []
        if "dim" in names and node.target is not operator.getitem:
            index = names.index("dim")
            dim = args[index] if index < len(args) else kwargs.get("dim", 0)
            dim = dim + count if dim >= 0 else dim
            if index < len(args):
                args = (*args[:index], dim, *args[index + 1 :])
            else:
                kwargs = {**kwargs, "dim": dim}
        return self.call(node.target, args, kind, **kwargs)
