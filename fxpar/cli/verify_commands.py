"""Commands that prove programs right: verify, bisect.

Enters: a model, a program's text or a dump folder. Leaves: what holds, or the first fault and exit status 1.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fxpar.cli.output import FAILED, FINE, CommandResult, Ui, error_document, error_text, is_folder, print_table, table
from fxpar.cli.plan_flags import Passes, Request
from fxpar.cli.program_commands import warn_unsplit, whole, whole_lines
from fxpar.errors import CheckFailed, FxparError, InputError
from fxpar.ir.properties import Property

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fxpar.ir.program import Program
    from fxpar.manager import Pass
    from fxpar.verification import Verification
    from fxpar.verify.first_deviation import DeviatingNode
    from fxpar.verify.values import ValueReport


def verify(
    ui: Ui,
    request: Request,
    level: Annotated[
        str | None, typer.Option(metavar="static|values", help="what to prove (default: values; static for a text)")
    ] = None,
    passes: Passes = None,
) -> CommandResult:
    """Proves a program: layouts and shapes (static), or also that all ranks compute what one device does (values)."""
    from fxpar.cli.files import is_text
    from fxpar.cli.models import load_passes
    from fxpar.verification import LEVELS, expect

    if level is not None and level not in LEVELS:
        raise InputError("is unknown", where=f"--level {level}", remedy=f"choose one of {', '.join(LEVELS)}")
    chosen = load_passes(passes)
    if is_text(request.model):
        proof = _verify_text(ui, request, level or "static", chosen)
    else:
        proof = _verify_model(ui, request, level or "values", chosen)
    warn_unsplit(ui, proof.program)
    document, error = proof.to_json() | whole(proof.program), None
    try:
        expect(proof)
    except CheckFailed as failure:
        error = failure
        document["error"] = error_document(failure)
    status = FINE if error is None else FAILED
    return CommandResult(document, lambda stdout: _show_verification(stdout, request.model, proof), status, error)


def _verify_model(ui: Ui, request: Request, level: str, passes: Sequence[Pass]) -> Verification:
    from fxpar.cli.files import need_memory, open_model
    from fxpar.verification import verify

    loaded = open_model(ui, request)
    if level == "values":
        need_memory(loaded)
        _need_local(passes)
    with ui.working(f"verifying {loaded.name} ({level})"):
        return verify(loaded.model, loaded.batch, request.plan, level=level, loss=loaded.loss, passes=passes)


def _need_local(passes: Sequence[Pass]) -> None:
    if not any(Property.LOCAL in item.provides for item in passes):
        names = ", ".join(item.name for item in passes)
        raise InputError(
            "none of these passes makes the program local, so no rank can run it",
            where=f"--passes: {names}",
            remedy="end them with fxpar.passes.localize, or use --level static",
        )


def _verify_text(ui: Ui, request: Request, level: str, passes: Sequence[Pass]) -> Verification:
    """Checks a text; by value after the passes that are left."""
    from fxpar.cli.files import CAPTURE, VALUES, open_start, read_text, run_passes
    from fxpar.cost.flops import split_flops
    from fxpar.ir.stages import is_one_stage
    from fxpar.verification import Verification
    from fxpar.verify.static import verify_static
    from fxpar.verify.values import verify_values

    start = open_start(ui, request)
    program = start.program
    if level == "values" and is_one_stage(program):
        raise InputError(
            "is of one stage of a pipeline, which needs the others' values",
            where=start.name,
            remedy="use --level static, or verify the text behind partition_stages",
        )
    with ui.working(f"verifying {start.name} ({level})"):
        checks = verify_static(program)
        if level == "static":
            return Verification(True, level, program, split_flops(program), checks, None)
        values = start.values()
    assert start.path is not None
    folder = start.path.parent
    captured = read_text(folder / CAPTURE)
    verify_static(captured)
    if captured.loss != program.loss:
        raise CheckFailed(
            f"is '{program.loss or 'none'}' in {start.path.name} and '{captured.loss or 'none'}' in {CAPTURE}",
            where="loss",
        )
    if Property.LOCAL not in program.properties:
        _need_local(passes)
        program, _ = run_passes(ui, start, passes)
    for item, name in ((captured, folder / CAPTURE), (program, start.path)):
        values.check(item, f"{name} and {folder / VALUES}")
    with ui.working(f"verifying {start.name} ({level})"):
        report = verify_values(captured, program, values.state, values.inputs)
    return Verification(report.ok, level, program, split_flops(program), checks, report)


def _show_verification(stdout: Console, name: str, proof: Verification) -> None:
    from fxpar.verify.values import TOLERANCE

    rows = table("check", "result")
    rows.add_row("static", f"{', '.join(proof.checks)}: right")
    if proof.assumed:
        rows.add_row(
            "on the plan's word", f"{', '.join(proof.assumed)}: rows apart (batchwise_ops; tried at capture alone)"
        )
    if proof.values is not None:
        v = proof.values
        rows.add_row("loss", _error(v.loss_error) if proof.program.loss else "none: gradients are those of the outputs")
        rows.add_row("outputs", _error(v.output_error))
        if v.gradients:
            rows.add_row(f"{v.gradients} gradients", _error(v.max_grad_error))
        else:
            rows.add_row("gradients", "none: no parameter is trainable")
        is_rounding = v.ok and v.deviation > TOLERANCE
        more = "; above it only what rounding of its sums explains" if is_rounding else ""
        rows.add_row("largest error", f"{v.worst} (tolerance {TOLERANCE:g} of the largest reference value{more})")
    ranks = proof.program.plan.splitting
    rows.add_row("matrix FLOPs split", f"{proof.split_flops:.1%} over {ranks} ranks" if ranks > 1 else "one rank")
    rows.add_row("verdict", f"{'ok' if proof.ok else 'FAILED'} at level {proof.level}")
    print_table(stdout, name, rows)
    for line in whole_lines(whole(proof.program)):
        stdout.print(line, soft_wrap=True)


def _error(value: float) -> str:
    return "exact" if value == 0 else f"off by {value:.2g}"


# The pass at fault, why, and the first node that deviates where that is known.
_Found = tuple[str | None, str, "DeviatingNode | None"]
# True where values are right, None where they were not compared, else how they deviate, and the first node.
_Verdict = bool | None | tuple[str, "DeviatingNode | None"]


def bisect(ui: Ui, request: Request, passes: Passes = None) -> CommandResult:
    """Finds the first pass after which a program is wrong, and the first node: of a model, or of a dump folder."""
    from fxpar.cli.models import load_passes

    chosen = load_passes(passes)
    folder = Path(request.model)
    if is_folder(folder):
        culprit, reason, first = _bisect_folder(ui, request, folder, chosen)
    else:
        culprit, reason, first = _bisect_model(ui, request, chosen)
    node = None if first is None else dataclasses.asdict(first) | {"layer": first.layer}
    document: dict[str, Any] = {"culprit": culprit, "reason": reason, "first": node}

    def show(stdout: Console) -> None:
        stdout.print(f"{culprit}: {reason}" if culprit else f"no culprit: {reason}", soft_wrap=True)
        if first is not None:
            stdout.print(str(first), soft_wrap=True)

    return CommandResult(document, show, FAILED if culprit else FINE)


def _bisect_model(ui: Ui, request: Request, passes: Sequence[Pass]) -> _Found:
    from fxpar.cli.files import is_text, need_memory, open_model
    from fxpar.verification import bisect_model

    if is_text(request.model):
        raise InputError(
            "one text has no passes to choose from",
            where=request.model,
            remedy="name its folder, or use 'fxpar verify' on it",
        )
    loaded = open_model(ui, request)
    need_memory(loaded)
    _need_local(passes)
    with ui.working(f"bisecting {loaded.name}"):
        bisection = bisect_model(loaded.model, loaded.batch, request.plan, passes, loaded.loss)
    culprit = bisection.culprit
    if culprit is None:
        return None, f"values are right after {_listed(bisection.compared)}{_unjudged(bisection.untested)}", None
    if culprit.error is not None:
        return culprit.name, error_text(culprit.error) + _untested(bisection.untested), None
    assert culprit.report is not None
    return culprit.name, _deviation(culprit.report) + _untested(bisection.untested), culprit.first


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no pass"


def _unjudged(names: Sequence[str]) -> str:
    return f"; {', '.join(names)}: static checks only" if names else ""


def _deviation(report: ValueReport) -> str:
    return f"{report.worst} deviates by {report.deviation:.3g} of the largest reference value"


def _untested(names: Sequence[str]) -> str:
    return f" (what {', '.join(names)} gave could not be run, and may be at fault instead)" if names else ""


def _bisect_folder(ui: Ui, request: Request, folder: Path, passes: Sequence[Pass]) -> _Found:
    """Returns the first text that a static check rejects or that, once completed, computes something else."""
    from fxpar.cli.files import VALUES, dumped, read_text, refuse_flags
    from fxpar.verify.static import verify_static

    refuse_flags(request)
    texts = dumped(folder)
    has_values = (folder / VALUES).is_file()
    judge = _judge(folder, [p.name for p in passes if p.preserves == "nothing"]) if has_values else None
    compared: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    with ui.working(f"bisecting {folder}") as update:
        for _, name, path in texts:
            update(path.name)
            program = read_text(path)
            try:
                verify_static(program)
            except FxparError as error:
                return name, f"{path.name}: {error_text(error)}{_untested(untested)}", None
            verdict = judge(name, path, program) if judge is not None else None
            if verdict is None:
                untested = (*untested, name)
            elif isinstance(verdict, tuple):
                return name, f"{path.name}: {verdict[0]}{_untested(untested)}", verdict[1]
            else:
                compared, untested = (*compared, name), ()
    if not has_values:
        return None, f"static checks hold for all {len(texts)} texts (no {VALUES} there)", None
    return None, f"values are right after {_listed(compared)}{_unjudged(untested)}", None


def _judge(folder: Path, free: Sequence[str]) -> Callable[[str, Path, Program], _Verdict]:
    """Returns a function that says how a text's values deviate, if they do, and at which node first.

    Args:
        free: passes that declare to preserve nothing; texts from them on are compared with nothing.
    """
    from fxpar.cli.files import CAPTURE, load_values, read_text
    from fxpar.ir.stages import is_one_stage
    from fxpar.verification import complete, first_fault
    from fxpar.verify.values import reference_run, verify_values

    values, captured = load_values(folder), read_text(folder / CAPTURE)
    values.check(captured, str(folder))
    reference = reference_run(captured, values.state, values.inputs)
    past_free, right = False, captured

    def verdict(name: str, path: Path, program: Program) -> _Verdict:
        nonlocal past_free, right
        past_free = past_free or name in free
        if past_free or is_one_stage(program):
            return None
        finished = complete(program)
        if finished is None or Property.LOCAL not in finished.properties:
            return None
        values.check(finished, str(path))
        report = verify_values(captured, finished, values.state, values.inputs, reference=reference)
        if not report.ok:
            return _deviation(report), first_fault(right, program, values.state, values.inputs)
        right = program
        return True

    return verdict
