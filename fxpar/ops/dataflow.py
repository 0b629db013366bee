"""The dataflow of a program: what each output is computed from, whatever nodes are called and wherever they stand.

Enters: a program. Leaves: a hash of each value's expression. Leaves of expressions are parameters, inputs and literals;
a number is its size. What is computed twice has one expression, in the backward too, where I and R are one; what draws
bits has those of its identity.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fxpar.layout.layout import Layout
from fxpar.layout.symbols import simplify
from fxpar.ops.coercion_table import COERCION_OF
from fxpar.ops.coercions import IN_BACKWARD, all_reduce_coalesced, sum_gradients
from fxpar.program.coercions import in_backward
from fxpar.program.operators import GraphOperator
from fxpar.program.program import Program, ScalarType, note, operands, output_layouts

aten = torch.ops.aten

# Of two tensors either may come first.
_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})


def expressions(program: Program) -> dict[fx.Node, str]:
    """The hash of each node's expression."""
    leaves = {p.node: f"parameter {p.fqn}" for p in program.parameters}
    leaves |= {entry.node: f"input {entry.path}" for entry in program.inputs}
    found: dict[fx.Node, str] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found[node] = _hash(leaves[node.name])
        elif node.op == "call_function":
            found[node] = _expression(node, found)
    return found


def dataflow(program: Program) -> dict[str, str]:
    """The hash of each output's expression, by name."""
    found = expressions(program)
    return {name: found[node] for name, node in program.output_nodes().items()}


def parting(program: Program, before: Program) -> fx.Node | None:
    """The first node whose expression occurs nowhere in another program."""
    known = set(expressions(before).values())
    return next((node for node, value in expressions(program).items() if value not in known), None)


def _expression(node: fx.Node, found: Mapping[fx.Node, str]) -> str:
    kind = note(node).type
    if isinstance(kind, ScalarType):
        return _hash(f"number {simplify(kind.value)}")
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        source, index = node.args[0], int(node.args[1])  # type: ignore[arg-type]
        if source.target is sum_gradients:
            return found[operands(source)[index]]
        if source.target is all_reduce_coalesced:  # whatever else is summed with it
            axis, layout = source.kwargs["axis"], _layout(output_layouts(source)[index])
            return _hash(f"{source.target}[{axis}] {layout} {found[operands(source)[index]]}")
    target: Any = node.target
    if target in IN_BACKWARD:
        target = IN_BACKWARD[target]
        if target is None:
            return found[operands(node)[0]]
    mapped: Any = fx.node.map_arg
    args = mapped((node.args, node.kwargs), lambda each: _Leaf(found[each]))
    if target in _COMMUTATIVE and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args):
        args = sorted(found[arg] for arg in node.args if isinstance(arg, fx.Node))
    placed = ""
    if isinstance(target, GraphOperator) and (target in COERCION_OF or not operands(node)):
        placed = " ".join(_layout(layout) for layout in output_layouts(node))  # what it was made for
    name = target if not callable(target) or isinstance(target, (GraphOperator, torch._ops.OpOverload)) else str(target)
    return _hash(f"{name} {args} {note(node).random} {placed}")


class _Leaf:
    """An operand in the text of an expression."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return self.value


@lru_cache(maxsize=65536)
def _layout(layout: Layout) -> str:
    """As the backward reads it."""
    return str(Layout(tuple((axis, in_backward(placement)) for axis, placement in layout)))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
