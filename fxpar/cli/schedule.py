"""The command schedule: what each rank of a pipeline runs, when, and how long ranks idle.

Enters: sizes and a schedule's name, or a file with one. Leaves: the proven schedule as a text grid of all ranks over
time, a picture or JSON; or the order of one rank. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fxpar.cli.common_options import command, number_option
from fxpar.cli.output import CommandResult, Ui, print_table, table, write_text
from fxpar.cli.plan_flags import whole_number
from fxpar.cli.timeline import grid, left_out, phases, svg
from fxpar.errors import InputError, ScheduleError, shown
from fxpar.schedule.arrays import order_array
from fxpar.schedule.builtin_schedules import SCHEDULES, build_schedule
from fxpar.schedule.pipeline_schedule import Schedule
from fxpar.schedule.simulate import Costs
from fxpar.schedule.text import read_schedule
from fxpar.schedule.verified import VerifiedSchedule, verified

_ROWS = 64  # ranks that the table lists


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""
    command(app, "schedule")(schedule)


def schedule(
    ui: Ui,
    pp: Annotated[int | None, number_option("ranks of the pipeline (default: those of the file)")] = None,
    microbatches: Annotated[int | None, number_option("microbatches of a step (default: those of the file)")] = None,
    virtual_stages: Annotated[int | None, number_option("stages a rank (default: those of the file, or 1)")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="NAME",
            help=f"{', '.join(SCHEDULES)} (default: 1f1b, with several stages a rank interleaved_1f1b)",
        ),
    ] = None,
    group_size: Annotated[
        int | None, number_option("microbatches that run on a stage before the rank's next stage (default: pp)")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="a schedule of your own: a line for each rank, as in 0F0,0F1,0B0,0B1"),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(metavar="F,I,W", help="time of forward, input and weight part of a backward (default: 1,1,1)"),
    ] = None,
    rank: Annotated[int | None, number_option("only this rank: its order, warmup and activations in flight")] = None,
    picture: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="draw all ranks into this file")] = None,
) -> CommandResult:
    """Prints what each rank of a pipeline runs, and proves that all ranks together finish."""
    if file is None:
        schedule = _named(name, pp, microbatches, virtual_stages, group_size)
    else:
        refused = {"--schedule": name, "--group-size": group_size}
        options = [option for option, value in refused.items() if value is not None]
        if options:
            raise InputError(f"says nothing of {file}, which has its order", where=options[0], remedy="leave it out")
        schedule = read_schedule(Path(file), pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    if rank is not None and rank not in range(schedule.pp):
        raise InputError(f"there is no rank {rank}", where="--rank", remedy=f"choose from 0–{schedule.pp - 1}")
    proof = verified(schedule, costs=_costs(costs))
    if picture is not None:
        write_text(Path(picture), svg(proof, _title(schedule)))
    return _report_all(proof, picture) if rank is None else _report_one(proof, rank, picture, ui)


def _named(
    name: str | None, pp: int | None, microbatches: int | None, virtual_stages: int | None, group_size: int | None
) -> Schedule:
    if pp is None or microbatches is None:
        missing = "--pp" if pp is None else "--microbatches"
        raise InputError("is not given", where=missing, remedy="give it, or a --file that says it")
    stages = 1 if virtual_stages is None else virtual_stages
    name = name or ("1f1b" if stages == 1 else "interleaved_1f1b")
    return build_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=stages, group_size=group_size)


def _costs(text: str | None) -> Costs:
    if text is None:
        return Costs()
    try:
        forward, backward_input, backward_weight = (whole_number(word) for word in text.split(","))
    except (ValueError, typer.BadParameter):
        raise InputError(
            f"{shown(text)} are no three costs", where="--costs", remedy="write whole numbers as in 10,11,9"
        ) from None
    return Costs(forward, backward_input, backward_weight)


def _title(schedule: Schedule) -> str:
    stages = f" of {schedule.virtual_stages} stages" if schedule.virtual_stages > 1 else ""
    groups = f" in groups of {schedule.group_size}" if schedule.group_size else ""
    return f"{schedule.name}: {schedule.pp} ranks{stages}, {schedule.microbatches} microbatches{groups}"


def _report_one(proof: VerifiedSchedule, rank: int, picture: str | None, ui: Ui) -> CommandResult:
    """The order of one rank; people read it as words, which can say every order."""
    schedule = proof.schedule
    document = {
        "order": order_array(schedule, rank) if ui.json else None,
        "warmup": schedule.warmup[rank],
        "peak_in_flight": proof.peaks[rank],
        "split_backward": schedule.split_backward,
    }

    def show(stdout: Console) -> None:
        stdout.print(Text(_title(schedule), style="bold"), soft_wrap=True)
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        stdout.print(
            Text(f"rank {rank}: stages {stages}; warmup {schedule.warmup[rank]}; {proof.peaks[rank]} in flight")
        )
        stdout.print(Text(" ".join(map(str, schedule.ranks[rank]))))
        _show_picture(stdout, picture)

    return CommandResult(document, show)


def _report_all(proof: VerifiedSchedule, picture: str | None) -> CommandResult:
    schedule, timeline, costs = proof.schedule, proof.timeline, proof.costs
    document: dict[str, Any] = {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "virtual_stages": schedule.virtual_stages,
        "microbatches": schedule.microbatches,
        "group_size": schedule.group_size,
        "style": str(schedule.style),
        "split_backward": schedule.split_backward,
        "costs": vars(costs),
        "time": timeline.end,
        "bubble": timeline.bubble,
        "ranks": [_rank(proof, rank) for rank in range(schedule.pp)],
    }

    def show(stdout: Console) -> None:
        lines = table("rank", "stages", "warmup", "in flight", right=("rank", "warmup", "in flight"))
        for rank in range(min(schedule.pp, _ROWS)):
            stages = " ".join(map(str, schedule.stages_of(rank)))
            lines.add_row(str(rank), stages, str(schedule.warmup[rank]), str(proof.peaks[rank]))
        print_table(stdout, _title(schedule), lines)
        stdout.print()
        for line in grid(proof, stdout.width):
            stdout.print(line, soft_wrap=True)
        for note in left_out(proof, stdout.width):
            stdout.print(Text(f"left out: {note} (--json has all)"))
        taken = ", ".join(f"{phase} {costs.of(phase)}" for phase in phases(schedule))
        stdout.print(
            Text(f"bubble {100 * timeline.bubble:.1f} % of {schedule.pp} ranks x time {timeline.end} ({taken})")
        )
        _show_picture(stdout, picture)

    return CommandResult(document, show)


def _rank(proof: VerifiedSchedule, rank: int) -> dict[str, Any]:
    """All that is known of a rank; its order as an array only where an array can say it."""
    schedule = proof.schedule
    try:
        order = order_array(schedule, rank)
    except ScheduleError:
        order = None
    return {
        "rank": rank,
        "stages": schedule.stages_of(rank),
        "order": order,
        "warmup": schedule.warmup[rank],
        "peak_in_flight": proof.peaks[rank],
        "slots": proof.slots[rank],
        "actions": [str(action) for action in schedule.ranks[rank]],
        "starts": proof.timeline.starts[rank],
    }


def _show_picture(stdout: Console, picture: str | None) -> None:
    if picture is not None:
        stdout.print(Text(f"wrote {picture}"), soft_wrap=True)
