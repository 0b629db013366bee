"""Saves all that a training is, and takes it up again.

A save is a folder with safetensors under the author's names (`model`, which transformers' `from_pretrained` reads, and
`optimizer.KEY` for each state) and `training.json`. Every rank writes and reads its own parts, and nothing depends on
the plan. A save is there whole or not at all: it is written to `saving-…`, and one rename by rank 0 to
`training-00000001` and on makes it count; the number of the step follows where the position names it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fxpar.checkpoint.adapters import adapter_of, check_adapter, save_adapter_configuration
from fxpar.checkpoint.initial import load
from fxpar.checkpoint.optimizer_state import check_fits, class_name, collect, decode, document, encode, misfit, restore
from fxpar.checkpoint.safetensors_files import (
    NAMED_DTYPES,
    BoxFile,
    Checkpoint,
    Spec,
    bytes_of,
    folder_of,
    index_document,
    remove,
    split_files,
    sync_folder,
    writable,
    write_synced,
)
from fxpar.checkpoint.state_dicts import Agree, RankTensors, save_configuration, saved_once
from fxpar.errors import CheckpointError, InputError, shown
from fxpar.layout.layout import Layout
from fxpar.layout.shards import Box, boxes
from fxpar.plan.plan import Plan
from fxpar.runtime.sharded import local_of

VERSION = 2
_WEIGHTS = "model"
_DOCUMENT = "training.json"
_COMPLETE = re.compile(r"training-(\d{8})(-step-\d+)?")
_LEFTOVER = re.compile(r"(saving|removing)-\d{8}(-step-\d+)?")
# What documents look like; see `misfit`.
_FORM = {
    "version": int,
    "step": int,
    "position": object,
    "optimizer": {
        "class": str,
        "groups": [{"parameters": [str], "options": {str: object}}],
        "values": {str: {str: object}},
        "host": [str],
    },
    "plan": object,
    "seed": int,
    "ranks": int,
    "files": {str: {str: {str: (str, [int])}}},
}
_OBJECT_FORM = {"class": str, "state": object}
_CHECKS_FORM = {"files": {str: [(str, [int], [int], int)]}}
# Seconds in which what one machine wrote is seen by the others.
_DELAY = 10.0


@dataclass(frozen=True)
class TrainingObjects:
    """What belongs to a training besides its model: the optimizer, and a scheduler and a scaler, if any."""

    optimizer: Optimizer
    scheduler: Any = None
    scaler: Any = None


@dataclass(frozen=True)
class TrainingProgress:
    """How far a training is: calls that drew random bits, and the position in the data."""

    step: int
    position: Any = None


# ---------------------------------------------------------------------- saving


@dataclass(frozen=True)
class BegunSave:
    """A save whose files are there without values.

    Attributes:
        fresh: its folder until it counts.
        content: of its document.
        blocks: what this rank writes, by file: the name of a tensor, the place of a block in it, and its values.
        keep: how many saves stay.
    """

    fresh: Path
    content: Mapping[str, Any]
    blocks: Sequence[tuple[BoxFile, Sequence[tuple[str, Box, Tensor]]]]
    keep: int
    rank: int

    @property
    def path(self) -> Path:
        """Returns its folder once it counts."""
        return _complete(self.fresh)

    @property
    def is_written(self) -> bool:
        """Tells whether all ranks have written their blocks, as far as this rank sees."""
        return all((self.fresh / _checks(rank)).is_file() for rank in range(self.content["ranks"]))

    def write(self) -> None:
        """Writes this rank's blocks, and a document of their checksums when all are on the disk.

        Raises:
            CheckpointError: they cannot be written.
        """
        with writable(self.fresh):
            checks = {}
            for file, blocks in self.blocks:
                if blocks and not _appears(file.path):
                    raise _not_shared(self.fresh.parent)
                rows = file.write(blocks) if blocks else []
                checks[file.path.name] = [[name, box.offsets, box.sizes, check] for name, box, check in rows]
            path = self.fresh / _checks(self.rank)
            write_synced(path.with_suffix(".part"), _sealed({"files": checks}))
            # Whoever sees it sees all of it.
            path.with_suffix(".part").rename(path)

    def complete(self) -> None:
        """Makes the save count, and removes older ones. Rank 0 calls it when all ranks have written."""
        _check_written(self.fresh, self.content)
        _finish(self.fresh, _sealed(self.content), self.keep)


def begin_save(
    weights: RankTensors,
    model: nn.Module,
    plan: Plan,
    folder: str | Path,
    objects: TrainingObjects,
    progress: TrainingProgress,
    keep: int,
    shard_size: int | str,
) -> BegunSave:
    """Creates the files of a save. A collective call. See `ParallelModule.save_training`.

    Args:
        model: the unsplit one, for its `config`.
    """
    if type(keep) is not int or keep < 1:
        raise InputError(
            f"must be a positive integer, got {shown(keep)}", where="keep", remedy="give the number of saves that stay"
        )
    limit, root = bytes_of(shard_size), folder_of(folder)
    state = collect(weights, objects.optimizer)
    saved = {name: entry.tensor for name, entry in saved_once(weights).items()}
    tensors = {_WEIGHTS: saved, **{f"optimizer.{key}": by_name for key, by_name in state.tensors.items()}}
    specs = {kind: {name: Spec.of(value) for name, value in by_name.items()} for kind, by_name in tensors.items()}
    content = {
        "version": VERSION,
        "step": progress.step,
        "position": encode(progress.position, "position"),
        "optimizer": state.document,
        "scheduler": _extra(objects.scheduler, "scheduler"),
        "scaler": _extra(objects.scaler, "scaler"),
        "plan": plan.to_dict(),
        "seed": plan.seed,
        "ranks": weights.size,
        "files": {kind: _files_document(kind, kind_specs, limit) for kind, kind_specs in specs.items()},
    }
    facts = {key: _fact(value) for key, value in content.items()}
    if weights.rank == 0:
        fresh = _begin(root, _step_of(progress.position))
        _create_files(fresh, content, specs)
        # With an adapter, tensors of the base have names of peft's, which transformers would not find.
        with writable(fresh):
            if adapter_of(model):
                save_adapter_configuration(fresh, model)
            else:
                save_configuration(fresh, model, specs[_WEIGHTS].values())
    weights.agree(facts, "train alike on every rank, and pass the same position")
    fresh = fresh if weights.rank == 0 else _begun(root)
    blocks = [
        (file, _blocks(weights, file, tensors[kind]))
        for kind, files in _files(fresh, content).items()
        for file in files
    ]
    return BegunSave(fresh, content, blocks, keep, weights.rank)


def write_together(save: BegunSave, agree: Agree) -> None:
    """Writes a save and makes it count. A collective call."""
    save.write()
    agree({}, "")  # all have written
    if save.rank == 0:
        save.complete()
    agree({}, "")  # it counts


def _step_of(position: Any) -> int | None:
    """Returns the number of a step that a position names, if it does: it is in the name of the save."""
    step = position.get("step") if isinstance(position, dict) else position
    return step if type(step) is int and step >= 0 else None


def _files_document(kind: str, specs: Mapping[str, Spec], limit: int) -> dict[str, Any]:
    """Returns a kind's files, with type and shape of each of their tensors."""
    return {
        file: {name: [str(specs[name].dtype).removeprefix("torch."), list(specs[name].shape)] for name in names}
        for file, names in split_files(kind, specs, limit).items()
    }


