"""A rank that fails, differs or ends: the others end in time and say which rank it was, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import fxpar
from fxpar.errors import InputError, RankError
from fxpar.runtime.world import connect
from tests.runtime import faults, models
from tests.runtime.world import JOBS, RankFailed, World


@pytest.fixture(scope="module")
def short() -> Iterator[Callable[[int], World]]:
    """Worlds by size whose collectives do not wait for long."""
    worlds = {size: World(size, JOBS, group_seconds=faults.COLLECTIVE_SECONDS) for size in (2, 3)}
    yield worlds.__getitem__
    for world in worlds.values():
        world.stop()


# On the other rank an error of the odd one is a RankError; what differs is the same InputError on both.
OWN = {
    "forward raises": ("CaptureError", "no layer of that name"),
    "other world": ("PlanError", "the plan needs 3 processes (tp=3) and there are 2"),
    "no module": ("InputError", "must be an nn.Module, got a NoneType"),
}
DIFFERENT = {
    "other configuration": ("up.weight", " and rank 1"),
    "other mode": ("the mode", " (training) and rank 1 (evaluation)"),
}


def test_a_rank_that_comes_with_something_else_is_named(world2: World) -> None:
    first, odd = world2.run(faults.at_start_up)
    assert first.keys() == odd.keys() == {**OWN, **DIFFERENT}.keys()
    for name, (kind, reason) in OWN.items():
        assert odd[name][0] == kind
        assert reason in odd[name][2]
        assert first[name][:2] == ("RankError", "rank 1")
        assert first[name][2].startswith("failed in parallelize: ")
        assert reason in first[name][2]
    for name, (where, texts) in DIFFERENT.items():
        assert first[name] == odd[name]
        assert first[name][:2] == ("InputError", where)
        assert first[name][2] == f"differs between rank 0{texts}"


def test_a_later_call_that_fails_or_differs_is_told_and_training_goes_on(world2: World, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    first, odd = world2.run(faults.later, tmp_path)
    assert first["forward raises"] == odd["forward raises"]
    assert odd["forward raises"][0] == "CaptureError"
    assert odd["forward raises"][1].startswith("rank 1, ")
    assert "no layer of that name" in odd["forward raises"][2]
    assert first["other mode"] == odd["other mode"]
    assert first["other mode"][1] == "the mode"
    assert first["other sizes"] == odd["other sizes"]
    assert first["other sizes"][1:3] == (
        "batch entry ids",
        "differs between rank 0 (int64[4, 1]) and rank 1 (int64[1, 5])",
    )
    assert first["no room"] == odd["no room"]
    assert first["no room"][0] == "CheckpointError"
    assert first["no room"][1].startswith("rank 0, ")
    assert "the folder holds model.safetensors already" in odd["no room"][2]
    assert first["goes on"]
    assert odd["goes on"]
    assert first["keys"] == odd["keys"] == 0  # a call whose program is there writes nothing to the store


def test_check_inputs_names_the_entry_and_the_ranks(world2: World) -> None:
    first, odd = world2.run(faults.inputs)
    assert first == odd
    assert first.pop("goes on")
    places = {name: where for name, (_, where, _, _) in first.items()}
    assert places == {
        "values": "batch entry targets",
        "sizes": "batch entry ids",
        "entries": "the batch",
        "constants": "batch entry scaled",
        "calls": "the call",
        "modes": "the mode",
    }
    assert {kind for kind, *_ in first.values()} == {"InputError"}
    assert first["sizes"][2].startswith("differs between rank 0 (int64[4, 5] of values ")
    assert first["constants"][2] == "differs between rank 0 (False) and rank 1 (True)"


def test_equal_rows_of_all_data_ranks_are_warned_of_once(world2: World) -> None:
    told, others = world2.run(faults.equal_rows)
    assert others == [[], [], []]
    assert [len(texts) for texts in told] == [1, 0, 0]
    assert "all data ranks bring the same rows" in told[0][0]
    assert "fxpar.BatchSampler(" in told[0][0]


# Ranks, what all but the odd one say, and how that one ends.
ENDS = [
    (
        3,
        faults.ends_in_a_step,
        r"RankError: .*train_step: a collective failed: gloo: .*the node linear_1_reduce_from\); rank 1 gave no sign",
        "died",
    ),
    (
        2,
        faults.ends_in_front_of_an_agreement,
        r"RankError: rank 0, save_training: rank 1 gave no sign: ended, and closed its connections",
        "died",
    ),
    pytest.param(
        2,
        faults.ends_while_it_compiles,
        r"RankError: rank 0, parallelize: rank 1 gave no sign: ended, and closed its connections",
        "died",
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        2,
        faults.ends_between_copies,
        r"RankError: rank 0, train_step: rank 1 gave no sign: ended, and closed its connections",
        "died",
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        2,
        faults.is_refused,
        r"InputError: rank 1, batch entry mask: ",
        "died",
        marks=pytest.mark.matrix,
    ),
    (
        2,
        faults.compiles_alone,
        r"InputError: the call: differs: rank 0: train_step, its program; "
        r"rank 1: train_step, compiles a program for .*int64\[1, 5\]",
        "died with exit status 7",
    ),
    (
        2,
        faults.saves_alone,
        r"RankError: rank 0, save_checkpoint: a collective failed: gloo: .*; rank 1 ended without this call: ",
        "died with exit status 0",
    ),
    pytest.param(2, faults.stays_away, r"RankError: .*rank 1 did not come within 3 s", "", marks=pytest.mark.matrix),
    pytest.param(
        3,
        faults.is_busy,
        r"RankError: .*a collective failed: .*; rank 1 gave no sign",
        "gave no sign",
        marks=pytest.mark.matrix,
    ),
]
IDS = [
    "in a step",
    "in front of an agreement",
    "while it compiles",
    "between copies",
    "refused",
    "compiles alone",
    "saves alone",
    "stays away",
    "busy",
]


@pytest.mark.parametrize(("size", "job", "reason", "odd"), ENDS, ids=IDS)
def test_a_rank_that_is_gone_ends_the_others(
    short: Callable[[int], World], size: int, job: Callable[[], None], reason: str, odd: str
) -> None:
    with pytest.raises(RankFailed) as caught:
        short(size).run(job, seconds=60)
    told = dict(re.findall(r"^rank (\d): ((?:.|\n(?!rank \d: ))*)", str(caught.value), re.MULTILINE))
    assert odd in told.pop(str(faults.ODD), "")
    assert len(told) == size - 1
    for text in told.values():
        assert re.search(rf"fxpar.errors.{reason}", text), text


def test_processes_that_never_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"2 processes did not meet within 1 s.*1/2 clients joined") as caught:
        connect(1.0)
    assert caught.value.where == "rank 0, start-up"
    assert not dist.is_initialized()


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), "1"])
def test_a_timeout_is_a_number_of_seconds(timeout: float) -> None:
    with pytest.raises(InputError, match="must be a number of seconds"):
        fxpar.parallelize(models.tiny(), fxpar.Plan(), models.batch(), timeout=timeout)
