"""A parallel module takes over its rank's parts of a model.

Enters: a module without parameters, the author's model, perhaps a `Checkpoint`. Leaves: the module's parameters and
buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpar.checkpoint.initial import Loading, parts
from fxpar.checkpoint.rank_tensors import ModelTensor, PipelineRanks, RankTensors, ShardSpec, named_tensors
from fxpar.checkpoint.safetensors_files import Checkpoint
from fxpar.checkpoint.sharded import Sharded, ShardedParameter
from fxpar.ir.step import is_mixed, main_dtype
from fxpar.runtime.meta_model import attach
from fxpar.runtime.parameters import Elsewhere, MainParameter, WholeParameter

if TYPE_CHECKING:
    from fxpar.runtime.module import ParallelModule


def held_by(module: ParallelModule, model: nn.Module | None = None) -> RankTensors:
    """What a module's rank holds, for those who load and save it.

    Args:
        model: one with the module's names, of which the rank takes its parts; the module itself by default.
    """
    world, tensors = module.world, named_tensors(module if model is None else model)
    tensors = [entry for entry in tensors if entry.first not in module.foreign]
    cut = (module.shape_of, module.layout_of, module.plan.axes, world.coordinates)
    return RankTensors(tensors, module.saved_names, *cut, world.rank, world.size, world.agreement.agree, module.line)


def line_of(module: ParallelModule, model: nn.Module, places: Mapping[str, Collection[int]]) -> PipelineRanks | None:
    """The ranks of the module's pipeline; None without one.

    Args:
        model: the unsplit one.
        places: of the ranks of the pipeline that hold each parameter, by its first name.
    """
    world, dtype = module.world, main_dtype(module.plan)
    if module.plan.pp == 1:
        return None
    elsewhere = []
    for entry in named_tensors(model):
        if entry.first in module.foreign:
            kind = dtype if dtype is not None and entry.tensor.is_floating_point() else entry.tensor.dtype
            meta_tensor = torch.empty(entry.tensor.shape, dtype=kind, device="meta")
            elsewhere.append(ModelTensor(entry.names, nn.Parameter(meta_tensor, requires_grad=False)))
    first = {name: min(holders) for name, holders in places.items() if len(holders) < len(world.line)}
    return PipelineRanks(world.groups["pp"], world.line, world.place, world.device, first, elsewhere)


def adopt(
    module: ParallelModule,
    model: nn.Module,
    skeleton: nn.Module,
    dtype: torch.dtype | None,
    checkpoint: Checkpoint | None,
) -> tuple[Loading, dict[str, Any]]:
    """Gives a module the modules of a model, its parts of the parameters, and the buffers whole; see `parts`.

    Args:
        model: is left as it is.
        skeleton: the model without memory.

    Returns:
        What loading took, and the author's attributes of the module; see `seal`.

    Raises:
        InputError, CheckpointError: see `parts` and `attach`.
    """
    loading = Loading()
    holdings = held_by(module, model)
    local_parts = parts(model, holdings, module.plan.seed, module.world.device, dtype, checkpoint, loading)
    taken: dict[int, Any] = {}
    for entry in named_tensors(skeleton):
        name = entry.first
        if name in module.foreign:
            taken[id(entry.tensor)] = Elsewhere(entry.tensor, name, module.world.device)
            continue
        part, place = local_parts[name], _place_of(module, name)
        if entry.is_parameter:
            taken[id(entry.tensor)] = _parameter(part, place, entry.tensor.requires_grad, module)
        else:
            taken[id(entry.tensor)] = part if place is None else Sharded(part, place)
    return loading, attach(module, skeleton, taken, module.world.device)


def _place_of(module: ParallelModule, name: str) -> ShardSpec | None:
    """Where this rank's part of a parameter or buffer lies; None where every rank holds it whole."""
    layout = module.layout_of(name)
    is_cut = any(placement.is_shard for _, placement in layout)
    return ShardSpec(name, torch.Size(module.shape_of(name)), layout, module.world.ranks) if is_cut else None


def _parameter(part: Tensor, place: ShardSpec | None, requires_grad: bool, module: ParallelModule) -> nn.Parameter:
    kind: Any = MainParameter if is_mixed(module.plan) and part.is_floating_point() else nn.Parameter
    if kind is nn.Parameter and module.world.size > 1:
        kind = WholeParameter
    parameter: Any = ShardedParameter(part, place, requires_grad) if place else kind(part, requires_grad)
    return parameter  # type: ignore[no-any-return]
