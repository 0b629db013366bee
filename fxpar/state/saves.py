"""The folders of saved trainings: a save is there whole or not at all.

Enters: a folder that all ranks share. Leaves: in it `training-00000001` and on, each complete. What is being written is
in `saving-…`; one rename by rank 0 makes it count. What a killed process left is removed by the next save.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fxpar.errors import CheckpointError

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
