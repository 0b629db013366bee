"""Coercions whose collective is copies between the ranks' memories: what a lowered graph calls for them.

Enters: a rank's tensor, the name of a mailbox and the number of a buffer (`fxpar.exchange.mailbox`). Leaves: as the
functions of the same names in `fxpar.ops.bound`. Each is two calls: `start_…` sends, and the other waits and reads. A
send gives what it sends along, so that it stays until it is there.

Of two ranks a sum is one copy of the whole each way and an addition, which a compiler may put into the kernel that
reads it; where nothing is computed beside it, all of that is one call (`one_shot_sum`). Of more, each rank sums one
block: blocks go to their owners, which add them in float32 and send the sum to all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.exchange.mailbox import Mailbox, mailbox, slot
from fxpar.exchange.row_programs import Extent, read
from fxpar.ops import collectives as c
from fxpar.ops.bound import Pieces
from fxpar.ops.torch_operators import torch_operator

# What is sent: `sum` and `gather` the whole, `scatter` and `exchange` to each rank its block; and what is made of it.
_SUM, _GATHER, _SCATTER, _EXCHANGE = "sum", "gather", "scatter", "exchange"
_ALIGNED = 16

Sent = tuple[Tensor, Tensor]


@torch_operator("send_copies")
def send_copies(x: Tensor, kind: str, name: str, buffer: int) -> Tensor:
    """Starts copies of what each other rank is to have, on the mailbox `name`.

    Args:
        x: the tensor; of `scatter` and `exchange` [n, …], a block for each rank.

    Returns:
        uint8[1], which ties what reads to this.
    """
    line = mailbox(name)
    line.begin(buffer)
    held = x.contiguous()
    if kind == _SUM and line.size == 2:
        _send_whole(line, buffer, held)
    else:
        _send_blocks(line, buffer, held, kind)
    return torch.empty(1, dtype=torch.uint8, device=x.device)


@send_copies.register_fake
def _sent(x: Tensor, kind: str, name: str, buffer: int) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=x.device)


def _send_whole(line: Mailbox, buffer: int, held: Tensor) -> None:
    """To the other of two ranks."""
    (other,) = line.others
    area = line.areas(buffer, held.nbytes)[other]
    with line.beside(buffer, held):
        line.copy(area, 0, held)
        line.signal(other, buffer, 0)


def _send_blocks(line: Mailbox, buffer: int, held: Tensor, kind: str) -> None:
    blocks = _blocks(held, kind, line.size)
    step, end = _places(blocks)
    areas = line.areas(buffer, end + (held.nbytes if kind == _SUM else 0))
    with line.beside(buffer, held):
        for rank in line.others:
            line.copy(areas[rank], step * line.rank, blocks[rank])
            line.signal(rank, buffer, 0)
        if kind == _SUM:
            with line.computing():
                _share_sums(line, buffer, areas, blocks, held)


def _share_sums(line: Mailbox, buffer: int, areas: Sequence[Tensor], blocks: Sequence[Tensor], held: Tensor) -> None:
    """Adds what came of this rank's block, and sends the sum to all, behind the slots."""
    step, end = _places(blocks)
    for rank in line.others:
        line.wait(rank, buffer, 0)
    own = blocks[line.rank]
    mine = [own if r == line.rank else slot(areas[line.rank], step * r, own) for r in range(line.size)]
    added = _added(mine)
    begin = end + sum(block.nbytes for block in blocks[: line.rank])
    for rank in (line.rank, *line.others):
        line.copy(areas[rank], begin, added)
        if rank != line.rank:
            line.signal(rank, buffer, 1)


