"""The kernels of `fxpar.ops.dropped_attention`. Importing this module needs Triton.

A head is a tile in one part, or in two where that leaves out padding (`D`, `DV`: columns of the parts, the second of
which may have none): 96 columns are 64 and 32. Which probabilities stay is read as bits: a word is 32 keys of a query,
and words of one place are neighbours along the queries, so that a tile's are loaded as its rows' sums are.

What kernels of attention take: `tensors` and the `strides` of all but words and sums, `sizes`, and as `factors` the
scale of the scores and what probabilities that stay are multiplied by. `KIND` says whether queries see keys up to their
position and whether there is a mask; `TILE` has the queries and the keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fxpar.ops.dropout_kernels import packed


@triton.jit
def _head(sizes):  # type: ignore[no-untyped-def]
    """A program's row of the batch and its head."""
    return (tl.program_id(0) // sizes[0]).to(tl.int64), (tl.program_id(0) % sizes[0]).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]
    words_ptr,
    sizes,
    bits,
    draw,
    CAUSAL: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A program draws up to `WORDS` words of each of `ROWS` queries of a head; words of which no key is seen are left.

    `bits` are the generator's state, the identity of the draw, and rows of the batch and heads before this rank's.
    `draw` is the identity as a number, and the threshold. `KIND` says whether there are rows before, heads before and
    the identity in memory, and whether rows consist of whole counters.
    """
    _, all_heads, height, width = sizes
    row, head = _head(sizes)
    origin, threshold = draw
    IS_ROW_MOVED: tl.constexpr = KIND[0]
    IS_HEAD_MOVED: tl.constexpr = KIND[1]
    IS_OPERAND: tl.constexpr = KIND[2]
    IN_FOURS: tl.constexpr = KIND[3]
    if IS_ROW_MOVED:
        row += tl.load(bits[2])
    if IS_HEAD_MOVED:
        head += tl.load(bits[3])
    if IS_OPERAND:
        origin = tl.load(bits[1])
    count = tl.cdiv(width, 32)
    begin = tl.program_id(2) * WORDS
    end = tl.minimum(count, begin + WORDS)
    if CAUSAL:
        end = tl.minimum(end, tl.cdiv((tl.program_id(1) + 1) * ROWS, 32))
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # The element's number among all heads and rows, so that a rank with some of them draws what one device draws.
    first = ((row * all_heads + head) * height + rows) * width
    words_ptr += tl.program_id(0).to(tl.int64) * count * height
    for word in range(begin, end):
        drawn = packed(first + word * 32, bits[0], origin, threshold, IN_FOURS)
        tl.store(words_ptr + tl.cast(word, tl.int64) * height + rows, drawn, mask=rows < height)


@triton.jit  # type: ignore[untyped-decorator]
def _kept(words_ptr, rows, start, sizes, N: tl.constexpr, OF_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which probabilities of rows and of `N` columns from `start`, a multiple of 32, on stay.

    Queries are the first dimension, or keys (`OF_KEYS`).
    """
    height, count = sizes[2], tl.cdiv(sizes[3], 32)
    QUERY: tl.constexpr = 1 if OF_KEYS else 0
    column = tl.expand_dims(tl.arange(0, N), QUERY)
    place = start // 32
    is_inside = rows < height
    words_ptr += tl.cast(place, tl.int64) * height + rows
    word = tl.expand_dims(tl.load(words_ptr, mask=is_inside, other=0), 1 - QUERY)
    for i in tl.static_range(1, N // 32):
        another = tl.load(words_ptr + i * height, mask=is_inside & (place + i < count), other=0)
        word = tl.where(column >= 32 * i, tl.expand_dims(another, 1 - QUERY), word)
    return (word & (1 << (column % 32))) != 0


@triton.jit
def _part(ptr, rows, columns, stride, height, width):  # type: ignore[no-untyped-def]
    """Rows of a head; what lies outside of it is 0."""
    is_inside = (rows < height)[:, None] & (columns < width)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=is_inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(ptr, rows, stride, height, width, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a head, in its parts."""
    first = _part(ptr, rows, tl.arange(0, D[0]), stride, height, width)
    if D[1] == 0:
        return (first,)
    else:
        return (first, _part(ptr, rows, D[0] + tl.arange(0, D[1]), stride, height, width))


@triton.jit  # type: ignore[untyped-decorator]
def _write(ptr, value, factor, rows, stride, height, width, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the parts, multiplied by a number for each row or for all."""
    for i in tl.static_range(1 if D[1] == 0 else 2):
        columns = i * D[0] + tl.arange(0, D[i])
        is_inside = (rows < height)[:, None] & (columns < width)[None, :]
        places = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        tl.store(places, (value[i] * factor).to(ptr.dtype.element_ty), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _zeros(M: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums for a tile of `M` rows."""
    FIRST: tl.constexpr = D[0]
    SECOND: tl.constexpr = D[1]
    first = tl.zeros((M, FIRST), tl.float32)
    if SECOND == 0:
        return (first,)
    else:
        return (first, tl.zeros((M, SECOND), tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _products(a, b, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each row of a tile with each of another."""
    # Not TF32, which has ten bits of a float32's mantissa.
    products = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if D[1] > 0:
        products = tl.dot(a[1], tl.trans(b[1]), products, input_precision="ieee")
    return products


@triton.jit  # type: ignore[untyped-decorator]
def _added(sums, weights, tile, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums, to which the rows of a tile are added by their weights."""
    weights = weights.to(tile[0].dtype)
    first = tl.dot(weights, tile[0], sums[0], input_precision="ieee")
    if D[1] == 0:
        return (first,)
    else:
        return (first, tl.dot(weights, tile[1], sums[1], input_precision="ieee"))


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(sums, factor, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums multiplied by a number for each row."""
    if D[1] == 0:
        return (sums[0] * factor,)
    else:
        return (sums[0] * factor, sums[1] * factor)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    score, row, column, sizes, mask_ptr, mask_at, CHECKED: tl.constexpr, KIND: tl.constexpr
):
    """Scores in units of log 2, minus infinity where a query sees no key; unless `CHECKED`, it is to see all.

    Rows and columns are numbers of queries and keys, of which one is the first dimension.
    """
    CAUSAL: tl.constexpr = KIND[0]
    MASKED: tl.constexpr = KIND[1]
    if MASKED:
        is_inside = (row < sizes[2]) & (column < sizes[3])
        places = row.to(tl.int64) * mask_at[2] + column.to(tl.int64) * mask_at[3]
        bias = tl.load(mask_ptr + places, mask=is_inside, other=0.0).to(tl.float32)
        # The least number of a type is no infinity: a row that has it everywhere sees all keys alike.
        score += tl.where(bias == float("-inf"), bias, tl.maximum(bias * 1.4426950408889634, -3.0e38))
    if CHECKED:
        is_seen = column < sizes[3]
        if CAUSAL:
            is_seen = is_seen & (row >= column)
        score = tl.where(is_seen, score, float("-inf"))
    return score


@triton.jit  # type: ignore[untyped-decorator]
def _seen(block, width, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many keys all queries of a block see, in whole tiles, and up to where any of them sees one."""
    if CAUSAL:
        return tl.minimum(width, block * M) // N * N, tl.minimum(width, (block + 1) * M)
    else:
        return width // N * N, width


# There are two loops over keys: most tiles lie below the diagonal, and only those that it crosses are compared with it.
# All probabilities are summed, also those that are dropped: dropout comes after the softmax.
@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(  # type: ignore[no-untyped-def]
    tensors, strides, sizes, factors, KIND: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr
):
    """A program has `M` queries of a head, and passes over the keys that they see, `N` at a time."""
    q_ptr, k_ptr, v_ptr, mask_ptr, words_ptr, out_ptr, log_sum_ptr = tensors
    q_at, k_at, v_at, mask_at, out_at = strides
    scale, keep = factors
    M: tl.constexpr = TILE[0]
    N: tl.constexpr = TILE[1]
    CAUSAL: tl.constexpr = KIND[0]
    _, _, height, width, d, dv = sizes
    batch, head = _head(sizes)
    q_ptr += batch * q_at[0] + head * q_at[1]
    k_ptr += batch * k_at[0] + head * k_at[1]
    v_ptr += batch * v_at[0] + head * v_at[1]
    mask_ptr += batch * mask_at[0] + head * mask_at[1]
    words_ptr += tl.program_id(0).to(tl.int64) * tl.cdiv(width, 32) * height
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # those that see most keys begin
    rows = block * M + tl.arange(0, M)
    q = _tile(q_ptr, rows, q_at[2], height, d, D)
    largest = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    weighted = _zeros(M, DV)
    full, end = _seen(block, width, M, N, CAUSAL)
    for CHECKED in tl.static_range(2):
        for start in range(full if CHECKED else 0, end if CHECKED else full, N):
            columns = start + tl.arange(0, N)
            k = _tile(k_ptr, columns, k_at[2], width, d, D)
            v = _tile(v_ptr, columns, v_at[2], width, dv, DV)
            score = _products(q, k, D) * scale
            score = _scores(score, rows[:, None], columns[None, :], sizes, mask_ptr, mask_at, CHECKED, KIND)
            new = tl.maximum(largest, tl.max(score, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)  # of a row that has seen no key yet
            p = tl.exp2(score - safe[:, None])
            shrunk = tl.exp2(largest - safe)
            total = total * shrunk + tl.sum(p, 1)
            p = tl.where(_kept(words_ptr, rows, start, sizes, N, False), p, 0.0)
            weighted = _added(_scaled(weighted, shrunk[:, None], DV), p, v, DV)
            largest = new
    is_blind = total == 0.0
    total = tl.where(is_blind, 1.0, total)
    # Where nothing is seen the backward's exponentials are to be 0.
    log_sum = tl.where(is_blind, float("inf"), (largest + tl.log2(total)) / 1.4426950408889634)
    tl.store(log_sum_ptr + tl.program_id(0).to(tl.int64) * height + rows, log_sum, mask=rows < height)
    out_ptr += batch * out_at[0] + head * out_at[1]
    _write(out_ptr, weighted, (keep / total)[:, None], rows, out_at[2], height, dv, DV)


@triton.jit  # type: ignore[untyped-decorator]
def queries_kernel(  # type: ignore[no-untyped-def]
    tensors, strides, sizes, factors, KIND: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr
):
    """A program has `M` queries of a head and passes over the keys that they see.

    It leaves for `keys_kernel` each query's product of result and gradient, over `keep`, by which all that comes of
    probabilities is multiplied at the end.
    """
    q_ptr, k_ptr, v_ptr, mask_ptr, words_ptr, gradient_ptr, out_ptr, log_sum_ptr, total_ptr, of_q_ptr = tensors
    q_at, k_at, v_at, mask_at, gradient_at, out_at, of_q_at = strides
    scale, keep = factors
    M: tl.constexpr = TILE[0]
    N: tl.constexpr = TILE[1]
    CAUSAL: tl.constexpr = KIND[0]
    _, _, height, width, d, dv = sizes
    batch, head = _head(sizes)
    q_ptr += batch * q_at[0] + head * q_at[1]
    k_ptr += batch * k_at[0] + head * k_at[1]
    v_ptr += batch * v_at[0] + head * v_at[1]
    mask_ptr += batch * mask_at[0] + head * mask_at[1]
    gradient_ptr += batch * gradient_at[0] + head * gradient_at[1]
    out_ptr += batch * out_at[0] + head * out_at[1]
    words_ptr += tl.program_id(0).to(tl.int64) * tl.cdiv(width, 32) * height
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    rows = block * M + tl.arange(0, M)
    of_rows = tl.program_id(0).to(tl.int64) * height + rows
    q = _tile(q_ptr, rows, q_at[2], height, d, D)
    gradient = _tile(gradient_ptr, rows, gradient_at[2], height, dv, DV)
    out = _tile(out_ptr, rows, out_at[2], height, dv, DV)
    # The sum over keys of p times its gradient equals the product of result and
    # gradient: no pass over keys is needed for it.
    total = tl.sum(gradient[0].to(tl.float32) * out[0].to(tl.float32), 1)
    if DV[1] > 0:
        total += tl.sum(gradient[1].to(tl.float32) * out[1].to(tl.float32), 1)
    total /= keep
    tl.store(total_ptr + of_rows, total, mask=rows < height)
    log_sum = tl.load(log_sum_ptr + of_rows, mask=rows < height, other=float("inf")) * 1.4426950408889634
    of_q = _zeros(M, D)
    full, end = _seen(block, width, M, N, CAUSAL)
    for CHECKED in tl.static_range(2):
        for start in range(full if CHECKED else 0, end if CHECKED else full, N):
            columns = start + tl.arange(0, N)
            k = _tile(k_ptr, columns, k_at[2], width, d, D)
            v = _tile(v_ptr, columns, v_at[2], width, dv, DV)
            score = _products(q, k, D) * (scale * 1.4426950408889634)
            score = _scores(score, rows[:, None], columns[None, :], sizes, mask_ptr, mask_at, CHECKED, KIND)
            p = tl.exp2(score - log_sum[:, None])
            of_p = tl.where(_kept(words_ptr, rows, start, sizes, N, False), _products(gradient, v, DV), 0.0)
            of_q = _added(of_q, p * (of_p - total[:, None]), k, D)
    of_q_ptr += batch * of_q_at[0] + head * of_q_at[1]
    _write(of_q_ptr, of_q, scale * keep, rows, of_q_at[2], height, d, D)


@triton.jit  # type: ignore[untyped-decorator]
def keys_kernel(  # type: ignore[no-untyped-def]
    tensors, strides, sizes, factors, KIND: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr
):
    """A program has `N` keys of a head and passes over the queries that see them, `M` at a time.

    Keys are the first dimension of its tiles: so they weigh the queries as they are. Those past the last have sums that
    are not written, and only what the diagonal crosses is checked.
    """
    q_ptr, k_ptr, v_ptr, mask_ptr, words_ptr, gradient_ptr, log_sum_ptr, total_ptr, of_k_ptr, of_v_ptr = tensors
    q_at, k_at, v_at, mask_at, gradient_at, of_k_at, of_v_at = strides
    scale, keep = factors
    M: tl.constexpr = TILE[0]
    N: tl.constexpr = TILE[1]
    CAUSAL: tl.constexpr = KIND[0]
    _, _, height, width, d, dv = sizes
    batch, head = _head(sizes)
    q_ptr += batch * q_at[0] + head * q_at[1]
    k_ptr += batch * k_at[0] + head * k_at[1]
    v_ptr += batch * v_at[0] + head * v_at[1]
    mask_ptr += batch * mask_at[0] + head * mask_at[1]
    gradient_ptr += batch * gradient_at[0] + head * gradient_at[1]
    log_sum_ptr += tl.program_id(0).to(tl.int64) * height
    total_ptr += tl.program_id(0).to(tl.int64) * height
    words_ptr += tl.program_id(0).to(tl.int64) * tl.cdiv(width, 32) * height
    start = tl.program_id(1) * N
    columns = start + tl.arange(0, N)
    k = _tile(k_ptr, columns, k_at[2], width, d, D)
    v = _tile(v_ptr, columns, v_at[2], width, dv, DV)
    of_k, of_v = _zeros(N, D), _zeros(N, DV)
    begin = start // M * M if CAUSAL else 0
    full = tl.minimum(tl.cdiv(height, M), tl.cdiv(start + N - 1, M)) * M if CAUSAL else 0
    for CHECKED in tl.static_range(1, -1, -1):
        for row in range(begin if CHECKED else tl.maximum(begin, full), full if CHECKED else height, M):
            rows = row + tl.arange(0, M)
            q = _tile(q_ptr, rows, q_at[2], height, d, D)
            gradient = _tile(gradient_ptr, rows, gradient_at[2], height, dv, DV)
            log_sum = tl.load(log_sum_ptr + rows, mask=rows < height, other=float("inf")) * 1.4426950408889634
            total = tl.load(total_ptr + rows, mask=rows < height, other=0.0)
            score = _products(k, q, D) * (scale * 1.4426950408889634)
            score = _scores(score, rows[None, :], columns[:, None], sizes, mask_ptr, mask_at, CHECKED, KIND)
            p = tl.exp2(score - log_sum[None, :])
            stays = _kept(words_ptr, rows, start, sizes, N, True)
            of_v = _added(of_v, tl.where(stays, p, 0.0), gradient, DV)
            of_p = tl.where(stays, _products(v, gradient, DV), 0.0)
            of_k = _added(of_k, p * (of_p - total[None, :]), q, D)
    of_k_ptr += batch * of_k_at[0] + head * of_k_at[1]
    _write(of_k_ptr, of_k, scale * keep, columns, of_k_at[2], width, d, D)
    of_v_ptr += batch * of_v_at[0] + head * of_v_at[1]
    _write(of_v_ptr, of_v, keep, columns, of_v_at[2], width, dv, DV)
