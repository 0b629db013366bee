"""The processes of a run: device, process group and the rank's place in the mesh.

Enters: a plan, the environment that torchrun sets. Leaves: a `World`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fxpar.errors import PlanError
from fxpar.ops.collectives import Group
from fxpar.plan import Plan


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Attributes:
        rank: of all processes.
        size: number of processes.
        device: of parameters and inputs.
        groups: process group by axis; axes of one rank have none.
        coordinates: the rank's index on each of these axes.
    """

    rank: int
    size: int
    device: torch.device
    groups: Mapping[str, Group]
    coordinates: Mapping[str, int]

    def process_group(self, axis: str) -> dist.ProcessGroup:
        """The axis's process group."""
        return dist.distributed_c10d._resolve_process_group(self.groups[axis].name)  # type: ignore[no-any-return]


def join(plan: Plan) -> World:
    """Joins the processes that the plan asks for; initialises the process group where the launcher left that to us.

    A plan of ones in a process that no launcher started needs none.

    Raises:
        PlanError: the number of processes is not the plan's.
    """
    launched = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    if not dist.is_initialized() and launched:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
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
    groups = {}
    if plan.tp > 1:
        groups["tp"] = Group(dist.group.WORLD.group_name, plan.tp)  # type: ignore[union-attr]
    return World(rank, size, device, groups, {axis: rank for axis in groups})
