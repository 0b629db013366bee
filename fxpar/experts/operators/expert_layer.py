"""`fxpar.ops.experts`: a layer of experts, written with the operators on rows, for models with their own experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fxpar.errors import InputError
from fxpar.experts.operators.grouped import expand_by_expert, grouped_linear, halves, swiglu_rows
from fxpar.experts.operators.permute import moe_combine, moe_permute, sort_by_expert


def swiglu(*inner: Tensor) -> Tensor:
    """Returns `silu(gate) * up` of two results, or of the halves of one."""
    gate, up = inner if len(inner) > 1 else inner[0].chunk(2, dim=-1)
    return functional.silu(gate) * up


def experts(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor | Sequence[Tensor],
    down: Tensor,
    *,
    gate_up_bias: Tensor | Sequence[Tensor] | None = None,
    down_bias: Tensor | None = None,
    activation: Callable[..., Tensor] = swiglu,
    transposed: bool = False,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns, for each token, the weighted sum of the results of its K experts.

    It computes what a loop over experts does, without reading anything on the host. fxpar splits it over tensor ranks
    by columns and rows of each expert's matrices, and over expert ranks by experts. It needs no process group.

        out = fxpar.ops.experts(x, top.indices, top.values, (self.w1, self.w3), self.w2)

    Args:
        hidden: tokens, [T, h].
        indices: the experts of each token, int[T, K], none of them twice. A number without an expert goes to none.
        weights: the weights of a token's experts, [T, K].
        gate_up: the first matrices of all experts, [E, n, h], or a sequence of them.
        down: the second matrices, [E, h, m].
        gate_up_bias: biases [E, n], one for each of the first matrices.
        down_bias: the bias of the second matrices, [E, h].
        activation: takes the results [M, n] of the first matrices, one argument each, and returns [M, m]. It must
            compute each row independently.
        transposed: whether matrices are transposed: [E, h, n] and [E, m, h].
        norm: applied to an expert's results [M, h], before they are weighted.

    Returns:
        [T, h], in the type of `hidden`.

    Raises:
        InputError: shapes or types do not fit.
    """
    first = [gate_up] if isinstance(gate_up, Tensor) else list(gate_up)
    biases = [gate_up_bias] if isinstance(gate_up_bias, Tensor) else list(gate_up_bias or ())
    _check(hidden, indices, weights, [*first, down])
    if biases and len(biases) != len(first):
        raise _unfit(f"{len(first)} first matrices and {len(biases)} biases for them", "pass one for each, or none")
    count, k = down.shape[0], indices.shape[-1]
    order, counts = sort_by_expert(indices, count)
    rows = moe_permute(hidden.to(down.dtype), order, k)

    def added(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = grouped_linear(x, matrix, counts, transposed)
        return product if bias is None else product + expand_by_expert(bias, counts, product.shape[-2])

    inner = [added(rows, matrix, biases[i] if biases else None) for i, matrix in enumerate(first)]
    is_fused = activation is swiglu and len(inner) == 1
    expert_rows = swiglu_rows(halves(inner[0]), counts) if is_fused else activation(*inner)
    expert_rows = added(expert_rows, down, down_bias)
    expert_rows = expert_rows if norm is None else norm(expert_rows)
    summed: Tensor = moe_combine(expert_rows, weights, order, hidden.dtype)
    return summed


def _unfit(reason: str, remedy: str) -> InputError:
    return InputError(reason, where="fxpar.ops.experts", remedy=remedy)


def _check(hidden: Tensor, indices: Tensor, weights: Tensor, matrices: Sequence[Tensor]) -> None:
    """Refuses what does not fit; sizes of tokens are left to the operators, for a trace keeps them open."""
    ranks = [hidden.dim(), indices.dim(), weights.dim(), *(matrix.dim() for matrix in matrices)]
    if ranks != [2, 2, 2, *(3 for _ in matrices)]:
        raise _unfit(
            f"operands of {ranks} dimensions", "pass hidden [T, h], indices and weights [T, K], matrices [E, n, h]"
        )
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise _unfit(f"indices of type {indices.dtype}", "pass the numbers of experts, as topk gives them")
    if len({matrix.shape[0] for matrix in matrices}) > 1:
        raise _unfit(f"matrices of {[m.shape[0] for m in matrices]} experts", "pass matrices of the same experts")
    if not weights.is_floating_point():
        raise _unfit(f"weights of type {weights.dtype}", "pass the router's weights of the chosen experts")
