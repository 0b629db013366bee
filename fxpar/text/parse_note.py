"""What stands behind the head of a node in a program's text: its type with layouts, its attributes and its comment.

Enters: a line at the end of the head, and the node that the head has made. Leaves: the node's note, or a `TextError`
without a place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxpar.layout.nesting import seen_by
from fxpar.ops.coercion_table import COERCION_OF
from fxpar.program.placements import axes_of
from fxpar.program.program import Note, operands, output_layouts, output_types
from fxpar.text.printing import need_shapes
from fxpar.text.scanning import (
    IDENTIFIER,
    INTEGER,
    STRING,
    Scanner,
    fail,
    parse_layout,
    parse_type,
    placement,
    split,
    unquote,
)

_TYPE = re.compile(r' : ([^{#"]*)')
_BRACE = re.compile(r"\s*\{")
_ATTRIBUTE = re.compile(
    rf'(needs)=([^"{{}}]*?)(?=, \w+=|}})|(role|origin|uncaptured)=({STRING})|(random|recompute|buffer)=({INTEGER})'
    rf"|(phase)=(backward|weight|parameter)|(region)=({IDENTIFIER})|(stage)=(\d{{1,4}}(?:\+\d{{1,4}})*)|(one_shot)=true"
)
_COMMENT = re.compile(rf"\s*(?:#\s*(?:({STRING}|[^\s\"]\S*)(?:\s+({STRING}|[^\s\"].*))?)?)?$")
_AXIS = re.compile(rf"({IDENTIFIER}):(.*)")


def read_note(scanner: Scanner, node: fx.Node, axes: Mapping[str, int]) -> Note:
    """Type, layouts, attributes and comment: the rest of a node's line.

    Args:
        axes: sizes of the plan's mesh axes.
    """
    fields: dict[str, Any] = {}
    if match := scanner.match(_TYPE):
        fields["type"], fields["layout"] = parse_type(_without_source(node, match[1].strip(), axes), axes)
    if scanner.match(_BRACE):
        for _ in scanner.items("}"):
            key, value = _attribute(scanner, node, axes)
            if key in fields:
                fail(f"the attribute {key} stands twice", "keep one")
            fields[key] = value
    comment = read_end(scanner)
    fqn, source = comment[1] or "-", comment[2] or ""
    return Note(**fields, fqn="" if fqn == "-" else unquote(fqn), source=unquote(source))


def read_end(scanner: Scanner) -> re.Match[str]:
    """The comment that ends a line, which may be empty."""
    ahead = scanner.text[scanner.at : scanner.at + 20]
    return scanner.match(_COMMENT) or fail(f"{ahead!r} is not expected here", "check brackets, commas and ' : '")


def _attribute(scanner: Scanner, node: fx.Node, axes: Mapping[str, int]) -> tuple[str, Any]:
    match = scanner.match(_ATTRIBUTE)
    if match is None:
        ahead = scanner.text[scanner.at : scanner.at + 20]
        fail(
            f"{ahead!r} starts no attribute",
            'write needs=, role="…", origin="…", random=, recompute=, buffer=, one_shot=true, phase=, region=, stage='
            " or uncaptured=",
        )
    if match[3]:
        return match[3], unquote(match[4])
    if match[5]:
        return match[5], int(match[6])
    if match[7] or match[9]:
        return match[7] or match[9], match[8] or match[10]
    if match[11]:
        return "stages", tuple(map(int, match[12].split("+")))
    if match[13]:
        return match[13], True
    parts, shapes = split(match[2], ";"), need_shapes(node)
    if len(parts) != len(shapes):
        fail(f"needs has {len(parts)} layouts for {len(shapes)} operands", "write one for each, separated by ';'")
    return "needs", tuple(parse_layout(p, s, axes) for p, s in zip(parts, shapes, strict=True))


def _without_source(node: fx.Node, text: str, axes: Mapping[str, int]) -> str:
    """The type text of a coercion without its `P→`, which must be what its operand is."""
    coercion = node.target in COERCION_OF
    coerced = operands(node) if coercion else []
    if coercion and [len(output_types(operand)) for operand in coerced] != [1]:
        fail("a coercion needs one tensor", "pass it one %name of a tensor")
    tokens = split(text, " ")
    for i, token in enumerate(tokens):
        if "→" not in token:
            continue
        match = _AXIS.fullmatch(token)
        if not coercion or match is None or match[1] not in axes_of(node):
            fail(f"an arrow stands in '{token}'", "write arrows only for a coercion, on its axis")
        source, _, target = match[2].partition("→")
        before = {k: v for layout in output_layouts(coerced[0]) for k, v in layout}.get(match[1])
        shape = output_types(coerced[0])[0].shape
        seen = seen_by(output_layouts(coerced[0])[0], shape, axes) if output_layouts(coerced[0]) else {}
        if placement(source, seen.get(match[1], shape)) != before:
            fail(
                f"the operand %{coerced[0].name} is {before or 'without layout'} on {match[1]} and not {source}",
                "write its layout before the arrow, or none",
            )
        tokens[i] = f"{match[1]}:{target}"
    return " ".join(tokens)
