"""The experts that a router chooses for its tokens, and the operators on rows that are sorted by them.

Terms: a *choice* are the experts of all tokens as a top-k gives them, whatever its shape; T tokens, K experts of each,
M = T * K pairs.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.errors import CaptureError
from fxpar.experts.compiler.emitter import Emitter
from fxpar.ir.program import TensorType, tensor_type
from fxpar.layout.symbolic_sizes import Size, divide
from fxpar.rules import bind_arguments

aten, fxp = torch.ops.aten, torch.ops.fxpar

# `where(mask)`, and `mask.nonzero(as_tuple=True)`, which is the same: they pick as many rows as the mask says.
PICKS, PICKS_TOO = aten.where.default, aten.nonzero_numpy.default

# What gives the same elements in the same order.
SHAPED = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.flatten.using_ints)

_ZEROS = (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)


def argument(node: fx.Node, index: int) -> Any:
    """Returns what a call has at a place."""
    return node.args[index]


def plain(value: fx.Node) -> fx.Node:
    """Returns what the value is a view or a copy of, with the same elements in the same order."""
    while value.target in SHAPED or value.target is aten.clone.default:
        value = argument(value, 0)
    return value


def is_choice(node: fx.Node) -> bool:
    """Returns whether these are the indices of a top-k over the last dimension, of as many as are written down.

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


def choice_of(node: fx.Node) -> fx.Node | None:
    """Returns the top-k of whose indices a traced value is computed, and of nothing else but numbers.

    So loops over experts find their rows.
    """
    pending, seen = [node], set[fx.Node]()
    while pending:
        source = pending.pop()
        if source.target is aten.topk.default:
            return source
        value = source.meta.get("val")
        if source in seen or (isinstance(value, Tensor) and value.is_floating_point()):
            continue
        seen.add(source)
        pending.extend(source.all_input_nodes)
    return None


def picked_rows_error(where: str, path: str) -> CaptureError:
    """Returns the error of a loop over experts that picks as many rows as the routing sends.

    Args:
        where: the author's line.
        path: of the module that has it; empty where that is the model.
    """
    globs = f"Plan(experts=Experts(expert_modules=({path!r},)))"
    named = f"name it: {globs}" if path else "make it a module, and name that in Experts(expert_modules=…)"
    return CaptureError(
        "its rows are picked expert by expert, as many as the routing sends to each, which no program can hold",
        where=f"{where} ({path})" if path else where,
        remedy="call fxpar.ops.experts in it; or where the forward is (hidden_states, top_k_index, top_k_weights) "
        f"{named}",
    )


def chosen_of(choice: fx.Node) -> Size:
    """Returns of how many experts a top-k chooses."""
    return tensor_type(argument(argument(choice, 0), 0)).shape[-1]


def is_zero(tensor: object) -> bool:
    """Returns whether it is a tensor of zeros."""
    if not isinstance(tensor, fx.Node):
        return False
    return bool(tensor.target in _ZEROS or (tensor.target is aten.full.default and argument(tensor, 1) in (0, False)))


def is_known(sizes: tuple[Size, ...]) -> bool:
    """Returns whether all sizes are numbers."""
    return all(isinstance(size, int) for size in sizes)


def untransposed(matrices: fx.Node) -> tuple[fx.Node, bool]:
    """Returns the matrices [E, …, …] that these are a transpose of, and whether they are one."""
    is_turned = matrices.target is aten.transpose.int and {dim % 3 for dim in matrices.args[1:]} == {1, 2}  # type: ignore[operator]
    return (argument(matrices, 0), True) if is_turned else (matrices, False)


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
        """Returns a number of pairs or tokens, as a number or a node."""
        tokens = self.emit.size(self.chosen, 0)
        return tokens if size == self.tokens else self.emit.number(operator.mul, tokens, self.k)

    def taken(self, source: fx.Node, k: int) -> fx.Node:
        """Takes rows [M, f] of tokens [T, f] with K for `k`, of pairs [M, f] with 1."""
        kind = tensor_type(source)
        shape = TensorType(kind.dtype, (self.rows, kind.shape[1]))
        return self.emit.call(fxp.moe_permute.default, (source, self.order, k), shape)

    def spread(self, source: fx.Node) -> fx.Node:
        """Gives each row what its expert has of [E, f]."""
        kind = tensor_type(source)
        shape = TensorType(kind.dtype, (self.rows, kind.shape[1]))
        return self.emit.call(fxp.expand_by_expert.default, (source, self.counts, self.count(self.rows)), shape)

    def put(self, rows: fx.Node, size: Size, k: int) -> fx.Node:
        """Puts rows [M, f] back at their pairs, with 1 for `k`, or adds them up for their tokens, with K."""
        kind = tensor_type(rows)
        shape = TensorType(kind.dtype, (size, kind.shape[1]))
        return self.emit.call(fxp.moe_unpermute.default, (rows, self.order, self.count(size), k), shape)

    def moe_combine(self, rows: fx.Node, weights: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Adds rows [M, f] up for their tokens, with weights [T, K]."""
        shape = TensorType(dtype, (self.tokens, tensor_type(rows).shape[1]))
        return self.emit.call(fxp.moe_combine.default, (rows, weights, self.order, dtype), shape)

    def weighed(self, rows: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Returns the rows and the weights [T, K] whose product these rows [M, f] are; None where they are no such."""
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
