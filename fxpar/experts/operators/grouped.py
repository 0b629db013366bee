"""Products of experts' matrices with their rows, what is added to or summed over these, and the gate between products.

Enters: rows that stand expert after expert, and how many each has. Leaves: operators of torch whose backward consists
of these same operators.

Terms: M rows, of which the first `counts[0]` are expert 0's, the next `counts[1]` expert 1's, and so on; rows after
all of them are nobody's: they give zeros, whatever they hold, and their gradient is zero. A *group* is what stands
after the dimensions before these. Experts' operands may have fewer of those dimensions than the rows, the innermost
ones: groups that share experts sum their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fxpar.experts.operators.permute import flat_groups, nobodys, promoted, row_kernels_for
from fxpar.layout.symbolic_sizes import Size
from fxpar.layout.symbolic_sizes import product as multiplied
from fxpar.ops.operator import Autograd, PaddingRows, torch_operator
from fxpar.signatures.engine import Labelling, Labels, Rule
from fxpar.signatures.matmul import formula
from fxpar.signatures.op_call import OpCall


def _groups(values: Tensor, dims: int = 2) -> Tensor:
    """Returns rows, or what belongs to experts, with one dimension for the group; `dims` are those of a group."""
    return values.reshape(math.prod(values.shape[: values.dim() - dims]), *values.shape[values.dim() - dims :])


def _summed(parts: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Returns the sums of what groups that share experts give, parts [groups, …]."""
    shape = parts.shape[1:]
    shared = math.prod(lead)
    return parts.reshape(parts.shape[0] // shared if shared else 0, *lead, *shape).sum(0)


def _owners(counts: Tensor, rows: int) -> Tensor:
    """Returns the expert of each row, E where it is nobody's: int64[groups, M] for counts [groups, E]."""
    places = torch.arange(rows, device=counts.device).expand(counts.shape[0], rows).contiguous()
    return torch.searchsorted(counts.cumsum(-1), places, right=True)


# ---------------------------------------------------------------------- rules and costs


def _lead(rank: int, of: int) -> Labels:
    """Returns labels of `rank` leading dimensions, which are the innermost of `of`."""
    return tuple(f"d{i}" for i in range(of - rank, of))


def _contracted(ins: tuple[Labels, ...], out: Labels) -> Labelling:
    return Labelling(ins, (out,), frozenset(label for part in ins for label in part if label and label not in out))


def _linear_labels(call: OpCall) -> Labelling:
    x, weight, _ = (len(kind.shape) for kind in call.operands)
    lead = _lead(x - 2, x - 2)
    matrix: Labels = ("i", "o") if call.get("transposed") else ("o", "i")
    weight_labels: Labels = (*_lead(weight - 3, x - 2), None, *matrix)
    return _contracted(((*lead, None, "i"), weight_labels, (*lead, None)), (*lead, None, "o"))


def _outer_labels(call: OpCall) -> Labelling:
    rank = len(call.operands[0].shape)
    lead = _lead(rank - 2, rank - 2)
    out: Labels = (*_lead(len(call.outputs[0].shape) - 3, rank - 2), None, "i", "o")
    return _contracted(((*lead, None, "i"), (*lead, None, "o"), (*lead, None)), out)


def _spread_labels(call: OpCall) -> Labelling:
    rank = len(call.outputs[0].shape)
    lead = _lead(rank - 2, rank - 2)
    rows: Labels = (*_lead(len(call.operands[0].shape) - 2, rank - 2), None, "o")
    return _contracted((rows, (*lead, None)), (*lead, None, "o"))


def _sum_labels(call: OpCall) -> Labelling:
    rank = len(call.operands[0].shape)
    lead = _lead(rank - 2, rank - 2)
    out: Labels = (*_lead(len(call.outputs[0].shape) - 2, rank - 2), None, "o")
    return _contracted(((*lead, None, "o"), (*lead, None)), out)


def _linear_flops(call: OpCall) -> Size:
    """Returns the FLOPs of a product in which each row meets one matrix, whichever it is."""
    return 2 * multiplied(call.outputs[0].shape) * call.operands[0].shape[-1]


def _outer_flops(call: OpCall) -> Size:
    return 2 * multiplied(call.operands[0].shape) * call.operands[1].shape[-1]


# ---------------------------------------------------------------------- products


def _product_shape(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool, fill: bool = True) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-1 if transposed else -2]))


