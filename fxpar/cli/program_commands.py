"""Commands that make programs: trace, passes, run.

Enters: a model or a program's text. Leaves: texts, and what the passes did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fxpar.cli.output import CommandResult, Ui, print_table, print_text, table, write_text
from fxpar.cli.plan_flags import Passes, Request, number_option
from fxpar.errors import InputError
from fxpar.ir.properties import Property
from fxpar.mesh.axes import Cuts
from fxpar.text.tables import few

if TYPE_CHECKING:
    from fxpar.cli.files import Start
    from fxpar.ir.program import Program
    from fxpar.ir.stages import Stage
    from fxpar.manager import Pass

# Stages of a pipeline on the command line: which one is asked for, and the programs of one or all.

OfStage = Annotated[int | None, number_option("look at this stage of a pipeline alone, counted from 0")]


def example_sizes(program: Program) -> dict[str, int]:
    """Returns the sizes of the example by symbol, of all ranks together."""
    return {symbol.name: symbol.example * symbol.multiple for symbol in program.symbols}


def is_pipeline(program: Program) -> bool:
    """Returns whether the program is, or will be, cut into stages: it is neither a step nor one of them."""
    from fxpar.ir.stages import is_one_stage

    return program.plan.pipeline_stages > 1 and Property.STEP not in program.properties and not is_one_stage(program)


def check_stage(start: Start, of_stage: int | None, *, needed: bool = False) -> None:
    """Refuses a stage that is not there.

    Args:
        needed: whether the command looks at one stage at a time.

    Raises:
        InputError: there is no such stage, or one is needed and none was given.
    """
    count = start.program.plan.pipeline_stages
    if of_stage is None:
        if needed and is_pipeline(start.program):
            raise InputError(
                "a pipeline has a step for each of its stages",
                where=start.name,
                remedy=f"name one: --of-stage 0 to {count - 1}",
            )
        return
    where = f"--of-stage {of_stage}"
    if not is_pipeline(start.program):
        one = count > 1
        reason = "the text is of one stage already" if one else "the plan has no pipeline"
        raise InputError(reason, where=where, remedy="leave it out" if one else "leave it out, or give --pp N")
    if not 0 <= of_stage < count:
        raise InputError(f"the pipeline has {count} stages", where=where, remedy=f"give one from 0 to {count - 1}")


def step_passes_of(stage: Stage) -> list[Pass]:
    """Returns the passes that make the step of a stage."""
    from fxpar.passes import step_passes

    program = stage.program
    return step_passes(program.outputs, stage.tangents, [p.fqn for p in program.parameters if p.trainable])


def steps(ui: Ui, start: Start, of_stage: int | None) -> tuple[Program, list[tuple[int | None, Program]]]:
    """Returns the training step, or each stage's of a pipeline after its number; without calls of regions.

    Args:
        of_stage: the only one that is wanted.

    Returns:
        The program after all passes, which of a pipeline is the whole, and the steps.
    """
    from fxpar.cli.files import run_passes
    from fxpar.ir.regions import inlined
    from fxpar.ir.stages import stages_of
    from fxpar.manager import PassManager, without_collections
    from fxpar.passes import DEFAULT_PASSES, STEP_PASSES

    if not is_pipeline(start.program):
        program, _ = run_passes(ui, start, (*DEFAULT_PASSES, *STEP_PASSES))
        return program, [(None, inlined(program))]
    program, _ = run_passes(ui, start, DEFAULT_PASSES)
    stage_steps: list[tuple[int | None, Program]] = []
    with without_collections():
        for stage in stages_of(program):
            if of_stage in (None, stage.number):
                # As in reports: `fxpar run --step` and `fxpar verify` check steps statically.
                with ui.working(f"{start.name}: the step of stage {stage.number}"):
                    step = PassManager(step_passes_of(stage)).run(stage.program)
                stage_steps.append((stage.number, inlined(step)))
    return program, stage_steps


def warn_empty(ui: Ui, program: Program) -> None:
    """Warns of stages that multiply no matrices, whose ranks wait for the others."""
    from fxpar.cost.stage_cut_points import stage_shares

    if Property.STAGES not in program.properties or not is_pipeline(program):
        return
    shares = stage_shares(program)
    empty = [share.stage for share in shares if not share.flops]
    if empty and len(empty) < len(shares):
        names = ", ".join(map(str, empty))
        ui.warn(f"no matrix product in stage {names} of {len(shares)}; give a smaller --pp, or other --stages")


def run_stage(
    ui: Ui,
    start: Start,
    passes: Sequence[Pass],
    of_stage: int,
    *,
    step: bool,
    until: str | None,
    folder: Path | None,
    wanted: Sequence[str],
) -> tuple[Program, dict[str, str]]:
    """Returns the program of a stage, or its step, and the texts after the passes in `wanted`.

    Args:
        passes: of the whole.
        step: whether the passes of the step run too, which the stage has of its own.
    """
    from fxpar.cli.files import run_passes
    from fxpar.ir.stages import stages_of
    from fxpar.passes import STEP_PASSES

    later = [item.name for item in STEP_PASSES]
    whole = [item for item in passes if item.name not in later]
    first = [name for name in wanted if name not in later]
    program, texts = run_passes(ui, start, whole, None if until in later else until, folder, first)
    if Property.STAGES not in program.properties:
        reason = "the program is not yet cut into stages"
        raise InputError(reason, where=f"--until {until}", remedy="leave out --of-stage")
    stage = stages_of(program)[of_stage]
    if not step:
        return stage.program, texts
    stage_start = dataclasses.replace(start, program=stage.program)
    last = len([item for item in whole if item.when(start.program)])
    step_only = [name for name in wanted if name in later]
    end = until if until in later else None
    program, more = run_passes(ui, stage_start, step_passes_of(stage), end, folder, step_only, last)
    return program, texts | more


def trace(
    ui: Ui,
    request: Request,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="write the text here and print a summary")] = None,
) -> CommandResult:
    """Captures a model and prints the program's text, one line a node."""
    from fxpar.cli.files import open_start
    from fxpar.text.printing import print_program

    start = open_start(ui, request)
    text = print_program(start.program)
    if out is not None:
        write_text(Path(out), text)
    document = _summary(start.program, start.how)

    def show(stdout: Console) -> None:
        if out is None:
            print_text(stdout, text)
        else:
            _show_summary(stdout, start.name, document)

    return CommandResult(document, show)


