"""Saves all that a training is, and takes it up again.

A save is a folder with safetensors under the author's names (`model`, which transformers' `from_pretrained` reads, and
`optimizer.KEY` for each state) and `training.json`. Every rank writes and reads its own parts, and nothing depends on
the plan. A save is there whole or not at all: it is written to `saving-…`, and one rename by rank 0 to
`training-00000001` and on makes it count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpar.checkpoint.initial import load
from fxpar.checkpoint.optimizer_state import check_fits, collect, decode, document, encode, restore
from fxpar.checkpoint.rank_tensors import RankTensors
from fxpar.checkpoint.safetensors_files import BoxFile, Checkpoint, Spec, index_document, split_files
from fxpar.checkpoint.sharded import local_of
from fxpar.checkpoint.state_dicts import bytes_of, folder_of, save_configuration, saved_once
from fxpar.errors import CheckpointError, InputError, shown
from fxpar.layout.layout import Layout
from fxpar.layout.shards import Box, boxes
from fxpar.plan.plan import Plan

DOCUMENT = "training.json"
_COMPLETE = re.compile(r"training-(\d{8})")
_LEFTOVER = re.compile(r"(saving|removing)-\d{8}")
# Seconds in which what one machine wrote is seen by the others.
_DELAY = 10.0

_T = TypeVar("_T")


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turns what the file system refuses into an error that names the place."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise CheckpointError(reason, where=str(path), remedy="check the folder and the space left") from error


def completed(folder: Path) -> list[Path]:
    """All saves, the oldest first."""
    try:
        saves = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}", where=str(folder), remedy="check the path"
        ) from error
    return sorted(saves)


def newest(folder: Path) -> Path:
    """The last save.

    Raises:
        CheckpointError: there is none.
    """
    if _COMPLETE.fullmatch(folder.name) and (folder / DOCUMENT).is_file():
        return folder  # a certain one
    saves = completed(folder)
    if saves:
        return saves[-1]
    is_there = folder.is_dir()
    raise CheckpointError(
        "holds no completed save" if is_there else "there is no such folder",
        where=str(folder),
        remedy="check the path; weights alone are loaded with load_checkpoint" if is_there else "check the path",
    )


def begin(folder: Path) -> Path:
    """Removes what killed saves left and makes the folder of the next one. Of rank 0."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        known = completed(folder)
        number = int(known[-1].name[-8:]) + 1 if known else 1
        fresh = folder / f"saving-{number:08d}"
        fresh.mkdir()
    return fresh


def begun(folder: Path) -> Path:
    """The folder that rank 0 has made, as another rank sees it.

    Raises:
        CheckpointError: this rank does not see it.
    """

    def look() -> Path | None:
        folders = [path for path in folder.glob("saving-*") if _LEFTOVER.fullmatch(path.name)]
        return folders[0] if len(folders) == 1 else None

    fresh = eventually(look)
    if fresh is None:
        raise not_shared(folder)
    return fresh


def eventually(look: Callable[[], _T | None]) -> _T | None:
    """What another machine wrote, as soon as it is seen here."""
    deadline = time.monotonic() + _DELAY
    while True:
        seen = look()
        if seen is not None or time.monotonic() > deadline:
            return seen
        time.sleep(0.05)


def appears(path: Path) -> bool:
    """Whether a file of another machine is seen here."""
    return eventually(lambda: path if path.is_file() else None) is not None


def not_shared(folder: Path) -> CheckpointError:
    """The error that ranks see different folders."""
    return CheckpointError(
        "is not the same folder on all ranks",
        where=str(folder),
        remedy="save to a file system that all machines mount",
    )


