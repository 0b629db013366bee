"""fxpar: a compiler that splits a single-device PyTorch transformer over many devices, and proves it right.

Split and train:

- `parallelize` compiles a model into the part that a process runs: a `ParallelModule`
- `Plan` says how, with `Experts`, `Pipeline`, `Recompute`, `Communication`, `Operators`, `CudaGraphs`, `Cost`
- `Optimizer`, `optim.Muon` step its parameters; `train` is a whole loop, `Trainer` that of transformers
- `shard_batch`, `BatchSampler`, `prefetch` bring a process its rows
- `perplexity`, `cloze_accuracy` evaluate
- `Checkpoint`, `materialize` are where weights come from

Change the compiler:

- `Program` is what passes rewrite, `PassManager` runs them, `register_pass` makes one of a function
- `register_rule` says how an operator of yours treats layouts, and `ops` has fxpar's own operators
- `testing` runs and proves all ranks of a split model in one process

Errors, all of them a `FxparError` with `where`, `reason` and `remedy`:

- `InputError`: `PlanError`, `CaptureError`, `CheckpointError`, `RankError`, `ScheduleError`, `TextError`
- of a pass: `LayoutError`, `PassError`, `CheckFailed`

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
    from fxpar.errors import CaptureError as CaptureError
    from fxpar.errors import CheckFailed as CheckFailed
    from fxpar.errors import CheckpointError as CheckpointError
    from fxpar.errors import FxparError as FxparError
    from fxpar.errors import InputError as InputError
    from fxpar.errors import LayoutError as LayoutError
    from fxpar.errors import PassError as PassError
    from fxpar.errors import PlanError as PlanError
    from fxpar.errors import RankError as RankError
    from fxpar.errors import ScheduleError as ScheduleError
    from fxpar.errors import TextError as TextError
    from fxpar.ir.program import Program as Program
    from fxpar.loop.data import BatchSampler as BatchSampler
    from fxpar.loop.perplexity import cloze_accuracy as cloze_accuracy
    from fxpar.loop.perplexity import perplexity as perplexity
    from fxpar.loop.train import train as train
    from fxpar.loop.trainer import Trainer as Trainer
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
    "CaptureError": "fxpar.errors",
    "CheckFailed": "fxpar.errors",
    "Checkpoint": "fxpar.checkpoint.safetensors_files",
    "CheckpointError": "fxpar.errors",
    "Communication": "fxpar.plan.plan_options",
    "Cost": "fxpar.plan.cost",
    "CudaGraphs": "fxpar.plan.plan_options",
    "Experts": "fxpar.plan.plan_options",
    "FxparError": "fxpar.errors",
    "InputError": "fxpar.errors",
    "LayoutError": "fxpar.errors",
    "Operators": "fxpar.plan.plan_options",
    "Optimizer": "fxpar.optim.optimizer",
    "ParallelModule": "fxpar.checkpoint.parallel_module",
    "PassError": "fxpar.errors",
    "PassManager": "fxpar.manager",
    "Pipeline": "fxpar.plan.plan_options",
    "Plan": "fxpar.plan.plan",
    "PlanError": "fxpar.errors",
    "Program": "fxpar.ir.program",
    "RankError": "fxpar.errors",
    "Recompute": "fxpar.plan.plan_options",
    "ScheduleError": "fxpar.errors",
    "TextError": "fxpar.errors",
    "Trainer": "fxpar.loop.trainer",
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
# Rooms that users name: `fxpar.ops.experts`, `fxpar.optim.Muon`, `fxpar.testing.simulate`.
_ROOMS = ("ops", "optim", "testing")
__all__ = [
    "BatchSampler",
    "CaptureError",
    "CheckFailed",
    "Checkpoint",
    "CheckpointError",
    "Communication",
    "Cost",
    "CudaGraphs",
    "Experts",
    "FxparError",
    "InputError",
    "LayoutError",
    "Operators",
    "Optimizer",
    "ParallelModule",
    "PassError",
    "PassManager",
    "Pipeline",
    "Plan",
    "PlanError",
    "Program",
    "RankError",
    "Recompute",
    "ScheduleError",
    "TextError",
    "Trainer",
    "cloze_accuracy",
    "materialize",
    "ops",
    "optim",
    "parallelize",
    "perplexity",
    "prefetch",
    "register_pass",
    "register_rule",
    "shard_batch",
    "testing",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"fxpar.{name}")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'fxpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_ROOMS})
