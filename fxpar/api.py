"""`fxpar.parallelize`: from a model and a plan to this rank's module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.errors import InputError
from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan import Plan
from fxpar.runtime.module import ParallelModule
from fxpar.runtime.world import join

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parallelize(
    model: nn.Module,
    plan: Plan,
    example: Any,
    loss: Callable[[Any, Any], Tensor] | str | None = None,
    passes: Sequence[Pass] = DEFAULT_PASSES,
) -> ParallelModule:
    """Compiles a single-device model into the part that this process runs.

    Args:
        model: any `nn.Module` on the CPU or a device, in the mode (training, evaluation) to compile first. It must hold
            the same weights on every rank; this rank keeps its shards of them, bit for bit.
        plan: how to split; its world size must be the number of processes.
        example: a batch as `train_step` will see it (a mapping, a tuple or a tensor), at least two samples; only its
            structure, types and which sizes are equal matter.
        loss: a callable `(outputs, batch) → scalar` traced with the model, the name of a scalar output, or None for the
            output `loss`, else the only scalar.
        passes: the compiler's passes in order; see `fxpar.passes`.

    Raises:
        InputError: the model, plan, example or world cannot be used; the text names what and the remedy.
        LayoutError, CheckFailed: a static check rejected the program, which is a bug of a pass.
    """
    if isinstance(model, ParallelModule):
        raise InputError("the model is parallelised already", where="parallelize", remedy="call it once")
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is no nn.Module", where="parallelize")
    meta = next((n for n, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise InputError(
            "has no memory: models on the meta device can be captured and verified, not yet run",
            where=meta,
            remedy="initialise the model on the CPU",
        )
    if plan.precision != "as_is":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(_DTYPES[plan.precision])
    return ParallelModule(model, plan, join(plan), example, loss, passes)
