"""The rows that tokens send to their experts, as a program has them.

Enters: a program. Leaves: for each sort of tokens by expert the operations on its rows, and which of them run where the
tokens are and which where the experts are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import fx

from fxpar.errors import PassError, PlanError
from fxpar.ir.program import Program, describe, operands, output_types, tensor_type
from fxpar.rules import bind_arguments
from fxpar.rules.table import rule_of
from fxpar.signatures.pointwise import pointwise_labels

aten = torch.ops.aten
fxp = torch.ops.fxpar

# What counts the rows of each expert.
_GROUPED = (fxp.grouped_linear.default, fxp.expand_by_expert.default, fxp.swiglu_rows.default)
# What makes tokens of rows.
PUTS = (fxp.moe_unpermute.default, fxp.moe_combine.default)
# Operations with a dimension among their arguments, which may be any but that of the rows.
_ALONG = frozenset(
    (
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.cat.default,
        aten.softmax.int,
        aten._softmax.default,
    )
)


@dataclass(frozen=True)
class Routed:
    """The rows of one sort.

    Attributes:
        sort: of tokens by expert.
        counts: rows of each expert.
        experts: how many there are.
        k: experts of a token.
        nodes: the operations on rows, in order.
        takes: those that make rows of tokens.
        puts: those that make tokens of rows.
        grouped: those that use each expert's own numbers.
        on_holders: those that run where the experts are.
    """

    sort: fx.Node
    counts: fx.Node
    experts: int
    k: int
    nodes: tuple[fx.Node, ...]
    takes: frozenset[fx.Node]
    puts: frozenset[fx.Node]
    grouped: frozenset[fx.Node]
    on_holders: frozenset[fx.Node]

    def experts_of_each(self, ranks: int) -> int:
        """Returns how many experts each of so many ranks has.

        Raises:
            PlanError: they are not shared out evenly.
        """
        experts, rest = divmod(self.experts, ranks)
        if rest:
            raise PlanError(
                f"{self.experts} experts are not shared out evenly by {ranks} ranks",
                where=describe(self.sort),
                remedy=f"choose an ep that divides {self.experts}",
            )
        return experts

    @property
    def rows(self) -> frozenset[fx.Node]:
        """Returns the values with one entry for each row."""
        return frozenset(self.nodes) - self.puts


def routed(program: Program) -> list[Routed]:
    """Returns the rows of each sort by expert, in the order of the program.

    Raises:
        PassError: an operation on rows is none that can run on a part of them.
    """
    sorts = [node for node in program.graph.nodes if node.target is fxp.sort_by_expert.default]
    return [_region(sort) for sort in sorts]


def _item(source: fx.Node, index: int) -> fx.Node:
    part = next((user for user in source.users if user.target is operator.getitem and user.args[1] == index), None)
    if part is None:
        raise PassError("nothing takes its order and its counts", where=describe(source), remedy="drop it")
    return part


def _region(sort: fx.Node) -> Routed:
    order, counts = _item(sort, 0), _item(sort, 1)
    indices = operands(sort)[0]
    rows: dict[fx.Node, None] = {}
    takes, puts, grouped, holders = set[fx.Node](), set[fx.Node](), set[fx.Node](), set[fx.Node]()
    counted = set[fx.Node]()  # that depend on an expert's numbers
    for node in sort.graph.nodes:
        if node.op != "call_function":
            continue
        used = operands(node)
        if node.target is fxp.moe_permute.default and used[1] is order:
            takes.add(node)
        elif node.target in PUTS and used[-1] is order:
            puts.add(node)
        elif node.target in _GROUPED and used[-1] is counts:
            grouped.add(node)
            counted.add(node)
            holders.add(node)
        elif not any(operand in rows for operand in used):
            if used and (order in used or counts in used) and node.target is not operator.getitem:
                _refuse(node, "it reads which rows belong to which expert")
            continue
        else:
            _check(node, rows)
            row_operands = [operand for operand in used if operand in rows]
            if counted.intersection(row_operands):
                counted.add(node)
            if all(operand in holders for operand in row_operands):
                holders.add(node)
        if node in grouped and any(o in counted and o not in holders for o in used):
            _refuse(node, "it computes experts of rows that are weighed already")
        if node not in puts:
            rows[node] = None
    nodes = tuple(node for node in sort.graph.nodes if node in rows or node in puts)
    ends = [node for node in rows if any(u not in rows and u not in puts for u in node.users)]
    if ends:
        _refuse(ends[0], "what it makes of rows leaves them otherwise than by moe_unpermute or moe_combine")
    experts, k = int(tensor_type(counts).shape[0]), int(tensor_type(indices).shape[-1])
    return Routed(
        sort, counts, experts, k, nodes, frozenset(takes), frozenset(puts), frozenset(grouped), frozenset(holders)
    )


def _check(node: fx.Node, rows: Mapping[fx.Node, None]) -> None:
    """Refuses what is not done to each row by itself."""
    if node.target is operator.getitem:
        return
    rule = rule_of(node.target)
    kinds = output_types(node)
    leading = tensor_type(next(o for o in operands(node) if o in rows)).shape[:1] if kinds else ()
    if any(kind.shape[:1] != leading for kind in kinds):
        _refuse(node, "it does not keep the rows apart")
    if rule is not None and rule.labels is pointwise_labels:
        rank = len(kinds[0].shape)
        others = (o for o in operands(node) if o not in rows and len(tensor_type(o).shape) == rank)
        other = next(others, None)
        if other is not None and tensor_type(other).shape[0] != 1:
            _refuse(node, f"%{other.name} has rows in an order of its own")
        return
    if node.target is aten.view.default and all(isinstance(size, int) for size in kinds[0].shape[1:]):
        return
    if node.target in _ALONG:
        args, rank = bind_arguments(node), len(tensor_type(operands(node)[0]).shape)
        dim = args.get("dim", 0)
        if isinstance(dim, int) and dim % (rank + (node.target is aten.unsqueeze.default)) != 0:
            return
    _refuse(node, "it is not known to compute each row by itself")


def _refuse(node: fx.Node, reason: str) -> NoReturn:
    raise PassError(
        f"{reason}, and rows of experts are to be sent to other ranks",
        where=describe(node),
        remedy="write it on each row (element by element, or along other dimensions), or set ep=1",
    )
