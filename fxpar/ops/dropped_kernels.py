"""The kernels of `fxpar.ops.dropped_launches`. Importing this module needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _head(sizes, bits, MOVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's row of the batch and its head, and the number of its first probability among those of all ranks."""
    heads, all_heads, height, width, _, _ = sizes
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    row, column = batch, head
    if MOVED[0]:
        row += tl.load(bits[2])
    if MOVED[1]:
        column += tl.load(bits[3])
    return batch, head, (row * all_heads + column) * height * width


@triton.jit  # type: ignore[untyped-decorator]
def _kept(first, row, column, width, rng_ptr, identity, threshold, IN_FOURS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which probabilities of rows and of `N` columns from `column` on stay; `first` is the number of the head's first.

    Where rows consist of whole counters (`IN_FOURS`), the four words of one are those of four columns.
    """
    STRIDE: tl.constexpr = 4 if IN_FOURS else 1
    columns = column + tl.arange(0, N // STRIDE) * STRIDE
    index = first + row.to(tl.int64)[:, None] * width + columns[None, :]
    seed, step, microbatch = tl.load(rng_ptr), tl.load(rng_ptr + 1), tl.load(rng_ptr + 2)
    zero = tl.zeros_like(index)
    c0 = (index >> 2).to(tl.uint32)
    c1 = (zero + identity).to(tl.uint32)
    c2 = (zero + step).to(tl.uint32)
    c3 = (microbatch + ((index >> 34) << 16)).to(tl.uint32)
    k0, k1 = (zero + seed).to(tl.uint32), (zero + (seed >> 32)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)
    if IN_FOURS:
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        is_odd = (index & 1) == 1
        word = tl.where((index & 2) == 0, tl.where(is_odd, w1, w0), tl.where(is_odd, w3, w2))
    return (word ^ 0x80000000).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _tile(ptr, rows, columns, stride, height, width):  # type: ignore[no-untyped-def]
    """Rows of a head; what lies outside of it is 0."""
    is_inside = (rows < height)[:, None] & (columns < width)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=is_inside, other=0.0)


@triton.jit
def _write(ptr, value, rows, columns, stride, height, width):  # type: ignore[no-untyped-def]
    is_inside = (rows < height)[:, None] & (columns < width)[None, :]
    places = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(places, value.to(ptr.dtype.element_ty), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(q, k, rows, columns, sizes, scale, mask_ptr, mask_at, CAUSAL: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores in units of log 2, minus infinity where a query sees no key."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    is_seen = (columns < sizes[3])[None, :]
    if MASKED:
        is_inside = (rows < sizes[2])[:, None] & is_seen
        places = rows.to(tl.int64)[:, None] * mask_at[2] + columns.to(tl.int64)[None, :] * mask_at[3]
        bias = tl.load(mask_ptr + places, mask=is_inside, other=0.0).to(tl.float32)
        # The least number of a type is no infinity: a row that has it everywhere sees all keys alike.
        score += tl.where(bias == float("-inf"), bias, tl.maximum(bias * 1.4426950408889634, -3.0e38))
    if CAUSAL:
        is_seen = is_seen & (rows[:, None] >= columns[None, :])
    return tl.where(is_seen, score, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    out_ptr,
    log_sum_ptr,
    q_at,
    k_at,
    v_at,
    mask_at,
    out_at,
    sizes,
    bits,
    origin,
    threshold,
    scale,
    keep,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    MOVED: tl.constexpr,
    IS_OPERAND: tl.constexpr,
    IN_FOURS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
):
    """A program has `M` queries of a head, and passes over the keys that they see, `N` at a time."""
    _, _, height, width, d, dv = sizes
    batch, head, first = _head(sizes, bits, MOVED)
    if IS_OPERAND:
        origin = tl.load(bits[1])
    q_ptr += batch * q_at[0] + head * q_at[1]
    k_ptr += batch * k_at[0] + head * k_at[1]
    v_ptr += batch * v_at[0] + head * v_at[1]
    mask_ptr += batch * mask_at[0] + head * mask_at[1]
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # those that see most keys begin
    rows = block * M + tl.arange(0, M)
    q_columns, v_columns = tl.arange(0, D), tl.arange(0, DV)
    q = _tile(q_ptr, rows, q_columns, q_at[2], height, d)
    largest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    found = tl.zeros((M, DV), tl.float32)
    end = tl.minimum(width, (block + 1) * M) if CAUSAL else width
    for start in range(0, end, N):
        columns = start + tl.arange(0, N)
        k = _tile(k_ptr, columns, q_columns, k_at[2], width, d)
        v = _tile(v_ptr, columns, v_columns, v_at[2], width, dv)
        score = _scores(q, k, rows, columns, sizes, scale, mask_ptr, mask_at, CAUSAL, MASKED)
        new = tl.maximum(largest, tl.max(score, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # of a row that has seen no key yet
        p = tl.exp2(score - safe[:, None])
        shrunk = tl.exp2(largest - safe)
        total = total * shrunk + tl.sum(p, 1)
        kept = _kept(first, rows, start, width, bits[0], origin, threshold, IN_FOURS, N)
        p = tl.where(kept, p, 0.0).to(v.dtype)
        found = tl.dot(p, v, found * shrunk[:, None], input_precision="ieee")
        largest = new
    is_blind = total == 0.0
    total = tl.where(is_blind, 1.0, total)
    # Where nothing is seen the backward's exponentials are to be 0.
    log_sum = tl.where(is_blind, float("inf"), (largest + tl.log2(total)) / 1.4426950408889634)
    tl.store(log_sum_ptr + tl.program_id(0).to(tl.int64) * height + rows, log_sum, mask=rows < height)
    out_ptr += batch * out_at[0] + head * out_at[1]
    _write(out_ptr, found * (keep / total)[:, None], rows, v_columns, out_at[2], height, dv)


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    gradient_ptr,
    log_sum_ptr,
    total_ptr,
    of_q_ptr,
    of_k_ptr,
    of_v_ptr,
    q_at,
    k_at,
    v_at,
    mask_at,
    gradient_at,
    of_q_at,
    of_k_at,
    of_v_at,
    sizes,
    bits,
    origin,
    threshold,
    scale,
    keep,
    OF_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    MOVED: tl.constexpr,
    IS_OPERAND: tl.constexpr,
    IN_FOURS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
):
    """A program has `N` keys of a head and passes over the queries that see them, or `M` queries over their keys."""
    _, _, height, width, d, dv = sizes
    batch, head, first = _head(sizes, bits, MOVED)
    if IS_OPERAND:
        origin = tl.load(bits[1])
    q_ptr += batch * q_at[0] + head * q_at[1]
    k_ptr += batch * k_at[0] + head * k_at[1]
    v_ptr += batch * v_at[0] + head * v_at[1]
    mask_ptr += batch * mask_at[0] + head * mask_at[1]
    gradient_ptr += batch * gradient_at[0] + head * gradient_at[1]
    log_sum_ptr += tl.program_id(0).to(tl.int64) * height
    total_ptr += tl.program_id(0).to(tl.int64) * height
    q_columns, v_columns = tl.arange(0, D), tl.arange(0, DV)
    if OF_KEYS:
        start = tl.program_id(1) * N
        begin = start // M * M if CAUSAL else 0
        end = height
        columns = start + tl.arange(0, N)
        k = _tile(k_ptr, columns, q_columns, k_at[2], width, d)
        v = _tile(v_ptr, columns, v_columns, v_at[2], width, dv)
        of_k = tl.zeros((N, D), tl.float32)
        of_v = tl.zeros((N, DV), tl.float32)
        for row in range(begin, end, M):
            rows = row + tl.arange(0, M)
            q = _tile(q_ptr, rows, q_columns, q_at[2], height, d)
            gradient = _tile(gradient_ptr, rows, v_columns, gradient_at[2], height, dv)
            log_sum = tl.load(log_sum_ptr + rows, mask=rows < height, other=float("inf"))
            total = tl.load(total_ptr + rows, mask=rows < height, other=0.0)
            score = _scores(q, k, rows, columns, sizes, scale * 1.4426950408889634, mask_ptr, mask_at, CAUSAL, MASKED)
            p = tl.exp2(score - (log_sum * 1.4426950408889634)[:, None])
            kept = _kept(first, rows, start, width, bits[0], origin, threshold, IN_FOURS, N)
            of_v = tl.dot(
                tl.trans(tl.where(kept, p * keep, 0.0).to(gradient.dtype)), gradient, of_v, input_precision="ieee"
            )
            of_p = tl.dot(gradient, tl.trans(v), input_precision="ieee")
            of_score = p * (tl.where(kept, of_p * keep, 0.0) - total[:, None])
            of_k = tl.dot(tl.trans(of_score.to(q.dtype)), q, of_k, input_precision="ieee")
        of_k_ptr += batch * of_k_at[0] + head * of_k_at[1]
        _write(of_k_ptr, of_k * scale, columns, q_columns, of_k_at[2], width, d)
        of_v_ptr += batch * of_v_at[0] + head * of_v_at[1]
        _write(of_v_ptr, of_v, columns, v_columns, of_v_at[2], width, dv)
    else:
        block = tl.num_programs(1) - 1 - tl.program_id(1)
        rows = block * M + tl.arange(0, M)
        q = _tile(q_ptr, rows, q_columns, q_at[2], height, d)
        gradient = _tile(gradient_ptr, rows, v_columns, gradient_at[2], height, dv)
        log_sum = tl.load(log_sum_ptr + rows, mask=rows < height, other=float("inf"))
        total = tl.load(total_ptr + rows, mask=rows < height, other=0.0)
        of_q = tl.zeros((M, D), tl.float32)
        end = tl.minimum(width, (block + 1) * M) if CAUSAL else width
        for start in range(0, end, N):
            columns = start + tl.arange(0, N)
            k = _tile(k_ptr, columns, q_columns, k_at[2], width, d)
            v = _tile(v_ptr, columns, v_columns, v_at[2], width, dv)
            score = _scores(q, k, rows, columns, sizes, scale * 1.4426950408889634, mask_ptr, mask_at, CAUSAL, MASKED)
            p = tl.exp2(score - (log_sum * 1.4426950408889634)[:, None])
            kept = _kept(first, rows, start, width, bits[0], origin, threshold, IN_FOURS, N)
            of_p = tl.dot(gradient, tl.trans(v), input_precision="ieee")
            of_score = p * (tl.where(kept, of_p * keep, 0.0) - total[:, None])
            of_q = tl.dot(of_score.to(k.dtype), k, of_q, input_precision="ieee")
        of_q_ptr += batch * of_q_at[0] + head * of_q_at[1]
        _write(of_q_ptr, of_q * scale, rows, q_columns, of_q_at[2], height, d)
