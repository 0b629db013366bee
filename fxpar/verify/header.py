"""Header: what a program says of itself holds of its graph.

Enters: a program. Leaves: nothing, or `CheckFailed` that names the property or the symbol.

Checks run by properties: a program that drops one must not escape the check. What a property rests on is what the
pass that provides it requires.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxpar.errors import CheckFailed
from fxpar.ops import Operator
from fxpar.ops.sent_rows import send_rows
from fxpar.passes import DEFAULT_PASSES
from fxpar.program.program import Program, describe, output_layouts
from fxpar.program.properties import Property
from fxpar.program.symbols import Condition
from fxpar.signatures.facts import Facts, facts_of
from fxpar.verify.counted import check_counted

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
