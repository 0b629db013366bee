"""The command groups: which ranks communicate with which.

Enters: sizes of axes and their order. Leaves: the groups as tables, a coloured grid of ranks, a picture or JSON. Needs
no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text

from fxpar.cli.output import MARGIN, CommandResult, Ui, print_table, svg_page, table, write_text
from fxpar.mesh.axes import DENSE, EXPERT, Axes, Groups
from fxpar.mesh.mesh import DENSE_AXES, EXPERT_AXES, Mesh

# Ranks as a grid, coloured by group: what the picture and the terminal show of a mesh.

# Light enough for black text. Groups beyond these repeat the colours; their tags differ.
COLOURS = "#8dd3c7 #fdb462 #bebada #fb8072 #80b1d3 #b3de69 #fccde5 #d9c09a #bc80bd #ffed6f #a6e3f5 #c9c9c9".split()
_SHOWN_RANKS = 6


@dataclass(frozen=True)
class Panel:
    """Groups that go by these names.

    Attributes:
        names: of the same groups in both parts.
        groups: their ranks.
        number: which group a rank is in; ranks in none are missing.
    """

    names: tuple[str, ...]
    groups: Groups
    number: dict[int, int] = field(repr=False)

    @property
    def title(self) -> str:
        """Returns names, and how many groups of how many ranks."""
        return f"{' = '.join(self.names)}: {counted(self.groups)}"


@dataclass(frozen=True)
class Row:
    """Consecutive ranks, and where they stand on the axes that no row holds whole."""

    label: str
    ranks: range


def counted(groups: Groups) -> str:
    """Returns how many groups of how many ranks."""
    size = len(groups[0])
    return f"{len(groups)} group{'s' if len(groups) > 1 else ''} of {size} rank{'s' if size > 1 else ''}"


def panels(mesh: Mesh, names: Iterable[str]) -> list[Panel]:
    """Returns one for each set of groups of more than one rank."""
    by_groups: dict[Groups, list[str]] = {}
    for name in names:
        groups = mesh.groups(name)
        if any(len(group) > 1 for group in groups):
            by_groups.setdefault(groups, []).append(name)
    return [
        Panel(tuple(same), groups, {rank: number for number, group in enumerate(groups) for rank in group})
        for groups, same in by_groups.items()
    ]


def rows(axes: Axes, limit: int) -> tuple[list[str], list[Row]]:
    """Cuts the ranks into rows of at most `limit`, along axes; stages of a pipeline stand in rows of their own.

    Returns:
        The axes along a row, and the rows.
    """
    wide = [(axis, size) for axis, size in axes.sizes if size > 1]
    width = 1
    inside: list[str] = []
    while wide and width * wide[0][1] <= limit and (wide[0][0] != "pp" or not inside):
        axis, size = wide.pop(0)
        width *= size
        inside.append(axis)
    block = width
    if wide and wide[0][0] != "pp" and limit // width > 1:  # a row holds a part of the next axis
        block, width = width * wide[0][1], limit // width * width
        inside.append(f"{wide[0][0]} (in parts)")
    all_rows = []
    for start in range(0, len(axes.ranks), block):
        for low in range(start, start + block, width):
            ranks = axes.ranks[low : min(low + width, start + block)]
            all_rows.append(Row(_label(axes, [axis for axis, _ in wide], ranks), ranks))
    return inside, all_rows


def _label(axes: Axes, outside: list[str], ranks: range) -> str:
    first, last = axes.coordinates(ranks[0]), axes.coordinates(ranks[-1])
    spans = [(axis, first[axis], last[axis]) for axis in reversed(outside)]
    return " ".join(f"{axis} {low}" if low == high else f"{axis} {low}–{high}" for axis, low, high in spans)


def tag(number: int) -> str:
    """Returns a group's mark: a, b, …, z, aa, ab, …, where there are no colours or they repeat."""
    text = ""
    while number >= 0:
        number, letter = divmod(number, 26)
        text, number = chr(ord("a") + letter) + text, number - 1
    return text


