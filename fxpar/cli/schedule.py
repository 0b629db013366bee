"""The command schedule: what each rank of a pipeline runs, when, and how long ranks idle.

Enters: sizes and a schedule's name, or a file with one. Leaves: the proven schedule as a text grid of all ranks over
time, a picture or JSON; or the order of one rank. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fxpar.cli.output import MARGIN, CommandResult, Ui, print_table, svg_page, table, write_text
from fxpar.cli.plan_flags import number_option, whole_numbers
from fxpar.errors import InputError, ScheduleError, shown
from fxpar.pipeline.compiler.builtin_schedules import SCHEDULES, build_schedule
from fxpar.pipeline.compiler.schedules import MEANING, Action, Phase, Schedule, order_array, read_schedule
from fxpar.pipeline.compiler.simulation import Costs, VerifiedSchedule, verified

# All ranks of a schedule over time: as lines for a terminal, and as a picture.

# Of the first and the last chunk of a rank; all light enough for black text.
_COLOURS = {
    Phase.FORWARD: ("#cfe3f5", "#74aedb"),
    Phase.BACKWARD: ("#d3ecc8", "#86c279"),
    Phase.BACKWARD_INPUT: ("#d3ecc8", "#86c279"),
    Phase.BACKWARD_WEIGHT: ("#fde2c0", "#f3b266"),
}
# What a terminal shows of a large schedule: ranks, and runs of time below each other.
_LANES, _BLOCKS = 16, 6


def colour(proof: VerifiedSchedule, action: Action) -> str:
    """Returns an action's colour: its phase, darker for later chunks."""
    first, last = _COLOURS[action.phase]
    chunk, most = action.stage // proof.schedule.pp, max(proof.schedule.virtual_stages - 1, 1)
    parts = [(int(c[i : i + 2], 16)) for i in (1, 3, 5) for c in (first, last)]
    mixed = (round(low + (high - low) * chunk / most) for low, high in zip(parts[::2], parts[1::2], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def phases(schedule: Schedule) -> list[Phase]:
    """Returns the phases that it has."""
    return [phase for phase in Phase if any(a.phase is phase for actions in schedule.ranks for a in actions)]


def _unit(proof: VerifiedSchedule) -> int:
    costs = [proof.costs.of(phase) for phase in phases(proof.schedule)]
    return max(math.gcd(*costs), min(costs) // 2)


def _units(time: int, unit: int) -> int:
    """Returns a time in units, rounded."""
    return (2 * time + unit) // (2 * unit)


# ---------------------------------------------------------------------- terminal


def grid(proof: VerifiedSchedule, width: int) -> list[Text]:
    """Returns runs of time, in each a line for every rank, of at most `width` characters or of one cell."""
    unit, label, cell, columns = _layout(proof, width)
    length = min(_units(proof.timeline.end, unit), _BLOCKS * columns)
    rows = [_row(proof, rank, unit, cell, length) for rank in range(min(proof.schedule.pp, _LANES))]
    lines = []
    for start in range(0, length, columns):
        stop = min(start + columns, length)
        lines.append(Text(f"time {start * unit}-{stop * unit}", style="bold"))
        for rank, row in enumerate(rows):
            line = Text(f"rank {rank}".ljust(label))
            for text, style, more in row[start:stop]:
                line.append(text[:-1], style)
                line.append(text[-1], style if more else "")
            line.rstrip()
            lines.append(line)
    return lines


def left_out(proof: VerifiedSchedule, width: int) -> list[str]:
    """Returns what `grid` does not show of a large schedule."""
    unit, _, _, columns = _layout(proof, width)
    shown, ranks = _BLOCKS * columns * unit, proof.schedule.pp
    notes = [f"ranks {_LANES}-{ranks - 1}"] if ranks > _LANES else []
    return [*notes, f"time {shown}-{proof.timeline.end}"] if shown < proof.timeline.end else notes


def _layout(proof: VerifiedSchedule, width: int) -> tuple[int, int, int, int]:
    """Returns the unit of time, the width of labels and of cells, and how many of these stand on a line."""
    label = len(f"rank {min(proof.schedule.pp, _LANES) - 1}") + 1
    cell = max(len(str(actions[-1])) for actions in proof.schedule.ranks) + 1
    cell = max(cell, len(f"{proof.schedule.stages - 1}F{proof.schedule.microbatches - 1}") + 1)
    return _unit(proof), label, cell, max((width - label) // cell, 1)


def _row(proof: VerifiedSchedule, rank: int, unit: int, cell: int, length: int) -> list[tuple[str, str, bool]]:
    """Returns of each unit of time its text, its style, and whether the next one is of the same action."""
    cells: list[tuple[str, str, bool]] = []
    idle, timeline = (".".ljust(cell), "dim", False), proof.timeline
    times = zip(timeline.starts[rank], timeline.ends[rank], strict=True)
    for action, (start, end) in zip(proof.schedule.ranks[rank], times, strict=True):
        cells += [idle] * (min(_units(start, unit), length) - len(cells))
        if len(cells) == length:
            break
        units = min(_units(end, unit), length) - len(cells)
        text = str(action).ljust(cell - 1, " " if units == 1 else "-").ljust(cell * units - 1, "-") + " "
        style = f"black on {colour(proof, action)}"
        cells += [(text[cell * at : cell * (at + 1)], style, at < units - 1) for at in range(units)]
    return cells + [idle] * (length - len(cells))


# ---------------------------------------------------------------------- SVG

_HEIGHT, _LABEL = 30, 64
_RANKS, _WIDE = 64, 12_000  # rows and points of time's axis at most


def svg(proof: VerifiedSchedule, title: str) -> str:
    """Returns a picture: for each rank a row of actions with their microbatches, coloured by phase and chunk.

    Large schedules are cut, and the picture says so.
    """
    schedule, timeline, costs = proof.schedule, proof.timeline, proof.costs
    all_phases = phases(schedule)
    least = min(map(costs.of, all_phases))
    scale = (8 * len(str(schedule.microbatches - 1)) + 10) / least  # points of a unit of cost
    end = min(timeline.end, int(_WIDE / scale))
    ranks = min(schedule.pp, _RANKS)
    notes = ["numbers are microbatches", f"bubble {100 * timeline.bubble:.1f} %"]
    notes += [f"time 0–{end} of {timeline.end}"] if end < timeline.end else [f"time 0–{end}"]
    notes += [f"the first {ranks} of {schedule.pp} ranks"] if ranks < schedule.pp else []
    top = 3 * MARGIN
    bottom = top + ranks * _HEIGHT
    width = round(max(_LABEL + end * scale + 2 * MARGIN, 9 * len(title) + 2 * MARGIN, 420))
    height = bottom + 2 * MARGIN + 20 * len(all_phases)
    body = [
        f"<g transform='translate({MARGIN + _LABEL} {top})'>",
        *_boxes(proof, ranks, end, scale),
        *_axis(end, scale, ranks * _HEIGHT),
        "</g>",
        f"<g transform='translate({MARGIN} {bottom + MARGIN + 12})'>",
        *_legend(proof, all_phases),
        "</g>",
    ]
    return svg_page(width, height, title, notes, body)


def _boxes(proof: VerifiedSchedule, ranks: int, end: int, scale: float) -> Iterator[str]:
    timeline = proof.timeline
    for rank in range(ranks):
        y = rank * _HEIGHT
        yield f"<text x='-10' y='{y + 19}' text-anchor='end' fill='#666'>rank {rank}</text>"
        yield f"<rect x='0' y='{y + 2}' width='{end * scale:.1f}' height='{_HEIGHT - 4}' fill='#f4f4f4'/>"
        for action, start, stop in zip(
            proof.schedule.ranks[rank], timeline.starts[rank], timeline.ends[rank], strict=True
        ):
            if stop > end:
                break
            x, width = start * scale, (stop - start) * scale
            said = f"{action}: {MEANING[action.phase]} of microbatch {action.microbatch}, stage {action.stage}"
            yield (
                f"<g class='action'><title>{said}, {start}–{stop}</title><rect x='{x:.1f}' y='{y + 2}' "
                f"width='{max(width - 1, 1):.1f}' height='{_HEIGHT - 4}' rx='2' fill='{colour(proof, action)}'/>"
                f"<text x='{x + width / 2:.1f}' y='{y + 19}' text-anchor='middle'>{action.microbatch}</text></g>"
            )


def _axis(end: int, scale: float, y: int) -> Iterator[str]:
    """Yields marks at round times, at least 60 points apart."""
    rough = max(60 / scale, 1)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    for time in range(0, end + 1, step):
        x = time * scale
        yield f"<path d='M{x:.1f} {y + 2}v5' stroke='#999'/>"
        yield f"<text x='{x:.1f}' y='{y + 19}' text-anchor='middle' fill='#666'>{time}</text>"


def _legend(proof: VerifiedSchedule, all_phases: list[Phase]) -> Iterator[str]:
    """Yields a line for each phase, with a box for each of the first chunks."""
    schedule = proof.schedule
    chunks = range(min(schedule.virtual_stages, 16))
    for line, phase in enumerate(all_phases):
        y = 20 * line
        for chunk in chunks:
            fill = colour(proof, Action(chunk * schedule.pp, phase, 0))
            yield f"<rect x='{18 * chunk}' y='{y}' width='16' height='14' rx='2' fill='{fill}'/>"
        of = f", chunks 0–{chunks[-1]}" if len(chunks) > 1 else ""
        text = f"{MEANING[phase]} ({proof.costs.of(phase)}){of}"
        yield f"<text x='{18 * len(chunks) + 8}' y='{y + 11}'>{escape(text)}</text>"


_ROWS = 64  # ranks that the table lists


@dataclass(frozen=True)
class ScheduleRequest:
    """Which schedule is shown: by a name with its sizes, or from a file."""

    pp: Annotated[int | None, number_option("ranks of the pipeline (default: those of the file)")] = None
    microbatches: Annotated[int | None, number_option("microbatches of a step (default: those of the file)")] = None
    virtual_stages: Annotated[int | None, number_option("stages a rank (default: those of the file, or 1)")] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="NAME",
            help=f"{', '.join(SCHEDULES)} (default: 1f1b, with several stages a rank interleaved_1f1b)",
        ),
    ] = None
    group_size: Annotated[
        int | None, number_option("microbatches that run on a stage before the rank's next stage (default: pp)")
    ] = None
    file: Annotated[
        str | None,
        typer.Option(
            "--file", metavar="FILE", help="a schedule of your own: a line for each rank, as in 0F0,0F1,0B0,0B1"
        ),
    ] = None


def schedule(
    ui: Ui,
    request: ScheduleRequest,
    costs: Annotated[
        str | None,
        typer.Option(metavar="F,I,W", help="time of forward, input and weight part of a backward (default: 1,1,1)"),
    ] = None,
    rank: Annotated[int | None, number_option("only this rank: its order, warmup and activations in flight")] = None,
    picture: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="draw all ranks into this file")] = None,
) -> CommandResult:
    """Prints what each rank of a pipeline runs, and proves that all ranks together finish."""
    schedule = _named(request) if request.file is None else _read(request, request.file)
    if rank is not None and rank not in range(schedule.pp):
        raise InputError(f"there is no rank {rank}", where="--rank", remedy=f"choose from 0–{schedule.pp - 1}")
    proof = verified(schedule, costs=_costs(costs))
    if picture is not None:
        write_text(Path(picture), svg(proof, _title(schedule)))
    return _report_all(proof, picture) if rank is None else _report_one(proof, rank, picture, ui)


