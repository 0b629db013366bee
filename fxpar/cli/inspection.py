"""Commands that look into programs: comm, regions, memory, report.

Enters: texts or a model. Leaves: every collective with its bytes, what CUDA graphs hold, or what a rank holds and all
figures together, as tables, JSON or one HTML file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fxpar.cli.groups import groups_svg
from fxpar.cli.output import FAILED, FINE, CommandResult, Ui, amount, print_table, table, time_text, write_text
from fxpar.cli.plan_flags import Request, whole_number
from fxpar.cli.program_commands import OfStage, check_stage, example_sizes, steps, warn_empty, warn_unsplit
from fxpar.errors import InputError
from fxpar.ir.properties import Property
from fxpar.text.tables import span, span_of_names

if TYPE_CHECKING:
    from fxpar.cost import Report
    from fxpar.cost.capturable import Boundary, CaptureRegion
    from fxpar.cost.html import Picture
    from fxpar.cost.seconds import Travel
    from fxpar.cost.stage_cut_points import Send
    from fxpar.ir.program import Program

_ELSEWHERE = "elsewhere"
Sizes = Annotated[
    list[str] | None,
    typer.Option(metavar="SYMBOL=N", help="value of a symbol, for example b=8; the example's otherwise; repeatable"),
]
Optimizer = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="adamw, sgd, sgd-momentum, muon or none: what state a parameter has; with +main for float32 main weights, "
        "and +offload for state in the host's memory",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="cpu or cuda: whose kernels are assumed, wherever the command runs (default: of the machine that the "
        "plan's cost describes, which is a GPU by itself)",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="memory of a rank, such as 80GiB; exit status 1 where the peak is beyond it"),
]
_DEVICES = ("cpu", "cuda")
_MEMORY = (
    *("name", "plan", "sizes", "optimizer", "device"),
    *("ranks", "modules", "activations", "peak", "phases", "largest", "stages"),
)


def comm(
    ui: Ui,
    request: Request,
    size: Sizes = None,
    of_stage: OfStage = None,
) -> CommandResult:
    """Lists every collective of a training step: bytes, seconds, what travels alongside it and what stays exposed.

    Of a pipeline those of each stage's step of a microbatch, and what the stages send to each other.
    """
    from fxpar.cli.files import open_start
    from fxpar.cost.seconds import travels
    from fxpar.cost.stage_cut_points import sends

    start = open_start(ui, request)
    check_stage(start, of_stage)
    sizes = sizes_of(start.program, size or [])
    whole, programs = steps(ui, start, of_stage)
    stages = [(stage, program, travels(program, sizes)) for stage, program in programs]
    sent = sends(whole, sizes) if Property.STAGES in whole.properties else []
    sent = [one for one in sent if of_stage in (None, one.stage)]
    at = _sizes_text(stages[0][1], sizes)
    if len(stages) == 1:
        warn_unsplit(ui, stages[0][1])
    warn_empty(ui, whole)
    microbatches = start.program.plan.microbatches
    document = {
        "collectives": [
            travel.to_json() | ({} if stage is None else {"stage": stage})
            for stage, _, step_travels in stages
            for travel in step_travels
        ],
        "sends": [dataclasses.asdict(one) for one in sent],
        "totals": _by_phase([travel for _, _, step_travels in stages for travel in step_travels], microbatches),
        "microbatches": microbatches,
    }

    def show(stdout: Console) -> None:
        for stage, program, step_travels in _alike_stages(stages):
            name = start.name if stage is None else f"{start.name}, {stage}"
            _show_comm(stdout, name, program, step_travels, at)
        _show_sends(stdout, sent, at)

    return CommandResult(document, show)


def _by_phase(travels: Sequence[Travel], microbatches: int) -> dict[str, dict[str, Any]]:
    """Returns number, bytes, seconds and those of them that stay exposed, by phase, of all and of all microbatches.

    What parameters alone have, and the sums of their gradients, travels once a step.
    """
    from fxpar.ir.step import ONCE, PARAMETER

    groups: dict[str, list[Travel]] = {}
    for travel in travels:
        groups.setdefault(travel.collective.phase, []).append(travel)
    sums = {phase: _sums(mine, 1) for phase, mine in (*groups.items(), *([("all", travels)] if travels else []))}
    if travels and microbatches > 1:
        times = {phase: 1 if phase in (ONCE, PARAMETER) else microbatches for phase in groups}
        parts = [_sums(mine, times[phase]) for phase, mine in groups.items()]
        sums[f"{microbatches} microbatches"] = {key: sum(part[key] for part in parts) for key in parts[0]}
    return sums


def _sums(travels: Sequence[Travel], times: int) -> dict[str, Any]:
    return {
        "count": times * len(travels),
        "bytes": times * sum(travel.collective.bytes for travel in travels),
        "seconds": times * sum(travel.seconds for travel in travels),
        "exposed": times * sum(travel.exposed for travel in travels),
    }


def _alike_stages(
    stages: Sequence[tuple[int | None, Program, Sequence[Travel]]],
) -> list[tuple[str | None, Program, Sequence[Travel]]]:
    """Joins stages in a row whose tables differ in names alone to one, with the numbers of the stages as a text."""
    groups: list[list[tuple[int | None, Program, Sequence[Travel]]]] = []
    for entry in stages:
        if groups and _figures_of(groups[-1][0][2]) == _figures_of(entry[2]):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    joined: list[tuple[str | None, Program, Sequence[Travel]]] = []
    for group in groups:
        numbers = [stage for stage, _, _ in group if stage is not None]
        joined.append((span("stage", numbers) if numbers else None, *group[0][1:]))
    return joined


def sizes_of(program: Program, options: Sequence[str]) -> dict[str, int]:
    """Returns sizes by symbol of the options `--size SYMBOL=N`.

    Raises:
        InputError: an unknown symbol, one twice, no positive integer, or sizes that no tensor has.
    """
    from fxpar.cost.build_report import check_countable

    known: list[str] = [s.name for s in program.symbols]
    sizes: dict[str, int] = {}
    for text in options:
        name, _, number = text.partition("=")
        if name not in known:
            raise InputError(
                "must be a symbol of the program",
                where=f"--size {text}",
                remedy=f"choose from {', '.join(known) or 'none'}",
            )
        if name in sizes:
            raise InputError("the size is given twice", where=f"--size {text}", remedy="keep one")
        try:
            sizes[name] = whole_number(number)
        except typer.BadParameter:
            sizes[name] = 0
        if sizes[name] < 1:
            raise InputError("must be a positive integer", where=f"--size {text}", remedy=f"write, say, {name}=8")
    check_countable(program, sizes)
    return sizes


def _sizes_text(program: Program, sizes: dict[str, int]) -> str:
    values = example_sizes(program) | sizes
    return ", ".join(f"{symbol} = {value}" for symbol, value in values.items()) or "fixed sizes"


def _show_comm(stdout: Console, name: str, program: Program, travels: Sequence[Travel], at: str) -> None:
    from fxpar.cost.communication import layer_of
    from fxpar.ir.program import note

    if not travels:
        stdout.print(f"{name}: no collectives ({program.plan.world_size} rank{'s' * (program.plan.world_size > 1)})")
        return
    axes = dict.fromkeys(travel.collective.axis for travel in travels)
    numbers = ("bytes", "time", "exposed")
    rows = table("node", "op", *numbers[:2], "beside", numbers[2], right=numbers)
    layers: dict[tuple[str, str], list[Travel]] = {}
    for travel in travels:
        layer = layer_of(note(program.node(travel.collective.node)).fqn) or _ELSEWHERE
        layers.setdefault((travel.collective.phase, layer), []).append(travel)
    for phase, names, mine in _alike_layers(layers):
        rows.add_row(Text(f"{phase}, {names}", style="bold"))
        for travel in mine:
            rows.add_row(*_row(travel, several=len(axes) > 1))
        rows.add_section()
    print_table(stdout, f"{name}: collectives over {', '.join(axes)} at {at}", rows)
    _show_totals(stdout, travels, program.plan.microbatches)
    order = "In the order of a compiled step, by the constants of the plan's cost"
    waits = "" if program.plan.compile else "; without compile=True each is waited for at once"
    stdout.print(f"\n{order}{waits}.", soft_wrap=True)
    for part in sorted({travel.collective.part for travel in travels} - {1.0}):
        stdout.print(
            "Bytes of tokens for experts are the most that may travel. Of copies "
            f"{part:.1%} are expected to, if each choice of experts is as likely as any other; times are of these.",
            soft_wrap=True,
        )


def _alike_layers(layers: Mapping[tuple[str, str], Sequence[Travel]]) -> list[tuple[str, str, Sequence[Travel]]]:
    """Joins layers in a row that send the same in the same times: phase, their names, and what the first sends."""
    groups: list[list[tuple[str, str]]] = []
    for key in layers:
        last = groups[-1][-1] if groups else None
        is_next = last is not None and last[0] == key[0] and _without_numbers(last[1]) == _without_numbers(key[1])
        if is_next and last is not None and _figures_of(layers[last]) == _figures_of(layers[key]):
            groups[-1].append(key)
        else:
            groups.append([key])
    return [(group[0][0], span_of_names([name for _, name in group]), layers[group[0]]) for group in groups]


def _figures_of(travels: Sequence[Travel]) -> list[Any]:
    """Returns what a table shows of collectives, besides the names of nodes and layers."""
    return [(t.collective.phase, _row(t, several=True)[1:], _without_numbers(t.collective.node)) for t in travels]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _row(travel: Travel, *, several: bool) -> tuple[str, ...]:
    one = travel.collective
    beside = sum(seconds for _, seconds in travel.beside)
    products = f"{len(travel.beside)}: {time_text(beside)}" if travel.beside else "-"
    op = f"{one.op}[{one.axis}]" if several else one.op
    return f"  {one.node}", op, amount(one.bytes), time_text(travel.seconds), products, time_text(travel.exposed)


def _show_sends(stdout: Console, sent: Sequence[Send], at: str) -> None:
    """Prints what stages send to each other, equal ones once."""
    if not sent:
        return
    rows = table("stage", "to", "phase", "value", "bytes", "time", right=("bytes", "time"))
    groups: list[list[Send]] = []
    for one in sorted(sent, key=lambda one: (one.phase != "forward", one.stage)):
        last = groups[-1][-1] if groups else None
        if last is not None and (last.phase, last.bytes, last.stage + 1) == (one.phase, one.bytes, one.stage):
            groups[-1].append(one)
        else:
            groups.append([one])
    for group in groups:
        first, more = group[0], ", …" if len(group) > 1 else ""
        ends = (span("", [one.stage for one in group]), span("", [one.to for one in group]))
        value = f"%{first.value}{more}" if first.phase == "forward" else f"gradient of %{first.value}{more}"
        rows.add_row(*ends, first.phase, value, amount(first.bytes), time_text(first.seconds))
    print_table(stdout, f"\nwhat stages send for each microbatch at {at}", rows)


def _show_totals(stdout: Console, travels: Sequence[Travel], microbatches: int) -> None:
    columns = ("count", "bytes", "time", "exposed")
    totals = table("phase", *columns, right=columns)
    for phase, sums in _by_phase(travels, microbatches).items():
        if phase == "all":
            totals.add_section()
        times = (time_text(sums["seconds"]), time_text(sums["exposed"]))
        totals.add_row(phase, str(sums["count"]), amount(sums["bytes"]), *times)
    print_table(stdout, "\ntotals", totals)


def regions(ui: Ui, request: Request, size: Sizes = None, of_stage: OfStage = None) -> CommandResult:
    """Lists the parts of a training step that CUDA graphs can hold: what enters and leaves them, and what ends them."""
    from fxpar.cli.files import open_start
    from fxpar.cost.capturable import capture_regions

    start = open_start(ui, request)
    check_stage(start, of_stage, needed=True)
    sizes = sizes_of(start.program, size or [])
    _, ((_, program),) = steps(ui, start, of_stage)
    all_regions, boundaries = capture_regions(program, sizes)
    document = {
        "regions": [dataclasses.asdict(region) for region in all_regions],
        "boundaries": [dataclasses.asdict(boundary) for boundary in boundaries],
    }
    at = _sizes_text(program, sizes)
    return CommandResult(
        document, lambda stdout: _show_regions(stdout, start.name, program, all_regions, boundaries, at)
    )


def _show_regions(
    stdout: Console,
    name: str,
    program: Program,
    all_regions: Sequence[CaptureRegion],
    boundaries: Sequence[Boundary],
    at: str,
) -> None:
    from fxpar.ir.program import describe

    numbers = ("nodes", "inputs", "outputs", "bytes in", "bytes out")
    rows = table("region", "phase", *numbers, "from", "to", right=numbers)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, region in enumerate(all_regions):
        counts = (len(region.nodes), len(region.inputs), len(region.outputs))
        sums = (amount(sum(region.inputs.values())), amount(sum(region.outputs.values())))
        ends = (_without_numbers(region.nodes[0]), _without_numbers(region.nodes[-1]))
        alike.setdefault((region.phase, *map(str, counts), *sums, *ends), []).append(i)
    for (*shown, _, _), numbered in alike.items():
        first = all_regions[numbered[0]]
        rows.add_row(_numbers_text([i + 1 for i in numbered]), *shown, f"%{first.nodes[0]}", f"%{first.nodes[-1]}")
    print_table(stdout, f"{name}: what CUDA graphs hold of a step at {at}", rows)
    reasons: dict[tuple[str, ...], list[str]] = {}
    for boundary in boundaries:
        place = describe(program.node(boundary.node))
        kind = _without_numbers(re.sub(r"_\d+(?= |$)", "", place))  # the first of several nodes may have no number
        reasons.setdefault((boundary.phase, boundary.reason, kind), []).append(place)
    for (phase, reason, _), places in reasons.items():
        more = f" and {len(places) - 1} like it" if len(places) > 1 else ""
        stdout.print(Text(f"{phase}: {places[0]}{more} {reason}", style="yellow"), soft_wrap=True)
    if not boundaries:
        stdout.print("nothing ends a graph")


def _numbers_text(numbers: Sequence[int]) -> str:
    """Returns `2–6, each` of neighbours, and otherwise the first, the second and the last."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{span('', numbers)}, each"
    few_numbers = [str(n) for n in numbers]
    return ", ".join(few_numbers if len(numbers) < 4 else [*few_numbers[:2], f"… {few_numbers[-1]}"])


