"""The gate between an expert's two products in one pass on NVIDIA GPUs: what `fxpar.ops.gates` computes in several.

Enters: contiguous rows of groups, and on the device how many of each group are somebody's. Leaves: rows; those behind
are not read, and zero or not written. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxpar.ops.row_kernels import PROGRAMS, sum_type, tile


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
            for_gate = gradient * up * share * (1.0 + gate * (1.0 - share))
            tl.store(out_ptr + first, for_gate.to(out_ptr.dtype.element_ty), mask=is_written)
            tl.store(out_ptr + first + width, (gradient * gate * share).to(out_ptr.dtype.element_ty), mask=is_written)
        else:
            tl.store(out_ptr + single, (gate * share * up).to(out_ptr.dtype.element_ty), mask=is_written)


def gate(x: Tensor, counts: Tensor, fill: bool) -> Tensor:
    """`silu(x[..., 0, :]) * x[..., 1, :]`.

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
    """The gradient of `x`, [g, M, 2, n], of that of what `gate` gives, [g, M, n]."""
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
