"""Orders beside those of torch.distributed.pipelining, whose vocabulary is ours."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from fxpar.pipeline.compiler.builtin_schedules import build_schedule
from fxpar.pipeline.compiler.schedules import Schedule, parse_schedule, print_schedule
from fxpar.pipeline.compiler.simulation import verified

COMPUTED = {"F", "B", "I", "W"}


def words(order: Mapping[int, Sequence[Any]]) -> list[list[str]]:
    """What each rank computes; idle steps and reductions of gradients follow from it."""
    ranks = (order[rank] for rank in range(len(order)))
    return [[str(a) for a in actions if a is not None and a.computation_type.value in COMPUTED] for actions in ranks]


def bare(cls: Any, pp: int, virtual_stages: int, microbatches: int) -> Any:
    """A schedule of torch's with what its order is made of; its constructor wants process groups."""
    found = cls.__new__(cls)
    rounds = max(1, microbatches // pp)
    found.pp_group_size, found.n_local_stages, found._n_microbatches = pp, virtual_stages, microbatches
    found.number_of_rounds, found.microbatches_per_round = rounds, microbatches // rounds
    found.num_stages = found._num_stages = pp * virtual_stages
    return found


def single(cls: Any, pp: int, microbatches: int) -> list[list[str]]:
    return words(bare(cls, pp, 1, microbatches)._get_pipeline_order())


def several(cls: Any, pp: int, virtual_stages: int, microbatches: int) -> list[list[str]]:
    found = bare(cls, pp, virtual_stages, microbatches)
    return words({rank: found._calculate_single_rank_operations(rank) for rank in range(pp)})


def ours(schedule: Schedule) -> list[list[str]]:
    verified(schedule)
    return [[str(action) for action in actions] for actions in schedule.ranks]


@pytest.mark.parametrize("pp", [1, 2, 4, 5])
@pytest.mark.parametrize("microbatches", [5, 8, 13])
def test_single_stages(pp: int, microbatches: int) -> None:
    mine = ours(build_schedule("gpipe", pp=pp, microbatches=microbatches))
    assert mine == single(theirs.ScheduleGPipe, pp, microbatches)
    # What torch prints of the last rank starts with microbatch 1, of as many as there are; it does not run that.
    mine = ours(build_schedule("1f1b", pp=pp, microbatches=microbatches))
    assert mine[:-1] == single(theirs.Schedule1F1B, pp, microbatches)[:-1]


@pytest.mark.parametrize(
    ("pp", "virtual_stages", "microbatches"),
    [(2, 2, 4), (4, 2, 8), (4, 2, 4), (4, 3, 12), (3, 4, 9), (4, 2, 10), (4, 2, 12), (8, 2, 24)],
)
def test_several_stages(pp: int, virtual_stages: int, microbatches: int) -> None:
    classes = {
        "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
        "zb_h1": theirs.ScheduleInterleavedZeroBubble,
    }
    group_size = microbatches // (microbatches // pp)
    sizes = {"pp": pp, "virtual_stages": virtual_stages, "microbatches": microbatches, "group_size": group_size}
    for name, cls in classes.items():
        assert ours(build_schedule(name, **sizes)) == several(cls, pp, virtual_stages, microbatches), name


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 4), (4, 8), (3, 6), (5, 15)])
def test_zero_bubble_of_single_stages(pp: int, microbatches: int) -> None:
    mine = ours(build_schedule("zb_h1", pp=pp, microbatches=microbatches))
    assert mine == several(theirs.ScheduleInterleavedZeroBubble, pp, 1, microbatches)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 1), (2, 4), (4, 3), (4, 8), (3, 7), (5, 20)])
def test_zero_bubble_in_a_v(pp: int, microbatches: int) -> None:
    mine = ours(build_schedule("zbv", pp=pp, virtual_stages=2, microbatches=microbatches))
    assert mine == several(theirs.ScheduleZBVZeroBubble, pp, 2, microbatches)


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "zb_h1", "zbv"])
def test_torch_reads_our_text_and_finds_nothing_wrong(name: str) -> None:
    schedule = build_schedule(name, pp=4, virtual_stages=2, microbatches=8)
    lines = print_schedule(schedule).splitlines()
    order = {rank: [theirs._Action.from_str(word) for word in line.split(",")] for rank, line in enumerate(lines)}
    found = theirs._validate_schedule(order, 4, 8, 8)
    assert found == dict(enumerate(schedule.rank_of))


def test_a_text_of_torch_with_idle_steps_is_read() -> None:
    found = bare(theirs.ScheduleInterleaved1F1B, 4, 2, 8)
    order = {rank: found._calculate_single_rank_operations(rank) for rank in range(4)}
    text = "\n".join(",".join("" if a is None else str(a) for a in order[rank]) for rank in range(4))
    assert ",," in text
    mine = build_schedule("interleaved_1f1b", pp=4, virtual_stages=2, microbatches=8)
    assert parse_schedule(text, pp=4, virtual_stages=2, microbatches=8).ranks == mine.ranks
