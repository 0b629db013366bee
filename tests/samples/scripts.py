"""What the ranks of a test world do with scripts: what torchrun would start, in processes that have all loaded."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist


def called(file: Path, name: str, *args: Any) -> Any:
    """What a function of a script returns, on the ranks that torchrun would have started."""
    own = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, own):
        return runpy.run_path(str(file))[name](*args)


def script(file: Path, words: tuple[str, ...] = (), folder: Path | None = None) -> str:
    """Runs a script as a program, in a folder; returns what it prints.

    Raises:
        RuntimeError: it ends with a status.
    """
    own = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "COLUMNS": "100"}
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, own),
        mock.patch.object(sys, "argv", [str(file), *words]),
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(out),
    ):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{out.getvalue()}\nstatus {end.code}") from end
    return out.getvalue()
