"""How often each number occurs, where all are known to be small enough.

Enters: a `bincount` with a `minlength`, which a capture takes for one of as many counts (`fxpar.bin_counts`). Leaves:
comparisons and a sum. A helper of `canonicalize`.

A larger number would make more counts, and sizes of a program do not depend on values. What a top-k or an argmax
gives is smaller than the size of what it chooses of.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxpar.errors import CaptureError
from fxpar.experts.compiler.choices import argument, plain
from fxpar.experts.compiler.emitter import Emitter
from fxpar.ir.program import TensorType, note, tensor_type
from fxpar.rules import bind_arguments

aten = torch.ops.aten

# Which give a value and its place along a dimension.
_PLACES = (aten.topk.default, aten.max.dim, aten.min.dim)
# Which give the place alone, without a dimension that among all elements.
_ARGUMENTS = (aten.argmax.default, aten.argmin.default)


def count_by_comparison(graph: fx.Graph, node: fx.Node) -> None:
    """Writes counts as comparisons.

    Before::

        %n = fxpar.bin_counts.default(%chosen, 8) : i64[8]

    After::

        %column = aten.view.default(%chosen, [-1, 1]) : i64[2*b*s, 1]
        %numbers = aten.arange.default(8) : i64[8]
        %marks = aten.eq.Tensor(%column, %numbers) : bool[2*b*s, 8]
        %n = aten.sum.dim_IntList(%marks, [0]) : i64[8]

    Raises:
        CaptureError: a number may be larger than those that are counted.
    """
    source, count = argument(node, 0), argument(node, 1)
    if _beyond(source) > count:
        raise CaptureError(
            f"how many counts it gives depends on values of tensors: they may be {count} or more",
            where=note(node).source or f"%{node.name}",
            remedy=f"count what a top-k or an argmax chooses of at most {count}, or write "
            f"torch.nn.functional.one_hot(x, {count}).sum(0)",
        )
    emit, kind = Emitter(graph, node), tensor_type(source)
    column = emit.view(source, [-1, 1], (*kind.shape, 1))
    numbers = emit.call(aten.arange.default, (count,), TensorType(torch.int64, (count,)))
    marks = emit.call(aten.eq.Tensor, (column, numbers), TensorType(torch.bool, (*kind.shape, count)))
    counts = emit.call(aten.sum.dim_IntList, (marks, [0]), TensorType(torch.int64, (count,)))
    node.replace_all_uses_with(counts)
    graph.erase_node(node)


def _beyond(value: fx.Node) -> Any:
    """A number that none of the values reaches, all of which are 0 or more; infinite where none is known."""
    value = plain(value)
    while value.target is aten._to_copy.default and not tensor_type(value).is_float:
        value = plain(argument(value, 0))
    if value.target in _ARGUMENTS:
        return _size_along(value)
    if value.target is operator.getitem and argument(value, 1) == 1 and argument(value, 0).target in _PLACES:
        return _size_along(argument(value, 0))
    return float("inf")


def _size_along(node: fx.Node) -> Any:
    """The size of the dimension along which places are given; infinite where it is a size of the batch."""
    arguments, shape = bind_arguments(node), tensor_type(argument(node, 0)).shape
    dim = arguments.get("dim", None if node.target in _ARGUMENTS else -1)
    size = shape[int(dim)] if dim is not None and shape else None
    return size if isinstance(size, int) else float("inf")
