"""The parallel module with all its methods: it runs, and it is saved and loaded under the author's names.

Enters: a module of one rank. Leaves: methods that all ranks call; and the weights with which it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxpar.checkpoint.adapters import adapter_of, save_adapter, save_merged
from fxpar.checkpoint.async_save import AsyncSaver
from fxpar.checkpoint.initial import Loading, load, parts
from fxpar.checkpoint.model_names import open_for
from fxpar.checkpoint.safetensors_files import Checkpoint, bytes_of, writable
from fxpar.checkpoint.state_dicts import (
    PipelineRanks,
    RankTensors,
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    save_checkpoint,
    sharded_state_dict,
)
from fxpar.checkpoint.training_saves import (
    TrainingObjects,
    TrainingProgress,
    begin_save,
    resume_training,
    write_together,
)
from fxpar.errors import InputError, shown
from fxpar.ir.step import main_dtype
from fxpar.runtime.module import RankModule
from fxpar.runtime.rank_consensus import together_at_once
from fxpar.runtime.shard_spec import ModelTensor, named_tensors


class ParallelModule(RankModule):
    """Holds and runs one rank's part of a model. `fxpar.parallelize` returns it.

    The module and its submodules are also instances of the author's classes. `isinstance`, containers, attributes and
    methods work as the author wrote them, unless this class has one of that name. Methods give the same results as on
    the model if they look at modules, names, shapes and modes, or treat each element independently. Running a part of
    the model raises an error. So does changing what no program would see, drawing random numbers into weights, and
    reading values that this rank does not hold.

    Parameters have the author's names and the shapes of the whole; the rank holds its shards of them. With a pipeline,
    `parameters()` returns those of this rank's stages. A parameter of another stage, such as `model.norm.weight`, has a
    shape and no values.

    Programs are compiled on first use: for each mode of the modules (training, evaluation), each structure of the
    batch, and sizes for which the model takes other branches. Sizes of one, such as a batch of one sample, have
    separate programs.

    Example:
        ```python
        loss = model.train_step(batch)
        model.clip_grad_norm_(1.0)
        weights = model.full_state_dict()  # the author's names and shapes
        model.save_checkpoint("out")
        ```

    Attributes:
        plan: how the model is split.
        world: the processes.
        saved_names: the keys of the unsplit model's state dict, in order.
        line: the ranks of its pipeline; None without one.
        loading: the memory that placing this rank's weights took.
        saver: writes its asynchronous saves.
    """

    line: PipelineRanks | None
    loading: Loading
    saver: AsyncSaver

    def _rank_tensors(self, model: nn.Module | None = None) -> RankTensors:
        """Returns what this rank holds.

        Args:
            model: one with the module's names, of which the rank takes its parts; the module itself by default.
        """
        world = self.world
        tensors = [e for e in named_tensors(self if model is None else model) if e.first not in self.foreign]
        cut = (self.shape_of, self.layout_of, self.plan.axes, world.coordinates)
        return RankTensors(tensors, self.saved_names, *cut, world.rank, world.size, world.agreement.agree, self.line)

    @together_at_once
    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the state dict of the unsplit model, on the CPU of every rank. All ranks must call it."""
        return full_state_dict(self._rank_tensors())

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the unsplit model's state dict, of which each rank keeps its shards. Tied names may be left out.

        Raises:
            CheckpointError: a name is missing or unknown, or a shape differs; nothing is loaded then.
        """
        load_full_state_dict(self._rank_tensors(), state)

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
        return sharded_state_dict(self._rank_tensors())

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
        return load_sharded_state_dict(self._rank_tensors(), state_dict, strict)

    @together_at_once
    def save_checkpoint(
        self, folder: str | Path, shard_size: int | str = "5GB", merged: bool = False, tokenizer: Any = None
    ) -> None:
        """Writes safetensors under the author's names, for transformers' `from_pretrained` and for `load_checkpoint`.

        Rank 0 writes, and holds the tensors of one file at most. For a model of transformers it also writes the
        configuration. With an adapter of peft it writes that alone, for `peft.PeftModel.from_pretrained`. All ranks
        must call it.

        Args:
            folder: where to write; it is made if it does not exist.
            shard_size: the most bytes of tensors in a file, such as "500MB". A larger tensor has a file of its own, and
                an adapter is one file.
            merged: write the base model with its adapter merged in, under the names of the base.
            tokenizer: one of transformers, or a processor, whose files are written too.

        Raises:
            CheckpointError: the folder already holds a checkpoint, or cannot be written.
            InputError: `shard_size` is not a size, there is no adapter that can be merged, or `tokenizer` has no
                `save_pretrained`.
        """
        model, limit = self._programs.skeleton, bytes_of(shard_size)
        if type(merged) is not bool or (merged and not adapter_of(model)):
            reason = "the model has no adapter of peft" if merged is True else f"must be a bool, got {shown(merged)}"
            raise InputError(reason, where=f"merged={shown(merged)}", remedy="leave it out: the whole model is saved")
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            reason, remedy = f"a {type(tokenizer).__name__} has no save_pretrained", "pass a tokenizer of transformers"
            raise InputError(reason, where="tokenizer", remedy=remedy)
        if merged:
            save_merged(self._rank_tensors(), model, folder, limit)
        elif adapter_of(model):
            save_adapter(self._rank_tensors(), model, folder)
        else:
            save_checkpoint(self._rank_tensors(), model, folder, limit)
        if tokenizer is not None and self.world.rank == 0:
            with writable(Path(folder)):
                tokenizer.save_pretrained(folder)
        self.world.agreement.agree({}, "")  # all files are there

    def save_pretrained(self, save_directory: str | Path, max_shard_size: int | str = "5GB", **options: Any) -> None:
        """Writes what `save_checkpoint` writes, under the name and arguments of transformers. All ranks must call it.

        Args:
            save_directory: where to write.
            max_shard_size: the most bytes of tensors in a file.
            options: none; transformers has others.

        Raises:
            InputError: another option.
            CheckpointError: as of `save_checkpoint`.
        """
        if options:
            where, remedy = (
                f"save_pretrained({', '.join(options)}=…)",
                "leave it out: safetensors are written by rank 0",
            )
            raise InputError("is not supported for a split model", where=where, remedy=remedy)
        self.save_checkpoint(save_directory, max_shard_size)

    @together_at_once
    def load_checkpoint(self, checkpoint: str | Path | Checkpoint) -> None:
        """Loads safetensors, of which each rank reads its parts. Tied names may be left out. All ranks must call it.

        Args:
            checkpoint: a file, an index, a folder with either, or a `fxpar.Checkpoint`. If the model has an adapter of
                peft, it may be that of the adapter or of the base model; the rest stays as it is then.

        Raises:
            CheckpointError: it cannot be read, or its names or shapes are not the model's; nothing is loaded then.
        """
        load(self._rank_tensors(), open_for(self._programs.skeleton, checkpoint, self.saved_names))

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
        async_save: bool = False,
    ) -> Path:
        """Saves, between two steps, all that `resume_training` needs to continue as if nothing had happened.

        Weights, optimizer, scheduler, the step of the random bits, the position and the scaler go to a new folder in
        `folder`, as JSON and safetensors under the author's names. Every rank writes its parts. If a save is killed,
        the earlier ones stay intact. All ranks must call it, with one folder that all of them see.

        Args:
            position: where in the data the training is, made of numbers, strings, lists and dicts. If it is an integer,
                or a dict with the integer `step`, the folder's name ends with it.
            keep: how many saves stay in the folder.
            shard_size: see `save_checkpoint`.
            async_save: copy to memory of the host and return: a thread writes while the training goes on. The save
                counts when all ranks have written; `wait_for_save` waits for that, as the next save does.

        Returns:
            The folder of this save, from which `from_pretrained` and `load_checkpoint` read the weights.

        Raises:
            CheckpointError: a state has neither the shape of its parameter nor one element, or JSON cannot hold it; or
                the folder cannot be written, or is not the same on all ranks.
            InputError: an option or object is of the wrong type, or trainings differ between ranks.
        """
        agree = self.world.agreement.agree
        self.saver.wait(agree)
        if type(async_save) is not bool:
            remedy = "pass True or False"
            raise InputError(f"must be a bool, got {shown(async_save)}", where="async_save", remedy=remedy)
        agree({"async_save": str(async_save)}, "pass the same on all ranks")
        objects, progress = TrainingObjects(optimizer, scheduler, scaler), TrainingProgress(self.step, position)
        model = (self._programs.skeleton, self.plan)
        save = begin_save(self._rank_tensors(), *model, folder, objects, progress, keep, shard_size)
        if async_save:
            self.saver.start(save)
        else:
            write_together(save, agree)
        return save.path

    @together_at_once
    def wait_for_save(self) -> Path | None:
        """Waits until the asynchronous save that is under way counts. All ranks must call it.

        Returns:
            Its folder; None where no save is under way.

        Raises:
            CheckpointError: it could not be written. The saves before it are there.
        """
        return self.saver.wait(self.world.agreement.agree)

    @together_at_once
    def resume_training(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        missing: Literal["raise", "start"] = "raise",
    ) -> Any:
        """Loads the last save in a folder, or the save that `folder` itself is, under any plan of the same seed.

        Each rank reads its parts. All ranks must call it.

        Args:
            optimizer: of the class and with the parameter groups that were saved; its state is replaced.
            scheduler: of the class that was saved; its state is replaced.
            scaler: of the class that was saved; its state is replaced.
            missing: "start" to begin anew where the folder holds no save; "raise" refuses that.

        Returns:
            The position that was saved; None where there was no save.

        Raises:
            CheckpointError: there is no save, it is damaged, or what was saved does not fit; nothing is loaded then.
            InputError: an object is of the wrong type, or ranks have different saves.
        """
        self.saver.wait(self.world.agreement.agree)
        objects = TrainingObjects(optimizer, scheduler, scaler)
        model, seed = self._programs.skeleton, self.plan.seed
        progress = resume_training(self._rank_tensors(), model, folder, objects, seed, missing)
        if progress is None:
            return None
        self.step = progress.step
        return progress.position


def local_weights(module: ParallelModule, model: nn.Module, checkpoint: Checkpoint | None) -> dict[str, Tensor]:
    """Returns the weights with which a module begins; see `parts`, which counts what they take in `module.loading`.

    Args:
        model: the unsplit one, with values or of the meta device.
    """
    alarm = module.world.agreement.alarm
    module.line, module.loading = _pipeline_ranks(module, model), Loading()
    module.saver = AsyncSaver(module.world.device, lambda: alarm.first is not None)
    weights, dtype = module._rank_tensors(model), main_dtype(module.plan)
    return parts(model, weights, module.plan.seed, module.world.device, dtype, checkpoint, module.loading)


def _pipeline_ranks(module: ParallelModule, model: nn.Module) -> PipelineRanks | None:
    """Returns the ranks of the module's pipeline; None without one."""
    world, dtype = module.world, main_dtype(module.plan)
    if module.plan.pp == 1:
        return None
    elsewhere = []
    for entry in named_tensors(model):
        if entry.first in module.foreign:
            kind = dtype if dtype is not None and entry.tensor.is_floating_point() else entry.tensor.dtype
            meta_tensor = torch.empty(entry.tensor.shape, dtype=kind, device="meta")
            elsewhere.append(ModelTensor(entry.names, nn.Parameter(meta_tensor, requires_grad=False)))
    places = module._programs.places
    first = {name: min(holders) for name, holders in places.items() if len(holders) < len(world.line)}
    return PipelineRanks(world, first, elsewhere)
