"""explain: what was chosen, why, and what anything else would cost."""

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
    assert "exposed without" in text
    assert text.rstrip().endswith("cheapest: 1, no chunks pay")


def test_chunks_of_each_stage() -> None:
    found = fxpar("explain", TINY, "token-chunks", "--tp", "2", "--pp", "2", "--json").document
    assert [stage["stage"] for stage in found] == [0, 1]
