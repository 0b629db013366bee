"""Rows of experts moved or gated, and replicas planned, in one pass on NVIDIA GPUs: `permute`, `grouped`, `replicas`.

Enters: contiguous operands, their leading dimensions in one. Leaves: the rows. Every element has one writer, and a sum
one order of its terms, so that results do not change from run to run. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program, and the widest part of a row that it has.
_ELEMENTS, _WIDEST = 2048, 1024
# The most ranks and experts that one program plans for. For 64 and 512 it takes 6.5 ms on an H200, torch's operations
# in a graph 0.27; for 16 and 256 it takes 0.04, and they 0.18.
MOST_RANKS, MOST_EXPERTS = 16, 256
# Of one group: about as many as run at once. What has more rows goes to them in turn, so that rows that are nobody's,
# which may be most of a buffer, need no programs.
PROGRAMS = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _take_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weights_ptr,
    order_ptr,
    out_ptr,
    rows,
    tokens,
    width,
    K: tl.constexpr,
    IS_WEIGHED: tl.constexpr,
    FILL: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program writes `WIDTH` columns of every so many-th `ROWS` rows of a group.

    Without `FILL` rows that are somebody's stand in front of all others, with which it ends.
    """
    group = tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    is_open = tile < tiles
    while is_open:
        local_row = tile * ROWS + tl.arange(0, ROWS)
        row = group * rows + local_row
        place = tl.load(order_ptr + row, mask=local_row < rows, other=-1)
        is_row = place >= 0
        is_own = (local_row < rows)[:, None] & (column < width)[None, :]
        source = (group * tokens + place // K)[:, None] * width + column[None, :]
        value = tl.load(x_ptr + source, mask=is_own & is_row[:, None], other=0.0)
        if IS_WEIGHED:
            weight = tl.load(weights_ptr + group * tokens * K + place, mask=is_row, other=0.0)
            value = value.to(SUM) * weight.to(SUM)[:, None]
        target = row[:, None] * width + column[None, :]
        is_written = is_own if FILL else is_own & is_row[:, None]
        tl.store(out_ptr + target, value.to(out_ptr.dtype.element_ty), mask=is_written)
        tile += tl.num_programs(0)
        is_open = tile < tiles
        if not FILL:
            is_open = is_open & (tl.max(place, axis=0) >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def _put_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    weights_ptr,
    places_ptr,
    out_ptr,
    total,
    rows,
    tokens,
    width,
    K: tl.constexpr,
    IS_WEIGHED: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program writes `WIDTH` columns of `ROWS` tokens, `tokens` of which belong to one group."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_token, is_column = token < total, column < width
    first = token // tokens * rows
    sums = tl.zeros((ROWS, WIDTH), dtype=SUM)
    for j in tl.static_range(K):
        place = tl.load(places_ptr + token * K + j, mask=is_token, other=-1)
        is_row = place >= 0
        source = (first + place)[:, None] * width + column[None, :]
        value = tl.load(y_ptr + source, mask=is_row[:, None] & is_column[None, :], other=0.0).to(SUM)
        if IS_WEIGHED:
            weight = tl.load(weights_ptr + token * K + j, mask=is_row, other=0.0)
            value = value * weight.to(SUM)[:, None]
        sums += value
    target = token[:, None] * width + column[None, :]
    tl.store(out_ptr + target, sums.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _dots_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    order_ptr,
    out_ptr,
    total,
    rows,
    tokens,
    width,
    K: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program has `ROWS` rows, and writes of each the product with its token to its flat position."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.load(order_ptr + row, mask=row < total, other=-1)
    is_row = place >= 0
    group = row // rows
    source = (group * tokens + place // K) * width
    sums = tl.zeros((ROWS,), dtype=SUM)
    # Tiles of rows that are nobody's read nothing: at four ranks those are three quarters of a buffer.
    for part in range(tl.where(tl.max(place, axis=0) >= 0, PARTS, 0)):
        column = part * WIDTH + tl.arange(0, WIDTH)
        is_own = is_row[:, None] & (column < width)[None, :]
        x = tl.load(x_ptr + source[:, None] + column[None, :], mask=is_own, other=0.0).to(SUM)
        y = tl.load(y_ptr + row[:, None] * width + column[None, :], mask=is_own, other=0.0).to(SUM)
        sums += tl.sum(x * y, axis=1)
    tl.store(out_ptr + group * tokens * K + place, sums.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _clear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, count_ptr, total, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """A program zeroes `WIDTH` columns of those of its `ROWS` rows that stand behind the first `count`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_behind = (row < total) & (row >= tl.load(count_ptr))
    zero = tl.zeros((ROWS, WIDTH), dtype=x_ptr.dtype.element_ty)
    target = row[:, None] * width + column[None, :]
    tl.store(x_ptr + target, zero, mask=is_behind[:, None] & (column < width)[None, :])


def tile(width: int) -> tuple[int, int]:
    """Returns rows and columns of a program."""
    columns = min(_WIDEST, triton.next_power_of_2(width))
    return max(1, _ELEMENTS // columns), columns


def sum_type(*operands: Tensor) -> tl.dtype:
    """Returns the type in which products and sums of these are computed."""
    return tl.float64 if any(x.dtype == torch.float64 for x in operands) else tl.float32


def take(x: Tensor, weights: Tensor | None, order: Tensor, k: int, dtype: torch.dtype, fill: bool) -> Tensor:
    """Takes rows `order // k` of x, times their pairs' weights; see `_take` of `fxpar.experts.operators.permute`.

    Args:
        x: [g, T, h].
        weights: [g, T, k].
        order: int64[g, M].
    """
    (groups, rows), (_, tokens, width) = order.shape, x.shape
    out = x.new_empty((groups, rows, width), dtype=dtype)
    if out.numel():
        height, columns = tile(width)
        grid = (min(triton.cdiv(rows, height), PROGRAMS), triton.cdiv(width, columns), groups)
        factors = x if weights is None else weights
        shape = (rows, tokens, width)
        options = {"IS_WEIGHED": weights is not None, "SUM": sum_type(x, factors), "ROWS": height, "WIDTH": columns}
        _take_kernel[grid](x, factors, order, out, *shape, K=k, FILL=fill, **options)
    return out


def put(y: Tensor, weights: Tensor | None, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums, for each token, its rows times their weights; see `_put` of `fxpar.experts.operators.permute`.

    Args:
        y: [g, M, h].
        weights: [g, T, k].
        places: int64[g, T, k], where each pair's row stands, -1 where it has none.
    """
    (groups, tokens, k), (_, rows, width) = places.shape, y.shape
    out = y.new_empty((groups, tokens, width), dtype=dtype)
    if out.numel():
        height, columns = tile(width)
        grid = (triton.cdiv(groups * tokens, height), triton.cdiv(width, columns))
        factors = y if weights is None else weights
        shape = (groups * tokens, rows, tokens, width)
        options = {"IS_WEIGHED": weights is not None, "SUM": sum_type(y, factors), "ROWS": height, "WIDTH": columns}
        _put_kernel[grid](y, factors, places, out, *shape, K=k, **options)
    return out


def dots(x: Tensor, y: Tensor, order: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Multiplies, for each pair, its row with its token, [g, T, k]; see `dot_rows`.

    Args:
        x: [g, T, h].
        y: [g, M, h].
        order: int64[g, M].
    """
    (groups, rows), (_, tokens, width) = order.shape, x.shape
    out = x.new_zeros((groups, tokens, k), dtype=dtype)
    if groups * rows and tokens:
        height, columns = tile(width)
        grid = (triton.cdiv(groups * rows, height),)
        shape = (groups * rows, rows, tokens, width)
        options = {"SUM": sum_type(x, y), "ROWS": height, "WIDTH": columns, "PARTS": triton.cdiv(width, columns)}
        _dots_kernel[grid](x, y, order, out, *shape, K=k, **options)
    return out


def clear_behind(x: Tensor, count: Tensor) -> Tensor:
    """Zeroes, in place, the rows of x [M, h] after the first `count`, an integer on the device."""
    if x.numel():
        height, columns = tile(x.shape[-1])
        grid = (triton.cdiv(x.shape[0], height), triton.cdiv(x.shape[1], columns))
        _clear_kernel[grid](x, count, *x.shape, ROWS=height, WIDTH=columns)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    gradient_ptr,
    counts_ptr,
    out_ptr,
    rows,
    width,
    IS_BACKWARD: tl.constexpr,
    FILL: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program has `WIDTH` columns of both halves of every so many-th `ROWS` rows of a group."""
    group = tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    count = tl.load(counts_ptr + group)
    end = rows if FILL else tl.minimum(count, rows).to(tl.int32)
    for part in range(tl.program_id(0), tl.cdiv(end, ROWS), tl.num_programs(0)):
        place = part * ROWS + tl.arange(0, ROWS)
        row = group * rows + place
        is_column = (column < width)[None, :]
        is_read = ((place < count) & (place < rows))[:, None] & is_column
        is_written = (place < end)[:, None] & is_column
        first = row[:, None] * (2 * width) + column[None, :]
        single = row[:, None] * width + column[None, :]
        gate = tl.load(x_ptr + first, mask=is_read, other=0.0).to(SUM)
        up = tl.load(x_ptr + first + width, mask=is_read, other=0.0).to(SUM)
        share = 1.0 / (1.0 + tl.exp(-gate))
        if IS_BACKWARD:
            gradient = tl.load(gradient_ptr + single, mask=is_read, other=0.0).to(SUM)
            # With s the sigmoid of g, the derivative of g·s is s·(1 + g·(1 - s)).
            for_gate = gradient * up * share * (1.0 + gate * (1.0 - share))
            tl.store(out_ptr + first, for_gate.to(out_ptr.dtype.element_ty), mask=is_written)
            tl.store(out_ptr + first + width, (gradient * gate * share).to(out_ptr.dtype.element_ty), mask=is_written)
        else:
            tl.store(out_ptr + single, (gate * share * up).to(out_ptr.dtype.element_ty), mask=is_written)


def gate(x: Tensor, counts: Tensor, fill: bool) -> Tensor:
    """Computes `silu(x[..., 0, :]) * x[..., 1, :]`.

    Args:
        x: [g, M, 2, n].
        counts: int64[g], rows of the group that are somebody's.
        fill: whether the others are zeros.

    Returns:
        [g, M, n].
    """
    out = x.new_empty((*x.shape[:2], x.shape[-1]))
    _run(x, x, counts, out, fill, is_backward=False)
    return out


def gate_backward(gradient: Tensor, x: Tensor, counts: Tensor, fill: bool) -> Tensor:
    """Computes the gradient of `x`, [g, M, 2, n], from that of what `gate` gives, [g, M, n]."""
    out = torch.empty_like(x)
    _run(x, gradient, counts, out, fill, is_backward=True)
    return out


def _run(x: Tensor, gradient: Tensor, counts: Tensor, out: Tensor, fill: bool, *, is_backward: bool) -> None:
    if not out.numel():
        return
    groups, rows, _, width = x.shape
    height, columns = tile(width)
    grid = (min(triton.cdiv(rows, height), PROGRAMS), triton.cdiv(width, columns), groups)
    options = {"IS_BACKWARD": is_backward, "FILL": fill, "SUM": sum_type(x), "ROWS": height, "WIDTH": columns}
    _gate_kernel[grid](x, gradient, counts, out, rows, width, **options)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_first(sizes, numbers, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns sizes in descending order, of equal ones the lower number first, their numbers and their ends."""
    keys = tl.sort(sizes * COUNT + (COUNT - 1 - numbers), descending=True)
    ordered = keys // COUNT
    return ordered, COUNT - 1 - keys % COUNT, tl.cumsum(ordered, axis=0)


@triton.jit
def _common(end, size, other_end, other_size):  # type: ignore[no-untyped-def]
    """Returns what two sizes have in common on a line."""
    return tl.maximum(tl.minimum(end, other_end) - tl.maximum(end - size, other_end - other_size), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(counts_ptr, home_ptr, moved_ptr, gain, SHAPE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes which expert is in each slot, and in the first source's row how many pairs go there."""
    n: tl.constexpr = SHAPE[0]
    per_rank: tl.constexpr = SHAPE[1]
    slots: tl.constexpr = SHAPE[2]
    RANKS: tl.constexpr = TILE[0]
    LOCAL: tl.constexpr = TILE[1]
    EXPERTS: tl.constexpr = RANKS * LOCAL
    rank, local = tl.arange(0, RANKS), tl.arange(0, LOCAL)
    is_expert = (rank < n)[:, None] & (local < per_rank)[None, :]
    loads = tl.zeros((RANKS, LOCAL), dtype=tl.int64)
    for source in range(n):
        expert = source * n * per_rank + rank[:, None] * per_rank + local[None, :]
        loads += tl.load(counts_ptr + expert, mask=is_expert, other=0)
    load = tl.sum(loads, axis=1)
    even = tl.sum(load, axis=0) // n
    # Behind a load stands the number of its expert, so that no two keys are equal.
    keys = tl.sort(loads * LOCAL + local[None, :], dim=1)
    ascending = keys // LOCAL
    ends = tl.cumsum(ascending, axis=1)
    spill = tl.maximum(ends - even, 0) - tl.maximum(ends - ascending - even, 0)
    spill = tl.where(((load - even) * 1000000 < even * gain)[:, None], 0, spill)
    numbers = rank[:, None] * per_rank + keys % LOCAL
    flat, flat_numbers = tl.reshape(spill, (EXPERTS,)), tl.reshape(numbers, (EXPERTS,))
    chunk, expert, chunk_end = _largest_first(flat, flat_numbers, EXPERTS)
    room = tl.where(rank < n, tl.maximum(even - load, 0), 0)
    bucket, holder, bucket_end = _largest_first(room, rank, RANKS)
    entries = _common(bucket_end[:, None], bucket[:, None], chunk_end[None, :], chunk[None, :])
    entries = entries * EXPERTS + (EXPERTS - 1 - expert)[None, :]
    for slot in range(slots):
        best = tl.max(entries, axis=1)
        place, pairs = holder * slots + slot, best // EXPERTS
        home = tl.where(pairs > 0, EXPERTS - 1 - best % EXPERTS, -1)
        tl.store(home_ptr + place, home, mask=holder < n)
        tl.store(moved_ptr + place, pairs, mask=holder < n)
        entries = tl.where(entries == best[:, None], 0, entries)


@triton.jit  # type: ignore[untyped-decorator]
def _plan_kernel(counts_ptr, home_ptr, moved_ptr, gain, SHAPE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program plans for one group of ranks."""
    n: tl.constexpr = SHAPE[0]
    experts: tl.constexpr = SHAPE[0] * SHAPE[1]
    places: tl.constexpr = SHAPE[0] * SHAPE[2]
    PLACES: tl.constexpr = TILE[2]
    group = tl.program_id(0).to(tl.int64)
    counts_ptr += group * n * experts
    home_ptr += group * places
    moved_ptr += group * n * places
    _choose(counts_ptr, home_ptr, moved_ptr, gain, SHAPE, TILE)
    # What other threads wrote is read from here on.
    tl.debug_barrier()
    place = tl.arange(0, PLACES)
    is_place = place < places
    home = tl.load(home_ptr + place, mask=is_place, other=-1)
    capacity = tl.load(moved_ptr + place, mask=is_place, other=0)
    tl.debug_barrier()
    total = tl.zeros((PLACES,), dtype=tl.int64)
    for source in range(n):
        total += tl.load(counts_ptr + source * experts + home, mask=home >= 0, other=0)
    total = tl.maximum(total, 1)
    missing = capacity
    for source in range(n):
        count = tl.load(counts_ptr + source * experts + home, mask=home >= 0, other=0)
        missing -= count * capacity // total
    is_same = home[:, None] == home[None, :]
    before = is_same & (place[None, :] < place[:, None])
    missing_end = missing + tl.sum(tl.where(before, missing[None, :], 0), axis=1)
    left_end = tl.zeros((PLACES,), dtype=tl.int64)
    for source in range(n):
        count = tl.load(counts_ptr + source * experts + home, mask=home >= 0, other=0)
        share = count * capacity // total
        left = count - tl.sum(tl.where(is_same, share[None, :], 0), axis=1)
        left_end += left
        fill = _common(left_end, left, missing_end, missing)
        tl.store(moved_ptr + source * places + place, share + fill, mask=is_place)


def plan(counts: Tensor, home: Tensor, moved: Tensor, gain: int) -> None:
    """Writes a plan of replicas; see `plan_replicas` of `fxpar.experts.operators.replicas`.

    Args:
        counts: int64[g, n, E].
        home: int64[g, n * slots].
        moved: int64[g, n, n * slots].
        gain: millionths of the even load.
    """
    groups, ranks, experts = counts.shape
    shape = (ranks, experts // ranks, home.shape[-1] // ranks)
    # A sort takes two keys or more.
    tiles = tuple(max(2, triton.next_power_of_2(size)) for size in (*shape[:2], home.shape[-1]))
    warps = min(16, max(4, tiles[0] * tiles[0] * tiles[1] // 512))
    _plan_kernel[(groups,)](counts, home, moved, gain, SHAPE=shape, TILE=tiles, num_warps=warps)


@triton.jit  # type: ignore[untyped-decorator]
def _reroute_kernel(  # type: ignore[no-untyped-def]
    order_ptr, counts_ptr, home_ptr, moved_ptr, out_ptr, rows, SHAPE: tl.constexpr, TILE: tl.constexpr
):
    """A program renumbers every so many-th tile of an expert's pairs; after the last expert come those of nobody."""
    per_rank: tl.constexpr = SHAPE[1]
    slots: tl.constexpr = SHAPE[2]
    experts: tl.constexpr = SHAPE[0] * SHAPE[1]
    places: tl.constexpr = SHAPE[0] * SHAPE[2]
    EXPERTS: tl.constexpr = TILE[0]
    PLACES: tl.constexpr = TILE[1]
    ROWS: tl.constexpr = TILE[2]
    expert, group = tl.program_id(1), tl.program_id(2).to(tl.int64)
    number, place = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    counts = tl.load(counts_ptr + group * experts + number, mask=number < experts, other=0)
    start = tl.sum(tl.where(number < expert, counts, 0), axis=0)
    end = start + tl.sum(tl.where(number == expert, counts, 0), axis=0)
    end = tl.where(expert == experts, rows, end)
    home = tl.load(home_ptr + group * places + place, mask=place < places, other=-1)
    moved = tl.load(moved_ptr + group * places + place, mask=home == expert, other=0)
    ends = tl.where(home == expert, start + tl.cumsum(moved, axis=0), 0)
    at_slot = place // slots * (per_rank + slots) + per_rank + place % slots
    at_home = expert // per_rank * (per_rank + slots) + expert % per_rank
    at_home = tl.where(expert == experts, experts + places, at_home)
    for first in range(start + tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        pair = tl.load(order_ptr + group * rows + row, mask=row < end, other=0)
        # Numbers of slots ascend as slots do, and are below nobody's.
        slot = tl.min(tl.where(ends[None, :] > row[:, None], at_slot[None, :], experts + places), axis=1)
        target = tl.where(slot < experts + places, slot, at_home)
        tl.store(out_ptr + group * rows + pair, target.to(out_ptr.dtype.element_ty), mask=row < end)


def renumber(order: Tensor, counts: Tensor, home: Tensor, moved: Tensor, slots: int, out: Tensor) -> None:
    """Writes the new numbers of choices; see `reroute` of `fxpar.experts.operators.replicas`.

    Args:
        order, counts: int64[g, T * K] and int64[g, E], of `sort_by_expert`.
        home, moved: int64[g, n * slots].
        out: int[g, T * K].
    """
    (groups, rows), experts, places = order.shape, counts.shape[-1], home.shape[-1]
    if rows:
        ranks = places // slots
        shape = (ranks, experts // ranks, slots)
        tiles = triton.next_power_of_2(experts), triton.next_power_of_2(places)
        height = max(16, min(256, _ELEMENTS // tiles[1]))
        # Of one expert, which may have all rows.
        programs = min(16, triton.cdiv(rows, height))
        grid, operands = (programs, experts + 1, groups), (order, counts, home, moved, out)
        _reroute_kernel[grid](*operands, rows, SHAPE=shape, TILE=(*tiles, height))
