"""The plan's precision, which a model has before it is captured.

Enters: a model and a plan. Leaves: the model with floating parameters of the plan's type, and what its forward takes in
that type. Buffers keep theirs: rotary frequencies in half precision are wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.plan.plan import Plan
from fxpar.program.dtypes import PRECISION_DTYPES


def cast_parameters(model: nn.Module, plan: Plan) -> None:
    """Casts the model's floating parameters in place."""
    dtype = PRECISION_DTYPES[plan.precision]
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def input_dtype(plan: Plan) -> torch.dtype | None:
    """Returns the type of floating tensors that a forward takes; None where they keep theirs."""
    return PRECISION_DTYPES[plan.precision] if plan.cast_inputs else None


def cast_inputs(arguments: Any, dtype: torch.dtype | None) -> Any:
    """Casts the floating tensors in any nest of arguments, as FSDP2's `cast_forward_inputs` does."""
    if dtype is None:
        return arguments
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, arguments)


@contextlib.contextmanager
def in_precision(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Casts the model's floating parameters for a while; afterwards they hold the very tensors that they held."""
    originals = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        cast_parameters(model, plan)
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data
