"""Says what one rank holds of a model's tensors, for those who save and load them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.layout.layout import Layout
from fxpar.ops.mesh_process_groups import process_group
from fxpar.ops.process_group import Group
from fxpar.runtime.shard_spec import ModelTensor

# Compares facts by name over all ranks; the second argument is the remedy where they differ. A collective call.
Agree = Callable[[Mapping[str, str], str], None]


def alone(facts: Mapping[str, str], remedy: str) -> None:
    """Compares nothing: `Agree` of one rank."""


@dataclass(frozen=True)
class PipelineRanks:
    """The ranks of a pipeline, each of which holds some tensors of a model.

    Attributes:
        group: of these ranks.
        ranks: of all processes, in the order of their places.
        place: of this rank.
        device: of what is received.
        first: of tensors that not all hold, by first name, the place that counts where each is to count once.
        elsewhere: what the others hold and this rank does not: tensors of the meta device, as they are there.
    """

    group: Group
    ranks: tuple[int, ...]
    place: int
    device: torch.device
    first: Mapping[str, int]
    elsewhere: Sequence[ModelTensor]

    def gathered(self, value: Any) -> list[Any]:
        """Gathers an object of each rank, which travels as a pickle, by place. A collective call."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, process_group(self.group))
        return values

    def shared(self, name: str, local: Tensor | None, like: Tensor) -> Tensor:
        """Sends a tensor to all ranks from the one that counts by `first`. A collective call.

        Args:
            name: the first name.
            local: on that rank, the tensor.
            like: of its shape and type.
        """
        source = self.first[name]
        if source == self.place:
            assert local is not None, "a rank holds what it counts for"
            tensor = local.contiguous()
        else:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if tensor.numel():  # as bytes: not every backend sends every type
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), self.ranks[source], process_group(self.group))
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
        """All tensors of the model; those that other ranks of the pipeline hold are of the meta device."""
        return [*self.tensors, *(() if self.pipeline is None else self.pipeline.elsewhere)]

    def entries(self) -> dict[str, ModelTensor]:
        """Returns all tensors of the model under all their names."""
        return {name: entry for entry in self.everything for name in entry.names}

    def counts(self, entry: ModelTensor) -> bool:
        """Tells whether this rank stands for a tensor among those of its pipeline that hold it."""
        return self.pipeline is None or self.pipeline.first.get(entry.first, 0) == self.pipeline.place
