"""Refuses to be traced: a rank's program is a graph already.

Enters: a call of a parallel module. Leaves: nothing, or an error where torch.compile, torch.export or torch.jit calls.
"""

from __future__ import annotations

import torch
from torch._dynamo.comptime import comptime

from fxpar.errors import InputError


def refuse_tracing() -> None:
    """Refuses calls under a tracer.

    Raises:
        InputError: torch.export or torch.jit.trace calls; under torch.compile it comes as the cause of Dynamo's error.
    """
    if torch.compiler.is_dynamo_compiling():
        comptime(_refuse)  # Dynamo leaves out a frame that raises, and runs it uncompiled
    elif torch.compiler.is_exporting() or torch._C._is_tracing():
        _refuse()


def _refuse(context: object = None) -> None:
    raise InputError(
        "cannot be traced: its programs are graphs already",
        where="ParallelModule" if context is None else "torch.compile",
        remedy="call it without torch.compile, torch.export and torch.jit; Plan(compile=True) compiles its programs",
    )
