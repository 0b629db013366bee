"""Layers that pose the same problem are solved once, and the whole stays exact.

Enters: a `Problem`. Leaves: the cheapest option of each node, the same as of the whole mixed integer program.

To give all equal layers one solution would not be exact: the best one of a single layer need not fit its neighbours,
and where the first layer differs, tying the others to one another costs up to a percent. Instead the problem is cut
where few values cross, in a transformer where one does, the residual stream. Of what crosses a cut the two sides need
to know the *state* only: the placement of each value, and which of its conversions are paid for. Between two cuts lies
a *segment*. Its least cost for a state at either end is a small mixed integer program of its own, and the least cost
of the whole is the shortest path through the states of all cuts (dynamic programming). Nothing is approximated: a
choice of the whole costs exactly what its segments cost, given the states that it has at the cuts.

Segments are compared as problems, by costs, placements and conversions of all their nodes, with the states at both
ends, and equal ones share their solutions. So the first layer, the last one, and one that a plan pins are merged with
the others where they pose the same problem, and are not where they do not. The number of programs that are solved is
that of distinct layers, whatever the depth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import prod

from fxpar.sharding.problem import Conversion, Given, Place, Problem, Use, cost_of, minimum

# A value at a cut: its placement, and the placements to which it is converted before the cut and needed after it.
State = tuple[int, frozenset[int]]
States = tuple[State, ...]

# States of a cut at most, and nodes between two cuts at least: more cuts make more programs, though smaller ones.
_MOST_STATES, _LEAST_NODES = 32, 12
# Nodes of a problem that takes longer as a whole than its segments.
_WORTHWHILE = 600
# Costs that differ by rounding alone are equal: the first state wins.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class _Crossing:
    """A value that crosses a cut, and its states there."""

    value: Place
    states: States


@dataclass(frozen=True)
class _Segment:
    """What lies between two cuts, in positions of its own.

    Attributes:
        problem: first a node for each value that enters and is used, with an option for each placement, then the nodes.
        entering: states of the values that enter and are used.
        leaving: positions and states of the values that leave, without those that merely pass.
    """

    problem: Problem
    entering: tuple[States, ...]
    leaving: tuple[tuple[Place, States], ...]


# Least costs of a segment by the states at its ends, with the options of its nodes; None where there is no choice.
_Solutions = dict[tuple[States, States], tuple[float, tuple[int, ...]] | None]


def cheapest(problem: Problem) -> tuple[int, ...] | None:
    """Returns the cheapest option of each node; None where there is no choice."""
    return minimum(problem) if len(problem.costs) < _WORTHWHILE else collapsed(problem)


def collapsed(problem: Problem) -> tuple[int, ...] | None:
    """Computes `cheapest` segment by segment, however small the problem is."""
    crossings = _cuts(problem)
    edges = [0, *crossings, len(problem.costs)]
    # Solutions are kept for one problem alone: across problems equal numbers would stand for other placements.
    solutions: dict[_Segment, _Solutions] = {}
    # For each cut and state there: the least cost up to it, the state at the cut before, and options in between.
    paths: list[dict[States, tuple[float, States, tuple[int, ...]]]] = [{(): (0.0, (), ())}]
    uses = [use.user if use.user is not None else len(problem.costs) for use in problem.uses]
    for start, end in pairwise(edges):
        last = len(uses) if end == len(problem.costs) else bisect_left(uses, end)
        inside = problem.uses[bisect_left(uses, start) : last]
        before, behind = crossings.get(start, ()), crossings.get(end, ())
        step = _step(problem, (start, end), inside, before, behind)
        paths.append(_extended(step, solutions.setdefault(step.segment, {}), paths[-1]))
        if not paths[-1]:
            return None
    picks: tuple[int, ...] = ()
    state: States = ()
    for reached in reversed(paths[1:]):
        _, state, segment_picks = reached[state]
        # Backwards, as each cut only remembers the state before it on its cheapest path.
        picks = segment_picks + picks
    return picks


@dataclass(frozen=True)
class _PlacedSegment:
    """A segment, and where its values stand among those that cross the cuts at its ends.

    Attributes:
        entering: for each value that enters and is used its index at the cut before.
        order: for each value at the cut after it the index among those that leave, or, less one and negated, the
            index at the cut before of one that passes.
    """

    segment: _Segment
    entering: tuple[int, ...]
    order: tuple[int, ...]


def _step(
    problem: Problem,
    span: tuple[int, int],
    uses: Sequence[Use],
    before: Sequence[_Crossing],
    behind: Sequence[_Crossing],
) -> _PlacedSegment:
    start, end = span
    used = {use.value for use in uses}
    entering = [i for i, crossing in enumerate(before) if crossing.value in used]
    local: dict[Place, Place] = {before[i].value: (k, 0) for k, i in enumerate(entering)}
    shift = len(entering) - start

    def moved(value: Place) -> Place:
        return local.get(value) or (value[0] + shift, value[1])

    # A value of one placement that nobody converts crosses without a state: it needs no place here.
    local_uses = [use for use in uses if use.value in local or use.value[0] >= start]
    choices = [tuple(dict.fromkeys(placement for placement, _ in before[i].states)) for i in entering]
    local_problem = Problem(
        (*((0.0,) * len(placements) for placements in choices), *problem.costs[start:end]),
        (*(tuple((p,) for p in placements) for placements in choices), *problem.outputs[start:end]),
        tuple(replace(u, user=None if u.user is None else u.user + shift, value=moved(u.value)) for u in local_uses),
    )
    passing = {crossing.value: i for i, crossing in enumerate(before) if crossing.value not in used}
    leaving = [crossing for crossing in behind if crossing.value not in passing]
    order = [-1 - passing[c.value] if c.value in passing else leaving.index(c) for c in behind]
    segment = _Segment(
        local_problem,
        tuple(before[i].states for i in entering),
        tuple((moved(crossing.value), crossing.states) for crossing in leaving),
    )
    return _PlacedSegment(segment, tuple(entering), tuple(order))


def _extended(
    step: _PlacedSegment,
    table: _Solutions,
    reached: Mapping[States, tuple[float, States, tuple[int, ...]]],
) -> dict[States, tuple[float, States, tuple[int, ...]]]:
    """Returns the shortest paths to the cut after a segment, from those to the cut before it."""
    paths: dict[States, tuple[float, States, tuple[int, ...]]] = {}
    ends = list(product(*(states for _, states in step.segment.leaving)))
    for state, (cost, _, _) in reached.items():
        entry = tuple(state[i] for i in step.entering)
        for end in ends:
            if (entry, end) not in table:
                table[entry, end] = _between(step.segment, entry, end)
            solved = table[entry, end]
            if solved is None:
                continue
            total = cost + solved[0]
            target = tuple(end[i] if i >= 0 else state[-1 - i] for i in step.order)
            if target not in paths or total < paths[target][0] * (1 - _ROUNDING):
                paths[target] = (total, state, solved[1])
    return paths


def _between(segment: _Segment, entry: States, end: States) -> tuple[float, tuple[int, ...]] | None:
    """Returns the least cost of a segment between two states, and the options of its nodes."""
    problem = segment.problem
    allowed: dict[int, tuple[int, ...]] = {}
    paid: set[Conversion] = set()
    barred: set[Conversion] = set()
    for node, (placement, converted) in enumerate(entry):
        allowed[node] = (problem.outputs[node].index((placement,)),)
        paid |= {((node, 0), placement, target) for target in converted}
    constant = 0.0
    prices = {(use.value, source, target): price for use in problem.uses for source, target, price in use.prices}
    for (value, states), (placement, converted) in zip(segment.leaving, end, strict=True):
        options = allowed.get(value[0], range(len(problem.costs[value[0]])))
        allowed[value[0]] = tuple(o for o in options if problem.outputs[value[0]][o][value[1]] == placement)
        if not allowed[value[0]]:
            return None
        shared = {target for other, targets in states if other == placement for target in targets}
        for target in sorted(shared):
            key = (value, placement, target)
            if (target in converted) == (key in paid):
                # What the state at the end does not have as paid is not to be used
                # here: the next segment would not know of it.
                barred |= {key} - paid
            elif target in converted and key in prices:
                constant += prices[key]
                paid.add(key)
            else:
                return None  # what is paid for stays so, and what nothing here needs is not paid for here
    constraints = Given(allowed, paid, barred)
    picks = minimum(problem, constraints)
    return None if picks is None else (cost_of(problem, picks, constraints) + constant, picks[len(entry) :])


def _cuts(problem: Problem) -> dict[int, tuple[_Crossing, ...]]:
    """Returns positions to cut before, with what crosses there: where the states are fewest, well apart."""
    crossings = {}
    known: dict[tuple[Place, int], States] = {}
    spans: dict[Place, _Spans] = {}
    users: dict[Place, list[int]] = {}
    for position, values in _open_values(problem):
        crossing = tuple(_Crossing(v, _states(problem, known, spans, users, uses, position)) for v, uses in values)
        # Each pair of states at the ends of a segment is a program of its own, so their number counts squared.
        if prod(len(c.states) for c in crossing) <= _MOST_STATES:
            crossings[position] = crossing
    counts = {position: prod(len(c.states) for c in crossing) for position, crossing in crossings.items()}
    taken: list[int] = []
    # Fewest states first: in a transformer the residual stream wins, and equal layers are cut at equal places.
    for position in sorted(counts, key=lambda position: (counts[position], position)):
        near = range(position - _LEAST_NODES + 1, position + _LEAST_NODES)
        if any(counts.get(other, counts[position]) < counts[position] for other in near):
            continue
        i = bisect_left(taken, position)
        if not any(abs(other - position) < _LEAST_NODES for other in taken[max(i - 1, 0) : i + 1]):
            taken.insert(i, position)
    return {position: crossings[position] for position in taken}


def _open_values(problem: Problem) -> Iterator[tuple[int, list[tuple[Place, list[Use]]]]]:
    """Yields for each position the values that are made before it and used at or after it, if they are few.

    Left out are values of one placement in which all users want them.
    """
    by_value: dict[Place, list[Use]] = {}
    for use in problem.uses:
        by_value.setdefault(use.value, []).append(use)
    end = len(problem.costs)
    opened: dict[int, list[Place]] = {}
    last: dict[Place, int] = {}
    for value, uses in by_value.items():
        placements = problem.placements(value)
        if len(placements) > 1 or any(tuple(target for target, _ in use.wanted) != placements for use in uses):
            opened.setdefault(value[0], []).append(value)
            last[value] = max(end if use.user is None else use.user for use in uses)
    live: list[Place] = []
    for position in range(1, end):
        live = [value for value in (*live, *opened.get(position - 1, ())) if last[value] >= position]
        if 2 ** len(live) <= _MOST_STATES:
            yield position, [(value, by_value[value]) for value in live]


# Conversions of a value that some of its uses would pay, from and to, with the first and the last of these uses.
_Spans = Mapping[tuple[int, int], tuple[int, int]]


def _states(
    problem: Problem,
    known: dict[tuple[Place, int], States],
    spans: dict[Place, _Spans],
    users: dict[Place, list[int]],
    uses: Sequence[Use],
    position: int,
) -> States:
    """Returns the states of a value at a cut, by all its uses in order; they change where one of them lies between."""
    value, end = uses[0].value, len(problem.costs)
    if value not in users:
        users[value] = [end if use.user is None else use.user for use in uses]
    count = bisect_left(users[value], position)
    if (value, count) not in known:
        if value not in spans:
            spans[value] = _spans_of(uses)
        known[value, count] = tuple(_states_of(problem.placements(value), spans[value], count))
    return known[value, count]


def _spans_of(uses: Sequence[Use]) -> _Spans:
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for index, use in enumerate(uses):
        for source, target, price in use.prices:
            if price > 0.0:
                spans[source, target] = spans.get((source, target), (index, index))[0], index
    return spans


def _states_of(placements: Sequence[int], spans: _Spans, count: int) -> Iterator[State]:
    """Yields the states at a cut after `count` uses: what uses on both sides would pay may be paid."""
    for placement in placements:
        both = (
            target for (source, target), (first, last) in spans.items() if source == placement and first < count <= last
        )
        shared = sorted(both)
        for chosen in range(len(shared) + 1):
            yield from ((placement, frozenset(targets)) for targets in combinations(shared, chosen))
