"""The symmetric buffers of a module: between which ranks copies go, opened when a program needs them.

Enters: a plan and the processes. Leaves: the axes whose ranks can copy into each other's memory, and the groups of a
program with the symmetric buffers that it names.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch.cuda import can_device_access_peer as can_access

from fxpar.cost.buffer_reuse import Reach
from fxpar.errors import PlanError, RankError
from fxpar.ir.program import Program, has_note, note
from fxpar.ir.regions import inlined
from fxpar.mesh.axes import joined_names
from fxpar.ops.process_group import Group, process_group
from fxpar.peer_memory.compiler import symmetric_buffer
from fxpar.peer_memory.compiler.symmetric_buffer import CpuSymmetricBuffer, machine
from fxpar.peer_memory.runtime.device import GpuSymmetricBuffer, allow_while_captured, current_stream, end_process
from fxpar.plan.plan import Plan
from fxpar.runtime.world import World

# The ranks of a pipeline, which send each other messages and no sums.
_LINE = "pp"
# On four H200 a captured step of GPT 4.2B took 150.2 ms through NCCL and 154.4 by copies.
_NOT_FASTER = "NCCL is faster between more than two GPUs (Communication('copy') copies all the same)"


class CopyTransport:
    """Those of one module; a `fxpar.runtime.steps.PeerMemory`.

    Attributes:
        names: see `PeerMemory`.
        reasons: by name why the ranks of another cannot.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        """Asks all ranks what they reach. A collective call.

        Raises:
            PlanError: the plan asks for copies, and ranks cannot reach each other's memory.
        """
        self._world = world
        self._open: dict[str, str] = {}
        reasons = self._why_not(plan)
        self._line_copies = reasons.get(_LINE) == ""
        self.reasons = {name: reason for name, reason in reasons.items() if reason}
        self.names = frozenset(reasons) - self.reasons.keys() - {_LINE}
        odd = next((name for name in (*plan.axes, _LINE) if name in self.reasons), None)
        if plan.communication.collective_transport == "copy" and odd is not None:
            remedy = "set Communication('auto'), which copies where it can, or 'nccl'"
            raise PlanError(
                f"the ranks of {odd} cannot copy: {reasons[odd]}",
                where="communication",
                remedy=remedy,
            )
        self._marks: list[_Marks] = []
        # Not at the process's exit: that frees all memory, and a rank that fails must not wait for the others there.
        weakref.finalize(self, symmetric_buffer.close, self._open.values()).atexit = False

    def _why_not(self, plan: Plan) -> dict[str, str]:
        """Returns, by group, why its ranks cannot copy, empty where they can; nothing where they are not to."""
        is_gpu, transport = self._world.device.type == "cuda", plan.communication.collective_transport
        if transport == "nccl" or self._world.size == 1 or (transport == "auto" and not is_gpu):
            return {}
        # Every rank decides by what all ranks say. One that copies while another sends through NCCL would wait forever.
        texts = self._world.agreement.gather_texts("its memory", json.dumps(_place(self._world.device)))
        places = [json.loads(text) for text in texts]
        groups = self._world.mesh.groups
        reasons = {name: why_not_copy(groups(name), places, transport == "copy") for name in joined_names(plan.axes)}
        # What NCCL is faster at between several GPUs is sums, and a pipeline has none.
        return reasons | ({_LINE: why_not_copy(groups(_LINE), places, True)} if plan.pp > 1 else {})

    def groups(self, program: Program) -> Mapping[str, Group]:
        """Returns the groups of the axes, with symmetric buffers where a program copies: all ranks call it for one."""
        if not self.names:
            return self._world.groups
        groups = dict(self._world.groups)
        nodes = [node for node in inlined(program).graph.nodes if has_note(node) and note(node).buffer]
        for axis in dict.fromkeys(str(node.kwargs["axis"]) for node in nodes):
            if axis not in self._open:
                self._open[axis] = self._opened(axis, groups[axis])
            groups[axis] = replace(groups[axis], symmetric_buffer=self._open[axis])
        return groups

    def line(self, buffers: int) -> str:
        """Implements `PeerMemory.line`."""
        if not self._line_copies:
            return ""
        if _LINE not in self._open:
            self._open[_LINE] = self._opened(_LINE, self._world.groups[_LINE], buffers)
        return self._open[_LINE]

    def _opened(self, axis: str, group: Group, buffers: int = symmetric_buffer.BUFFERS) -> str:
        name = f"{group.name}/{self._world.agreement.module}/{axis}"
        members = next(ranks for ranks in self._world.mesh.groups(axis) if self._world.rank in ranks)
        ends: dict[str, Any] = {"rank": members.index(self._world.rank), "size": len(members), "buffers": buffers}
        if self._world.device.type == "cuda":
            device = self._world.device
            if not self._marks:
                events = itertools.cycle((torch.cuda.Event(), torch.cuda.Event()))
                self._marks.append(_Marks(device, self._watch(device), events))
            ended = self._marks[0].mark
            gpu_buffer = GpuSymmetricBuffer(**ends, device=device, group=group.name, ended=ended)
            symmetric_buffer.register(name, gpu_buffer.open())
        else:
            seconds, processes = self._world.agreement.seconds, process_group(group)
            cpu_buffer = CpuSymmetricBuffer(**ends, group=processes, ranks=members, seconds=seconds)
            symmetric_buffer.register(name, cpu_buffer.open())
        self._world.agreement.alarm.on_stop(functools.partial(symmetric_buffer.stop, name))
        return name

    def _watch(self, device: torch.device) -> Watchdog:
        """Ends this process where its GPU waits for a copy for longer than ranks wait for each other."""

        def prepare() -> None:
            torch.cuda.set_device(device)
            allow_while_captured()

        agreement = self._world.agreement

        def end(error: RankError) -> None:
            if agreement.alarm.first is None:
                agreement.stop(error)
            else:  # waits were ended by then, and the device stands still all the same
                end_process(error)

        watch = Watchdog(agreement.rank, agreement.seconds, agreement, lambda: agreement.calls, end).start(prepare)
        weakref.finalize(self, watch.stop)  # at the process's exit too, in front of the device's end
        return watch

    def mark(self) -> None:
        """Implements `PeerMemory`."""
        for marks in self._marks:
            marks.mark()

    @property
    def reach(self) -> Reach:
        """Implements `PeerMemory`."""
        buffers = map(symmetric_buffer.registered_buffer, self._open.values())
        return Reach(self.names, self.reasons, sum(buffer.bytes for buffer in buffers))

    def close(self) -> None:
        """Implements `PeerMemory`."""
        symmetric_buffer.close([*self._open.values()])
        for marks in self._marks:
            marks.watch.stop()


