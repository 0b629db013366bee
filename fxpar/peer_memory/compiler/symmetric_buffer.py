"""Symmetric buffers: memory of each rank of a group into which the others write, and flags that say that they have.

Enters: ranks of one machine. Leaves: for each of them `SymmetricBuffer`, found by name by what a program runs; one in
the memory of the machine for ranks on its processors, which has the logic of those of GPUs without GPUs.

Terms: an *area* is what a rank has of a *buffer*: memory of its own that all ranks of the group can write to. A *flag*
is a word of a rank for each buffer, stage and sender: the sender raises it after its copy, and who waits for it takes
it down. So a copy and its wait belong together one to one, and nothing counts: a captured graph that is replayed raises
and takes down the same flags.

That a sender does not write into an area before what was there is read is not asked at run time: it follows from the
order of the program (`fxpar.cost.buffer_reuse`), which `fxpar.verify` checks.
"""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import InputError, RankError
from fxpar.peer_memory.compiler.row_programs import read

# Bytes in which areas begin and grow; any element type is aligned there.
_GRAIN = 1 << 12
# Numbered buffers of a symmetric buffer, and stages of each: a sum over more than two ranks waits twice.
BUFFERS, STAGES = 64, 2


def rounded(size: int) -> int:
    """Returns the bytes of an area for `size` bytes."""
    return -(-size // _GRAIN) * _GRAIN


@dataclass(kw_only=True)
class SymmetricBuffer(ABC):
    """A rank's end of it: its areas and flags, and those of the others to write to.

    Attributes:
        rank: its number in the group.
        size: how many ranks there are.
        buffers: how many numbered buffers have flags.
        poisons: whether what was read is overwritten with bytes that are no number, for tests.
        bytes: of the areas that this rank has.
        is_stopped: whether nobody waits here any longer, as the ranks have failed.
        ended: called after each copy that is taken.
    """

    rank: int
    size: int
    buffers: int = BUFFERS
    poisons: bool = False
    bytes: int = 0
    is_stopped: bool = False
    ended: Callable[[], None] = lambda: None
    _areas: dict[int, list[tuple[int, Sequence[Tensor]]]] = field(default_factory=dict)
    _views: dict[tuple[int, int, torch.Size, torch.dtype], Tensor] = field(default_factory=dict)
    _sent: set[int] = field(default_factory=set)

    @property
    def others(self) -> list[int]:
        """Returns the other ranks, from the next one on: no two ranks write to one at the same time."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def areas(self, buffer: int, size: int) -> Sequence[Tensor]:
        """Returns the areas of all ranks, in order, each uint8[at least size].

        New ones are a collective call: all ranks ask for the same sizes in the same order. Smaller ones are kept,
        since captured graphs hold their addresses.
        """
        known = self._areas.setdefault(buffer, [])
        for capacity, areas in known:
            if capacity >= size:
                return areas
        capacity = rounded(size)
        areas = self._create(capacity)
        self.bytes += capacity
        known.insert(0, (capacity, areas))
        known.sort(key=lambda entry: entry[0])
        return areas

    def whole(self, rank: int, buffer: int, like: Tensor) -> Tensor:
        """Returns the begin of a rank's area, as a tensor like another, which is contiguous."""
        key = rank, buffer, like.shape, like.dtype
        if key not in self._views:  # made once: a step asks for each a hundred times
            area = self.areas(buffer, like.nbytes)[rank]
            self._views[key] = slot(area, 0, like).view(like.shape)
        return self._views[key]

    def begin(self, buffer: int) -> None:
        """Notes that a buffer is sent.

        Raises:
            InputError: what was sent before was never taken, so that its flags may be up: a call was broken off.
        """
        if buffer in self._sent:
            raise InputError(
                "an earlier call was broken off between a copy and its use, and what ranks copied is lost",
                where=f"buffer {buffer}",
                remedy="make the module again on all ranks, or set Communication('nccl') to go on behind errors",
            )
        self._sent.add(buffer)

    def end(self, buffer: int) -> None:
        """Notes that it is taken."""
        self._sent.discard(buffer)
        self.ended()

    def flag(self, buffer: int, stage: int, sender: int) -> int:
        """Returns the place of a flag among those of a rank."""
        return (buffer * STAGES + stage) * self.size + sender

    @property
    def flags(self) -> int:
        """Returns how many flags a rank has."""
        return self.buffers * STAGES * self.size

    @abstractmethod
    def _create(self, size: int) -> Sequence[Tensor]:
        """Returns new areas of all ranks, uint8[size]. A collective call."""

    def copy(self, area: Tensor, begin: int, block: Tensor) -> None:
        """Writes a tensor into an area, from some byte on; called in `beside`.

        Args:
            block: contiguous, or [rows, width] of contiguous rows.
        """
        slot(area, begin, block).view(block.shape).copy_(block)

    @abstractmethod
    def beside(self, buffer: int, sent: Tensor | Sequence[Tensor]) -> AbstractContextManager[None]:
        """Puts copies, signals and waits after what was computed so far, and alongside what is computed next.

        Args:
            sent: is kept until `join`.
        """

    def toward(self, rank: int, buffer: int) -> AbstractContextManager[None]:
        """Lets copies and signals to a rank not wait for those to others; called in `beside`."""
        return nullcontext()

    @abstractmethod
    def join(self, buffer: int) -> None:
        """Lets what is computed next wait for what was done alongside for this buffer."""

    @abstractmethod
    def signal(self, rank: int, buffer: int, stage: int) -> None:
        """Raises this rank's flag at another, after all copies there."""

    @abstractmethod
    def wait(self, buffer: int, stage: int, senders: Sequence[int] = ()) -> None:
        """Lets what is computed next wait for flags of other ranks here, of all if none is named, and takes them
        down."""

    def total(self, buffer: int, x: Tensor, is_sent: bool = False) -> Tensor:
        """Returns the sum of the ranks' tensors x [rows, width], in new memory.

        Args:
            is_sent: whether `send_blocks` sent this one, of more than two ranks; else nothing is computed alongside it.
        """
        if self.size > 2:
            if not is_sent:
                with self.beside(buffer, x):
                    send_blocks(self, buffer, x)
            self.join(buffer)
            return sum_of_blocks(self, buffer, x)
        (other,) = self.others
        area = self.areas(buffer, x.nbytes)[other]
        with self.beside(buffer, x):
            self.copy(area, 0, x)
            self.signal(other, buffer, 0)
        self.join(buffer)
        self.wait(buffer, 0)
        return x + self.whole(self.rank, buffer, x)

    def rows_of_total(
        self, buffer: int, x: Tensor, text: str, operands: Sequence[Tensor], is_sent: bool = False
    ) -> list[Tensor]:
        """Returns what a `RowProgram` gives of that sum.

        Args:
            x: [rows, width].
            text: of the program.
            operands: of it.
            is_sent: as of `total`.
        """
        return read(text).run(self.total(buffer, x, is_sent), operands)

    def slots(self, area: Tensor, step: int, local: Tensor) -> list[Tensor]:
        """Returns what all ranks have for this one, in their order, each like this one's part.

        Args:
            area: of this rank, with a slot for each rank.
            step: bytes from slot to slot.
            local: its part.
        """
        return [local if r == self.rank else _part(area, step * r, local) for r in range(self.size)]

    def sum_of_slots(self, area: Tensor, step: int, local: Tensor) -> Tensor:
        """Returns the sum of `slots`, contiguous, in new memory."""
        return added(self.slots(area, step, local))

    def expanded(self, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
        """Returns what this rank needs of the tokens of all.

        Args:
            x: [t, f], contiguous: its own tokens.

        Returns:
            [n, t, f], zero where it needs nothing.
        """
        sent = [(rank, x, needs(chosen[self.rank], per_rank, rank)) for rank in self.others]
        came = self._exchanged(buffer, x, x, sent)
        return torch.stack([_only(part, needs(chosen[r], per_rank, self.rank)) for r, part in enumerate(came)])

    def summed(self, buffer: int, x: Tensor, chosen: Tensor, per_rank: int) -> Tensor:
        """Returns the sum of what the ranks made of this one's tokens, of those that they needed, in their order.

        Args:
            x: [n, t, f], contiguous: what this rank made of the tokens of all.

        Returns:
            [t, f].
        """
        sent = [(rank, x[rank], needs(chosen[rank], per_rank, self.rank)) for rank in self.others]
        came = self._exchanged(buffer, x, x[self.rank], sent)
        return added([_only(part, needs(chosen[self.rank], per_rank, r)) for r, part in enumerate(came)])

    def _exchanged(
        self, buffer: int, x: Tensor, local: Tensor, sent: Sequence[tuple[int, Tensor, Tensor]]
    ) -> list[Tensor]:
        """Returns what each rank has for this one, in order, like its own [t, f].

        Args:
            x: is kept until all was sent.
            sent: for each other rank its number, rows and which of them it needs.
        """
        stride = slot_stride(local)
        areas = self.areas(buffer, stride * self.size)
        with self.beside(buffer, x):
            for rank, rows, needed in sent:
                copy_rows(_part(areas[rank], stride * self.rank, local), rows, needed)
                self.signal(rank, buffer, 0)
        self.join(buffer)
        self.wait(buffer, 0)
        return self.slots(areas[self.rank], stride, local)

    def poison(self, buffer: int, x: Tensor) -> None:
        """Overwrites what came for the sum of x [rows, width], which was read."""
        self.poison_area(buffer, x.nbytes if self.size == 2 else row_blocks(x, self.size).bytes)

    def poison_area(self, buffer: int, size: int) -> None:
        """Overwrites this rank's area of so many bytes, which was read."""
        if self.poisons:
            self.areas(buffer, size)[self.rank].fill_(0xFF)

    def stop(self, error: RankError) -> None:
        """Ends all waits, on any thread; what they waited for did not come, and nothing more is to be done here."""
        self.is_stopped = True

    def close(self) -> None:
        """Frees the areas, when nothing that this rank was asked for is under way any more."""
        self._areas.clear()
        self._views.clear()


_OPEN: dict[str, SymmetricBuffer] = {}


def registered_buffer(name: str) -> SymmetricBuffer:
    """Returns the symmetric buffer of that name.

    Raises:
        InputError: it is closed.
    """
    try:
        return _OPEN[name]
    except KeyError:
        raise InputError(
            "the memory into which ranks copy is freed: the module is closed",
            where="close()",
            remedy="close it behind its last call",
        ) from None


def register(name: str, line: SymmetricBuffer) -> None:
    """Registers an open symmetric buffer under a name that is free."""
    assert name not in _OPEN, f"the symmetric buffer {name} is open"
    _OPEN[name] = line


def close(names: Iterable[str]) -> None:
    """Closes symmetric buffers; those that are closed stay so."""
    for name in names:
        line = _OPEN.pop(name, None)
        if line is not None:
            line.close()


def stop(name: str, error: RankError) -> None:
    """Ends all waits of the symmetric buffer of that name, if it is open, for an error that all ranks know."""
    if name in _OPEN:
        _OPEN[name].stop(error)


@contextmanager
def poisoned() -> Iterator[None]:
    """Lets open symmetric buffers overwrite what was read while it lasts."""
    before = {name: line.poisons for name, line in _OPEN.items()}
    for line in _OPEN.values():
        line.poisons = True
    try:
        yield
    finally:
        for name, poisons in before.items():
            if name in _OPEN:
                _OPEN[name].poisons = poisons


# Bytes in which the slots of an area begin: a GPU reads as many at once.
_SLOT_GRAIN = 128


# Blocks of rows go to their owners, which send the sums of these to all: the same bits on all ranks. Each rank sends as
# many bytes as the tensor has, twice, but for its own part; over two ranks one copy of the whole is as much, and needs
# one way. This is what any symmetric buffer does, and what a kernel of one must give (`push_kernels`).


@dataclass(frozen=True)
class RowBlocks:
    """Who owns which rows, and where in an area they are.

    An area has a slot for the owner's rows as each rank sends them, and after these the sum of all rows.

    Attributes:
        rows: of the tensor.
        row_bytes: of each.
        ranks: how many there are.
    """

    rows: int
    row_bytes: int
    ranks: int

    @property
    def block(self) -> int:
        """Returns rows of each rank, but for the last ones, which may have fewer or none."""
        return -(-self.rows // self.ranks)

    @property
    def stride(self) -> int:
        """Returns bytes from slot to slot."""
        return -(-self.block * self.row_bytes // _SLOT_GRAIN) * _SLOT_GRAIN

    @property
    def sums(self) -> int:
        """Returns the byte where the sum begins."""
        return self.stride * self.ranks

    @property
    def bytes(self) -> int:
        """Returns the bytes of an area."""
        return self.sums + self.rows * self.row_bytes

    def owned(self, rank: int) -> slice:
        """Returns the rows of a rank."""
        return slice(min(rank * self.block, self.rows), min((rank + 1) * self.block, self.rows))


def slot(area: Tensor, begin: int, like: Tensor) -> Tensor:
    """Returns memory of an area, from some byte on, as a one-dimensional tensor of the bytes and the type of
    another."""
    return area[begin : begin + like.nbytes].view(like.dtype)


def row_blocks(x: Tensor, ranks: int) -> RowBlocks:
    """Returns the blocks of x [rows, width]."""
    return RowBlocks(x.shape[0], x.shape[1] * x.itemsize, ranks)


def send_blocks(line: SymmetricBuffer, buffer: int, x: Tensor) -> None:
    """Sends to each other rank the rows that it owns of x [rows, width]; called in `beside`."""
    blocks = row_blocks(x, line.size)
    areas = line.areas(buffer, blocks.bytes)
    for rank in line.others:
        with line.toward(rank, buffer):
            line.copy(areas[rank], blocks.stride * line.rank, x[blocks.owned(rank)])
            line.signal(rank, buffer, 0)


def sum_of_blocks(line: SymmetricBuffer, buffer: int, x: Tensor) -> Tensor:
    """Returns the sum of what all ranks sent by `send_blocks`, in new memory."""
    blocks = row_blocks(x, line.size)
    areas = line.areas(buffer, blocks.bytes)
    line.wait(buffer, 0)
    total = line.sum_of_slots(areas[line.rank], blocks.stride, x[blocks.owned(line.rank)])
    begin = blocks.sums + blocks.owned(line.rank).start * blocks.row_bytes
    for rank in (line.rank, *line.others):
        line.copy(areas[rank], begin, total)
        if rank != line.rank:
            line.signal(rank, buffer, 1)
    line.wait(buffer, 1)
    return slot(areas[line.rank], blocks.sums, x).view(x.shape).clone()


def added(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum in rank order, of half precision in float32, in new memory."""
    if len(parts) == 2:  # one rounding, and the same on both ranks
        return parts[0] + parts[1]
    kind = parts[0].dtype
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(kind)


# How many rows travel follows from the choice, but no size does: an area has a place for every token of every rank, and
# only those are written, and read, that are needed. Both ends know which. A kernel must give the same (`push_needed`).
#
# Terms: `chosen` i64[n, t, K] are the experts of the t tokens of each of n ranks; rank r holds the experts from
# r * per_rank on, `per_rank` of them.


def needs(chosen: Tensor, per_rank: int, rank: int | Tensor) -> Tensor:
    """Returns which tokens, of chosen experts i64[…, K], a rank needs, bool[…]."""
    return torch.div(chosen, per_rank, rounding_mode="floor").eq(rank).any(-1)


def slot_stride(like: Tensor) -> int:
    """Returns bytes of an area from the slot of a rank to that of the next one, each for rows like [t, f]."""
    return -(-like.nbytes // _SLOT_GRAIN) * _SLOT_GRAIN


def copy_rows(there: Tensor, rows: Tensor, needed: Tensor) -> None:
    """Writes the rows that are needed, bool[t], of [t, f], into memory of another rank."""
    there[needed] = rows[needed]


def _part(area: Tensor, begin: int, like: Tensor) -> Tensor:
    """Returns a slot, as memory like another tensor."""
    return slot(area, begin, like).view(like.shape)


def _only(rows: Tensor, needed: Tensor) -> Tensor:
    """Returns the rows that are needed, and zeros: what stands in the place of others may be anything."""
    return torch.where(needed.unsqueeze(-1), rows, rows.new_zeros(()))


# Symmetric buffers in the memory of a machine: copies are done when they are asked for. Each rank makes anonymous
# files, which the others open by the process's number: nothing is left behind, whoever dies.


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
        """Returns memory of each rank that all ranks map.

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
    def beside(self, buffer: int, sent: Tensor | Sequence[Tensor]) -> Iterator[None]:
        """Copies are done at once."""
        yield

    def join(self, buffer: int) -> None:
        """Does nothing: no copy is under way."""

    def signal(self, rank: int, buffer: int, stage: int) -> None:
        """Raises the flag; stores of one processor are seen in their order."""
        self._words[rank][self.flag(buffer, stage, self.rank)] = 1

    def wait(self, buffer: int, stage: int, senders: Sequence[int] = ()) -> None:
        """Looks until each flag is up.

        Raises:
            RankError: it is not within the time limit.
        """
        for rank in senders or self.others:
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
    """Returns a text that is the same for processes that see each other's memory."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
