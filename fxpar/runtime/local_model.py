"""The state of a parallel module: how its weights and its training are saved and loaded, under the author's names.

Enters: a module's part. Leaves: methods that all ranks call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxpar.checkpoint.initial import Loading, load, parts
from fxpar.checkpoint.rank_tensors import PipelineRanks, RankTensors
from fxpar.checkpoint.safetensors_files import Checkpoint
from fxpar.checkpoint.state_dicts import (
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    save_checkpoint,
    sharded_state_dict,
)
from fxpar.checkpoint.training_saves import TrainingObjects, TrainingProgress, resume_training, save_training
from fxpar.errors import InputError, shown
from fxpar.ir.step import is_mixed, main_dtype
from fxpar.layout.layout import Layout
from fxpar.pipeline.compiler.builtin_schedules import own_stages
from fxpar.plan.plan import Plan
from fxpar.runtime.meta_model import attach, seal
from fxpar.runtime.parameters import Elsewhere, MainParameter, WholeParameter
from fxpar.runtime.programs import Programs
from fxpar.runtime.random_state import RandomState
from fxpar.runtime.rank_consensus import Agreement, together_at_once
from fxpar.runtime.refusals import Root, Settings
from fxpar.runtime.shard_spec import ModelTensor, ShardSpec, named_tensors
from fxpar.runtime.sharded import Sharded, ShardedParameter
from fxpar.runtime.sharded_ops import part_of
from fxpar.runtime.world import World


class Stateful(Root):
    """Holds this rank's part of a model: where it lies, and how it is saved and loaded."""

    line: PipelineRanks | None
    loading: Loading
    _programs: Programs

    def __init__(self, model: nn.Module, plan: Plan, world: World) -> None:
        super().__init__()
        self.plan, self.world = plan, world
        self.saved_names = list(model.state_dict().keys())
        self._random = RandomState(plan.seed, world.device)
        self._shapes = {name: tuple(entry.tensor.shape) for entry in named_tensors(model) for name in entry.names}

    def _adopt(self, model: nn.Module, checkpoint: Checkpoint | None) -> dict[str, Any]:
        """Takes over this rank's part of a model, of which the first program is there.

        Returns:
            The author's attributes of the module, for `_seal`.
        """
        with torch.device("cpu"):  # and not that of a context in which the model was built
            self.line = line_of(self, model, self._programs.places)
            skeleton = self._programs.skeleton
            self.loading, settings = adopt(self, model, skeleton, main_dtype(self.plan), checkpoint)
        self._programs.follow(self)
        Optimizers(model, self.world.agreement).watch(self)
        return settings

    def _seal(self, settings: Mapping[str, Any]) -> None:
        """Refuses from now on what no program would see; it has all attributes of ours, and `settings` of the author.

        What the author's modules hold in configurations and lists is compared at each call.
        """
        self._settings = Settings(self, settings)
        seal(self, settings, self.world.device)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Returns the layout of each parameter, buffer and constant by its first name."""
        return self._programs.layouts

    @property
    def foreign(self) -> frozenset[str]:
        """Returns the first names of the parameters that only other ranks of the pipeline hold."""
        return self._programs.foreign

    @property
    def stages(self) -> tuple[int, ...]:
        """Returns the pipeline's stages that this rank holds, in their order; empty without a pipeline."""
        return own_stages(self.plan, self.world.place)

    def layout_of(self, name: str) -> Layout:
        """Returns the layout of a parameter or buffer under any of its names; empty if no program uses it."""
        return self.layouts.get(self._programs.aliases.get(name, name), Layout())

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the whole shape of a parameter or buffer of the unsplit model.

        Raises:
            InputError: the model has no parameter or buffer of this name.
        """
        if name not in self._shapes:
            raise InputError("names no parameter or buffer", where=shown(name), remedy="take one of saved_names")
        return self._shapes[name]

    def _held(self) -> RankTensors:
        return held_by(self)

    @property
    def step(self) -> int:
        """Returns how many calls have drawn random bits. Set it to continue the masks of a resumed run."""
        return self._random.step

    @step.setter
    def step(self, value: int) -> None:
        self._random.step = value

    @together_at_once
    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the state dict of the unsplit model, on the CPU of every rank. All ranks must call it."""
        return full_state_dict(self._held())

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the unsplit model's state dict, of which each rank keeps its shards. Tied names may be left out.

        Raises:
            CheckpointError: a name is missing or unknown, or a shape differs; nothing is loaded then.
        """
        load_full_state_dict(self._held(), state)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Returns this rank's part for `torch.distributed.checkpoint`, which saves it, or loads into it in place.

        Keys are the author's names. Tensors that are cut have the whole's shape and are DTensors; tied names share one.

        Raises:
            InputError: it got arguments, as from a module around this one.
        """
        if args or kwargs:
            raise InputError(
                "is made for torch.distributed.checkpoint alone and takes no arguments",
                where="state_dict()",
                remedy="save this module by itself, not as a part of another",
            )
        return sharded_state_dict(self._held())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict of a module of the same plan, or whole tensors, of which each rank takes its parts.

        Raises:
            CheckpointError: a name is missing or unknown, or a tensor is a different part; nothing is loaded then.
            InputError: `assign` is true.
        """
        if assign:
            raise InputError(
                "assign=True would exchange the memory that programs run on",
                where="load_state_dict()",
                remedy="leave it out: values are copied",
            )
        return load_sharded_state_dict(self._held(), state_dict, strict)

    @together_at_once
    def save_checkpoint(self, folder: str | Path, shard_size: int | str = "5GB") -> None:
        """Writes safetensors under the author's names, for transformers' `from_pretrained` and for `load_checkpoint`.

        Rank 0 writes, and holds the tensors of one file at most. For a model of transformers it also writes the
        configuration. All ranks must call it.

        Args:
            folder: where to write; it is made if it does not exist.
            shard_size: the most bytes of tensors in a file, such as "500MB". A larger tensor has a file of its own.

        Raises:
            CheckpointError: the folder already holds a checkpoint, or cannot be written.
            InputError: `shard_size` is not a size.
        """
        save_checkpoint(self._held(), self._programs.skeleton, folder, shard_size)

    @together_at_once
    def load_checkpoint(self, checkpoint: str | Path | Checkpoint) -> None:
        """Loads safetensors, of which each rank reads its parts. Tied names may be left out. All ranks must call it.

        Args:
            checkpoint: a file, an index, a folder with either, or a `fxpar.Checkpoint`.

        Raises:
            CheckpointError: it cannot be read, or its names or shapes are not the model's; nothing is loaded then.
        """
        load(self._held(), checkpoint)

    @together_at_once
    def save_training(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        position: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        keep: int = 2,
        shard_size: int | str = "5GB",
    ) -> Path:
        """Saves, between two steps, all that `resume_training` needs to continue as if nothing had happened.

        Weights, optimizer, scheduler, the step of the random bits, the position and the scaler go to a new folder in
        `folder`, as JSON and safetensors under the author's names. Every rank writes its parts. If a save is killed,
        the earlier ones stay intact. All ranks must call it, with one folder that all of them see.

        Args:
            position: where in the data the training is, made of numbers, strings, lists and dicts.
            keep: how many saves stay in the folder.
            shard_size: see `save_checkpoint`.

        Returns:
            The folder of this save, from which `from_pretrained` and `load_checkpoint` read the weights.

        Raises:
            CheckpointError: a state has neither the shape of its parameter nor one element, or JSON cannot hold it; or
                the folder cannot be written, or is not the same on all ranks.
            InputError: an option or object is of the wrong type, or trainings differ between ranks.
        """
        objects, progress = TrainingObjects(optimizer, scheduler, scaler), TrainingProgress(self.step, position)
        model = (self._programs.skeleton, self.plan)
        return save_training(self._held(), *model, folder, objects, progress, keep, shard_size)

    @together_at_once
    def resume_training(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Loads the last save in a folder, or the save that `folder` itself is, under any plan of the same seed.

        Each rank reads its parts. All ranks must call it.

        Args:
            optimizer: of the class and with the parameter groups that were saved; its state is replaced.
            scheduler: of the class that was saved; its state is replaced.
            scaler: of the class that was saved; its state is replaced.

        Returns:
            The position that was saved.

        Raises:
            CheckpointError: there is no save, it is damaged, or what was saved does not fit; nothing is loaded then.
            InputError: an object is of the wrong type, or ranks have different saves.
        """
        progress = resume_training(self._held(), folder, TrainingObjects(optimizer, scheduler, scaler), self.plan.seed)
        self.step = progress.step
        return progress.position


