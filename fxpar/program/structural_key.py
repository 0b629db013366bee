"""Keys by which equal operations are found, whatever their nodes are called and wherever they stand.

Enters: arguments. Leaves: what is equal and hashable where these say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import fx

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
        # As below and above, without a call for most items: of a node this is asked behind each pass.
        return kind, tuple([(type(item), item) if type(item) in _ATOMS else plain(item, of_node) for item in value])
    if isinstance(value, dict):
        return dict, tuple([(name, plain(item, of_node)) for name, item in sorted(value.items())])
    if isinstance(value, slice):
        return slice, plain((value.start, value.stop, value.step), of_node)
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    return kind, value
