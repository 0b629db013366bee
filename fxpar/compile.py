"""The compiler in one sentence: capture → passes → verify → lower.

Enters: a model, an example batch and a plan. Leaves: the program of every rank, and what a rank runs of it.
`parallelize`, `verify`, `bisect_model`, reports and the command line all call these functions: what is proved is put
together by the code that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import nn

from fxpar.capture.capture import Captured, capture
from fxpar.errors import FxparError, InputError, shown
from fxpar.ir.program import PassRecord, Program
from fxpar.ir.step import batch_symbol
from fxpar.manager import Pass, PassManager, Verifier
from fxpar.mesh.axes import Cuts, axis_that
from fxpar.ops.lower import Lowered, lower
from fxpar.ops.process_group import Group
from fxpar.passes import CANONICAL_PASSES, DEFAULT_PASSES, step_passes
from fxpar.passes.differentiate import is_differentiable, sizes_needed
from fxpar.passes.mark_regions import mark_regions
from fxpar.passes.outline_layers import outline_layers
from fxpar.plan.plan import Plan
from fxpar.verify.static import STATIC


@dataclass(frozen=True)
class Compilation:
    """A model that is captured, and its program after all passes."""

    captured: Captured
    program: Program


def compile_model(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    loss: Callable[..., Any] | str | None = None,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    review: Callable[[Captured], Captured] | None = None,
    differentiated: bool = True,
    fixed: frozenset[tuple[int, int]] = frozenset(),
) -> Compilation:
    """Captures the model in its current mode and compiles it.

    Args:
        model: in the plan's precision.
        batch: as for `parallelize`.
        loss: as for `fxpar.capture.capture`.
        review: looks at what was captured before the passes run, and may settle what is open of it.
        differentiated: whether steps are made of it, so that it is for sizes of which PyTorch has a derivative.
        fixed: as for `capture_differentiable`, where it is known that the model needs it.

    Raises:
        FxparError: capture, `review`, a pass or a static check refused the model.
    """
    captured = capture(model, batch, plan, loss, fixed)
    compilation = _compiled(captured, passes, review)
    # Most models need no condition on their sizes, and are captured once.
    if not differentiated or is_differentiable(compilation.program):
        return compilation
    return _compiled(capture_differentiable(model, batch, plan, loss, fixed), passes, review)


def _compiled(captured: Captured, passes: Sequence[Pass], review: Callable[[Captured], Captured] | None) -> Compilation:
    if review is not None:
        captured = review(captured)
    return Compilation(captured, compile_program(captured.program, passes))


def capture_differentiable(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    loss: Callable[..., Any] | str | None = None,
    fixed: frozenset[tuple[int, int]] = frozenset(),
) -> Captured:
    """Captures a model with what its sizes must satisfy so that PyTorch differentiates it.

    Conditions that the example satisfies become the program's. Where PyTorch has a derivative for one size alone, or
    for those of an equation (`s = 8*floor(s/8)`), that size is a number in the program, which is for batches of the
    example's size then.

    Args:
        fixed: dimensions and sizes of inputs that are to be numbers in any case.

    Raises:
        FxparError: capture refused the model, or a number of rows that ranks share out is to be a number.
    """
    while True:
        captured = capture(model, batch, plan, loss, fixed)
        try:
            needed = sizes_needed(PassManager(CANONICAL_PASSES).run(captured.program))
        except FxparError:
            return captured  # the pass says so where it has its turn
        program = captured.program.with_(conditions=needed.conditions)
        # No rule takes `s` and `8*floor(s/8)` for one size.
        equations = [c for c in needed.conditions if c.relation == "==" and c.expression.has(sympy.floor, sympy.Mod)]
        rows = batch_symbol(program) if plan.data_ranks > 1 and (needed.numbers or equations) else ""
        numbers = {*needed.numbers, *(name for c in equations for name in c.names if name != rows)}
        sizes = {(symbol.dim, symbol.example) for symbol in program.symbols if symbol.name in numbers}
        if sizes <= fixed:
            return replace(captured, program=program)
        if rows in needed.numbers:
            raise InputError(
                "PyTorch differentiates it for one number of rows alone, and data ranks share out the rows",
                where=needed.numbers[rows],
                remedy=f"set {axis_that(Cuts.BATCH)}=1, detach its operand, or write it with other operations",
            )
        fixed |= sizes


def compile_program(
    program: Program,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    verifiers: Sequence[Verifier] = STATIC,
    *,
    until: str | None = None,
    on_pass: Callable[[PassRecord], None] | None = None,
) -> Program:
    """Returns the program after all passes, or after the pass named `until`, statically checked before and after each.

    Raises:
        FxparError: a pass or a check refused it.
    """
    return PassManager(passes, verifiers, on_pass=on_pass).run(program, until=until)


def compile_step(
    program: Program,
    outputs: Sequence[str],
    tangents: Sequence[str],
    trained: Collection[str],
    *,
    splits: bool = False,
    copies: Collection[str] | None = None,
) -> Program:
    """Returns the training step of a compiled program, statically checked after each pass.

    Args:
        program: that was checked when it was compiled.
        outputs: those that the step returns.
        tangents: those that have a gradient.
        trained: parameters whose gradients are wanted.
        splits: whether a schedule runs the backward in two parts.
        copies: axes, and joined ones, whose ranks can copy into each other's memory; by default all with the plan's
            collective_transport `copy`, and none with `auto`, which is known where the ranks are.

    Raises:
        FxparError: a pass or a check refused it.
    """
    passes = step_passes(outputs, tangents, trained, splits=splits, copies=copies)
    return PassManager(passes, STATIC, checked=True).run(program)


def outlined(program: Program) -> Program:
    """Returns a compiled program whose equal layers are one region, and whose ends of CUDA graphs are marked.

    The values are the same, which the manager checks.
    """
    return PassManager([mark_regions, outline_layers]).run(program)


def lower_program(
    program: Program,
    groups: Mapping[str, Group],
    device: torch.device | str = "cpu",
    *,
    uneven_rows: bool = False,
) -> Lowered:
    """Returns what a rank runs of a compiled program or step; parameters are in the program's types.

    Args:
        groups: process group of each axis of the program.
        device: where it will run.
        uneven_rows: whether data ranks may bring other numbers of rows.
    """
    return lower(program, groups, device, uneven_rows=uneven_rows)


def check_arguments(model: Any, plan: Any, passes: Any) -> None:
    """Refuses arguments of other types.

    Raises:
        InputError: names the argument.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"must be an nn.Module, got a {type(model).__name__}", where="model", remedy="pass the model")
    if not isinstance(plan, Plan):
        raise InputError(f"must be a Plan, got a {type(plan).__name__}", where="plan", remedy="pass fxpar.Plan(tp=…)")
    if not isinstance(passes, (list, tuple)) or not passes:
        remedy = "pass a list such as [*fxpar.passes.DEFAULT_PASSES, your_pass]"
        raise InputError(f"must be a list of passes, got {shown(passes)}", where="passes", remedy=remedy)
