"""Losses that autograd functions add, as terms of the model's loss: a helper of `canonicalize`.

Enters: a program whose plan declares such functions. Leaves: it without them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.program.program import Program, TensorType, note, output_node, set_note, tensor_type
from fxpar.signatures.added_loss_functions import added_loss, adding_nodes

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
    reached = _differentiated(program.output_nodes()[program.loss])
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


def _differentiated(loss: fx.Node) -> set[fx.Node]:
    """The nodes to which gradients of the loss may go."""
    todo, reached = [loss], {loss}
    while todo:
        node = todo.pop()
        for operand in node.all_input_nodes if node.target is not aten.detach.default else ():
            if operand not in reached:
                reached.add(operand)
                todo.append(operand)
    return reached


def _add(program: Program, loss: fx.Node, factor: float) -> None:
    end = output_node(program.graph)
    total = program.output_nodes()[program.loss]

    def call(name: str, target: Any, args: tuple[Any, ...], kind: TensorType, **kwargs: Any) -> fx.Node:
        with program.graph.inserting_before(end):
            new = program.graph.create_node("call_function", target, args, kwargs, name=name)
        return set_note(new, replace(note(total), type=kind, random=0))

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
