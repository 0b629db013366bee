"""Saves and loads a split model's tensors under the author's names, in the shapes of the unsplit model.

There are full state dicts, parts for `torch.distributed.checkpoint`, and an export to safetensors that transformers'
`from_pretrained` and `fxpar.Checkpoint` read. `RankTensors` says what one rank holds, for all who save and load.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fxpar.checkpoint.safetensors_files import (
    INDEX,
    METADATA,
    Spec,
    folder_of,
    index_document,
    split_files,
    writable,
)
from fxpar.errors import CheckpointError
from fxpar.layout.layout import Layout
from fxpar.ops.process_group import process_group
from fxpar.runtime.shard_spec import ModelTensor, ShardSpec
from fxpar.runtime.sharded import Sharded, local_of, whole_of
from fxpar.runtime.sharded_ops import part_of
from fxpar.runtime.world import World
from fxpar.torch_internals import IncompatibleKeys

# Compares facts by name over all ranks; the second argument is the remedy where they differ. A collective call.
Agree = Callable[[Mapping[str, str], str], None]


def alone(facts: Mapping[str, str], remedy: str) -> None:
    """Compares nothing: `Agree` of one rank."""


@dataclass(frozen=True)
class PipelineRanks:
    """The ranks of a pipeline, each of which holds some tensors of a model.

    Attributes:
        world: where this rank stands.
        first: of tensors that not all hold, by first name, the place that counts where each is to count once.
        elsewhere: what the others hold and this rank does not: tensors of the meta device, as they are there.
    """

    world: World
    first: Mapping[str, int]
    elsewhere: Sequence[ModelTensor]

    def gathered(self, value: Any) -> list[Any]:
        """Gathers an object of each rank, which travels as a pickle, by place. A collective call."""
        values: list[Any] = [None] * len(self.world.line)
        dist.all_gather_object(values, value, process_group(self.world.groups["pp"]))
        return values

    def shared(self, name: str, local: Tensor | None, like: Tensor) -> Tensor:
        """Sends a tensor to all ranks from the one that counts by `first`. A collective call.

        Args:
            name: the first name.
            local: on that rank, the tensor.
            like: of its shape and type.
        """
        source = self.first[name]
        if source == self.world.place:
            assert local is not None, "a rank holds what it counts for"
            tensor = local.contiguous()
        else:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self.world.device)
        if tensor.numel():
            self.world.broadcast(tensor, source)
        return tensor


@dataclass(frozen=True)
class RankTensors:
    """The tensors of a model, or parts of them, that one rank holds.

    Attributes:
        tensors: the rank's, or the unsplit model's that it takes its parts of.
        saved: the names that the unsplit model saves.
        shape_of: whole shape by name.
        layout_of: layout by name.
        axes: sizes of the mesh axes.
        coordinates: the rank's index on each.
        rank: of all processes.
        size: number of processes.
        agree: compares the ranks' facts.
        pipeline: the other ranks of its pipeline, where there is one.
    """

    tensors: Sequence[ModelTensor]
    saved: Sequence[str]
    shape_of: Callable[[str], tuple[int, ...]]
    layout_of: Callable[[str], Layout]
    axes: Mapping[str, int]
    coordinates: Mapping[str, int]
    rank: int = 0
    size: int = 1
    agree: Agree = alone
    pipeline: PipelineRanks | None = None

    def by_name(self) -> dict[str, Tensor]:
        """Returns the tensors under all their names."""
        return {name: entry.tensor for entry in self.tensors for name in entry.names}

    @property
    def everything(self) -> list[ModelTensor]:
        """Returns all tensors of the model; those that other ranks of the pipeline hold are of the meta device."""
        return [*self.tensors, *(() if self.pipeline is None else self.pipeline.elsewhere)]

    def entries(self) -> dict[str, ModelTensor]:
        """Returns all tensors of the model under all their names."""
        return {name: entry for entry in self.everything for name in entry.names}

    def counts(self, entry: ModelTensor) -> bool:
        """Tells whether this rank stands for a tensor among those of its pipeline that hold it."""
        return self.pipeline is None or self.pipeline.first.get(entry.first, 0) == self.pipeline.world.place


def saved_entries(weights: RankTensors) -> dict[str, ModelTensor]:
    """Returns the tensors that the unsplit model would save, by each of their names.

    Raises:
        CheckpointError: the unsplit model's state dict holds something else than parameters and buffers.
    """
    entries = weights.entries()
    for name in weights.saved:
        if name not in entries:
            raise CheckpointError(
                "is in the model's state dict, and must be a parameter or buffer",
                where=name,
                remedy="keep extra state and renaming hooks out of the model",
            )
    return {name: entries[name] for name in weights.saved}


def saved_once(weights: RankTensors) -> dict[str, ModelTensor]:
    """Returns the tensors that the unsplit model would save, each by the first of its saved names.

    Raises:
        CheckpointError: see `saved_entries`.
    """
    by_first: dict[str, tuple[str, ModelTensor]] = {}
    for name, entry in saved_entries(weights).items():
        by_first.setdefault(entry.first, (name, entry))
    return dict(by_first.values())


def full_state_dict(weights: RankTensors) -> dict[str, Tensor]:
    """Returns what `state_dict()` of the unsplit model would hold, on the CPU of every rank. A collective call.

    Tensors share no memory with the module's; tied names share one tensor.
    """
    tensors: dict[str, Tensor] = {}
    for entry in saved_once(weights).values():
        full, local = on_all(weights, entry), local_of(entry.tensor)
        # A tensor that no axis cuts is the module's memory on a CPU. The next
        # step would change it in the caller's hands.
        shares_memory = not local.is_meta and full.data_ptr() == local.data_ptr()
        tensors[entry.first] = full.to("cpu", copy=shares_memory)
    return {name: tensors[entry.first] for name, entry in saved_entries(weights).items()}


def on_all(weights: RankTensors, entry: ModelTensor) -> Tensor:
    """Returns a full tensor on every rank, whoever holds it, detached. A collective call."""
    if weights.pipeline is None or entry.first not in weights.pipeline.first:
        return whole_of(entry.tensor)
    whole = whole_of(entry.tensor) if weights.counts(entry) else None
    return weights.pipeline.shared(entry.first, whole, entry.tensor)


def sharded_state_dict(weights: RankTensors) -> dict[str, Tensor]:
    """Returns this rank's part of what the unsplit model would save; shares memory with the module's tensors."""
    tensors = weights.by_name()
    return {name: tensors[name].detach() for name in saved_entries(weights) if name in tensors}


def load_full_state_dict(weights: RankTensors, state: Mapping[str, Any]) -> None:
    """Loads full tensors, of which each rank keeps its shards; see `ParallelModule.load_full_state_dict`."""
    remedy = "load the model it was saved from"
    check_names(state, weights.saved, [entry.names for entry in weights.everything], "state dict", remedy)
    _copy_parts(weights, state, remedy)


def load_sharded_state_dict(weights: RankTensors, state: Mapping[str, Any], strict: bool) -> IncompatibleKeys:
    """Loads what `sharded_state_dict` gave, or full tensors; see `ParallelModule.load_state_dict`."""
    groups = [entry.names for entry in weights.everything]
    remedy = "load the state dict of the same model and plan; torch.distributed.checkpoint.load fits it to other plans"
    # `sharded_state_dict` is without the tensors of a pipeline's other ranks.
    elsewhere = weights.entries().keys() - weights.by_name().keys()
    keys = [*state, *elsewhere] if isinstance(state, Mapping) else state
    missing, unknown = check_names(keys, weights.saved, groups, "state dict", remedy, strict)
    _copy_parts(weights, {name: value for name, value in state.items() if name not in unknown}, remedy)
    return IncompatibleKeys(missing, unknown)


def _copy_parts(weights: RankTensors, state: Mapping[str, Any], remedy: str) -> None:
    """Copies this rank's parts of a state dict of known names into the module, after all were checked."""
    tensors, entries = weights.by_name(), weights.entries()
    first: dict[str, str] = {}
    parts: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"has the type {type(value).__name__} and must be a tensor of shape {list(weights.shape_of(name))}",
                where=name,
                remedy=remedy,
            )
        check_shape(name, tuple(value.shape), weights.shape_of(name))
        if name in tensors:
            parts[name] = _part(name, value, tensors[name], remedy)
        known = first.setdefault(entries[name].first, name)
        one, other = state[known], value
        if isinstance(one, DTensor) or isinstance(other, DTensor):  # their comparison would be a collective call
            one, other = parts.get(known, one), parts.get(name, one)
        if one is not other and one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
            raise CheckpointError(
                f"is tied to {known} and has other values", where=name, remedy="leave one of the two names out"
            )
    with torch.no_grad():
        for name, part in parts.items():
            target = local_of(tensors[name])
            # torch.distributed.checkpoint has read into the module's memory already.
            if target.data_ptr() != part.data_ptr():
                target.copy_(part)


