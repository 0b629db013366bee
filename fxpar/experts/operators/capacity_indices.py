"""In which order rows travel between the ranks that hold different experts.

Enters: how many rows each source has for each expert. Leaves: for each place of a buffer the row that belongs there, -1
where none does. Sizes are bounds, so that nothing waits for a number to reach the host: a source sends each rank
`capacity` places, which hold whatever its tokens may choose there.

Leading dimensions, one for each axis that cuts tokens, stand for ranks: each computes its own part.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ops.operator import Autograd, torch_operator
from fxpar.signatures.engine import Rule
from fxpar.signatures.matmul import formula


def _blocks_shape(order: Tensor, counts: Tensor, blocks: int, capacity: int) -> Tensor:
    return order.new_empty((*order.shape[:-1], blocks * capacity))


def _of_one_block(node: fx.Node) -> Iterable[object]:
    """Returns order and counts where all rows stand in front: only one block has no places between its rows."""
    return (node, node.args[1]) if node.args[2] == 1 else ()


def _results(node: fx.Node) -> Iterable[object]:
    return (part for part in node.users if part.target is operator.getitem)


@torch_operator(
    "dispatch_indices",
    fake=_blocks_shape,
    rule=Rule(formula("... _, ... _ -> ... _", "order", "counts")),
    buffer=_of_one_block,
)
def dispatch_indices(order: Tensor, counts: Tensor, blocks: int, capacity: int) -> Tensor:
    """Rows by the rank they go to: the experts of each in one block of places.

    Args:
        order: i64 [..., rows], the rows by expert, ascending.
        counts: i64 [..., experts], of each expert.
        blocks: ranks that hold different experts, as many each; they divide the experts.
        capacity: places of a block; rows for which there is none are left out.

    Returns:
        i64 [..., blocks * capacity]: entries of `order`, -1 in places behind a block's rows.
    """
    sent = counts.unflatten(-1, (blocks, -1)).sum(-1)
    first = sent.cumsum(-1) - sent
    place = torch.arange(capacity, device=order.device)
    # gather takes no index beyond the end. Places without a row read any entry, and get -1 below.
    rows = (first.unsqueeze(-1) + place).clamp(max=max(order.shape[-1] - 1, 0)).flatten(-2)
    entries = order.gather(-1, rows) if order.shape[-1] else rows
    return torch.where((place < sent.unsqueeze(-1)).flatten(-2), entries, -1)


def _excess_shape(counts: Tensor, blocks: int, capacity: int) -> Tensor:
    return counts.new_empty((*counts.shape[:-1], 1))


@torch_operator("block_excess", fake=_excess_shape, rule=Rule(formula("... _ -> ... _", "counts")))
def block_excess(counts: Tensor, blocks: int, capacity: int) -> Tensor:
    """For how many rows the fullest block has no place.

    Args:
        counts: i64 [..., experts], as `dispatch_indices` has them.
        blocks: likewise.
        capacity: likewise.

    Returns:
        i64 [..., 1].
    """
    sent = counts.unflatten(-1, (blocks, -1)).sum(-1)
    excess: Tensor = (sent.amax(-1, keepdim=True) - capacity).clamp_min(0)
    return excess


def _received_shapes(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    *leading, sources, experts = counts.shape
    return counts.new_empty((*leading, sources * capacity)), counts.new_empty((*leading, experts))


_sorted_counts = Rule(formula("... _ _ -> ... _, ... _", "counts"))


@torch_operator("received_order", fake=_received_shapes, rule=_sorted_counts, buffer=_results)
def received_order(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Rows that sources sent, by expert.

    Args:
        counts: i64 [..., sources, experts]: of each source the rows for each of this rank's experts.
        capacity: places of a source's block, in which its rows stand by expert; rows for which there was none are left
            out (`block_excess`).

    Returns:
        i64 [..., sources * capacity]: places of the buffer by expert, in an expert by source, -1 behind all rows; and
        i64 [..., experts]: the rows of each expert.
    """
    # The sums are clamped, not the counts: a block that is full lost the rows that come last in it.
    end = counts.cumsum(-1).clamp_max(capacity)
    counts = end.diff(dim=-1, prepend=end.new_zeros(()).expand(*end.shape[:-1], 1))
    total = counts.sum(-2)
    place = torch.arange(capacity, device=counts.device)
    # Of each place its expert, or one more than there are.
    expert = (place.unsqueeze(-1) >= end.unsqueeze(-2)).sum(-1)
    before = counts.cumsum(-2) - counts + (total.cumsum(-1) - total).unsqueeze(-2)
    # Where an expert's rows of a source begin among all, less where they begin in the block.
    shift = torch.nn.functional.pad(before - (end - counts), (0, 1))
    is_row = expert < counts.shape[-1]
    size = counts.shape[-2] * capacity
    target = torch.where(is_row, place + shift.gather(-1, expert), size).flatten(-2)
    # What is no row is written to one place more than there are, which is cut off.
    order = target.new_full((*target.shape[:-1], size + 1), -1)
    source = torch.arange(size, device=counts.device).expand(target.shape)
    return order.scatter(-1, target, source)[..., :-1].contiguous(), total


def _arrived_shapes(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    *leading, _, experts = counts.shape
    return counts.new_empty((*leading, rows)), counts.new_empty((*leading, experts))


@torch_operator("arrived_order", fake=_arrived_shapes, rule=_sorted_counts, buffer=_results)
def arrived_order(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows that sources sent, by expert, where nothing stands between them.

    Args:
        counts: i64 [..., sources, experts]: of each source the rows for each of this rank's experts.
        rows: no fewer than that is in all; they stand by source, those of a source by expert.

    Returns:
        i64 [..., rows]: the rows by expert, in an expert by source, -1 behind all of them; and i64 [..., experts]: the
        rows of each expert.
    """
    total, end = counts.sum(-2), counts.flatten(-2).cumsum(-1)
    place = torch.arange(rows, device=counts.device).expand(*counts.shape[:-2], rows).contiguous()
    # Of each row its source and expert; that of the last ones is none.
    pair = torch.searchsorted(end.contiguous(), place, right=True)
    before = counts.cumsum(-2) - counts + (total.cumsum(-1) - total).unsqueeze(-2)
    shift = torch.nn.functional.pad(before.flatten(-2) - (end - counts.flatten(-2)), (0, 1))
    target = torch.where(pair < end.shape[-1], place + shift.gather(-1, pair), rows)
    order = target.new_full((*target.shape[:-1], rows + 1), -1)
    return order.scatter(-1, target, place)[..., :-1].contiguous(), total


def _resized_shape(x: Tensor, rows: int, fill: int) -> Tensor:
    return x.new_empty((*x.shape[:-2], rows, x.shape[-1]))


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rows = inputs[0].shape[-2]


def _resized_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return resize_rows(gradient, ctx.rows, 0), None, None


@torch_operator(
    "resize_rows",
    fake=_resized_shape,
    autograd=Autograd(_save_rows, _resized_back),
    rule=Rule(formula("... _ h -> ... _ h", "x"), (("x",),)),
)
def resize_rows(x: Tensor, rows: int, fill: int) -> Tensor:
    """[..., any, h] → [..., rows, h]: the first rows, and behind those that are there rows of `fill`."""
    present = x.shape[-2]
    if rows <= present:
        return x[..., :rows, :].clone(memory_format=torch.contiguous_format)
    return torch.nn.functional.pad(x, (0, 0, 0, rows - present), value=fill)
