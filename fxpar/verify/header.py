"""Header: what a program says of itself holds of its graph.

Enters: a program. Leaves: nothing, or `CheckFailed` that names the property or the symbol.

Checks run by properties: a program that drops one must not escape the check. What a property rests on is what the
pass that provides it requires.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fxpar.errors import CheckFailed
from fxpar.layout.symbolic_sizes import names
from fxpar.ops import Operator
from fxpar.ops.coercion_table import COERCION_OF
from fxpar.ops.sent_rows import send_rows
from fxpar.passes import DEFAULT_PASSES
from fxpar.program.placements import axes_of
from fxpar.program.program import Program, describe, operands, output_layouts, output_types
from fxpar.program.properties import Property
from fxpar.program.step import is_forward
from fxpar.program.symbols import Condition
from fxpar.signatures.check_cache import Facts, facts_of

_RESTS_ON: Mapping[str, frozenset[str]] = {name: item.requires for item in DEFAULT_PASSES for name in item.provides}


def check_header(program: Program, facts: Facts | None = None) -> None:
    """Properties rest on each other and are those of the nodes; each symbol is the size of an input.

    The example satisfies each condition.

    Args:
        facts: of the program, where they are known.

    Raises:
        CheckFailed: names the first fault.
    """
    for name, needed in _RESTS_ON.items():
        missing = sorted(needed - program.properties)
        if name in program.properties and missing:
            raise CheckFailed(
                f"holds without {', '.join(missing)}, on which it rests",
                where=f"property {name}",
                remedy=f"take {name} from the properties, or run the passes before the one that provides it",
            )
    facts = facts or facts_of(program)
    sound = facts.known("header", program.properties)
    for node, number in facts.numbers.items():
        if number not in sound:
            _check_node(program, node)
            sound[number] = True
    for entry in program.symbols:
        _check_symbol(program, entry.name)
    for condition in program.conditions:
        _check_condition(program, condition)
    if program.counted or any(node.target is send_rows for node in program.graph.nodes):
        check_counted(program)


def _check_node(program: Program, node: fx.Node) -> None:
    shown = node.target.stage if isinstance(node.target, Operator) else None
    if shown is None and program.axes and output_layouts(node):
        shown = Property.LAYOUTS
    if shown is not None and shown not in program.properties:
        raise CheckFailed(
            f"is there, but the program does not have the property {shown}",
            where=describe(node),
            remedy=f"add {shown} to its properties, or run the pass that provides it",
        )


def _check_symbol(program: Program, name: str) -> None:
    symbols = [entry for entry in program.symbols if entry.name == name]
    if len(symbols) > 1:
        raise CheckFailed("is defined twice", where=f"symbol {name}")
    place = f"{symbols[0].path}.{symbols[0].dim}"
    inputs = [entry for entry in program.inputs if entry.path == symbols[0].path]
    if not inputs or not 0 <= symbols[0].dim < len(inputs[0].type.shape):
        raise CheckFailed(f"no input has the size {place}", where=f"symbol {name}", remedy="name an input's dimension")
    size = inputs[0].type.shape[symbols[0].dim]
    if size != symbols[0].size:
        raise CheckFailed(f"the size {place} is {size}", where=f"symbol {name}", remedy="name a dimension of that size")
    if symbols[0].multiple < 1:
        raise CheckFailed(f"{symbols[0].multiple} ranks share out {place}", where=f"symbol {name}")
    if symbols[0].example < 1:
        raise CheckFailed(f"the example has the size {symbols[0].example}", where=f"symbol {name}")


def _check_condition(program: Program, condition: Condition) -> None:
    examples = {entry.name: entry.example for entry in program.symbols}
    unknown = condition.names - examples.keys()
    if unknown:
        raise CheckFailed(f"names {min(unknown)}, which is no size of an input", where=f"condition {condition}")
    if not condition.holds(examples):
        example = ", ".join(f"{name}={examples[name]}" for name in sorted(condition.names))
        raise CheckFailed(f"does not hold of the example ({example})", where=f"condition {condition}")


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
