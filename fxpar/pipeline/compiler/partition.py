"""Where the stages of a pipeline begin, and why; and when its ranks run stages that take different times.

Enters: a program whose sizes are a rank's. Leaves: a `StageChoice`, and of each of its cuts a `CutExplanation`; of the
seconds of all stages a `PipelineRun`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fxpar.cost.layers import layers
from fxpar.cost.measure import storages
from fxpar.cost.stage_cut_points import Divisible, candidates, divisible
from fxpar.cost.verdict import PipelineAction, PipelineRun
from fxpar.errors import InputError
from fxpar.ir.program import Program, describe, note
from fxpar.pipeline.compiler.builtin_schedules import schedule_of
from fxpar.pipeline.compiler.simulation import Costs, simulate
from fxpar.plan.plan import Plan

# Where a pipeline's stages end: exact over the places at which a program may be cut.

# Stages may be so much longer than the shortest longest one, and hold so much more than the least most, for the sake of
# what is asked for next.
SLACK = 0.01


@dataclass(frozen=True)
class UnitCosts:
    """The units of a program in order; place i stands in front of unit i.

    Attributes:
        seconds: of each unit, forward and backward.
        state_bytes: bytes of parameters, gradients and optimizer state of each.
        saved_bytes: bytes that each keeps of a microbatch for its backward.
        crossing: bytes that cross each place, that in front of the first unit, where nothing does, included.
        send: seconds that crossing takes, likewise.
    """

    seconds: Sequence[float]
    state_bytes: Sequence[float]
    saved_bytes: Sequence[float]
    crossing: Sequence[float]
    send: Sequence[float]


def best_cuts(units: UnitCosts, ranks: int, virtual: int, fixed: Mapping[int, int]) -> tuple[int, ...]:
    """Returns the places of the cuts, ascending; `ranks · virtual` stages.

    Args:
        units: at least as many as stages.
        ranks: of the pipeline; stage k lies on rank k modulo that, and keeps `ranks` − that microbatches at once.
        virtual: stages of each rank.
        fixed: places that are asked for, by number of the stage that begins there.

    Raises:
        ValueError: no cut satisfies `fixed`.
    """
    cutting = _Cutting(units, ranks, ranks * virtual, fixed)
    longest = cutting.least(cutting.length, max) * (1 + SLACK)
    most = cutting.least(cutting.bytes, max, ((cutting.length, longest),)) * (1 + SLACK)
    return cutting.best(cutting.crossing, _sum, ((cutting.length, longest), (cutting.bytes, most)))


@dataclass(frozen=True)
class Goals:
    """What cuts are chosen by, in this order.

    Attributes:
        longest: seconds of a microbatch of the longest stage: what is computed, received and sent.
        most: bytes of the stage that has most.
        crossing: bytes that cross all cuts.
        stages: seconds and bytes of each stage.
    """

    longest: float
    most: float
    crossing: float
    stages: tuple[tuple[float, float], ...]


def goals_of(units: UnitCosts, ranks: int, cuts: Sequence[int]) -> Goals:
    """Returns what some cuts reach."""
    cutting = _Cutting(units, ranks, len(cuts) + 1, {})
    ends = stage_ends(cuts, len(units.seconds))
    stages = tuple((cutting.length(i, a, b), cutting.bytes(i, a, b)) for i, (a, b) in enumerate(ends))
    seconds, memory = zip(*stages, strict=True)
    return Goals(max(seconds), max(memory), sum(units.crossing[cut] for cut in cuts), stages)


Measure = Callable[[int, int, int], float]
_INFINITE = float("inf")


def _sum(before: float, added: float) -> float:
    return before + added


class _Cutting:
    """Dynamic programming over (stage, place of its end).

    A *measure* is a number of a stage, of its number and the places at which it begins and ends.
    """

    def __init__(self, units: UnitCosts, ranks: int, stages: int, fixed: Mapping[int, int]) -> None:
        self._units, self._ranks, self._stages, self._fixed = units, ranks, stages, fixed
        self._count = len(units.seconds)
        sums = (units.seconds, units.state_bytes, units.saved_bytes)
        self._seconds, self._held, self._kept = ([0.0, *accumulate(values)] for values in sums)

    def length(self, stage: int, start: int, end: int) -> float:
        """Returns seconds of a microbatch: what is computed, received and sent."""
        sent = self._units.send[end] if end < self._count else 0.0
        return self._seconds[end] - self._seconds[start] + self._units.send[start] + sent

    def bytes(self, stage: int, start: int, end: int) -> float:
        """Returns bytes of the stage's weights, and of what its microbatches in flight keep."""
        in_flight = self._ranks - stage % self._ranks
        return self._held[end] - self._held[start] + in_flight * (self._kept[end] - self._kept[start])

    def crossing(self, stage: int, start: int, end: int) -> float:
        """Returns bytes that the stage receives."""
        return self._units.crossing[start]

    def least(
        self, measure: Measure, join: Callable[[float, float], float], within: Sequence[tuple[Measure, float]] = ()
    ) -> float:
        """Returns the least of a measure, joined over all stages, where others stay within bounds."""
        return self._table(measure, join, within)[-1][self._count][0]

    def best(
        self, measure: Measure, join: Callable[[float, float], float], within: Sequence[tuple[Measure, float]]
    ) -> tuple[int, ...]:
        """Returns the cuts of `least`; of several the earliest."""
        table = self._table(measure, join, within)
        place, cuts = self._count, []
        for stage in range(self._stages - 1, 0, -1):
            place = table[stage][place][1]
            cuts.append(place)
        return tuple(cuts[::-1])

    def _table(
        self, measure: Measure, join: Callable[[float, float], float], within: Sequence[tuple[Measure, float]]
    ) -> list[dict[int, tuple[float, int]]]:
        """Returns, by stage and place of its end, the least of the stages up to it, and where it begins."""
        rows: list[dict[int, tuple[float, int]]] = []
        before: dict[int, tuple[float, int]] = {0: (0.0, 0)}
        for stage in range(self._stages):
            row: dict[int, tuple[float, int]] = {}
            for end in self._ends(stage):
                for start, (value, _) in before.items():
                    if start >= end or any(other(stage, start, end) > bound for other, bound in within):
                        continue
                    joined = join(value, measure(stage, start, end))
                    # Strictly less, so that of equal cuts the earliest stands, on every rank and in every run.
                    if joined < row.get(end, (_INFINITE, 0))[0]:
                        row[end] = joined, start
            rows.append(row)
            before = row
        if self._count not in rows[-1]:
            raise ValueError("no cut leaves each stage a unit")
        return rows

    def _ends(self, stage: int) -> Sequence[int]:
        """Returns where a stage may end, so that those after it have a unit each."""
        if stage == self._stages - 1:
            return (self._count,)
        if stage + 1 in self._fixed:
            return (self._fixed[stage + 1],)
        return range(stage + 1, self._count - (self._stages - 1 - stage) + 1)


