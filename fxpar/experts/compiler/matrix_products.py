"""Products with a matrix for each pair of token and expert, in the forms in which torch has them.

Enters: a node. Leaves: whether it is such a product, of what and how its matrices stand. A helper of `chosen_matrices`,
whose terms these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxpar.experts.compiler.choices import argument, aten
from fxpar.ir.program import is_tensor, tensor_type
from fxpar.layout.symbolic_sizes import Size
from fxpar.rules import bind_arguments

_PRODUCTS = (aten.bmm.default, aten.matmul.default)
_TURNS = (aten.transpose.int, aten.permute.default, aten.mT.default)


@dataclass(frozen=True)
class Matrix:
    """The matrices that pairs take.

    Attributes:
        source: those of all experts, [E, …, …].
        choice: of the experts.
        experts: E.
        lead: how many dimensions the pairs have.
        dtype: of the matrices of pairs.
        flipped: whether theirs stand the other way round than those of all experts.
    """

    source: fx.Node
    choice: fx.Node
    experts: Size
    lead: int
    dtype: torch.dtype
    flipped: bool


@dataclass(frozen=True)
class Product:
    """A product of a pair's matrix with a vector.

    Attributes:
        matrix: the matrices.
        vector: by pair, or by token with 1 for K.
        transposed: whether the experts' matrices stand [E, in, out].
        of_tokens: whether the vector has no dimension for K at all.
    """

    matrix: Matrix
    vector: fx.Node
    transposed: bool
    of_tokens: bool = False


def product_of(node: fx.Node, chosen: Mapping[fx.Node, fx.Node]) -> Product | None:
    """A product of a matrix for each pair with one vector, whose result is the pair's.

    Args:
        chosen: values that are a choice, each with the top-k's own.
    """
    if node.op != "call_function" or not is_tensor(node):
        return None
    if node.target is aten.einsum.default:
        return _of_einsum(node, chosen)
    if node.target not in _PRODUCTS:
        return None
    left, right = argument(node, 0), argument(node, 1)
    rank = len(tensor_type(node).shape)
    if len(tensor_type(left).shape) != rank or len(tensor_type(right).shape) != rank:
        return None
    for value, vector, vector_dim in ((left, right, -1), (right, left, -2)):
        matrix = matrix_of(value, chosen)
        if matrix is not None and matrix.lead == rank - 2 and tensor_type(vector).shape[vector_dim] == 1:
            lead = tensor_type(value).shape[:-2]
            if tensor_type(node).shape[:-2] == lead:
                return Product(matrix, vector, (vector_dim == -2) != matrix.flipped)
    return None


def matrix_of(node: fx.Node, chosen: Mapping[fx.Node, fx.Node]) -> Matrix | None:
    """What pairs take of experts' matrices, where the value is that, cast or transposed at most."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    if node.target in _TURNS or node.target is aten._to_copy.default or node.target is aten.clone.default:
        matrix = matrix_of(argument(node, 0), chosen)
        if matrix is None or node.target is aten.clone.default:
            return matrix
        kind = tensor_type(node)
        if node.target is aten._to_copy.default:
            return replace(matrix, dtype=kind.dtype) if kind.dtype.is_floating_point else None
        return replace(matrix, flipped=not matrix.flipped) if _turns(node, matrix.lead) else None
    places = places_of(node)
    if places not in chosen:
        return None
    source = bind_arguments(node)["self"]
    kind = tensor_type(source)
    if len(kind.shape) != 3 or not kind.dtype.is_floating_point:
        return None
    lead = len(tensor_type(places).shape)
    if source.target is aten.transpose.int and {dim % 3 for dim in source.args[1:]} == {1, 2}:
        return Matrix(source.args[0], chosen[places], kind.shape[0], lead, kind.dtype, True)
    return Matrix(source, chosen[places], kind.shape[0], lead, kind.dtype, False)


def places_of(node: fx.Node) -> Any:
    """At which places the first dimension of a value is taken."""
    if node.target is aten.index.Tensor:
        places = bind_arguments(node)["indices"]
        return places[0] if len(places) == 1 else None
    if node.target is aten.index_select.default:
        args = bind_arguments(node)
        return args["index"] if args["dim"] == 0 else None
    return None


def _turns(node: fx.Node, lead: int) -> bool:
    """Whether it exchanges the two dimensions behind those of pairs."""
    rank = lead + 2
    if node.target is aten.mT.default:
        return True
    if node.target is aten.transpose.int:
        return {dim % rank for dim in (argument(node, 1), argument(node, 2))} == {lead, lead + 1}
    return [dim % rank for dim in argument(node, 1)] == [*range(lead), lead + 1, lead]


def _terms(node: fx.Node) -> tuple[list[str], list[fx.Node], str] | None:
    """The labels of an einsum of two operands, those, and the labels of its result."""
    args = bind_arguments(node)
    equation, values = str(args["equation"]).replace(" ", ""), list(args["tensors"])
    if "." in equation or "->" not in equation or len(values) != 2:
        return None
    inner, out = equation.split("->")
    labels = inner.split(",")
    if any(len(set(term)) != len(term) for term in (*labels, out)):
        return None
    return labels, values, out


def _of_einsum(node: fx.Node, chosen: Mapping[fx.Node, fx.Node]) -> Product | None:
    terms = _terms(node)
    if terms is None:
        return None
    labels, values, out = terms
    for operand, vector in ((0, 1), (1, 0)):
        matrix = matrix_of(values[operand], chosen)
        if matrix is None:
            continue
        lead, sides = labels[operand][: matrix.lead], labels[operand][matrix.lead :]
        summed = [label for label in sides if label not in out]
        if len(summed) != 1 or out != lead + sides.replace(summed[0], ""):
            continue
        by_token = len(lead) > 1 and labels[vector] == lead[:-1] + summed[0]
        if not _same_sizes(labels, values) or not (by_token or labels[vector] == lead + summed[0]):
            continue
        is_inner_last = sides[1] == summed[0]  # [out, in], as in a linear layer
        return Product(matrix, values[vector], is_inner_last == matrix.flipped, by_token)
    return None


def _same_sizes(labels: list[str], values: list[fx.Node]) -> bool:
    """Whether each label has one size: an einsum broadcasts those of 1."""
    sizes: dict[str, Size] = {}
    return all(
        sizes.setdefault(label, size) == size
        for term, value in zip(labels, values, strict=True)
        for label, size in zip(term, tensor_type(value).shape, strict=True)
    )


def contraction(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Values [T, K, h] by pair and weights [T, K] whose products are added up over K; T may be several dimensions."""
    if node.target is aten.einsum.default:
        terms = _terms(node)
        if terms is None:
            return
        labels, values, out = terms
        for pairs, weights in ((0, 1), (1, 0)):
            lead = labels[pairs][:-1]
            is_sum = labels[weights] == lead and out == lead[:-1] + labels[pairs][-1:]
            if len(lead) > 1 and is_sum and _same_sizes(labels, values):
                yield values[pairs], values[weights]
    elif node.target in _PRODUCTS:
        factors, rows = argument(node, 0), argument(node, 1)
        left, right = tensor_type(factors).shape, tensor_type(rows).shape
        if len(left) == len(right) > 2 and left[-2] == 1 and left[:-2] == right[:-2]:
            yield rows, factors
