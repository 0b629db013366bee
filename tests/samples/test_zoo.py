"""The zoo's sample: the same types everywhere, counted by those that train a step."""

from __future__ import annotations

import runpy
from pathlib import Path

from fxpar.plan.plan import Plan

ROOT = Path(__file__).resolve().parents[2]


def test_the_sample_is_in_the_order_of_hashes_and_leaves_out_what_trains_no_step() -> None:
    zoo = runpy.run_path(str(ROOT / "samples" / "zoo.py"))
    kinds = ["bert", "gpt2", "llama", "t5", "vit"]
    order = zoo["sample"](kinds, 5, {})
    assert sorted(order) == kinds
    assert order != kinds
    rows = {
        kind: zoo["Row"](kind, verdict, "", 0.0) for kind, verdict in ((order[0], "unbuilt"), (order[1], "refused"))
    }
    assert zoo["sample"](reversed(kinds), 3, rows) == order[1:4]


def test_the_plans_can_be_read() -> None:
    plans = {file.name: Plan.load(file) for file in (ROOT / "samples" / "plans").glob("?p2_*.yaml")}
    assert plans == {
        "dp2_sharded.yaml": Plan(dp=2, shard="parameters"),
        "dp2_tp2.yaml": Plan(dp=2, tp=2),
        "tp2_sequence.yaml": Plan(tp=2, sequence_parallel=True),
    }