def stage_ends(cuts: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Returns where each stage begins and ends."""
    return list(pairwise((0, *cuts, count)))


@dataclass(frozen=True)
class StageChoice:
    """A program's stages.

    Attributes:
        divisible: what can be divided.
        bounds: places between its operations at which it may be cut, with its beginning and its end.
        units: what stands between two neighbouring ones.
        cuts: those chosen, by number in `bounds`, ascending.
        fixed: those that the plan asks for, by the stage that begins there.
    """

    divisible: Divisible
    bounds: tuple[int, ...]
    units: UnitCosts
    cuts: tuple[int, ...]
    fixed: Mapping[int, int]


def choose_stages(program: Program) -> StageChoice:
    """Returns the stages that the plan asks for; what it does not say is chosen.

    Raises:
        InputError: there are fewer places than stages need, or the plan's cannot be.
    """
    plan = program.plan
    forward = divisible(program)
    count = plan.pipeline_stages
    starts = _asked(forward, plan.pipeline.stages, count)
    order = [0, *(place for _, place in sorted(starts.items()))]
    if any(later <= sooner for sooner, later in pairwise(order)):
        raise InputError(
            "the modules do not run in the order of their stages, or the first one runs first of all",
            where="pipeline.stages",
            remedy="give each stage a module that runs later, and leave stage 0 out",
        )
    late = [number for number, place in starts.items() if place > forward.last]
    if late:
        raise InputError(
            f"stage {late[0]} would begin behind the loss, which is the last stage's",
            where="pipeline.stages",
            remedy="give each stage a module that runs before the loss is there",
        )
    places = candidates(forward, count, tuple(starts.values()))
    if len(places) < count - 1:
        raise InputError(
            f"{count} stages need {count - 1} places to cut at, and the model has {len(places)}",
            where="pp",
            remedy="ask for fewer stages",
        )
    bounds = (0, *places, len(forward.order))
    units = _units(forward, bounds)
    fixed = {stage: bounds.index(place) for stage, place in starts.items()}
    try:
        cuts = best_cuts(units, plan.pp, plan.virtual_stages, fixed)
    except ValueError as error:
        remedy = "give other modules, in the order in which they run"
        raise InputError(f"{error} with these beginnings", where="pipeline.stages", remedy=remedy) from None
    return StageChoice(forward, bounds, units, cuts, fixed)


def _units(forward: Divisible, bounds: Sequence[int]) -> UnitCosts:
    """Returns what stands between two neighbouring places."""
    cost = forward.program.plan.cost.on(("pp",))
    spans = list(pairwise(bounds))
    crossing = [forward.live[place] for place in bounds[:-1]]
    return UnitCosts(
        [sum(forward.seconds[a:b]) for a, b in spans],
        [sum(forward.state_bytes[a:b]) for a, b in spans],
        [sum(forward.saved_bytes[a:b]) for a, b in spans],
        crossing,
        # Without latency, which occupies no rank: the first and the last stage, which have one neighbour alone, would
        # take all of a model that is quicker than it.
        [size / cost.bandwidth for size in crossing],
    )


def _asked(forward: Divisible, stages: Mapping[str, int] | Sequence[int], count: int) -> dict[int, int]:
    """Returns places that the plan asks for, by number of the stage that begins there.

    Raises:
        InputError: a module computes nothing, or the layers are others.
    """
    if isinstance(stages, Mapping):
        return {number: _beginning(forward, name) for name, number in sorted(stages.items(), key=lambda e: e[1])}
    if not stages:
        return {}
    runs = layers(forward.program, storages(forward.program, frozenset()))
    if sum(stages) != len(runs):
        raise InputError(
            f"{' + '.join(map(str, stages))} layers are {sum(stages)}, and the model has {len(runs)}",
            where="pipeline.stages",
            remedy="give numbers whose sum is that, or modules at which stages begin",
        )
    starts = [next(forward.places[node] for node in run if node in forward.places) for run in runs]
    return {number: starts[sum(stages[:number])] for number in range(1, count)}


def _beginning(forward: Divisible, name: str) -> int:
    for node in forward.order:
        fqn = note(node).fqn
        if fqn == name or fqn.startswith(f"{name}."):
            return forward.places[node]
    is_everywhere = any(note(node).fqn == name or note(node).fqn.startswith(f"{name}.") for node in forward.anywhere)
    raise InputError(
        "each stage computes this module for itself"
        if is_everywhere
        else "no operation of the program is of this module",
        where=f"pipeline.stages[{name!r}]",
        remedy="name a module as the model does: `fxpar trace` lists them behind each node",
    )


def cuts_as_held(forward: Divisible, holders: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Returns the places at which parameters come to be on the stages that hold them; of several those that least
    crosses.

    Raises:
        InputError: an operation reads parameters of different stages, or one of an earlier stage than is due.
    """
    count = forward.program.plan.pipeline_stages
    # By stage, the last place that must be on it or before, and the first that must be on it or after.
    last, first = [-1] * count, [len(forward.order)] * count + [forward.last + 1]
    now = 0
    for node in forward.order:
        names = [name for name in forward.reads[node] if name in holders]
        legal = set(range(now, count)).intersection(*(holders[name] for name in names))
        if not legal:
            raise InputError(
                f"reads {', '.join(sorted(names))}, which is on no stage behind those of what runs before",
                where=describe(node),
                remedy="call the module so that parameters are used in the order in which the example uses them",
            )
        if names:
            now = min(legal)
            last[now] = forward.places[node]
            first[now] = min(first[now], forward.places[node])
    cuts, start = [], 0
    for number in range(1, count):
        low = max(start, *last[:number]) + 1
        # Stages up to the one that reads at a place need an operation each before that, if they read no parameter.
        high = min(place - behind for behind, place in enumerate(first[number:]))
        if low > high:
            raise InputError(
                f"leaves stage {number} of {count} nothing to compute",
                where="this call",
                remedy="call the module with what the example had",
            )
        start = min(range(low, high + 1), key=lambda place: (forward.live[place], -place))
        cuts.append(start)
    return cuts


@dataclass(frozen=True)
class CutExplanation:
    """Why a stage begins where it does.

    Attributes:
        stage: the one that begins there.
        behind: the operation after which the cut is, with its module.
        before: the one in front of which it is.
        reason: the plan's word, or what the runner-up would cost more.
        seconds: of a microbatch, of the stage in front of the cut and of the one after it, with what they send.
        bytes: of these stages: weights, what trains them, and what microbatches in flight keep.
        goals: of all stages together.
        runner_up: the operation after which the next best cut is, the other cuts being chosen anew; empty where there
            is none.
        other: what the goals would be there.
    """

    stage: int
    behind: str
    before: str
    reason: str
    seconds: tuple[float, float]
    bytes: tuple[float, float]
    goals: Goals
    runner_up: str = ""
    other: Goals | None = None


def explain_cut(program: Program, stage: int) -> CutExplanation:
    """Explains where a stage begins.

    Args:
        program: as for `choose_stages`.
        stage: one but the first.
    """
    plan, choice = program.plan, choose_stages(program)
    units, cuts = choice.units, choice.cuts
    goals = goals_of(units, plan.pp, cuts)
    place = cuts[stage - 1]
    sides = [goals.stages[stage - 1], goals.stages[stage]]
    explanation = CutExplanation(
        stage,
        _behind(choice, place),
        describe(choice.divisible.order[choice.bounds[place]]),
        "the plan says so",
        (sides[0][0], sides[1][0]),
        (sides[0][1], sides[1][1]),
        goals,
    )
    if stage in choice.fixed:
        return explanation
    others = {}
    for near in (place - 1, place + 1):
        try:
            cut = best_cuts(units, plan.pp, plan.virtual_stages, {**choice.fixed, stage: near})
        except (ValueError, IndexError):
            continue
        others[near] = goals_of(units, plan.pp, cut)
    if not others:
        return _because(explanation, "no other place leaves each stage something", "", None)
    near = min(others, key=lambda key: _rank(others[key], goals))
    return _because(explanation, _reason(goals, others[near]), _behind(choice, near), others[near])


def _because(explanation: CutExplanation, reason: str, runner_up: str, other: Goals | None) -> CutExplanation:
    """Returns the explanation with a reason."""
    return dataclasses.replace(explanation, reason=reason, runner_up=runner_up, other=other)


def _behind(choice: StageChoice, place: int) -> str:
    return describe(choice.divisible.order[choice.bounds[place] - 1])


def _rank(other: Goals, best: Goals) -> tuple[float, float, float]:
    """Returns by how much more than the slack it misses each goal, one after the other."""
    longer, more = (max(0.0, a - b * (1 + SLACK)) for a, b in ((other.longest, best.longest), (other.most, best.most)))
    return longer, more, other.crossing


def _reason(goals: Goals, other: Goals) -> str:
    longer, more, _ = _rank(other, goals)
    if longer > 0:
        return "with the next best the longest stage takes longer"
    if more > 0:
        return "with the next best the longest stage takes as long, and the one that has most holds more"
    if other.crossing > goals.crossing:
        return "with the next best the stages are as long and hold as much, and more crosses the cuts"
    return "with the next best all is the same: the first of them is taken"


# How long a step takes whose stages take different times.

_UNITS = 10**6  # in which the longest stage is timed


def run_pipeline(plan: Plan, stages: Sequence[tuple[float, float]]) -> PipelineRun:
    """Returns when the ranks of a pipeline run what.

    Args:
        plan: whose schedule runs.
        stages: of each the seconds of the forward and of the backward of a microbatch. Where a schedule has two parts
            of a backward, each takes half of it.

    Raises:
        ScheduleError: the schedule does not run with the plan's microbatches.
    """
    schedule = schedule_of(plan, plan.microbatches).schedule
    unit = max(max(stage) for stage in stages) / _UNITS or 1.0
    costs = [Costs(*(max(1, round(part / unit)) for part in (ahead, back / 2, back / 2))) for ahead, back in stages]
    timeline = simulate(schedule, costs)
    return PipelineRun(
        tuple(
            tuple(
                PipelineAction(action.stage, action.phase.value, action.microbatch, start * unit, end * unit)
                for action, start, end in zip(actions, starts, ends, strict=True)
            )
            for actions, starts, ends in zip(schedule.ranks, timeline.starts, timeline.ends, strict=True)
        )
    )
