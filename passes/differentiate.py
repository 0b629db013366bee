"""differentiate: the training step, forward and backward in one graph."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxpar.errors import PassError
from fxpar.ir.grad_flow import carried, reached, weights_of
from fxpar.ir.program import (
    Input,
    Note,
    Program,
    TensorType,
    copy_node,
    describe,
    module_of,
    note,
    operands,
    output_layouts,
    output_node,
    output_types,
    replace_node,
    set_note,
    take_name,
)
from fxpar.ir.properties import Property
from fxpar.ir.step import (
    BACKWARD,
    MAIN,
    gradient_name,
    input_gradient_name,
    is_copy,
    is_forward,
    is_gradient,
    output_of,
    tangent_path,
)
from fxpar.manager import Pass, register_pass
from fxpar.ops.attention import saving as saving_attention
from fxpar.ops.collectives import dual_layout, of_parameter
from fxpar.ops.operator import Operator, Reverse
from fxpar.ops.random import attention
from fxpar.passes.prune import prune
from fxpar.rewrite.derive import Derivatives, Needs
from fxpar.rewrite.emit import BackwardEmitter, whole_call_of
from fxpar.rewrite.forms import DerivativeCache, Derived, items_of

aten = torch.ops.aten

SAVING = {aten.scaled_dot_product_attention.default: saving_attention, attention: saving_attention}


@register_pass("differentiate", requires={Property.CANONICAL}, provides={Property.STEP})
def differentiate(program: Program) -> Program:
    """Adds the backward of the loss, or of all outputs without one; the gradients become outputs.

    Before (tp 2)::

        %w = parameter["down.weight"] : f32[64, 96] tp:S(1)
        %down = aten.mm.default(%h, %w) : f32[n, 64] tp:P
        %out = fxpar.reduce_from[tp](%down) : f32[n, 64] tp:P→I

    After::

        %t = aten.t.default(%h) : f32[96, n] tp:S(0) {phase=backward}
        %w_gradient = aten.mm.default(%t, %out_gradient) : f32[96, 64] tp:S(0) {phase=backward}
        return …, fxpar.gradient.down.weight=%w_gradient

    Terms: a *tangent* is the gradient of an output, which the caller gives (one for a loss, or its scale). In the
    backward nothing carries a gradient, so I and R are one and written R. The gradient of a value is held as the *dual*
    of its layout: summands (P) of what is R, the sum of what is I or P, the same blocks of a shard. What each rank has
    of a parameter's gradient becomes the whole by nodes of the phase *parameter*, once a step.

    Algorithm: nodes in reverse order. A coercion has its conjugate (SPEC section 2.1), an operator of fxpar what its
    record says, and an operation of PyTorch what autograd does of it, traced once for each distinct call over the
    whole's symbolic shapes. Layouts follow by rules. Where the backward reads more than operands and results, what
    computes that takes the operation's place in the forward; views are made again.

    Values stay equal. Refuses operations that PyTorch cannot differentiate on symbolic shapes, and those whose backward
    no rule knows.
    """
    names = [name for name in differentiable(program) if not program.loss or name == program.loss]
    return _differentiated(program, names, program.outputs, [p.fqn for p in program.parameters])


def of_outputs(tangents: Sequence[str], outputs: Sequence[str], trained: Collection[str]) -> Pass:
    """Returns `differentiate` of some outputs.

    Args:
        tangents: outputs that have one.
        outputs: those of the model that the step returns.
        trained: parameters whose gradients it gives.
    """
    run = partial(_differentiated, names=tuple(tangents), outputs=tuple(outputs), trained=frozenset(trained))
    return replace(differentiate, run=run)


def _differentiated(
    program: Program, names: Sequence[str], outputs: Sequence[str], trained: Collection[str]
) -> Program:
    _take_once(program)
    left_out = [replace(p, left_out=p.trainable and p.fqn not in trained) for p in program.parameters]
    backward = _Backward(program.with_(parameters=tuple(left_out)))
    program = backward.run(names)
    if backward.has_decomposed:
        # The parts of what was taken apart have derivatives of their own: the step is that of the forward that it has.
        # The second run does not trace again what the first one has traced:
        # derivatives depend on calls and sizes alone.
        again = _Backward(forward_of(program))
        again.derivatives = backward.derivatives
        program = again.run(names)
    end = output_node(program.graph)
    pairs = zip(program.outputs, end.args[0], strict=True)  # type: ignore[arg-type]
    returned = [(name, value) for name, value in pairs if name in outputs or is_gradient(name)]
    end.args = (tuple(value for _, value in returned),)
    return prune(program.with_(outputs=tuple(name for name, _ in returned)))


def _take_once(program: Program) -> None:
    """Takes each part of a tuple by one node: an operation is replaced part by part."""
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.target is operator.getitem:
            first = seen.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                program.graph.erase_node(node)


def differentiable(program: Program) -> tuple[str, ...]:
    """Returns the outputs that carry a gradient."""
    flags = carried(program)
    return tuple(name for name, node in program.output_nodes().items() if flags[node][0])


def forward_of(program: Program) -> Program:
    """Returns the forward of a step, a program as before `differentiate` but for what saves more than its results."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "output" and is_forward(node):
            copies[node] = copy_node(graph, node, copies, node.name)
        else:
            take_name(graph, node.name)
    outputs = [(name, node) for name, node in program.output_nodes().items() if not is_gradient(name)]
    graph.output(tuple(copies[node] for _, node in outputs))
    return program.with_(
        graph_module=module_of(graph),
        inputs=tuple(entry for entry in program.inputs if not output_of(entry.path)),
        outputs=tuple(name for name, _ in outputs),
        properties=program.properties - {Property.STEP},
        constants=dict(program.constants),
    )


