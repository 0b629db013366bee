"""What a command prints: reports on stdout; progress, warnings and errors on stderr.

Enters: reports and errors of commands. Leaves: one JSON document, tables for people, or a file. No text of a user's
file or model is read as markup. Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from fxpar.errors import CheckFailed, FxparError, InputError, LayoutError
from fxpar.text.tables import FittedTable
from fxpar.text.tables import amount as amount
from fxpar.text.tables import table as table
from fxpar.text.tables import time_text as time_text

FINE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class CommandResult:
    """What a command found.

    Attributes:
        document: what `--json` prints; numbers, texts, lists and mappings only.
        show: prints the same for people.
        status: exit status.
        error: the failed check behind a status of 1, printed on stderr.
    """

    document: Any
    show: Callable[[Console], None]
    status: int = FINE
    error: FxparError | None = None


def console(stream: TextIO) -> Console:
    """Returns a console that prints text as it is."""
    return Console(file=stream, markup=False, emoji=False, highlight=False)


@dataclass(frozen=True)
class Ui:
    """Where a command speaks to people while it works: stderr."""

    json: bool

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[Callable[[str], None]]:
        """Shows progress while the body runs; yields a function that changes the text. Silent where nobody looks."""
        err = console(sys.stderr)
        if self.json or not err.is_terminal:
            yield lambda text: None
            return
        with err.status(Text(what)) as status:
            yield lambda text: status.update(Text(f"{what}: {text}"))

    def warn(self, text: str) -> None:
        """Prints a warning that leaves the exit status alone."""
        _say(Text(f"warning: {text}", style="yellow"))


def status_of(error: FxparError) -> int:
    """Returns 1 where a check rejected the program, 2 where the input is at fault."""
    return FAILED if isinstance(error, (CheckFailed, LayoutError)) else BAD_INPUT


def error_document(error: FxparError) -> dict[str, Any]:
    """Returns the error for machines."""
    kind = type(error).__name__
    document: dict[str, Any] = {"kind": kind, "where": error.where, "reason": error.reason, "remedy": error.remedy}
    if notes := getattr(error, "__notes__", []):
        document["notes"] = list(notes)
    return document


def _say(text: Text) -> None:
    err = console(sys.stderr)
    err.print(text, soft_wrap=not err.is_terminal)


def print_error(text: str) -> None:
    """Prints one red paragraph on stderr, on one line where no terminal wraps it."""
    _say(Text(f"error: {text}", style="red"))


def error_text(error: FxparError) -> str:
    """Returns where, reason, remedy and how it was found."""
    return "; ".join([str(error), *getattr(error, "__notes__", [])])


def print_json(document: Any, stream: TextIO) -> None:
    """Prints one JSON document; numbers that JSON lacks (infinite, undefined) become null."""
    stream.write(json.dumps(_plain(document), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def is_file(path: Path) -> bool:
    """Returns whether there is such a file; what cannot be a name names none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Returns whether there is such a folder."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def write_text(path: Path, text: str) -> None:
    """Writes a file, with the folders above it.

    Raises:
        InputError: that is not possible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(reason, where=str(path), remedy="name a place that can be written") from None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


# Margins of a picture.
MARGIN = 28


def svg_page(width: int, height: int, title: str, notes: Sequence[str], body: Iterable[str]) -> str:
    """Returns a picture in SVG: a white page with a title, notes below it, and what is drawn."""
    size = f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' role='img' {size}"
    font = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"
    return "\n".join(
        [
            f"{head} {font} font-size='12' fill='#222'>",
            f"<title>{escape(title)}</title>",
            "<rect width='100%' height='100%' fill='white'/>",
            f"<text x='{MARGIN}' y='{MARGIN + 6}' font-size='16' font-weight='600'>{escape(title)}</text>",
            f"<text x='{MARGIN}' y='{MARGIN + 26}' fill='#666'>{escape('; '.join(notes))}</text>",
            *body,
            "</svg>\n",
        ]
    )


def print_table(out: Console, title: str, rows: FittedTable) -> None:
    """Prints a table under its title, which may be wider."""
    out.print(Text(title, style="bold"), soft_wrap=True)
    out.print(rows)


def print_text(out: Console, text: str) -> None:
    """Prints a program's text, one line a node however long."""
    out.file.write(text)