def colour(number: int) -> str:
    """Returns a group's colour."""
    return COLOURS[number % len(COLOURS)]


def short(group: tuple[int, ...]) -> str:
    """Returns a group's ranks: `[0–3]` where they are neighbours, else `[0,4,8,12]`, with dots in the place of many."""
    if len(group) > 2 and group == tuple(range(group[0], group[-1] + 1)):
        return f"[{group[0]}–{group[-1]}]"
    if len(group) > _SHOWN_RANKS + 2:
        return f"[{','.join(map(str, group[:_SHOWN_RANKS]))},…,{group[-1]}]"
    return f"[{','.join(map(str, group))}]"


# ---------------------------------------------------------------------- SVG

_CELL, _HEIGHT, _LINE, _LETTER = 35, 23, 17, 7
_CELLS_PER_ROW, _CELL_ROWS, _LEGEND_LINES, _WIDE = 16, 24, 2, 1240
# Worlds up to this size have short rows, so that all their panels are next to each other on a screen.
_SMALL = 64


def svg(mesh: Mesh, names: Iterable[str], title: str) -> str:
    """Returns a picture: a panel for each set of groups that differs, each with its axes and its legend.

    Large worlds are cut after 24 rows, and the picture says so.
    """
    inside, all_rows = rows(mesh.dense, _CELLS_PER_ROW // (2 if len(mesh.ranks) <= _SMALL else 1))
    shown = all_rows[:_CELL_ROWS]
    left = max(_LETTER * max(len(row.label) for row in shown) + 12, 12)
    all_panels = panels(mesh, names)
    longest = max((len(panel.title) for panel in all_panels), default=0)
    width = max(left + _CELL * max(len(row.ranks) for row in shown), 8 * longest, 240)
    across = max(1, min(len(all_panels), _WIDE // (width + MARGIN)))
    notes = [] if all_panels else ["every rank is alone: there are no groups"]
    if len(shown) < len(all_rows):
        notes.append(f"the first {shown[-1].ranks.stop - mesh.ranks.start} of {len(mesh.ranks)} ranks")
    body: list[str] = []
    bottom = 2 * MARGIN + (10 + _LINE if notes else 10)
    for start in range(0, len(all_panels), across):
        heights = []
        for place, panel in enumerate(all_panels[start : start + across]):
            x, legend = MARGIN + place * (width + MARGIN), _legend(panel, width - left)
            lines = _svg_panel(panel, shown, inside, left, legend)
            height = _HEIGHT * len(shown) + _LINE * (max((line for line, *_ in legend), default=0) + 4)
            body += [f"<g transform='translate({x} {bottom})'>", *lines, "</g>"]
            heights.append(height)
        bottom += max(heights) + MARGIN
    total = max(across * (width + MARGIN) + MARGIN, 10 * len(title) + 2 * MARGIN)
    return svg_page(total, bottom, title, notes, body)


def _svg_panel(panel: Panel, shown: list[Row], inside: list[str], left: int, legend: list[_Entry]) -> Iterator[str]:
    """Yields title, the axis along the rows, the cells, the legend."""
    yield f"<text y='0' font-size='14' font-weight='600'>{escape(panel.title)}</text>"
    if inside:
        yield f"<text x='{left}' y='{_LINE + 3}' fill='#666'>{escape(', '.join(inside))} →</text>"
    top = 2 * _LINE - 6
    for place, row in enumerate(shown):
        y = top + place * _HEIGHT
        yield f"<text x='{left - 8}' y='{y + 17}' text-anchor='end' fill='#666'>{escape(row.label)}</text>"
        for column, rank in enumerate(row.ranks):
            yield from _cell(left + column * _CELL, y, rank, panel.number.get(rank))
    bottom = top + len(shown) * _HEIGHT + _LINE
    for line, start, number, text in legend:
        x, y = left + start, bottom + line * _LINE
        if number is not None:
            yield f"<rect x='{x}' y='{y - 10}' width='12' height='12' rx='2' fill='{colour(number)}'/>"
        yield f"<text x='{x + 16}' y='{y}'>{escape(text)}</text>"


def _cell(x: int, y: int, rank: int, number: int | None) -> Iterator[str]:
    fill = "#f4f4f4" if number is None else colour(number)
    yield f"<rect x='{x}' y='{y}' width='{_CELL - 2}' height='{_HEIGHT - 2}' rx='3' fill='{fill}'/>"
    mark = "" if number is None else f"<tspan font-size='9' fill='#333'>{tag(number)}</tspan>"
    size = 12 if rank < 1000 else 10
    middle = x + _CELL // 2 - 1
    yield f"<text x='{middle}' y='{y + 16}' text-anchor='middle' font-size='{size}'>{rank}{mark}</text>"


# A line of a legend, where an entry begins on it, its group, and its text.
_Entry = tuple[int, int, int | None, str]


def _legend(panel: Panel, width: int) -> list[_Entry]:
    """Returns the first groups with their ranks, and how many more there are, on lines of some width."""
    entries: list[_Entry] = []
    line = start = 0
    for number, group in enumerate(panel.groups):
        text = f"{tag(number)} {short(group)}"
        wide = _LETTER * len(text) + 28
        if entries and start + wide > width:
            line, start = line + 1, 0
        if line == _LEGEND_LINES:
            return [*entries, (line, 0, None, f"… {len(panel.groups) - number} more, in the same order")]
        entries.append((line, start, number, text))
        start += wide
    return entries


_ALWAYS = {DENSE: (*DENSE_AXES, "dp-cp"), EXPERT: EXPERT_AXES}
_USE = {
    "tp": "split each layer",
    "cp": "split the sequence",
    "dp": "split the batch",
    "pp": "hold the stages",
    "dp-cp": "sum dense gradients",
    "etp": "split each expert",
    "ep": "hold the experts",
    "edp": "sum expert gradients",
    "tp-pp": "hold one copy of the model",
    "embedding": "hold tied embeddings",
    "kv_in": "hold the same key and value heads",
    "kv_out": "hold all key and value heads",
}
# What a terminal shows of a large world: characters for the groups of a name, rows of the grid, ranks in a row.
_CHARACTERS, _ROWS, _PER_ROW = 160, 16, 16


def groups(
    ui: Ui,
    mesh: Mesh,
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="also this group: axes of one part (tp-pp, tp-ep) or embedding; repeatable"),
    ] = None,
    picture: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="draw the grid into this file")] = None,
) -> CommandResult:
    """Prints which ranks communicate with which, in the dense and in the expert part of a model."""
    if mesh.sizes["cp"] > 1:
        ui.warn("cp is not supported yet: no other command and no plan takes more than cp=1")
    names = _names(mesh)
    for name in group or ():
        if name not in names[mesh.part(name)]:
            names[mesh.part(name)].append(name)
    document = {part: {name: mesh.groups(name) for name in names[part]} for part in names}
    everything = list(dict.fromkeys(name for part in names.values() for name in part))
    if picture is not None:
        write_text(Path(picture), groups_svg(mesh, everything))

    def show(stdout: Console) -> None:
        for part in names:
            _show_part(stdout, mesh, part, document[part])
        _show_stages(stdout, mesh)
        _show_grid(stdout, mesh, everything)
        if picture is not None:
            stdout.print(Text(f"wrote {picture}"), soft_wrap=True)

    return CommandResult(document, show)