@dataclass(frozen=True)
class _Marks:
    """Places in the work of a device, for who looks whether it comes there. Symmetric buffers know it, not it them."""

    device: torch.device
    watch: Watchdog
    events: Iterator[torch.cuda.Event]

    def mark(self) -> None:
        """Marks the end of what is queued, for which the host may wait next; nothing while work is recorded."""
        if not torch.cuda.is_current_stream_capturing():
            # Not the one that is looked at: a host whose queue is full waits here, and what it waits for may be lost.
            event = next(self.events)
            event.record(current_stream(self.device))
            self.watch.mark(event)


def _place(device: torch.device) -> dict[str, Any]:
    """Returns the machine, and of a GPU which one it is, and which others it reaches, by their identifiers."""
    if device.type != "cuda":
        return {"machine": machine()}
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    gpu = next(uuid for uuid, i in seen.items() if i == device.index)
    reached = [uuid for uuid, i in seen.items() if i != device.index and can_access(device.index, i)]
    return {"machine": machine(), "gpu": gpu, "reaches": reached, "triton": find_spec("triton") is not None}


def why_not_copy(groups: Iterable[Sequence[int]], places: Sequence[Mapping[str, Any]], is_requested: bool) -> str:
    """Returns why the ranks of some of these groups cannot copy, or had better not; empty where all do.

    Args:
        places: of all ranks, in order: `machine`, and of GPUs `gpu`, which others it `reaches`, and whether there is
            `triton`.
        is_requested: whether the plan asks for copies, else for what is faster.
    """
    for ranks in groups:
        for one, other in itertools.permutations(ranks, 2):
            a, b = places[one], places[other]
            if a["machine"] != b["machine"]:
                return f"ranks {one} and {other} are on two machines, or do not see each other's processes"
            if "gpu" in a and not a["triton"]:
                return f"rank {one} has no Triton, whose kernel adds what ranks send"
            if "gpu" in a and b["gpu"] not in a["reaches"]:
                return f"the GPU of rank {one} does not reach or does not see that of rank {other}"
        if len(ranks) > 2 and not is_requested:
            return _NOT_FASTER
    return ""


