"""What was emitted for a call's derivative is emitted for equal calls, as equal layers have them, without asking rules.

Enters: a call with what it reads, its results and their gradients. Leaves: nodes of the backward that differ from those
of the equal call in operands and in the place in the author's model alone.

A key has all that emission reads of a call. What depends on more than that is not repeated: a conversion that others
share, what stands in the phase *parameter*, a node that was found by other ways than the call's operands.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxpar.passes.emit import BackwardEmitter
from fxpar.program.copying import changed
from fxpar.program.program import Note, ScalarType, note, operands, output_layouts, output_types
from fxpar.program.step import BACKWARD
from fxpar.program.structural_key import plain

aten = torch.ops.aten


@dataclass(frozen=True)
class DerivativeRequest:
    """A call whose derivative is wanted.

    Attributes:
        inputs: the nodes on which it depends, in an order that is the same for equal calls.
        key: equal for calls whose derivatives are the same nodes; None where nothing says so.
    """

    inputs: tuple[fx.Node, ...]
    key: Hashable


@dataclass(frozen=True)
class _EmittedNode:
    """A node that was emitted, as it was then: its operands may be replaced later."""

    node: fx.Node
    name: str
    target: Any
    args: Any
    kwargs: Any
    noted: Note
    is_zero: bool


@dataclass(frozen=True)
class _Recipe:
    inputs: tuple[fx.Node, ...]
    steps: tuple[_EmittedNode, ...]
    gradients: tuple[tuple[fx.Node, fx.Node], ...]


class DerivativeCache:
    """Derivatives that were put into a program."""

    def __init__(self, emit: BackwardEmitter) -> None:
        self._emit = emit
        self._known: dict[Hashable, _Recipe] = {}

    def asked(
        self,
        node: fx.Node,
        items: Mapping[int, fx.Node],
        tangents: Sequence[fx.Node | None],
        needed: Sequence[bool],
    ) -> DerivativeRequest:
        """What a call's derivative depends on.

        Args:
            items: nodes of the results, by index.
            tangents: gradients of the results that have one.
            needed: for each operand whether a gradient is.
        """
        gradients = [t for t in tangents if t is not None]
        # A form reads what was turned, where that is turned back.
        turned = [t.args[0] for t in gradients if t.target is aten.t.default and isinstance(t.args[0], fx.Node)]
        inputs = (*operands(node), *items.values(), *gradients, *turned)
        places: dict[fx.Node, int] = {}
        for source in inputs:
            places.setdefault(source, len(places))
        if any(note(source).phase not in ("", BACKWARD) for source in places):
            return DerivativeRequest(inputs, None)
        args = plain((node.args, node.kwargs), lambda read: places.get(read, note(read).type))
        which = tuple(items), tuple(t is not None for t in tangents), tuple(needed)
        turns = tuple(t.target is aten.t.default for t in gradients)
        descriptions = tuple([(i, *self._described(source)) for source, i in places.items()])
        key = node.target, args, which, turns, tuple([places[source] for source in inputs]), descriptions
        return DerivativeRequest(inputs, key if _is_hashable(key) else None)

    def _described(self, node: fx.Node) -> tuple[Hashable, ...]:
        return (
            output_types(node),
            output_layouts(node),
            self._emit.flags[node],
            note(node).phase,
            self._emit.is_zero(node),
        )

    def again(self, request: DerivativeRequest, like: Note) -> dict[fx.Node, fx.Node] | None:
        """The gradients of a call's operands as those of an equal call before; None where there was none.

        Args:
            like: note of the call.
        """
        recipe = self._known.get(request.key)
        if recipe is None:
            return None
        copies = dict(zip(recipe.inputs, request.inputs, strict=True))
        for step in recipe.steps:
            args, kwargs = map_arg((step.args, step.kwargs), lambda read: copies.get(read, read))
            noted = changed(step.noted, fqn=like.fqn, source=like.source, recompute=like.recompute)
            copies[step.node] = self._emit.repeated(step.target, args, kwargs, step.name, noted, step.is_zero)
        return {copies[operand]: copies[gradient] for operand, gradient in recipe.gradients}

    def learn(self, request: DerivativeRequest, start: int, gradients: Mapping[fx.Node, fx.Node]) -> None:
        """Remembers what was emitted of a call.

        Args:
            start: how many nodes `emit.made` had before.
        """
        emitted = self._emit.made[start:]
        if request.key is None or any(entry is None for entry in emitted):
            return
        steps, known = list[_EmittedNode](), set(request.inputs)
        for node, name in (entry for entry in emitted if entry is not None):
            if note(node).phase != BACKWARD or not all(
                read in known or _is_number(read) for read in node.all_input_nodes
            ):
                return
            known.add(node)
            is_zero = self._emit.is_zero(node)
            steps.append(_EmittedNode(node, name, node.target, node.args, node.kwargs, note(node), is_zero))
        if known.issuperset(gradients.values()):
            self._known[request.key] = _Recipe(request.inputs, tuple(steps), tuple(gradients.items()))


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a size, which one node gives in the entire program."""
    return isinstance(note(node).type, ScalarType)


def _is_hashable(key: Hashable) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
