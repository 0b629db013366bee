"""The dataflow of a program: what each output is computed from, whatever nodes are called and wherever they stand.

Enters: programs. Leaves: a number for each value's expression, equal where these are. Leaves of expressions are
parameters, inputs and literals; a number of sizes is its size. What is computed twice has one expression, in the
backward too, where I and R are one; what draws bits has those of its identity.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fxpar.ir.grad_flow import plain
from fxpar.ir.operators import GraphOperator, in_backward
from fxpar.ir.program import Program, ScalarType, note, operands, output_layouts
from fxpar.layout.layout import Layout
from fxpar.layout.symbolic_sizes import simplify
from fxpar.ops.collectives import COERCION_OF, IN_BACKWARD, all_reduce_coalesced, sum_gradients

aten = torch.ops.aten

# Of two tensors either may come first.
_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})


class Expressions:
    """Numbers of the expressions in programs that stay as they are; they are comparable with each other alone.

    Args:
        associative: whether sums of more than two tensors are equal in whatever order they are added.
    """

    def __init__(self, associative: bool = False) -> None:
        self._associative = associative
        self._numbers: dict[Hashable, int] = {}
        self._terms: dict[int, tuple[int, ...]] = {}
        self._last: tuple[Program, dict[fx.Node, int]] | None = None  # of a pass's result, which the next one's follows

    def of(self, program: Program) -> dict[fx.Node, int]:
        """Returns the number of each node's expression."""
        if self._last is None or self._last[0] is not program:
            self._last = program, self._found(program)
        return self._last[1]

    def outputs(self, program: Program) -> dict[str, int]:
        """Returns the number of each output's expression, by name."""
        numbers = self.of(program)
        return {name: numbers[node] for name, node in program.output_nodes().items()}

    def parting(self, program: Program, before: Program) -> fx.Node | None:
        """Returns the first node whose expression occurs nowhere in another program."""
        known = set(self.of(before).values())
        return next((node for node, number in self.of(program).items() if number not in known), None)

    def _found(self, program: Program) -> dict[fx.Node, int]:
        leaves = {p.node: f"parameter {p.fqn}" for p in program.parameters}
        leaves |= {entry.node: f"input {entry.path}" for entry in program.inputs}
        numbers: dict[fx.Node, int] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                numbers[node] = self._number(leaves[node.name])
            elif node.op == "call_function":
                key = _expression(node, numbers)
                terms = self._terms_of(node, numbers)
                numbers[node] = key if isinstance(key, int) else self._number((node.target, terms) if terms else key)
                if terms:
                    self._terms[numbers[node]] = terms
        return numbers

    def _terms_of(self, node: fx.Node, numbers: Mapping[fx.Node, int]) -> tuple[int, ...]:
        """Returns what a sum of tensors adds, where the order is not to count; nothing of anything else."""
        if not self._associative or node.target is not aten.add.Tensor or node.kwargs or len(operands(node)) != 2:
            return ()
        parts = (self._terms.get(numbers[read], (numbers[read],)) for read in operands(node))
        return tuple(sorted(term for part in parts for term in part))

    def _number(self, key: Hashable) -> int:
        try:
            return self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # what no key can be made of is like nothing else
            return self._numbers.setdefault(object(), len(self._numbers))


def has_same_dataflow(one: Program, other: Program) -> bool:
    """Returns whether two programs have the same outputs, each computed from the same by the same operations."""
    known = Expressions()
    return known.outputs(one) == known.outputs(other)


def _expression(node: fx.Node, numbers: Mapping[fx.Node, int]) -> Hashable:
    """Returns a key of the node's expression, or the number that it has already."""
    kind = note(node).type
    if isinstance(kind, ScalarType):
        return "number", simplify(kind.value)
    target: Any = node.target
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        source, index = node.args[0], int(node.args[1])  # type: ignore[arg-type]
        if source.target is sum_gradients:
            return numbers[operands(source)[index]]
        if source.target is all_reduce_coalesced:  # whatever else is summed with it
            axis, layout = source.kwargs["axis"], _layout(output_layouts(source)[index])
            return source.target, axis, layout, numbers[operands(source)[index]]
    if target in IN_BACKWARD:
        target = IN_BACKWARD[target]
        if target is None:
            return numbers[operands(node)[0]]
    args: Hashable
    if target in _COMMUTATIVE and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args):
        args = tuple(sorted(numbers[arg] for arg in node.args if isinstance(arg, fx.Node)))
    else:
        args = plain((node.args, node.kwargs), numbers.__getitem__)
    placed: Hashable = None
    if isinstance(target, GraphOperator) and (target in COERCION_OF or not operands(node)):
        placed = tuple(_layout(layout) for layout in output_layouts(node))  # what it was made for
    return target, args, note(node).random, placed


@lru_cache(maxsize=65536)
def _layout(layout: Layout) -> str:
    """Returns the layout as the backward reads it."""
    return str(Layout(tuple((axis, in_backward(placement)) for axis, placement in layout)))
