"""The experts of transformers' models, as operators on routed rows while a model is captured.

Enters: a trace. Leaves: a context in which each module of experts computes by `fxpar.ops.permute`; its author's loop
over experts depends on the routing and cannot be traced. Nothing is changed behind the context, and where transformers
is not loaded nothing at all.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor, nn

from fxpar.capture.expert_modules import ExpertModule, computed_as_read
from fxpar.capture.patches import grouped_products
from fxpar.ops.combine import moe_combine
from fxpar.ops.gates import halves, swiglu_rows
from fxpar.ops.grouped import expand_by_expert, group_sizes, grouped_linear
from fxpar.ops.permute import moe_permute, sort_by_expert

_INTERFACE = "transformers.integrations.moe"
# What torch's two grouped products call their operands.
_OPERANDS = (("mat_a", "self"), ("mat_b", "mat2"))


@contextlib.contextmanager
def routed_experts(named: Sequence[ExpertModule] = ()) -> Iterator[None]:
    """While active, modules that transformers dispatches by its `ExpertsInterface` run as `_experts`.

    So do torch's grouped products of rows as `grouped_linear`, which is traced in every type.

    Args:
        named: modules that the plan names, which run by their readings.
    """
    interface = getattr(sys.modules.get(_INTERFACE), "ExpertsInterface", None)
    with contextlib.ExitStack() as stack:
        if interface is not None:
            stack.enter_context(mock.patch.object(interface, "get_interface", _instead))
        stack.enter_context(grouped_products(_grouped))
        stack.enter_context(computed_as_read(named))
        yield


def _grouped(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A grouped product: of rows [M, i] with the matrices [E, i, o] of their groups, which end at `offs`."""
    arguments = dict(zip(("mat_a", "mat_b", "offs", "bias", "out_dtype"), args, strict=False)) | kwargs
    # `_grouped_mm` calls its operands otherwise.
    rows, matrices = (arguments.pop(name, arguments.pop(other, None)) for name, other in _OPERANDS)
    offs, bias, dtype = (arguments.pop(name, None) for name in ("offs", "bias", "out_dtype"))
    is_ours = isinstance(rows, Tensor) and isinstance(matrices, Tensor) and isinstance(offs, Tensor)
    if not is_ours or rows.dim() != 2 or matrices.dim() != 3 or bias is not None or arguments:
        return original(*args, **kwargs)
    product: Tensor = grouped_linear(rows, matrices, group_sizes(offs), True)
    return product if dtype is None else product.to(dtype)


def _instead(self: Any, implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
    return _experts


def _experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What `grouped_mm_experts_forward` of transformers computes, whose conventions these are.

    Shapes: hidden [tokens, h], indices and weights [tokens, k]; result [tokens, h].
    """
    module: Any = self
    k = top_k_index.shape[-1]
    order, counts = sort_by_expert(top_k_index, module.num_experts)
    rows = moe_permute(hidden_states, order, k)
    entry = "gate_up_proj" if module.has_gate else "up_proj"
    states = _product(module, entry, rows, counts)
    if module.has_gate:
        states = swiglu_rows(halves(states), counts) if _is_swiglu(module) else module._apply_gate(states)
    else:
        states = module.act_fn(states)
    states = _product(module, "down_proj", states, counts)
    if getattr(module, "has_post_expert_norm", False):
        states = module.post_expert_norm(states)
    return moe_combine(states, top_k_weights, order, hidden_states.dtype)  # type: ignore[no-any-return]


def _is_swiglu(module: Any) -> bool:
    """Whether a module's gate is transformers' own, with SiLU."""
    plain = getattr(sys.modules[_INTERFACE], "_default_apply_gate", None)
    silu = (nn.SiLU, getattr(sys.modules["transformers.activations"], "SiLUActivation", nn.SiLU))
    return type(module)._apply_gate is plain and isinstance(module.act_fn, silu)


def _product(module: Any, name: str, rows: Tensor, counts: Tensor) -> Tensor:
    product: Tensor = grouped_linear(rows, getattr(module, name), counts, module.is_transposed)
    if module.has_bias:
        product = product + expand_by_expert(getattr(module, f"{name}_bias"), counts, rows.shape[0])
    return product
