"""What a rank's weights are to those who load and save them.

Enters: a module's tensors and how they are cut; the ranks. Leaves: narrow records. Nothing here knows of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxpar.layout.layout import Layout
from fxpar.mesh.mesh import Mesh
from fxpar.ops.collectives import Group
from fxpar.ops.mesh_process_groups import device_mesh, process_group
from fxpar.state.initial import ModelTensor

# Compares facts by name over all ranks; the second argument is the remedy where they differ. A collective call.
Agree = Callable[[Mapping[str, str], str], None]


def alone(facts: Mapping[str, str], remedy: str) -> None:
    """`Agree` of one rank."""


@dataclass(frozen=True)
class RankMesh:
    """Where this rank stands among those that hold parts.

    Attributes:
        device: of its tensors.
        mesh: which ranks communicate with which.
        groups: name and size of the process group by axis, and by axes that are joined.
        coordinates: the rank's index on each axis of more than one rank.
    """

    device: torch.device
    mesh: Mesh
    groups: Mapping[str, Group]
    coordinates: Mapping[str, int]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The device mesh of the dense part of this rank's stages: those of others hold other tensors.

        Not kept: it may hold its groups.
        """
        at = {"pp": self.mesh.coordinates(dist.get_rank())["pp"]} if self.mesh.pp > 1 else {}
        return device_mesh(self.mesh.dense, self.groups, self.device, at)


@dataclass(frozen=True)
class Line:
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
        """What each rank has of something that can be pickled, by place. A collective call."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, process_group(self.group))
        return values

    def shared(self, name: str, local: Tensor | None, like: Tensor) -> Tensor:
        """A tensor on all ranks, of the one whose it is by `first`. A collective call.

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
    """What one rank holds of a model's tensors.

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
        line: the other ranks of its pipeline, where there is one.
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
    line: Line | None = None

    def by_name(self) -> dict[str, Tensor]:
        """The tensors under all their names."""
        return {name: entry.tensor for entry in self.tensors for name in entry.names}

    @property
    def everything(self) -> list[ModelTensor]:
        """All tensors of the model; those that other ranks of the pipeline hold are of the meta device."""
        return [*self.tensors, *(() if self.line is None else self.line.elsewhere)]

    def entries(self) -> dict[str, ModelTensor]:
        """All tensors of the model under all their names."""
        return {name: entry for entry in self.everything for name in entry.names}

    def counts(self, entry: ModelTensor) -> bool:
        """Whether this rank stands for a tensor among those of its pipeline that hold it."""
        return self.line is None or self.line.first.get(entry.first, 0) == self.line.place
