"""The command explain: why a value is laid out as it is.

Enters: a model or a program's text, and the name of a node, a parameter or a module. Leaves: the layout, what it costs
and what the runner-up would.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fxpar.cli.output import CommandResult, Ui, amount, print_table, table, time_text
from fxpar.cli.plan_flags import Request
from fxpar.cli.program_commands import example_sizes, is_pipeline, steps
from fxpar.errors import InputError
from fxpar.ir.properties import Property

if TYPE_CHECKING:
    from torch import fx

    from fxpar.cli.files import Start
    from fxpar.cost.stage_cut_points import Received
    from fxpar.ir.program import Program
    from fxpar.pipeline.compiler.partition import CutExplanation, Goals
    from fxpar.rewrite.chunk_choice import ChunkPrice
    from fxpar.sharding.layout_explanation import Explanation


# A cut by the stage after it, or what that receives.
_CUT, _RECEIVED = re.compile(r"cut[ -]?(\d{1,4})"), re.compile(r"%?\w+_on_\d+")
_CHUNKS, _SLOTS = "token-chunks", "spare-experts"
_SKEW = 8.0
_PRICES = ("chunks", "attention", "products", "exposed without", "exposed with", "more", "saved")
# Seconds below which a difference comes from the order in which ties are broken.
_TIE = 1e-6


def explain(
    ui: Ui,
    request: Request,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NODE|FQN",
            help=f"a node, parameter or module of the program, a cut, {_CHUNKS}, or {_SLOTS}",
        ),
    ],
    skew: Annotated[
        float | None, typer.Option(help=f"of {_SLOTS}: how many times the load of others an eighth has ({_SKEW:.0f})")
    ] = None,
    loads: Annotated[Path | None, typer.Option(help=f"of {_SLOTS}: a report as JSON, with loads")] = None,
) -> CommandResult:
    """Says why a value is laid out as it is, in milliseconds of a training step, and what else it could be.

    Of a pipeline `cut 2`, or a value that stage 2 receives, says why that stage begins where it does. `token-chunks`
    says what chunks of tokens save and cost in a training step, and likewise spare slots at some load.
    """
    from fxpar.cli.files import open_start

    start = open_start(ui, request)
    program = start.program
    if name == _SLOTS:
        return _explain_slots(ui, start, skew, loads)
    if skew is not None or loads is not None:
        flag = "--loads" if skew is None else "--skew"
        raise InputError(f"is of {_SLOTS} alone", where=flag, remedy=f"leave it out, or name {_SLOTS}")
    if name == _CHUNKS:
        return _explain_chunks(ui, start)
    if is_pipeline(program) and (_CUT.fullmatch(name) or _RECEIVED.fullmatch(name)):
        cut = _explain_cut(ui, start, name)
        if cut is not None:
            return cut
    return _explain_layouts(ui, start, name)


def _explain_layouts(ui: Ui, start: Start, name: str) -> CommandResult:
    """Returns why values are laid out as they are."""
    from fxpar.cli.files import run_passes
    from fxpar.passes import DEFAULT_PASSES
    from fxpar.sharding.choose import place
    from fxpar.sharding.layout_explanation import explain as explained
    from fxpar.sharding.layout_explanation import followed
    from fxpar.sharding.problem import reference_sizes

    program = start.program
    if Property.LAYOUTS in program.properties:
        raise InputError(
            "its layouts are chosen already", where=start.name, remedy="name the model, or the text before annotate"
        )
    if not program.axes:
        raise InputError("one rank holds everything whole", where=start.name, remedy="give --tp N")
    if Property.EXPERTS not in program.properties:
        program, _ = run_passes(ui, start, DEFAULT_PASSES, until="dispatch_experts")
    nodes = _named(program, name)
    explanations = {}
    with ui.working(f"choosing layouts of {start.name}"):
        placed = place(program, {})
        for axis in program.axes:
            choice = placed.choices.get(axis)
            if choice is None:
                explanations[axis] = [followed(program, axis, node, placed.options[axis]) for node in nodes]
            else:
                inner = {node.name: node for node in placed.inner.graph.nodes}
                explanations[axis] = [explained(placed.inner, choice, inner[node.name]) for node in nodes]
    sizes = reference_sizes(placed.inner)
    widths = {axis: choice.prices.width for axis, choice in placed.choices.items()}
    document = [
        {"axis": axis, **_document(explanation), "sizes": sizes, "width": widths.get(axis)}
        for axis, all_of_it in explanations.items()
        for explanation in all_of_it
    ]

    def show(stdout: Console) -> None:
        for axis, all_of_it in explanations.items():
            for explanation in all_of_it:
                _show(stdout, axis, explanation)
        if widths:
            stdout.print(
                f"Milliseconds are those by which layouts are chosen, whatever the batch: of a step at "
                f"{_sizes_text(sizes)}, its commonest width taken for {max(widths.values())}.",
                soft_wrap=True,
            )

    return CommandResult(document, show)


def _explain_cut(ui: Ui, start: Start, name: str) -> CommandResult | None:
    """Returns why a cut lies where it does; None where the name is that of another node."""
    from fxpar.cli.files import run_passes
    from fxpar.cost.stage_cut_points import stage_shares
    from fxpar.ir.stages import crossings
    from fxpar.passes import DEFAULT_PASSES, partition_stages
    from fxpar.pipeline.compiler.partition import explain_cut

    program = start.program
    if Property.STAGES in program.properties:
        reason, remedy = "its stages are chosen already", "name the model, or the text before partition_stages"
        raise InputError(reason, where=start.name, remedy=remedy)
    if Property.LOCAL not in program.properties:
        program, _ = run_passes(ui, start, DEFAULT_PASSES, until="localize")
    cut = _CUT.fullmatch(name)
    with ui.working(f"cutting {start.name}"):
        whole = partition_stages(program.copy())
        crossed = {c.node.name: c.receiver for c in crossings(whole)}
        stage = int(cut[1]) if cut else crossed.get(name.removeprefix("%"))
        if stage is None:
            return None
        if not 0 < stage < program.plan.pipeline_stages:
            last = program.plan.pipeline_stages - 1
            raise InputError("no stage but those behind the first has a cut", where=name, remedy=f"give 1 to {last}")
        explanation, received = explain_cut(program, stage), stage_shares(whole)[stage].received
    sizes = example_sizes(program)
    document = dataclasses.asdict(explanation) | {"received": [dataclasses.asdict(tensor) for tensor in received]}

    def show(stdout: Console) -> None:
        _show_cut(stdout, explanation, received)
        stdout.print(_of_example(sizes), soft_wrap=True)

    return CommandResult(document | {"sizes": sizes}, show)


def _of_example(sizes: Mapping[str, int]) -> str:
    return f"Times are of a microbatch of the example's sizes: {_sizes_text(sizes)}."


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "fixed sizes"


def _explain_chunks(ui: Ui, start: Start) -> CommandResult:
    """Returns what chunks of tokens save and cost, of each stage of a pipeline."""
    from fxpar.ir.step import batch_symbol
    from fxpar.layout.symbolic_sizes import symbol
    from fxpar.rewrite.chunk_choice import ChunkChoice, cheapest, chunk_prices

    if Property.STEP in start.program.properties:
        reason, remedy = "its rows may be in chunks already", "name the model, or the text of a forward"
        raise InputError(reason, where=start.name, remedy=remedy)
    plan = start.program.plan
    whole = dataclasses.replace(plan, communication=dataclasses.replace(plan.communication, token_chunks=1))
    forward = dataclasses.replace(start, program=start.program.with_(plan=whole))
    by_stage: dict[int | None, Sequence[ChunkPrice]] = {}
    for stage, step in steps(ui, forward, None)[1]:
        rows = symbol(batch_symbol(step))
        by_stage[stage] = chunk_prices(step, rows, ChunkChoice(step, rows))
    document = [
        {
            **({} if stage is None else {"stage": stage}),
            "cheapest": dict(zip(("count", "phases", "attention"), cheapest(prices), strict=True)),
            "prices": [{**dataclasses.asdict(price), "gain": price.gain} for price in prices],
        }
        for stage, prices in by_stage.items()
    ]

    def show(stdout: Console) -> None:
        for stage, prices in by_stage.items():
            count, phases, attention = cheapest(prices)
            _show_chunks(stdout, start.name if stage is None else f"{start.name}, stage {stage}", prices)
            where = " and ".join(phase or "forward" for phase in phases) + ", attention too" * attention
            stdout.print(f"cheapest: {count} chunks in the {where}" if phases else "cheapest: 1, no chunks pay")
        stdout.print(_of_example(example_sizes(start.program)), soft_wrap=True)

    return CommandResult(document, show)


def _explain_slots(ui: Ui, start: Start, skew: float | None, loads: Path | None) -> CommandResult:
    """Returns what spare slots save and cost at a load."""
    from fxpar.cli.files import run_passes
    from fxpar.experts.compiler.slot_prices import cheapest, slot_prices
    from fxpar.passes import DEFAULT_PASSES

    if skew is not None and loads is not None:
        raise InputError("both say what the load is", where="--skew and --loads", remedy="give one of them")
    if skew is not None and not 0 < skew < float("inf"):
        raise InputError(f"must be a number above 0, got {skew}", where="--skew", remedy=f"give {_SKEW:.0f}, say")
    if not start.program.mesh.holders:
        raise InputError("no --ep of at least 2", where=start.name, remedy="give --ep 2, say")
    program, _ = run_passes(ui, start, DEFAULT_PASSES, until="divide_sequence")
    prices = slot_prices(program, (_SKEW if skew is None else skew) if loads is None else loads)
    best = cheapest(prices)
    document = {
        "cheapest": best.slots,
        "prices": [{**dataclasses.asdict(p), "saved": prices[0].seconds - p.seconds} for p in prices],
    }

    def show(stdout: Console) -> None:
        rows = table("slots", "fullest rank", "replicas", "products", "sending", "memory of a layer", "saved")
        for price in prices:
            times = map(time_text, (price.computing, price.sending))
            saved = time_text(prices[0].seconds - price.seconds)
            texts = (f"{price.fullest:.2f}", str(price.replicas), *times, amount(price.bytes), saved)
            rows.add_row(str(price.slots), *texts)
        print_table(stdout, f"spare slots for replicas: {start.name}, a microbatch", rows)
        stdout.print(f"cheapest: {best.slots or 'no'} slots of each rank")
        stdout.print(_of_example(example_sizes(start.program)), soft_wrap=True)

    return CommandResult(document, show)


def _show_chunks(stdout: Console, name: str, prices: Sequence[ChunkPrice]) -> None:
    rows = table("phase", *_PRICES)
    for price in prices:
        seconds = (price.products, price.whole, price.chunked, price.more, price.gain)
        attention = "in chunks" if price.attention else "whole"
        rows.add_row(price.phase or "forward", str(price.count), attention, *map(time_text, seconds))
    print_table(stdout, f"chunks of tokens: {name}", rows)


def _show_cut(stdout: Console, cut: CutExplanation, received: Sequence[Received]) -> None:
    rows = table("what", "is")
    rows.add_row("behind", cut.behind)
    rows.add_row("in front of", cut.before)
    rows.add_row("because", cut.reason)
    for stage, seconds, size in zip((cut.stage - 1, cut.stage), cut.seconds, cut.bytes, strict=True):
        rows.add_row(f"stage {stage}", f"{time_text(seconds)} a microbatch, {amount(int(size))}")
    for tensor in received:
        back = ", its gradient comes back" if tensor.returns else ""
        rows.add_row("crosses", f"%{tensor.value} {tensor.type}, {amount(tensor.bytes)}{back}")
    rows.add_row("all stages", _goals(cut.goals))
    if cut.other is not None:
        rows.add_row("runner-up", f"behind {cut.runner_up}")
        rows.add_row("then", _goals(cut.other))
    print_table(stdout, f"the cut in front of stage {cut.stage}", rows)


def _goals(goals: Goals) -> str:
    most, crossing = amount(int(goals.most)), amount(int(goals.crossing))
    return f"longest {time_text(goals.longest)}, most {most}, crossing {crossing}"


def _named(program: Program, name: str) -> list[fx.Node]:
    """Returns the node of that name, the parameter, or the parameters and products of the module."""
    from fxpar.ir.program import note, output_types

    nodes = [node for node in program.graph.nodes if node.op != "output" and output_types(node)]
    by_node = [node for node in nodes if node.name == name.removeprefix("%")]
    owned = {p.node: p for p in program.parameters}
    by_parameter = [n for n in nodes if n.name in owned and name in (owned[n.name].fqn, *owned[n.name].tied)]
    by_module = [n for n in nodes if n.name in owned and owned[n.name].fqn.rpartition(".")[0] == name]
    by_module += [node for node in nodes if node.op == "call_function" and note(node).fqn == name]
    matches: list[fx.Node] = by_node or by_parameter or by_module
    if not matches:
        known = [*(node.name for node in nodes), *(part for p in program.parameters for part in (p.fqn, *p.tied))]
        known += [note(node).fqn for node in nodes]
        near = [part for part in dict.fromkeys(known) if part.endswith(f".{name}")][:3]
        near = near or difflib.get_close_matches(name.removeprefix("%"), sorted({*known} - {""}), 3)
        remedy = f"did you mean {' or '.join(near)}? " if near else ""
        raise InputError(
            "names no node, parameter or module of the program",
            where=name,
            remedy=f"{remedy}'fxpar trace MODEL' prints the nodes with their modules",
        )
    return matches


def _document(explanation: Explanation) -> dict[str, Any]:
    return {
        "node": explanation.node,
        "placement": str(explanation.placement),
        "reason": explanation.reason,
        "terms_ms": {term: 1e3 * seconds for term, seconds in explanation.terms.items()},
        "compared": [str(placement) for placement in explanation.compared],
        "runner_up": None if explanation.runner_up is None else str(explanation.runner_up),
        "runner_up_extra_ms": 1e3 * explanation.extra,
        "chain": [{"node": node, "placement": placement} for node, placement in explanation.chain],
    }


def _show(stdout: Console, axis: str, explanation: Explanation) -> None:
    rows = table("what", "is")
    rows.add_row("layout", f"{axis}:{explanation.placement}")
    rows.add_row("because", explanation.reason)
    for term, seconds in explanation.terms.items():
        rows.add_row(term, f"{1e3 * seconds:.3f} ms")
    others = ", ".join(f"{axis}:{placement}" for placement in explanation.compared)
    if explanation.runner_up is None:
        rows.add_row("runner-up", f"none: {others} cannot be" if others else "none: nothing else is offered")
    else:
        by = (
            f"{1e3 * explanation.extra:.3f} ms longer"
            if explanation.extra >= _TIE
            else "as long: less is computed on every rank"
        )
        rows.add_row("runner-up", f"{axis}:{explanation.runner_up}, the step {by}")
        rows.add_row("compared with", f"{others}; for each the rest was chosen anew")
    for node, placement in explanation.chain:
        rows.add_row("follows", f"{node} {axis}:{placement}")
    print_table(stdout, explanation.node, rows)