def finish(fresh: Path, document: bytes, keep: int) -> Path:
    """Makes a save count, and removes older ones. Of rank 0, when all ranks have written.

    Args:
        keep: how many stay.
    """
    folder = fresh.parent
    final = folder / fresh.name.replace("saving", "training")
    with writable(fresh):
        write_synced(fresh / DOCUMENT, document)
        sync_folder(fresh)
        fresh.rename(final)
        sync_folder(folder)
        for path in completed(folder)[:-keep]:
            gone = path.rename(folder / path.name.replace("training", "removing"))
            shutil.rmtree(gone)
    return final


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Writes a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_document(path: Path) -> Any:
    """A JSON document of a save.

    Raises:
        CheckpointError: it cannot be read or is none.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise damaged(path, "is no document of a save")
    return document


def damaged(path: Path, reason: str) -> CheckpointError:
    """The error that a save is not as it was written."""
    return CheckpointError(reason, where=str(path), remedy="remove this save, to resume from the one before it")


VERSION = 1
_WEIGHTS = "model"


@dataclass(frozen=True)
class Extras:
    """What belongs to a training besides weights and optimizer; None where there is none."""

    scheduler: Any = None
    scaler: Any = None


@dataclass(frozen=True)
class TrainingProgress:
    """How far a training is: calls that drew random bits, and the position in the data."""

    step: int
    position: Any = None


@dataclass(frozen=True)
class _File:
    """A file, what its tensors are (`model`, `optimizer.exp_avg`), and which."""

    file: BoxFile
    kind: str
    specs: Mapping[str, Spec]


# ---------------------------------------------------------------------- saving


def save_training(
    local_weights: RankTensors,
    model: nn.Module,
    plan: Plan,
    folder: str | Path,
    optimizer: Optimizer,
    extras: Extras,
    progress: TrainingProgress,
    keep: int,
    shard_size: int | str,
) -> Path:
    """Writes a save; returns its folder. A collective call.

    Args:
        model: the unsplit one, for its `config`.

    Raises:
        CheckpointError: something cannot be saved or written, or the ranks see different folders.
        InputError: an option or an object of the wrong kind, or the ranks' trainings differ.
    """
    if type(keep) is not int or keep < 1:
        raise InputError(
            f"{shown(keep)} is no positive integer", where="keep", remedy="give the number of saves that stay"
        )
    limit, root = bytes_of(shard_size), folder_of(folder)
    state = collect(local_weights, optimizer)
    weights = {name: entry.tensor for name, entry in saved_once(local_weights).items()}
    tensors = {_WEIGHTS: weights, **{f"optimizer.{key}": by_name for key, by_name in state.tensors.items()}}
    specs = {kind: {name: _spec(value) for name, value in by_name.items()} for kind, by_name in tensors.items()}
    files = {kind: split_files(kind, kind_specs, limit) for kind, kind_specs in specs.items()}
    content = {
        "version": VERSION,
        "step": progress.step,
        "position": encode(progress.position, "position"),
        "optimizer": state.document,
        "scheduler": _extra(extras.scheduler, "scheduler"),
        "scaler": _extra(extras.scaler, "scaler"),
        "plan": plan.to_dict(),
        "seed": plan.seed,
        "ranks": local_weights.size,
        "files": {
            file: {"kind": kind, "tensors": {name: _spec_document(specs[kind][name]) for name in names}}
            for kind, by_file in files.items()
            for file, names in by_file.items()
        },
    }
    facts = {key: _fact(value) for key, value in content.items()}
    if local_weights.rank == 0:
        fresh = begin(root)
        with writable(fresh):
            for entry in _files(fresh, content):
                entry.file.create()
            for kind, by_file in files.items():
                if len(by_file) > 1:
                    text = index_document(specs[kind], by_file)
                    write_synced(fresh / f"{kind}.safetensors.index.json", text.encode())
            save_configuration(fresh, model, weights)
    local_weights.agree(facts, "train alike on every rank, and pass the same position")
    fresh = fresh if local_weights.rank == 0 else begun(root)
    with writable(fresh):
        checks = {
            entry.file.path.name: _write(local_weights, entry, tensors[entry.kind]) for entry in _files(fresh, content)
        }
        write_synced(fresh / _checks(local_weights.rank), _sealed({"files": checks}))
    local_weights.agree({}, "")  # all have written
    if local_weights.rank == 0:
        _check_written(fresh, content)
        fresh = finish(fresh, _sealed(content), keep)
    local_weights.agree({}, "")  # it counts
    return root / fresh.name.replace("saving", "training")


def _spec(value: Tensor) -> Spec:
    return Spec(value.dtype, tuple(value.shape))


def _spec_document(spec: Spec) -> list[Any]:
    return [str(spec.dtype).removeprefix("torch."), list(spec.shape)]


def _files(folder: Path, content: Mapping[str, Any]) -> Iterator[_File]:
    """The files of a save, as its document lists them."""
    for file, entry in content["files"].items():
        specs = {name: Spec(getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in entry["tensors"].items()}
        yield _File(BoxFile(folder / file, specs), entry["kind"], specs)


def _checks(rank: int) -> str:
    return f"checks-{rank:05d}.json"


def _extra(value: Any, what: str) -> Any:
    """A scheduler's or scaler's class and state."""
    if value is None:
        return None
    if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
        raise InputError(f"a {type(value).__name__} has no state_dict", where=what, remedy=f"pass the {what} itself")
    return {"class": _kind(value), "state": encode(value.state_dict(), f"state of the {what}")}


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _fact(value: Any) -> str:
    """Short values as they are, others by digest."""
    text = json.dumps(value, sort_keys=True)
    return text if len(text) < 60 else hashlib.sha256(text.encode()).hexdigest()


def _write(weights: RankTensors, entry: _File, tensors: Mapping[str, Tensor]) -> list[Any]:
    """Writes this rank's boxes of a file; returns each with its check sum."""
    rows: list[Any] = []
    mine = [(name, box) for name in entry.specs for box in _boxes(weights, name, entry.specs[name]) if box.stands]
    if not mine:
        return rows
    opened = eventually(lambda: _opened(entry.file.path))
    if opened is None:
        raise not_shared(entry.file.path.parent)
    try:
        for name, box in mine:
            check = entry.file.write(opened, name, box, local_of(tensors[name]))
            rows.append([name, list(box.offsets), list(box.sizes), check])
        os.fsync(opened)
    finally:
        os.close(opened)
    return rows


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None


