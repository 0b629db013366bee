"""A rank's weights: its parts of a model's, of their initial values, or of a checkpoint's.

Enters: a model (with values or on the meta device), layouts, perhaps a `Checkpoint`. Leaves: the rank's
tensors. No rank holds more of a meta model than its parts and one module, nor more of a checkpoint than
its parts and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fxpar.errors import CheckpointError
from fxpar.layout.shards import local_block
from fxpar.state.checkpoint import Checkpoint, kind_of
from fxpar.state.full_state import check_names, check_shape, names_fit
from fxpar.state.initial import ModelTensor, initialised, named_tensors
from fxpar.state.rank_tensors import Agree, RankTensors
from fxpar.state.sharded import local_of


@dataclass
class Loading:
    """Memory that a rank's weights took while they were put in their places, in bytes.

    Attributes:
        read: of the parts that were read from a checkpoint.
        held: of the rank's parameters and buffers.
        peak: the most that was held at a time: what was in its place, and the module or the piece at hand.
    """

    read: int = 0
    held: int = 0
    peak: int = 0

    def keep(self, value: Tensor) -> Tensor:
        """Counts what stays."""
        self.held += _bytes(value)
        self.at_hand(0)
        return value

    def at_hand(self, size: int) -> None:
        """Counts what is held for a moment besides."""
        self.peak = max(self.peak, self.held + size)


def parts(
    model: nn.Module,
    weights: RankTensors,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    checkpoint: Checkpoint | None,
    loading: Loading,
) -> dict[str, Tensor]:
    """A rank's parts by first name, in memory of their own on the device.

    What the checkpoint has is read from there; other meta tensors get their initial values (`fxpar.state.initial`), one
    module at a time; the rest are copies.

    Args:
        dtype: of floating parameters; None for their own.
        loading: counts what is held.

    Raises:
        InputError: a meta tensor that no initialiser fills.
        CheckpointError: see `open_alike`.
    """
    entries = {entry.first: entry for entry in weights.tensors}
    tensors: dict[str, Tensor] = {}

    def keep(entry: ModelTensor, part: Tensor, copy: bool) -> None:
        floating = dtype is not None and entry.is_parameter and entry.tensor.is_floating_point()
        kind = dtype if floating else entry.tensor.dtype
        tensors[entry.first] = loading.keep(part.to(device, kind, copy=copy).contiguous())

    def cut(entry: ModelTensor, whole: Tensor) -> None:
        keep(entry, local_block(whole, weights.layout_of(entry.first), weights.axes, weights.coordinates), True)

    if checkpoint is not None:
        for entry, part in _read(weights, checkpoint, loading):
            keep(entry, part, False)
            del part  # of another type than what was kept, it would be there when the next one is read
    meta = {name for name, entry in entries.items() if entry.tensor.is_meta and name not in tensors}
    for values in initialised(model, seed, device, meta) if meta else ():
        loading.at_hand(sum(_bytes(value) for value in values.values()))
        while values:  # emptied, so that it is gone when the next module gets memory
            name = next(iter(values))
            cut(entries[name], values.pop(name))
    for name, entry in entries.items():
        if name not in tensors:
            cut(entry, entry.tensor.detach())
    return tensors


def load(weights: RankTensors, checkpoint: str | Path | Checkpoint) -> None:
    """Loads a checkpoint into what is held; each rank reads its parts, in its own types. A collective call.

    Raises:
        CheckpointError: see `open_alike`; nothing is loaded then.
    """
    opened = _open_alike(checkpoint, weights.agree)
    with torch.no_grad():
        for entry, part in _read(weights, opened, Loading()):
            local_of(entry.tensor).copy_(part)


def open_alike(checkpoint: str | Path | Checkpoint, model: nn.Module, agree: Agree) -> Checkpoint:
    """The checkpoint, if every rank has the same one and it is the model's. A collective call.

    Raises:
        CheckpointError: it cannot be read, lacks a name, has an unknown one or a tensor of another shape.
        InputError: the ranks have different checkpoints.
    """
    opened = _open_alike(checkpoint, agree)
    entries = named_tensors(model)
    shapes = {name: tuple(entry.tensor.shape) for entry in entries for name in entry.names}
    _matched(opened, entries, list(model.state_dict()), shapes.__getitem__)
    return opened


def _open_alike(checkpoint: str | Path | Checkpoint, agree: Agree) -> Checkpoint:
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    agree({"the checkpoint": opened.digest}, "give every rank the same files")
    return opened


def _matched(
    checkpoint: Checkpoint,
    entries: Sequence[ModelTensor],
    saved: Sequence[str],
    shape_of: Callable[[str], tuple[int, ...]],
) -> list[tuple[ModelTensor, list[str]]]:
    """What the checkpoint has of the model's tensors, each with its names there."""
    # Buffers that the model does not save are in older checkpoints; the module's own values stand.
    unsaved = {name for entry in entries for name in entry.names} - set(saved)
    keys = [name for name in checkpoint.shapes if name not in unsaved]
    groups = [entry.names for entry in entries]
    where = str(checkpoint.path)
    check_names(keys, saved, groups, where, _prefix_remedy(keys, saved, groups))
    for name in keys:
        check_shape(name, checkpoint.shapes[name], shape_of(name))
    present = set(keys)
    matched = [(entry, [name for name in entry.names if name in present]) for entry in entries]
    for entry, name in ((entry, name) for entry, names in matched for name in names):
        kind, expected = checkpoint.kinds[name], kind_of(entry.tensor.dtype)
        if kind != expected:
            raise CheckpointError(
                f"holds numbers of the kind {kind}, and the model's are {expected}",
                where=f"{where}: {name}",
                remedy="convert it (quantised weights, say) and save it again",
            )
    return [(entry, names) for entry, names in matched if names]


