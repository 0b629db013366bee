"""Whole state dicts and gradient norms of a parallel module.

Enters: a `ParallelModule`. Leaves: tensors under the author's names in their original shapes, and the norm in which
each logical parameter counts once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.errors import CheckpointError
from fxpar.layout import Layout
from fxpar.shards import counted, local_block, whole

if TYPE_CHECKING:
    from fxpar.runtime.module import ParallelModule

_SAMPLES = 1024


def gather_parameter(module: ParallelModule, value: Tensor, layout: Layout) -> Tensor:
    """The whole tensor from the ranks' shards, on every rank."""
    for axis, placement in layout:
        if placement.is_shard:
            group = module.world.process_groups[axis]
            blocks = [torch.empty_like(value) for _ in range(module.plan.axes[axis])]
            dist.all_gather(blocks, value.contiguous(), group=group)
            value = whole(blocks, placement)
    return value


def full_state_dict(module: ParallelModule) -> dict[str, Tensor]:
    """What `state_dict()` of the unsplit model would hold, on the CPU, the same on every rank. A collective call.

    Tensors share no memory with the module's; tied names share one tensor.

    Raises:
        CheckpointError: the unsplit model's state dict holds something else than parameters and buffers.
    """
    tensors = _all_tensors(module)
    found: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}
    for name in module.saved_names:
        if name not in tensors:
            raise CheckpointError(
                "is in the model's state dict and is no parameter or buffer",
                where=name,
                remedy="keep extra state and renaming hooks out of the model",
            )
        value = tensors[name]
        if id(value) not in done:
            gathered = gather_parameter(module, value.detach(), module.layout_of(name)).cpu()
            done[id(value)] = gathered.clone() if gathered.data_ptr() == value.data_ptr() else gathered
        found[name] = done[id(value)]
    return found


def load_full_state_dict(module: ParallelModule, state: Mapping[str, Any]) -> None:
    """Loads what `full_state_dict` or the unsplit model's `state_dict` gives; each rank keeps its shards.

    Values are cast to the module's element types. Tied names may be left out if one of them is there.

    Raises:
        CheckpointError: a name is missing or unknown, a tensor has another shape, or tied names have different
            values; nothing is loaded then.
    """
    tensors = _all_tensors(module)
    _check_names(module, state, tensors)
    first: dict[int, str] = {}
    for name, value in state.items():
        shape = module.shape_of(name)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"the type {type(value).__name__}"
            raise CheckpointError(
                f"has {found} and must be a tensor of shape {list(shape)}",
                where=name,
                remedy="load the state dict of a model of the same configuration",
            )
        known = first.setdefault(id(tensors[name]), name)
        if state[known] is not value and not torch.equal(state[known], value):
            raise CheckpointError(
                f"is tied to {known} and has other values", where=name, remedy="leave one of the two names out"
            )
    with torch.no_grad():
        for name in first.values():
            part = local_block(state[name], module.layout_of(name), module.plan.axes, module.world.coordinates)
            tensors[name].copy_(part)


def _check_names(module: ParallelModule, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    unknown = sorted(state.keys() - set(module.saved_names))
    present = {id(tensors[name]) for name in state if name in tensors}
    missing = [name for name in module.saved_names if name not in state and id(tensors[name]) not in present]
    if missing or unknown:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has the unknown {_some(unknown)}"] if unknown else []
        raise CheckpointError(" and ".join(parts), where="state dict", remedy="load the model it was saved from")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _all_tensors(module: ParallelModule) -> dict[str, Tensor]:
    return {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }


def clip_grad_norm_(module: ParallelModule, max_norm: float) -> Tensor:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)) and returns the global norm (SPEC section 2.5).

    Each logical element counts once: shards are summed over their axis, of what several ranks hold the first of them
    counts, whole and tied parameters are not summed.
    """
    gradients = [(n, p.grad) for n, p in module.named_parameters() if p.grad is not None]
    device = module.world.device
    total = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    for axis in ("", *module.plan.axes):
        part = torch.zeros_like(total)
        for name, grad in gradients:
            cut = [(a, placement) for a, placement in module.layout_of(name) if placement.is_shard]
            if (cut[0][0] if cut else "") != axis:
                continue
            own = [grad.detach()]
            if cut:
                own = counted(own[0], cut[0][1], module.plan.axes[axis], module.world.coordinates[axis])
            for value in own:
                part += value.to(total.dtype).square().sum()
        if axis:
            dist.all_reduce(part, group=module.world.process_groups[axis])
        total += part
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in gradients:
        grad.mul_(scale.to(grad.dtype))
    return norm


def fingerprints(model: nn.Module) -> dict[str, str]:
    """A digest of each parameter's and buffer's type and of up to 1024 of its elements, evenly spread."""
    found = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
        data = some.view(torch.uint8).numpy().tobytes() if some.numel() else b""
        found[name] = hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + data).hexdigest()
    return found
