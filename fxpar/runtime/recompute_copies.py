"""What a segment of a backward computes again, of what forwards made that are not compiled with it.

Enters: a segment and those of the forward. Leaves: the segment, with copies in front of its nodes.

What is made of each element alone needs no memory where what it is made of is there anyway: a number of each row, what
the backward reads besides, and what goes into the forward of its unit. A cast, and a value times what a norm found of
its row, are such.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from fxpar.ir.program import TensorType, has_note, note
from fxpar.runtime.segments import Segment, is_number


def computing_again(backward: Segment, partner: Segment | None, forward: Sequence[Segment]) -> Segment:
    """The segment, which computes again what it need not have kept.

    Args:
        partner: the segment of the forward that is compiled with it, of which the min-cut chooses what is kept.
        forward: the segments of the forward.
    """
    # Numbers that are there at the start; what one of them is the size of has to be there, too.
    numbers = tuple(itertools.takewhile(is_number, backward.nodes))
    sized = {read for number in numbers for read in number.all_input_nodes}
    computed = {
        node for segment in forward if segment is not partner for node in segment.nodes if not is_number(node)
    } - sized
    order = [node for segment in forward for node in segment.nodes if node in computed]
    reads, of_partner = set(backward.outer), {*partner.outer, *partner.inner} if partner is not None else set()
    needed = [node for node in order if node in reads and node not in of_partner]
    large = [node for node in needed if _is_large(node) and _owner(node) in computed]
    there = reads.difference(large) | of_partner
    again: set[fx.Node] = set()
    for node in large:  # behind what it is made of
        copies, sources = _copies(node, computed, there, numbers)
        if len(sources) == 1 and _is_smaller(sources[0], node):
            there.add(sources[0])
        elif sources:
            there.add(node)
            continue
        again.update(copies)
    if not again:
        return backward
    nodes = (*numbers, *(node for node in order if node in again), *backward.nodes[len(numbers) :])
    return replace(backward, nodes=nodes, again=frozenset(again))


def _copies(
    root: fx.Node, computed: Collection[fx.Node], there: Collection[fx.Node], numbers: Collection[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """All that is computed again for a value, and what is kept for that and is not there."""
    copies: dict[fx.Node, None] = {}
    sources: dict[fx.Node, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        copies[node] = None
        for read in node.all_input_nodes:
            is_there = read in (numbers if is_number(read) else there) or read in copies
            if is_there or read.op == "placeholder" or _has_one_column(read):
                continue
            large = [operand for operand in read.all_input_nodes if not _has_one_column(operand)]
            if read in computed and _is_elementwise(read) and len(large) == 1:
                pending.append(read)
            else:
                sources[read] = None
    return list(copies), list(sources)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether a node computes each element, or is its operand in other words; none that draws or changes anything."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or note(node).uncaptured:
        return False
    return torch.Tag.pointwise in target.tags or target.is_view or target is torch.ops.aten._to_copy.default


def _is_large(node: fx.Node) -> bool:
    return _is_elementwise(node) and not _has_one_column(node)


def _owner(node: fx.Node) -> fx.Node | None:
    """What computes the memory of a value that is one of the element-wise; a view has that of another one."""
    while _is_elementwise(node) and node.target.is_view:  # type: ignore[union-attr]
        node = node.all_input_nodes[0]
    return node if _is_elementwise(node) else None


def _has_one_column(value: fx.Node) -> bool:
    """Whether a value is a number of each row."""
    kind = note(value).type if has_note(value) else None
    return isinstance(kind, TensorType) and kind.shape[-1:] == (1,)


def _is_smaller(one: fx.Node, other: fx.Node) -> bool:
    """Whether a value takes fewer bytes than another one of as many elements."""
    kinds = [note(node).type if has_note(node) else None for node in (one, other)]
    kind, whole = kinds
    if not isinstance(kind, TensorType) or not isinstance(whole, TensorType):
        return False
    return kind.shape == whole.shape and kind.dtype.itemsize < whole.dtype.itemsize
