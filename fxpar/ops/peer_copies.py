"""Coercions whose collective is copies between the ranks' memories: what a lowered graph calls for them.

Enters: a rank's tensor, the name of a symmetric buffer and the number of a buffer in it.
Leaves: as the functions of the same names in `fxpar.ops.process_group`. Each is two calls: `start_…` sends, and the
other waits and reads. A send gives what it sends along, so that it stays until it is there.

Of two ranks a sum is one copy of the whole each way and an addition, which a compiler may put into the kernel that
reads it. Of more, each rank sums one block: blocks go to their owners, which add them in float32 and send the sum to
all (`fxpar.peer_memory.compiler.symmetric_buffer`); the first half of this way is copies, and the second belongs to
what reads the sum. Where nothing is computed during a sum, all of it is one call (`one_shot_sum`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxpar.ops import process_group as c
from fxpar.ops.operator import torch_operator
from fxpar.ops.process_group import Pieces
from fxpar.peer_memory.compiler.row_programs import Extent, fits, read
from fxpar.peer_memory.compiler.symmetric_buffer import (
    SymmetricBuffer,
    registered_buffer,
    send_blocks,
    slot_stride,
)

# What is sent: `sum` and `gather` the whole, `scatter` and `exchange` to each rank its block; and what is made of it.
_SUM, _GATHER, _SCATTER, _EXCHANGE = "sum", "gather", "scatter", "exchange"

_ALIGNED = 16

Sent = tuple[Tensor, Tensor]


def _sent(x: Tensor, kind: str, name: str, buffer: int, dim: int = 0) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=x.device)


@torch_operator("send_copies", fake=_sent, direct=True)
def send_copies(x: Tensor, kind: str, name: str, buffer: int, dim: int = 0) -> Tensor:
    """Starts copies of what each other rank is to have, in the symmetric buffer `name`.

    Args:
        x: the tensor.
        dim: in which `scatter` and `exchange` cut it into a block for each rank.

    Returns:
        uint8[1], which ties what reads to this.
    """
    line = registered_buffer(name)
    line.begin(buffer)
    tensor = x.contiguous()
    if kind == _SUM and line.size == 2:
        _send_whole(line, buffer, tensor)
    elif kind == _SUM:
        with line.beside(buffer, tensor):
            send_blocks(line, buffer, _rows(tensor))
    else:
        _send_blocks(line, buffer, tensor, kind, dim)
    return torch.empty(1, dtype=torch.uint8, device=x.device)


def _send_whole(line: SymmetricBuffer, buffer: int, tensor: Tensor) -> None:
    """Sends the whole to the other of two ranks."""
    (other,) = line.others
    area = line.areas(buffer, tensor.nbytes)[other]
    with line.beside(buffer, tensor):
        line.copy(area, 0, tensor)
        line.signal(other, buffer, 0)


# Bytes of a row of a block from which on copy engines skip what lies between two rows as fast as they copy.
_WIDE = 1 << 16


def _send_blocks(line: SymmetricBuffer, buffer: int, tensor: Tensor, kind: str, dim: int) -> None:
    blocks = _blocks(tensor, kind, line.size, dim)
    if blocks[0].shape[-1] * tensor.itemsize < _WIDE:
        blocks = [block.contiguous() for block in blocks]
    step, end = _places(blocks)
    areas = line.areas(buffer, end)
    with line.beside(buffer, [tensor, *blocks]):
        for rank in line.others:
            with line.toward(rank, buffer):
                line.copy(areas[rank], step * line.rank, blocks[rank])
                line.signal(rank, buffer, 0)


def _taken(token: Tensor, x: Tensor, kind: str, name: str, buffer: int, dim: int = 0) -> Tensor:
    if kind == _EXCHANGE:
        return x.new_empty(x.shape)
    shape, size = list(x.shape), registered_buffer(name).size
    shape[dim] = shape[dim] * size if kind == _GATHER else shape[dim] // size
    return x.new_empty(shape)


@torch_operator("take_copies", fake=_taken, direct=True)
def take_copies(token: Tensor, x: Tensor, kind: str, name: str, buffer: int, dim: int = 0) -> Tensor:
    """Waits for what the other ranks sent, and reads it.

    Args:
        token: of `send_copies`.
        x: what that took.
        kind: as there; of sums see `arrived` and `taken_sum`.
        dim: as there; of `gather`, in which the ranks' tensors are put one after the other.

    Returns:
        `gather`: their tensors in one; `scatter`: the sum of the blocks of this rank; `exchange`: these blocks.
    """
    line = registered_buffer(name)
    assert kind != _SUM, "sums are taken by `arrived` and `taken_sum`"
    tensor = x.contiguous()
    blocks = _blocks(tensor, kind, line.size, dim)
    step, end = _places(blocks)
    area, local = line.areas(buffer, end)[line.rank], blocks[line.rank]
    line.join(buffer)
    line.wait(buffer, 0)
    if kind == _SCATTER:
        shape = list(x.shape)
        shape[dim] //= line.size
        taken = line.sum_of_slots(area, step, local).view(shape)
    elif kind == _GATHER:
        taken = torch.cat([part.view(x.shape) for part in line.slots(area, step, local)], dim)
    else:
        taken = torch.stack(line.slots(area, step, local), 1).view(x.shape)
    # All bits set are NaN in every floating type, so that a read after the end shows in tests.
    if line.poisons:
        area.fill_(0xFF)
    line.end(buffer)
    return taken


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_sent(token: Tensor, x: Tensor, *_: Any) -> Tensor:
    return _like(x)


@torch_operator("arrived", fake=_like_sent, direct=True)
def arrived(token: Tensor, x: Tensor, name: str, buffer: int) -> Tensor:
    """Waits for what the other of two ranks sent, for their sum.

    Args:
        token: of `send_copies`.
        x: what that took.

    Returns:
        It, of the shape of `x`: memory into which the other will write again, for `added` alone.
    """
    line = registered_buffer(name)
    line.join(buffer)
    line.wait(buffer, 0)
    line.end(buffer)
    return line.whole(line.rank, buffer, x)


@torch_operator("added", fake=_like, direct=True)
def added(x: Tensor, came: Tensor, name: str) -> Tensor:
    """Adds a rank's tensor and what `arrived`, in new memory: one rounding, the same bits on both ranks."""
    total = x + came
    if registered_buffer(name).poisons:
        came.view(torch.uint8).fill_(0xFF)
    return total


