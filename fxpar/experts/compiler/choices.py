"""The experts that a router chooses for its tokens, and rows sorted by them.

Enters: a graph. Leaves: which values are a choice of a top-k, and the operators of `fxpar.ops.permute` for one. A
helper of what recognises experts (`sorted_rows`, `chosen_matrices`, `looped_experts`).

Terms: a *choice* are the experts of all tokens as a top-k gives them, whatever its shape; T tokens, K experts of each,
M = T * K pairs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from fxpar.experts.compiler.emitter import Emitter
from fxpar.ir.program import TensorType, tensor_type
from fxpar.layout.symbolic_sizes import Size, divide
from fxpar.rules import bind_arguments

aten, fxp = torch.ops.aten, torch.ops.fxpar

# What gives the same elements in the same order.
SHAPED = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.flatten.using_ints)


def argument(node: fx.Node, index: int) -> Any:
    """What a call is given at a place."""
    return node.args[index]


def plain(value: fx.Node) -> fx.Node:
    """The value with the same elements in the same order, of whatever shape, that this one is made of."""
    while value.target in SHAPED or value.target is aten.clone.default:
        value = argument(value, 0)
    return value


def is_choice(node: fx.Node) -> bool:
    """Whether these are the indices of a top-k over the last dimension, of as many as are written down.

    A top-k over tokens, whose number is a size of the batch, chooses no experts.
    """
    if node.target is not operator.getitem or argument(node, 1) != 1:
        return False
    top = argument(node, 0)
    assert isinstance(top, fx.Node)
    if top.target is not aten.topk.default:
        return False
    shape = tensor_type(argument(top, 0)).shape
    rank, sizes = len(shape), (shape[-1:], tensor_type(node).shape[-1:])
    is_last = rank > 1 and int(bind_arguments(top).get("dim", -1)) % rank == rank - 1
    return is_last and all(isinstance(size, int) for (size,) in sizes)


def chosen_of(choice: fx.Node) -> Size:
    """Of how many experts a top-k chooses."""
    return tensor_type(argument(argument(choice, 0), 0)).shape[-1]


def choices(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The values that are a choice in the order of tokens, each with the top-k's own."""
    choice_of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_choice(node):
            choice_of[node] = node
        elif (node.target in SHAPED and argument(node, 0) in choice_of) or _clamps_nothing(node, choice_of):
            choice_of[node] = choice_of[argument(node, 0)]
    return choice_of


def _clamps_nothing(node: fx.Node, choice_of: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether the node bounds indices of a choice by what they are within anyway, as transformers 5.17 does."""
    if node.target != aten.clamp.default or argument(node, 0) not in choice_of:
        return False
    bound = bind_arguments(node)
    least, most = bound.get("min"), bound.get("max")
    experts = chosen_of(choice_of[argument(node, 0)])
    return (least is None or (isinstance(least, int) and least <= 0)) and (
        most is None or (isinstance(most, int) and isinstance(experts, int) and most >= experts - 1)
    )


class ChosenRows:
    """The rows of one choice, sorted by expert.

    Args:
        choice: indices of a top-k.
        place: the sort stands in front of it.
        origin: what it stands for, in notes.

    Attributes:
        rows: M.
        tokens: T.
        k: K.
        experts: as many as the top-k chooses of.
        chosen: the choice, [T, K].
        order: the flat position of each row, [M].
        counts: rows of each expert.
    """

    def __init__(self, graph: fx.Graph, choice: fx.Node, place: fx.Node, origin: fx.Node) -> None:
        self.graph, self.choice, kind = graph, choice, torch.int64
        self.emit = Emitter(graph, origin)
        self.emit.stand(place)
        self.k, self.experts = int(tensor_type(choice).shape[-1]), int(chosen_of(choice))
        self.rows: Size = prod(tensor_type(choice).shape)
        tokens = divide(self.rows, self.k)
        assert tokens is not None
        self.tokens = tokens
        self.chosen = self.emit.view(choice, [-1, self.k], (tokens, self.k))
        self.order, self.counts = self.emit.several(
            fxp.sort_by_expert.default,
            (self.chosen, self.experts),
            (TensorType(kind, (self.rows,)), TensorType(kind, (self.experts,))),
        )

    def count(self, size: Size) -> Any:
        """A number of pairs or tokens."""
        tokens = self.emit.size(self.chosen, 0)
        return tokens if size == self.tokens else self.emit.number(operator.mul, tokens, self.k)

    def taken(self, source: fx.Node, k: int) -> fx.Node:
        """Rows [M, f] of tokens [T, f] with K for `k`, of pairs [M, f] with 1."""
        kind = tensor_type(source)
        shape = TensorType(kind.dtype, (self.rows, kind.shape[1]))
        return self.emit.call(fxp.moe_permute.default, (source, self.order, k), shape)

    def spread(self, source: fx.Node) -> fx.Node:
        """To each row what its expert has of [E, f]."""
        kind = tensor_type(source)
        shape = TensorType(kind.dtype, (self.rows, kind.shape[1]))
        return self.emit.call(fxp.expand_by_expert.default, (source, self.counts, self.count(self.rows)), shape)

    def put(self, rows: fx.Node, size: Size, k: int) -> fx.Node:
        """Rows [M, f] put back at their pairs, with 1 for `k`, or added up for their tokens, with K."""
        kind = tensor_type(rows)
        shape = TensorType(kind.dtype, (size, kind.shape[1]))
        return self.emit.call(fxp.moe_unpermute.default, (rows, self.order, self.count(size), k), shape)

    def moe_combine(self, rows: fx.Node, weights: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Rows [M, f] added up for their tokens with weights [T, K]."""
        shape = TensorType(dtype, (self.tokens, tensor_type(rows).shape[1]))
        return self.emit.call(fxp.moe_combine.default, (rows, weights, self.order, dtype), shape)

    def weighed(self, rows: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The rows and the weights [T, K] whose product these rows [M, f] are."""
        if rows.target is not aten.mul.Tensor:
            return None
        for unweighed, weight in (rows.args, rows.args[::-1]):
            if not isinstance(unweighed, fx.Node) or not isinstance(weight, fx.Node):
                continue
            if tensor_type(unweighed).shape != tensor_type(rows).shape or tensor_type(weight).shape != (self.rows, 1):
                continue
            weight = plain(weight)
            if weight.target is fxp.moe_permute.default and weight.args[1:] == (self.order, 1):
                return unweighed, self.emit.view(plain(argument(weight, 0)), [-1, self.k], (self.tokens, self.k))
        return None
