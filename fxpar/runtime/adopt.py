"""A rank's weights: its parts of a model's, of their initial values, or of a checkpoint's.

Enters: a model (with values or on the meta device), layouts, perhaps a `Checkpoint`. Leaves: the parallel module's
parameters and buffers. No rank holds more of a meta model than its parts and one module, nor more of a checkpoint than
its parts and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpar.errors import CheckpointError
from fxpar.layout.layout import Layout
from fxpar.layout.shards import local_block
from fxpar.program.mixed import is_mixed
from fxpar.runtime.checkpoint import Checkpoint, kind_of
from fxpar.runtime.mains import MainParameter
from fxpar.runtime.place import Place
from fxpar.runtime.sharded import Sharded, local_of
from fxpar.runtime.sharded_parameter import ShardedParameter
from fxpar.runtime.state import check_names, check_shape, names_fit
from fxpar.runtime.world import World
from fxpar.state.initial import Named, initialised, named_tensors

if TYPE_CHECKING:
    from fxpar.runtime.module import ParallelModule


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


@dataclass(frozen=True)
class Share:
    """What one rank keeps of a model's tensors.

    Attributes:
        tensors: the model's.
        saved: the names that the model saves.
        shape_of: whole shape by name.
        layout_of: layout by name.
        axes: sizes of the mesh axes.
        coordinates: the rank's index on each.
    """

    tensors: Sequence[Named]
    saved: Sequence[str]
    shape_of: Callable[[str], tuple[int, ...]]
    layout_of: Callable[[str], Layout]
    axes: Mapping[str, int]
    coordinates: Mapping[str, int]

    @staticmethod
    def of(module: ParallelModule, model: nn.Module) -> Share:
        """The share of a module's rank in a model that has the module's names."""
        plan, world = module.plan, module.world
        tensors = named_tensors(model)
        return Share(tensors, module.saved_names, module.shape_of, module.layout_of, plan.axes, world.coordinates)


def adopt(
    module: ParallelModule, model: nn.Module, dtype: torch.dtype | None, checkpoint: Checkpoint | None
) -> Loading:
    """Gives a module its parts of the model's parameters, and the model's buffers whole; see `parts`.

    Args:
        model: is left as it is.

    Raises:
        InputError, CheckpointError: see `parts`.
    """
    loading = Loading()
    share = Share.of(module, model)
    _register(module, model, parts(model, share, module.plan.seed, module.world.device, dtype, checkpoint, loading))
    return loading


def parts(
    model: nn.Module,
    share: Share,
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
    entries = {entry.first: entry for entry in share.tensors}
    found: dict[str, Tensor] = {}

    def keep(entry: Named, part: Tensor, copy: bool) -> None:
        floating = dtype is not None and entry.is_parameter and entry.tensor.is_floating_point()
        kind = dtype if floating else entry.tensor.dtype
        found[entry.first] = loading.keep(part.to(device, kind, copy=copy).contiguous())

    def cut(entry: Named, whole: Tensor) -> None:
        keep(entry, local_block(whole, share.layout_of(entry.first), share.axes, share.coordinates), True)

    if checkpoint is not None:
        for entry, part in _read(share, checkpoint, loading):
            keep(entry, part, False)
            del part  # of another type than what was kept, it would be there when the next one is read
    meta = {name for name, entry in entries.items() if entry.tensor.is_meta and name not in found}
    for values in initialised(model, seed, device, meta) if meta else ():
        loading.at_hand(sum(_bytes(value) for value in values.values()))
        while values:  # emptied, so that it is gone when the next module gets memory
            name = next(iter(values))
            cut(entries[name], values.pop(name))
    for name, entry in entries.items():
        if name not in found:
            cut(entry, entry.tensor.detach())
    return found


def _register(module: ParallelModule, model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Puts the parts under all their names, in the model's order."""
    first = {name: entry.first for entry in named_tensors(model) for name in entry.names}
    parameters: dict[str, nn.Parameter] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if first[name] not in parameters:
            part, place = found[first[name]], module.place_of(first[name])
            parameters[first[name]] = _parameter(part, place, value.requires_grad, is_mixed(module.plan))
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path).register_parameter(leaf, parameters[first[name]])
    saved = set(module.saved_names)
    buffers: dict[str, Tensor] = {}
    for name, _ in model.named_buffers(remove_duplicate=False):
        part, place = found[first[name]], module.place_of(first[name])
        buffer = buffers.setdefault(first[name], part if place is None else Sharded(part, place))
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path).register_buffer(leaf, buffer, persistent=name in saved)