@torch_operator("one_shot_sum", fake=_like, direct=True)
def one_shot_sum(x: Tensor, name: str, buffer: int) -> Tensor:
    """Sums in one call, while nothing else is computed."""
    line = registered_buffer(name)
    line.begin(buffer)
    return _total(line, x, buffer, False)


@torch_operator("taken_sum", fake=_like_sent, direct=True)
def taken_sum(token: Tensor, x: Tensor, name: str, buffer: int) -> Tensor:
    """Returns the sum over more than two ranks.

    Args:
        token: of `send_copies`.
        x: what that took.
    """
    return _total(registered_buffer(name), x, buffer, True)


def _total(line: SymmetricBuffer, x: Tensor, buffer: int, is_sent: bool) -> Tensor:
    tensor = x.contiguous()
    rows = _rows(tensor)
    if rows.numel() or is_sent:
        total = line.total(buffer, rows, is_sent)
        line.poison(buffer, rows)
        sum_of_ranks = torch.view_as_complex(total.view(*x.shape, 2)) if x.is_complex() else total.view(x.shape)
    else:
        sum_of_ranks = torch.empty_like(tensor)
    line.end(buffer)
    return sum_of_ranks


def _rows(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor as [rows, width]; a complex number is two, a row that no kernel holds is a column."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    width = real.shape[-1] if real.dim() else 1
    return real.view(-1, width if real.numel() and fits(width, real.dtype) else 1)


def _of_rows(x: Tensor, operands: Sequence[Tensor], program: str, name: str, buffer: int) -> list[Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return read(program).run(total.view(-1, x.shape[-1]), _operands(operands, program))


@torch_operator("one_shot_rows", fake=_of_rows, direct=True)
def one_shot_rows(x: Tensor, operands: Sequence[Tensor], program: str, name: str, buffer: int) -> list[Tensor]:
    """Runs a program on the rows of a sum, with the sum in one call (`fxpar.peer_memory.compiler.row_programs`).

    Args:
        x: [..., width], not empty.
        operands: of the program, [..., width], [..., 1] or of `width` elements.
        program: its text.

    Returns:
        [rows, width] or [rows, 1] each.
    """
    line = registered_buffer(name)
    line.begin(buffer)
    return _rows_of_total(line, x, operands, program, buffer, False)


def _of_taken_rows(
    token: Tensor, x: Tensor, operands: Sequence[Tensor], program: str, name: str, buffer: int
) -> list[Tensor]:
    return _of_rows(x, operands, program, name, buffer)


@torch_operator("taken_rows", fake=_of_taken_rows, direct=True)
def taken_rows(
    token: Tensor, x: Tensor, operands: Sequence[Tensor], program: str, name: str, buffer: int
) -> list[Tensor]:
    """Runs a program as `one_shot_rows` does, on the rows of `taken_sum`."""
    return _rows_of_total(registered_buffer(name), x, operands, program, buffer, True)


def _rows_of_total(
    line: SymmetricBuffer, x: Tensor, operands: Sequence[Tensor], program: str, buffer: int, is_sent: bool
) -> list[Tensor]:
    rows = x.contiguous().view(-1, x.shape[-1])
    results = line.rows_of_total(buffer, rows, program, _operands(operands, program), is_sent)
    line.poison(buffer, rows)
    line.end(buffer)
    return results


def _operands(operands: Sequence[Tensor], program: str) -> list[Tensor]:
    known = read(program)
    shapes = {Extent.FULL: (-1, known.width), Extent.ROW: (-1, 1), Extent.COLUMN: (known.width,)}
    return [x.contiguous().view(shapes[extent]) for x, extent in zip(operands, known.operands, strict=True)]


def _blocks(x: Tensor, kind: str, size: int, dim: int) -> list[Tensor]:
    """Returns what each rank is to have, [rows, width]: the elements of a row lie one after the other."""
    if kind in (_SCATTER, _EXCHANGE):
        rows = prod(x.shape[:dim])
        return list(x.view(rows, size, prod(x.shape[dim:]) // size).unbind(1))
    return [x.view(1, x.numel())] * size


def _places(blocks: Sequence[Tensor]) -> tuple[int, int]:
    """Returns the bytes from the slot of one sender to that of the next, and in all."""
    step = -(-max(block.nbytes for block in blocks) // _ALIGNED) * _ALIGNED
    return step, step * len(blocks)


# ---------------------------------------------------------------------- what a lowered graph calls


def _start(x: Tensor, kind: str, name: str, buffer: int, dim: int = 0) -> Sent:
    tensor = x.contiguous()
    return tensor, send_copies(tensor, kind, name, buffer, dim)


def _finish(sent: Sent, kind: str, name: str, buffer: int, dim: int = 0) -> Tensor:
    tensor, token = sent
    return take_copies(token, tensor, kind, name, buffer, dim)


def _is_plain(pieces: Pieces) -> bool:
    """Returns whether the ranks' parts lie one after the other, none of them padded."""
    ((outer, run), *more) = pieces
    return outer == 1 and not more and not isinstance(run, tuple)


def start_sum(x: Tensor, name: str, buffer: int) -> Sent:
    """Starts P → I, P → R."""
    return _start(x, _SUM, name, buffer)


def summed(sent: Sent, name: str, buffer: int) -> Tensor:
    """Waits for `start_sum`, and returns the sum."""
    if registered_buffer(name).size > 2:
        return taken_sum(sent[1], sent[0], name, buffer)
    tensor, token = sent
    return added(tensor, arrived(token, tensor, name, buffer), name)


def sum_in_one_shot(x: Tensor, name: str, buffer: int) -> Tensor:
    """Computes P → I, P → R in one call, while nothing else is computed."""
    return one_shot_sum(x, name, buffer)


def start_gather(x: Tensor, name: str, buffer: int) -> Sent:
    """Starts S → R, S → I."""
    return _start(x, _GATHER, name, buffer)


def gathered(sent: Sent, dim: int, pieces: Pieces, name: str, buffer: int) -> Tensor:
    """Waits for `start_gather`, and puts the parts in their places."""
    if _is_plain(pieces):
        return _finish(sent, _GATHER, name, buffer, dim)
    stacked = _finish(sent, _GATHER, name, buffer)
    return c.put_together(stacked.view(registered_buffer(name).size, *sent[0].shape), (dim, pieces))


def start_scatter(x: Tensor, dim: int, pieces: Pieces, size: int, name: str, buffer: int) -> Sent:
    """Starts P → S."""
    if _is_plain(pieces):
        return _start(x, _SCATTER, name, buffer, dim)
    return _start(c.spread(x, (dim, pieces), size), _SCATTER, name, buffer)


def scattered(sent: Sent, dim: int, pieces: Pieces, name: str, buffer: int) -> Tensor:
    """Waits for `start_scatter`, and returns the rank's shard of the sum."""
    if _is_plain(pieces):
        return _finish(sent, _SCATTER, name, buffer, dim)
    return _finish(sent, _SCATTER, name, buffer).squeeze(0)


def start_exchange(x: Tensor, dim: int, pieces: Pieces, size: int, name: str, buffer: int) -> Sent:
    """Starts S(i) → S(j), by the target's cut."""
    return _start(c.spread(x, (dim, pieces), size), _EXCHANGE, name, buffer)


def exchanged(sent: Sent, dim: int, pieces: Pieces, name: str, buffer: int) -> Tensor:
    """Waits for `start_exchange`, and puts the parts in their places by the source's cut."""
    return c.put_together(_finish(sent, _EXCHANGE, name, buffer), (dim, pieces))


# Each of these is one call, which sends, waits and reads: how much travels is known where it is sent alone, and no copy
# engine is told which rows (`fxpar.experts.operators.selective_dispatch`).


def _gathered(x: Tensor, chosen: Tensor, per_rank: int, name: str, buffer: int) -> Tensor:
    return x.new_empty((chosen.shape[0], *x.shape))


@torch_operator("gather_needed", fake=_gathered, direct=True)
def gather_needed(x: Tensor, chosen: Tensor, per_rank: int, name: str, buffer: int) -> Tensor:
    """Gathers those tokens of n ranks that this rank needs, in the symmetric buffer `name`.

    Args:
        x: [t, f]: its own.
        chosen: i64[n, t, K]: the experts of all.
        per_rank: experts of a rank.

    Returns:
        [n, t, f], zero where it needs nothing.
    """
    line = registered_buffer(name)
    line.begin(buffer)
    tokens = line.expanded(buffer, x.contiguous(), chosen.contiguous(), per_rank)
    line.poison_area(buffer, slot_stride(x) * line.size)
    line.end(buffer)
    return tokens


def _scattered(x: Tensor, chosen: Tensor, per_rank: int, name: str, buffer: int) -> Tensor:
    return x.new_empty(x.shape[1:])


@torch_operator("scatter_needed", fake=_scattered, direct=True)
def scatter_needed(x: Tensor, chosen: Tensor, per_rank: int, name: str, buffer: int) -> Tensor:
    """Returns the sums of what n ranks made of this rank's tokens, each of those that it needed.

    Args:
        x: [n, t, f]: what this rank made of the tokens of all.
        chosen, per_rank: as of `gather_needed`.

    Returns:
        [t, f].
    """
    line = registered_buffer(name)
    line.begin(buffer)
    sums = line.summed(buffer, x.contiguous(), chosen.contiguous(), per_rank)
    line.poison_area(buffer, slot_stride(sums) * line.size)
    line.end(buffer)
    return sums


def expand_copied(x: Tensor, chosen: Tensor, per_rank: int, size: int, name: str, buffer: int) -> Tensor:
    """Maps [… t, f] → [… 1, n * t, f] (`expand_needed`)."""
    tokens = gather_needed(x.reshape(-1, x.shape[-1]), _by_rank(chosen, size), per_rank, name, buffer)
    return tokens.view(size, *x.shape).movedim(0, -3).flatten(-3, -2).unsqueeze(-3)


def sum_copied(x: Tensor, chosen: Tensor, per_rank: int, size: int, name: str, buffer: int) -> Tensor:
    """Maps [… 1, n * t, f] → [… t, f] (`sum_needed`)."""
    by_rank = _by_rank(x.squeeze(-3), size)
    sums = scatter_needed(by_rank, _by_rank(chosen, size), per_rank, name, buffer)
    return sums.view(*x.shape[:-3], x.shape[-2] // size, x.shape[-1])


def _by_rank(x: Tensor, size: int) -> Tensor:
    """Maps [… n * t, f] → [n, … * t, f]: what is of the tokens of each rank."""
    apart: Tensor = x.unflatten(-2, (size, x.shape[-2] // size))
    return apart.movedim(-3, 0).flatten(1, -2)
