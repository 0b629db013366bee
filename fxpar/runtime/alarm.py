"""The first error behind which the ranks of a module cannot go on, and how all of them learn it.

Enters: an error that leaves a rank in the middle of what all ranks do together. Leaves: its text on all ranks within a
second, and no rank, kernel or stream that waits for another.

No exception reaches a rank that waits: gloo waits for a socket, NCCL and kernels on the device, where a replayed graph
is known to nobody. So one thread of each process looks into the store of the process group, over a connection of its
own. What it finds there stops the module: gloo's connections are shut down, communicators of NCCL aborted, and whoever
registered is called (`fxpar.exchange`, whose waits read a word).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fxpar.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Seconds between two looks into the store, and ranks of which more look less often: one process answers all of them.
_PAUSE, _RANKS = 0.5, 512
# Exists as soon as any module has failed, so that a look is one question however many modules there are.
_BELL = "fxpar/bell"

_REMEDY = (
    "the ranks stopped at different points and cannot go on: make a new process group on all ranks "
    "(destroy_process_group, init_process_group) and the module again, and resume from the last save"
)

# A connection by its number and what the system calls it.
_Socket = tuple[int, str]


@dataclass(eq=False)
class Alarm:
    """Of one module on one rank.

    Attributes:
        module: its number, the same on all ranks.
        size: number of processes.
        first: the error that stands on all ranks, once one is known here.
    """

    module: int = 0
    size: int = 1
    first: RankError | None = None
    _sockets: set[_Socket] = field(default_factory=set)
    _stops: list[Callable[[RankError], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Refuses a call of a module that failed.

        Raises:
            RankError: the first error.
        """
        if self.first is not None:
            raise self.error

    @property
    def error(self) -> RankError:
        """The first error, to be raised."""
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

    def tell(self, store: Store | None, where: str, reason: str) -> None:
        """Tells all ranks an error, and stops; of several errors the first one stands."""
        record = {"where": where, "reason": reason}
        if store is not None:
            with contextlib.suppress(dist.DistError):  # without a store each rank has its own
                record = json.loads(store.compare_set(self._key, "", json.dumps(record)))
                store.set(_BELL, "")
        self._stop(record)

    def hear(self, store: Store) -> bool:
        """Looks whether a rank has told an error; stops if so."""
        if self.first is None and store.check([self._key]):
            self._stop(json.loads(store.get(self._key)))
        return self.first is not None

    def hang_up(self) -> None:
        """Ends the connections of the module's groups on CPUs: both sides of each wait no longer."""
        for number, name in self._sockets & _connections():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
                if _name(number) == name:
                    found.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def _stop(self, record: dict[str, str]) -> None:
        with self._lock:
            if self.first is not None:
                return
            self.first = RankError(record["reason"], where=record["where"], remedy=_REMEDY)
        for stop in self._stops:
            stop(self.error)
        self.hang_up()

    @property
    def _key(self) -> str:
        return f"fxpar/{self.module}/failure"


def abort_groups(error: RankError) -> None:
    """Ends what GPUs wait for in communicators of NCCL: of all groups, as one's kernels wait behind another's."""
    groups = sorted(c10d._world.pg_names, key=lambda group: c10d._world.pg_names[group], reverse=True)
    backend: Any = dist.group.WORLD and dist.group.WORLD._get_backend(torch.device("cuda"))
    together = hasattr(backend, "_group_start")
    if together:  # so that none waits for another's
        backend._group_start()
    for group in groups:
        group.abort()
    if together:
        backend._group_end()


def _name(number: int | str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return ""


def _connections() -> set[_Socket]:
    """The connections that this process has; none on systems that do not tell."""
    found = set()
    numbers = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for number in numbers:
        name = _name(number)
        if name.startswith("socket:"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                    found.add((int(number), name))
    return found


class _Lookout:
    """The thread of a process that looks into the store for all modules."""

    def __init__(self) -> None:
        self._alarms: weakref.WeakSet[Alarm] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def watch(self, alarm: Alarm) -> None:
        """Looks for a module's failure as long as it lives."""
        with self._lock:
            self._alarms.add(alarm)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="fxpar alarm", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread, in front of what the process frees at its end."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(2 * _PAUSE)

    def _run(self) -> None:
        group, store = None, None
        while not self._end.wait(self._pause()):
            if group is None or group() is not dist.group.WORLD:
                group, store = None, None
                world = dist.group.WORLD
                if world is not None:
                    group, store = weakref.ref(world), _own_connection(world.get_group_store())
                del world
            if store is not None and _rings(store):
                for alarm in self._alive():
                    alarm.hear(store)

    def _alive(self) -> list[Alarm]:
        with self._lock:
            return list(self._alarms)

    def _pause(self) -> float:
        return _PAUSE * max(1.0, max((alarm.size for alarm in self._alive()), default=1) / _RANKS)


def _rings(store: Store) -> bool:
    """Whether any module has failed; not where the store is gone, which calls find out by themselves."""
    try:
        return bool(store.check([_BELL]))
    except RuntimeError:
        return False


def _own_connection(store: Store) -> Store:
    """The same store for another thread: one that waits for a key keeps others from asking."""
    try:
        return store.clone()
    except RuntimeError:  # a kind of store without
        return store


_LOOKOUT = _Lookout()
atexit.register(_LOOKOUT.stop)


def alarm_of(module: int, size: int) -> Alarm:
    """The alarm of a module, which is listened to from now on."""
    made = Alarm(module, size)
    if size > 1:
        _LOOKOUT.watch(made)
    return made


def wait_for(alarm: Alarm, store: Store, seconds: float) -> bool:
    """Waits until an error is known, as long as it may take another rank to tell it."""
    end = time.monotonic() + seconds
    while not alarm.hear(store):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
