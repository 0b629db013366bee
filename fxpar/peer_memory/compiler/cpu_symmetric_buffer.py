"""Symmetric buffers in the memory of a machine, for ranks on its processors: the logic of those of GPUs, without GPUs.

Enters: a process group of one machine. Leaves: a `SymmetricBuffer` whose copies are done when they are asked for.

Each rank makes anonymous files, which the others open by the process's number: nothing is left behind, whoever dies.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import RankError
from fxpar.peer_memory.compiler.symmetric_buffer import SymmetricBuffer, rounded

_WORD = 4
# A wait looks so often before it lets other processes run, then it sleeps: ranks may be more than processors.
_LOOKS, _NAP = 200, 5e-5


@dataclass(kw_only=True)
class CpuSymmetricBuffer(SymmetricBuffer):
    """A rank's end in shared memory.

    Attributes:
        group: its ranks.
        ranks: their numbers among all processes, which errors name.
        seconds: how long a wait lasts.
    """

    group: dist.ProcessGroup | None = None
    ranks: Sequence[int] = ()
    seconds: float = 600.0
    _maps: list[mmap.mmap] = field(default_factory=list)
    _words: list[memoryview] = field(default_factory=list)

    def open(self) -> CpuSymmetricBuffer:
        """Makes the flags. A collective call."""
        self._words = [memoryview(memory).cast("I") for memory in self._shared(rounded(self.flags * _WORD))]
        return self

    def _create(self, size: int) -> Sequence[Tensor]:
        return [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._shared(size)]

    def _shared(self, size: int) -> list[mmap.mmap]:
        """Memory of each rank that all ranks map.

        Raises:
            RankError: a rank is on another machine.
        """
        file = os.memfd_create("fxpar")
        os.ftruncate(file, size)
        names: list[tuple[str, int, int]] = [("", 0, 0)] * self.size
        dist.all_gather_object(names, (machine(), os.getpid(), file), group=self.group)
        maps = []
        for rank, (where, process, number) in enumerate(names):
            try:
                if where != machine():
                    raise OSError("it is another machine")
                other = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            except OSError as error:
                raise RankError(
                    f"its memory cannot be opened: {error}",
                    where=f"rank {self.ranks[rank]}",
                    remedy="set Communication('nccl'), which sends through the process group",
                ) from None
            maps.append(mmap.mmap(other, size))
            os.close(other)
        dist.barrier(self.group)  # a file that is closed can no longer be opened
        os.close(file)
        self._maps += maps
        return maps

    @contextmanager
    def beside(self, buffer: int, sent: Tensor) -> Iterator[None]:
        """Copies are done at once."""
        yield

    def join(self, buffer: int) -> None:
        """Nothing is under way."""

    def signal(self, rank: int, buffer: int, stage: int) -> None:
        """Raises the flag; stores of one processor are seen in their order."""
        self._words[rank][self.flag(buffer, stage, self.rank)] = 1

    def wait(self, buffer: int, stage: int) -> None:
        """Looks until each flag is up.

        Raises:
            RankError: it is not within the time limit.
        """
        for rank in self.others:
            self._wait(rank, buffer, self.flag(buffer, stage, rank))

    def _wait(self, rank: int, buffer: int, place: int) -> None:
        words, looks = self._words[self.rank], 0
        end = time.monotonic() + self.seconds
        while not words[place]:
            looks += 1
            if looks > _LOOKS:
                time.sleep(_NAP)
            if self.is_stopped:
                raise RankError(
                    "the ranks have failed, and nothing is sent any more",
                    where=f"rank {self.ranks[self.rank]}, buffer {buffer}",
                    remedy="look at the first error",
                )
            if time.monotonic() > end:
                raise RankError(
                    f"rank {self.ranks[rank]} has sent nothing for {self.seconds:g} s",
                    where=f"rank {self.ranks[self.rank]}, buffer {buffer}",
                    remedy="look at the output of that rank: it ended, or makes other calls",
                )
        words[place] = 0

    def close(self) -> None:
        """Unmaps what no tensor holds any more."""
        super().close()
        for words in self._words:
            words.release()
        self._words.clear()
        self._maps.clear()


def machine() -> str:
    """The same for processes that see each other's memory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
