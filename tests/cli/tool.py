"""Runs command lines in this process."""

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from fxpar.cli.main import main
from fxpar.passes import DEFAULT_PASSES

# The texts of a dump folder, by pass.
TEXTS = {item.name: f"{number:02d}-{item.name}.txt" for number, item in enumerate(DEFAULT_PASSES, 1)}
ANNOTATED, INSERTED, LOCAL = (TEXTS[name] for name in ("annotate", "insert_collectives", "localize"))

TINY = "hf:gpt2,n_layer=1"
SPLIT = (
    "--tp",
    "2",
    "--split",
    "*.c_attn=head",
    "--split",
    "*.attn.c_proj=row",
    "--split",
    "*.c_fc=column",
    "--split",
    "*.mlp.c_proj=row",
)


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document that stdout must be."""
        return json.loads(self.out)


def fxpar(*words: str) -> Result:
    """The outcome of `fxpar WORDS`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return Result(status, out.getvalue(), err.getvalue())
