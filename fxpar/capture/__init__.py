"""From a module and a batch to a program.

Enters: an unmodified `nn.Module` (on any device, `meta` too), an example batch and a plan. Leaves: the `Program` over
global shapes and the `CallSpec` of its calls. Nothing is computed and no weight is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxpar.capture.convert import CallSpec, SizeError, convert
from fxpar.capture.guards import check_samples
from fxpar.capture.trace import arguments, trace
from fxpar.collector import without_collections
from fxpar.plan import Plan
from fxpar.program import Program

__all__ = ["CallSpec", "Captured", "arguments", "capture", "check_samples"]


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        program: one device's program over global shapes.
        spec: how a call maps to the program's inputs and outputs.
        how: `export`, or `dynamo` where export failed.
        loss: the loss callable that was traced with the model, if any.
    """

    program: Program
    spec: CallSpec
    how: str
    loss: Callable[..., Any] | None


def capture(
    model: nn.Module, batch: Any, plan: Plan | None = None, loss: Callable[..., Any] | str | None = None
) -> Captured:
    """Captures a model in its current mode (`train()` or `eval()`).

    Args:
        model: the module as its author wrote it.
        batch: an example: a mapping (keyword arguments), a tuple (positional) or a tensor. Of one sample the program
            is for one sample alone (see `check_samples`).
        plan: stored in the program; default `Plan()`.
        loss: a callable `(outputs, batch) → scalar`, the name of a scalar output, or None: the output `loss`, else
            the only scalar. An empty name asks for none.

    Raises:
        CaptureError: the model cannot be captured with the same values and gradients; says where and what to do.
    """
    with without_collections():
        return _capture(model, batch, plan or Plan(), loss)


def _capture(model: nn.Module, batch: Any, plan: Plan, loss: Callable[..., Any] | str | None) -> Captured:
    function = loss if callable(loss) else None
    name = loss if isinstance(loss, str) else None
    for symbolic in (None, 2, 1, 0):
        traced = trace(model, batch, function, symbolic)
        try:
            program, spec = convert(traced, model, plan, name)
        except SizeError:
            if symbolic == 0:
                raise
            continue
        break
    return Captured(program, spec, traced.how, function)
