"""Two half batches on one rank: what one computes reads nothing of the other, and all of both is put together.

Enters: a program of halves (`fxpar.passes.interleave_halves`). Leaves: `CheckFailed`, at the first operation that mixes
them otherwise than by a sum or by their rows in order. A helper of the check `structure`.

A value is of the first half, of the second, or whole. Halves begin where an input is taken apart, which is noted there
(`HALF_OF`); what reads one is of it; of both a whole value is made by their sum or their stack. Both compute the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from fxpar.errors import CheckFailed
from fxpar.program.halves import HALF_OF, OF_SIZES, SIZES_ALONE
from fxpar.program.keys import plain
from fxpar.program.program import Program, ScalarType, describe, note, operands, output_layouts, output_node
from fxpar.program.step import is_forward
from fxpar.verify.parts import drawn_part

aten = torch.ops.aten

_REMEDY = "read the same half everywhere, or write the program without interleave_halves"


def check_halves(program: Program) -> None:
    """Checks the forward of a program in which `interleave_halves` has run.

    Raises:
        CheckFailed: names the operation.
    """
    halves: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and is_forward(node) and not isinstance(note(node).type, ScalarType):
            half = _half_of(node, halves)
            if half is not None:
                halves[node] = half
    values: Any = output_node(program.graph).args[0]
    for name, value in zip(program.outputs, values, strict=True):
        if value in halves:
            raise CheckFailed("is of one half of the batch", where=f"output {name}", remedy=_REMEDY)
    keys = {node: _key(node) for node in halves if note(node).origin not in HALF_OF}
    first, second = (Counter(key for node, key in keys.items() if halves[node] == half) for half in (0, 1))
    odd = next((node for node, key in keys.items() if first[key] != second[key]), None)
    if odd is not None:
        raise CheckFailed("is computed of one half and not of the other", where=describe(odd), remedy=_REMEDY)


def _half_of(node: fx.Node, halves: dict[fx.Node, int]) -> int | None:
    """Which half a value is of; None of what is whole."""
    read = {halves[operand] for operand in operands(node) if operand in halves}
    if note(node).origin in HALF_OF:
        return _taken(node, read)
    if note(node).origin == SIZES_ALONE and node.target in OF_SIZES:
        return None
    if len(read) == 2:
        order = [halves.get(operand) for operand in operands(node)]
        if node.target not in (aten.add.Tensor, aten.stack.default) or order != [0, 1] or node.kwargs:
            raise CheckFailed("reads both halves of the batch", where=describe(node), remedy=_REMEDY)
        return None
    half = next(iter(read), None)
    part = drawn_part(node) if note(node).random else None
    if part is not None and part[0] != half:
        raise CheckFailed("draws for another half than its operand is of", where=describe(node), remedy=_REMEDY)
    return half


def _taken(node: fx.Node, read: set[int]) -> int:
    """The half that is taken out of what is whole."""
    half = HALF_OF.index(note(node).origin)
    source = node.args[0]
    is_part = isinstance(source, fx.Node) and source.target is aten.unflatten.int and not read
    if not is_part or node.target is not aten.select.int or node.args[2] != half:
        raise CheckFailed(
            f"is said to be the {HALF_OF[half]}", where=describe(node), remedy=f"write select(…, {half}) of both halves"
        )
    return half


def _key(node: fx.Node) -> Hashable:
    """All that a node is without its operands."""
    args = plain((node.args, node.kwargs), lambda read: note(read).type)
    return node.target, repr(args), note(node).type, output_layouts(node), note(node).random