def _prefix_remedy(keys: Sequence[str], saved: Sequence[str], groups: Sequence[Sequence[str]]) -> str:
    """What to do about other names: the change where they differ by what they begin with alone."""
    for theirs, ours, change in ((keys, saved, "name.removeprefix({!r})"), (saved, keys, "{!r} + name")):
        for prefix in {name[: -len(ours[0])] for name in theirs if ours and name.endswith(f".{ours[0]}")}:
            changed = [name.removeprefix(prefix) for name in theirs if name.startswith(prefix)]
            names, expected = (changed, saved) if theirs is keys else (keys, changed)
            if len(changed) == len(theirs) and names_fit(names, expected, groups):
                return f"all names differ by {prefix!r}: pass fxpar.Checkpoint(path, rename=lambda name: " + (
                    change.format(prefix) + ")"
                )
    return "load the checkpoint of this very model; fxpar.Checkpoint(path, rename=…) changes names or leaves some out"


def _read(weights: RankTensors, checkpoint: Checkpoint, loading: Loading) -> Iterator[tuple[ModelTensor, Tensor]]:
    """This rank's part of each tensor of the checkpoint; tied names are compared first."""
    local_names = {entry.first for entry in weights.tensors}
    matched = _matched(checkpoint, weights.everything, weights.saved, weights.shape_of)
    matched = [(entry, names) for entry, names in matched if entry.first in local_names]
    with checkpoint.reading() as reader:

        def part_of(name: str) -> Tensor:
            return reader.part(name, weights.layout_of(name), weights.axes, weights.coordinates)

        for first, other in ((names[0], other) for _, names in matched for other in names[1:]):
            if not torch.equal(part_of(first), part_of(other)):
                raise CheckpointError(
                    f"is tied to {first} and has other values",
                    where=f"{checkpoint.path}: {other}",
                    remedy="leave one of the two names out",
                )
        for entry, (name, *_) in matched:
            part = part_of(name)
            loading.read = reader.bytes_read
            loading.at_hand(_bytes(part) + reader.latest)
            yield entry, part
            del part  # else it is there when the next one is read


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
