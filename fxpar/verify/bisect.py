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
from fxpar.passes import DEFAULT_PASSES
from fxpar.program import Program
from fxpar.verify.static import verify_static
from fxpar.verify.values import ValueReport, reference_run, verify_values


@dataclass(frozen=True)
class Culprit:
    """The first pass at fault: by `error` (a static check or its contract), or by `report` (values).

    Attributes:
        name: the pass, or `capture` where a static check rejects what it is given.
        error: what a static check said of its result, or which contract it broke.
        report: how far values deviate after it.
        untested: passes before it whose results could not be run, so that one of them may be at fault instead.
    """

    name: str
    error: FxparError | None
    report: ValueReport | None
    untested: tuple[str, ...] = ()


def bisect(
    captured: Program, passes: Sequence[Pass], state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Culprit | None:
    """Runs the passes one by one and finds the first that breaks the program.

    A pass is at fault if a static check rejects its result, or if that result, completed by the default passes that
    make it runnable, computes other values. Programs are completed because only a localised one runs on ranks; the
    passes that follow have no part in it. A pass that declares to preserve nothing is not judged by values, and what
    follows it is compared with its result, as long as that is a program of one device.
    """
    try:
        verify_static(captured)
    except FxparError as error:
        return Culprit("capture", error, None)
    program, origin = captured, captured
    untested: tuple[str, ...] = ()
    reference = reference_run(captured, state, inputs)
    for item in passes:
        try:
            program = PassManager([item]).run(program)
            verify_static(program)
        except FxparError as error:
            return Culprit(item.name, error, None, untested)
        if item.preserves == "nothing":
            if "layouts" in program.properties:
                return None
            origin, untested = program, ()
            reference = reference_run(origin, state, inputs)
            continue
        finished = complete(program)
        if finished is None:
            untested = (*untested, item.name)
            continue
        report = verify_values(origin, finished, state, inputs, reference=reference)
        if not report.ok:
            return Culprit(item.name, None, report, untested)
        untested = ()
    return None


def complete(program: Program) -> Program | None:
    """The program after the default passes that provide what it still lacks to run; None where they refuse it."""
    needed = [item for item in DEFAULT_PASSES if not item.provides <= program.properties]
    try:
        return PassManager(needed).run(program)
    except FxparError:
        return None
