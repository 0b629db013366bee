"""The command groups: which ranks communicate with which.

Enters: sizes of axes and their order. Leaves: the groups as tables, a coloured grid of ranks, a picture or JSON. Needs
no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text

from fxpar.cli.common_options import command, number_option
from fxpar.cli.mesh_diagram import Panel, Row, colour, panels, rows, short, svg, tag
from fxpar.cli.output import CommandResult, Ui, print_table, table, write_text
from fxpar.cli.plan_flags import whole_number
from fxpar.errors import InputError, shown
from fxpar.mesh.atoms import Groups
from fxpar.mesh.mesh import DENSE_AXES, EXPERT_AXES, ORDER, Mesh
from fxpar.mesh.purpose import DENSE, EXPERT

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


def register(app: typer.Typer) -> None:
    """Adds the command of this file."""
    command(app, "groups")(groups)


def groups(
    ui: Ui,
    world_size: Annotated[int | None, number_option("all ranks (default: tp·cp·dp·pp)")] = None,
    tp: Annotated[int, number_option("tensor parallel ranks")] = 1,
    cp: Annotated[int, number_option("context parallel ranks")] = 1,
    dp: Annotated[int | None, number_option("data parallel ranks (default: what is left)")] = None,
    pp: Annotated[int, number_option("pipeline parallel ranks")] = 1,
    ep: Annotated[int, number_option("expert parallel ranks")] = 1,
    etp: Annotated[int | None, number_option("tensor parallel ranks of an expert (default: tp)")] = None,
    order: Annotated[str, typer.Option(metavar="AXES", help="axes from the fastest to the slowest")] = ORDER,
    rank_offset: Annotated[int, number_option("number of the first rank")] = 0,
    virtual: Annotated[int, number_option("pipeline stages a rank")] = 1,
    hierarchical_cp: Annotated[
        str | None, typer.Option(metavar="N,N…", help="sizes of the levels of cp, from the fastest: groups cp1, cp2, …")
    ] = None,
    kv_heads: Annotated[
        int | None, number_option("key and value heads that tp splits: groups kv_in and kv_out")
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="also this group: axes of one part (tp-pp, tp-ep) or embedding; repeatable"),
    ] = None,
    picture: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="draw the grid into this file")] = None,
) -> CommandResult:
    """Prints which ranks communicate with which, in the dense and in the expert part of a model."""
    mesh = Mesh(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=ep,
        etp=etp,
        world_size=world_size,
        order=order,
        rank_offset=rank_offset,
        virtual=virtual,
        hierarchical_cp=_levels(hierarchical_cp),
        kv_heads=kv_heads,
    )
    return _report(mesh, group or (), None if picture is None else Path(picture))


def _report(mesh: Mesh, more: Sequence[str], picture: Path | None) -> CommandResult:
    """The groups that are always of interest, and more."""
    names: dict[str, list[str]] = {part: list(always) for part, always in _ALWAYS.items()}
    names[DENSE] += [name for factors in mesh.factors.values() for name, _ in factors]
    for name in more:
        if name not in names[mesh.part(name)]:
            names[mesh.part(name)].append(name)
    document = {part: {name: mesh.groups(name) for name in names[part]} for part in names}
    everything = list(dict.fromkeys(name for part in names.values() for name in part))
    if picture is not None:
        write_text(picture, svg(mesh, everything, _title(mesh)))

    def show(stdout: Console) -> None:
        for part in names:
            _show_part(stdout, mesh, part, document[part])
        _show_stages(stdout, mesh)
        _show_grid(stdout, mesh, everything)
        if picture is not None:
            stdout.print(Text(f"wrote {picture}"), soft_wrap=True)

    return CommandResult(document, show)


def _levels(text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    try:
        return tuple(whole_number(word) for word in words)
    except typer.BadParameter:
        raise InputError(
            f"{shown(text)} is no list of sizes", where="--hierarchical-cp", remedy="write numbers as in 2,2,4"
        ) from None


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
    """Groups with their colours, and how many there is no place for."""
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
    """Panels next to each other as far as the terminal is wide."""
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
