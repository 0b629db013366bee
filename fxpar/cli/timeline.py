"""All ranks of a schedule over time: as lines for a terminal, and as a picture.

Enters: a proven schedule. Leaves: lines of cells, or an SVG. Needs no torch.

A cell of the lines is a unit of time: the largest one that divides all costs, or, where that is much smaller than they
are, about half of the least cost, to which times are then rounded. Where there are no colours a word stands at the
start of its time and dashes fill the rest; a dot is an idle unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from rich.text import Text

from fxpar.schedule.actions import MEANING, Action, Phase
from fxpar.schedule.pipeline_schedule import Schedule
from fxpar.schedule.verified import VerifiedSchedule

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
    """An action's colour: its phase, darker for later chunks."""
    first, last = _COLOURS[action.phase]
    chunk, most = action.stage // proof.schedule.pp, max(proof.schedule.virtual_stages - 1, 1)
    parts = [(int(c[i : i + 2], 16)) for i in (1, 3, 5) for c in (first, last)]
    mixed = (round(low + (high - low) * chunk / most) for low, high in zip(parts[::2], parts[1::2], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def phases(schedule: Schedule) -> list[Phase]:
    """Those that it has."""
    return [phase for phase in Phase if any(a.phase is phase for actions in schedule.ranks for a in actions)]


def _unit(proof: VerifiedSchedule) -> int:
    costs = [proof.costs.of(phase) for phase in phases(proof.schedule)]
    return max(math.gcd(*costs), min(costs) // 2)


def _units(time: int, unit: int) -> int:
    """A time in units, rounded."""
    return (2 * time + unit) // (2 * unit)


# ---------------------------------------------------------------------- terminal


def grid(proof: VerifiedSchedule, width: int) -> list[Text]:
    """Runs of time, in each a line for every rank, of at most `width` characters if that is room for one cell."""
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
    """What `grid` does not show of a large schedule."""
    unit, _, _, columns = _layout(proof, width)
    shown, ranks = _BLOCKS * columns * unit, proof.schedule.pp
    notes = [f"ranks {_LANES}-{ranks - 1}"] if ranks > _LANES else []
    return [*notes, f"time {shown}-{proof.timeline.end}"] if shown < proof.timeline.end else notes


def _layout(proof: VerifiedSchedule, width: int) -> tuple[int, int, int, int]:
    """The unit of time, the width of labels and of cells, and how many of these stand on a line."""
    label = len(f"rank {min(proof.schedule.pp, _LANES) - 1}") + 1
    cell = max(len(str(actions[-1])) for actions in proof.schedule.ranks) + 1
    cell = max(cell, len(f"{proof.schedule.stages - 1}F{proof.schedule.microbatches - 1}") + 1)
    return _unit(proof), label, cell, max((width - label) // cell, 1)


def _row(proof: VerifiedSchedule, rank: int, unit: int, cell: int, length: int) -> list[tuple[str, str, bool]]:
    """For each unit of time its text, its style, and whether the next one belongs to the same action."""
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

_MARGIN, _HEIGHT, _LABEL = 28, 30, 64
_RANKS, _WIDE = 64, 12_000  # rows and points of time's axis at most
_FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"


def svg(proof: VerifiedSchedule, title: str) -> str:
    """A picture: a row for each rank, in it a box for each action with its microbatch, coloured by phase and chunk.

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
    legend = list(_legend(proof, all_phases))
    top = 3 * _MARGIN
    bottom = top + ranks * _HEIGHT
    width = round(max(_LABEL + end * scale + 2 * _MARGIN, 9 * len(title) + 2 * _MARGIN, 420))
    height = bottom + 2 * _MARGIN + 20 * len(all_phases)
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
            f"height='{height}' {_FONT} font-size='12' fill='#222'>",
            f"<title>{escape(title)}</title>",
            "<rect width='100%' height='100%' fill='white'/>",
            f"<text x='{_MARGIN}' y='{_MARGIN + 6}' font-size='16' font-weight='600'>{escape(title)}</text>",
            f"<text x='{_MARGIN}' y='{_MARGIN + 26}' fill='#666'>{escape('; '.join(notes))}</text>",
            f"<g transform='translate({_MARGIN + _LABEL} {top})'>",
            *_boxes(proof, ranks, end, scale),
            *_axis(end, scale, ranks * _HEIGHT),
            "</g>",
            f"<g transform='translate({_MARGIN} {bottom + _MARGIN + 12})'>",
            *legend,
            "</g>",
            "</svg>\n",
        ]
    )


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
    """Marks at round times, at least 60 points apart."""
    rough = max(60 / scale, 1)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    for time in range(0, end + 1, step):
        x = time * scale
        yield f"<path d='M{x:.1f} {y + 2}v5' stroke='#999'/>"
        yield f"<text x='{x:.1f}' y='{y + 19}' text-anchor='middle' fill='#666'>{time}</text>"


def _legend(proof: VerifiedSchedule, all_phases: list[Phase]) -> Iterator[str]:
    """A line for each phase, with a box for each of the first chunks."""
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
