"""What rules answered before: equal layers put equal questions.

Enters: a node and what its operands are. Leaves: a key that is equal for nodes to which the same rule gives the same
answer: it has all of a node that a rule is told.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from fxpar.layout.layout import Layout
from fxpar.program.keys import plain
from fxpar.program.program import has_note, note, output_types
from fxpar.rules.table import rule_of
from fxpar.signatures.engine import decides

_MOST = 50_000


class Answers:
    """Layouts of outputs by question; when there are too many it starts anew."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Layout, ...]] = {}

    def get(self, key: Hashable) -> tuple[Layout, ...] | None:
        """The answer that was given, if there was one."""
        return self._known.get(key)

    def put(self, key: Hashable, answer: tuple[Layout, ...]) -> None:
        """Keeps an answer."""
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = answer


def question(node: fx.Node) -> Hashable:
    """The operation, with the types of its operands in their place.

    The rule stands in it by itself: one may be registered, or taken back, between two questions.
    """
    args = plain((node.args, node.kwargs), lambda operand: note(operand).type if has_note(operand) else None)
    return node.target, rule_of(node.target), args, output_types(node), decides(node)