# Looks whether a GPU comes on, since nothing else ends a wait for a copy that never comes.

# Looks in the time limit, and the most seconds from one to the next.
_LOOKS, _LONGEST = 20, 10.0
# Looks after which a rank whose sign does not change is silent.
_SILENT = 3


class Event(Protocol):
    """A place in the work of a device."""

    def query(self) -> bool:
        """Returns whether the device has come there."""


class Board(Protocol):
    """Where ranks leave signs."""

    def post(self, calls: int, look: int) -> None:
        """Leaves this rank's sign: calls that it has begun, and how often it has looked."""

    def posted(self) -> Sequence[tuple[int, int] | None]:
        """Returns the signs of all ranks, in order."""


@dataclass
class Watchdog:
    """Looks whether the device comes on.

    Attributes:
        rank: of this process.
        seconds: in which it comes to where an event is.
        board: of all ranks.
        calls: how many calls this rank has begun, which all ranks make.
        end: ends the wait, or the process.
        clock: seconds.
    """

    rank: int
    seconds: float
    board: Board
    calls: Callable[[], int]
    end: Callable[[RankError], None] = end_process
    clock: Callable[[], float] = time.monotonic
    _marked: tuple[Event, float] | None = None
    _look: int = 0
    _heard: dict[int, tuple[tuple[int, int] | None, int]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def mark(self, event: Event) -> None:
        """Gives it an event that was just recorded after all that was queued; it looks at the last one alone.

        The one before may be recorded again: it is no longer looked at.
        """
        self._marked = event, self.clock()

    def look(self) -> None:
        """Calls `end` if the event is too long ago, at each look."""
        self._look += 1
        self.board.post(self.calls(), self._look)
        for rank, sign in enumerate(self.board.posted()):
            if rank not in self._heard or self._heard[rank][0] != sign:
                self._heard[rank] = sign, self._look
        marked = self._marked
        if marked is None:
            return
        event, since = marked
        # One that is no longer the last may have been recorded again right before it was asked, and is not late.
        if self.clock() - since > self.seconds and not event.query() and self._marked is marked:
            self.end(self._error())

    def _error(self) -> RankError:
        calls = self.calls()
        silent, behind = [], []
        for rank, (sign, look) in self._heard.items():
            if rank == self.rank:
                continue
            if sign is None or self._look - look >= _SILENT:
                silent.append(rank)
            elif sign[0] < calls:
                behind.append(f"rank {rank} has begun {sign[0] + 1} calls and this rank {calls + 1}")
        signs = [f"rank {', '.join(map(str, silent))} gives no sign: it ended, or stands still"] if silent else []
        signs += behind or ([] if silent else ["all ranks have begun the same calls or more"])
        return RankError(
            f"the GPU has waited for copies of other ranks for {self.seconds:g} s: {'; '.join(signs)}",
            where=f"rank {self.rank}, call {calls}",
            remedy="look at the output of the ranks that are named, or raise parallelize(timeout=…)",
        )

    def start(self, prepare: Callable[[], None]) -> Watchdog:
        """Looks from time to time, on a thread of its own.

        Args:
            prepare: runs on the thread before its first look.
        """
        pause = min(self.seconds / _LOOKS, _LONGEST)

        def run() -> None:
            prepare()
            while not self._stop.wait(pause):
                self.look()

        self._thread = threading.Thread(target=run, name="fxpar copies", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Looks no more."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_LONGEST)
