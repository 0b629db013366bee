"""The first error after which the ranks of a module cannot go on, and how all of them learn it.

Enters: an error that leaves a rank in the middle of what all ranks do together. Leaves: its text on all ranks within a
second, and no rank, kernel or stream that waits for another.

No exception reaches a rank that waits: gloo waits for a socket, NCCL and kernels on the device, where a replayed graph
is known to nobody. So one thread of each process looks into the store of the process group, over a connection of its
own. What it finds there stops the module: gloo's connections are shut down, communicators of NCCL aborted, and whoever
registered is called (`fxpar.peer_memory`, whose waits read a word).

A process that ends says nothing more, but the system closes its connections, which is seen here: gloo fails by itself
then, and for a rank that waits for its device the thread tells who is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch.distributed import distributed_c10d as c10d

from fxpar.errors import InputError, RankError, shorter
from fxpar.ops.process_group import Group, limit_of_cpus, process_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# The most seconds between two questions of one that waits for an answer in the store.
_LONGEST_POLL = 0.25
# Seconds between two looks into the store, and ranks of which more look less often: one process answers all of them.
_PAUSE, _RANKS = 0.5, 512
# Seconds after which a call lasts long, and in which ranks that miss another say that they are there.
_LASTS, _ROLL_CALL = 1.0, 2.5
# The same of a call that lasts longer than its time-out: then a rank may be busy, and nobody has closed a connection.
# And seconds that work of the device may last after the store is gone.
_GRACE, _LATE_ROLL_CALL, _STORELESS = 2.0, 8.0, 5.0
# Exists as soon as any module has failed, so that a look is one question however many modules there are.
_BELL = "fxpar/bell"

_REMEDY = (
    "the ranks stopped at different points and cannot go on: close() the module, make a new process group on all "
    "ranks (destroy_process_group, init_process_group) and the module again, and resume from the last save"
)

# A connection by its number and what the system calls it.
_Socket = tuple[int, str]


@dataclass(eq=False)
class Alarm:
    """Tells one rank of a module of the first error on any.

    Attributes:
        module: its number, the same on all ranks.
        rank: of this process.
        size: number of processes.
        call: the one that is under way, since when; none by default.
        queued: the last one that left work to a device, since when: who asks for a result waits for that, in no call.
        limit: seconds that a rank waits for another.
        first: the error that stands on all ranks, once one is known here.
        is_retired: whether this rank has done with the module.
    """

    module: int = 0
    rank: int = 0
    size: int = 1
    call: tuple[str, float] | None = None
    queued: tuple[str, float] | None = None
    limit: float = math.inf
    first: RankError | None = None
    is_retired: bool = False
    _sockets: set[_Socket] = field(default_factory=set)
    _refusals: list[Callable[[RankError], None]] = field(default_factory=list)
    _stops: list[Callable[[RankError], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # The roll that this rank has called, when, and whether late; when the last late one was; the last one answered.
    _roll: tuple[int, float, bool] | None = None
    _late_roll: float = -math.inf
    _answered: int = 0
    # After what was queued, and since when the store is gone.
    _event: torch.cuda.Event | None = None
    _storeless: float = math.inf

    def check(self) -> None:
        """Refuses a call of a module that failed.

        Raises:
            RankError: the first error.
        """
        if self.first is not None:
            raise self.error

    @property
    def error(self) -> RankError:
        """Returns the first error, to be raised."""
        assert self.first is not None, "there is one"
        return RankError(self.first.reason, where=self.first.where, remedy=self.first.remedy)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Notes the connections that process groups make inside: they are shut down where the module fails."""
        before = _connections()
        yield
        self._sockets |= _connections() - before

    def on_stop(self, stop: Callable[[RankError], None]) -> None:
        """Has something called, on any thread, when the module fails: it must end waits and may not wait itself."""
        self._stops.append(stop)

    def on_failure(self, refuse: Callable[[RankError], None]) -> None:
        """Has something called before anybody learns that the module failed: it may take no time."""
        self._refusals.append(refuse)

    def tell(self, store: Store | None, where: str, reason: str) -> None:
        """Tells all ranks an error, and stops; of several errors the first one stands."""
        record = {"where": where, "reason": reason}
        if store is not None:
            with contextlib.suppress(dist.DistError):  # without a store each rank has its own
                # compare_set is atomic: of ranks that fail at once one writes, and the others read what that one wrote.
                record = self._posted(store, record)
        self._stop(record)

    def leave(self, store: Store, error: BaseException | None) -> None:
        """Says that this process ends, and of what, where nobody caught it."""
        if error is None:
            store.set(f"fxpar/{self.module}/left/{self.rank}", "")
        elif self.first is None:
            reason = f"ended by {type(error).__name__}: {error}"
            self._posted(store, {"where": f"rank {self.rank}", "reason": shorter(reason)})

    def _posted(self, store: Store, record: dict[str, str]) -> dict[str, str]:
        stands: dict[str, str] = json.loads(store.compare_set(self._key, "", json.dumps(record)))
        store.set(_BELL, "")
        return stands

    def leave_work(self) -> None:
        """Notes that the call leaves work to the device."""
        self.queued = self.call
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            self._event = self._event or torch.cuda.Event()
            self._event.record()

    @property
    def _is_pending(self) -> bool:
        """Returns whether the device still works at what was queued."""
        with contextlib.suppress(RuntimeError):  # the device has failed, which its own error says
            return self._event is not None and not self._event.query()
        return False

    def look_around(self, store: Store | None) -> None:
        """Calls the roll in a call that lasts, where a connection is gone or its time is over. It does not wait.

        Of a store that is gone (None) after a call nothing is said, as long as no work is left for long: at the end of
        a program one process is the first to end.
        """
        call, now = self.call or self.queued, time.monotonic()
        if store is None:
            self._storeless = min(self._storeless, now)
            if self.call is None and (now - self._storeless < _STORELESS or not self._is_pending):
                call = None
        if self.first is not None or call is None or now - call[1] < _LASTS:
            self._roll = None
        elif store is None:
            self.tell(None, self._where, "the store is gone, and so the process that kept it, most often rank 0")
        elif self._roll is None:
            # A closed connection does not say whose it was, and a rank may close one on purpose: all ranks are called.
            is_gone = bool(self._sockets) and not self._sockets <= _connections()
            if is_gone or self._is_late(call[1], now):
                self._roll = store.add(self._rolls, 1), now, not is_gone
                store.set(_BELL, "")
        elif now - self._roll[1] > (_LATE_ROLL_CALL if self._roll[2] else _ROLL_CALL):
            (number, _, is_late), self._roll = self._roll, None
            others = [rank for rank in range(self.size) if not self._answers(store, number, rank)]
            if others:
                ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
                reason = f"for {self.limit:g} s: stands still" if is_late else ": ended, and closed its connections"
                self.tell(store, self._where, f"{ranks} gave no sign{' ' if is_late else ''}{reason}")

    def _is_late(self, since: float, now: float) -> bool:
        """Returns whether to call the roll because a call, or the work that it left, lasts too long."""
        is_late = now - since > self.limit + _GRACE and now - self._late_roll > self.limit
        if is_late and (self.call is not None or self._is_pending):
            self._late_roll = now
            return True
        return False

    def answer(self, store: Store) -> None:
        """Says that this rank is there, where others have called the roll."""
        while self._answered < store.add(self._rolls, 0):
            self._answered += 1
            store.set(f"{self._rolls}/{self._answered}/{self.rank}", "")

    def _answers(self, store: Store, number: int, rank: int) -> bool:
        """Returns whether a rank is there, or ended as it should; in no call, whether it has done with the module."""
        keys = [f"{self._rolls}/{number}/{rank}", f"fxpar/{self.module}/left/{rank}"]
        keys += [_done(self.module, rank)] if self.call is None else []
        return any(store.check([key]) for key in keys)

    @property
    def _where(self) -> str:
        call = self.call or self.queued
        return f"rank {self.rank}" if call is None else f"rank {self.rank}, {call[0]}"

    @property
    def _rolls(self) -> str:
        return f"fxpar/{self.module}/roll"

    def hear(self, store: Store) -> bool:
        """Looks whether a rank has told an error; stops if so."""
        if self.first is None and store.check([self._key]):
            self._stop(json.loads(store.get(self._key)))
        return self.first is not None

    def hang_up(self) -> None:
        """Ends the connections of the module's groups on CPUs: both sides of each wait no longer."""
        for number, name in self._sockets & _connections():
            # gloo hands out no sockets, so the file descriptors of the process are looked through. Descriptors are
            # reused, and the name that the system gives tells whether it is the same connection still.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                if _name(number) == name:
                    connection.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def _stop(self, record: dict[str, str]) -> None:
        with self._lock:
            if self.first is not None:
                return
            error = RankError(record["reason"], where=record["where"], remedy=_REMEDY)
            # First of all: a call on another thread that starts now would wait in
            # groups whose connections are about to end.
            for refuse in self._refusals:
                refuse(error)
            self.first = error
        self.hang_up()
        for stop in reversed(self._stops):  # communicators come last: their kernels may stand after other waits
            try:
                stop(self.error)
            except RuntimeError as failure:  # of a broken device; what else waits must end too
                print(f"fxpar: {self.error.where}: a wait could not be ended: {failure}", file=sys.stderr, flush=True)

    @property
    def _key(self) -> str:
        return f"fxpar/{self.module}/failure"


