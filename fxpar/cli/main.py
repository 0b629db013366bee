"""The entry point of the command line.

Enters: the words of a command line. Leaves: the exit status: 0 fine, 1 a check failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

from fxpar import __version__
from fxpar.cli.differences import diff
from fxpar.cli.explain import explain
from fxpar.cli.groups import groups
from fxpar.cli.inspection import comm, memory, regions, report
from fxpar.cli.output import BAD_INPUT, INTERRUPTED, print_error, print_json
from fxpar.cli.plan_flags import command
from fxpar.cli.program_commands import passes, run, trace
from fxpar.cli.schedule import schedule
from fxpar.cli.timeline import timeline
from fxpar.cli.verify_commands import bisect, verify
from fxpar.mesh.axes import PURPOSES

_HELP = "Splits a single-device PyTorch transformer over the ranks of a cluster, and proves it right."
# In the order in which the help lists them.
_COMMANDS = {
    "See what a plan does": (trace, passes, run, diff),
    "Prove it": (verify, bisect),
    "Count what it costs": (explain, comm, regions, memory, report, timeline),
    "Arrange ranks": (groups, schedule),
}

# What writing to a full disk or to a pipe that nobody reads raises.
_OUTPUT_FAULTS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

# typer gives the errors of usage no public name but this subclass.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _application() -> typer.Typer:
    app = typer.Typer(
        name="fxpar",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for panel, bodies in _COMMANDS.items():
        for body in bodies:
            command(app, body, panel)
    # A callback brings its own help, which is the application's.
    app.callback(help=_HELP)(_options)
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"fxpar {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Declares what may stand in front of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        argv: the words after the program's name; by default those of the process.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # Arrows and ellipses must not end a command on a terminal that has none.
        if isinstance(stream, io.TextIOWrapper) and not (stream.encoding or "").lower().startswith("utf"):
            stream.reconfigure(errors="backslashreplace")
    # Users' modules are found from where they work, as under `python -m`.
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        status = _status(words)
        sys.stdout.flush()
        return status
    except OSError as error:
        if error.errno not in _OUTPUT_FAULTS or error.filename is not None:
            raise
        return _unwritten(error)
    except SystemExit as stop:  # by which rich and typer end where a pipe has no reader
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        return _unwritten(stop.__context__)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _status(words: list[str]) -> int:
    try:
        return int(_application()(args=words, prog_name="fxpar", standalone_mode=False) or 0)
    except _UsageError as error:
        return _usage(error, "--json" in words)


def _unwritten(error: OSError) -> int:
    """Says that the output went nowhere; what is left of it would fail once more when the interpreter ends."""
    with contextlib.suppress(OSError):
        print_error(f"stdout: cannot be written: {error.strerror}; print to a terminal, or to a file with room")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        # A stream of a caller's own has another number or none, and is theirs to close.
        with contextlib.suppress(OSError, AttributeError):
            if stream.fileno() == number and (number == 1 or not _flushes(stream)):
                os.dup2(nowhere, number)
    os.close(nowhere)
    return BAD_INPUT


def _flushes(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True


def _usage(error: Exception, json: bool) -> int:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "fxpar")
    reason = getattr(error, "format_message", error.__str__)().strip().rstrip(".")
    if not reason:
        return BAD_INPUT  # no command: typer has printed the help
    reason = reason[0].lower() + reason[1:]
    remedy = f"see '{path} --help'"
    name = getattr(error, "option_name", "")
    if reason.startswith("no such option") and name in {f"--{axis}" for axis in PURPOSES}:
        reason = f"has no {name}, which says nothing of it"  # and options of nearly that name are of other axes
        remedy = f"leave it out, or {remedy}"
    if json:
        print_json(
            {"ok": False, "error": {"kind": "UsageError", "where": path, "reason": reason, "remedy": remedy}},
            sys.stdout,
        )
    print_error(f"{path}: {reason}; {remedy}")
    return BAD_INPUT