def _named(request: ScheduleRequest) -> Schedule:
    pp, microbatches = request.pp, request.microbatches
    if pp is None or microbatches is None:
        missing = "--pp" if pp is None else "--microbatches"
        raise InputError("is not given", where=missing, remedy="give it, or a --file that says it")
    stages = 1 if request.virtual_stages is None else request.virtual_stages
    name = request.name or ("1f1b" if stages == 1 else "interleaved_1f1b")
    groups = request.group_size
    return build_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=stages, group_size=groups)


def _read(request: ScheduleRequest, file: str) -> Schedule:
    refused = {"--schedule": request.name, "--group-size": request.group_size}
    options = [option for option, value in refused.items() if value is not None]
    if options:
        raise InputError(f"says nothing of {file}, which has its order", where=options[0], remedy="leave it out")
    pp, stages = request.pp, request.virtual_stages
    return read_schedule(Path(file), pp=pp, virtual_stages=stages, microbatches=request.microbatches)


def _costs(text: str | None) -> Costs:
    if text is None:
        return Costs()
    numbers = whole_numbers(text, "--costs", "10,11,9")
    if len(numbers) != 3:
        reason = f"must be three numbers, got {shown(text)}"
        raise InputError(reason, where="--costs", remedy="write whole numbers as in 10,11,9")
    return Costs(*numbers)


def _title(schedule: Schedule) -> str:
    stages = f" of {schedule.virtual_stages} stages" if schedule.virtual_stages > 1 else ""
    groups = f" in groups of {schedule.group_size}" if schedule.group_size else ""
    return f"{schedule.name}: {schedule.pp} ranks{stages}, {schedule.microbatches} microbatches{groups}"


def _report_one(proof: VerifiedSchedule, rank: int, picture: str | None, ui: Ui) -> CommandResult:
    """Reports the order of one rank; people read it as words, which can say every order."""
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
    """Returns all that is known of a rank; its order as an array only where an array can say it."""
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
