"""Copies of forward nodes in the backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.layout.layout import Layout
from fxpar.ops.coercions import IN_BACKWARD
from fxpar.program.placements import in_backward
from fxpar.program.program import Program, note, operands, output_layouts, output_types, set_note
from fxpar.program.step import BACKWARD, RECOMPUTE


def compute_again(program: Program, chosen: Set[fx.Node], readers: Iterable[fx.Node]) -> None:
    """Copies what `readers` read of the chosen nodes, each right in front of the first that needs it.

    Args:
        chosen: nodes of the forward; what they read that is none of them is kept.
        readers: nodes of the backward, in order.
    """
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    for reader in readers:
        for node in sorted(_wanted(reader, chosen, copies), key=order.__getitem__):
            copies[node] = _copy(program, node, copies, reader)
        reader.args = fx.node.map_arg(reader.args, lambda read: copies.get(read, read))
        reader.kwargs = fx.node.map_arg(reader.kwargs, lambda read: copies.get(read, read))


def is_repeatable(node: fx.Node) -> bool:
    """Whether a node of the forward gives the same again: a tensor, and no bits of the device's generator."""
    is_drawn = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return node.op == "call_function" and bool(output_types(node)) and not is_drawn


def _wanted(reader: fx.Node, chosen: Set[fx.Node], copies: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """What must be copied for a reader: of the chosen nodes those on which it depends, and that are not there."""
    needed: set[fx.Node] = set()
    pending = [reader]
    while pending:
        for read in pending.pop().all_input_nodes:
            if read in chosen and read not in copies and read not in needed:
                needed.add(read)
                pending.append(read)
    return needed


def _copy(program: Program, node: fx.Node, copies: Mapping[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    target: Any = IN_BACKWARD.get(node.target, node.target)
    if target is None:
        (source,) = operands(node)
        return copies.get(source, source)
    noted = note(node)
    layouts = tuple(Layout(tuple((axis, in_backward(p)) for axis, p in layout)) for layout in output_layouts(node))
    with program.graph.inserting_before(before):
        new = program.graph.node_copy(node, lambda read: copies.get(read, read))
    new.target, new.name = target, f"{node.name}_again"
    layout = layouts if isinstance(noted.type, tuple) else layouts[0] if layouts else None
    return set_note(new, replace(noted, layout=layout, phase=BACKWARD, origin=RECOMPUTE))
