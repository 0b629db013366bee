"""Operations on each row by itself, written for rows that stand sorted.

Enters: an operation on values whose leading dimensions are something that has rows (pairs, tokens of an expert), and
the rows of its operands. Leaves: the same operation on rows. A helper of `chosen_matrices` and `looped_experts`.

Terms: see `choices`. What stands behind the leading dimensions of a value is its *trail*; its rows are [M, trail].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxpar.experts.compiler.choices import ChosenRows, aten
from fxpar.ir.program import TensorType, is_tensor, note, operands, output_types, tensor_type
from fxpar.layout.symbolic_sizes import Size, product
from fxpar.rules import bind_arguments
from fxpar.rules.table import rule_of
from fxpar.signatures.pointwise import pointwise_labels

# Operations along one dimension, which may be any of the trail.
ALONG = frozenset(
    (
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.cat.default,
        aten.softmax.int,
    )
)


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operation is done to each element, with no random bits."""
    rule = rule_of(node.target)
    is_each = rule is not None and rule.labels is pointwise_labels
    return is_each and is_tensor(node) and not note(node).random


def with_trail(sort: ChosenRows, rows: fx.Node, trail: tuple[Size, ...]) -> fx.Node:
    """Rows with another trail of as many elements."""
    while rows.target is aten.view.default and tensor_type(rows).shape != (sort.rows, *trail):
        source = rows.args[0]
        assert isinstance(source, fx.Node)
        if tensor_type(source).shape[:1] != (sort.rows,):
            break
        rows = source
    return sort.emit.view(rows, [-1, *trail], (sort.rows, *trail))


def is_written(trail: tuple[Size, ...]) -> bool:
    """Whether all sizes are numbers."""
    return all(isinstance(size, int) for size in trail)


def for_all_rows(sort: ChosenRows, value: fx.Node, trail: int) -> fx.Node | None:
    """A value that has nothing of its own for any row, as it is broadcast to rows with a trail of so many dimensions.

    None where its leading dimensions are more than that, and not all 1.
    """
    shape = tensor_type(value).shape
    if len(shape) <= trail:
        return value
    trailing = shape[len(shape) - trail :]
    if not is_written(trailing) or product(shape[: len(shape) - trail]) != 1:
        return None
    return sort.emit.view(value, list(trailing), trailing)


def pointwise(sort: ChosenRows, node: fx.Node, others: Mapping[fx.Node, fx.Node], lead: int) -> fx.Node:
    """An operation on each element.

    Args:
        others: what takes the place of its operands.
        lead: how many leading dimensions its result has.
    """
    kind = tensor_type(node)
    return sort.emit.shifted(node, others, TensorType(kind.dtype, (sort.rows, *kind.shape[lead:])), 0)


def along(sort: ChosenRows, node: fx.Node, others: Mapping[fx.Node, fx.Node], lead: int) -> fx.Node | None:
    """An operation along a dimension of the trail; None where it is along another one."""
    rank, dim = len(tensor_type(operands(node)[0]).shape), bind_arguments(node).get("dim", 0)
    if not isinstance(dim, int) or dim % rank < lead:
        return None
    kinds = tuple(TensorType(kind.dtype, (sort.rows, *kind.shape[lead:])) for kind in output_types(node))
    args: list[Any] = list(fx.map_arg(node.args, lambda arg: others.get(arg, arg)))
    kwargs: dict[str, Any] = fx.map_arg(node.kwargs, lambda arg: others.get(arg, arg))
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    place, row_dim = names.index("dim"), dim % rank - lead + 1
    if place < len(args):
        args[place] = row_dim
    else:
        kwargs["dim"] = row_dim
    return sort.emit.call(node.target, args, kinds[0] if is_tensor(node) else kinds, **kwargs)
