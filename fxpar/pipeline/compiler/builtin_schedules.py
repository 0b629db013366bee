"""The schedules that fxpar knows, by name, and which of them a plan names.

Enters: a name and sizes. Leaves: a `Schedule`, unverified; of a plan a verified one. Needs no torch.

Written with p ranks, v chunks a rank, M microbatches in groups of N. The *table* is the order of a rank's forwards: for
each group of N microbatches, for each chunk, the microbatches of the group; a short last group keeps what is left. The
backwards come in the order of the table with the chunks reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fxpar.errors import ScheduleError, shown
from fxpar.pipeline.compiler.schedules import (
    Action,
    Phase,
    Schedule,
    Style,
    leading_forwards,
    read_schedule,
    refuse_many,
)
from fxpar.pipeline.compiler.simulation import VerifiedSchedule, verified
from fxpar.plan.plan import Plan

F, B, I, W = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT  # noqa: E741

# A chunk and a microbatch of it.
_Cell = tuple[int, int]
# The same with what is run of it.
_Step = tuple[Phase, int, int]


# Steps of a rank, and its warmup where that cannot be read off them.
_Made = tuple[list[_Step], int | None]


@dataclass(frozen=True)
class _ScheduleSizes:
    """Ranks, chunks, microbatches and their groups, and the table of these."""

    p: int
    v: int
    m: int
    n: int

    @cached_property
    def forwards(self) -> list[_Cell]:
        """Returns the table."""
        groups = (range(start, min(start + self.n, self.m)) for start in range(0, self.m, self.n))
        return [(chunk, microbatch) for group in groups for chunk in range(self.v) for microbatch in group]

    @cached_property
    def backwards(self) -> list[_Cell]:
        """Returns the table with the chunks reversed."""
        return [(self.v - 1 - chunk, microbatch) for chunk, microbatch in self.forwards]


def build_schedule(
    name: str, *, pp: int, microbatches: int, virtual_stages: int = 1, group_size: int | None = None
) -> Schedule:
    """Returns the schedule of that name; unverified.

    - `gpipe`: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965); with several chunks, chunk by
      chunk.
    - `1f1b`: after the warmup one forward, one backward (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    - `interleaved_1f1b`: the same with several chunks a rank, of each a group of microbatches at a time (there); with
      one chunk it is `1f1b`.
    - `zb_h1`: `1f1b` with the weight parts of backwards moved into the bubble, within the memory of `1f1b` (Qi et al.
      2024, arXiv 2401.10241, section 2.3); with several chunks, interleaved.
    - `zbv`: two chunks a rank, the second on the way back (there, section 6).
    - `forward_only`: evaluation.

    Args:
        name: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        microbatches: of a step.
        virtual_stages: chunks of each rank.
        group_size: microbatches that a rank runs of one chunk before it takes the next; pp by default. With one chunk
            it says nothing.

    Raises:
        ScheduleError: there is no such schedule, or it cannot have these sizes.
    """
    if name not in _MAKERS:
        raise ScheduleError(f"{shown(name)} is unknown", where="schedule", remedy=f"choose {', '.join(SCHEDULES)}")
    numbers = {"pp": pp, "virtual_stages": virtual_stages, "microbatches": microbatches}
    for where, number in (numbers | ({} if group_size is None else {"group_size": group_size})).items():
        if type(number) is not int or number < 1:
            raise ScheduleError(
                f"must be a positive integer, got {shown(number)}", where=where, remedy="give a number from 1 on"
            )
    refuse_many(pp, virtual_stages, microbatches, "schedule")
    if virtual_stages > 1 and pp == 1:
        reason = f"{virtual_stages} stages a rank need a pipeline, and pp=1"
        raise ScheduleError(reason, where="virtual_stages", remedy="give pp of at least 2, or leave virtual_stages=1")
    _check(name, pp, virtual_stages, microbatches, group_size)
    grouped = name in _GROUPED and virtual_stages > 1
    sizes = _ScheduleSizes(pp, virtual_stages, microbatches, (group_size or pp) if grouped else microbatches)
    style = Style.V if name == "zbv" else Style.LOOP
    steps = [_MAKERS[name](sizes, rank) for rank in range(pp)]
    ranks = tuple(_actions(order, style, rank, pp) for rank, (order, _) in enumerate(steps))
    warmup = tuple(leading_forwards(a) if w is None else w for a, (_, w) in zip(ranks, steps, strict=True))
    return Schedule(name, ranks, virtual_stages, microbatches, warmup, style, sizes.n if grouped else None)


def group_sizes(pp: int, microbatches: int) -> list[int]:
    """Returns the group sizes that a schedule of several chunks can have, ascending (SPEC section 3): p ≤ N ≤ M, and
    the last group is whole or not smaller than p."""
    every = range(pp, microbatches + 1)
    return [size for size in every if microbatches % size == 0 or microbatches % size >= pp]


def _check(name: str, pp: int, virtual_stages: int, microbatches: int, group_size: int | None) -> None:
    if name == "1f1b" and virtual_stages > 1:
        reason = f"1f1b has one stage a rank, and virtual_stages={virtual_stages}"
        raise ScheduleError(reason, where="schedule", remedy="choose interleaved_1f1b, or leave virtual_stages=1")
    if name == "zbv" and virtual_stages != 2:
        reason = f"zbv has two stages a rank, and virtual_stages={virtual_stages}"
        raise ScheduleError(reason, where="schedule", remedy="give virtual_stages=2, or choose zb_h1")
    if group_size is not None and name not in _GROUPED:
        reason = f"{name} has no groups of microbatches, and group_size={shown(group_size)}"
        raise ScheduleError(reason, where="group_size", remedy="leave it out, or choose interleaved_1f1b")
    if virtual_stages == 1 or name not in _BOUND:
        return
    if microbatches < pp:
        raise ScheduleError(
            f"{name} of {virtual_stages} stages a rank needs a microbatch for each of the {pp} ranks, and "
            f"microbatches={microbatches}",
            where="microbatches",
            remedy=f"give at least {pp}, leave virtual_stages=1, or choose gpipe",
        )
    size, legal = group_size or pp, group_sizes(pp, microbatches)
    if size not in legal:
        rest = microbatches % size
        last = "" if size > microbatches or size < pp else f": the last group has {rest} of them, fewer than pp={pp}"
        raise ScheduleError(
            f"{microbatches} microbatches cannot be run in groups of {size} by {pp} ranks{last}",
            where="group_size",
            remedy=f"choose {_some(legal)}, or another number of microbatches",
        )


def _some(numbers: Sequence[int]) -> str:
    shown_numbers = [*numbers[:8], "…", numbers[-1]] if len(numbers) > 10 else numbers
    return " or ".join(filter(None, (", ".join(map(str, shown_numbers[:-1])), str(shown_numbers[-1]))))


# ---------------------------------------------------------------------- orders of a rank


def _forward_only(sizes: _ScheduleSizes, rank: int) -> _Made:
    return [(F, *cell) for cell in sizes.forwards], None


def _gpipe(sizes: _ScheduleSizes, rank: int) -> _Made:
    return _alternating(sizes, sizes.m * sizes.v)


def _one_forward_one_backward(sizes: _ScheduleSizes, rank: int) -> _Made:
    """Returns the order of a rank, ahead by the forwards between its first one and the gradient that comes back."""
    behind = sizes.p - 1 - rank
    ahead = behind if sizes.v == 1 else 2 * behind + (sizes.v - 1) * sizes.n
    return _alternating(sizes, min(ahead, sizes.m * sizes.v))


def _zb_h1(sizes: _ScheduleSizes, rank: int) -> _Made:
    """Runs weight parts r input parts later on rank r: all ranks then hold as many activations as rank 0 of `1f1b`."""
    warmup = min(sizes.p - 1 - rank + (sizes.v - 1) * sizes.n, sizes.m * sizes.v)
    return _alternating(sizes, warmup, behind=rank)


def _alternating(sizes: _ScheduleSizes, warmup: int, behind: int | None = None) -> tuple[list[_Step], int]:
    """Returns the warmup, then one forward and one backward, then the rest of the backwards (the cooldown).

    Args:
        sizes: of the schedule.
        warmup: forwards at first.
        behind: input parts of backwards by which weight parts come later; backwards stay whole by default.

    Returns:
        The steps, and the warmup.
    """
    forwards, backwards = sizes.forwards, sizes.backwards
    steps: list[_Step] = [(F, *cell) for cell in forwards[:warmup]]
    for place, cell in enumerate(backwards):
        steps += [(F, *ahead) for ahead in forwards[warmup + place : warmup + place + 1]]
        steps.append((B if behind is None else I, *cell))
        if behind is not None and place >= behind:
            steps.append((W, *backwards[place - behind]))
    if behind is not None:
        steps += [(W, *cell) for cell in backwards[max(len(backwards) - behind, 0) :]]
    return steps, warmup


def _zbv(sizes: _ScheduleSizes, rank: int) -> _Made:
    """Makes phases of repeated runs, each with the number of times; of each word the microbatches ascend.

    The schedule is that of at least 2p - 1 microbatches, of which those that there are not are left out.
    """
    p, after = sizes.p, sizes.p - rank
    count = max(sizes.m, 2 * p - 1)
    phases = [
        # warmup: the first microbatch comes back, then each one that came back is ended
        ("F0", 2 * after - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", after),
        # steady state
        ("F0 I0 W0 F1 I1 W1", count - (2 * p - 1) + rank),
        ("I0 W0 F1 I1 W1", after - 1),
        # cooldown: weight parts fill what would be bubble
        ("I0 I1", rank),
        ("I0 W0", after),
        ("W1", rank),
        ("W0", rank),
    ]
    steps: list[_Step] = []
    seen: dict[str, int] = {}
    for words, times in phases:
        for word in words.split() * times:
            microbatch = seen[word] = seen.get(word, -1) + 1
            if microbatch < sizes.m:
                steps.append((Phase(word[0]), int(word[1]), microbatch))
    return steps, None


def _actions(steps: list[_Step], style: Style, rank: int, pp: int) -> tuple[Action, ...]:
    stages = {chunk: style.stage(rank, chunk, pp) for chunk in {chunk for _, chunk, _ in steps}}
    return tuple(Action(stages[chunk], phase, microbatch) for phase, chunk, microbatch in steps)


_MAKERS: dict[str, Callable[[_ScheduleSizes, int], _Made]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _one_forward_one_backward,
    "zb_h1": _zb_h1,
    "zbv": _zbv,
    "forward_only": _forward_only,
}
SCHEDULES = tuple(_MAKERS)
# Those that would wait forever with some sizes, and those whose order depends on the size of groups.
_BOUND = ("interleaved_1f1b", "zb_h1")
_GROUPED = ("1f1b", *_BOUND, "forward_only")


# Which stages of a pipeline a rank holds, and in what order it runs them.


def schedule_of(plan: Plan, microbatches: int) -> VerifiedSchedule:
    """Returns the plan's schedule of a step of so many microbatches, with its proof.

    Raises:
        ScheduleError: there is none for them, or it does not run.
    """
    name = plan.schedule or ("1f1b" if plan.virtual_stages == 1 else "interleaved_1f1b")
    sizes = {"pp": plan.pp, "virtual_stages": plan.virtual_stages, "microbatches": microbatches}
    is_named = name in SCHEDULES
    schedule = (
        build_schedule(name, **sizes, group_size=plan.pipeline.group_size)
        if is_named
        else read_schedule(Path(name), **sizes)
    )
    if schedule.forward_only:
        remedy = "choose one that trains; plain calls run forwards alone under any"
        raise ScheduleError("has no backward, and a step would train nothing", where=f"schedule {name}", remedy=remedy)
    proof = verified(schedule)
    if plan.cuda_graphs.impl == "transformer_engine":
        _check_engine(schedule, f"schedule {name}")
    return proof


def _check_engine(schedule: Schedule, where: str) -> None:
    """Checks that Transformer Engine can capture an order.

    Raises:
        ScheduleError: it splits backwards, or runs those of a stage in another order than its forwards.
    """
    remedy = "choose 1f1b, interleaved_1f1b or gpipe, or give CudaGraphs('partial') or CudaGraphs('full_iteration')"
    if schedule.split_backward:
        reason = "splits backwards, and CudaGraphs('transformer_engine') captures whole ones"
        raise ScheduleError(reason, where=where, remedy=remedy)
    for rank, actions in enumerate(schedule.ranks):
        for stage in schedule.stages_of(rank):
            forwards, backwards = ([a.microbatch for a in actions if a[:2] == (stage, phase)] for phase in (F, B))
            # It takes numbers of chunks alone, so that the n-th backward of a chunk is that of its n-th forward.
            if forwards != backwards:
                raise ScheduleError(
                    f"rank {rank} runs the backwards of stage {stage} in another order than its forwards, which "
                    "CudaGraphs('transformer_engine') cannot capture",
                    where=where,
                    remedy=remedy,
                )


def evaluation_of(schedule: Schedule) -> VerifiedSchedule:
    """Returns a forward alone through the stages of a schedule."""
    ranks = [[Action(stage, Phase.FORWARD, 0) for stage in sorted(schedule.stages_of(r))] for r in range(schedule.pp)]
    forward = replace(schedule, name="evaluation", ranks=tuple(map(tuple, ranks)), microbatches=1)
    return verified(forward)


def rank_of(plan: Plan) -> tuple[int, ...]:
    """Returns, for each stage of a pipeline, the place of the rank that holds it."""
    return schedule_of(plan, plan.microbatches).schedule.rank_of


def local_stages(plan: Plan, place: int) -> tuple[int, ...]:
    """Returns the stages of the rank at a place of the pipeline, in order; none without a pipeline."""
    if plan.pp == 1:
        return ()
    return schedule_of(plan, plan.microbatches).schedule.stages_of(place)