def _files(folder: Path, content: Mapping[str, Any]) -> dict[str, list[BoxFile]]:
    """Returns the files of a save by what their tensors are: `model`, `optimizer.exp_avg`."""
    return {
        kind: [
            BoxFile(folder / file, {name: Spec(NAMED_DTYPES[dtype], tuple(size)) for name, (dtype, size) in rows})
            for file, rows in ((file, specs.items()) for file, specs in files.items())
        ]
        for kind, files in content["files"].items()
    }


def _files_by_name(folder: Path, content: Mapping[str, Any]) -> dict[str, BoxFile]:
    return {file.path.name: file for files in _files(folder, content).values() for file in files}


def _create_files(fresh: Path, content: Mapping[str, Any], specs: Mapping[str, Mapping[str, Spec]]) -> None:
    """Creates the files of a save, without values, and their indices. Rank 0 calls it."""
    with writable(fresh):
        for kind, files in _files(fresh, content).items():
            for file in files:
                file.create()
            if len(files) > 1:
                text = index_document(specs[kind], {file.path.name: [*file.specs] for file in files})
                write_synced(fresh / f"{kind}.safetensors.index.json", text.encode())


def _checks(rank: int) -> str:
    return f"checks-{rank:05d}.json"


def _extra(value: Any, what: str) -> Any:
    """Returns a scheduler's or scaler's class and state."""
    if value is None:
        return None
    if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
        raise InputError(f"a {type(value).__name__} has no state_dict", where=what, remedy=f"pass the {what} itself")
    return {"class": class_name(value), "state": encode(value.state_dict(), f"state of the {what}")}


