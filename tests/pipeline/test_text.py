"""Schedules of a user's own: what a file may say, and what is refused with its place, the reason and a remedy."""

from pathlib import Path

import pytest

from fxpar.errors import InputError, ScheduleError
from fxpar.pipeline.compiler.schedules import Action, Schedule, Style, parse_schedule, read_schedule
from fxpar.pipeline.compiler.simulation import verified

GOOD = """\
0F0,0F1,0B0,0F2,0B1,0B2  # 1F1B
1F0,1B0,1F1,1B1,1F2,1B2
"""

# What is wrong: text to replace, replacement, message.
WORDS = {
    "no word": (
        "0F1",
        "zero",
        "mine line 1 cell 2: must be an action, got 'zero'; write stage, letter and microbatch as in 2F0",
    ),
    "letter": ("1F1", "1G1", "mine line 2 cell 3: must be an action, got '1G1'"),
    "small letter": ("1F1", "1f1", "must be an action, got '1f1'"),
    "no microbatch": ("1F1", "1F", "must be an action, got '1F'"),
    "no stage": ("1F1", "F1", "must be an action, got 'F1'"),
    "sign": ("1F1", "-1F1", "must be an action, got '-1F1'"),
    "other digits": ("1F1", "1F\N{FULLWIDTH DIGIT TWO}", "must be an action"),
    "spaces for commas": ("0F0,0F1", "0F0 0F1", "line 1 cell 1: must be an action, got '0F0 0F1'"),
    "many digits": ("1F1", f"1F{'9' * 5000}", "must be an action"),
    "send": ("1F1", "1SEND_F1", "'1SEND_F1' is communication, which follows from the order of what is computed; leave"),
    "reduction": ("1B2", "1B2,1REDUCE_GRAD", "'1REDUCE_GRAD' is communication"),
    "sub-actions": ("0F2,0B1", "(0F2;0B1)OVERLAP_F_B", "must be an action, got '(0F2;0B1)OVERLAP_F_B'"),
    "nothing": (GOOD, "# only this\n", "mine: holds no action; write a line for each rank"),
    "commas": (GOOD, ",,\n,", "mine: holds no action"),
    "stages": (
        "1B2",
        "2B2",
        "mine: its 2 ranks cannot share out 3 stages, 0–2, alike; give every rank the same number",
    ),
    "ranks": (
        GOOD,
        GOOD + "2F0\n",
        "mine: has 3 ranks, and 2 were asked for; write a line for each rank, or ask for 3",
    ),
    "more stages": ("1B2", "3B2", "mine: has 2 stages a rank, and 1 were asked for"),
    "microbatches": (
        "1B2",
        "1B3",
        "mine: has 4 microbatches, and 3 were asked for; name every microbatch, or ask for 4",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_text_that_is_no_schedule_is_refused(name: str) -> None:
    old, new, message = WORDS[name]
    assert old in GOOD
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(GOOD.replace(old, new), where="mine", pp=2, virtual_stages=1, microbatches=3)
    assert message in str(caught.value)


# Rank 0 has 0F0,0F1,0B0,0F2,0B1,0B2 and rank 1 has 1F0,1B0,1F1,1B1,1F2,1B2.
FAULTS = {
    "omitted": (",0B1", "", "rank 0: lacks 0B1, the backward of microbatch 1 on stage 0; add 0B1"),
    "omitted forward": ("1F1,", "", "rank 1: lacks 1F1, the forward of microbatch 1 on stage 1"),
    "twice": (
        "0F2,0B1",
        "0F2,0F1,0B1",
        "rank 0, position 4 (0F1): runs a second time, after position 1; take one of the two out",
    ),
    "wrong rank": (
        "1F1",
        "0F1",
        "rank 1, position 2 (0F1): stage 0 is on rank 0; rank 1 holds 1; move it to rank 0, or write another stage",
    ),
    "own order": (
        "1F1,1B1",
        "1B1,1F1",
        "rank 1, position 2 (1B1): needs 1F1, which the rank runs later, at position 3; put 1F1 before 1B1",
    ),
    "no weight part": ("1B1", "1I1", "rank 1: lacks 1W1, the weight part of the backward of microbatch 1 on stage 1"),
    "no input part": ("1B1", "1W1", "rank 1: lacks 1I1, the input part of the backward of microbatch 1 on stage 1"),
    "weight part first": ("1B1", "1W1,1I1", "rank 1, position 3 (1W1): needs 1I1, which the rank runs later"),
    "whole and part": (
        "1B1",
        "1B1,1I1,1W1",
        "rank 1, position 3 (1B1): is the whole backward, and 1I1 at position 4 a part of it; keep 1B1, or 1I1 and 1W1",
    ),
    "crossed": (
        "1F0,1B0,1F1,1B1",
        "1F1,1B1,1F0,1B0",
        "rank 1, position 0 (1F1): waits for the activation of microbatch 1 from stage 0, and message 0 of the "
        "activations from rank 0 to rank 1 is the activation of microbatch 0 from stage 0; run what sends and what "
        "receives in one order on ranks 0 and 1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_schedule_that_cannot_run_is_refused_with_rank_and_position(name: str) -> None:
    old, new, message = FAULTS[name]
    assert old in GOOD
    schedule = parse_schedule(GOOD.replace(old, new), pp=2, virtual_stages=1, microbatches=3)
    with pytest.raises(ScheduleError) as caught:
        verified(schedule)
    assert message in str(caught.value)
    assert isinstance(caught.value, InputError)
    assert caught.value.remedy


def test_two_ranks_that_wait_for_each_other_are_named() -> None:
    """Each by itself is legal: rank 0 wants the first gradient at once, rank 1 all activations before."""
    text = GOOD.replace("0F0,0F1,0B0", "0F0,0B0,0F1")
    assert verified(parse_schedule(text)).schedule.warmup == (0, 0)
    with pytest.raises(ScheduleError) as caught:
        verified(parse_schedule(text.replace("1F0,1B0,1F1", "1F0,1F1,1B0")))
    assert str(caught.value) == (
        "rank 0, position 1 (0B0): waits forever for the gradient of microbatch 0 from stage 1 on rank 1: the ranks "
        "wait in a circle: rank 1, position 1 (1F1), waits for the activation of microbatch 1 from stage 0 on rank 0; "
        "run 0B0 later on rank 0, or 1B0 earlier on rank 1"
    )


def test_a_long_circle_is_told_in_part() -> None:
    with pytest.raises(ScheduleError) as caught:
        verified(parse_schedule("\n".join(["9F0,0F0", *(f"{rank}F0,{9 + rank}F0" for rank in range(1, 9))])))
    assert caught.value.where == "rank 0, position 0 (9F0)"
    assert caught.value.reason.startswith(
        "waits forever for the activation of microbatch 0 from stage 8 on rank 8: the"
    )
    assert "circle: rank 8, position 0 (8F0), waits for the activation of microbatch 0 from stage 7" in str(
        caught.value
    )
    assert caught.value.reason.endswith("from stage 3 on rank 3; … 3 more")


def test_both_ways_of_sharing_out_stages_are_read_and_no_other() -> None:
    loop = "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n"
    v = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    assert verified(parse_schedule(loop)).schedule.style is Style.LOOP
    assert verified(parse_schedule(v)).schedule.style is Style.V
    with pytest.raises(ScheduleError, match=r"rank 0, position 1 \(1F0\): stage 1 is on rank 1; rank 0 holds 0, "):
        verified(parse_schedule("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n"))


def test_forwards_alone_are_evaluation_and_microbatches_need_not_ascend() -> None:
    assert verified(parse_schedule("0F1,0F0\n1F1,1F0\n")).schedule.forward_only
    turned = verified(parse_schedule("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"))
    assert turned.peaks == (2, 2)
    assert turned.schedule.warmup == (2, 2)


def test_whole_and_split_backwards_may_stand_side_by_side() -> None:
    proof = verified(parse_schedule("0F0,0F1,0I0,0B1,0W0\n1F0,1B0,1F1,1I1,1W1\n"))
    assert proof.schedule.split_backward
    assert proof.schedule.warmup == (2, 0)
    assert proof.timeline.starts == ((0, 1, 4, 6, 8), (1, 2, 4, 5, 6))


def test_a_file_is_read_and_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(GOOD)
    assert verified(read_schedule(path)).schedule.name == "custom"
    path.write_bytes(b"\xff\xfe0F0")
    for name in ("missing.csv", "mine.csv", ".", "\0"):
        with pytest.raises(ScheduleError, match="name a file with a line for each rank"):
            read_schedule(tmp_path / name)


def test_numbers_beyond_all_bounds_are_refused_at_once() -> None:
    for text in ("0F999999999", "0F0,999999999F0"):
        with pytest.raises(ScheduleError, match="are more than 1000000 forwards"):
            parse_schedule(text)
    with pytest.raises(ScheduleError, match="holds no action; give ranks, stages and microbatches"):
        verified(Schedule("custom", (), 1, 1, ()))


def test_letters_are_no_phases() -> None:
    actions = (Action(0, "F", 0), Action(0, "B", 0))  # type: ignore[arg-type]
    with pytest.raises(
        ScheduleError, match=r"rank 0, position 0 \(0F0\): the phase must be a Phase, got 'F'; make actions with Phase"
    ):
        verified(Schedule("custom", (actions,), 1, 1, (1,)))
