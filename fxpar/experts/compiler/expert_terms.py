"""What the experts of a loop add up: the terms of a sum.

Enters: a graph in one spelling. Leaves: which values are an expert's results with its weights, and which sums are those
of all experts of a choice. A helper of `looped_experts`, whose terms these are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.experts.compiler.choices import argument, aten, choices, chosen_of
from fxpar.experts.compiler.expert_masks import Column, Loop
from fxpar.ir.program import is_tensor, tensor_type
from fxpar.rules import bind_arguments


@dataclass(frozen=True)
class Term:
    """What one expert adds.

    Attributes:
        node: its results, weighed.
        made: its results.
        column: what weighs them.
    """

    node: fx.Node
    made: fx.Node
    column: Column


def terms_of(graph: fx.Graph) -> dict[fx.Node, Term]:
    """The terms of all loops, by node."""
    loop, terms = Loop(choices(graph)), dict[fx.Node, Term]()
    for node in graph.nodes:
        if node.op != "call_function" or not is_tensor(node):
            continue
        is_cast = node.target is aten._to_copy.default and tensor_type(node).is_float  # integers are cut off
        if is_cast and argument(node, 0) in terms:
            terms[node] = terms[argument(node, 0)]
        if node.target is not aten.mul.Tensor:
            continue
        for unweighed, weights in (node.args, node.args[::-1]):
            if not all(isinstance(factor, fx.Node) and is_tensor(factor) for factor in (unweighed, weights)):
                continue  # a size is a node too
            shape = tensor_type(unweighed).shape
            if tensor_type(weights).shape != (*shape[:-1], 1) or tensor_type(node).shape != shape:
                continue
            column = loop.column(weights)
            if column is not None:
                terms[node] = Term(node, unweighed, column)
    return terms


def is_loop(terms: Sequence[Term]) -> bool:
    """Whether they are one of each expert of one choice, with one table of weights."""
    if not terms:
        return False
    first = terms[0].column
    same = all((t.column.choice, t.column.weights) == (first.choice, first.weights) for t in terms)
    is_picked = {t.column.picks is None for t in terms}
    return (
        same
        and len(is_picked) == 1
        and sorted(t.column.expert for t in terms) == [*range(int(chosen_of(first.choice)))]
    )


def added(node: fx.Node, terms: Mapping[fx.Node, Term], done: set[fx.Node]) -> tuple[list[Term], fx.Node | None]:
    """The terms that a value adds up, and what else is in the sum.

    Args:
        done: filled with the sums that are parts of this one.
    """
    if node.target is aten.sum.dim_IntList:
        stacked, args = argument(node, 0), bind_arguments(node)
        is_plain = stacked.target is aten.stack.default and bind_arguments(stacked).get("dim", 0) == 0
        values = argument(stacked, 0) if is_plain else []
        fits = list(args["dim"] or ()) == [0] and not args.get("keepdim", False) and all(v in terms for v in values)
        same = is_plain and tensor_type(node).dtype == tensor_type(stacked).dtype
        return ([terms[value] for value in values], None) if fits and same else ([], None)
    addends: list[Term] = []
    total: fx.Node | None = node
    while total is not None:
        step = _step(total, terms)
        if step is None or (addends and not _continues(addends, step[1])):
            break
        done.add(total)
        total, new_addends = step
        addends.extend(new_addends)
    return addends, total


def _continues(addends: Sequence[Term], new_addends: Sequence[Term]) -> bool:
    """Whether terms are of the same loop: those of another one may be in the sum that it starts with."""
    first, numbers = addends[0].column, {term.column.expert for term in addends}
    return all(
        (term.column.choice, term.column.weights) == (first.choice, first.weights) and term.column.expert not in numbers
        for term in new_addends
    )


def _step(node: fx.Node, terms: Mapping[fx.Node, Term]) -> tuple[fx.Node | None, list[Term]] | None:
    """What a value adds to another one."""
    args = bind_arguments(node) if node.op == "call_function" else {}
    if args.get("alpha", 1) != 1:
        return None
    if node.target is aten.index_add.default:
        term = terms.get(args["source"])
        is_own = term is not None and term.column.picks is not None and args["dim"] == 0
        if not is_own or term is None or term.column.picks is None:
            return None
        picks, places = term.column.picks, args["index"]
        is_tokens = places.target is operator.getitem and places.args == (picks.where, picks.tokens)
        return (args["self"], [term]) if is_tokens else None
    if node.target is not aten.add.Tensor:
        return None
    left, right = args["self"], args["other"]
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    parts = [terms[value] for value in (left, right) if value in terms]
    shape = tensor_type(node).shape
    if any(t.column.picks is not None for t in parts) or {tensor_type(left).shape, tensor_type(right).shape} != {shape}:
        return None
    if len(parts) == 2:
        return None, parts
    return (right if left in terms else left, parts) if parts else None