def _fact(value: Any) -> str:
    """Returns short values as they are, others as a digest."""
    text = json.dumps(value, sort_keys=True)
    return text if len(text) < 60 else hashlib.sha256(text.encode()).hexdigest()


def _blocks(weights: RankTensors, file: BoxFile, tensors: Mapping[str, Tensor]) -> list[tuple[str, Box, Tensor]]:
    """Returns the blocks of a file's tensors that this rank writes, as views."""
    entries, blocks = weights.entries(), []
    for name, spec in file.specs.items():
        for box in _written_boxes(weights, name, spec) if weights.counts(entries[name]) else ():
            part = local_of(tensors[name]).detach()
            blocks.append((name, box, box.within(part) if box.sizes else part))
    return blocks


def _written_boxes(weights: RankTensors, name: str, spec: Spec) -> list[Box]:
    """Returns the boxes of a tensor that this rank writes."""
    layout = weights.layout_of(name)
    cut = {axis for axis, placement in layout if placement.is_shard} if spec.shape else set[str]()
    if any(weights.coordinates[axis] for axis in weights.coordinates.keys() - cut):
        return []  # the first rank on the axes that do not cut it writes it
    local_boxes = boxes(spec.shape, layout if cut else Layout(), weights.axes, weights.coordinates)
    return [box for box in local_boxes if box.stands]


def _check_written(fresh: Path, content: Mapping[str, Any]) -> None:
    """Checks that what all ranks wrote is here: a document of each, and in each file one box of each.

    Raises:
        CheckpointError: the ranks see different folders, or the file system lost what one of them wrote.
    """
    files = _files_by_name(fresh, content)
    for rank in range(content["ranks"]):
        path = fresh / _checks(rank)
        if not _appears(path):
            raise _not_shared(fresh.parent)
        for file, rows in _unsealed(path)["files"].items():
            # The smallest box of each rank is read back: enough to see that the
            # file system takes writes of several machines.
            for name, offsets, sizes, check in sorted(rows, key=lambda row: math.prod(row[2]))[:1]:
                if files[file].checksum(name, _box(offsets, sizes)) != check:
                    raise CheckpointError(
                        f"does not hold what rank {rank} wrote of {name}",
                        where=str(files[file].path),
                        remedy="save to a file system on which machines can write to one file",
                    )


def _box(offsets: list[int], sizes: list[int]) -> Box:
    return Box(tuple(offsets), (0,) * len(sizes), tuple(sizes), True)


def _sealed(content: Mapping[str, Any]) -> bytes:
    """Returns a document with its checksum."""
    return document({"check": zlib.crc32(document(content)), "content": content})


def _unsealed(path: Path) -> Any:
    """Reads what `_sealed` returned.

    Raises:
        CheckpointError: it cannot be read, or is not as it was written.
    """
    try:
        sealed = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    content = sealed.get("content") if isinstance(sealed, dict) else None
    if not isinstance(content, dict) or zlib.crc32(document(content)) != sealed.get("check"):
        raise _damaged(path, "is not as it was written: its checksum differs")
    return content


# ---------------------------------------------------------------------- resuming


def resume_training(
    weights: RankTensors, model: nn.Module, folder: str | Path, objects: TrainingObjects, seed: int, missing: str
) -> TrainingProgress | None:
    """Resumes from the last save of a folder, or from a certain one; see `ParallelModule.resume_training`.

    Args:
        model: the unsplit one, for its adapter's configuration.
    """
    if missing not in ("raise", "start"):
        remedy = 'pass "raise", or "start" to begin anew'
        raise InputError(f"must be raise or start, got {shown(missing)}", where="missing", remedy=remedy)
    path = _newest(folder_of(folder), missing == "start")
    weights.agree({"the save": path.name if path else "none"}, "give every rank the same folder")
    if path is None:
        return None
    content = _unsealed(path / _DOCUMENT)
    weights.agree({"its content": _fact(content)}, "give every rank the same folder")
    content = _checked(path, content)
    _check_fits(weights, path, content, objects, seed)
    check_adapter(path, model)
    _check_files(weights, path, content)
    states = {kind.removeprefix("optimizer."): kind for kind in content["files"] if kind != _WEIGHTS}
    opened = {key: Checkpoint(_entry_point(path, kind)) for key, kind in states.items()}
    for key, name, shape in ((key, *row) for key, checkpoint in opened.items() for row in checkpoint.shapes.items()):
        if name not in weights.entries() or (shape and shape != weights.shape_of(name)):
            raise _damaged(path, f"has {key} of shape {list(shape)} for {name}")
    weights.agree({}, "")  # no rank has an objection
    load(weights, Checkpoint(_entry_point(path, _WEIGHTS)))
    restore(weights, objects.optimizer, content["optimizer"], opened)
    for name, value in (("scheduler", objects.scheduler), ("scaler", objects.scaler)):
        if value is not None:
            value.load_state_dict(content[name]["state"])
    return TrainingProgress(content["step"], content["position"])