def memory(
    ui: Ui,
    request: Request,
    size: Sizes = None,
    optimizer: Optimizer = "adamw",
    device: Device = None,
    of_stage: OfStage = None,
    memory: Memory = None,
) -> CommandResult:
    """Counts the memory of a rank: parameters, gradients, optimizer, activations and the peak of a training step.

    Of a pipeline it is that of each rank, or with --of-stage that of one microbatch on that stage.
    """
    limit = None if memory is None else _bytes_of(memory)
    figures = figures_of(ui, request, size or [], optimizer, device, of_stage=of_stage)
    document = figures.to_dict()
    fullest = max(figures.ranks, key=lambda rank: rank.peak)
    fits = limit is None or fullest.peak <= limit

    def show(stdout: Console) -> None:
        from fxpar.cost.figures import memory_sections
        from fxpar.cost.sections import as_group

        stdout.print(as_group(memory_sections(figures)))
        if limit is not None:
            said = "It fits" if fits else "It does not fit"
            stdout.print(f"\n{said}: rank {fullest.rank} needs {amount(fullest.peak)} of {amount(limit)}.")

    more = {} if limit is None else {"memory": limit, "fits": fits}
    return CommandResult({key: document[key] for key in _MEMORY} | more, show, FINE if fits else FAILED)