def _boxes(weights: RankTensors, name: str, spec: Spec) -> list[Box]:
    """This rank's boxes of a tensor; with `stands`, those that it writes."""
    if not weights.counts(weights.entries()[name]):
        return []
    layout = weights.layout_of(name)
    cut = {axis for axis, placement in layout if placement.is_shard} if spec.shape else set[str]()
    if any(weights.coordinates[axis] for axis in weights.coordinates.keys() - cut):
        return []  # the first rank on the axes that do not cut it writes it
    return boxes(spec.shape, layout if cut else Layout(), weights.axes, weights.coordinates)


def _check_written(fresh: Path, content: Mapping[str, Any]) -> None:
    """Checks that what all ranks wrote is here: a document of each, and in each file one box of each.

    Raises:
        CheckpointError: the ranks see different folders, or the file system lost what one of them wrote.
    """
    known = {entry.file.path.name: entry.file for entry in _files(fresh, content)}
    for rank in range(content["ranks"]):
        path = fresh / _checks(rank)
        if not appears(path):
            raise not_shared(fresh.parent)
        for file, rows in _unsealed(path)["files"].items():
            for name, offsets, sizes, check in sorted(rows, key=lambda row: _product(row[2]))[:1]:
                with known[file].path.open("rb") as opened:
                    seen = known[file].check(opened.fileno(), name, _box(offsets, sizes))
                if seen != check:
                    raise CheckpointError(
                        f"does not hold what rank {rank} wrote of {name}",
                        where=str(known[file].path),
                        remedy="save to a file system on which machines can write to one file",
                    )


def _box(offsets: list[int], sizes: list[int]) -> Box:
    return Box(tuple(offsets), (0,) * len(sizes), tuple(sizes), True)


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _sealed(content: Mapping[str, Any]) -> bytes:
    """A document with its own check sum."""
    return document({"check": zlib.crc32(document(content)), "content": content})


def _unsealed(path: Path) -> Any:
    sealed = read_document(path)
    if not isinstance(sealed.get("content"), dict) or zlib.crc32(document(sealed["content"])) != sealed.get("check"):
        raise damaged(path, "is not as it was written: its check sum differs")
    return sealed["content"]


# ---------------------------------------------------------------------- resuming


def resume_training(
    weights: RankTensors, folder: str | Path, optimizer: Optimizer, extras: Extras, seed: int
) -> TrainingProgress:
    """Takes up the last save of a folder, or a certain one. A collective call.

    Args:
        seed: of the plan.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another model or optimizer; nothing is loaded then.
        InputError: the ranks have different saves.
    """
    path = newest(folder_of(folder))
    content = _unsealed(path / DOCUMENT)
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"has version {content.get('version')!r}, and this is {VERSION}",
            where=str(path),
            remedy="resume with the fxpar that saved it",
        )
    weights.agree({"the save": path.name, "its content": _fact(content)}, "give every rank the same folder")
    _check_fits(weights, path, content, optimizer, extras, seed)
    _check_files(weights, path, content)
    weights.agree({}, "")  # no rank has an objection
    load(weights, Checkpoint(_entry_point(path, _WEIGHTS)))
    _restore_optimizer(weights, path, content, optimizer)
    for name, value in (("scheduler", extras.scheduler), ("scaler", extras.scaler)):
        if value is not None:
            value.load_state_dict(decode(content[name]["state"]))
    return TrainingProgress(content["step"], decode(content["position"]))