def abort_groups(error: RankError) -> None:
    """Ends what GPUs wait for in communicators of NCCL: of all groups, as one's kernels wait after another's.

    On a thread of its own: kernels end at once, but NCCL goes on when the last graph is gone that recorded some.
    """
    threading.Thread(target=_abort_groups, name="fxpar abort", daemon=True).start()


def _abort_groups() -> None:
    # The newest first, as destroy_process_group does.
    groups = [
        group for group, _ in sorted(dict(c10d._world.pg_names).items(), key=lambda entry: entry[1], reverse=True)
    ]
    backend: Any = dist.group.WORLD and dist.group.WORLD._get_backend(torch.device("cuda"))
    together = hasattr(backend, "_group_start")
    if together:  # so that none waits for another's
        backend._group_start()
    for group in groups:
        with contextlib.suppress(dist.DistError):  # it is broken already
            group.abort()
    if together:
        backend._group_end()


def _name(number: int | str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return ""


def _connections() -> set[_Socket]:
    """Returns the connections that this process has; none on systems that do not tell."""
    connections = set()
    numbers = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for number in numbers:
        name = _name(number)
        if name.startswith("socket:"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                    connections.add((int(number), name))
    return connections


class _Lookout:
    """The thread of a process that looks into the store for all modules."""

    def __init__(self) -> None:
        self._alarms: weakref.WeakSet[Alarm] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        # The process group, and its store over a connection of its own: who waits for a key keeps others from asking.
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._store: Store | None = None
        # Modules that this rank has done with, and its rank, of which the others are not told yet.
        self._done: list[tuple[int, int]] = []

    def watch(self, alarm: Alarm) -> None:
        """Looks for a module's failure as long as it lives."""
        world = dist.group.WORLD
        assert world is not None, "there are several ranks"
        with self._lock:
            self._alarms.add(alarm)
            if self._group is None or self._group() is not world:
                store: Any = world.get_group_store()  # torch's stubs do not know that it can be cloned
                self._group, self._store = weakref.ref(world), store.clone()
            if self._thread is None:
                atexit.register(self.stop)  # now, so that it comes in front of the end of the process group
                self._thread = threading.Thread(target=self._run, name="fxpar alarm", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread, in front of what the process frees at its end, and says so."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(_ROLL_CALL)
        alarms, store = self._alive()
        if store is not None:
            _leave(alarms, store, getattr(sys, "last_value", None))

    def _run(self) -> None:
        while not self._end.wait(_PAUSE * max(1.0, max((a.size for a in self._alive()[0]), default=1) / _RANKS)):
            alarms, store = self._alive()
            try:
                if store is not None:
                    self._say_done(store)
                    _look(alarms, store)
            except RuntimeError:  # the store is gone: it is asked no more, as torch logs each time
                self._store = None
            if self._group is not None and self._store is None:
                for alarm in alarms:
                    alarm.look_around(None)

    def _alive(self) -> tuple[list[Alarm], Store | None]:
        """Returns the modules, and the store; none where the process group was left, which the others are told."""
        with self._lock:
            alarms = [alarm for alarm in self._alarms if not alarm.is_retired]
            if self._group is None or self._group() is None or self._group() is not dist.group.WORLD:
                store, self._group, self._store = self._store, None, None
                self._done += [(alarm.module, alarm.rank) for alarm in alarms]
                self._say_done(store)
            return alarms, self._store

    def forget(self, module: int, rank: int, group: Any) -> None:
        """Has the others told that this rank has a module no longer; takes no time.

        Args:
            group: the process group that it was made in: one that came later counts its own modules.
        """
        if group is self._group:
            self._done.append((module, rank))

    def _say_done(self, store: Store | None) -> None:
        while self._done:
            module, rank = self._done.pop()
            if store is not None:
                with contextlib.suppress(RuntimeError):  # nobody can be told any more
                    store.set(_done(module, rank), "")


def _done(module: int, rank: int) -> str:
    return f"fxpar/{module}/done/{rank}"


def _leave(alarms: list[Alarm], store: Store, error: BaseException | None) -> None:
    for alarm in alarms:
        with contextlib.suppress(RuntimeError):  # nobody can be told any more
            alarm.leave(store, error)


def _look(alarms: list[Alarm], store: Store) -> None:
    if store.check([_BELL]):
        for alarm in alarms:
            alarm.hear(store)
            alarm.answer(store)
    for alarm in alarms:
        alarm.look_around(store)


_LOOKOUT = _Lookout()


def alarm_of(module: int, rank: int, size: int, seconds: float) -> Alarm:
    """Returns the alarm of a module whose ranks wait so long for another. It is listened to from now on."""
    alarm = Alarm(module, rank, size, limit=seconds)
    if size > 1:
        _LOOKOUT.watch(alarm)
        weakref.finalize(alarm, _LOOKOUT.forget, module, rank, _LOOKOUT._group).atexit = False
    return alarm


def retire(alarm: Alarm) -> None:
    """Stops listening for a module that this rank has done with, and lets the others know; takes no time."""
    # Something of the module may outlive it, a parameter say, and with it the alarm. The connections of its groups are
    # closed by then, for which it would call the roll again and again, until a rank that is busy answers late.
    alarm.is_retired = True
    _LOOKOUT.forget(alarm.module, alarm.rank, _LOOKOUT._group)


def wait_for(alarm: Alarm, store: Store, seconds: float) -> bool:
    """Waits until an error is known, as long as it may take another rank to tell it."""
    return poll(lambda: alarm.hear(store), seconds)


def poll(is_done: Callable[[], bool], seconds: float) -> bool:
    """Asks until it is so or the time is over. A store's own wait can differ by backend and logs every time-out."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL)
    return True


# Where the hosts of all ranks meet: a few words of each, of which all get the largest and the smallest.


# Of a frame: whether the rank failed, its calls and agreements so far, its step, what it calls and where in it it is;
# the rest is what is compared.
_HEAD, _PAYLOAD = 6, 6


class Failed(Enum):
    """Whether a rank failed: in front of its first collective, or after it."""

    NOT = 0
    EARLY = 1
    LATE = 2

    def __bool__(self) -> bool:
        return self is not Failed.NOT


@dataclass(frozen=True)
class Met:
    """What the ranks came with.

    Attributes:
        failed: the first rank that failed, None where none did; one that was late comes first.
        all_failed: whether no rank did not.
        is_late: whether a rank failed after its first collective.
        all_late: whether all of them did.
        calls: the most that a rank has begun.
        points: the most agreements in it.
        differs: whether ranks came for different things: other calls, or other places in them.
        steps_differ: whether they are at other steps.
        largest, smallest: of what is compared, six words.
    """

    failed: int | None
    all_failed: bool
    is_late: bool
    all_late: bool
    calls: int
    points: int
    differs: bool
    steps_differ: bool
    largest: list[int]
    smallest: list[int]

    @property
    def is_equal(self) -> bool:
        """Returns whether all ranks have the same to compare."""
        return self.largest == self.smallest


@dataclass(frozen=True)
class Meeting:
    """The hosts of one module.

    Attributes:
        group: of all ranks, by gloo; programs send nothing over it.
        rank: of this process.
    """

    group: Group
    rank: int

    def meet(
        self,
        state: tuple[Failed, int, int, int],
        place: tuple[str, str],
        compared: Sequence[int] = (),
        seconds: float | None = None,
    ) -> Met:
        """Meets the other ranks. A collective call.

        Args:
            state: whether this rank has failed, its calls, its agreements in this one, and its step.
            place: what is called, and where in it the rank is.
            compared: six numbers at most.
            seconds: for which it waits; as long as the group's collectives by default.
        """
        size, (failed, *counts) = self.group.size, state
        # The maximum of all ranks' words is the only operation here. Written as size - rank, the first rank that failed
        # wins. One that failed late exceeds any that failed early.
        head = [(size - self.rank if failed else 0) + size * (failed is Failed.LATE), *counts, *map(number, place)]
        words = [*head, *compared, *[0] * (_PAYLOAD - len(compared))]
        # The complement of a word turns its minimum into a maximum: one exchange gives both.
        both = self._largest(torch.tensor([*words, *(~word for word in words)]), seconds).tolist()
        largest, smallest = both[: len(words)], [~word for word in both[len(words) :]]
        return Met(
            -largest[0] % size if largest[0] else None,
            smallest[0] > 0,
            largest[0] > size,
            smallest[0] > size,
            largest[1],
            largest[2],
            largest[4:_HEAD] != smallest[4:_HEAD],
            largest[3] != smallest[3],
            largest[_HEAD:],
            smallest[_HEAD:],
        )

    def _largest(self, words: Tensor, seconds: float | None) -> Tensor:
        """Returns the largest of all ranks' words: each round, a rank has those of twice as many."""
        group, size = process_group(self.group), self.group.size
        limit = () if seconds is None else (timedelta(seconds=seconds),)
        distance = 1
        while distance < size:
            other = torch.empty_like(words)
            # gloo's all-reduce goes twice round a ring: 265 us between two processes, where these rounds take 80.
            sent = group.send([words], (self.rank + distance) % size, distance)
            group.recv([other], (self.rank - distance) % size, distance).wait(*limit)
            sent.wait()
            words = torch.maximum(words, other)
            distance *= 2
        return words


def hosts(rank: int, size: int, seconds: float) -> Meeting:
    """Returns where they meet. A collective call.

    Raises:
        RankError: the hosts cannot reach each other.
    """
    limit = limit_of_cpus() or timedelta(seconds=seconds)
    try:
        gloo_group = dist.new_group(backend="gloo", timeout=limit)
    except RuntimeError as error:
        raise RankError(
            f"the hosts cannot reach each other by gloo: {str(error).splitlines()[0]}",
            where=f"rank {rank}, start-up",
            remedy="set GLOO_SOCKET_IFNAME to the network's interface",
        ) from error
    return Meeting(Group(gloo_group.group_name, size), rank)


@cache
def number(text: str) -> int:
    """Returns a number that stands for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


# Refuses to be traced: a rank's program is a graph already.


def refuse_tracing() -> None:
    """Refuses calls under a tracer.

    Raises:
        InputError: torch.export or torch.jit.trace calls; under torch.compile it comes as the cause of Dynamo's error.
    """
    if torch.compiler.is_dynamo_compiling():
        comptime(_refuse)  # Dynamo leaves out a frame that raises, and runs it uncompiled
    elif torch.compiler.is_exporting() or torch._C._is_tracing():
        _refuse()


def _refuse(context: object = None) -> None:
    raise InputError(
        "cannot be traced: its programs are graphs already",
        where="ParallelModule" if context is None else "torch.compile",
        remedy="call it without torch.compile, torch.export and torch.jit; Plan(compile=True) compiles its programs",
    )
