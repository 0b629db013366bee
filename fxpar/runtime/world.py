"""The processes of a run: device, process group and the rank's place in the mesh.

Enters: a plan, the environment that torchrun sets. Leaves: a `World`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpar.errors import InputError, PlanError
from fxpar.mesh import Mesh
from fxpar.ops.collectives import Group
from fxpar.plan import Plan
from fxpar.runtime.groups import create_groups, device_mesh, process_group


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Attributes:
        rank: of all processes.
        size: number of processes.
        device: of parameters and inputs.
        mesh: which ranks communicate with which.
        groups: name and size of the process group by axis; axes of one rank have none.
        coordinates: the rank's index on each of these axes.
    """

    rank: int
    size: int
    device: torch.device
    mesh: Mesh
    groups: Mapping[str, Group]
    coordinates: Mapping[str, int]

    @property
    def process_groups(self) -> Mapping[str, dist.ProcessGroup]:
        """The groups themselves. Not kept: a group whose threads outlive the process's exit handlers aborts it."""
        return {axis: process_group(group) for axis, group in self.groups.items()}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The device mesh of the dense part, for sharded outputs. Not kept: it may hold its groups."""
        return device_mesh(self.mesh.dense, self.groups, self.device)

    def agree(self, mine: Mapping[str, str], remedy: str) -> None:
        """Compares texts by name over all ranks. A collective call.

        Raises:
            InputError: a rank has another text; names the first that differs and the two ranks.
        """
        if self.size == 1:
            return
        everyone: list[Mapping[str, str]] = [{}] * self.size
        dist.all_gather_object(everyone, dict(mine))
        for rank, other in enumerate(everyone):
            for name in dict.fromkeys((*everyone[0], *other)):
                if everyone[0].get(name) != other.get(name):
                    raise InputError(f"differs between rank 0 and rank {rank}", where=name, remedy=remedy)


def join(plan: Plan) -> World:
    """Joins the processes that the plan asks for; initialises the process group where the launcher left that to us.

    A plan of ones in a process that no launcher started needs none.

    Raises:
        PlanError: the number of processes is not the plan's, or there are more ranks than GPUs on a machine that has
            some.
    """
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        _initialise()
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != plan.world_size:
        raise PlanError(
            f"the plan needs {plan.world_size} processes (tp={plan.tp}) and there are {size}",
            where="world size",
            remedy=f"start with torchrun --nproc-per-node {plan.world_size}",
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized() and "nccl" not in dist.get_backend():
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = plan.mesh
    groups = create_groups(mesh, plan.axes)
    index = mesh.coordinates(rank)
    return World(rank, size, device, mesh, groups, {axis: index[axis] for axis in groups})


def _initialise() -> None:
    """One GPU a local rank with NCCL where there are GPUs, else gloo. The group is left when the process ends."""
    if torch.cuda.is_available():
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if count == 1:  # a launcher that shows each rank its own GPU
            local = 0
        if local >= count:
            raise PlanError(
                f"local rank {local} has no GPU of its own: there are {count}",
                where="LOCAL_RANK",
                remedy="start one process for each GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on CPUs",
            )
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