@torch_operator("take_copies")
def take_copies(token: Tensor, x: Tensor, kind: str, name: str, buffer: int) -> Tensor:
    """Waits for what the other ranks sent, and reads it.

    Args:
        token: of `send_copies`.
        x: what that took.
        kind: as there; of a sum over two ranks see `arrived`.

    Returns:
        `sum`: the sum of their tensors; `gather` [n, …]: these; `scatter`: the sum of the blocks of this rank;
        `exchange` [n, …]: these blocks.
    """
    line = mailbox(name)
    is_sum = kind == _SUM
    assert not is_sum or line.size > 2, "what a sum over two ranks sends is taken by `arrived`"
    held = x.contiguous()
    blocks = _blocks(held, kind, line.size)
    step, end = _places(blocks)
    area = line.areas(buffer, end + (held.nbytes if is_sum else 0))[line.rank]
    line.join(buffer)
    for rank in line.others:
        line.wait(rank, buffer, 1 if is_sum else 0)
    if is_sum:
        found = slot(area, end, held.view(-1)).clone().view(x.shape)
    else:
        own = blocks[line.rank]
        came = [own if r == line.rank else slot(area, step * r, own) for r in range(line.size)]
        if kind == _SCATTER:
            found = _added(came).view(x.shape[1:])
        else:
            found = torch.stack(came).view((line.size, *x.shape) if kind == _GATHER else x.shape)
    if line.poisons:
        area.fill_(0xFF)
    line.end(buffer)
    return found


@torch_operator("arrived")
def arrived(token: Tensor, x: Tensor, name: str, buffer: int) -> Tensor:
    """Waits for what the other of two ranks sent, for their sum.

    Args:
        token: of `send_copies`.
        x: what that took.

    Returns:
        It, of the shape of `x`: memory into which the other will write again, for `added` alone.
    """
    line = mailbox(name)
    (other,) = line.others
    line.join(buffer)
    line.wait(other, buffer, 0)
    line.end(buffer)
    return line.whole(line.rank, buffer, x)


