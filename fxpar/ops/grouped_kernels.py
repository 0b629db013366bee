"""Products of one group of experts: by torch's grouped kernel, or expert by expert.

Enters: rows that stand expert after expert, experts' matrices and how many rows each has. Leaves: products; see
`fxpar.ops.grouped` for the terms.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fxpar.ops import rows

# torch's kernel wants rows of matrices to begin at multiples of so many bytes.
_ALIGNED = 16


def product(x: Tensor, matrices: Tensor, counts: Tensor, fill: bool) -> Tensor:
    """Each row times its expert's matrix.

    Args:
        x: [M, i].
        matrices: [E, i, o], each laid out by rows or by columns.
        counts: int64[E].
        fill: whether rows behind all experts' are zeros; they hold anything otherwise.
    """
    x = x.contiguous()
    if _has_kernel(x, matrices):
        ends = _ends(counts)
        products: Tensor = torch.ops.aten._grouped_mm(x, matrices, ends).contiguous()  # it may have padded rows
        if not fill:
            return products
        module = rows.kernels(products)  # torch's leaves the rows behind all experts' as they are
        if module is not None:
            cleared: Tensor = module.clear_behind(products, ends[-1])
            return cleared
        places = torch.arange(x.shape[0], device=x.device)
        return torch.where((places < ends[-1]).unsqueeze(-1), products, 0)
    products = x.new_full((x.shape[0], matrices.shape[-1]), rows.nobodys(fill))
    if _is_recorded(x):
        for mask, matrix in zip(_masks(counts, x.shape[0]), matrices, strict=True):
            products = torch.where(mask, x @ matrix, products)
        return products
    for e, start, end in _runs(counts):
        torch.mm(x[start:end], matrices[e], out=products[start:end])
    return products


def outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """For each expert the sum over its rows of the outer products, [E, o, i].

    Args:
        left: [M, o].
        right: [M, i].
        counts: int64[E].
    """
    left, right = left.contiguous(), right.contiguous()
    if _has_kernel(left, right) and left.shape[0]:
        sums: Tensor = torch.ops.aten._grouped_mm(left.mT, right, _ends(counts)).contiguous()
        return sums
    sums = left.new_zeros(counts.shape[0], left.shape[-1], right.shape[-1])
    if _is_recorded(left):
        for e, mask in enumerate(_masks(counts, left.shape[0])):
            sums[e] = torch.where(mask, left, 0).mT @ torch.where(mask, right, 0)
        return sums
    for e, start, end in _runs(counts):
        torch.mm(left[start:end].mT, right[start:end], out=sums[e])
    return sums


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _runs(counts: Tensor) -> Iterator[tuple[int, int, int]]:
    """Experts that have rows, with the first and the one behind the last; reads the counts on the host."""
    start = 0
    for e, count in enumerate(counts.tolist()):
        if count:
            yield e, start, start + count
        start += count


def _masks(counts: Tensor, rows: int) -> list[Tensor]:
    """For each expert which rows are its own, bool[M, 1]."""
    ends = counts.cumsum(0)
    places = torch.arange(rows, device=counts.device).unsqueeze(-1)
    return [(places >= end - count) & (places < end) for end, count in zip(ends, counts, strict=True)]


def _is_recorded(x: Tensor) -> bool:
    """Whether a CUDA graph is recorded, in which nothing can be read: then every expert sees all rows."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _has_kernel(*operands: Tensor) -> bool:
    """Whether torch multiplies them in one kernel with sizes that it reads on the device: bfloat16 from Hopper on."""
    if not all(operand.is_cuda and operand.dtype == torch.bfloat16 for operand in operands):
        return False
    if torch.cuda.get_device_capability(operands[0].device) < (9, 0):
        return False
    return all(_is_aligned(operand) for operand in operands)


def _is_aligned(x: Tensor) -> bool:
    """Whether rows, or columns, are dense and begin at multiples of 16 bytes."""
    strides = sorted(x.stride()[-2:])
    others = [stride * x.element_size() % _ALIGNED for stride in (strides[-1], *x.stride()[:-2])]
    return strides[0] == 1 and not any(others) and x.data_ptr() % _ALIGNED == 0
