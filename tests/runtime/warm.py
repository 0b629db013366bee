"""What ranks find done when they are forked: imports that wait for a first capture, and traces of common derivatives.

The process that forks them imports this module, captures a model and takes a step; no rank pays for that again. A build
of torch for GPUs starts autograd's threads with the first backward, whether it sees any GPU or not, and refuses to run
another one in a process that was forked after it. There ranks find the imports alone.
"""

from __future__ import annotations

import torch

from tests.runtime import jobs
from tests.zoo import CASES

if not torch.backends.cuda.is_built():
    jobs.case_module("gpt2").train_step(CASES["gpt2"].example())
    # Each rank makes its own modules: those of a plan of ones are none of theirs.
    jobs.forget()
