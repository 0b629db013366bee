"""How parameters enter a program that runs on copies of main values (`fxpar.program.mixed`).

Enters: a graph that is being lowered. Leaves: the same with a placeholder for each copy behind those of the program,
and nodes by which gradients of copies become gradients of main values.
"""

from __future__ import annotations

import operator

from torch import fx

from fxpar.layout.symbols import product
from fxpar.ops.coalesced import enter, sum_gradient, sum_gradients
from fxpar.program.mixed import is_copy
from fxpar.program.program import Program, made_of, operands, tensor_type

# Bytes of copies whose gradients are cast together: they are held until the last of them is there.
_TOGETHER = 64 * 2**20
_TAKE_MAINS = (enter, sum_gradient, sum_gradients)


class Lowering:
    """Of one program.

    Attributes:
        copies: placeholder of each copy by the name of the parameter's own, which stands for the main values.
    """

    def __init__(self, program: Program, first: fx.Node) -> None:
        """Adds the placeholders in front of `first`, the first node that is none."""
        self.graph, self._first, self._plan = program.graph, first, program.plan
        self.copies: dict[str, fx.Node] = {}
        self._made = made_of(program.graph, [program.node(p.node) for p in program.parameters])
        self._mains: dict[str, tuple[fx.Node, int, bool]] = {}
        for parameter in program.parameters:
            if parameter.kind == "parameter" and is_copy(program.plan, parameter.type):
                source = program.node(parameter.node)
                size = int(product(parameter.type.shape)) * parameter.type.dtype.itemsize
                self._mains[source.name] = source, size, parameter.trainable
                with self.graph.inserting_before(first):
                    self.copies[source.name] = self.graph.placeholder(f"{source.name}_copy")

    def copies_of(self, node: fx.Node) -> list[fx.Node]:
        """Copies of a node's operands, of main values all; empty where they are something else."""
        names = [source.name for source in operands(node)]
        return [self.copies[name] for name in names] if self.copies.keys() >= set(names) else []

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
                source.replace_all_uses_with(item, lambda user: user.target not in _TAKE_MAINS)

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