def _names(mesh: Mesh) -> dict[str, list[str]]:
    """Returns the groups of each part that are always shown."""
    names: dict[str, list[str]] = {part: list(always) for part, always in _ALWAYS.items()}
    names[DENSE] += [name for factors in mesh.factors.values() for name, _ in factors]
    return names


def groups_svg(mesh: Mesh, names: Iterable[str] = ()) -> str:
    """Returns the picture of some groups; of those that are always shown by default."""
    return svg(mesh, names or dict.fromkeys(itertools.chain(*_names(mesh).values())), _title(mesh))


def _title(mesh: Mesh) -> str:
    offset = f" from rank {mesh.rank_offset}" if mesh.rank_offset else ""
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.sizes.items() if size > 1)
    return f"{len(mesh.ranks)} ranks{offset}: {sizes or 'no axis'}; order {mesh.order}"


def _show_part(stdout: Console, mesh: Mesh, part: str, named_groups: dict[str, Any]) -> None:
    axes = mesh.dense if part == DENSE else mesh.expert
    sizes = " · ".join(f"{axis} {size}" for axis, size in axes.sizes)
    lines = table("name", "groups", "size", "ranks", "which", right=("groups", "size"), whole=("name",))
    for name, all_of_it in named_groups.items():
        size = len(all_of_it[0])
        ranks = Text("each rank alone")
        if size > 1:
            ranks = _some(all_of_it)
        lines.add_row(name, str(len(all_of_it)), str(size), ranks, _USE.get(name, "") if size > 1 else "")
    print_table(stdout, f"{part} part: {len(mesh.ranks)} ranks = {sizes}, the fastest first", lines)
    stdout.print()


