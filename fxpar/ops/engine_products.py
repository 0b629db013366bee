"""Products of experts' matrices with their rows by Transformer Engine's grouped GEMM.

Enters: what `fxpar.ops.grouped` takes, whose terms these are, with the counts on the host. Leaves: the same results.
These operators stand in lowered graphs alone, in place of those of `grouped`, which have the derivatives.

Transformer Engine's `GroupedLinear` owns its weights, a parameter for each expert, and leaves gradients to autograd.
Here they are one tensor that ranks cut, and a step has its backward written out. So what is called is the function that
`GroupedLinear` itself calls for the product and for both gradients, `general_grouped_gemm`: a cuBLAS product for each
expert, on several streams between which it orders itself. It takes what is passed here by these names since 2.16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.errors import PlanError
from fxpar.ops import transformer_engine
from fxpar.ops.torch_operators import torch_operator
from fxpar.program.program import Program, describe, tensor_type
from fxpar.program.properties import Property

fxp = torch.ops.fxpar

_WHERE, _OTHERWISE = "grouped_gemm='transformer_engine'", "grouped_gemm='torch'"
# Where it computes. Elsewhere the operators of `grouped` do: programs are checked, and counted, without a GPU too.
_DEVICES = ("cuda",)
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_engine(device: torch.device) -> None:
    """Refuses where there is no GPU or no Transformer Engine.

    Raises:
        InputError: says which.
    """
    transformer_engine.check_device(device, "multiplies", _WHERE, f"set {_OTHERWISE}")
    _grouped_gemm()


def by_engine(program: Program, device: torch.device) -> Mapping[Any, Any]:
    """The operators that Transformer Engine computes on a device, each with the one that has it do so.

    None before rows were dispatched: their counts are on the device, and a capture is compared with its model by torch.
    """
    is_asked = program.plan.grouped_gemm == "transformer_engine" and device.type in _DEVICES
    return _BY_ENGINE if is_asked and Property.EXPERTS in program.properties else {}


def check_type(node: fx.Node) -> None:
    """Refuses a product in a type that Transformer Engine does not have, or has in another precision alone.

    Raises:
        PlanError: names the product.
    """
    kind = tensor_type(node).dtype
    if kind not in _TYPES:
        raise PlanError(
            f"Transformer Engine multiplies no {kind}",
            where=describe(node),
            remedy=f"give precision='bf16', or {_OTHERWISE}",
        )
    if kind == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        # torch does so only where it is allowed to; a training is otherwise that of one device.
        raise PlanError(
            "Transformer Engine multiplies float32 in TF32, of which 10 bits are the fraction",
            where=describe(node),
            remedy=f"allow it by torch.set_float32_matmul_precision('high'), or give precision='bf16' or {_OTHERWISE}",
        )


@torch_operator("engine_linear", torch.Tag.cudagraph_unsafe)
def engine_linear(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """See `fxpar.ops.grouped.grouped_linear`."""
    groups, experts = x[None].flatten(0, -3), weight[None].flatten(0, -4)
    if experts.mT.is_contiguous():
        experts, transposed = experts.mT, not transposed
    experts = experts.contiguous()  # it reads no strides
    products = x.new_empty((*groups.shape[:2], experts.shape[-1 if transposed else -2]))
    for g, splits in enumerate(_splits(counts)):
        _multiply(groups[g].contiguous(), experts[g % len(experts)], splits, transposed, products[g])
    return products.view(*x.shape[:-1], products.shape[-1])


def _multiply(x: Tensor, matrices: Tensor, splits: Sequence[int], transposed: bool, out: Tensor) -> None:
    """One group's rows; in its notation, of columns, the matrix is the left operand."""
    end = sum(splits)
    out[end:] = 0
    pairs = [(matrix, rows) for matrix, rows in zip(matrices, x[:end].split(splits), strict=True) if len(rows)]
    if pairs:
        left, right = map(list, zip(*pairs, strict=True))
        _run(left, right, [out[:end]], layout="NN" if transposed else "TN", single_output=True)


@engine_linear.register_fake
def _linear_shape(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-1 if transposed else -2]))


@torch_operator("engine_outer", torch.Tag.cudagraph_unsafe)
def engine_outer(a: Tensor, b: Tensor, counts: Tensor, leading: int) -> Tensor:
    """See `fxpar.ops.grouped.grouped_outer`."""
    left, right, lead = a[None].flatten(0, -3), b[None].flatten(0, -3), counts.shape[counts.dim() - 1 - leading :]
    splits = _splits(counts)
    shape = (*lead, a.shape[-1], b.shape[-1])
    sums = a.new_empty(shape) if splits else a.new_zeros(shape)
    groups = sums[None].flatten(0, -4)
    for g, sizes in enumerate(splits):
        # Groups behind the first ones share their experts.
        _multiply_outer(left[g].contiguous(), right[g].contiguous(), sizes, groups[g % len(groups)], g >= len(groups))
    return sums


def _multiply_outer(a: Tensor, b: Tensor, splits: Sequence[int], out: Tensor, adds: bool) -> None:
    """One group's sums of outer products."""
    end = sum(splits)
    triples = []
    for matrix, x, y in zip(out, a[:end].split(splits), b[:end].split(splits), strict=True):
        if len(x):
            triples.append((y, x, matrix))
        elif not adds:
            matrix.zero_()
    if triples:
        left, right, into = map(list, zip(*triples, strict=True))
        _run(left, right, into, layout="NT", accumulate=adds)


@engine_outer.register_fake
def _outer_shape(a: Tensor, b: Tensor, counts: Tensor, leading: int) -> Tensor:
    return a.new_empty((*counts.shape[counts.dim() - 1 - leading :], a.shape[-1], b.shape[-1]))


def _splits(counts: Tensor) -> list[list[int]]:
    """For each group how many rows its experts have; the counts are on the host."""
    assert not counts.is_cuda, "rows are counted on the device, where reading them would wait"
    splits: list[list[int]] = counts[None].flatten(0, -2).tolist()
    return splits


def _run(left: list[Tensor], right: list[Tensor], out: list[Tensor], **how: Any) -> None:
    """Products of dense matrices, none of them empty, into `out`."""
    dtype, rows = right[0].dtype, [len(matrix) for matrix in right]
    _grouped_gemm()(left, right, out, quantization_params=[None] * len(left), out_dtype=dtype, m_splits=rows, **how)


def _grouped_gemm() -> Any:
    return transformer_engine.part("pytorch.cpp_extensions", _WHERE, _OTHERWISE).general_grouped_gemm


_BY_ENGINE: Mapping[Any, Any] = {
    fxp.grouped_linear.default: fxp.engine_linear.default,
    fxp.grouped_outer.default: fxp.engine_outer.default,
}
