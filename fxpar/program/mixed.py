"""Mixed precision: a program in half precision on copies of float32 parameters.

Enters: a plan, or a program and the type of one of its parameters. Leaves: what a module holds for it.

The program is that of the half-precision model. A module holds *main values* in float32, which its optimizer updates,
and a copy of each in the program's type. Gradients of the copies are those of the main values, in float32 from where a
parameter enters the program: sums over ranks and over microbatches are float32.
"""

from __future__ import annotations

import torch

from fxpar.plan.plan import Plan
from fxpar.program.dtypes import PRECISION_DTYPES
from fxpar.program.program import TensorType

MAIN = torch.float32
_MIXED = ("bf16", "fp16")


def main_dtype(plan: Plan) -> torch.dtype | None:
    """Type of the floating parameters that a module holds and saves; None where they keep their own."""
    return MAIN if is_mixed(plan) else PRECISION_DTYPES[plan.precision]


def is_mixed(plan: Plan) -> bool:
    """Whether a module holds main values."""
    return plan.precision in _MIXED


def is_copy(plan: Plan, kind: TensorType) -> bool:
    """Whether what a program takes for a parameter of this type is a copy of main values."""
    return is_mixed(plan) and kind.dtype == PRECISION_DTYPES[plan.precision]


def held_type(plan: Plan, kind: TensorType) -> TensorType:
    """Type of a parameter as a module holds it: of the main values."""
    return TensorType(MAIN, kind.shape) if is_copy(plan, kind) else kind
