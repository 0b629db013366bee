"""Draws of the parts of a batch: all parts of one identity together draw the bits of the whole.

Enters: nodes that draw. Leaves: which part each draws for, and `CheckFailed` where parts are missing or of other cuts.
A helper of the check `structure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxpar.errors import CheckFailed
from fxpar.ops.random import part_index
from fxpar.program.program import describe
from fxpar.rules import bind_arguments

Part = tuple[Any, ...]


def drawn_part(node: fx.Node) -> Part | None:
    """Number, count and dimension of the part that a draw is for; None for the whole.

    Raises:
        CheckFailed: its indices are no list, or these are no numbers.
    """
    indices = bind_arguments(node).get("indices") or ()
    if not isinstance(indices, (list, tuple)):
        raise CheckFailed(f"takes the indices {indices}", where=describe(node), remedy="pass a list, one for each axis")
    part = next((tuple(index.args) for index in indices if getattr(index, "target", None) is part_index), None)
    if part is not None and (len(part) != 3 or not all(type(number) is int for number in part)):
        shown = ", ".join(map(str, part))
        raise CheckFailed(
            f"draws for the part ({shown})", where=describe(node), remedy="write number, count, dimension"
        )
    return part


def check_parts(drawn: Mapping[tuple[int, Part | None], fx.Node]) -> None:
    """Each identity is drawn whole, or in all parts of one cut.

    Args:
        drawn: by identity and part.

    Raises:
        CheckFailed: names a draw whose other parts are missing.
    """
    known: dict[int, list[tuple[Part, fx.Node]]] = {}
    for (identity, part), node in drawn.items():
        if part is not None:
            known.setdefault(identity, []).append((part, node))
    for identity, found in known.items():
        (part, node), numbers = found[0], sorted(each[0] for each, _ in found)
        cuts = {each[1:] for each, _ in found}
        if len(cuts) > 1 or numbers != list(range(part[1])) or (identity, None) in drawn:
            shown = ", ".join(f"{each[0]} of {each[1]} in dimension {each[2]}" for each, _ in found)
            raise CheckFailed(
                f"the identity {identity} is drawn in the parts {shown}, which are not the whole",
                where=describe(node),
                remedy="draw each part of one cut once",
            )
