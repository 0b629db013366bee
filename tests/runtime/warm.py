"""What ranks find done when they are forked: imports that wait for a first capture, and traces of common derivatives.

The process that forks them imports this module, captures a model and takes a step; no rank pays for that again. A build
of torch for GPUs starts autograd's threads with the first backward, whether it sees any GPU or not, and refuses to run
another one in a process that was forked after it. There ranks find the imports alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import fx
from torch._inductor import config

from fxpar.runtime.calls import Boxed
from fxpar.runtime.inductor import Inductor
from tests.runtime import jobs
from tests.zoo import CASES

if not torch.backends.cuda.is_built():
    jobs.case_module("gpt2").train_step(CASES["gpt2"].example())
    # Each rank makes its own modules: those of a plan of ones are none of theirs.
    jobs.forget()

_compiled = Inductor._compiled


@contextlib.contextmanager
def compiled_in_turn(folder: Path) -> Iterator[None]:
    """While active, one process has Inductor write the code of a graph, and those that wait for it read that.

    Code has no vectors, which are most of what Inductor takes its time for: tests of vectors ask for them.

    Args:
        folder: of the locks, for all processes.
    """

    def compiled(inductor: Inductor, graph: fx.GraphModule, backward: bool) -> Boxed:
        if config.post_grad_custom_pre_pass is not None:  # it counts graphs, and nothing is read
            return _compiled(inductor, graph, backward)
        with (folder / f"{hashlib.sha256(graph.code.encode()).hexdigest()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _compiled(inductor, graph, backward)

    with mock.patch.object(Inductor, "_compiled", compiled), config.patch({"cpp.simdlen": 1}):
        yield