_UNITS = {"B": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", 1)}}
_UNITS |= {f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)}


def _bytes_of(text: str) -> int:
    """Returns how many bytes `80GiB` are.

    Raises:
        InputError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        remedy = f"write a number with a unit, such as 80GiB ({', '.join(_UNITS)})"
        raise InputError("is no size", where=f"--memory {text}", remedy=remedy)
    return int(float(match[1]) * _UNITS[match[2]])


def report(
    ui: Ui,
    request: Request,
    size: Sizes = None,
    optimizer: Optimizer = "adamw",
    device: Device = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="write the report as one HTML file too")] = None,
    memory: Memory = None,
) -> CommandResult:
    """Reports on a split model: whether it fits, how fast it is, what is split how, and what all of it costs."""
    limit = None if memory is None else _bytes_of(memory)
    figures = figures_of(ui, request, size or [], optimizer, device, checked=True, limit=limit)
    fits = limit is None or figures.verdict is None or figures.verdict.fits
    if html is not None:
        from fxpar.cost.html import as_html
        from fxpar.cost.layer_picture import picture_of_layer
        from fxpar.cost.time_pictures import pictures_over_time

        pictures = [*picture_of_layer(figures), *pictures_over_time(figures), *_groups(figures)]
        write_text(Path(html), as_html(figures, pictures))

    def show(stdout: Console) -> None:
        stdout.print(figures)
        if html is not None:
            stdout.print(f"\nwritten to {html}", soft_wrap=True)

    document: dict[str, Any] = {**figures.to_dict(), "html": html}
    return CommandResult(document, show, FINE if fits else FAILED)


def _groups(figures: Report) -> list[Picture]:
    """Returns the picture of which ranks communicate with which; none of one rank."""
    from fxpar.cost.html import Picture, scrolling

    mesh = figures.steps[0].program.mesh
    if mesh.world_size == 1:
        return []
    caption = "Ranks of one group have one colour and one letter. Groups of different axes are panels of their own."
    title = "groups of ranks"
    return [Picture(title, caption, scrolling(title, groups_svg(mesh)))]


def figures_of(
    ui: Ui,
    request: Request,
    size: Sequence[str],
    optimizer: str,
    device: str | None,
    *,
    checked: bool = False,
    of_stage: int | None = None,
    limit: int | None = None,
) -> Report:
    """Returns the report of a model or text after all passes; nothing of it is run.

    Args:
        checked: whether the captured model is compared with the author's before.
        limit: bytes of a rank's memory; those of the plan's machine by default.
    """
    from functools import partial
    from math import prod

    import torch

    from fxpar.cli.files import compared, open_start, run_passes
    from fxpar.compile import lower_program
    from fxpar.cost import ReportBasis, make_report
    from fxpar.cost.measure import stand_in
    from fxpar.manager import without_collections
    from fxpar.mesh.axes import joined_names
    from fxpar.ops.process_group import Group
    from fxpar.passes import DEFAULT_PASSES, counted_steps
    from fxpar.pipeline.compiler.partition import run_pipeline

    if device not in (None, *_DEVICES):
        raise InputError("is unknown", where=f"--device {device}", remedy=f"choose one of {', '.join(_DEVICES)}")
    start = open_start(ui, request, needs_values=checked)
    check_stage(start, of_stage)
    # A machine whose products run in waves of multiprocessors is a GPU.
    is_gpu = start.program.plan.cost.multiprocessors > 1
    assumed = torch.device(device or ("cuda" if is_gpu else "cpu"))
    sizes = sizes_of(start.program, size)
    findings = compared(ui, start) if checked else ()
    program, _ = run_passes(ui, start, DEFAULT_PASSES)
    warn_empty(ui, program)
    with ui.working(f"counting {request.model}"), without_collections():
        # Nothing is sent: the groups have names alone.
        world = {name: prod(program.axes[axis] for axis in name.split("-")) for name in joined_names(program.axes)}
        groups = {name: Group(name, ranks) for name, ranks in world.items()}
        lowering = partial(lower_program, groups=groups, device=stand_in(assumed))
        return make_report(
            program,
            counted_steps(program, lowering, of_stage=of_stage),
            name=start.name if of_stage is None else f"{start.name}, stage {of_stage}",
            device=assumed,
            sizes=sizes,
            optimizer=optimizer,
            basis=ReportBasis(findings, None if of_stage is not None else start.program, limit, run_pipeline),
        )
