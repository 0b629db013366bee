"""Loss scaling over the stages of a pipeline.

Enters: the user's scaler. Leaves: one that all stages follow alike: what one of them finds infinite is so for all, so
that all skip the same steps and have the same scale.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ops.mesh_process_groups import process_group
from fxpar.runtime.world import World


class _Joined:
    """In place of a scaler's `_unscale_grads_`, which torch's own sharded scaler overrides for the same reason.

    Gradients cannot say it by themselves, as parts of cut ones do: an optimizer may have none on some stage.
    """

    def __init__(self, scaler: torch.amp.GradScaler, world: World) -> None:
        self._scaler, self._world = weakref.ref(scaler), world

    def __call__(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[Any, Tensor]:
        scaler: Any = self._scaler()
        local = type(scaler)._unscale_grads_(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        total = torch.zeros((), dtype=torch.float32, device=self._world.device)
        for value in local.values():
            total = total.maximum(value.to(total.device))
        dist.all_reduce(total, dist.ReduceOp.MAX, process_group(self._world.groups["pp"]))
        return {total.device: total}


def join(scaler: torch.amp.GradScaler, world: World) -> None:
    """Makes a scaler that of all stages."""
    if not scaler.is_enabled():
        return
    untyped: Any = scaler
    if not isinstance(untyped.__dict__.get("_unscale_grads_"), _Joined):
        untyped._unscale_grads_ = _Joined(scaler, world)
    # The last stage alone scales a loss, and a scaler has no scale before it has scaled something.
    scaler.scale(torch.ones((), device=world.device))
