"""The entry point of the command line.

Enters: the words of a command line. Leaves: the exit status: 0 fine, 1 a check failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import typer

from fxpar.cli import build, check, explain, groups, inspection
from fxpar.cli.output import BAD_INPUT, INTERRUPTED, print_error, print_json

# typer gives the errors of usage no public name but this subclass.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _application() -> typer.Typer:
    app = typer.Typer(
        name="fxpar",
        help="Splits a single-device PyTorch transformer over the ranks of a cluster, and proves it right.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for family in (build, check, explain, inspection, groups):
        family.register(app)
    return app


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
        result = _application()(args=words, prog_name="fxpar", standalone_mode=False)
        return int(result or 0)
    except _UsageError as error:
        return _usage(error, "--json" in words)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _usage(error: Exception, json: bool) -> int:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "fxpar")
    reason = getattr(error, "format_message", error.__str__)().strip().rstrip(".")
    if not reason:
        return BAD_INPUT  # no command: typer has printed the help
    reason = reason[0].lower() + reason[1:]
    remedy = f"see '{path} --help'"
    if json:
        print_json(
            {"ok": False, "error": {"kind": "UsageError", "where": path, "reason": reason, "remedy": remedy}},
            sys.stdout,
        )
    print_error(f"{path}: {reason}; {remedy}")
    return BAD_INPUT