def _parameter(part: Tensor, place: Place | None, requires_grad: bool, has_copy: bool) -> nn.Parameter:
    kind = MainParameter if has_copy and part.is_floating_point() else nn.Parameter
    made: Any = ShardedParameter(part, place, requires_grad) if place else kind(part, requires_grad)
    return made  # type: ignore[no-any-return]


def load(module: ParallelModule, checkpoint: str | Path | Checkpoint) -> None:
    """Loads a checkpoint into a module; each rank reads its parts, in its own types. A collective call.

    Raises:
        CheckpointError: see `open_alike`; nothing is loaded then.
    """
    found = _open_alike(checkpoint, module.world)
    with torch.no_grad():
        for entry, part in _read(Share.of(module, module), found, Loading()):
            local_of(entry.tensor).copy_(part)


def open_alike(checkpoint: str | Path | Checkpoint, model: nn.Module, world: World) -> Checkpoint:
    """The checkpoint, if every rank has the same one and it is the model's. A collective call.

    Raises:
        CheckpointError: it cannot be read, lacks a name, has an unknown one or a tensor of another shape.
        InputError: the ranks have different checkpoints.
    """
    found = _open_alike(checkpoint, world)
    entries = named_tensors(model)
    shapes = {name: tuple(entry.tensor.shape) for entry in entries for name in entry.names}
    _matched(found, entries, list(model.state_dict()), shapes.__getitem__)
    return found


def _open_alike(checkpoint: str | Path | Checkpoint, world: World) -> Checkpoint:
    found = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    world.agreement.agree({"the checkpoint": found.digest}, "give every rank the same files")
    return found


def _matched(
    checkpoint: Checkpoint, entries: Sequence[Named], saved: Sequence[str], shape_of: Callable[[str], tuple[int, ...]]
) -> list[tuple[Named, list[str]]]:
    """What the checkpoint has of the model's tensors, each with its names there."""
    # Buffers that the model does not save are in older checkpoints; the module's own values stand.
    unsaved = {name for entry in entries for name in entry.names} - set(saved)
    given = [name for name in checkpoint.shapes if name not in unsaved]
    groups = [entry.names for entry in entries]
    where = str(checkpoint.path)
    check_names(given, saved, groups, where, _prefix_remedy(given, saved, groups))
    for name in given:
        check_shape(name, checkpoint.shapes[name], shape_of(name))
    present = set(given)
    matched = [(entry, [name for name in entry.names if name in present]) for entry in entries]
    for entry, name in ((entry, name) for entry, names in matched for name in names):
        found, wanted = checkpoint.kinds[name], kind_of(entry.tensor.dtype)
        if found != wanted:
            raise CheckpointError(
                f"holds numbers of the kind {found}, and the model's are {wanted}",
                where=f"{where}: {name}",
                remedy="convert it (quantised weights, say) and save it again",
            )
    return [(entry, names) for entry, names in matched if names]


def _prefix_remedy(given: Sequence[str], saved: Sequence[str], groups: Sequence[Sequence[str]]) -> str:
    """What to do about other names: the change where they differ by what they begin with alone."""
    for theirs, ours, change in ((given, saved, "name.removeprefix({!r})"), (saved, given, "{!r} + name")):
        for prefix in {name[: -len(ours[0])] for name in theirs if ours and name.endswith(f".{ours[0]}")}:
            changed = [name.removeprefix(prefix) for name in theirs if name.startswith(prefix)]
            names, wanted = (changed, saved) if theirs is given else (given, changed)
            if len(changed) == len(theirs) and names_fit(names, wanted, groups):
                return f"all names differ by {prefix!r}: pass fxpar.Checkpoint(path, rename=lambda name: " + (
                    change.format(prefix) + ")"
                )
    return "load the checkpoint of this very model; fxpar.Checkpoint(path, rename=…) changes names or leaves some out"


def _read(share: Share, checkpoint: Checkpoint, loading: Loading) -> Iterator[tuple[Named, Tensor]]:
    """This rank's part of each tensor of the checkpoint; tied names are compared first."""
    matched = _matched(checkpoint, share.tensors, share.saved, share.shape_of)
    with checkpoint.reading() as reader:

        def part_of(name: str) -> Tensor:
            return reader.part(name, share.layout_of(name), share.axes, share.coordinates)

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