# Optimizers of a module's parameters: state that torch has distributed becomes parts.


class Optimizers:
    """What is done before an optimizer's first step and after it has loaded state; and which step never ended.

    Args:
        model: the unsplit one; an optimizer of its parameters would train nothing.
        agreement: is told of the steps that begin and end on this rank.
    """

    def __init__(self, model: nn.Module, agreement: Agreement) -> None:
        self._agreement = agreement
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._owner: Callable[[], nn.Module | None] = lambda: None
        self._steps_own: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._originals = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}

    def watch(self, owner: Any) -> None:
        """Sees all optimizers for as long as `owner` lives."""
        self._owner = weakref.ref(owner)
        for handle in (register_optimizer_step_pre_hook(self._begins), register_optimizer_step_post_hook(self._ends)):
            remove: Callable[[], None] = handle.remove
            weakref.finalize(owner, remove)

    def _begins(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        self(optimizer)
        # A closure makes calls of its own within the step.
        if len(arguments) <= 1 and not options and self._is_own(optimizer):
            self._agreement.stepping = type(optimizer).__name__

    def _ends(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self._is_own(optimizer):
            self._agreement.stepping = ""

    def _is_own(self, optimizer: Optimizer) -> bool:
        """Whether it steps a parameter of the module."""
        if optimizer not in self._steps_own:
            owner = self._owner()
            owned = set() if owner is None else {id(parameter) for parameter in owner.parameters()}
            stepped = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            self._steps_own[optimizer] = any(parameter in owned for parameter in stepped)
        return self._steps_own[optimizer]

    def __call__(self, optimizer: Optimizer) -> None:
        """Prepares an optimizer, once.

        Raises:
            InputError: it holds the parameters of the unsplit model, and they have no gradients.
        """
        if optimizer in self._known:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(isinstance(parameter, ShardedParameter) for parameter in parameters):
            self._known.add(optimizer)
            _keep_parts(optimizer)
            optimizer.register_load_state_dict_post_hook(_keep_parts)
        elif parameters and all(self._is_original(p) and p.grad is None for p in parameters):
            raise InputError(
                "holds the parameters of the model that was split, which nothing trains",
                where=type(optimizer).__name__,
                remedy="make the optimizer of parallelize(…).parameters()",
            )

    def _is_original(self, parameter: Tensor) -> bool:
        known = self._originals.get(id(parameter))
        return known is not None and known() is parameter


def _keep_parts(optimizer: Optimizer) -> None:
    """Takes a parameter's state that torch has distributed as its own parts."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, ShardedParameter):
            for key, value in state.items():
                if isinstance(value, DTensor) and not isinstance(value, Sharded):
                    state[key] = Sharded(part_of(value, parameter.place), parameter.place)


# A parallel module takes over its rank's parts of a model.


def held_by(module: Stateful, model: nn.Module | None = None) -> RankTensors:
    """What a module's rank holds, for those who load and save it.

    Args:
        model: one with the module's names, of which the rank takes its parts; the module itself by default.
    """
    world, tensors = module.world, named_tensors(module if model is None else model)
    tensors = [entry for entry in tensors if entry.first not in module.foreign]
    cut = (module.shape_of, module.layout_of, module.plan.axes, world.coordinates)
    return RankTensors(tensors, module.saved_names, *cut, world.rank, world.size, world.agreement.agree, module.line)


def line_of(module: Stateful, model: nn.Module, places: Mapping[str, Collection[int]]) -> PipelineRanks | None:
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
    module: Stateful,
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


def _place_of(module: Stateful, name: str) -> ShardSpec | None:
    """Where this rank's part of a parameter or buffer lies; None where every rank holds it whole."""
    layout = module.layout_of(name)
    is_cut = any(placement.is_shard for _, placement in layout)
    return ShardSpec(name, torch.Size(module.shape_of(name)), layout, module.world.ranks) if is_cut else None


def _parameter(part: Tensor, place: ShardSpec | None, requires_grad: bool, module: Stateful) -> nn.Parameter:
    kind: Any = MainParameter if is_mixed(module.plan) and part.is_floating_point() else nn.Parameter
    if kind is nn.Parameter and module.world.size > 1:
        kind = WholeParameter
    parameter: Any = ShardedParameter(part, place, requires_grad) if place else kind(part, requires_grad)
    return parameter  # type: ignore[no-any-return]