def _keep_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, counts, ctx.transposed, _ = inputs
    ctx.save_for_backward(x, weight, counts)


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, counts = ctx.saved_tensors
    for_x = for_weight = None
    if ctx.needs_input_grad[0]:
        for_x = grouped_linear(gradient, weight, counts, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        left, right = (x, gradient) if ctx.transposed else (gradient, x)
        for_weight = grouped_outer(left, right, counts, weight.dim() - 3)
    return for_x, for_weight, None, None, None


@torch_operator(
    "grouped_linear",
    fake=_product_shape,
    autograd=Autograd(_keep_product, _product_backward),
    rule=Rule(_linear_labels, (("x",), ("weight",))),
    flops=_linear_flops,
    padding=PaddingRows(2, ignores=(0,), writes=True),
)
def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool, fill: bool = True) -> Tensor:
    """Multiplies each row by the matrix of its expert.

    On GPUs in bfloat16 it is one kernel that reads the counts on the device; elsewhere a product for each expert.

    Args:
        x: rows, [..., M, i].
        weight: experts' matrices, [..., E, o, i]; with `transposed` [..., E, i, o].
        counts: int64[..., E].
        transposed: how the matrices stand.
        fill: False where nobody reads rows that are nobody's: they hold anything.

    Returns:
        [..., M, o].
    """
    matrices, groups = _groups(weight, 3), _groups(x)
    matrices = matrices if transposed else matrices.mT
    counted = counts.reshape(-1, counts.shape[-1])
    products = [product(rows, matrices[g % len(matrices)], counted[g], fill) for g, rows in enumerate(groups)]
    shape = (*x.shape[:-1], matrices.shape[-1])
    if not products:
        return x.new_zeros(shape)
    # One group's is given as it is: a stack would be a copy of all rows.
    return (products[0] if len(products) == 1 else torch.stack(products)).reshape(shape)


def _outer_shape(a: Tensor, b: Tensor, counts: Tensor, leading: int) -> Tensor:
    lead = counts.shape[counts.dim() - 1 - leading :]
    return a.new_empty((*lead, a.shape[-1], b.shape[-1]))


def _keep_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _outer_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, columns, counts = ctx.saved_tensors
    for_rows = for_columns = None
    if ctx.needs_input_grad[0]:
        for_rows = grouped_linear(columns, gradient, counts, False)
    if ctx.needs_input_grad[1]:
        for_columns = grouped_linear(rows, gradient, counts, True)
    return for_rows, for_columns, None, None


@torch_operator(
    "grouped_outer",
    fake=_outer_shape,
    autograd=Autograd(_keep_outer, _outer_backward),
    rule=Rule(_outer_labels, (("a",), ("b",))),
    flops=_outer_flops,
    padding=PaddingRows(2, ignores=(0, 1)),
)
def grouped_outer(a: Tensor, b: Tensor, counts: Tensor, leading: int) -> Tensor:
    """Sums for each expert the outer products of its rows: the gradient of its matrix.

    Args:
        a: [..., M, o].
        b: [..., M, i].
        counts: int64[..., E].
        leading: dimensions that are kept before E, the innermost ones; over the others it is summed.

    Returns:
        [..., E, o, i].
    """
    left, right = _groups(a), _groups(b)
    counted = counts.reshape(-1, counts.shape[-1])
    sums = [outer(x, y, sizes) for x, y, sizes in zip(left, right, counted, strict=True)]
    lead = counts.shape[counts.dim() - 1 - leading :]
    shape = (*lead, a.shape[-1], b.shape[-1])
    if not sums:
        return a.new_zeros(shape)
    # One group's is given as it is: these are as large as all experts' matrices.
    return sums[0].reshape(shape) if len(sums) == 1 else _summed(torch.stack(sums), lead[:-1])