def _entry_point(path: Path, kind: str) -> Path:
    index = path / f"{kind}.safetensors.index.json"
    return index if index.is_file() else path / f"{kind}.safetensors"


def _check_fits(
    weights: RankTensors, path: Path, content: Mapping[str, Any], optimizer: Optimizer, extras: Extras, seed: int
) -> None:
    where = str(path)
    if content["seed"] != seed:
        raise CheckpointError(
            f"was trained with seed {content['seed']}, and the plan has {seed}: dropout would differ",
            where=where,
            remedy=f"use Plan(seed={content['seed']})",
        )
    check_fits(weights, optimizer, content["optimizer"], where)
    for name, value in (("scheduler", extras.scheduler), ("scaler", extras.scaler)):
        saved = content[name]
        if (saved is None) != (value is None):
            there = f"holds a {name}, and none was passed" if saved else f"holds no {name}"
            remedy = f"pass {name}={saved['class']}" if saved else f"leave {name} out"
            raise CheckpointError(there, where=where, remedy=remedy)
        if saved and saved["class"] != _kind(value):
            reason = f"holds a {saved['class']}, and a {_kind(value)} was passed"
            raise CheckpointError(reason, where=where, remedy=f"pass the same {name}")
    module_specs = {name: _spec(entry.tensor) for name, entry in saved_once(weights).items()}
    saved_specs = {n: s for entry in _files(path, content) if entry.kind == _WEIGHTS for n, s in entry.specs.items()}
    for name in (*module_specs, *saved_specs):
        if module_specs.get(name) != saved_specs.get(name):
            here, there = (str(specs.get(name, "nothing")) for specs in (module_specs, saved_specs))
            raise CheckpointError(
                f"is {there} in the save and {here} in the module",
                where=f"{where}: {name}",
                remedy="resume the same model with the same Plan(precision=…); load_checkpoint casts weights alone",
            )


def _check_files(weights: RankTensors, path: Path, content: Mapping[str, Any]) -> None:
    """Checks sizes and headers of all files, and check sums of this rank's share of the boxes.

    Raises:
        CheckpointError: a file is missing, shorter or changed.
    """
    known = {entry.file.path.name: entry.file for entry in _files(path, content)}
    for file in known.values():
        if not file.is_whole():
            raise damaged(file.path, "is missing, or has another length or header than when it was saved")
    rows = [
        (file, *row)
        for rank in range(content["ranks"])
        for file, file_rows in _unsealed(path / _checks(rank))["files"].items()
        for row in file_rows
    ]
    for file, name, offsets, sizes, check in rows[weights.rank :: weights.size]:
        with known[file].path.open("rb") as opened:
            if known[file].check(opened.fileno(), name, _box(offsets, sizes)) != check:
                raise damaged(known[file].path, f"holds other bytes of {name} than when it was saved")


def _restore_optimizer(weights: RankTensors, path: Path, content: Mapping[str, Any], optimizer: Optimizer) -> None:
    parts: dict[str, dict[str, bool]] = {}  # by state key and parameter, whether it is one number
    for entry in _files(path, content):
        if entry.kind != _WEIGHTS:
            are_numbers = parts.setdefault(entry.kind.removeprefix("optimizer."), {})
            are_numbers.update({n: not spec.shape and bool(weights.shape_of(n)) for n, spec in entry.specs.items()})
    checkpoints = {key: Checkpoint(_entry_point(path, f"optimizer.{key}")) for key in parts}

    def read(key: str, name: str, is_number: bool) -> Tensor:
        layout = Layout() if is_number else weights.layout_of(name)
        with checkpoints[key].reading() as reader:
            return reader.part(name, layout, weights.axes, weights.coordinates)

    with torch.no_grad():
        restore(weights, optimizer, content["optimizer"], parts, read)
