"""Rows that travel alone: how many a rank sends and receives is known on the host before they leave.

Enters: a rank's rows, and its split sizes. Leaves: the rows that it received. All of it is what a rank runs; the
operators are in `fxpar.ops.sent_rows`.

Terms: the *split sizes* of n ranks are 2n + 1 numbers, i64 [lead, 2n + 1], where every leading dimension is 1: to each
rank how many rows go, of each how many come, and how many rows the source has, those that go nowhere included. A
source's rows stand by rank; those that go nowhere stand last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

_c10d = torch.ops._c10d_functional


def split_sizes(order: Tensor, counts: Tensor, received: Tensor) -> Tensor:
    """The split sizes, where the counts are.

    Args:
        order: i64 [lead, rows], the source's rows.
        counts: i64 [lead, experts], of them.
        received: i64 [lead, ranks, own experts], of each source the rows for each of this rank's experts.
    """
    ranks = received.shape[-2]
    rows = counts.new_full((*counts.shape[:-1], 1), order.shape[-1])
    there = counts.unflatten(-1, (ranks, -1)).sum(-1)
    return torch.cat((there, received.sum(-1), rows), dim=-1)


def start_sizes(order: Tensor, counts: Tensor, received: Tensor) -> tuple[Tensor, Any]:
    """The split sizes on their way to the host, and what tells that they are there: nothing waits yet."""
    sizes = split_sizes(order, counts, received)
    if sizes.device.type != "cuda" or is_fake(sizes):
        return sizes.to("cpu"), None
    there = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
    there.copy_(sizes, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return there, event


def sizes_there(started: tuple[Tensor, Any]) -> Tensor:
    """The split sizes on the host: waits until they are there."""
    sizes, event = started
    if event is not None:
        event.synchronize()
    return sizes


def _numbers(sizes: Tensor, ranks: int, balanced: int) -> tuple[list[int], list[int], int]:
    """Rows that go to each rank and come of each, and those of a source.

    Args:
        balanced: those of a source where `sizes` has no values and all ranks are taken to get as many.
    """
    if is_fake(sizes):
        shares = [balanced // ranks + (rank < balanced % ranks) for rank in range(ranks)]
        return shares, shares, balanced
    numbers = sizes.flatten().tolist()
    return numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks]


@torch.library.custom_op("fxpar::packed_rows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def packed_rows(x: Tensor, sizes: Tensor, ranks: int) -> Tensor:
    """[lead, rows, h] → [rows that go somewhere, h]."""
    sent, _, _ = _numbers(sizes, ranks, x.shape[-2])
    return x.reshape(-1, x.shape[-1])[: sum(sent)].clone(memory_format=torch.contiguous_format)


@packed_rows.register_fake
def _packed_shape(x: Tensor, sizes: Tensor, ranks: int) -> Tensor:
    return x.new_empty((x.shape[-2], x.shape[-1]))


@torch.library.custom_op("fxpar::unpacked_rows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unpacked_rows(x: Tensor, sizes: Tensor, ranks: int, lead: int) -> Tensor:
    """[rows that went somewhere, h] → [lead, rows, h]: zeros for those that went nowhere."""
    _, _, rows = _numbers(sizes, ranks, x.shape[0])
    return functional.pad(x, (0, 0, 0, rows - x.shape[0])).view(*[1] * lead, rows, x.shape[-1])


@unpacked_rows.register_fake
def _unpacked_shape(x: Tensor, sizes: Tensor, ranks: int, lead: int) -> Tensor:
    return x.new_empty((*[1] * lead, *x.shape))


def start_there(x: Tensor, sizes: Tensor, group: str, ranks: int) -> Tensor:
    """The rows on their way to their experts."""
    packed = packed_rows(x, sizes, ranks)
    sent, received, _ = _numbers(sizes, ranks, x.shape[-2])
    return _c10d.all_to_all_single(packed, received, sent, group)  # type: ignore[no-any-return]


def arrived_there(started: Tensor, lead: int) -> Tensor:
    """Of `start_there`: [lead, rows, h]."""
    rows = _c10d.wait_tensor(started)
    return rows.view(*[1] * lead, *rows.shape)  # type: ignore[no-any-return]


def start_back(x: Tensor, sizes: Tensor, group: str, ranks: int) -> Tensor:
    """The rows on their way back: all that a holder has."""
    rows = x.contiguous().view(-1, x.shape[-1])
    sent, received, _ = _numbers(sizes, ranks, x.shape[-2])
    return _c10d.all_to_all_single(rows, sent, received, group)  # type: ignore[no-any-return]


def arrived_back(started: Tensor, sizes: Tensor, ranks: int, lead: int) -> Tensor:
    """Of `start_back`: [lead, rows, h]."""
    rows: Tensor = unpacked_rows(_c10d.wait_tensor(started), sizes, ranks, lead)
    return rows
