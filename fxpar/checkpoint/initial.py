"""Fills a rank's parts of a model: from its values, its authors' initialisers (SPEC section 2.4), or safetensors.

The values of a meta tensor follow from a seed and its module's name alone, so every rank gets the same bits. No rank
holds more of a meta model than its parts and one module, nor more of a checkpoint than its parts and one tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxpar.checkpoint.adapters import initialiser_of
from fxpar.checkpoint.model_names import open_for
from fxpar.checkpoint.safetensors_files import Checkpoint, kind_of
from fxpar.checkpoint.state_dicts import Agree, RankTensors, check_names, check_shape, names_fit
from fxpar.errors import CheckpointError, InputError, shown
from fxpar.layout.shards import local_block
from fxpar.runtime.shard_spec import ModelTensor, named_tensors
from fxpar.runtime.sharded import local_of

# Fills integers before they are initialised; floating tensors are filled with NaN.
_UNWRITTEN = 0xFB
# Where a module keeps a tensor: its `_parameters` or `_buffers`, and the name in it.
_Place = tuple[dict[str, Any], str]


def materialize(model: nn.Module, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """Gives a model that was built under `torch.device("meta")` its initial weights, and returns it.

    The initialiser of the module that holds a tensor fills it. This is `_init_weights` of the transformers model around
    it, or of any module around it that has this method; otherwise `reset_parameters`. Initialisers of the modules
    around it run after that, as GPT-2's scaled residual projections need. Tied weights are initialised once, under
    their first name. Tensors that have values keep them.

    Each module's random state is a hash of the seed and of its name. So values depend neither on the process nor on the
    order, but a GPU and a CPU draw different numbers. The random states of the process stay unchanged.
    `fxpar.parallelize` gives each rank its part of the same bits.

    What a constructor itself does to weights, such as a loop that rescales some of them, is lost on the meta device.
    Write it into `_init_weights` or `reset_parameters`. `torch.Tensor(n, m)` in a constructor ignores the meta device:
    such a tensor counts as one that has values, whatever they are.

    Example:
        ```python
        with torch.device("meta"):
            model = torch.nn.Linear(4, 4)
        fxpar.materialize(model, seed=0, device="cpu")
        ```

    Args:
        model: changed in place: its meta parameters and buffers are replaced by new ones.
        seed: the `Plan.seed` of the run to compare with.
        device: where to draw the values: the device of the run to compare with.

    Raises:
        InputError: no initialiser fills a tensor, or an initialiser fails without the values of other tensors.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model must be an nn.Module, got a {type(model).__name__}", where="materialize", remedy="pass the model"
        )
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise InputError(
            f"must be an integer in [0, 2^63), got {shown(seed)}", where="seed", remedy="pass Plan.seed of the run"
        )
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(reason, where=f"device {shown(device)}", remedy="name one such as 'cpu' or 'cuda'") from None
    weights: dict[str, Tensor] = {}
    for values in initialised(model, seed, place):
        weights.update(values)
    for entry in named_tensors(model):
        if entry.first in weights:
            value = weights[entry.first]
            if entry.is_parameter:
                value = nn.Parameter(value, requires_grad=entry.tensor.requires_grad)
            for name in entry.names:
                store, leaf = _place(model, name)
                store[leaf] = value
    return model


def initialised(
    model: nn.Module, seed: int, device: torch.device, names: set[str] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yields initial values of a model's meta tensors on a device by first name, one module after the other.

    Only the module at hand has memory, and the model is as before whenever a dict is yielded. It must stay so until the
    end: initialisers draw numbers for what has memory. A caller that empties the dict never holds two modules. See
    `materialize`.

    Args:
        names: first names of the tensors that are wanted; None for all of the meta device.

    Raises:
        InputError: see `materialize`.
    """
    _check_attributes(model)
    aside: list[tuple[_Place, Tensor]] = []
    modules: dict[str, list[str]] = {}
    for entry in named_tensors(model):
        if entry.tensor.is_meta:
            path, _, leaf = entry.first.rpartition(".")
            modules.setdefault(path, []).append(leaf)
        else:
            aside += [(_place(model, name), entry.tensor) for name in entry.names]
    for path, leaves in modules.items():
        full = {leaf: f"{path}.{leaf}".lstrip(".") for leaf in leaves}
        needed = [leaf for leaf in leaves if names is None or full[leaf] in names]
        if needed:
            with _set_aside(aside):
                values = _ModuleInitializer(model, path, leaves, device).values(seed)
            yield {full[leaf]: values.pop(leaf) for leaf in needed}


def _place(model: nn.Module, name: str) -> _Place:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def _check_attributes(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise InputError(
                    "a tensor of the meta device that is neither parameter nor buffer has no values",
                    where=f"{path}.{name}".lstrip("."),
                    remedy="register it as a buffer, or make it in forward",
                )


@contextlib.contextmanager
def _set_aside(aside: Sequence[tuple[_Place, Tensor]]) -> Iterator[None]:
    """Keeps tensors that have values from initialisers, which may read a buffer's."""
    for (store, leaf), value in aside:
        if isinstance(value, nn.Parameter):
            store[leaf] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)
        else:
            store[leaf] = value.clone()
    try:
        yield
    finally:
        for (store, leaf), value in aside:
            store[leaf] = value


