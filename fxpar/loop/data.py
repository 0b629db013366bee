"""Where a training is in its data, whatever the number of data ranks.

Enters: what yields batches. Leaves: batches without end from a position on; and the position, which counts the samples
of the whole job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from fxpar.api import check_parallel, prefetch
from fxpar.checkpoint.optimizer_state import decode, encode
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import InputError, shown
from fxpar.mesh.axes import DENSE, PURPOSES, Cuts
from fxpar.runtime.rank_batches import data_part

# Epochs of one seed are apart from those of another.
_SEEDS, _LARGEST = 1_000_003, 2**63 - 1
_TENSOR = "a tensor's type, shape and elements"


class BatchSampler(Sampler[list[int]]):
    """Yields the indices of this data rank's rows of each global batch, for `DataLoader(batch_sampler=…)`.

    The order of the whole job follows from seed and epoch alone. So a training that resumes with another number of data
    ranks sees the samples that it has not seen yet, in the same order.

    Example:
        ```python
        sampler = fxpar.BatchSampler(len(dataset), batch_size=4, model=model, seed=1)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
        ```

    Args:
        length: samples of the dataset.
        batch_size: samples of a step, over all data ranks.
        model: what `parallelize` returned; its data ranks divide each batch as `shard_batch` does.
        seed: of the order; the same on all ranks.
        start: how many samples the whole job has seen, over all epochs. `fxpar.train` sets it.
        shuffle: whether every epoch has another order; else it is that of the dataset.
        drop_last: whether the samples that fill no batch at an epoch's end are left out.

    Raises:
        InputError: a size is not positive, or a batch has fewer samples than there are data ranks.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        model: ParallelModule,
        seed: int = 0,
        start: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        check_parallel(model, "BatchSampler")
        for name, number, least in (("length", length, 1), ("batch_size", batch_size, 1), ("start", start, 0)):
            if type(number) is not int or number < least:
                reason = f"must be an integer of at least {least}, got {shown(number)}"
                raise InputError(reason, where=name, remedy="pass one")
        self.length, self.batch_size, self.seed, self.start = length, batch_size, seed, start
        self.shuffle, self.drop_last = shuffle, drop_last
        axes, places = model.world.mesh.nested(DENSE), model.world.mesh.coordinates(model.world.rank)
        self._cuts = [(n, places[axis]) for axis, n in axes.items() if PURPOSES[axis].cuts is Cuts.BATCH]
        smallest = batch_size if drop_last else length % batch_size or batch_size
        ranks = data_ranks(model)
        if smallest < ranks:
            remedy = "pass a larger batch_size" if drop_last else "pass drop_last=True, or a larger batch_size"
            raise InputError(f"{smallest} samples for {ranks} data ranks", where="batch_size", remedy=remedy)
        if drop_last and length < batch_size:
            remedy = "pass a smaller batch_size, or drop_last=False"
            raise InputError(f"{length} samples fill no batch of {batch_size}", where="batch_size", remedy=remedy)

    @property
    def epoch_samples(self) -> int:
        """Returns how many samples of an epoch are used."""
        return self.length // self.batch_size * self.batch_size if self.drop_last else self.length

    def __len__(self) -> int:
        """Returns how many batches the next epoch, or what is left of the current one, has."""
        left = self.epoch_samples - self.start % self.epoch_samples
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields from `start` to the end of the epoch, and moves `start` to the next one."""
        epoch, first = divmod(self.start, self.epoch_samples)
        order = torch.arange(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * _SEEDS + epoch) & _LARGEST)
            order = torch.randperm(self.length, generator=generator)
        for batch in range(len(self)):
            rows = order[: self.epoch_samples][first + batch * self.batch_size :][: self.batch_size]
            for n, place in self._cuts:
                rows = rows.tensor_split(n)[place]
            yield rows.tolist()
        self.start = (epoch + 1) * self.epoch_samples


class RankRows(Sampler[int]):
    """Yields the indices of one data rank's rows, from the order of the whole job.

    Each batch of `rows` × `parts` indices is cut into parts; of a smaller last one the first parts have a row more.

    Args:
        sampler: yields the same order on all ranks.
        rows: of a full batch of this rank.
        parts: data ranks.
        part: which of them this is.
        drop_last: whether indices that fill no batch are left out.

    Raises:
        InputError: the last batch has fewer rows than there are data ranks, or none is filled.
    """

    def __init__(self, sampler: Any, rows: int, parts: int, part: int, drop_last: bool) -> None:
        self.sampler, self.rows, self.parts, self.part, self.drop_last = sampler, rows, parts, part, drop_last
        rest = len(sampler) % (rows * parts)
        if drop_last and len(sampler) < rows * parts:
            reason = f"{len(sampler)} samples fill no batch of {parts} × {rows}"
            raise InputError(reason, where="train_dataset", remedy="pass a smaller per_device_train_batch_size")
        if not drop_last and 0 < rest < parts:
            raise InputError(
                f"the last batch has {rest} of {len(sampler)} samples for {parts} data ranks",
                where="train_dataset",
                remedy="pass dataloader_drop_last=True, or another per_device_train_batch_size",
            )

    def __len__(self) -> int:
        """Returns how many indices this rank reads in an epoch."""
        full, rest = divmod(len(self.sampler), self.rows * self.parts)
        return full * self.rows + (0 if self.drop_last else len(self._cut(range(rest))))

    def __iter__(self) -> Iterator[int]:
        """Yields the indices of an epoch."""
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.rows * self.parts:
                yield from self._cut(batch)
                batch = []
        if not self.drop_last:
            yield from self._cut(batch)

    def _cut(self, batch: Any) -> Any:
        least, more = divmod(len(batch), self.parts)
        start = self.part * least + min(self.part, more)
        return batch[start : start + least + (self.part < more)]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch, where the sampler has several."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class Source:
    """Batches of a loader, epoch after epoch.

    Args:
        loader: a callable that takes the samples seen so far and returns batches from there on; or an iterable. The
            position of one with `state_dict` and `load_state_dict` is its state on each data rank, that of a loader
            over a `BatchSampler` the count of samples, and that of others how many batches to skip.
        model: what the batches are for.
        state_every: steps after which the state of a loader is looked up; 0 where none will be saved.

    Attributes:
        samples: that the whole job has trained on.

    Raises:
        InputError: the loader is none of these.
    """

    def __init__(self, loader: Any, model: ParallelModule, state_every: int) -> None:
        if not isinstance(loader, Iterable) and not callable(loader):
            remedy = "pass a DataLoader, an iterable of batches, or a callable that takes the count of samples"
            raise InputError(f"a {type(loader).__name__} yields no batches", where="loader", remedy=remedy)
        self.samples = 0
        self._loader, self._model, self._state_every = loader, model, state_every
        sampler = getattr(loader, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, BatchSampler) else None
        is_counted = self._sampler is not None or not isinstance(loader, Iterable)
        self._has_state = not is_counted and hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._skips_batches = not is_counted
        self._seen = self._read = self._stepped = 0
        # Where the loader was after how many reads: the epoch, the batches to skip from there, and the state.
        self._marks: dict[int, tuple[int, int, Any]] = {0: (0, 0, None)}
        self._skip = 0

    def batches(self) -> Generator[Any, None, None]:
        """Yields the batches from the position on, without end; on GPUs each is copied ahead of its step.

        Raises:
            InputError: the loader yields nothing, or what no step takes.
        """
        epoch, is_resumed = self._marks[0][0], True
        while True:
            before = self._seen
            yield from prefetch(self._epoch(epoch), self._model)
            if before == self._seen and not is_resumed:
                remedy = "check the dataset; a generator ends for good: pass what can be iterated again"
                raise InputError("yields no batch", where="loader", remedy=remedy)
            # A position may be the very end of an epoch.
            epoch, is_resumed = epoch + 1, False

    def _epoch(self, epoch: int) -> Iterator[Any]:
        loader = self._loader
        if self._sampler is not None:
            self._sampler.start = self.samples
        for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if self._skips_batches and set_epoch is not None:
                set_epoch(epoch)
        for number, batch in enumerate(loader if isinstance(loader, Iterable) else loader(self.samples)):
            if not isinstance(batch, Mapping | tuple | list | Tensor):
                remedy = "yield what train_step takes: a mapping, a tuple, a tensor, or a list of microbatches"
                raise InputError(f"yields a {type(batch).__name__}", where="loader", remedy=remedy)
            self._seen += 1
            if self._skip:
                self._skip -= 1
                continue
            self._read += 1
            if not self._has_state:
                self._marks[self._read] = (epoch, number + 1, None)
            # Before the next batch is read, which may be ahead of the step. The first read fixes the order.
            elif self._state_every and (self._read == 1 or self._read % self._state_every == 0):
                self._marks[self._read] = (epoch, 0, self._loader.state_dict())
            yield batch

    def stepped(self, samples: int) -> None:
        """Counts a step, and the samples of all data ranks in it."""
        self.samples, self._stepped = self.samples + samples, self._stepped + 1
        past = sorted(number for number in self._marks if number <= self._stepped)
        for number in past[:-1]:
            del self._marks[number]

    def position(self, step: int) -> dict[str, Any]:
        """Returns where the training is, which is the same on all ranks. A collective call.

        Args:
            step: the number of the last one.
        """
        place: dict[str, Any] = {"step": step, "samples": self.samples}
        if not self._skips_batches:
            return place
        read = max(number for number in self._marks if number <= self._stepped)
        epoch, skipped, state = self._marks[read]
        place |= {"epoch": epoch, "skip": skipped + self._stepped - read}
        if state is None:
            return place
        world, agreement = self._model.world, self._model.world.agreement
        with agreement.call("train"):
            text = json.dumps(encode(_plain(state), "the loader's state"))
            texts = agreement.gather_texts(f"loader {step}", text)
        by_part = {data_part(world.mesh, rank): texts[rank] for rank in range(world.size)}
        return place | {"loaders": [by_part[part] for part in sorted(by_part)]}

    def resume(self, position: Any) -> int:
        """Goes to a saved position; returns the steps that were made before it.

        Raises:
            InputError: `fxpar.train` did not save it, or another number of data ranks saved the loader's states.
        """
        if not isinstance(position, dict) or not position.keys() >= {"step", "samples"}:
            remedy = "resume it with the loop that saved it, or pass another folder for saves"
            raise InputError("the position is none of fxpar.train", where="saves", remedy=remedy)
        self.samples, states = position["samples"], position.get("loaders")
        if not self._skips_batches:
            return int(position["step"])
        if "epoch" not in position:
            remedy = "pass the loader of the earlier run, or a callable that takes the count of samples"
            raise InputError("the save counts samples, and this loader skips batches", where="loader", remedy=remedy)
        state = None
        if states is not None and self._has_state:
            if len(states) != data_ranks(self._model):
                raise InputError(
                    f"{len(states)} data ranks saved its states, and there are {data_ranks(self._model)}",
                    where="loader",
                    remedy="give the loader batch_sampler=fxpar.BatchSampler(…), which holds under any plan",
                )
            state = _tensors(decode(json.loads(states[data_part(self._model.world.mesh, self._model.world.rank)])))
            self._loader.load_state_dict(state)
        elif states is not None:
            raise InputError("the save has a loader's state", where="loader", remedy="pass the loader that was saved")
        self._skip = position["skip"]
        self._marks = {0: (position["epoch"], self._skip, state)}
        return int(position["step"])


def data_ranks(model: ParallelModule) -> int:
    """Returns how many parts of a batch the ranks train on."""
    return len({data_part(model.world.mesh, rank) for rank in range(model.world.size)})


def _mapped(state: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a nest of dicts, lists and tuples with each entry changed, the inner ones first."""
    if isinstance(state, dict):
        state = {key: _mapped(entry, change) for key, entry in state.items()}
    elif type(state) in (list, tuple):
        state = type(state)(_mapped(entry, change) for entry in state)
    return change(state)


def _plain(state: Any) -> Any:
    """Returns a loader's state without tensors, such as those of random generators."""

    def change(entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        dtype = str(entry.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(entry.shape), entry.flatten().tolist()]}

    return _mapped(state, change)


def _tensors(state: Any) -> Any:
    """Returns what `_plain` was called with."""

    def change(entry: Any) -> Any:
        if not isinstance(entry, dict) or entry.keys() != {_TENSOR}:
            return entry
        dtype, shape, elements = entry[_TENSOR]
        return torch.tensor(elements, dtype=getattr(torch, dtype)).reshape(shape)

    return _mapped(state, change)
