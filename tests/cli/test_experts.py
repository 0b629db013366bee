"""Commands on a model whose experts are on several ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import TEXTS, fxpar

MODEL = "hf:mixtral,num_hidden_layers=1"
EXPERTS = "model.layers.0.mlp.experts"
FOLDED = ("--dp", "2", "--ep", "2", "--etp", "1")


@functools.cache
def _collectives(*more: str) -> list[Any]:
    found: list[Any] = fxpar("comm", MODEL, *FOLDED, *more, "--json").document["collectives"]
    return found


def test_the_options_win_over_the_plans_file(tmp_path: Any) -> None:
    (tmp_path / "plan.yaml").write_text("{tp: 2, dp: 2, ep: 4, etp: 1}")
    found = fxpar(
        "run",
        MODEL,
        "--plan",
        str(tmp_path / "plan.yaml"),
        "--ep",
        "2",
        "--etp",
        "2",
        "--until",
        "canonicalize",
        "--print",
    )
    assert '"ep": 2' in found.out
    assert '"etp": 2' in found.out


def test_comm_lists_what_the_rows_of_experts_send() -> None:
    sent = [c for c in _collectives("--dispatch", "alltoall") if c["op"] == "all_to_all"]
    # How many rows each expert gets, i64[4] of two ranks for two others; then the rows, to experts and back. A block
    # has a place for each of a source's 3 * 16 tokens' two experts, of 96 features.
    assert [(c["phase"], c["bytes"]) for c in sent] == [
        ("forward", 2 * 4 * 4 * 2 * 2),
        *([("forward", 2 * 3 * 16 * 2 * 2 * 96 * 4)] * 2),
        *([("backward", 2 * 3 * 16 * 2 * 2 * 96 * 4)] * 2),
    ]
    assert {c["axis"] for c in sent} == {"dp"}


def test_static_dispatch_sends_tokens_where_less_travels_so() -> None:
    """Of 96 features, there and back; besides their experts' numbers and weights."""
    sent = [c for c in _collectives() if c["axis"] == "dp" and c["phase"] != "parameter" and c["bytes"] > 2000]
    tokens = 2 * 3 * 16 * 96 * 4
    assert [(c["op"], c["phase"], c["bytes"]) for c in sent] == [
        ("all_gather", "forward", tokens),
        ("reduce_scatter", "forward", tokens),
        ("all_gather", "backward", tokens),
        ("reduce_scatter", "backward", tokens),
    ]


def test_exact_dispatch_sends_rows_alone() -> None:
    sent = [c for c in _collectives("--dispatch", "dropless") if c["op"] == "all_to_all"]
    # Half of the places of blocks: each of 2 * 3 * 16 tokens goes to two experts.
    assert [(c["phase"], c["bytes"]) for c in sent[1:]] == [
        *([("forward", 2 * 3 * 16 * 2 * 96 * 4)] * 2),
        *([("backward", 2 * 3 * 16 * 2 * 96 * 4)] * 2),
    ]


def test_experts_of_a_capacity_are_sent_what_they_take() -> None:
    sent = [c for c in _collectives("--capacity-factor", "1", "--pad-to-capacity") if c["op"] == "all_to_all"]
    # As many places as a balanced load needs, which are half of those that tokens may need.
    assert {(c["phase"], c["bytes"]) for c in sent[1:]} == {
        ("forward", 2 * 3 * 16 * 2 * 96 * 4),
        ("backward", 2 * 3 * 16 * 2 * 96 * 4),
    }


def test_a_part_of_the_data_ranks_holds_different_experts() -> None:
    found = fxpar("report", MODEL, "--dp", "4", "--ep", "2", "--etp", "1", "--json")
    assert found.status == 0, found.err
    assert {c["axis"] for c in found.document["collectives"] if c["phase"] == "backward"} == {"dp_in"}
    summed = [c["axis"] for c in found.document["collectives"] if c["phase"] == "parameter"]
    assert summed == ["dp_out", "dp_out-dp_in"]
    ranks = found.document["ranks"]
    assert len(ranks) == 4
    assert len({rank["parameters"] for rank in ranks}) == 1


def test_explain_knows_who_holds_which_experts() -> None:
    found = fxpar("explain", MODEL, f"{EXPERTS}.down_proj", "--tp", "2", *FOLDED[:-1], "2", "--json").document
    assert [(each["axis"], each["placement"]) for each in found] == [("dp", "S(0)"), ("tp", "S(2)")]
    assert found[0]["reason"] == "dp shares out the batch and the experts: a rank holds the parameters of its own"


def test_a_text_whose_rows_are_sent_already_goes_on(tmp_path: Path) -> None:
    assert fxpar("run", MODEL, *FOLDED, "--dump", str(tmp_path)).status == 0
    path = str(tmp_path / TEXTS["dispatch_experts"])
    found = fxpar("comm", path, "--json")
    assert found.status == 0, found.err
    assert found.document["collectives"] == _collectives()
    told = fxpar("explain", path, f"{EXPERTS}.down_proj", "--json")
    assert told.status == 0, told.err
    assert [(each["axis"], each["placement"]) for each in told.document] == [("dp", "S(0)")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "hf:mixtral", "--dp", "2", "--ep", "3", "--etp", "1"), "3"),
        (("run", "hf:mixtral", "--tp", "4", "--etp", "2"), "etp=2 is not tp=4: give 4"),
        (
            ("run", "hf:gpt2,n_layer=1", "--capacity-factor", "1"),
            "capacity_factor=1: no operation of the model is recognised as that of experts",
        ),
        (("run", MODEL, "--drop-policy", "position"), "drop_policy is of a capacity_factor"),
        (("run", "hf:gpt2,n_layer=1", *FOLDED), "no operation of the model is recognised as that of experts"),
        (("run", f"{MODEL},num_local_experts=3", *FOLDED), "3 experts are not shared out evenly by 2 ranks"),
    ],
)
def test_what_cannot_be_folded_is_refused(words: tuple[str, ...], message: str) -> None:
    result = fxpar(*words)
    assert result.status in (1, 2)
    assert message in result.err, result.err
