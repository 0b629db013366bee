"""choose_halves: whether two half batches in turn pay, by cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from fxpar.analysis.predicted import Predicted, predicted
from fxpar.errors import FxparError, PlanError, shown
from fxpar.manager import PassManager, register_pass
from fxpar.mesh.purpose import joined_names
from fxpar.passes.exchange import exchange, exchange_over
from fxpar.passes.interleave_halves import in_halves
from fxpar.passes.split import SPLIT_PASSES
from fxpar.passes.step import STEP_PASSES
from fxpar.plan.halves import AUTO, unsupported
from fxpar.program.program import Program
from fxpar.program.properties import Property
from fxpar.program.regions import inlined
from fxpar.program.rows import batch_symbol


@dataclass(frozen=True)
class Weighed:
    """A step of the whole batch beside one of its halves in turn.

    Attributes:
        reason: why halves are not offered; empty where they are.
        is_refused: whether a plan that asks for them all the same is refused; it is computed whole otherwise.
        whole: predicted seconds of a microbatch; None where halves are not offered.
        halves: the same in halves.
    """

    reason: str = ""
    is_refused: bool = False
    whole: Predicted | None = None
    halves: Predicted | None = None

    @property
    def saved(self) -> float:
        """Seconds of a microbatch that halves save; negative where they cost more."""
        return 0.0 if self.whole is None or self.halves is None else self.whole.total - self.halves.total


def _is_open(program: Program) -> bool:
    """the plan leaves halves to cost"""
    return program.plan.interleave_halves == AUTO


@register_pass("choose_halves", requires={Property.CANONICAL}, preserves="values", when=_is_open)
def choose_halves(program: Program) -> Program:
    """Decides by cost whether a rank computes its batch in two halves.

    Before::

        plan {"tp": 2, "interleave_halves": "auto"}

    After, where a step of the whole batch is predicted to take no longer::

        plan {"tp": 2}

    Algorithm: the program is split and differentiated both ways, as by the default passes, and the step that
    `fxpar.analysis.predicted` says takes less time is chosen: whole where both take as long. Sizes are those of a
    microbatch of the example. Two ranks are taken to reach each other's memory, unless the plan's exchange is `nccl`.

    The graph stays as it is. Where halves are refused the batch is whole; `weigh_halves` says why.
    """
    return program.with_(plan=program.plan.replace(interleave_halves=weigh_halves(program).saved > 0))


def weigh_halves(program: Program) -> Weighed:
    """What the whole batch and its halves are predicted to take, or why there are no halves.

    Args:
        program: in canonical form, before `divide_batch`; its plan says nothing of halves that counts.

    Raises:
        FxparError: the model cannot be split, whole or not.
    """
    plan = program.plan
    others = [f"{name}={shown(getattr(plan, name))}" for name in unsupported(plan)]
    if others:
        return Weighed(f"not supported with {', '.join(others)}", is_refused=True)
    program = program.with_(plan=plan.replace(interleave_halves=True, half=1, microbatches=1))
    try:
        asked = _of_one(program, plan.microbatches)
        rows, halved = _rows(asked), in_halves(asked)
    except PlanError as error:
        return Weighed(error.reason, is_refused=True)
    if halved.plan.half == 1:
        each = f"{rows} of {plan.data_ranks} data ranks" if plan.data_ranks > 1 else f"{rows}"
        return Weighed(f"a rank's rows are no even number: {each}")
    whole = _predicted(asked.with_(plan=asked.plan.replace(interleave_halves=False)))
    try:
        halves = _predicted(asked)
    except FxparError as error:
        return Weighed(f"{error.where}: {error.reason}" if error.where else error.reason, is_refused=True)
    return Weighed(whole=whole, halves=halves)


def _of_one(program: Program, microbatches: int) -> Program:
    """The program for a microbatch of the example, where that has several."""
    if microbatches == 1:
        return program
    name = batch_symbol(program)
    found = (replace(s, example=s.example // microbatches) if s.name == name else s for s in program.symbols)
    return program.with_(symbols=tuple(found))


def _rows(program: Program) -> int:
    """The example's rows."""
    name = batch_symbol(program)
    return next(s.example for s in program.symbols if s.name == name)


def _predicted(program: Program) -> Predicted:
    """Of a step; what a check would find is found in the program that is chosen."""
    passes = STEP_PASSES
    if program.plan.exchange == "auto":
        passes = tuple(exchange_over(_pairs(program.plan.axes)) if each is exchange else each for each in passes)
    return predicted(inlined(PassManager((*SPLIT_PASSES, *passes)).run(program)))


def _pairs(axes: Mapping[str, int]) -> list[str]:
    """The axes, and joined ones, of two ranks each, between which `auto` copies."""
    return [name for name in joined_names(axes) if prod(axes[axis] for axis in name.split("-")) == 2]
