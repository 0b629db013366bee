"""How parameters enter a program that runs on copies of main values (`fxpar.program.mixed`).

Enters: a graph that is being lowered. Leaves: the same with a placeholder for each copy behind those of the program,
and nodes by which gradients of copies become gradients of main values.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxpar.layout.symbols import product
from fxpar.ops.coalesced import enter, sum_gradient, sum_gradients
from fxpar.program.mixed import is_copy
from fxpar.program.operators import GraphOperator
from fxpar.program.program import Program, note, operands, tensor_type
from fxpar.program.weights import owner_of, summed, weights_of

# Bytes of copies whose gradients are cast together: they are held until the last of them is there.
_TOGETHER = 64 * 2**20
_TAKE_MAINS = (enter, sum_gradient, sum_gradients)


def _takes_copy(user: fx.Node) -> bool:
    return user.target not in _TAKE_MAINS


def _is_summed_again(node: fx.Node) -> bool:
    """Whether a value goes into another sum of gradients."""
    return any(isinstance(user.target, GraphOperator) and user.target.sums_gradients for user in node.users)


class Lowering:
    """Of one program.

    Attributes:
        copies: placeholder of each copy by the name of the parameter's own, which stands for the main values.
    """

    def __init__(self, program: Program, first: fx.Node) -> None:
        """Adds the placeholders in front of `first`, the first node that is none."""
        self.graph, self._first, self._plan = program.graph, first, program.plan
        self.copies: dict[str, fx.Node] = {}
        self._made = weights_of(program.graph, [program.node(p.node) for p in program.parameters])
        self._sums = {node: (owner_of(node).name, _is_summed_again(node)) for node in self.graph.nodes if summed(node)}
        self._mains: dict[str, tuple[fx.Node, int, bool]] = {}
        for parameter in program.parameters:
            if parameter.kind == "parameter" and is_copy(program.plan, parameter.type):
                source = program.node(parameter.node)
                size = int(product(parameter.type.shape)) * parameter.type.dtype.itemsize
                self._mains[source.name] = source, size, parameter.trainable
                with self.graph.inserting_before(first):
                    self.copies[source.name] = self.graph.placeholder(f"{source.name}_copy")

    def given_by(self, node: fx.Node) -> list[fx.Node]:
        """What a sum of gradients of main values gives for each of its operands; empty where they are something else.

        The copies; where another sum follows, over other axes, the main values as they are, which it gives in copies.
        """
        sources = operands(node)
        names = [self._sums[source][0] if source in self._sums else source.name for source in sources]
        if not self.copies.keys() >= set(names):
            return []
        results: dict[Any, fx.Node] = {0: node}
        if isinstance(note(node).type, tuple):
            results = {item.args[1]: item for item in node.users}
        again = [index in results and self._sums[results[index]][1] for index in range(len(sources))]
        return [
            source if passed else self.copies[name] for source, name, passed in zip(sources, names, again, strict=True)
        ]

    def is_wide(self, node: fx.Node) -> bool:
        """Whether a coercion is of what half-precision parameters make: it sums gradients in float32."""
        return node in self._made and is_copy(self._plan, tensor_type(node))

    def enter(self) -> None:
        """Gives what still takes main values the copies; those of frozen parameters as they are."""
        for name, (source, _, is_trained) in self._mains.items():
            if not is_trained:
                source.replace_all_uses_with(self.copies[name])
        for bucket in self._buckets():
            copies = [self.copies[source.name] for source in bucket]
            with self.graph.inserting_before(self._first):
                entered = self.graph.call_function(enter, (bucket, copies))
                items = [self.graph.call_function(operator.getitem, (entered, i)) for i in range(len(bucket))]
            for source, item in zip(bucket, items, strict=True):
                source.replace_all_uses_with(item, _takes_copy)
        for source, (name, is_summed_again) in self._sums.items():
            if is_summed_again and name in self.copies and any(map(_takes_copy, source.users)):
                with self.graph.inserting_after(source):
                    entered = self.graph.call_function(enter, ([source], [self.copies[name]]))
                with self.graph.inserting_after(entered):
                    item = self.graph.call_function(operator.getitem, (entered, 0))
                source.replace_all_uses_with(item, _takes_copy)

    def _buckets(self) -> list[list[fx.Node]]:
        """Main values that enter by themselves, in the order of the program's parameters."""
        found: list[list[fx.Node]] = []
        room = 0
        for source, size, is_trained in self._mains.values():
            if not is_trained or all(user.target in _TAKE_MAINS for user in source.users):
                continue
            if not found or size > room:
                found.append([])
                room = _TOGETHER
            found[-1].append(source)
            room -= size
        return found
