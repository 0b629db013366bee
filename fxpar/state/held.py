"""What a rank's weights are to those who load and save them.

Enters: a module's tensors and how they are cut; the ranks. Leaves: narrow records. Nothing here knows of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxpar.layout.layout import Layout
from fxpar.mesh.mesh import Mesh
from fxpar.ops.collectives import Group
from fxpar.ops.groups import device_mesh
from fxpar.state.initial import Named

# Compares facts by name over all ranks; the second argument is the remedy where they differ. A collective call.
Agree = Callable[[Mapping[str, str], str], None]


def alone(facts: Mapping[str, str], remedy: str) -> None:
    """`Agree` of one rank."""


@dataclass(frozen=True)
class Ranks:
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
        """The device mesh of the dense part. Not kept: it may hold its groups."""
        return device_mesh(self.mesh.dense, self.groups, self.device)


@dataclass(frozen=True)
class Held:
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
    """

    tensors: Sequence[Named]
    saved: Sequence[str]
    shape_of: Callable[[str], tuple[int, ...]]
    layout_of: Callable[[str], Layout]
    axes: Mapping[str, int]
    coordinates: Mapping[str, int]
    rank: int = 0
    size: int = 1
    agree: Agree = alone

    def by_name(self) -> dict[str, Tensor]:
        """The tensors under all their names."""
        return {name: entry.tensor for entry in self.tensors for name in entry.names}