class _Backward:
    def __init__(self, program: Program) -> None:
        self.program, self.flags = program, carried(program)
        self.emit = BackwardEmitter(program, self.flags)
        self.derivatives, self.repeats = (
            Derivatives(program.all_symbols, program.conditions),
            DerivativeCache(self.emit),
        )
        self.has_decomposed = False
        self.known: dict[tuple[fx.Node, int], fx.Node] = {}
        placeholders = program.placeholders()
        self.made_of_weights = weights_of(program.graph, [placeholders[p.node] for p in program.parameters])
        self.parameters = {placeholders[p.node]: p for p in program.parameters if p.trainable and not p.left_out}
        self.inputs = {placeholders[i.node]: i for i in program.inputs if i.carries}

    def run(self, tangents: Sequence[str]) -> Program:
        inputs = list(self.program.inputs)
        for name in tangents:
            inputs.append(self._tangent(name, self.program.output_nodes()[name]))
        for node in [node for node in reversed(self.program.graph.nodes) if is_forward(node)]:
            if node.op == "call_function" and any((node, i) in self.known for i in range(len(output_types(node)))):
                self._differentiate(node)
        gradients = {gradient_name(p.fqn): self.known.get((node, 0)) for node, p in self.parameters.items()}
        gradients |= {input_gradient_name(i.path): self.known.get((node, 0)) for node, i in self.inputs.items()}
        end = output_node(self.program.graph)
        returned = {name: node for name, node in gradients.items() if node is not None}
        end.args = ((*end.args[0], *returned.values()),)  # type: ignore[misc]
        return self.program.with_(inputs=tuple(inputs), outputs=(*self.program.outputs, *returned))

    def _tangent(self, name: str, output: fx.Node) -> Input:
        first = next(node for node in self.program.graph.nodes if node.op != "placeholder")
        with self.program.graph.inserting_before(first):
            node = self.program.graph.create_node(
                "placeholder", f"{output.name}_tangent", name=f"{output.name}_tangent"
            )
        (kind,) = output_types(output)
        layout = tuple(dual_layout(output_layout) for output_layout in output_layouts(output))
        set_note(node, Note(type=kind, layout=layout[0] if layout else None, phase=BACKWARD))
        self.flags[node] = (False,)
        self._add(output, 0, node, note(output))
        return Input(tangent_path(name), node.name, kind)

    def _add(self, node: fx.Node, index: int, gradient: fx.Node, like: Note) -> None:
        """Adds a gradient to those that a value has."""
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            node, index = node.args[0], int(node.args[1])  # type: ignore[arg-type]
        parameter = self.parameters.get(node)
        if parameter is not None and is_copy(self.program.plan, parameter.type):
            # A parameter's copy is in half precision, and its gradient is added up in
            # the main type over uses, microbatches and ranks.
            gradient = self._cast(gradient, MAIN, like)
        layouts = output_layouts(node)
        if layouts:
            gradient = self.emit.as_gradient(gradient, layouts[index], like)
        before = self.known.get((node, index))
        if before is not None:
            gradient = self.emit.added(before, gradient, like)
        self.known[node, index] = gradient

    def _differentiate(self, node: fx.Node) -> None:
        inputs = operands(node)
        needed = tuple(any(self.flags[operand]) and _is_float(operand) for operand in inputs)
        if node.target is operator.getitem or not any(needed):
            return
        tangents = tuple(self.known.get((node, i)) for i in range(len(output_types(node))))
        if isinstance(node.target, Operator) and node.target.derivative is not None:
            self._of_operator(node, node.target, tangents, needed)
            return
        saving = self._saving(node)
        if saving is not None:
            call, record = saving
            self._of_operator(call, record, (*tangents, None), needed)
            return
        self._of_torch(node, tangents, needed)

    def _saving(self, node: fx.Node) -> tuple[fx.Node, Operator] | None:
        """Puts the call in place that saves what the derivative reads, if the operator has one."""
        # Attention stays one pair of nodes, forward and backward. Traced through, it would
        # write out the scores that flash kernels never hold.
        own_maker = node.target.saving if isinstance(node.target, Operator) else None
        maker = own_maker or SAVING.get(node.target)
        if maker is None:
            return None
        call = maker(node)
        new = self.emit.forward(
            call.target, call.args, node.kwargs if own_maker else {}, call.types, node, note(node).random
        )
        items = [self.emit.forward(operator.getitem, (new, i), {}, kind, node) for i, kind in enumerate(call.types)]
        self._replace(node, items[0])
        return new, call.target

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        """Replaces a node of the forward by another that computes the same."""
        self.flags[new] = self.flags.pop(node)
        replace_node(node, new)

    def _of_operator(
        self, node: fx.Node, record: Operator, tangents: tuple[fx.Node | None, ...], needed: tuple[bool, ...]
    ) -> None:
        assert record.derivative is not None
        entered = tuple(self._entered(node, gradient) for gradient in tangents)
        gradients = record.derivative(Reverse(node, entered, needed, self.emit))
        for operand, gradient in zip(operands(node), gradients, strict=True):
            if gradient is not None and any(self.flags[operand]):
                self._add(operand, 0, self._left(node, gradient), note(node))

    def _entered(self, node: fx.Node, gradient: fx.Node | None) -> fx.Node | None:
        """Casts gradients of half-precision parameters, and of what they make, to the main type for sums over ranks."""
        if gradient is None or not _sums(node) or not is_copy(self.program.plan, output_types(gradient)[0]):
            return gradient
        if not of_parameter(node) and node not in self.made_of_weights:
            return gradient
        return self._cast(gradient, MAIN, note(node))

    def _left(self, node: fx.Node, gradient: fx.Node) -> fx.Node:
        """Casts gradients of what is made of parameters to its type; parameters have those of main values."""
        kind = output_types(operands(node)[0])[0]
        if not _sums(node) or of_parameter(node) or output_types(gradient)[0].dtype == kind.dtype:
            return gradient
        return self._cast(gradient, kind.dtype, note(node))

    def _cast(self, gradient: fx.Node, dtype: torch.dtype, like: Note) -> fx.Node:
        if output_types(gradient)[0].dtype == dtype:
            return gradient
        kind = TensorType(dtype, output_types(gradient)[0].shape)
        return self.emit.call(aten._to_copy.default, (gradient,), {"dtype": dtype}, kind, like)

    def _of_torch(self, node: fx.Node, tangents: tuple[fx.Node | None, ...], needed: tuple[bool, ...]) -> None:
        several = isinstance(note(node).type, tuple)
        items: dict[int, fx.Node] = items_of(node) if several else {0: node}
        if not isinstance(node.target, torch._ops.OpOverload) and "path" not in node.kwargs:
            raise PassError(f"{node.target} has no derivative", where=describe(node))
        # Layers repeat: the derivative of an equal call is written out again, and not traced and matched anew.
        key = self.repeats.asked(node, items, tangents, needed)
        repeated = self.repeats.again(key, note(node))
        if repeated is not None:
            for operand, gradient in repeated.items():
                self._add(operand, 0, gradient, note(node))
            return
        args, kwargs = whole_call_of(self.program, node)
        derivative = self.derivatives.of(node, args, kwargs, needed, [t is not None for t in tangents])
        count = len(derivative.outputs)
        present = [t for t in tangents if t is not None]
        derived = Derived(self.emit, node, derivative, [items.get(i) for i in range(count)], present)
        is_plain = not derived.saved()
        if not is_plain:
            replacements = derived.replaced()
            self.has_decomposed |= derived.is_decomposed
            for index, item in items.items():
                new = replacements[index]
                assert new is not None
                if several:
                    self._replace(item, new)
            if several:
                self.program.graph.erase_node(node)
            elif replacements[0] is not None:
                self._replace(node, replacements[0])
        start = len(self.emit.made)
        gradients = derived.gradients()
        if is_plain:
            self.repeats.learn(key, start, gradients)
        for operand, gradient in gradients.items():
            self._add(operand, 0, gradient, derived.like)


