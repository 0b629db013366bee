"""Counted rows: each symbol of them is one exchange's, and no collective takes ranks' rows for equally many.

So is each number of rows that a loop over experts picks in a program as captured.

Enters: a program. Leaves: nothing, or `CheckFailed` that names the node. That operations on rows do not mix those of
two exchanges follows from their symbols, as shapes are checked.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar.errors import CheckFailed
from fxpar.layout.symbols import names
from fxpar.ops.coercion_table import COERCION_OF
from fxpar.ops.sent_rows import send_rows
from fxpar.program.coercions import axes_of
from fxpar.program.program import Program, describe, operands, output_layouts, output_types
from fxpar.program.properties import Property
from fxpar.program.step import is_forward

_WHERE = torch.ops.aten.where.default


def check_counted(program: Program) -> None:
    """Checks the symbols of counted rows.

    Raises:
        CheckFailed: a symbol without an exchange or of two, an exchange without one, or a collective over axes whose
            ranks have other numbers of rows.
    """
    known = {symbol.name for symbol in program.counted}
    sizes: dict[str, fx.Node] = {}
    cut: dict[str, set[str]] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.target is send_rows and is_forward(node):
            name = _symbol_of(node, known)
            if sizes.setdefault(name, operands(node)[1]) is not operands(node)[1]:
                raise CheckFailed(
                    f"brings {name} rows, as another exchange does: their numbers differ",
                    where=describe(node),
                    remedy="give each exchange a symbol of its own",
                )
            if any(other != name and split_sizes is operands(node)[1] for other, split_sizes in sizes.items()):
                raise CheckFailed(
                    f"brings {name} rows by the split sizes of another exchange",
                    where=describe(node),
                    remedy="give each exchange its own split sizes",
                )
            cut[name] = {axis for layout in output_layouts(node) for axis, p in layout if p.is_shard}
        if node.target is _WHERE and Property.CANONICAL not in program.properties:
            _check_picked(node, known, sizes)
            cut |= {name: set() for name in sizes if sizes[name] is node}
        counted = known & names(size for kind in output_types(node) for size in kind.shape) if known else set()
        if counted - sizes.keys():
            raise CheckFailed(
                f"has {min(counted)} rows, which no exchange before it brings",
                where=describe(node),
                remedy="send rows first (fxpar.send_rows)",
            )
        if node.target in COERCION_OF and any(not cut[name].isdisjoint(axes_of(node)) for name in counted):
            raise CheckFailed(
                f"its ranks have other numbers of rows ({', '.join(sorted(counted))})",
                where=describe(node),
                remedy="send rows with fxpar.send_rows and fxpar.return_rows",
            )


def _check_picked(node: fx.Node, known: set[str], sizes: dict[str, fx.Node]) -> None:
    """A loop over experts picks a number of rows of its own for each, until `canonicalize` has recognised it."""
    picked = names(size for kind in output_types(node) for size in kind.shape) & known
    if len(picked) != 1 or any(sizes.setdefault(name, node) is not node for name in picked):
        raise CheckFailed(
            f"picks {', '.join(sorted(picked)) or 'no'} rows, of one number that no other operation picks",
            where=describe(node),
            remedy="give each a symbol of its own",
        )


def _symbol_of(node: fx.Node, known: set[str]) -> str:
    (kind,) = output_types(node)
    symbols = names((kind.shape[-2],))
    if len(symbols) != 1 or not symbols <= known or str(kind.shape[-2]) not in symbols:
        raise CheckFailed(
            f"brings {kind.shape[-2]} rows, but values decide how many",
            where=describe(node),
            remedy="declare a symbol: counted r = … like …",
        )
    return symbols.pop()