def _checked(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Returns a save's document, decoded. A file may be anybody's, so that nothing in it is believed.

    Raises:
        CheckpointError: it is of another version, or no document of a save.
    """
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"has version {content.get('version')!r}, and this is {VERSION}",
            where=str(path),
            remedy="resume with the fxpar that saved it",
        )
    objects = {name: object if content.get(name) is None else _OBJECT_FORM for name in ("scheduler", "scaler")}
    reason = misfit(content, {**_FORM, **objects}, "it")
    if not reason:
        files = [(kind, file, rows) for kind, by_file in content["files"].items() for file, rows in by_file.items()]
        specs = [spec for *_, rows in files for spec in rows.values()]
        if _WEIGHTS not in content["files"] or any(Path(n).name != n for kind, file, _ in files for n in (kind, file)):
            reason = "it names no files of a save"
        elif any(dtype not in NAMED_DTYPES or any(size < 0 for size in shape) for dtype, shape in specs):
            reason = "it has tensors of types or shapes that none has"
    if reason:
        raise _damaged(path / _DOCUMENT, reason)
    optimizer = content["optimizer"]
    by_place = [(content, "position"), *((content[name], "state") for name in objects if content[name])]
    values = [*(group["options"] for group in optimizer["groups"]), *optimizer["values"].values()]
    try:
        for holder, key in [*by_place, *((entries, key) for entries in values for key in entries)]:
            holder[key] = decode(holder[key])
    except ValueError as error:
        raise _damaged(path / _DOCUMENT, str(error)) from error
    return content


def _entry_point(path: Path, kind: str) -> Path:
    index = path / f"{kind}.safetensors.index.json"
    return index if index.is_file() else path / f"{kind}.safetensors"


def _check_fits(
    weights: RankTensors, path: Path, content: Mapping[str, Any], objects: TrainingObjects, seed: int
) -> None:
    where = str(path)
    if content["seed"] != seed:
        raise CheckpointError(
            f"was trained with seed {content['seed']}, and the plan has {seed}: dropout would differ",
            where=where,
            remedy=f"use Plan(seed={content['seed']})",
        )
    check_fits(weights, objects.optimizer, content["optimizer"], where)
    for name, value in (("scheduler", objects.scheduler), ("scaler", objects.scaler)):
        saved = content[name]
        if (saved is None) != (value is None):
            there = f"holds a {name}, and none was passed" if saved else f"holds no {name}"
            remedy = f"pass {name}={saved['class']}" if saved else f"leave {name} out"
            raise CheckpointError(there, where=where, remedy=remedy)
        if saved and saved["class"] != class_name(value):
            reason = f"holds a {saved['class']}, and a {class_name(value)} was passed"
            raise CheckpointError(reason, where=where, remedy=f"pass the same {name}")
    module_specs = {name: Spec.of(entry.tensor) for name, entry in saved_once(weights).items()}
    saved_specs = {name: spec for file in _files(path, content)[_WEIGHTS] for name, spec in file.specs.items()}
    for name in (*module_specs, *saved_specs):
        if module_specs.get(name) != saved_specs.get(name):
            here, there = (str(specs.get(name, "nothing")) for specs in (module_specs, saved_specs))
            raise CheckpointError(
                f"is {there} in the save and {here} in the module",
                where=f"{where}: {name}",
                remedy="resume the same model with the same Plan(precision=…); load_checkpoint casts weights alone",
            )


def _check_files(weights: RankTensors, path: Path, content: Mapping[str, Any]) -> None:
    """Checks sizes and headers of all files, and checksums of this rank's share of the boxes.

    Raises:
        CheckpointError: a file is missing, shorter or changed.
    """
    files = _files_by_name(path, content)
    for file in files.values():
        if not file.is_complete():
            raise _damaged(file.path, "is missing, or has another length or header than when it was saved")
    rows = []
    for place in (path / _checks(rank) for rank in range(content["ranks"])):
        checks = _unsealed(place)
        reason = misfit(checks, _CHECKS_FORM, "it")
        if reason:
            raise _damaged(place, reason)
        rows += [(file, *row) for file, file_rows in checks["files"].items() for row in file_rows]
    for file, name, offsets, sizes, _ in rows:
        spec = files[file].specs.get(name) if file in files else None
        ends = zip(offsets, sizes, spec.shape, strict=False) if spec else ()
        if not (
            spec and len(offsets) == len(sizes) == len(spec.shape) and all(0 <= o <= o + n <= m for o, n, m in ends)
        ):
            raise _damaged(path, f"holds no such part of {name}")
    # Ranks share out the checksums: in all each byte is read once more, and not once on every rank.
    for file, name, offsets, sizes, check in rows[weights.rank :: weights.size]:
        if files[file].checksum(name, _box(offsets, sizes)) != check:
            raise _damaged(files[file].path, f"holds other bytes of {name} than when it was saved")


# ---------------------------------------------------------------------- folders


def _completed(folder: Path) -> list[Path]:
    """Returns all saves, the oldest first."""
    try:
        saves = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}", where=str(folder), remedy="check the path"
        ) from error
    return sorted(saves)


def _newest(folder: Path, may_miss: bool) -> Path | None:
    """Returns the last save; None where there is none and that may be.

    Raises:
        CheckpointError: there is none.
    """
    if _COMPLETE.fullmatch(folder.name) and (folder / _DOCUMENT).is_file():
        return folder  # a certain one
    saves = _completed(folder)
    if saves:
        return saves[-1]
    if may_miss:
        return None
    is_there = folder.is_dir()
    raise CheckpointError(
        "holds no completed save" if is_there else "there is no such folder",
        where=str(folder),
        remedy="check the path; weights alone are loaded with load_checkpoint" if is_there else "check the path",
    )


def _begin(folder: Path, step: int | None) -> Path:
    """Removes what killed saves left and creates the folder of the next one. Rank 0 calls it."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                remove(path)
        known = _completed(folder)
        number = int(known[-1].name.split("-")[1]) + 1 if known else 1
        fresh = folder / (f"saving-{number:08d}" + ("" if step is None else f"-step-{step}"))
        fresh.mkdir()
    return fresh


def _begun(folder: Path) -> Path:
    """Returns the folder that rank 0 has created, as another rank sees it.

    Raises:
        CheckpointError: this rank does not see it.
    """

    def look() -> Path | None:
        folders = [path for path in folder.glob("saving-*") if _LEFTOVER.fullmatch(path.name)]
        return folders[0] if len(folders) == 1 else None

    fresh = _eventually(look)
    if fresh is None:
        raise _not_shared(folder)
    return fresh


def _eventually(look: Callable[[], Path | None]) -> Path | None:
    """Returns what another machine wrote, as soon as it is seen here; None if that takes too long."""
    deadline = time.monotonic() + _DELAY
    while True:
        seen = look()
        if seen is not None or time.monotonic() > deadline:
            return seen
        time.sleep(0.05)


def _appears(path: Path) -> bool:
    """Waits for a file of another machine; tells whether it is seen here."""
    return _eventually(lambda: path if path.is_file() else None) is not None


def _not_shared(folder: Path) -> CheckpointError:
    """Returns the error that ranks see different folders."""
    return CheckpointError(
        "is not the same folder on all ranks",
        where=str(folder),
        remedy="save to a file system that all machines mount",
    )


def _finish(fresh: Path, content: bytes, keep: int) -> None:
    """Makes a save count, and removes older ones. Rank 0 calls it when all ranks have written.

    Args:
        keep: how many stay.
    """
    folder = fresh.parent
    with writable(fresh):
        write_synced(fresh / _DOCUMENT, content)
        # The document is on the disk before the name is that makes it count.
        sync_folder(fresh)
        fresh.rename(_complete(fresh))
        sync_folder(folder)
        for path in _completed(folder)[:-keep]:
            # Renamed first: a removal that is killed half way leaves nothing that looks complete.
            remove(path.rename(folder / path.name.replace("training", "removing")))


def _complete(fresh: Path) -> Path:
    return fresh.with_name(fresh.name.replace("saving", "training"))


def _damaged(path: Path, reason: str) -> CheckpointError:
    """Returns the error that a save is not as it was written."""
    return CheckpointError(reason, where=str(path), remedy="remove this save, to resume from the one before it")
