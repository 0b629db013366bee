"""Traces on disk, so that one command of the line need not trace what another one has.

Enters: a key that says all that a trace depends on, and a program with the files that it was traced from. Leaves: the
same program, or none where there is none, a file has changed or the entry is damaged.

An entry is a file of one line, the digest of what follows, and a JSON document with the program's text. It takes its
place in one move, so that two processes cannot mix theirs; of two that write the same one, either may win.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fxpar.errors import FxparError, TextError
from fxpar.ir.program import Program, note
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program

# The oldest go beyond this number.
MOST_ENTRIES = 64


@dataclass(frozen=True)
class StoredTrace:
    """A trace as it is on disk.

    Attributes:
        text: the program's.
        how: it was captured, as `Captured` says.
        unwalked: why the autograd graph of the eager model could not be walked.
        files: what it depends on besides the key: each file with what `state_of` says of it.
    """

    text: str
    how: str
    unwalked: str
    files: Mapping[str, str]


def traces_folder() -> Path | None:
    """Returns the folder of all entries, which need not be there yet; None for a user without a home."""
    base, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(base):
        return Path(base) / "fxpar" / "traces"
    return Path(home) / ".cache" / "fxpar" / "traces" if os.path.isabs(home) else None


def state_of(path: str, *, is_installed: bool) -> str:
    """Returns what tells a file from a changed one: size and time of an installed one, the contents of others."""
    try:
        if is_installed:
            status = os.stat(path)
            return f"{status.st_size} {status.st_mtime_ns}"
        with open(path, "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except OSError:
        return "none"


def find_trace(folder: Path, key: str) -> tuple[StoredTrace, Program] | None:
    """Returns the entry of a key; None where there is no sound one, or a file that it depends on is another by now."""
    path = folder / f"{key}.trace"
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(body).hexdigest().encode() != digest:  # cut off, or changed since
        return None
    try:
        entry = StoredTrace(**json.loads(body))
        if any(state_of(name, is_installed=" " in state) != state for name, state in entry.files.items()):
            return None
        program = parse_program(entry.text, where=str(path))
    except (FxparError, ValueError, TypeError, AttributeError, LookupError):  # of another hand than `store_trace`
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the oldest go first
    return entry, program


def store_trace(
    folder: Path, key: str, program: Program, how: str, unwalked: str = "", files: Mapping[str, str] | None = None
) -> str:
    """Writes an entry, unless the program's text does not say all of it.

    Args:
        how: as of `StoredTrace`, and so are the others.

    Returns:
        Empty; else why the folder cannot be written.
    """
    try:
        text = whole_text(program)
    except FxparError:
        return ""
    body = json.dumps(asdict(StoredTrace(text, how, unwalked, files or {}))).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as stream:
            stream.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(stream.name, folder / f"{key}.trace")
        _remove_oldest(folder)
    except OSError as error:
        return str(error.strerror or error)
    return ""


def whole_text(program: Program) -> str:
    """Returns a program's text that parses back to the same program.

    Raises:
        TextError: it does not, as where it names an autograd function inside of another function.
    """
    text = print_program(program)
    parsed = parse_program(text)
    fields = ("parameters", "inputs", "outputs", "symbols", "plan", "properties", "loss", "counted", "conditions")
    is_same = all(getattr(parsed, name) == getattr(program, name) for name in fields)
    pairs = zip(parsed.graph.nodes, program.graph.nodes, strict=True)
    is_same = is_same and all(one.op == "output" or note(one) == note(other) for one, other in pairs)
    if not is_same or not _has_same_constants(parsed, program):
        raise TextError("the text does not say all of the program", where="program", remedy="keep the program itself")
    return text


def _has_same_constants(one: Program, other: Program) -> bool:
    def values(program: Program) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
        return {
            name: (value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, value in program.constants.items()
        }

    return values(one) == values(other)


def _remove_oldest(folder: Path) -> None:
    """Removes entries beyond the most, and what processes that were killed have left."""
    times: dict[Path, float] = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes too
            times[path] = path.stat().st_mtime
    entries = sorted(times, key=times.__getitem__, reverse=True)
    newest = max(times.values(), default=0.0)
    old_parts = [path for path in entries if path.suffix == ".part" and times[path] < newest - 3600]
    traces = [path for path in entries if path.suffix == ".trace"]
    for path in (*old_parts, *traces[MOST_ENTRIES:]):
        path.unlink(missing_ok=True)
