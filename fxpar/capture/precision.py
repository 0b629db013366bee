"""The plan's precision, which a model has before it is captured.

Enters: a model and a plan. Leaves: the model with floating parameters of the plan's type. Buffers keep theirs: rotary
frequencies in half precision are wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from fxpar.plan.plan import Plan
from fxpar.program.dtypes import PRECISION_DTYPES


def cast_parameters(model: nn.Module, plan: Plan) -> None:
    """Casts the model's floating parameters in place."""
    dtype = PRECISION_DTYPES[plan.precision]
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def in_precision(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Casts the model's floating parameters for a while; afterwards they hold the very tensors that they held."""
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        cast_parameters(model, plan)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