def _sums(node: fx.Node) -> bool:
    """Returns whether gradients of parameters are summed over ranks where a node is differentiated."""
    return isinstance(node.target, Operator) and (node.target.sums_gradients or bool(note(node).shard))


def _is_float(node: fx.Node) -> bool:
    return all(kind.is_float for kind in output_types(node))


# What the sizes of a program must satisfy so that PyTorch differentiates it, before a step is made of it.


def sizes_needed(program: Program) -> Needs:
    """Returns what the sizes must satisfy, with what they satisfy by the program's conditions.

    Numbers are those of the first operation that needs some: of what is captured with them more may be needed.
    """
    conditions = program.conditions
    derivatives = Derivatives(program.all_symbols, conditions)
    for call in _calls(program):
        needs = derivatives.needs(*call)
        if needs.numbers:
            return Needs(conditions, needs.numbers)
        if needs.conditions:
            conditions = (*conditions, *needs.conditions)
            derivatives = Derivatives(program.all_symbols, conditions)
    return Needs(conditions)


def is_differentiable(program: Program) -> bool:
    """Returns whether PyTorch differentiates a program for all sizes that its conditions admit."""
    derivatives = Derivatives(program.all_symbols, program.conditions)
    return all(derivatives.has(*call) for call in _calls(program))


def _calls(program: Program) -> Iterator[tuple[fx.Node, Any, Any, list[bool], list[bool]]]:
    """Yields what `differentiate` asks PyTorch for, as `Derivatives.of` takes it."""
    flags = carried(program)
    needed = reached(program, flags)
    for node in program.graph.nodes:
        if node not in needed or not _is_traced(node):
            continue
        args, kwargs = whole_call_of(program, node)
        inputs = [any(flags[read]) and all(kind.is_float for kind in output_types(read)) for read in operands(node)]
        items = items_of(node) if isinstance(note(node).type, tuple) else {0: node}
        yield node, args, kwargs, inputs, [i in items and items[i] in needed for i in range(len(output_types(node)))]


def _is_traced(node: fx.Node) -> bool:
    """Returns whether its derivative is that of PyTorch, as `differentiate` decides it."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if isinstance(node.target, Operator) and (node.target.derivative is not None or node.target.saving is not None):
        return False
    return node.target not in SAVING and (isinstance(node.target, torch._ops.OpOverload) or "path" in node.kwargs)