class _ModuleInitializer:
    """A module that is initialised by itself: its own tensors get memory, all others stay on the meta device.

    Args:
        model: the whole.
        path: the module's name.
        leaves: names of its meta tensors that it holds first.
        device: of the memory.
    """

    def __init__(self, model: nn.Module, path: str, leaves: Sequence[str], device: torch.device) -> None:
        self._path, self._device = path, device
        parts = path.split(".") if path else []
        around = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
        self._chain = [(name, model.get_submodule(name)) for name in around]  # from the module to the model
        self._module = self._chain[0][1]
        stores = (self._module._parameters, self._module._buffers)
        self._places: dict[str, dict[str, Any]] = {leaf: stores[leaf in stores[1]] for leaf in leaves}

    def values(self, seed: int) -> dict[str, Tensor]:
        """Returns the values of its tensors.

        Raises:
            InputError: a tensor stays unfilled.
        """
        meta = {leaf: store[leaf] for leaf, store in self._places.items()}
        digest = hashlib.sha256(f"{seed}:{self._path}".encode()).digest()
        authors, resets = self._authors(), self._resets()
        unfilled: list[str] = []
        try:
            # What `_init_weights` leaves alone has what the constructor gave it.
            for initialisers in [authors, resets + authors] if authors else [resets]:
                for leaf, store in self._places.items():
                    store[leaf] = _unwritten(meta[leaf], self._device)
                with _drawing(digest, self._device), torch.no_grad(), self._device:
                    for name, initialise in initialisers:
                        self._run(name, initialise)
                unfilled = [leaf for leaf, store in self._places.items() if not _is_written(store[leaf], meta[leaf])]
                if not unfilled:
                    break
            values = {leaf: store[leaf].detach() for leaf, store in self._places.items() if leaf not in unfilled}
        finally:
            for leaf, store in self._places.items():
                store[leaf] = meta[leaf]
        for leaf in unfilled:
            self._refuse(leaf)
        return values

    def _authors(self) -> list[tuple[str, Callable[[], Any]]]:
        """Returns `_init_weights` for the module and each one around it, by the nearest that has the method."""
        initialisers: list[tuple[str, Callable[[], Any]]] = []
        for index, (name, module) in enumerate(self._chain):
            for _, owner in self._chain[index:]:
                method = getattr(owner, "_init_weights", None)
                if callable(method) and _takes(method, module):
                    initialisers.append((name, partial(method, module)))
                    break
        # Behind the authors, who take the matrices of an adapter for any others: its second one is zero at first.
        model = self._chain[-1][1]
        adapters = ((name, initialiser_of(model, module)) for name, module in self._chain)
        return initialisers + [(name, initialise) for name, initialise in adapters if initialise is not None]

    def _resets(self) -> list[tuple[str, Callable[[], Any]]]:
        """Returns `reset_parameters` of the module and of those around it, or torch attention's `_reset_parameters`."""
        initialisers = []
        for name, module in self._chain:
            method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(method) and _takes(method):
                initialisers.append((name, method))
        return initialisers

    def _run(self, name: str, initialise: Callable[[], Any]) -> None:
        try:
            initialise()
        except RuntimeError as error:
            raise InputError(
                f"its initialiser cannot run where {self._path or 'the model'} alone has memory: "
                f"{str(error).splitlines()[0]}",
                where=name or type(self._chain[-1][1]).__name__,
                remedy="initialise the model on the CPU, or load a checkpoint",
            ) from error

    def _refuse(self, leaf: str) -> None:
        kind = type(self._module).__name__
        what = "buffer" if leaf in self._module._buffers else "parameter"
        raise InputError(
            f"is a {what} of a {kind}, which has no initialiser that fills it",
            where=f"{self._path}.{leaf}".lstrip("."),
            remedy=f"fill it in {kind}.reset_parameters() or the model's _init_weights(), or give it values before: "
            "tensors that have some keep them",
        )


