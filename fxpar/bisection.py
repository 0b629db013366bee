"""Bisection: the first pass after which a program computes something else.

Enters: a captured program, passes, weights and a batch. Leaves: the first pass that a static check rejects or that
changes values beyond tolerance, and which passes were compared at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from fxpar.capture.capture import check_samples
from fxpar.capture.prepared_model import in_precision
from fxpar.compile import capture_differentiable, check_arguments, compile_program
from fxpar.errors import FxparError
from fxpar.ir.program import Program
from fxpar.ir.properties import Property
from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.verification import need_memory
from fxpar.verify.simulate_ranks import SimulationResult, check_world
from fxpar.verify.static import verify_static
from fxpar.verify.values import ValueReport, call_inputs, program_state, reference_run, verify_values


@dataclass(frozen=True)
class Culprit:
    """The first pass at fault: by `error` (a static check or its contract), or by `report` (values).

    Attributes:
        name: the pass, or `capture` where a static check rejects what it is given.
        error: what a static check said of its result, or which contract it broke.
        report: how far values deviate after it.
    """

    name: str
    error: FxparError | None
    report: ValueReport | None


@dataclass(frozen=True)
class Bisection:
    """What was found, and what it rests on.

    Attributes:
        culprit: None where no pass was found at fault.
        compared: passes after which values were compared, the culprit too.
        untested: passes since then whose results were only checked statically: they cannot be run, or a pass before
            them changed values of a split program. Before a culprit, one of them may be at fault instead.
    """

    culprit: Culprit | None
    compared: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()


def bisect_model(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    loss: Callable[..., Any] | str | None = None,
) -> Bisection:
    """Finds the first pass after which the model, in the plan's precision, computes something else."""
    check_arguments(model, plan, passes)
    need_memory(model)
    check_samples(batch)
    check_world(prod(plan.axes.values()))
    with in_precision(model, plan):
        captured = capture_differentiable(model, batch, plan, loss)
        state, inputs = program_state(captured.program, model), call_inputs(captured, model, batch)
        return bisect(captured.program, passes, state, inputs)


def bisect(
    captured: Program, passes: Sequence[Pass], state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Bisection:
    """Runs the passes one by one and finds the first that breaks the program.

    A pass is at fault if a static check rejects its result, or if that result, completed by the default passes that
    make it runnable, computes other values. Programs are completed because only a localised one runs on ranks; the
    passes that follow have no part in it. A pass that declares to preserve nothing is not judged by values. What
    follows it is compared with its result where that is a program of one device, and else checked statically alone.
    """
    compared: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    try:
        verify_static(captured)
    except FxparError as error:
        return Bisection(Culprit("capture", error, None))
    program = origin = captured
    reference: SimulationResult | None = reference_run(captured, state, inputs)
    for item in passes:
        try:
            program = compile_program(program, [item], verifiers=())
            verify_static(program)
        except FxparError as error:
            return Bisection(Culprit(item.name, error, None), compared, untested)
        if item.preserves == "nothing":
            split = Property.LAYOUTS in program.properties
            origin, reference = program, None if split else reference_run(program, state, inputs)
            continue
        finished = complete(program) if reference is not None else None
        if finished is None:
            untested = (*untested, item.name)
            continue
        report = verify_values(origin, finished, state, inputs, reference=reference)
        compared = (*compared, item.name)
        if not report.ok:
            return Bisection(Culprit(item.name, None, report), compared, untested)
        untested = ()
    return Bisection(None, compared, untested)


def complete(program: Program) -> Program | None:
    """Returns the program after the default passes that it still needs to run; None where they refuse it."""
    needed = [item for item in DEFAULT_PASSES if not item.provides <= program.properties]
    try:
        return compile_program(program, needed, verifiers=())
    except FxparError:
        return None
