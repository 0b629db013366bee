"""Whole state dicts and gradient norms of a parallel module.

Enters: a `ParallelModule`. Leaves: tensors under the author's names in their original shapes, and the norm in which each
logical parameter counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import CheckpointError
from fxpar.layout import Layout
from fxpar.shards import local_block, whole

if TYPE_CHECKING:
    from fxpar.runtime.module import ParallelModule


def gather_parameter(module: ParallelModule, value: Tensor, layout: Layout) -> Tensor:
    """The whole tensor from the ranks' shards, on every rank."""
    for axis, placement in layout:
        if placement.is_shard:
            group = module.world.process_group(axis)
            blocks = [torch.empty_like(value) for _ in range(module.plan.axes[axis])]
            dist.all_gather(blocks, value.contiguous(), group=group)
            value = whole(blocks, placement)
    return value


def full_state_dict(module: ParallelModule) -> dict[str, Tensor]:
    """What `state_dict()` of the unsplit model would hold, on the CPU, the same on every rank. A collective call."""
    tensors = _all_tensors(module)
    found: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}
    for name in module._saved_names:
        value = tensors[name]
        if id(value) not in done:
            done[id(value)] = gather_parameter(module, value.detach(), module._layout(name)).cpu()
        found[name] = done[id(value)]
    return found


def load_full_state_dict(module: ParallelModule, state: Mapping[str, Tensor]) -> None:
    """Loads what `full_state_dict` or the unsplit model's `state_dict` gives; each rank keeps its shards.

    Tied names may be left out if one of them is there.

    Raises:
        CheckpointError: a name is missing or unknown, or a tensor has another shape; nothing is loaded then.
    """
    tensors = _all_tensors(module)
    unknown = sorted(state.keys() - set(module._saved_names))
    present = {id(tensors[name]) for name in state if name in tensors}
    missing = [name for name in module._saved_names if name not in state and id(tensors[name]) not in present]
    if missing or unknown:
        parts = [f"lacks {', '.join(missing[:5])}"] if missing else []
        parts += [f"has the unknown {', '.join(unknown[:5])}"] if unknown else []
        raise CheckpointError(" and ".join(parts), where="state dict", remedy="load the model it was saved from")
    for name, value in state.items():
        kind = module._shapes.get(name)
        shape = tuple(kind.shape) if kind is not None else tuple(tensors[name].shape)
        if name in module._shapes and tuple(value.shape) != shape:
            raise CheckpointError(f"has shape {list(value.shape)} and must have {list(shape)}", where=name)
    with torch.no_grad():
        for name, value in state.items():
            part = local_block(value, module._layout(name), module.plan.axes, module.world.coordinates)
            tensors[name].copy_(part)


def _all_tensors(module: ParallelModule) -> dict[str, Tensor]:
    return {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }


def clip_grad_norm_(module: ParallelModule, max_norm: float) -> Tensor:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)) and returns the global norm (SPEC section 2.5).

    Each logical parameter counts once: shards are summed over their axis, whole and tied parameters are not.
    """
    gradients = [(n, p.grad) for n, p in module.named_parameters() if p.grad is not None]
    device = module.world.device
    total = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    for axis in ("", *module.plan.axes):
        part = torch.zeros_like(total)
        for name, grad in gradients:
            cut = [a for a, placement in module._layout(name) if placement.is_shard]
            if (cut[0] if cut else "") == axis:
                part += grad.detach().to(total.dtype).square().sum()
        if axis:
            dist.all_reduce(part, group=module.world.process_group(axis))
        total += part
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in gradients:
        grad.mul_(scale.to(grad.dtype))
    return norm