def _takes(method: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _unwritten(meta: Tensor, device: torch.device) -> Tensor:
    """Returns memory for a tensor of the meta device, filled with what no initialiser leaves."""
    tensor = torch.empty_like(meta, device=device)
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor = torch.full((*tensor.shape, tensor.element_size()), _UNWRITTEN, dtype=torch.uint8, device=device)
        tensor = tensor.view(meta.dtype).reshape(meta.shape)
    return nn.Parameter(tensor, requires_grad=meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor


def _is_written(value: Any, meta: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.is_meta or value.shape != meta.shape or value.dtype != meta.dtype:
        return False
    if value.is_floating_point() or value.is_complex():
        return not bool(value.isnan().any())
    elements = (value.detach().contiguous().reshape(-1, 1).view(torch.uint8) == _UNWRITTEN).all(-1)
    # In one byte it is a value like others.
    return not bool(elements.all() if value.element_size() == 1 and value.numel() else elements.any())


@contextlib.contextmanager
def _drawing(digest: bytes, device: torch.device) -> Iterator[None]:
    """Seeds the generators of host and device from a digest; restores their states at the end."""
    states = random.getstate(), np.random.get_state()
    number = int.from_bytes(digest[:8], "little") >> 1
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.default_generator.manual_seed(number)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(number)
        # numpy takes seeds of 32 bits alone.
        np.random.seed(int.from_bytes(digest[:4], "little"))
        random.seed(digest)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


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
        self.held += value.nbytes
        self.at_hand(0)
        return value

    def at_hand(self, size: int) -> None:
        """Counts what takes memory for a moment besides."""
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
    """Returns a rank's parts by first name, in memory of their own on the device.

    What the checkpoint has is read from there; other meta tensors get their initial values, one
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
        loading.at_hand(sum(value.nbytes for value in values.values()))
        while values:  # emptied, so that it is gone when the next module gets memory
            name = next(iter(values))
            cut(entries[name], values.pop(name))
    for name, entry in entries.items():
        if name not in tensors:
            cut(entry, entry.tensor.detach())
    return tensors


def load(weights: RankTensors, checkpoint: Checkpoint) -> None:
    """Loads a checkpoint into a rank's tensors, of which it reads its parts; see `ParallelModule.load_checkpoint`."""
    weights.agree({"the checkpoint": checkpoint.digest}, _SAME_FILES)
    with torch.no_grad():
        for entry, part in _read(weights, checkpoint, Loading()):
            local_of(entry.tensor).copy_(part)


_SAME_FILES = "give every rank the same files"


def open_alike(checkpoint: str | Path | Checkpoint, model: nn.Module, agree: Agree) -> Checkpoint:
    """Opens the checkpoint, if every rank has the same one and it is the model's. A collective call.

    Raises:
        CheckpointError: it cannot be read, lacks a name, has an unknown one or a tensor of another shape.
        InputError: the ranks have different checkpoints.
    """
    saved = list(model.state_dict())
    opened = open_for(model, checkpoint, saved)
    agree({"the checkpoint": opened.digest}, _SAME_FILES)
    entries = named_tensors(model)
    shapes = {name: tuple(entry.tensor.shape) for entry in entries for name in entry.names}
    _matched(opened, entries, saved, shapes.__getitem__)
    return opened


def _matched(
    checkpoint: Checkpoint,
    entries: Sequence[ModelTensor],
    saved: Sequence[str],
    shape_of: Callable[[str], tuple[int, ...]],
) -> list[tuple[ModelTensor, list[str]]]:
    """Returns what the checkpoint has of the model's tensors, each with its names there."""
    # Buffers that the model does not save are in older checkpoints; the module's own values stand.
    unsaved = {name for entry in entries for name in entry.names} - set(saved)
    shapes, kinds = checkpoint.shapes, checkpoint.kinds
    keys = [name for name in shapes if name not in unsaved]
    groups = [entry.names for entry in entries]
    where = str(checkpoint.path)
    expected = [name for name in saved if name not in checkpoint.absent]
    check_names(keys, expected, groups, where, _prefix_remedy(keys, expected, groups))
    for name in keys:
        check_shape(name, shapes[name], shape_of(name))
    present = set(keys)
    matched = [(entry, [name for name in entry.names if name in present]) for entry in entries]
    for entry, name in ((entry, name) for entry, names in matched for name in names):
        kind, here = kinds[name], kind_of(entry.tensor.dtype)
        if kind != here:
            raise CheckpointError(
                f"holds numbers of the kind {kind}, and the model's are {here}",
                where=f"{where}: {name}",
                remedy="convert it (quantised weights, say) and save it again",
            )
    return [(entry, names) for entry, names in matched if names]


def _prefix_remedy(keys: Sequence[str], saved: Sequence[str], groups: Sequence[Sequence[str]]) -> str:
    """Says what to do about other names: the change where they differ by a prefix alone."""
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
    """Yields this rank's part of each tensor of the checkpoint; tied names are compared first."""
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
            loading.at_hand(part.nbytes + reader.latest)
            yield entry, part
            del part  # else it is there when the next one is read
