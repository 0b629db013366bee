"""The command timeline: when a rank computes and sends in a step, as it is expected to and as it was measured.

Enters: a model and a plan; a trace that `fxpar.train` wrote. Leaves: a table, and a file for Perfetto in which the
simulated and the measured step stand next to each other, with the names of the program's nodes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fxpar.cli.inspection import Device, Optimizer, Sizes, figures_of
from fxpar.cli.output import CommandResult, Ui, print_table, table, time_text, write_text
from fxpar.cli.plan_flags import Request
from fxpar.errors import InputError

if TYPE_CHECKING:
    from fxpar.cost import Report
    from fxpar.cost.seconds import Travel
    from fxpar.cost.verdict import CountedStep, PipelineAction

Event = dict[str, Any]

_PIPELINE, _PRODUCTS, _REST = "microbatches", "products", "stored values and optimizer"
_MEASURED = 1000  # processes of the measured step are numbered from here on
_SHOWN = 12
# Ranges that `fxpar.train` leaves: on the host, and over the kernels that they launched.
_HOST_RANGE, _DEVICE_RANGE = "user_annotation", "gpu_user_annotation"


def timeline(
    ui: Ui,
    request: Request,
    size: Sizes = None,
    optimizer: Optimizer = "adamw",
    device: Device = "cpu",
    perfetto: Annotated[
        str | None, typer.Option(metavar="FILE", help="write the step here, for ui.perfetto.dev or chrome://tracing")
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="a trace that fxpar.train(trace=…) wrote: it comes next to the simulated step"
        ),
    ] = None,
) -> CommandResult:
    """Shows when a rank computes and sends in a step: simulated by the plan's cost, and as it was measured."""
    traced = [] if measured is None else read_trace(Path(measured))
    figures = figures_of(ui, request, size or [], optimizer, device)
    verdict = figures.verdict
    if verdict is None or verdict.seconds is None:
        reason = "has no schedule" if verdict is None else verdict.unknown
        raise InputError(f"its step has no time: {reason}", where=figures.name, remedy="give --microbatches")
    events = simulated_events(figures)
    joined = joined_nodes(events, traced)
    if perfetto is not None:
        document = {"traceEvents": [*events, *measured_events(traced)], "displayTimeUnit": "ms"}
        write_text(Path(perfetto), json.dumps(document, allow_nan=False))
    lanes = _lanes(events)
    result = {"seconds": verdict.seconds, "lanes": lanes, "nodes": joined, "perfetto": perfetto, "measured": measured}

    def show(stdout: Console) -> None:
        _show(stdout, f"{figures.name}: a step of {time_text(verdict.seconds or 0.0)}", lanes)
        if measured is not None:
            _show_joined(stdout, joined, measured)
        if perfetto is not None:
            stdout.print(f"\nwritten to {perfetto}; open it in ui.perfetto.dev", soft_wrap=True)

    return CommandResult(result, show)


# ---------------------------------------------------------------------- the simulated step


def simulated_events(figures: Report) -> list[Event]:
    """Returns the events of a step on each rank of the pipeline, or on one rank, in microseconds.

    Nodes are those of the first microbatch; others are one block for each forward and backward. What passes once a step
    stands next to the last microbatch.
    """
    assert figures.verdict is not None
    ranks = [_of_one(figures)] if figures.run is None else figures.run.ranks
    events: list[Event] = []
    for place, actions in enumerate(ranks):
        name = "simulated" if len(ranks) == 1 else f"simulated, rank {place} of the pipeline"
        events += _of_rank(figures, place, name, actions, len(ranks))
    return events


def _of_one(figures: Report) -> tuple[PipelineAction, ...]:
    """Returns the microbatches of a step that one rank runs."""
    from fxpar.cost.verdict import PipelineAction

    assert figures.verdict is not None
    now, actions = 0.0, []
    for microbatch in range(figures.verdict.microbatches):
        for phase, seconds in zip("FB", figures.steps[0].of_microbatch, strict=True):
            actions.append(PipelineAction(0, phase, microbatch, now, now + seconds))
            now += seconds
    return tuple(actions)


