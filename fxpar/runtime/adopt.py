"""A parallel module takes over its rank's parts of a model.

Enters: a module without parameters, the author's model, perhaps a `Checkpoint`. Leaves: the module's parameters and
buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpar.program.mixed import is_mixed, main_dtype
from fxpar.runtime.mains import MainParameter
from fxpar.state.checkpoint import Checkpoint
from fxpar.state.held import Held, Line
from fxpar.state.initial import Named, named_tensors
from fxpar.state.parts import Loading, parts
from fxpar.state.place import Place
from fxpar.state.sharded import Sharded
from fxpar.state.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from fxpar.runtime.module import ParallelModule


def held_by(module: ParallelModule, model: nn.Module | None = None) -> Held:
    """What a module's rank holds, for those who load and save it.

    Args:
        model: one with the module's names, of which the rank takes its parts; the module itself by default.
    """
    world, tensors = module.world, named_tensors(module if model is None else model)
    tensors = [entry for entry in tensors if entry.first not in module.foreign]
    cut = (module.shape_of, module.layout_of, module.plan.axes, world.coordinates)
    return Held(tensors, module.saved_names, *cut, world.rank, world.size, world.agreement.agree, module.line)


def line_of(module: ParallelModule, model: nn.Module, places: Mapping[str, Collection[int]]) -> Line | None:
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
            ghost = torch.empty(entry.tensor.shape, dtype=kind, device="meta")
            elsewhere.append(Named(entry.names, nn.Parameter(ghost, requires_grad=False)))
    first = {name: min(own) for name, own in places.items() if len(own) < len(world.line)}
    return Line(world.groups["pp"], world.line, world.place, world.device, first, elsewhere)


def adopt(
    module: ParallelModule, model: nn.Module, dtype: torch.dtype | None, checkpoint: Checkpoint | None
) -> Loading:
    """Gives a module its parts of the model's parameters, and the model's buffers whole; see `parts`.

    Args:
        model: is left as it is.

    Raises:
        InputError, CheckpointError: see `parts`.
    """
    loading = Loading()
    held = held_by(module, model)
    _register(module, model, parts(model, held, module.plan.seed, module.world.device, dtype, checkpoint, loading))
    return loading


def _register(module: ParallelModule, model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Puts the parts under all their names, in the model's order."""
    first = {name: entry.first for entry in named_tensors(model) for name in entry.names}
    parameters: dict[str, nn.Parameter] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        if first[name] in module.foreign:
            module.get_submodule(path).register_parameter(leaf, None)
            continue
        if first[name] not in parameters:
            part, place = found[first[name]], _place_of(module, first[name])
            parameters[first[name]] = _parameter(part, place, value.requires_grad, is_mixed(module.plan))
        module.get_submodule(path).register_parameter(leaf, parameters[first[name]])
    saved = set(module.saved_names)
    buffers: dict[str, Tensor] = {}
    for name, _ in model.named_buffers(remove_duplicate=False):
        part, place = found[first[name]], _place_of(module, first[name])
        buffer = buffers.setdefault(first[name], part if place is None else Sharded(part, place))
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path).register_buffer(leaf, buffer, persistent=name in saved)


def _place_of(module: ParallelModule, name: str) -> Place | None:
    """Where this rank's part of a parameter or buffer lies; None where every rank holds it whole."""
    layout = module.layout_of(name)
    is_cut = any(placement.is_shard for _, placement in layout)
    return Place(name, torch.Size(module.shape_of(name)), layout, module.world.ranks) if is_cut else None


def _parameter(part: Tensor, place: Place | None, requires_grad: bool, has_copy: bool) -> nn.Parameter:
    kind = MainParameter if has_copy and part.is_floating_point() else nn.Parameter
    made: Any = ShardedParameter(part, place, requires_grad) if place else kind(part, requires_grad)
    return made  # type: ignore[no-any-return]
