"""fxpar: a compiler that splits a single-device PyTorch transformer over many devices, and proves it right.

Importing the package loads nothing heavy: names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpar.api import parallelize as parallelize
    from fxpar.api import prefetch as prefetch
    from fxpar.api import shard_batch as shard_batch
    from fxpar.checkpoint.initial import materialize as materialize
    from fxpar.checkpoint.parallel_module import ParallelModule as ParallelModule
    from fxpar.checkpoint.safetensors_files import Checkpoint as Checkpoint
    from fxpar.errors import FxparError as FxparError
    from fxpar.ir.program import Program as Program
    from fxpar.loop.data import BatchSampler as BatchSampler
    from fxpar.loop.perplexity import cloze_accuracy as cloze_accuracy
    from fxpar.loop.perplexity import perplexity as perplexity
    from fxpar.loop.train import train as train
    from fxpar.manager import PassManager as PassManager
    from fxpar.manager import register_pass as register_pass
    from fxpar.optim.optimizer import Optimizer as Optimizer
    from fxpar.plan.cost import Cost as Cost
    from fxpar.plan.plan import Plan as Plan
    from fxpar.plan.plan_options import Communication as Communication
    from fxpar.plan.plan_options import CudaGraphs as CudaGraphs
    from fxpar.plan.plan_options import Experts as Experts
    from fxpar.plan.plan_options import Operators as Operators
    from fxpar.plan.plan_options import Pipeline as Pipeline
    from fxpar.plan.plan_options import Recompute as Recompute
    from fxpar.rules import register_rule as register_rule

__version__ = "0.1.0"

_WHERE = {
    "BatchSampler": "fxpar.loop.data",
    "Checkpoint": "fxpar.checkpoint.safetensors_files",
    "Communication": "fxpar.plan.plan_options",
    "Cost": "fxpar.plan.cost",
    "CudaGraphs": "fxpar.plan.plan_options",
    "Experts": "fxpar.plan.plan_options",
    "FxparError": "fxpar.errors",
    "Operators": "fxpar.plan.plan_options",
    "Optimizer": "fxpar.optim.optimizer",
    "ParallelModule": "fxpar.checkpoint.parallel_module",
    "PassManager": "fxpar.manager",
    "Pipeline": "fxpar.plan.plan_options",
    "Plan": "fxpar.plan.plan",
    "Program": "fxpar.ir.program",
    "Recompute": "fxpar.plan.plan_options",
    "cloze_accuracy": "fxpar.loop.perplexity",
    "materialize": "fxpar.checkpoint.initial",
    "parallelize": "fxpar.api",
    "perplexity": "fxpar.loop.perplexity",
    "prefetch": "fxpar.api",
    "register_pass": "fxpar.manager",
    "register_rule": "fxpar.rules",
    "shard_batch": "fxpar.api",
    "train": "fxpar.loop.train",
}
# Rooms that users name: `fxpar.ops.experts`, `fxpar.optim.Muon`.
_ROOMS = ("ops", "optim")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"fxpar.{name}")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'fxpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_ROOMS})
