"""Counts of rows as values: what sums over the batch are divided by, and numbers that depend on the number of rows.

Enters: an operation of a program whose batch is divided. Leaves: nodes in front of it. A helper of `divide_batch`.

Ranks may bring other numbers of rows, so that no rank knows how many there are: each counts what it has, and the counts
are summed over the ranks with what they divide.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.layout.symbolic_sizes import Size, divide, names, product
from fxpar.ops.global_size import size
from fxpar.program.program import ScalarType, TensorType, describe, note, operands, set_note, tensor_type
from fxpar.rules import bind_arguments

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which a sum is taken: half precision ends at 65,504, or has eight bits."""
    return torch.float32 if dtype in _NARROW else dtype


def scalar(node: fx.Node) -> Size:
    """The size that a node is; 1 where it is a tensor."""
    kind = note(node).type
    return kind.value if isinstance(kind, ScalarType) else 1


class Counting:
    """Operations in front of one that takes a mean.

    Attributes:
        ranks: 1, or the data ranks, of whose own means the mean is to be taken.
        adds: whether that is their sum.
        mean: what took the operation's place.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, batch: str, ranks: int = 1, adds: bool = False) -> None:
        self.graph, self.node, self.batch, self.ranks, self.adds = graph, node, batch, ranks, adds
        self.given = bind_arguments(node)
        self.mean: fx.Node | None = None

    def varies(self, size: Size) -> bool:
        """Whether a size depends on the batch."""
        return self.batch in names((size,))

    def call(self, suffix: str, target: Any, args: tuple[Any, ...], kind: TensorType, **kwargs: Any) -> fx.Node:
        """An operation with the place of the mean."""
        with self.graph.inserting_before(self.node):
            new = self.graph.create_node("call_function", target, args, kwargs, name=f"{self.node.name}_{suffix}")
        return set_note(new, replace(note(self.node), type=kind, random=0))

    def cast(self, suffix: str, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` in a type."""
        kind = tensor_type(x)
        if kind.dtype == dtype:
            return x
        return self.call(suffix, aten._to_copy.default, (x,), TensorType(dtype, kind.shape), dtype=dtype)

    def total(self, suffix: str, x: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        """The sum of all elements; of each data rank's where their means are to be taken."""
        kind, options = tensor_type(x), {} if dtype is None else {"dtype": dtype}
        if self.ranks == 1:
            return self.call(suffix, aten.sum.default, (x,), TensorType(dtype or kind.dtype, ()), **options)
        n, size = self.ranks, product(kind.shape)
        share = divide(size, n)
        if share is None:
            remedy = "put the batch first, or take loss_reduction=mean"
            raise PlanError(f"its {size} elements are not those of {n} ranks", where=describe(self.node), remedy=remedy)
        by_rank = self.call("own", aten.view.default, (x, [n, -1]), TensorType(kind.dtype, (n, share)))
        return self.call(
            suffix, aten.sum.dim_IntList, (by_rank, [1], False), TensorType(dtype or kind.dtype, (n,)), **options
        )

    def count(self, x: fx.Node, dims: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """How many elements a sum over dimensions of `x` takes in, counted where their sizes depend on inputs."""
        shape = list(tensor_type(x).shape)
        factor = product(shape[dim] for dim in dims if isinstance(shape[dim], int))
        symbolic = [dim for dim in range(len(shape)) if dim in dims and not isinstance(shape[dim], int)]
        for dim in reversed(range(len(shape))):
            if dim not in symbolic:
                rest = tuple(size for other, size in enumerate(shape) if other != dim)
                x = self.call("row", aten.select.int, (x, dim, 0), TensorType(tensor_type(x).dtype, rest))
                shape = list(rest)
        kind = TensorType(dtype, tuple(shape))
        total = self.total("count", self.call("ones", aten.ones_like.default, (x,), kind, dtype=dtype))
        if factor != 1:
            total = self.call("elements", aten.mul.Tensor, (total, factor), tensor_type(total))
        return total

    def finish(self, total: fx.Node, count: fx.Node) -> None:
        """The quotient takes the place of the mean; of several ranks' the mean or the sum of theirs."""
        kind = tensor_type(total)
        if self.ranks == 1:
            kind = TensorType(kind.dtype, tensor_type(self.node).shape)
        value = self.call("quotient", aten.div.Tensor, (total, count), kind)
        if self.ranks > 1:
            whole = TensorType(kind.dtype, ())
            value = self.call("means", aten.sum.default, (value,), whole)
            value = value if self.adds else self.call("average", aten.div.Tensor, (value, self.ranks), whole)
        self.replace(value)

    def replace(self, new: fx.Node) -> None:
        """A value takes the place of the operation, with its name and type."""
        value = self.cast("mean", new, tensor_type(self.node).dtype)
        name = self.node.name
        self.node.replace_all_uses_with(value)
        self.graph.erase_node(self.node)
        value.name = name
        self.mean = value


# Numbers of sizes, and what they are of counts.
_ARITHMETIC: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
}
# Operations of a tensor and a number.
_SCALED: Mapping[Any, Any] = {
    overload: packet.Tensor
    for packet in (aten.add, aten.sub, aten.mul, aten.div)
    for overload in (packet.Tensor, packet.Scalar)
}


def count_numbers(graph: fx.Graph, batch: str) -> None:
    """Puts counts in the place of numbers that depend on the batch, where these meet values and are not sizes.

    A number that is made a tensor is one, and with it what capture makes of floating numbers (`1 / b`).
    """
    for node in list(graph.nodes):
        if node.target is aten.scalar_tensor.default:
            _count_tensor(Counting(graph, node, batch))
            continue
        if node.target not in _SCALED or not tensor_type(node).is_float:
            continue
        numbers = [x for x in node.args[:2] if isinstance(x, fx.Node) and batch in names((scalar(x),))]
        counting = Counting(graph, node, batch)
        counts = {x: count for x in numbers if (count := _count(counting, x)) is not None}
        if not counts:
            continue
        kind = tensor_type(node)
        values = [counts.get(x, x) if isinstance(x, fx.Node) else x for x in node.args[:2]]
        values = [counting.cast("wide", x, wide(kind.dtype)) if _is_tensor(x) else x for x in values]
        new = counting.call("counted", _SCALED[node.target], tuple(values), TensorType(wide(kind.dtype), kind.shape))
        new.kwargs = {k: v for k, v in node.kwargs.items() if k == "alpha"}
        counting.replace(new)


def _count_tensor(counting: Counting) -> None:
    number = counting.given["s"]
    count = _count(counting, number)
    if count is not None and count is not number:
        counting.replace(count)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and isinstance(note(x).type, TensorType)


def _count(counting: Counting, number: Any) -> Any:
    """A number as a count, a plain one as it is; None where it is made in another way."""
    if not isinstance(number, fx.Node) or not counting.varies(scalar(number)):
        return number
    dtype = wide(tensor_type(counting.node).dtype)
    if number.target is size:
        (source,), dim = operands(number), number.args[1]
        return counting.count(source, [dim], dtype)  # type: ignore[list-item]
    target = _ARITHMETIC.get(number.target)
    parts = [_count(counting, part) for part in number.args]
    if target is None or any(part is None for part in parts):
        return None
    if not _is_tensor(parts[0]):  # these operations take a tensor first
        if number.target not in (operator.add, operator.mul):
            return None
        parts.reverse()
    return counting.call("number", target, tuple(parts), TensorType(dtype, ()))
