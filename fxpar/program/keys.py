"""Keys by which equal operations are found, whatever their nodes are called and wherever they stand.

Enters: arguments, or a program. Leaves: what is equal and hashable where these say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from torch import fx

from fxpar.program.program import Program, has_note, note, output_node
from fxpar.program.step import RECOMPUTE

_ATOMS = frozenset({int, bool, str, type(None)})


def plain(value: Any, of_node: Callable[[fx.Node], Hashable]) -> Hashable:
    """Arguments as a key: equal numbers of other types are others, and so are zeros of other signs.

    Args:
        of_node: what stands for a node.
    """
    kind = type(value)
    if kind in _ATOMS:  # most arguments
        return kind, value
    if isinstance(value, fx.Node):
        return fx.Node, of_node(value)
    if isinstance(value, (list, tuple)):
        return kind, tuple([plain(item, of_node) for item in value])
    if isinstance(value, dict):
        return dict, tuple((name, plain(item, of_node)) for name, item in sorted(value.items()))
    if isinstance(value, slice):
        return slice, plain((value.start, value.stop, value.step), of_node)
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    return kind, value


def has_same_operations(one: Program, other: Program) -> bool:
    """Whether two programs without calls of regions make the same of the same, in any order and under any names.

    Of notes all counts but the place in the author's model and the reason for a layout.
    """
    known: dict[Hashable, int] = {}
    return _operations(one, known) == _operations(other, known)


def _operations(program: Program, known: dict[Hashable, int]) -> Hashable:
    """The tables and outputs of a program, and how often each operation occurs, by its number in `known`."""
    tables = program.parameters, program.inputs, program.outputs, program.symbols, program.plan, program.loss
    numbers: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        name = node.name if node.op == "placeholder" else ""
        args = plain((node.args, node.kwargs), numbers.__getitem__)
        numbers[node] = known.setdefault((node.op, node.target, name, args, _said(node)), len(known))
    ends = plain(output_node(program.graph).args, numbers.__getitem__)
    constants = frozenset((name, id(value)) for name, value in program.constants.items())
    return tables, constants, ends, frozenset(Counter(numbers.values()).items())


def _said(node: fx.Node) -> Hashable:
    if not has_note(node):
        return None
    kept = note(node)
    flags = kept.random, kept.phase, kept.role, kept.origin == RECOMPUTE, kept.recompute > 0
    return kept.type, kept.layout, tuple(kept.needs), flags
