"""The processes of a run: device, process group and the rank's place in the mesh.

Enters: a plan, the environment that torchrun sets. Leaves: a `World`.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxpar.errors import FxparError, PlanError, RankError
from fxpar.mesh.axes import PURPOSES, Cuts, joined_names
from fxpar.mesh.mesh import Mesh
from fxpar.ops.process_group import (
    WATCHDOG,
    Group,
    broadcast,
    close_abandoned,
    create_groups,
    device_mesh,
    hold,
    process_group,
    refuse_group,
)
from fxpar.plan.plan import Plan
from fxpar.runtime.alarm import abort_groups, hosts
from fxpar.runtime.rank_consensus import Agreement, connected, plan_facts


@dataclass(frozen=True)
class World:
    """Where this process stands.

    Attributes:
        rank: of all processes.
        size: number of processes.
        device: of parameters and inputs.
        mesh: which ranks communicate with which.
        groups: name and size of the process group by axis, and by axes that are joined (`dp-tp`).
        coordinates: the rank's index on each axis of more than one rank.
        agreement: where the ranks compare their programs and leave the reasons of failures.
    """

    rank: int
    size: int
    device: torch.device
    mesh: Mesh
    groups: Mapping[str, Group]
    coordinates: Mapping[str, int]
    agreement: Agreement

    @property
    def place(self) -> int:
        """Returns the rank's place in the pipeline; 0 without one."""
        return self.mesh.coordinates(self.rank)["pp"]

    @property
    def line(self) -> tuple[int, ...]:
        """Returns the ranks of this rank's pipeline, in order; this rank alone without one."""
        return next(line for line in self.mesh.groups("pp") if self.rank in line)

    @property
    def process_groups(self) -> Mapping[str, dist.ProcessGroup]:
        """Returns the groups themselves. Not kept: a group whose threads outlive the process's exit handlers aborts
        it."""
        return {axis: process_group(group) for axis, group in self.groups.items()}

    @property
    def device_mesh(self) -> DeviceMesh:
        """Returns the device mesh of the dense part of this rank's stages: those of others hold other tensors.

        Not kept: it may hold its groups.
        """
        at = {"pp": self.place} if self.mesh.pp > 1 else {}
        return device_mesh(self.mesh.dense, self.groups, self.device, at)

    def broadcast(self, value: Tensor, place: int) -> None:
        """Writes a contiguous tensor of the rank at a place of the pipeline into those of all its ranks."""
        # As bytes: not every backend sends every type.
        broadcast(value.view(-1).view(torch.uint8), place, self.groups["pp"])


def connect(seconds: float) -> Agreement:
    """Meets the other processes; initialises the process group where the launcher left that to us.

    Args:
        seconds: how long ranks wait for each other; also the timeout of the group, where we initialise it.

    Raises:
        PlanError: there are more ranks than GPUs on a machine that has some.
        RankError: not all processes came in time.
    """
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        _say_errors_first()
        if not dist.is_initialized():
            _initialise(seconds)
    return connected(seconds)


@cache
def _say_errors_first() -> None:
    """Has what ends a process of a launcher begin with the line that says what to do, in front of the traceback."""
    former = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, FxparError):
            print(f"error: {error}", file=sys.stderr, flush=True)  # torch writes the rank in front
        former(kind, error, traceback)

    sys.excepthook = say


def join(plan: Plan, agreement: Agreement) -> World:
    """Returns this rank's place among the processes that the plan asks for.

    A plan of ones in a process that no launcher started needs no group.

    Raises:
        PlanError: the number of processes is not the plan's.
        InputError: another rank has another plan.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != plan.world_size:
        sizes = {**plan.axes, "pp": plan.pp} if plan.pp > 1 else plan.axes
        requested = ", ".join(f"{axis}={n}" for axis, n in sizes.items()) or "of one rank"
        raise PlanError(
            f"the plan needs {plan.world_size} processes ({requested}) and there are {size}",
            where="world size",
            remedy=f"start with torchrun --nproc-per-node {plan.world_size}",
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized() and "nccl" not in dist.get_backend():
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    agreement.agree(plan_facts(plan), "pass the same plan on every rank")  # before groups are created by it
    mesh = plan.mesh
    # Besides what programs communicate over: the ranks of a pipeline, and those that are given one batch.
    several = [axis for axis in plan.axes if PURPOSES[axis].cuts is not Cuts.BATCH]
    pipeline = ["pp", "-".join([*several, "pp"])] if plan.pp > 1 else []
    names = [*joined_names(plan.axes), *pipeline]
    close_abandoned()  # all ranks are here, so that nothing is under way
    with agreement.alarm.opening():
        groups = create_groups(mesh, names, timedelta(seconds=agreement.seconds))
        if size > 1:
            agreement.meeting = hosts(rank, size, agreement.seconds)
            hold(agreement.meeting, [agreement.meeting.group])
    for group in {group.name: group for group in groups.values()}.values():
        agreement.alarm.on_failure(partial(refuse_group, group))
    if device.type == "cuda" and size > 1:
        agreement.leaves_work = True
        agreement.alarm.on_stop(abort_groups)
    index = mesh.coordinates(rank)
    world = World(rank, size, device, mesh, groups, {axis: index[axis] for axis in plan.axes}, agreement)
    hold(world, groups.values())
    return world


def _initialise(seconds: float) -> None:
    """Gives a local rank one GPU with NCCL where there are GPUs, else gloo. The group is left at the process's end."""
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
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        seconds += WATCHDOG
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    except dist.DistError as error:
        raise RankError(
            f"{os.environ['WORLD_SIZE']} processes did not meet within {seconds:g} s: {str(error).splitlines()[0]}",
            where=f"rank {os.environ['RANK']}, start-up",
            remedy="look at the output of the other processes: one ended, or does not call parallelize",
        ) from error
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# The processes that compile a GPU's kernels, started before there is anything to compile.


def start_workers(plan: Plan) -> None:
    """Starts them where a plan has kernels compiled; `TORCH_WARM_POOL=0` is heeded, as by `torch.compile`."""
    if plan.compile and torch.cuda.is_available():
        from torch._inductor.async_compile import maybe_warm_pool  # Inductor takes a second to import

        maybe_warm_pool()
