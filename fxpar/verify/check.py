"""One call that proves a model's split: `verify(model, batch, plan)`.

Enters: a model, a batch and a plan. Leaves: a `Verification`, also where a check failed, so that tests and the command
line can say what did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fxpar.capture import Captured, capture, check_samples
from fxpar.capture.precision import in_precision
from fxpar.errors import CheckFailed, InputError, shown
from fxpar.manager import Pass, PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.program.program import PassRecord, Program
from fxpar.rules.flops import uncounted
from fxpar.verify.analysis import split_flops
from fxpar.verify.bisect import Bisection, bisect
from fxpar.verify.simulate import check_world
from fxpar.verify.static import STATIC, verify_static
from fxpar.verify.values import ValueReport, call_inputs, check_capture, program_state, verify_values

LEVELS = ("static", "values")


@dataclass(frozen=True)
class Verification:
    """What was proved.

    Attributes:
        ok: everything asked for holds.
        level: static or values.
        program: the localised program.
        split_flops: share of the matrix FLOPs that tp divides; `uncounted` operators are no part of them.
        checks: names of the static checks that hold of the program.
        values: deviations from the single device; None at level static.
    """

    ok: bool
    level: str
    program: Program
    split_flops: float
    checks: tuple[str, ...]
    values: ValueReport | None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping for machines."""
        found: dict[str, Any] = {"ok": self.ok, "level": self.level, "split_flops": self.split_flops}
        found["uncounted"] = uncounted(self.program)
        found["checks"] = list(self.checks)
        if self.values is not None:
            found |= {k: v for k, v in asdict(self.values).items() if k != "ok"}
        return found


def compile_program(
    captured: Captured,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    on_pass: Callable[[PassRecord], None] | None = None,
) -> Program:
    """The captured program after all passes, statically checked after each.

    Raises:
        FxparError: a pass or a check refused it.
    """
    return PassManager(passes, STATIC, on_pass=on_pass).run(captured.program)


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
        model: in the mode to verify (training, with dropout on, says most). Needs weights at level values. It has the
            plan's precision meanwhile, and is left as it was.
        batch: as for `parallelize`.
        level: `static`, or `values`: the captured graph is the eager module, and all simulated ranks give the single
            device's loss, outputs and parameter gradients within 1e-10 in float64.

    Raises:
        FxparError: capture, a pass or a static check refused the model.
    """
    check_arguments(model, plan, passes)
    if level not in LEVELS:
        raise InputError("is unknown", where=f"level={level!r}", remedy=f"choose one of {', '.join(LEVELS)}")
    check_samples(batch)
    if level == "values":
        check_world(plan.world_size)
    with in_precision(model, plan):
        captured = capture(model, batch, plan, loss)
        program = compile_program(captured, passes)
        share = split_flops(program)
        checks = verify_static(program)
        if level == "static":
            return Verification(True, level, program, share, checks, None)
        _need_memory(model)
        check_capture(captured, model, batch)
        state, inputs = program_state(captured.program, model), call_inputs(captured, model, batch)
        report = verify_values(captured.program, program, state, inputs)
    return Verification(report.ok, level, program, share, checks, report)


def check_arguments(model: Any, plan: Any, passes: Any) -> None:
    """Refuses arguments of other types.

    Raises:
        InputError: names the argument.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is no nn.Module", where="model", remedy="pass the model itself")
    if not isinstance(plan, Plan):
        raise InputError(f"a {type(plan).__name__} is no Plan", where="plan", remedy="pass fxpar.Plan(tp=…)")
    if not isinstance(passes, (list, tuple)) or not passes:
        remedy = "pass a list such as [*fxpar.passes.DEFAULT_PASSES, your_pass]"
        raise InputError(f"{shown(passes)} is no list of passes", where="passes", remedy=remedy)


def bisect_model(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    loss: Callable[..., Any] | str | None = None,
) -> Bisection:
    """Finds the first pass after which the model, in the plan's precision, computes something else."""
    check_arguments(model, plan, passes)
    _need_memory(model)
    check_samples(batch)
    check_world(plan.world_size)
    with in_precision(model, plan):
        captured = capture(model, batch, plan, loss)
        state, inputs = program_state(captured.program, model), call_inputs(captured, model, batch)
        return bisect(captured.program, passes, state, inputs)


def expect(verification: Verification) -> Verification:
    """The verification itself where it is ok.

    Raises:
        CheckFailed: it is not; names the worst tensor and its deviation.
    """
    if not verification.ok and verification.values is not None:
        v = verification.values
        error = max(v.loss_error, v.output_error, v.max_grad_error)
        raise CheckFailed(f"deviates by {error:.3g} of the largest reference value", where=v.worst)
    return verification


def _need_memory(model: nn.Module) -> None:
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise InputError("has no values: the model is on the meta device", where=meta, remedy="use level static")