def _of_rank(figures: Report, place: int, name: str, actions: Sequence[PipelineAction], ranks: int) -> Iterator[Event]:
    """Yields the events of a rank: its lanes, microbatches, nodes, stored values and optimizer."""
    steps = {action.stage: figures.steps[action.stage] for action in actions}
    axes = dict.fromkeys(t.collective.axis for step in steps.values() for t in step.times.travels)
    lanes = [_PIPELINE, _PRODUCTS, *(f"collectives over {axis}" for axis in axes), _REST]
    tids = {lane: number for number, lane in enumerate(lanes, 1)}
    yield {"ph": "M", "name": "process_name", "pid": place + 1, "args": {"name": name}}
    for lane, tid in tids.items():
        yield {"ph": "M", "name": "thread_name", "pid": place + 1, "tid": tid, "args": {"name": lane}}

    def event(lane: str, what: str, start: float, seconds: float, **args: Any) -> Event:
        times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
        return {"ph": "X", "name": what, "cat": "simulated", "pid": place + 1, "tid": tids[lane], **times, "args": args}

    begin = sum(step.times.before for step in steps.values())
    last = {action.stage: action.microbatch for action in actions}
    for action in actions:
        step, start = steps[action.stage], begin + action.start
        what = f"{action.phase}{action.microbatch}" + (f" stage {action.stage}" if ranks > 1 else "")
        yield event(_PIPELINE, what, start, action.end - action.start, microbatch=action.microbatch)
        length = step.stored / 2 * (0.5 if action.phase in "IW" else 1.0)
        yield event(_REST, "stored values", begin + action.end - length, length)
        for lane, node, at, seconds, args in _nodes(step, action, last[action.stage]):
            yield event(lane, node, start + at, seconds, **args)
    end = begin + actions[-1].end + sum(step.times.after for step in steps.values())
    rank = figures.ranks[place * (len(figures.ranks) // ranks)]
    moved = 0 if figures.optimizer == "none" else rank.parameters + rank.gradients + rank.optimizer
    yield event(_REST, "optimizer", end, moved / next(iter(steps.values())).program.plan.cost.memory)


_Node = tuple[str, str, float, float, dict[str, Any]]


def _nodes(step: CountedStep, action: PipelineAction, last: int) -> Iterator[_Node]:
    """Yields lane, name, start in the action, seconds and arguments of the nodes that are drawn in an action."""
    from fxpar.ir.program import note
    from fxpar.ir.step import ONCE, PARAMETER, phase_of
    from fxpar.text.printing import target_name

    times, nodes = step.times, {node.name: node for node in step.program.graph.nodes}
    origin = times.before if action.phase == "F" else times.forward

    def is_drawn(name: str, start: float) -> bool:
        phase = phase_of(nodes[name])
        if phase in (ONCE, PARAMETER):  # the last microbatch's backward is not over before these are sent
            of = 0 if phase == ONCE else last
            return action.microbatch == of and action.phase == ("F" if phase == ONCE else "B")
        ahead = phase == ""
        return action.microbatch == 0 and action.phase in ("F" if ahead else "BI")

    for name, (start, seconds) in times.products.items():
        if is_drawn(name, start):
            args = {"module": note(nodes[name]).fqn, "operator": target_name(nodes[name])}
            yield _PRODUCTS, name, start - origin, seconds, args
    for travel in times.travels:
        if is_drawn(travel.collective.node, travel.start):
            yield (
                f"collectives over {travel.collective.axis}",
                *_sent(travel, note(nodes[travel.collective.node]).fqn, origin),
            )


def _sent(travel: Travel, module: str, origin: float) -> tuple[str, float, float, dict[str, Any]]:
    one = travel.collective
    args = {"module": module, "operator": one.op, "bytes": one.bytes, "exposed_us": 1e6 * travel.exposed}
    args["beside"] = [name for name, _ in travel.beside]
    return one.node, travel.start - origin, travel.seconds, args


# ---------------------------------------------------------------------- the measured step


def read_trace(path: Path) -> list[Event]:
    """Returns the events of a trace that PyTorch's profiler wrote.

    Raises:
        InputError: the file cannot be read, or is none.
    """
    remedy = "give a file that fxpar.train(…, trace=FOLDER) wrote, such as FOLDER/rank-00000.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is no JSON"
        raise InputError(reason, where=str(path), remedy=remedy) from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InputError("has no list of traceEvents", where=str(path), remedy=remedy)
    if not all(isinstance(event.get("ts", 0), int | float) for event in events):
        raise InputError("has an event whose time is no number", where=str(path), remedy=remedy)
    return events


def measured_events(traced: Sequence[Event]) -> Iterator[Event]:
    """Yields the events of a trace from time 0 on, in processes of their own."""
    starts = [event["ts"] for event in _spans(traced) if event.get("cat") != "Trace"]
    begin = min(starts, default=0.0)
    processes = {pid: number for number, pid in enumerate(dict.fromkeys(str(event.get("pid")) for event in traced))}
    for event in traced:
        moved = {**event, "pid": _MEASURED + processes[str(event.get("pid"))]}
        if isinstance(event.get("ts"), int | float):
            moved["ts"] = event["ts"] - begin
        if event.get("ph") == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": f"measured, {event.get('args', {}).get('name', 'process')}"}
        yield moved


def _spans(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        if event.get("ph") == "X" and all(isinstance(event.get(key), int | float) for key in ("ts", "dur")):
            yield event


def joined_nodes(simulated: Sequence[Event], traced: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns of the nodes that both have the seconds that were expected and measured, the most different first.

    Measured are kernels where the trace has ranges over these, else ranges on the host.
    """
    kinds = Counter(event.get("cat") for event in _spans(traced))
    cat = _DEVICE_RANGE if kinds[_DEVICE_RANGE] else _HOST_RANGE
    ranges: dict[str, list[float]] = {}
    for event in _spans(traced):
        if event.get("cat") == cat:
            ranges.setdefault(str(event.get("name")), []).append(event["dur"] / 1e6)
    nodes: dict[str, Event] = {}
    for event in _spans(simulated):
        if "operator" in event["args"]:
            nodes.setdefault(event["name"], event)
    joined = [
        {
            "node": name,
            "module": event["args"]["module"],
            "simulated": event["dur"] / 1e6,
            "measured": sum(ranges[name]) / len(ranges[name]),
        }
        for name, event in nodes.items()
        if name in ranges
    ]
    return sorted(joined, key=lambda entry: -abs(entry["measured"] - entry["simulated"]))


# ---------------------------------------------------------------------- tables


def _lanes(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns of each lane how many spans it has and how long it is busy."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes: dict[tuple[int, int], list[float]] = {key: [] for key in names}
    for event in _spans(events):
        lanes[event["pid"], event["tid"]].append(event["dur"] / 1e6)
    return [
        {"rank": processes[pid], "lane": names[pid, tid], "spans": len(spans), "seconds": sum(spans)}
        for (pid, tid), spans in lanes.items()
    ]


def _show(stdout: Console, title: str, lanes: Sequence[Mapping[str, Any]]) -> None:
    rows = table("rank", "lane", "spans", "busy", right=("spans", "busy"))
    for lane in lanes:
        rows.add_row(lane["rank"], lane["lane"], str(lane["spans"]), time_text(lane["seconds"]))
    print_table(stdout, title, rows)
    stdout.print("Nodes are drawn of the first microbatch. Seconds are by the plan's cost.", soft_wrap=True)


def _show_joined(stdout: Console, joined: Sequence[Mapping[str, Any]], measured: str) -> None:
    rows = table("node", "module", "simulated", "measured", right=("simulated", "measured"))
    for entry in joined[:_SHOWN]:
        rows.add_row(entry["node"], entry["module"], time_text(entry["simulated"]), time_text(entry["measured"]))
    print_table(stdout, f"\n{len(joined)} nodes of {measured} are products or collectives of this program", rows)
    if len(joined) > _SHOWN:
        stdout.print(f"… {len(joined) - _SHOWN} more that differ less (--json has all)")
    if not joined:
        stdout.print(
            "Ranges of a trace have names of nodes where operations run one by one: trace the plan without compile "
            "and without graphs, with the same model and plan.",
            soft_wrap=True,
        )
