"""Which operations compute the rows of a batch apart, so that some rows can be computed after others.

Enters: a program of one rank, and the dimension of the rows of a node's operands. Leaves: what the node needs of each
operand, and where its results have their rows. The rules say so: chunks are an axis on which a rank computes one block
after the other, and rows are what it cuts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.ir.operators import axes_of
from fxpar.ir.program import (
    Program,
    ScalarType,
    TensorType,
    note,
    operands,
    output_layouts,
    output_types,
)
from fxpar.layout.layout import Placement, fits, shard
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import Size, divide, names, simplify
from fxpar.ops.collectives import COERCION_OF
from fxpar.ops.operator import Operator, alike
from fxpar.ops.token_chunks import SUMMED
from fxpar.rules.table import seeded
from fxpar.signatures.engine import Refusal
from fxpar.signatures.op_call import SIZED, OpCall, call_of

aten = torch.ops.aten


@dataclass(frozen=True)
class RowCut:
    """How a node computes rows apart.

    Attributes:
        operands: of each tensor among the operands the dimension of which it needs the rows of a chunk; None where it
            needs the whole.
        outputs: of each output the dimension of the rows, or `SUMMED`.
    """

    operands: tuple[int | None, ...]
    outputs: tuple[int, ...]


class RowCuts:
    """The rules, for chunks of the rows of one program.

    Args:
        program: with property `local`, without calls of regions.
        rows: the symbol of their number.
        count: of the chunks.
    """

    def __init__(self, program: Program, rows: sympy.Symbol, count: int) -> None:
        self._program, self._rows, self._count = program, rows, count

    def rows_of(self, node: fx.Node) -> tuple[int | None, ...]:
        """Returns the dimension in which each output may have its rows, by its sizes; a guess that rules need."""
        return tuple(self._guess(kind) for kind in self._local(node))

    def _guess(self, kind: TensorType) -> int | None:
        many = self._count * self._rows
        whole = (dim for dim, size in enumerate(kind.shape) if size == many)
        first = next(whole, None)
        if first is None and kind.shape and divide(kind.shape[0], many) is not None:
            first = 0
        return first

    def of(self, node: fx.Node, known: Mapping[fx.Node, Sequence[int | None]]) -> RowCut | None:
        """Returns how a node computes chunks; None where it does not.

        Args:
            known: the dimension of the rows of each output of the nodes before it.
        """
        if node.op != "call_function" or isinstance(note(node).type, ScalarType) or note(node).random:
            return None
        dims = [dim for read in operands(node) for dim in known.get(read, ())]
        if node.target is operator.getitem:
            return self._of_item(node, dims)
        if all(dim is None or dim == SUMMED for dim in dims) or SUMMED in dims:
            return None
        if node.target in COERCION_OF:
            return self._of_coercion(node, dims[0])
        if not self._has_own_sizes(node):
            return None
        return self._by_rule(node, dims)

    def _of_item(self, node: fx.Node, dims: Sequence[int | None]) -> RowCut | None:
        """Takes one of the results of each chunk."""
        dim = dims[int(node.args[1])] if dims else None  # type: ignore[arg-type]
        return None if dim is None else RowCut(tuple(dims), (dim,))

    def _by_rule(self, node: fx.Node, dims: Sequence[int | None]) -> RowCut | None:
        call = self._call(node)
        if call is None:
            return None
        index = next(i for i, dim in enumerate(dims) if dim is not None)
        dim = dims[index]
        assert dim is not None
        placement = shard(dim, call.operands[index].shape[dim])
        try:
            signature, is_composite = seeded(call, index, placement)
        except (IndexError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
            return None  # rules take it for granted that arguments and types fit the operator
        if isinstance(signature, Refusal) or is_composite:
            return None
        if not all(
            fits(p, k.shape, call.n) and (p.kind in "IR" or _dim_of(p) is not None)
            for p, k in zip(signature.operands, call.operands, strict=True)
        ):
            return None
        before, after = [*map(_dim_of, signature.operands)], [*map(_dim_of, signature.outputs)]
        # Several groups of rows in one dimension are cut between the groups where a view takes them apart.
        if not all(map(self._has_rows, (*call.operands, *call.outputs), (*before, *after))):
            return None
        return _cut_of(before, after)

    def _has_rows(self, kind: TensorType, dim: int | None) -> bool:
        """Returns whether a dimension, if it is one, is a multiple of the rows."""
        return dim is None or dim == SUMMED or divide(kind.shape[dim], self._count * self._rows) is not None

    def _of_coercion(self, node: fx.Node, dim: int | None) -> RowCut | None:
        """Coerces each row: axes cut or sum something else of it."""
        (source,) = operands(node)
        for axis in axes_of(node):
            for layout in (*output_layouts(source), *output_layouts(node)):
                if layout.on(axis).is_shard and layout.on(axis).dim == dim:
                    return None
        return _cut_of([dim], [dim])

    def _has_own_sizes(self, node: fx.Node) -> bool:
        """Returns whether no number among the arguments depends on the rows, but the size of a view."""
        sizes = [
            note(read).type.value  # type: ignore[union-attr]
            for read in node.all_input_nodes
            if isinstance(note(read).type, ScalarType)
        ]
        return node.target in SIZED or str(self._rows) not in names(sizes)

    def _call(self, node: fx.Node) -> OpCall | None:
        target: Any = node.target
        if isinstance(target, Operator) and axes_of(node):
            target = alike(target)
            if target is None:
                return None
        call = call_of(node, self._count)
        kinds = tuple(kind for read in operands(node) for kind in self._local(read))
        arguments = {name: self._many(value) for name, value in call.arguments.items()}
        return replace(call, target=target, arguments=arguments, operands=kinds, outputs=self._local(node))

    def _local(self, node: fx.Node) -> tuple[TensorType, ...]:
        """Returns what a rank has of each output, with as many rows as there are in chunks of b rows."""
        axes = self._program.axes
        return tuple(
            TensorType(kind.dtype, tuple(self._more(size) for size in local_shape(kind.shape, layout, axes)))
            for kind, layout in zip(output_types(node), output_layouts(node), strict=True)
        )

    def _more(self, size: Size) -> Size:
        return size if isinstance(size, int) else _in_place_of(size, self._rows, self._count * self._rows)

    def _many(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._many, value))
        return self._more(value) if isinstance(value, sympy.Expr) else value


@lru_cache(maxsize=65536)
def _in_place_of(size: sympy.Expr, rows: sympy.Symbol, many: sympy.Expr) -> Size:
    """Returns a size with another number of rows."""
    return simplify(size.subs(rows, many))


def _dim_of(placement: Placement) -> int | None:
    """Returns the dimension that a placement cuts in runs of rows; `SUMMED` of summands, None of anything else."""
    if placement.kind == "P":
        return SUMMED
    piece = placement.piece
    return placement.dim if piece is not None and piece.outer == 1 and piece.is_plain else None


def _cut_of(before: Sequence[int | None], after: Sequence[int | None]) -> RowCut | None:
    """Returns the cut where each output has rows, or is summed over them."""
    if SUMMED in before or not after or None in after:
        return None
    return RowCut(tuple(before), tuple(dim for dim in after if dim is not None))
