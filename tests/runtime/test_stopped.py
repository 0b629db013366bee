"""A rank that fails in a call and goes on: all ranks raise its error, and no rank is a call apart or waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fxpar.plan.plan_options import Communication
from tests.products import product
from tests.runtime import stopped
from tests.runtime.world import World

LIMIT = 10.0
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2, "split": {"up": "column", "down": "row"}},
    "pp": {"pp": 2, "microbatches": 2},
    "copies": {
        "tp": 2,
        "split": {"up": "column", "down": "row"},
        "communication": Communication("copy"),
    },
}
# Of each wrong batch, what names the place.
PLACES = ("mask", "ids", "ids", "ids", "ids", "", "more", "max_norm")


@product(plan=["dp", "tp", "pp"], check_inputs=[True, False])
def test_an_error_in_front_of_all_collectives_is_that_of_all_ranks(
    plan: str, check_inputs: bool, world2: World
) -> None:
    first, odd = world2.run(stopped.before, {**PLANS[plan], "check_inputs": check_inputs})
    for (text, seconds), (other, _), place in zip(first["told"], odd["told"], PLACES, strict=True):
        assert text == other
        assert "rank 1" in text
        assert place in text
        assert seconds < LIMIT
    assert first["calls"][0] == odd["calls"][0]
    assert "rank 0: clip_grad_norm_" in first["calls"][0]
    assert "rank 1: train_step" in first["calls"][0]
    for found in (first, odd):
        assert torch.equal(found["loss"], found["again"])
        assert found["step"] == 2


@product(plan=list(PLANS), how=["between", "behind", "backward", "interrupted"])
def test_a_later_error_is_what_every_call_says(plan: str, how: str, world2: World, tmp_path: Path) -> None:
    if plan == "pp" and how == "backward":
        return  # a plain call is not differentiated through stages
    first, odd = world2.run(stopped.later, {**PLANS[plan], "check_inputs": False}, how, tmp_path)
    kind = "KeyboardInterrupt" if how == "interrupted" else "Broken"
    assert odd["first"][0].startswith(f"{kind}: ")
    call = "backward" if how == "backward" else "train_step"
    reason = f"RankError: rank 1, {call}: an earlier call failed: {kind}: "
    assert first["first"][0].startswith(reason)
    assert "a new process group" in first["first"][0]
    for found in (first, odd):
        assert found["first"][1] < LIMIT
        assert {text for text, _ in found["behind"].values()} == {first["first"][0]}
        assert all(seconds < 1.0 for _, seconds in found["behind"].values())


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["all", "one"])
def test_what_all_ranks_refuse_behind_a_collective_ends_nothing(alone: bool, world2: World) -> None:
    first, odd = world2.run(stopped.late, {**PLANS["tp"], "check_inputs": False}, alone)
    own = "InputError: here: no such thing; none"
    ended = "RankError: rank 1, train_step: an earlier call failed: here: no such thing"
    assert odd["refused"][0] == own
    assert first["refused"][0].startswith(ended if alone else own)
    for found in (first, odd):
        assert found["refused"][1] < LIMIT
        assert found["behind"][0] == (first["refused"][0] if alone else "")


def test_an_optimizer_that_fails_on_one_rank_is_no_silent_step(world2: World, tmp_path: Path) -> None:
    first, odd = world2.run(stopped.later, {**PLANS["dp"], "check_inputs": False}, "optimizer", tmp_path)
    assert odd["first"][0].startswith("InputError: the optimizer: a step of SGD was broken off")
    assert first["first"][0].startswith("RankError: rank 1, train_step: an earlier call failed: the optimizer: a step")
    for found in (first, odd):
        assert found["first"][1] < LIMIT
        assert {text for text, _ in found["behind"].values()} == {first["first"][0]}


def test_nobody_listens_for_a_module_that_is_dropped(world2: World) -> None:
    assert world2.run(stopped.dropped) == [[], []]