def _summary(program: Program, how: str) -> dict[str, Any]:
    """Returns what was captured: counts, names, and operators that no rule can split."""
    from collections import Counter

    from fxpar.cost.reasons import without_rule
    from fxpar.ir.program import note
    from fxpar.passes import CANONICAL_PASSES
    from fxpar.text.printing import target_name

    canonical = program.copy()
    for item in CANONICAL_PASSES if Property.CANONICAL not in program.properties else ():
        canonical = item(canonical)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return {
        "how": how,
        "nodes": len(program.graph.nodes),
        "parameters": sum(p.kind == "parameter" for p in program.parameters),
        "inputs": [i.path for i in program.inputs],
        "outputs": list(program.outputs),
        "symbols": {s.name: {"input": s.path, "dim": s.dim, "example": s.example} for s in program.symbols},
        "loss": program.loss,
        "operators": dict(sorted(Counter(target_name(node).partition("[")[0] for node in calls).items())),
        "without_rule": without_rule(canonical),
        "recompute_regions": len({note(node).recompute for node in calls} - {0}),
    }


def _show_summary(stdout: Console, name: str, document: dict[str, Any]) -> None:
    facts = table("fact", "value")
    for key in ("how", "nodes", "parameters", "recompute_regions"):
        facts.add_row(key.replace("_", " "), str(document[key]))
    for key in ("inputs", "outputs", "without_rule"):
        facts.add_row(key.replace("_", " "), ", ".join(document[key]) or "none")
    sizes = [f"{s} = {v['input']}.{v['dim']} (here {v['example']})" for s, v in document["symbols"].items()]
    facts.add_row("symbols", ", ".join(sizes) or "none")
    facts.add_row("loss", document["loss"] or "none")
    print_table(stdout, name, facts)
    counts = table("operator", "count", right=("count",))
    for operator, count in sorted(document["operators"].items(), key=lambda item: (-item[1], item[0])):
        counts.add_row(operator, str(count))
    print_table(stdout, "\noperators", counts)


def passes(ui: Ui, passes: Passes = None) -> CommandResult:
    """Lists the passes in the order in which they run, with their contracts; then those of the training step."""
    from fxpar.cli.models import load_passes
    from fxpar.passes import STEP_PASSES

    document = [_contract(item) for item in (*load_passes(passes), *STEP_PASSES)]

    def show(stdout: Console) -> None:
        listing = table("name", "contract", "summary", whole=("name", "contract"))
        for entry in document:
            lines = [f"{key} {', '.join(entry[key])}" for key in ("requires", "provides", "invalidates") if entry[key]]
            lines.append(f"preserves {entry['preserves']}")
            lines += [f"where {entry['when']}"] if entry["when"] else []
            listing.add_row(entry["name"], "\n".join(lines), entry["summary"])
            listing.add_section()
        print_table(stdout, "passes", listing)

    return CommandResult(document, show)


def _contract(item: Pass) -> dict[str, Any]:
    return {
        "name": item.name,
        "requires": sorted(item.requires),
        "provides": sorted(item.provides),
        "invalidates": sorted(item.invalidates),
        "preserves": item.preserves,
        "when": item.condition,
        "summary": item.summary,
    }


@dataclass(frozen=True)
class PassOptions:
    """How far the passes run, and which texts they leave."""

    until: Annotated[str | None, typer.Option(metavar="PASS", help="stop after this pass")] = None
    dump: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="write NN-pass.txt after each pass, and what checks by value need"),
    ] = None
    print_after: Annotated[
        list[str] | None, typer.Option(metavar="PASS", help="print the text after this pass; repeatable")
    ] = None
    print_final: Annotated[bool, typer.Option("--print", help="print the text after the last pass")] = False


