"""explain: what was chosen, why, and what anything else would cost."""

import json
from pathlib import Path

import pytest

from tests.cli.tool import TINY, fxpar

MODULE = "transformer.h.0.mlp.c_fc"


def test_a_parameter_is_explained_with_its_runner_up() -> None:
    (found,) = fxpar("explain", TINY, f"{MODULE}.weight", "--tp", "2", "--json").document
    assert found["placement"] == "S(1)"
    assert found["reason"] == "cheapest"
    assert found["runner_up"] in ("S(0)", "I")
    assert found["runner_up_extra_ms"] > 0.1
    assert found["terms_ms"]["optimizer"] > 0


def test_a_module_is_explained_by_its_parameters_and_nodes() -> None:
    found = fxpar("explain", TINY, MODULE, "--tp", "2", "--json").document
    product = next(entry for entry in found if "matrix product" in entry["terms_ms"])
    assert any(term.endswith("I to R") for term in product["terms_ms"])
    assert product["chain"][-1]["node"].startswith("%transformer_h_0_mlp_c_fc_weight")
    text = fxpar("explain", TINY, MODULE, "--tp", "2").out
    assert "runner-up" in text
    assert "ms longer" in text


def test_a_line_of_the_plan_is_its_own_reason() -> None:
    words = ("--tp", "2", "--split", f"{MODULE}=column")
    (found,) = fxpar("explain", TINY, f"{MODULE}.weight", *words, "--json").document
    assert found["reason"] == f"plan: {MODULE} = column"
    assert found["runner_up"] is None


def test_a_vocabulary_is_cut_because_it_can_be() -> None:
    (found,) = fxpar("explain", TINY, "transformer.wte.weight", "--tp", "4", "--json").document
    assert found["placement"] == "S(0: 259 ~ 260)"
    assert found["reason"] == "a vocabulary that can be cut is cut"
    assert found["runner_up"] is None


def test_what_cannot_be_cut_says_where_it_tears() -> None:
    words = ("explain", f"{TINY},n_head=3", "transformer.h.0.attn.c_attn.weight", "--tp", "2")
    (found,) = fxpar(*words, "--json").document
    assert found["placement"] == "I"
    assert found["reason"].startswith("no cut fits: at %view_")
    assert "[b, s, 3, 32] tears S(2) over 2 ranks" in found["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((TINY, "no.such.module", "--tp", "2"), "names no node, parameter or module"),
        ((TINY, MODULE), "one rank holds everything whole"),
    ],
)
def test_what_cannot_be_explained_is_bad_input(words: tuple[str, ...], message: str) -> None:
    result = fxpar("explain", *words)
    assert result.status == 2
    assert message in result.err


def test_chunks_of_tokens_are_explained_by_what_they_save_and_cost() -> None:
    """Whatever the plan says of them."""
    words = ("explain", TINY, "token-chunks", "--tp", "2", "--batch", "4", "--collective-transport", "copy")
    cost = {
        "bandwidth": 1e3,
        "flops": 1e6,
        "least_copy": 1,
        "copy_latency": 0,
        "kernel_latency": 0,
        "multiprocessors": 1,
    }
    flags = [word for option, value in cost.items() for word in ("--cost", f"{option}={value}")]
    (found,) = fxpar(*words, *flags, "--token-chunks", "4", "--json").document
    assert {(price["phase"], price["count"]) for price in found["prices"]} == {
        (p, n) for p in ("", "backward") for n in (2, 4)
    }
    best = max(found["prices"], key=lambda price: price["gain"])
    assert best["gain"] > 0
    assert found["cheapest"]["count"] > 1
    text = fxpar(*words).out
    assert all(word in text for word in ("attention", "exposed", "whole"))
    assert "cheapest: 1, no chunks pay\nTimes are of a microbatch of the example's sizes: b = 4, s = 16." in text


def test_chunks_of_each_stage() -> None:
    found = fxpar("explain", TINY, "token-chunks", "--tp", "2", "--pp", "2", "--json").document
    assert [stage["stage"] for stage in found] == [0, 1]


MIXTRAL = (
    "explain",
    "hf:mixtral,num_hidden_layers=2,num_local_experts=4",
    "spare-experts",
    "--dp",
    "2",
    "--ep",
    "2",
    "--etp",
    "1",
)
# Links that cost nothing: what slots save is what they take off the fullest rank.
FREE = ("--cost", "bandwidth=1e30", "--cost", "latency=1e-30", "--cost", "flops=1e6")


def _report(path: Path, *layers: list[int]) -> tuple[str, str]:
    path.write_text(json.dumps({"loads": [{"experts": layer} for layer in layers]}), encoding="utf-8")
    return "--loads", str(path)


def test_spare_slots_are_explained_by_what_they_save_and_cost(tmp_path: Path) -> None:
    """Of four experts on two ranks the first has eight elevenths of the rows, or two are fuller in one layer each."""
    found = fxpar(*MIXTRAL, *FREE, "--json").document
    assert found["cheapest"] == 1
    assert [price["slots"] for price in found["prices"]] == [0, 1, 2]
    none, one, two = found["prices"]
    assert none["fullest"] == pytest.approx(2 * 9 / 11, abs=0.02)
    assert (one["fullest"], one["replicas"]) == (pytest.approx(1, abs=0.02), 2)
    assert one["computing"] == two["computing"] == pytest.approx(none["computing"] * 11 / 18, rel=0.02)
    assert one["saved"] == pytest.approx(none["computing"] - one["computing"])
    assert two["bytes"] == 2 * one["bytes"] > 0
    loads = _report(tmp_path / "report.json", [5, 5, 0, 0], [2, 2, 2, 2])
    for free, cheapest in ((FREE, 1), ((), 0)):
        found = fxpar(*MIXTRAL, *free, *loads, "--json").document
        assert found["cheapest"] == cheapest
        none, one, _ = found["prices"]
        assert none["fullest"] == 2
        if free:
            assert none["computing"] == pytest.approx(1.5 * one["computing"])
        else:
            assert one["sending"] > none["computing"] >= one["computing"]
    text = fxpar(*MIXTRAL).out
    assert "fullest rank" in text
    assert "\ncheapest: no slots of each rank\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--loads", "missing.json"), "No such file"),
        (("--loads", "empty.json"), "has no loads of experts"),
        (("--loads", "other.json"), "has loads of layers of [4, 3] experts, and the model has [4, 4]"),
        (("--loads", "other.json", "--skew", "2"), "both say what the load is"),
        (("--skew", "0"), "must be a number above 0, got 0"),
        (("--dp", "1", "--ep", "1"), "no --ep of at least 2"),
    ],
)
def test_loads_that_say_nothing_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _report(tmp_path / "other.json", [1, 1, 1, 1], [1, 1, 1])
    (tmp_path / "empty.json").write_text("{}", encoding="utf-8")
    result = fxpar(*MIXTRAL, *words)
    assert result.status == 2
    assert message in " ".join(result.err.split())


def test_a_load_is_of_spare_slots_alone() -> None:
    result = fxpar("explain", TINY, MODULE, "--tp", "2", "--skew", "2")
    assert result.status == 2
    assert "is of spare-experts alone" in result.err
