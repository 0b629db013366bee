"""Whole state dicts and gradient norms of a parallel module.

Enters: a `ParallelModule`. Leaves: tensors under the author's names in their original shapes, and the norm in which
each logical parameter counts once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.errors import CheckpointError
from fxpar.layout import Layout
from fxpar.shards import counted, local_block, whole
from fxpar.weights import named_tensors

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
        check_saved(name, tensors)
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
    groups = [entry.names for entry in named_tensors(module)]
    check_names(state, module.saved_names, groups, "state dict", "load the model it was saved from")
    first: dict[int, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"has the type {type(value).__name__} and must be a tensor of shape {list(module.shape_of(name))}",
                where=name,
                remedy="load the state dict of a model of the same configuration",
            )
        check_shape(name, tuple(value.shape), module.shape_of(name))
        known = first.setdefault(id(tensors[name]), name)
        if state[known] is not value and not torch.equal(state[known], value):
            raise CheckpointError(
                f"is tied to {known} and has other values", where=name, remedy="leave one of the two names out"
            )
    with torch.no_grad():
        for name in first.values():
            part = local_block(state[name], module.layout_of(name), module.plan.axes, module.world.coordinates)
            tensors[name].copy_(part)


def check_saved(name: str, tensors: Collection[str]) -> None:
    """Checks a name that the unsplit model saves.

    Raises:
        CheckpointError: it is no tensor's.
    """
    if name not in tensors:
        raise CheckpointError(
            "is in the model's state dict and is no parameter or buffer",
            where=name,
            remedy="keep extra state and renaming hooks out of the model",
        )


def check_names(
    given: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]], where: str, remedy: str
) -> None:
    """Checks the names of what is to be loaded.

    Args:
        saved: the names that the model saves.
        groups: all names of each tensor of the model; one of them is enough.

    Raises:
        CheckpointError: a name is missing or unknown.
    """
    missing, unknown = _misfits(given, saved, groups)
    if missing or unknown:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has the unknown {_some(unknown)}"] if unknown else []
        raise CheckpointError(" and ".join(parts), where=where, remedy=remedy)


def names_fit(given: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]]) -> bool:
    """Whether `check_names` takes them."""
    return not any(_misfits(given, saved, groups))


def _misfits(
    given: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]]
) -> tuple[list[str], list[str]]:
    known = set(given)
    present = {name for names in groups if not known.isdisjoint(names) for name in names} | known
    return [name for name in saved if name not in present], sorted(known - set(saved))


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Checks the whole shape of what is to be loaded.

    Raises:
        CheckpointError: it is another one.
    """
    if found != wanted:
        raise CheckpointError(
            f"has shape {list(found)} and must be a tensor of shape {list(wanted)}",
            where=name,
            remedy="load the state dict of a model of the same configuration",
        )


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
    """A digest of each parameter's and buffer's type and of up to 1024 of its elements, evenly spread.

    Of meta tensors the type and shape alone: their values follow from the plan's seed.
    """
    found = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            found[name] = f"meta {value.dtype}{tuple(value.shape)}"
            continue
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
        data = some.view(torch.uint8).numpy().tobytes() if some.numel() else b""
        found[name] = hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + data).hexdigest()
    return found