def run(
    ui: Ui,
    request: Request,
    options: PassOptions,
    step: Annotated[bool, typer.Option("--step", help="make the training step too, forward and backward")] = False,
    passes: Passes = None,
    of_stage: OfStage = None,
) -> CommandResult:
    """Runs the passes on a model, or the ones that are left on a text, with a static check after each.

    Those of the training step run with --step, or where one of them is named; of a pipeline with --of-stage, on the
    program of that stage.
    """
    from fxpar.cli.files import compared, open_start, run_passes
    from fxpar.cli.models import load_passes
    from fxpar.passes import STEP_PASSES
    from fxpar.text.printing import print_program

    chosen, until, dump, printed = load_passes(passes), options.until, options.dump, options.print_after or ()
    named = {name for name in (until, *printed) if name is not None}
    step = step or not named <= {item.name for item in chosen}
    if step:
        chosen = (*chosen, *(item for item in STEP_PASSES if item not in chosen))
    start = open_start(ui, request, needs_values=True)
    is_step = step and (until or "") not in {item.name for item in chosen if item not in STEP_PASSES}
    check_stage(start, of_stage, needed=is_step)
    findings = compared(ui, start)
    folder = Path(dump) if dump is not None else None
    if of_stage is None:
        program, texts = run_passes(ui, start, chosen, until, folder, printed)
    else:
        program, texts = run_stage(ui, start, chosen, of_stage, step=step, until=until, folder=folder, wanted=printed)
    share = warn_unsplit(ui, program)
    warn_empty(ui, program)
    document: dict[str, Any] = {
        "passes": [vars(record) for record in program.history],
        "nodes": len(program.graph.nodes),
        "properties": sorted(program.properties),
        "split_flops": share,
        **whole(program),
        "findings": list(findings),
        "dump": dump,
        "texts": texts,
    }
    final = print_program(program) if options.print_final else ""
    if options.print_final:
        document["text"] = final

    def show(stdout: Console) -> None:
        for name, text in texts.items():
            stdout.print(f"# after {name}")
            print_text(stdout, text)
        _show_passes(stdout, start.name, program, share, dump, findings)
        print_text(stdout, final)

    return CommandResult(document, show)


def _show_passes(
    stdout: Console, name: str, program: Program, share: float | None, dump: str | None, findings: tuple[str, ...]
) -> None:
    columns = ("time", "added", "erased", "changed")
    listing = table("pass", *columns, right=columns)
    for record in program.history:
        counts = [str(len(names)) for names in (record.added, record.erased, record.changed)]
        listing.add_row(record.name, f"{1000 * record.seconds:.0f} ms", *counts)
    print_table(stdout, name, listing)
    split = "" if share is None else f"; {share:.1%} of the matrix FLOPs are split over {program.plan.splitting} ranks"
    stdout.print(f"{len(program.graph.nodes)} nodes; {', '.join(sorted(program.properties)) or 'no properties'}{split}")
    for line in (*findings, *whole_lines(whole(program))):
        stdout.print(line, soft_wrap=True)
    if dump is not None:
        stdout.print(f"texts in {dump}")


def whole(program: Program) -> dict[str, Any]:
    """Returns what is left whole: matrices with the reason, operators without a rule; nothing before layouts.

    `uncounted` are operators that may multiply matrices and are no part of the share of FLOPs that is split.
    """
    from fxpar.cost.flops import uncounted
    from fxpar.cost.reasons import unsplit, without_rule
    from fxpar.ir.regions import inlined

    if Property.LAYOUTS not in program.properties or not program.plan.axes_for(Cuts.FEATURES):
        return {"unsplit": {}, "without_rule": [], "uncounted": {}}
    program = inlined(program)
    return {
        "unsplit": dict(unsplit(program)),
        "without_rule": without_rule(program),
        "uncounted": uncounted(program),
    }


def whole_lines(document: dict[str, Any]) -> list[str]:
    """Returns the same in words: parameters by reason, the first few of each."""
    reasons: dict[str, list[str]] = {}
    for name, reason in document["unsplit"].items():
        reasons.setdefault(reason, []).append(name)
    lines = [f"whole on every rank: {few(names)} ({reason})" for reason, names in reasons.items()]
    if document["without_rule"]:
        lines.append(f"operators without a rule, whole on every rank: {few(document['without_rule'])}")
    if document["uncounted"]:
        calls = [f"{name} ({count})" for name, count in document["uncounted"].items()]
        lines.append(f"not counted as matrix FLOPs, for what they multiply is not known: {few(calls)}")
    return lines


def warn_unsplit(ui: Ui, program: Program) -> float | None:
    """Returns the share of matrix FLOPs that is split, None before layouts or without axes; warns of zero."""
    from fxpar.cost.flops import split_flops
    from fxpar.ir.regions import inlined

    if Property.LAYOUTS not in program.properties or not program.plan.axes_for(Cuts.FEATURES):
        return None
    share = split_flops(inlined(program))
    if share == 0:
        ui.warn(f"no matrix product is split: each of the {program.plan.splitting} ranks computes everything")
    return share