def _sizes_shape(ends: Tensor) -> Tensor:
    return ends.new_empty(ends.shape, dtype=torch.int64)


@torch_operator("group_sizes", fake=_sizes_shape, rule=Rule(formula("... _ -> ... _", "ends")))
def group_sizes(ends: Tensor) -> Tensor:
    """Returns how many rows each group has, int64[..., E], by where it ends, int[..., E]."""
    return ends.to(torch.int64).diff(dim=-1, prepend=ends.new_zeros((*ends.shape[:-1], 1), dtype=torch.int64))


def _spread_shape(v: Tensor, counts: Tensor, rows: int) -> Tensor:
    return v.new_empty((*counts.shape[:-1], rows, v.shape[-1]))


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v, counts, _ = inputs
    ctx.leading = v.dim() - 2
    ctx.save_for_backward(counts)


def _spread_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (counts,) = ctx.saved_tensors
    return sum_by_expert(gradient, counts, ctx.leading), None, None


@torch_operator(
    "expand_by_expert",
    fake=_spread_shape,
    autograd=Autograd(_keep_spread, _spread_backward),
    rule=Rule(_spread_labels, (("v",),)),
)
def expand_by_expert(v: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Gives each row what its expert has: a bias.

    Args:
        v: [..., E, o].
        counts: int64[..., E].
        rows: M.

    Returns:
        [..., M, o].
    """
    biases, counted = _groups(v), counts.reshape(-1, counts.shape[-1])
    shape = (*counts.shape[:-1], rows, v.shape[-1])
    if not len(counted) or not counts.shape[-1]:
        return v.new_zeros(shape)
    owners = _owners(counted, rows)
    biases = biases.repeat(len(counted) // len(biases), 1, 1) if len(biases) != len(counted) else biases
    place = owners.clamp_max(counts.shape[-1] - 1).unsqueeze(-1).expand(-1, -1, v.shape[-1])
    spread = torch.where((owners < counts.shape[-1]).unsqueeze(-1), biases.gather(1, place), 0)
    return spread.reshape(shape)


def _sum_shape(y: Tensor, counts: Tensor, leading: int) -> Tensor:
    return y.new_empty((*counts.shape[counts.dim() - 1 - leading :], y.shape[-1]))


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, counts, _ = inputs
    ctx.rows = y.shape[-2]
    ctx.save_for_backward(counts)


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (counts,) = ctx.saved_tensors
    return expand_by_expert(gradient, counts, ctx.rows), None, None


@torch_operator(
    "sum_by_expert",
    fake=_sum_shape,
    autograd=Autograd(_keep_sum, _sum_backward),
    rule=Rule(_sum_labels, (("y",),)),
    padding=PaddingRows(1, ignores=(0,)),
)
def sum_by_expert(y: Tensor, counts: Tensor, leading: int) -> Tensor:
    """Sums the rows of each expert; the adjoint of `expand_by_expert`.

    Args:
        y: rows, [..., M, o].
        counts: int64[..., E].
        leading: as in `grouped_outer`.

    Returns:
        [..., E, o].
    """
    groups, counted = _groups(y), counts.reshape(-1, counts.shape[-1])
    owners = _owners(counted, y.shape[-2])
    # As a product, whose order of additions is fixed; index_add has none on GPUs. What is nobody's may be NaN.
    chosen = owners.unsqueeze(1) == torch.arange(counts.shape[-1], device=y.device).unsqueeze(-1)
    rows = torch.where((owners < counts.shape[-1]).unsqueeze(-1), groups, 0)
    lead = counts.shape[counts.dim() - 1 - leading : -1]
    return _summed(chosen.to(y.dtype) @ rows, tuple(lead))


# torch's kernel wants rows of matrices to begin at multiples of so many bytes.
_ALIGNED = 16


def product(x: Tensor, matrices: Tensor, counts: Tensor, fill: bool) -> Tensor:
    """Multiplies each row by its expert's matrix.

    Args:
        x: [M, i].
        matrices: [E, i, o], each laid out by rows or by columns.
        counts: int64[E].
        fill: whether rows after all experts' are zeros; they hold anything otherwise.
    """
    x = x.contiguous()
    if _has_kernel(x, matrices):
        ends = _ends(counts)
        products: Tensor = torch.ops.aten._grouped_mm(x, matrices, ends).contiguous()  # it may have padded rows
        if not fill:
            return products
        module = row_kernels_for(products)  # torch's leaves the rows after all experts' as they are
        if module is not None:
            cleared: Tensor = module.clear_behind(products, ends[-1])
            return cleared
        places = torch.arange(x.shape[0], device=x.device)
        return torch.where((places < ends[-1]).unsqueeze(-1), products, 0)
    products = x.new_full((x.shape[0], matrices.shape[-1]), nobodys(fill))
    if _is_recorded(x):
        for mask, matrix in zip(_masks(counts, x.shape[0]), matrices, strict=True):
            products = torch.where(mask, x @ matrix, products)
        return products
    for e, start, end in _runs(counts):
        torch.mm(x[start:end], matrices[e], out=products[start:end])
    return products


def outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Sums for each expert the outer products of its rows, [E, o, i].

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
            # Both are masked: rows that are nobody's may hold NaN, and 0 times NaN is NaN.
            sums[e] = torch.where(mask, left, 0).mT @ torch.where(mask, right, 0)
        return sums
    for e, start, end in _runs(counts):
        torch.mm(left[start:end].mT, right[start:end], out=sums[e])
    return sums


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _runs(counts: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields experts that have rows, with the first row and the one after the last; reads the counts on the host."""
    start = 0
    for e, count in enumerate(counts.tolist()):
        if count:
            yield e, start, start + count
        start += count


def _masks(counts: Tensor, rows: int) -> list[Tensor]:
    """Returns for each expert which rows are its own, bool[M, 1]."""
    ends = counts.cumsum(0)
    places = torch.arange(rows, device=counts.device).unsqueeze(-1)
    return [(places >= end - count) & (places < end) for end, count in zip(ends, counts, strict=True)]


def _is_recorded(x: Tensor) -> bool:
    """Returns whether a CUDA graph is recorded, in which nothing can be read: then every expert sees all rows."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _has_kernel(*operands: Tensor) -> bool:
    """Returns whether torch multiplies in one kernel, with sizes read on the device: bfloat16 from Hopper on."""
    if not all(operand.is_cuda and operand.dtype == torch.bfloat16 for operand in operands):
        return False
    if torch.cuda.get_device_capability(operands[0].device) < (9, 0):
        return False
    return all(_is_aligned(operand) for operand in operands)


def _is_aligned(x: Tensor) -> bool:
    """Returns whether rows, or columns, are dense and begin at multiples of 16 bytes."""
    strides = sorted(x.stride()[-2:])
    others = [stride * x.element_size() % _ALIGNED for stride in (strides[-1], *x.stride()[:-2])]
    return strides[0] == 1 and not any(others) and x.data_ptr() % _ALIGNED == 0


# ---------------------------------------------------------------------- SwiGLU of rows


def halves(x: Tensor) -> Tensor:
    """Maps [..., 2 * n] → [..., 2, n]: the same elements."""
    pair: Tensor = x.unflatten(-1, (2, x.shape[-1] // 2))
    return pair


def _gated_shape(x: Tensor, counts: Tensor, fill: bool = True) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


def _keep_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1])


def _gate_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return swiglu_gradient(gradient, *ctx.saved_tensors), None, None


@torch_operator(
    "swiglu_rows",
    fake=_gated_shape,
    autograd=Autograd(_keep_gate, _gate_backward),
    rule=Rule(formula("... _ _ n, ... _ -> ... _ n", "x", "counts")),
    padding=PaddingRows(1, ignores=(0,), writes=True),
)
def swiglu_rows(x: Tensor, counts: Tensor, fill: bool = True) -> Tensor:
    """Computes `silu(x[..., 0, :]) * x[..., 1, :]`; gives zeros in rows that are nobody's, whatever they hold.

    Halves are computed in float32.

    Args:
        x: rows of gates and of what they let through, [..., M, 2, n].
        counts: int64[..., E].
        fill: False where nobody reads rows that are nobody's: they hold anything.

    Returns:
        [..., M, n].
    """
    module = row_kernels_for(x)
    if module is not None:
        gated: Tensor = module.gate(flat_groups(x, 3), counts.sum(-1).view(-1), fill)
        return gated.view(*x.shape[:-2], x.shape[-1])
    gate, up = x.to(promoted(x.dtype)).unbind(-2)
    masked: Tensor = torch.where(_are_somebodys(x.shape[-3], counts), functional.silu(gate) * up, nobodys(fill))
    return masked.to(x.dtype)


def _gradient_shape(gradient: Tensor, x: Tensor, counts: Tensor, fill: bool = True) -> Tensor:
    return x.new_empty(x.shape)


def _gradient_backward(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor, None, None]:
    """Computes gradients of the second order in torch's operations; no step has them."""
    gradient, x, counts = ctx.saved_tensors
    (gate, up), (for_gate, for_up) = x.unbind(-2), tangent.unbind(-2)
    share = gate.sigmoid()
    first = share * (1 + gate * (1 - share))
    second = share * (1 - share) * (2 + gate * (1 - 2 * share))
    is_row = _are_somebodys(x.shape[-3], counts)
    for_gradient = for_gate * up * first + for_up * gate * share
    parts = gradient * (for_gate * up * second + for_up * first), gradient * for_gate * first
    for_x = torch.where(is_row.unsqueeze(-1), torch.stack(parts, dim=-2), 0)
    return torch.where(is_row, for_gradient, 0), for_x, None, None


@torch_operator(
    "swiglu_gradient",
    fake=_gradient_shape,
    autograd=Autograd(_keep_gate, _gradient_backward),
    rule=Rule(formula("... _ n, ... _ _ n, ... _ -> ... _ _ n", "gradient", "x", "counts"), (("gradient",),)),
    padding=PaddingRows(2, ignores=(0, 1), writes=True),
)
def swiglu_gradient(gradient: Tensor, x: Tensor, counts: Tensor, fill: bool = True) -> Tensor:
    """Computes the gradient of what `swiglu_rows` takes; gives zeros in rows that are nobody's.

    Args:
        gradient: of its result, [..., M, n].
        x: [..., M, 2, n].
        counts: int64[..., E].
        fill: as of `swiglu_rows`.

    Returns:
        [..., M, 2, n].
    """
    module = row_kernels_for(x)
    if module is not None:
        row_counts = counts.sum(-1).view(-1)
        of_halves: Tensor = module.gate_backward(flat_groups(gradient, 2), flat_groups(x, 3), row_counts, fill)
        return of_halves.view(x.shape)
    gate, up = x.to(promoted(x.dtype)).unbind(-2)
    wide, share = gradient.to(gate.dtype), gate.sigmoid()
    stacked = torch.stack([wide * up * share * (1 + gate * (1 - share)), wide * gate * share], dim=-2)
    masked: Tensor = torch.where(_are_somebodys(x.shape[-3], counts).unsqueeze(-1), stacked, nobodys(fill))
    return masked.to(x.dtype)


def _are_somebodys(rows: int, counts: Tensor) -> Tensor:
    """Returns which rows are somebody's, bool[..., M, 1]."""
    return (torch.arange(rows, device=counts.device) < counts.sum(-1, keepdim=True)).unsqueeze(-1)
