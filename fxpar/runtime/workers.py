"""The processes that compile a GPU's kernels, started before there is anything to compile.

Enters: a plan. Leaves: torch's pool of them on its way. They import torch, for seconds: kernels that come before they
are there are compiled by this process alone, one after the other.
"""

from __future__ import annotations

import torch

from fxpar.plan.plan import Plan


def start_workers(plan: Plan) -> None:
    """Starts them where a plan has kernels compiled; `TORCH_WARM_POOL=0` is heeded, as by `torch.compile`."""
    if plan.compile and torch.cuda.is_available():
        from torch._inductor.async_compile import maybe_warm_pool  # Inductor takes a second to import

        maybe_warm_pool()
