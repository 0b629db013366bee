"""One call that proves a model's split: `verify(model, batch, plan)`.

Enters: a model, a batch and a plan. Leaves: a `Verification`, even if the values deviate, so that tests and the command
line can say which ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from torch import nn

from fxpar.capture.capture import check_samples
from fxpar.capture.prepared_model import in_precision
from fxpar.compile import check_arguments, compile_model
from fxpar.cost.flops import split_flops, uncounted
from fxpar.errors import CheckFailed, InputError
from fxpar.ir.program import Program
from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.verify.simulate_ranks import check_world
from fxpar.verify.static import verify_static
from fxpar.verify.values import ValueReport, call_inputs, check_capture, program_state, verify_values

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
        error = max(v.loss_error, v.output_error, v.max_grad_error)
        raise CheckFailed(f"deviates by {error:.3g} of the largest reference value", where=v.worst)
    return verification


def need_memory(model: nn.Module) -> None:
    """Refuses models without values.

    Raises:
        InputError: a parameter is on the meta device.
    """
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise InputError("has no values: the model is on the meta device", where=meta, remedy="use level static")
