"""What the loss of a step is where it is a mean: over which rows and words it is taken (`Plan.loss_reduction`).

Enters: a program with a loss. Leaves: whose means are to be those of each rank, or what counts the words of the loss;
or an error where the loss is no such mean. A helper of `divide_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.ir.program import (
    Program,
    TensorType,
    ancestors,
    describe,
    insert_call,
    note,
    operands,
    output_node,
    tensor_type,
)
from fxpar.layout.symbolic_sizes import names
from fxpar.rewrite.means import MEANS, SUM
from fxpar.rules import bind_arguments
from fxpar.signatures.autograd_functions import added_loss, adding_nodes

# Losses that autograd functions add, as terms of the model's loss: a helper of `canonicalize`.

aten = torch.ops.aten


def add_losses(program: Program) -> None:
    """Makes the losses that functions add terms of the loss, of which nothing but the gradient is left.

    Before::

        %x_1 = fxpar.function(%x, %z_loss, path="model.AddLoss")
        return loss=%loss

    After, where the function multiplies by 0.1 (users of %x_1 use %x)::

        %z_loss_value = aten.detach.default(%z_loss)
        %z_loss_gradient = aten.sub.Tensor(%z_loss, %z_loss_value)
        %z_loss_term = aten.mul.Tensor(%z_loss_gradient, 0.1)
        %loss_added = aten.add.Tensor(%loss, %z_loss_term)
        return loss=%loss_added

    So the loss keeps its value, and all that weighs it weighs these too: microbatches, counts of words, data ranks, a
    scaler of gradients. A function whose result has no gradient adds nothing. Programs without a loss stay.
    """
    if not program.loss:
        return
    loss = program.output_nodes()[program.loss]
    reached = ancestors([loss], lambda node: node.target is not aten.detach.default)
    for node in adding_nodes(program):
        added = added_loss(node)
        if node in reached and added.factor:
            _add(program, added.loss, added.factor)
        node.replace_all_uses_with(added.passed)
        program.graph.erase_node(node)


def is_gradient_alone(node: Any) -> bool:
    """Returns whether a value is a term that `add_losses` made: zero, with a gradient."""
    while isinstance(node, fx.Node) and node.target in (aten.mul.Tensor, aten._to_copy.default):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.sub.Tensor:
        return False
    value, other = node.args
    return isinstance(other, fx.Node) and other.target is aten.detach.default and other.args[0] is value


def _add(program: Program, loss: fx.Node, factor: float) -> None:
    end = output_node(program.graph)
    total = program.output_nodes()[program.loss]

    def call(name: str, target: Any, args: tuple[Any, ...], kind: TensorType, **kwargs: Any) -> fx.Node:
        return insert_call(end, target, args, replace(note(total), type=kind, random=0), name, **kwargs)

    kind = tensor_type(loss)
    value = call(f"{loss.name}_value", aten.detach.default, (loss,), kind)
    term = call(f"{loss.name}_gradient", aten.sub.Tensor, (loss, value), kind)
    term = call(f"{loss.name}_term", aten.mul.Tensor, (term, factor), kind)
    if kind.dtype != tensor_type(total).dtype:
        kind = tensor_type(total)
        term = call(f"{loss.name}_cast", aten._to_copy.default, (term,), kind, dtype=kind.dtype)
    added = call(f"{total.name}_added", aten.add.Tensor, (total, term), tensor_type(total))
    index = program.outputs.index(program.loss)
    outputs: Any = end.args[0]
    end.args = ((*outputs[:index], added, *outputs[index + 1 :]),)


COUNT = "fxpar.count"
"""Name of the output that says by what the sum of a microbatch was divided."""

# What keeps a mean a mean: the loss is it times a number.
_KEEPING = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.neg.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
_SCALING = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
_ADDING = frozenset(
    {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.rsub.Tensor, aten.sum.default, aten.stack.default}
)


def leading_to(program: Program) -> frozenset[fx.Node]:
    """Returns the nodes on which the loss depends, without it; none where there is no loss."""
    return frozenset(ancestors([program.output_nodes()[program.loss]]) if program.loss else ())


def check_added(program: Program, means: Iterable[fx.Node], batch: str) -> None:
    """Sees to it that the loss is what the plan takes for it: the mean, or the sum, of the losses of all data ranks.

    A mean is made of multiples of means, of which each rank takes its own; a sum of these and of sums over rows. A term
    of a sum that depends on no row counts once for each rank.

    Args:
        means: of each rank's own.
        batch: name of the symbol of the rows.

    Raises:
        PlanError: names the operation that is neither.
    """
    adds, mean_nodes = program.plan.loss_reduction == "sum", set(means)
    where = f"loss_reduction={program.plan.loss_reduction}"
    remedy = "write the loss as a sum of means, or take loss_reduction=mean"
    if adds:
        remedy = "write the loss as sums over rows, divided by numbers or num_items_in_batch, or take another reduction"
    elif not mean_nodes:
        raise PlanError("the loss is not a mean over the batch", where=where, remedy=remedy)
    with_rows = {entry.node for entry in program.inputs if batch in names(entry.type.shape)}

    def is_fixed(node: fx.Node) -> bool:
        return not any(leaf.name in with_rows for leaf in ancestors([node]))

    root = program.output_nodes()[program.loss]
    if adds and is_fixed(root):
        raise PlanError("the loss depends on no row of the batch", where=where, remedy=remedy)
    todo, seen = [root], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen or node in mean_nodes or is_fixed(node) or (adds and _sums_rows(node, batch)):
            continue
        seen.add(node)
        is_scaled = node.target in _SCALING and all(map(is_fixed, _others(node, node.args[0])))
        if not (node.target in _KEEPING | _ADDING or is_scaled):
            what = "sum over rows" if adds else "mean of each rank's own"
            raise PlanError(f"is not a {what}, nor made of such", where=describe(node), remedy=remedy)
        if adds and node.target in _ADDING:
            _count_fixed(node, program.plan.data_ranks, is_fixed)
        todo += operands(node)


def _sums_rows(node: fx.Node, batch: str) -> bool:
    """Returns whether a node sums over all rows: none is left."""
    if node.op != "call_function" or not isinstance(note(node).type, TensorType):
        return False
    is_sum = node.target in _SUMS or (node.target in MEANS and bind_arguments(node).get("reduction") == SUM)
    if not is_sum or batch in names(tensor_type(node).shape):
        return False
    return batch in names(tensor_type(operands(node)[0]).shape)


def _count_fixed(node: fx.Node, ranks: int, is_fixed: Callable[[fx.Node], bool]) -> None:
    """Multiplies the terms of an addition that depend on no row by the number of ranks."""
    for term in dict.fromkeys(operands(node)):
        if is_fixed(term):
            scaled = _call(node, "of_ranks", aten.mul.Tensor, (term, ranks), tensor_type(term))
            node.replace_input_with(term, scaled)
    if len(node.args) > 1 and isinstance(node.args[1], int | float):
        node.update_arg(1, node.args[1] * ranks)


def _call(place: fx.Node, suffix: str, target: Any, args: tuple[Any, ...], kind: TensorType) -> fx.Node:
    return insert_call(place, target, args, replace(note(place), type=kind, random=0), f"{place.name}_{suffix}")


def _quotient(program: Program) -> fx.Node:
    """Returns the sum over a count of which the loss is a multiple.

    Raises:
        PlanError: the loss is not a multiple of one quotient.
    """
    node = program.output_nodes()[program.loss]
    while True:
        if node.target is aten.add.Tensor and is_gradient_alone(node.args[1]):
            node = node.args[0]  # type: ignore[assignment]
            continue
        if node.target is aten.div.Tensor and _others(node, node.args[0]) and not tensor_type(node).shape:
            _check_count(program, node.args[1])  # type: ignore[arg-type]
            return node
        if node.target not in _KEEPING | _SCALING or _others(node, node.args[0]):
            raise PlanError(
                "the loss is not one mean, so that its words cannot be counted",
                where=describe(node),
                remedy="return one mean as the loss, or take loss_reduction=mean",
            )
        node = node.args[0]  # type: ignore[assignment]


def _check_count(program: Program, count: fx.Node) -> None:
    """Refuses what is no sum of what follows from inputs alone, times a number.

    Raises:
        PlanError: names what the loss is divided by.
    """
    node = count
    while node.target in _KEEPING | _SCALING and not _others(node, node.args[0]):
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in _SUMS or any(program.parameter(leaf) is not None for leaf in ancestors([node])):
        raise PlanError(
            "the loss is divided by what is not a count: not a sum of what follows from the inputs alone",
            where=describe(count),
            remedy="divide the loss by the sum of what counts, or take loss_reduction=mean",
        )


def _others(node: fx.Node, first: Any) -> list[fx.Node]:
    return [x for x in operands(node) if x is not first]


def add_count(program: Program) -> Program:
    """Returns the program with one more output, `COUNT`: by what the loss was divided; f32[] or as the loss.

    Where nothing counts the loss is 0 instead of 0/0, so that such a microbatch adds nothing to a step.
    """
    quotient = _quotient(program)
    count: Any = quotient.args[1]
    if not isinstance(note(count).type, TensorType):
        remedy = "divide by what counts, or take loss_reduction=mean"
        raise PlanError("the loss is divided by a number", where=describe(count), remedy=remedy)
    kind = tensor_type(count)
    is_none = _call(quotient, "none", aten.eq.Scalar, (count, 0), TensorType(torch.bool, kind.shape))
    one = _call(quotient, "one", aten.ones_like.default, (count,), kind)
    safe = _call(quotient, "some", aten.where.self, (is_none, one, count), kind)
    quotient.args = (quotient.args[0], safe)
    end = output_node(program.graph)
    end.args = ((*end.args[0], count),)  # type: ignore[misc]
    return program.with_(outputs=(*program.outputs, COUNT))
