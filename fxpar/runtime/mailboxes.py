"""The mailboxes of a module: between which ranks copies go, opened when a program needs them.

Enters: a plan and the processes. Leaves: the axes whose ranks can copy into each other's memory, and the groups of a
program with the mailboxes that it names.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from fxpar.errors import PlanError
from fxpar.exchange import mailbox
from fxpar.exchange.host import HostMailbox, machine
from fxpar.ops.collectives import Group
from fxpar.ops.groups import process_group
from fxpar.plan.plan import Plan
from fxpar.program.program import Program, has_note, note
from fxpar.program.regions import inlined
from fxpar.runtime.world import World


class Mailboxes:
    """Those of one module.

    Attributes:
        axes: whose ranks copy what is large.
        reasons: of each axis whose ranks do not, why.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        """A collective call.

        Raises:
            PlanError: the plan asks for copies, and ranks cannot reach each other's memory.
        """
        self._world = world
        self._open: dict[str, str] = {}
        self.reasons = self._why_not(plan)
        self.axes = frozenset(plan.axes) - self.reasons.keys()
        if plan.exchange == "copy" and self.reasons:
            axis, reason = next(iter(self.reasons.items()))
            remedy = "set exchange='auto', which copies where it can, or 'nccl'"
            raise PlanError(f"the ranks of {axis} cannot copy: {reason}", where="exchange", remedy=remedy)
        weakref.finalize(self, mailbox.close, self._open.values())

    def _why_not(self, plan: Plan) -> dict[str, str]:
        if plan.exchange == "nccl" or self._world.size == 1:
            return dict.fromkeys(plan.axes, "the plan's exchange is 'nccl'")
        if plan.exchange == "auto" and self._world.device.type != "cuda":
            return dict.fromkeys(plan.axes, "they are no GPUs")
        places = self._world.agreement.told("its memory", _place(self._world.device))
        found = {}
        for axis in plan.axes:
            own = next(group for group in self._world.mesh.groups(axis) if self._world.rank in group)
            told = [tuple(places[rank].rsplit(" ", 1)) for rank in own]
            if len({where for where, _ in told}) > 1:
                found[axis] = f"ranks {', '.join(map(str, own))} are on several machines"
            elif self._world.device.type == "cuda":
                reason = _unreachable(self._world.device, {device for _, device in told})
                found |= {axis: reason} if reason else {}
        return found

    def groups(self, program: Program) -> Mapping[str, Group]:
        """The groups of the axes, with mailboxes where the program has buffers. All ranks call it for one program."""
        if not self.axes:
            return self._world.groups
        found = dict(self._world.groups)
        nodes = [node for node in inlined(program).graph.nodes if has_note(node) and note(node).buffer]
        for axis in dict.fromkeys(str(node.kwargs["axis"]) for node in nodes):
            if axis not in self._open:
                self._open[axis] = self._opened(axis, found[axis])
            found[axis] = replace(found[axis], mailbox=self._open[axis])
        return found

    def _opened(self, axis: str, group: Group) -> str:
        name = f"{group.name}/{self._world.agreement.module}/{axis}"
        own = next(ranks for ranks in self._world.mesh.groups(axis) if self._world.rank in ranks)
        rank, size = own.index(self._world.rank), len(own)
        if self._world.device.type == "cuda":
            from fxpar.exchange.device import DeviceMailbox  # its symmetric memory takes a second to import

            mailbox.register(
                name, DeviceMailbox(rank=rank, size=size, device=self._world.device, group=group.name).open()
            )
        else:
            seconds = self._world.agreement.seconds
            made = HostMailbox(rank=rank, size=size, group=process_group(group), ranks=own, seconds=seconds)
            mailbox.register(name, made.open())
        return name

    @property
    def bytes(self) -> int:
        """Of this rank's memory into which others copy."""
        return sum(mailbox.mailbox(name).bytes for name in self._open.values())

    def close(self) -> None:
        """Frees their memory; what is compiled for them can no longer run."""
        mailbox.close([*self._open.values()])


def _place(device: torch.device) -> str:
    """The machine, and of a GPU which one."""
    if device.type != "cuda":
        return f"{machine()} -"
    return f"{machine()} {torch.cuda.get_device_properties(device).uuid}"


def _unreachable(device: torch.device, asked: Collection[str]) -> str:
    """Why a GPU does not reach the memory of others, by their identifiers; empty where it does."""
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for other in asked:
        if other not in seen:
            return "a rank does not see the GPUs of the others: start all with the same CUDA_VISIBLE_DEVICES"
        index = device.index
        if seen[other] != index and not torch.cuda.can_device_access_peer(index, seen[other]):
            return f"GPU {index} does not reach the memory of GPU {seen[other]}"
    return "" if len(asked) > 1 else "they are on one GPU"