def _part(name: str, value: Tensor, target: Tensor, remedy: str) -> Tensor:
    """Returns what a rank takes of a tensor of the full shape."""
    if isinstance(value, DTensor) and not isinstance(value, Sharded):
        if all(isinstance(placement, Replicate) for placement in value.placements):
            value = value.to_local()
        elif not isinstance(target, Sharded) or tuple(value.placements) != target.placements:
            raise CheckpointError(f"is placed {value.placements}, other than here", where=name, remedy=remedy)
    if isinstance(value, Sharded):
        place = target.place if isinstance(target, Sharded) else None
        if place is None or not value.place.is_like(place):
            expected = "be whole" if place is None else f"be cut {_text(place)}"
            raise CheckpointError(f"is cut {_text(value.place)} and must {expected}", where=name, remedy=remedy)
    if not isinstance(target, Sharded):
        return value.detach()
    return part_of(value.detach(), target.place) if isinstance(value, DTensor) else target.place.block(value.detach())


def _text(place: ShardSpec) -> str:
    return f"{place.layout} on {' x '.join(str(size) for size in place.axes.values())} ranks"


def check_names(
    keys: Collection[str],
    saved: Sequence[str],
    groups: Sequence[Sequence[str]],
    where: str,
    remedy: str,
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Checks the names of what is to be loaded; returns those that are missing and unknown.

    Args:
        saved: the names that the model saves.
        groups: all names of each tensor of the model; one of them is enough.
        strict: whether there may be any.

    Raises:
        CheckpointError: a name is missing or unknown, or there is no mapping at all.
    """
    if isinstance(keys, (str, bytes)) or not hasattr(keys, "__iter__"):
        raise CheckpointError(
            f"must be a mapping from names to tensors, got a {type(keys).__name__}", where=where, remedy=remedy
        )
    missing, unknown = _misfits(keys, saved, groups)
    if strict and (missing or unknown):
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has the unknown {_some(unknown)}"] if unknown else []
        raise CheckpointError(" and ".join(parts), where=where, remedy=remedy)
    return missing, unknown


def names_fit(keys: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]]) -> bool:
    """Tells whether `check_names` takes them."""
    return not any(_misfits(keys, saved, groups))


def _misfits(
    keys: Collection[str], saved: Sequence[str], groups: Sequence[Sequence[str]]
) -> tuple[list[str], list[str]]:
    known = set(keys)
    present = {name for names in groups if not known.isdisjoint(names) for name in names} | known
    return [name for name in saved if name not in present], sorted(known - set(saved))


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Checks the full shape of what is to be loaded.

    Raises:
        CheckpointError: it is another one.
    """
    if shape != expected:
        raise CheckpointError(
            f"has shape {list(shape)} and must be a tensor of shape {list(expected)}",
            where=name,
            remedy="load the state dict of a model of the same configuration",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def save_checkpoint(weights: RankTensors, model: nn.Module, folder: str | Path, limit: int) -> None:
    """Writes the whole model from rank 0; see `ParallelModule.save_checkpoint`.

    Args:
        model: the unsplit one, for its `config`; its tensors are not looked at.
        limit: the most bytes of tensors in a file.
    """
    entries = saved_once(weights)
    specs = {name: Spec.of(entry.tensor) for name, entry in entries.items()}
    write_checkpoint(
        weights,
        folder,
        split_files("model", specs, limit),
        specs,
        lambda name: on_all(weights, entries[name]),
        lambda path: save_configuration(path, model, specs.values()),
    )


def write_checkpoint(
    weights: RankTensors,
    folder: str | Path,
    files: Mapping[str, Sequence[str]],
    specs: Mapping[str, Spec],
    gather: Callable[[str], Tensor],
    configure: Callable[[Path], None],
) -> None:
    """Writes tensors from rank 0, one file after the other. A collective call.

    Each tensor is gathered by itself: the ranks hold one whole tensor at a time, rank 0 besides those of one file.

    Args:
        files: names of tensors by file.
        specs: type and whole shape of each.
        gather: returns a whole tensor on rank 0; a collective call.
        configure: writes what belongs to the tensors, on rank 0.

    Raises:
        CheckpointError: the folder already holds a checkpoint, or cannot be written.
    """
    path, is_writer = folder_of(folder), weights.rank == 0
    if is_writer:
        stem = next(iter(files)).removesuffix(".safetensors").partition("-")[0]
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
            present = sorted(file.name for file in path.glob(f"{stem}*.safetensors*"))
        if present:
            raise CheckpointError(
                f"the folder holds {present[0]} already", where=str(path), remedy="save to another folder, or empty it"
            )
    # What the writer is refused, the others hear here and not in a gather that it never joins.
    weights.agree({"the files": " ".join(files)}, "save the same model on every rank")
    for file, names in files.items():
        written: dict[str, Tensor] = {}
        for name in names:
            full = gather(name)
            if is_writer:
                written[name] = full.cpu().contiguous()
            del full
        if is_writer:
            _write(path / file, written)
    if is_writer:
        with writable(path):
            if len(files) > 1:
                (path / INDEX).write_text(index_document(specs, files), encoding="utf-8")
            configure(path)
    weights.agree({}, "")  # all files are there


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    with writable(path):
        try:
            save_file(tensors, path, metadata=METADATA)
        except (OSError, SafetensorError):
            path.unlink(missing_ok=True)  # what is there of it is no checkpoint, and would bar the next one
            raise


def save_configuration(path: Path, model: nn.Module, specs: Iterable[Spec]) -> None:
    """Writes the configuration of a model of transformers, that of its generation too. OSError where that cannot be.

    Args:
        specs: of the tensors that are saved.

    Raises:
        CheckpointError: the author's generation configuration contradicts itself.
    """
    # A copy, because the author's configuration keeps its element type and architectures.
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = next((spec.dtype for spec in specs if spec.dtype.is_floating_point), None)
        config.save_pretrained(path)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        try:
            generation.save_pretrained(path)
        except ValueError as error:
            reason = f"transformers refuses to save it: {' '.join(str(error).split())}"
            remedy = "mend it before parallelize, or set it to None"
            raise CheckpointError(reason, where="model.generation_config", remedy=remedy) from error
