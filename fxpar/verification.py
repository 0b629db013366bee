"""One call that proves a model's split, `verify(model, batch, plan)`; and the first pass after which it is wrong.

Enters: a model, a batch and a plan; or a captured program, passes, weights and a batch. Leaves: a `Verification`, even
if the values deviate, so that tests and the command line can say which ones do; or a `Bisection`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from fxpar.capture.capture import check_samples
from fxpar.capture.prepared_model import in_precision
from fxpar.compile import capture_differentiable, check_arguments, compile_model, compile_program
from fxpar.cost.flops import split_flops, uncounted
from fxpar.errors import CheckFailed, FxparError, InputError
from fxpar.ir.program import Program
from fxpar.ir.properties import Property
from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.verify.first_deviation import DeviatingNode, first_deviation
from fxpar.verify.simulate_ranks import SimulationResult, check_world
from fxpar.verify.static import verify_static
from fxpar.verify.values import (
    ValueReport,
    call_inputs,
    check_capture,
    program_state,
    reference_run,
    verify_values,
)

LEVELS = ("static", "values")


@dataclass(frozen=True)
class Verification:
    """Says what was proved of a split program.

    Attributes:
        ok: whether all checks of the level succeeded.
        level: `static` or `values`.
        program: the localised program.
        split_flops: the share of the matrix FLOPs that tp divides, without those of `uncounted` operators.
        checks: names of the static checks that succeeded.
        values: deviations from the single device; None at level `static`.
    """

    ok: bool
    level: str
    program: Program
    split_flops: float
    checks: tuple[str, ...]
    values: ValueReport | None

    @property
    def assumed(self) -> tuple[str, ...]:
        """Returns operators that treat rows apart by the plan's `batchwise_ops` alone; only a capture tries it."""
        return self.program.plan.operators.batchwise_ops if self.program.plan.data_ranks > 1 else ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain mappings, lists, numbers and strings."""
        report: dict[str, Any] = {"ok": self.ok, "level": self.level, "split_flops": self.split_flops}
        report["uncounted"] = uncounted(self.program)
        report["checks"] = list(self.checks)
        if self.assumed:
            report["assumed"] = list(self.assumed)
        if self.values is not None:
            report |= {k: v for k, v in asdict(self.values).items() if k != "ok"}
        return report


def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    *,
    level: str = "values",
    loss: Callable[..., Any] | str | None = None,
    passes: Sequence[Pass] = DEFAULT_PASSES,
) -> Verification:
    """Compiles the model for all ranks and proves the result.

    Args:
        model: the model in the mode to verify; training mode with dropout on proves most. It needs weights at level
            `values`. It is cast to the plan's precision meanwhile, and restored at the end.
        batch: as for `parallelize`.
        plan: how to split.
        level: `static` runs the static checks. `values` also checks that the captured graph is the eager module, and
            that all simulated ranks compute what one device computes: loss, outputs and parameter gradients, within
            1e-10 in float64.
        loss: as for `parallelize`.
        passes: as for `parallelize`.

    Raises:
        FxparError: capture, a pass or a static check refused the model.
    """
    check_arguments(model, plan, passes)
    if level not in LEVELS:
        raise InputError("is unknown", where=f"level={level!r}", remedy=f"choose one of {', '.join(LEVELS)}")
    check_samples(batch)
    if level == "values":
        check_world(prod(plan.axes.values()))
    with in_precision(model, plan):
        compiled = compile_model(model, batch, plan, loss, passes)
        captured, program = compiled.captured, compiled.program
        share = split_flops(program)
        checks = verify_static(program)
        if level == "static":
            return Verification(True, level, program, share, checks, None)
        need_memory(model)
        check_capture(captured, model, batch)
        state, inputs = program_state(captured.program, model), call_inputs(captured, model, batch)
        report = verify_values(captured.program, program, state, inputs)
    return Verification(report.ok, level, program, share, checks, report)


def expect(verification: Verification) -> Verification:
    """Returns the verification if it is ok.

    Raises:
        CheckFailed: it is not ok; names the worst tensor and its deviation.
    """
    if not verification.ok and verification.values is not None:
        v = verification.values
        raise CheckFailed(f"deviates by {v.deviation:.3g} of the largest reference value", where=v.worst)
    return verification


def need_memory(model: nn.Module) -> None:
    """Refuses models without values.

    Raises:
        InputError: a parameter is on the meta device.
    """
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise InputError(
            "has no values: the model is on the meta device",
            where=meta,
            remedy="give it values; verify proves the rest at level static",
        )


# Bisection: a pass is at fault where a static check rejects its result, or where values change beyond tolerance.


@dataclass(frozen=True)
class Culprit:
    """The first pass at fault: by `error` (a static check or its contract), or by `report` (values).

    Attributes:
        name: the pass, or `capture` where a static check rejects what it is given.
        error: what a static check said of its result, or which contract it broke.
        report: how far values deviate after it.
        first: the first node that deviates; None where that is not known.
    """

    name: str
    error: FxparError | None
    report: ValueReport | None
    first: DeviatingNode | None = None


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
    program = origin = right = captured
    reference: SimulationResult | None = reference_run(captured, state, inputs)
    for item in passes:
        try:
            program = compile_program(program, [item], verifiers=())
            verify_static(program)
        except FxparError as error:
            return Bisection(Culprit(item.name, error, None), compared, untested)
        if item.preserves == "nothing":
            split = Property.LAYOUTS in program.properties
            right = program
            origin, reference = program, None if split else reference_run(program, state, inputs)
            continue
        finished = complete(program) if reference is not None else None
        if finished is None:
            untested = (*untested, item.name)
            continue
        report = verify_values(origin, finished, state, inputs, reference=reference)
        compared = (*compared, item.name)
        if not report.ok:
            first = first_fault(right, program, state, inputs)
            return Bisection(Culprit(item.name, None, report, first), compared, untested)
        right, untested = program, ()
    return Bisection(None, compared, untested)


def first_fault(
    right: Program, wrong: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> DeviatingNode | None:
    """Returns the first node that deviates in a program; None if all agree, or stages are cut already.

    Args:
        right: the program before the pass at fault.
        wrong: that after it.
        state: parameters, buffers and constants by name, whole.
        inputs: by path, whole.
    """
    if any(Property.STAGES in program.properties for program in (right, wrong)):
        return None
    one, other = (complete(program, staged=False) for program in (right, wrong))
    if one is None or other is None or not all(Property.LOCAL in program.properties for program in (one, other)):
        return None
    return first_deviation(one, other, state, inputs)


def complete(program: Program, *, staged: bool = True) -> Program | None:
    """Returns the program after the default passes that it still needs to run; None where they refuse it.

    Args:
        staged: whether a pipeline is cut into its stages.
    """
    needed = [item for item in DEFAULT_PASSES if not item.provides <= program.properties]
    needed = [item for item in needed if staged or Property.STAGES not in item.provides]
    try:
        return compile_program(program, needed, verifiers=())
    except FxparError:
        return None