def _some(all_groups: Groups) -> Text:
    """Returns groups with their colours, and how many there is no place for."""
    text = Text()
    for number, ranks in enumerate(all_groups):
        if len(text) > _CHARACTERS:
            text.append(f"… {len(all_groups) - number} more")
            break
        text.append(tag(number), f"black on {colour(number)}").append(f"{short(ranks)} ")
    return text


def _show_stages(stdout: Console, mesh: Mesh) -> None:
    if mesh.virtual == 1:
        return
    lines = table("pp", "stages of its ranks", right=("pp",))
    for index, rank in list(enumerate(mesh.dense.groups(["pp"])[0]))[:_ROWS]:
        lines.add_row(str(index), " ".join(map(str, mesh.stages(rank))))
    if mesh.pp > _ROWS:
        lines.add_row("…", f"{mesh.pp - _ROWS} more")
    print_table(stdout, f"stages: {mesh.pp * mesh.virtual}", lines)
    stdout.print()


def _show_grid(stdout: Console, mesh: Mesh, names: list[str]) -> None:
    """Prints panels next to each other as far as the terminal is wide."""
    all_panels = panels(mesh, names)
    if not all_panels:
        stdout.print(Text("every rank is alone: there is no group to draw"))
        return
    drawn = mesh.ranks[: _ROWS * _PER_ROW]
    width = max(len(_mark(panel, rank)) for panel in all_panels for rank in drawn) + 2
    inside, all_rows = rows(mesh.dense, max(1, min(_PER_ROW, (stdout.width - 24) // width)))
    shown = all_rows[:_ROWS]
    along = f", {', '.join(inside)} along a row" if inside else ""
    if len(shown) < len(all_rows):
        along += f"; the first {shown[-1].ranks.stop - mesh.ranks.start} of {len(mesh.ranks)} (--json has all)"
    stdout.print(Text(f"grid: each rank with its group{along}", style="bold"), soft_wrap=True)
    stdout.print(Columns([_panel(panel, shown, width) for panel in all_panels], padding=(0, 3)))


def _mark(panel: Panel, rank: int) -> str:
    return f"{rank}{tag(panel.number[rank])}" if rank in panel.number else f"{rank}"


def _panel(panel: Panel, shown: list[Row], width: int) -> Group:
    label = max(len(row.label) for row in shown)
    lines = [Text(panel.title, style="underline")]
    for row in shown:
        line = Text(f"{row.label:>{label}} " if label else "")
        for rank in row.ranks:
            style = f"black on {colour(panel.number[rank])}" if rank in panel.number else ""
            line.append(f"{_mark(panel, rank):>{width - 1}} ", style)
        lines.append(line)
    return Group(*lines, Text())