@arrived.register_fake
def _arrived(token: Tensor, x: Tensor, name: str, buffer: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch_operator("added")
def added(x: Tensor, came: Tensor, name: str) -> Tensor:
    """The sum of a rank's tensor and of what `arrived`, in new memory: one rounding, the same bits on both ranks."""
    found = x + came
    if mailbox(name).poisons:
        came.view(torch.uint8).fill_(0xFF)
    return found


@added.register_fake
def _sum_of_both(x: Tensor, came: Tensor, name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch_operator("one_shot_sum")
def one_shot_sum(x: Tensor, name: str, buffer: int) -> Tensor:
    """The sum over two ranks in one call, beside which nothing is computed."""
    line = mailbox(name)
    line.begin(buffer)
    held = x.contiguous()
    if x.numel():  # a complex number is two
        real = torch.view_as_real(held) if x.is_complex() else held
        rows = real.view(-1, real.shape[-1] if real.dim() else 1)
        total = line.sum_of_two(buffer, rows).view(real.shape)
        found = torch.view_as_complex(total) if x.is_complex() else total
        if line.poisons:
            line.areas(buffer, x.nbytes)[line.rank].fill_(0xFF)
    else:
        found = torch.empty_like(held)
    line.end(buffer)
    return found


@one_shot_sum.register_fake
def _of_one_shot(x: Tensor, name: str, buffer: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch_operator("one_shot_rows")
def one_shot_rows(x: Tensor, operands: Sequence[Tensor], program: str, name: str, buffer: int) -> list[Tensor]:
    """What is computed of the rows of a sum over two ranks, with the sum in one call (`fxpar.exchange.row_programs`).

    Args:
        x: [..., width], not empty.
        operands: of the program, [..., width], [..., 1] or of `width` elements.
        program: its text.

    Returns:
        [rows, width] or [rows, 1] each.
    """
    line = mailbox(name)
    line.begin(buffer)
    given = _operands(operands, program)
    found = line.rows_of_two(buffer, x.contiguous().view(-1, x.shape[-1]), program, given)
    if line.poisons:
        line.areas(buffer, x.nbytes)[line.rank].fill_(0xFF)
    line.end(buffer)
    return found


@one_shot_rows.register_fake
def _of_rows(x: Tensor, operands: Sequence[Tensor], program: str, name: str, buffer: int) -> list[Tensor]:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return read(program).run(total.view(-1, x.shape[-1]), _operands(operands, program))


def _operands(operands: Sequence[Tensor], program: str) -> list[Tensor]:
    known = read(program)
    shapes = {Extent.FULL: (-1, known.width), Extent.ROW: (-1, 1), Extent.COLUMN: (known.width,)}
    return [x.contiguous().view(shapes[extent]) for x, extent in zip(operands, known.operands, strict=True)]


@take_copies.register_fake
def _taken(token: Tensor, x: Tensor, kind: str, name: str, buffer: int) -> Tensor:
    if kind == _GATHER:
        return x.new_empty((mailbox(name).size, *x.shape))
    return x.new_empty(x.shape[1:] if kind == _SCATTER else x.shape)


def _blocks(x: Tensor, kind: str, size: int) -> list[Tensor]:
    """What each rank is to have, one-dimensional."""
    if kind in (_SCATTER, _EXCHANGE):
        return [block.view(-1) for block in x]
    flat = x.view(-1)
    if kind == _GATHER:
        return [flat] * size
    length = -(-flat.numel() // size)
    return [flat[min(r * length, flat.numel()) : (r + 1) * length] for r in range(size)]


def _places(blocks: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes from the slot of one sender to that of the next, and in all."""
    step = -(-max(block.nbytes for block in blocks) // _ALIGNED) * _ALIGNED
    return step, step * len(blocks)


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, of half precision in float32, in new memory."""
    if len(parts) == 2:  # one rounding, and the same on both ranks
        return parts[0] + parts[1]
    kind = parts[0].dtype
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(kind)


# ---------------------------------------------------------------------- what a lowered graph calls


def _start(x: Tensor, kind: str, name: str, buffer: int) -> Sent:
    held = x.contiguous()
    return held, send_copies(held, kind, name, buffer)


def _finish(sent: Sent, kind: str, name: str, buffer: int) -> Tensor:
    held, token = sent
    found: Tensor = take_copies(token, held, kind, name, buffer)
    return found


def start_sum(x: Tensor, name: str, buffer: int) -> Sent:
    """P → I, P → R."""
    return _start(x, _SUM, name, buffer)


def summed(sent: Sent, name: str, buffer: int) -> Tensor:
    """Of `start_sum`."""
    if mailbox(name).size > 2:
        return _finish(sent, _SUM, name, buffer)
    held, token = sent
    found: Tensor = added(held, arrived(token, held, name, buffer), name)
    return found


def sum_in_one_shot(x: Tensor, name: str, buffer: int) -> Tensor:
    """P → I, P → R, of two ranks, where nothing is computed beside it."""
    found: Tensor = one_shot_sum(x, name, buffer)
    return found


def start_gather(x: Tensor, name: str, buffer: int) -> Sent:
    """S → R, S → I."""
    return _start(x, _GATHER, name, buffer)


def gathered(sent: Sent, dim: int, pieces: Pieces, name: str, buffer: int) -> Tensor:
    """Of `start_gather`."""
    return c.put_together(_finish(sent, _GATHER, name, buffer), (dim, pieces))


def start_scatter(x: Tensor, dim: int, pieces: Pieces, size: int, name: str, buffer: int) -> Sent:
    """P → S."""
    return _start(c.spread(x, (dim, pieces), size), _SCATTER, name, buffer)


def scattered(sent: Sent, name: str, buffer: int) -> Tensor:
    """Of `start_scatter`."""
    return _finish(sent, _SCATTER, name, buffer)


def start_exchange(x: Tensor, dim: int, pieces: Pieces, size: int, name: str, buffer: int) -> Sent:
    """S(i) → S(j), by the target's cut."""
    return _start(c.spread(x, (dim, pieces), size), _EXCHANGE, name, buffer)


def exchanged(sent: Sent, dim: int, pieces: Pieces, name: str, buffer: int) -> Tensor:
    """Of `start_exchange`, by the source's cut."""
    return c.put_together(_finish(sent, _EXCHANGE, name, buffer), (dim, pieces))
