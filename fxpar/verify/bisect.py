"""Bisection: the first pass after which a program computes something else.

Enters: a captured program, passes, weights and a batch. Leaves: the name of the first pass that changes values beyond
tolerance, with the report, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fxpar.errors import FxparError
from fxpar.manager import Pass, PassManager
from fxpar.program import Program
from fxpar.verify.static import STATIC
from fxpar.verify.values import ValueReport, verify_values


@dataclass(frozen=True)
class Culprit:
    """The first pass at fault: by `error` (a static check or its contract), or by `report` (values)."""

    name: str
    error: FxparError | None
    report: ValueReport | None


def bisect(
    captured: Program, passes: Sequence[Pass], state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Culprit | None:
    """Runs the passes one by one and finds the first that breaks the program.

    A pass is at fault if a static check rejects its result, or if the program that the passes up to it give, completed
    by the remaining default steps that make it runnable, computes other values. Programs are completed rather than run
    half-way, because only a localised program can run on ranks.
    """
    program = captured
    for position, item in enumerate(passes):
        try:
            program = PassManager([item], STATIC).run(program)
        except FxparError as error:
            return Culprit(item.name, error, None)
        finished = complete(program, passes[position + 1 :])
        if finished is None:
            continue
        report = verify_values(captured, finished, state, inputs)
        if not report.ok:
            return Culprit(item.name, None, report)
    return None


def complete(program: Program, rest: Sequence[Pass]) -> Program | None:
    """The program after the default passes that are still needed to run it; None where they cannot."""
    from fxpar.passes import DEFAULT_PASSES

    own = {item.name for item in DEFAULT_PASSES}
    done = {record.name for record in program.history}
    needed = [item for item in DEFAULT_PASSES if item.name not in done]
    trusted = [item for item in rest if item.name in own]
    if [item.name for item in needed] != [item.name for item in trusted]:
        needed = [item for item in needed if item.name in {t.name for t in trusted}]
    try:
        return PassManager(needed).run(program)
    except FxparError:
        return None
