"""The cut of weights that are taken apart, normalised, convolved or unused, and of merged heads."""

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.cost.communication import collectives
from fxpar.cost.reasons import unsplit
from fxpar.errors import PlanError
from fxpar.plan.plan import Plan
from tests.passes.modules import (
    WIDTH,
    ChunkedAttention,
    ConvolutionMLP,
    CrossAttention,
    MergedAdapter,
    NormedWeights,
    ScaledMLP,
    SelfAttention,
    SometimesUsed,
    Table,
    build,
    layouts,
    run,
    squares,
    values,
)

UP_DOWN = {"up": "column", "down": "row"}
ATTENTION = {"*.in_proj_*": "head", "*.out_proj": "row"}


def test_sizes_of_one_are_no_views() -> None:
    """Of one sample, `gamma * y` has the elements of gamma, which has a dimension less."""
    captured = capture(ScaledMLP(), {"x": torch.randn(1, WIDTH)}, Plan(tp=2))
    found = layouts(run(captured, UP_DOWN))
    assert (found["up.weight"], found["down.weight"], found["gamma"]) == ("tp:S(0)", "tp:S(1)", "tp:I")


@pytest.mark.parametrize("how", ["head", "column"])
def test_a_weight_that_is_taken_apart_is_cut_in_its_parts(how: str) -> None:
    found = layouts(run(build(ChunkedAttention)[1], {"qkv": how, "out": "row"}))
    assert (found["qkv.weight"], found["qkv.bias"]) == ("tp:S(0: 3 x 96)", "tp:S(0: 3 x 96)")
    assert values(ChunkedAttention, split={"qkv": how, "out": "row"}).ok


def test_cross_attention_splits_its_weight() -> None:
    found = layouts(run(build(CrossAttention, False)[1], ATTENTION))
    assert found["attend.in_proj_weight"] == found["attend.in_proj_bias"] == "tp:S(0: 3 x 96)"
    assert values(CrossAttention, False, split=ATTENTION, tp=4).ok


def test_a_bias_of_three_matrices_is_cut_as_they_are() -> None:
    split = {"*.?_proj_weight": "head", **ATTENTION}
    del split["*.in_proj_*"]
    split["*.in_proj_bias"] = "head"
    found = layouts(run(build(CrossAttention, True)[1], split))
    assert (found["attend.q_proj_weight"], found["attend.in_proj_bias"]) == ("tp:S(0)", "tp:S(0: 3 x 96)")
    assert values(CrossAttention, True, split=split).ok


def test_heads_that_share_a_dimension_with_the_batch() -> None:
    found = layouts(run(build(SelfAttention)[1], ATTENTION))
    assert found["attend.in_proj_weight"] == "tp:S(0: 3 x 96)"
    assert values(SelfAttention, split=ATTENTION).ok


def test_heads_beside_the_batch_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"in_proj_weight cannot be split by head over 4 ranks"):
        run(build(SelfAttention, 6)[1], ATTENTION, tp=4)


@pytest.mark.parametrize("tp", [2, 4])
def test_convolutions_with_biases_are_split(tp: int) -> None:
    found = layouts(run(build(ConvolutionMLP)[1], UP_DOWN, tp=tp))
    assert found == {"up.weight": "tp:S(0)", "up.bias": "tp:S(0)", "down.weight": "tp:S(1)", "down.bias": "tp:I"}
    assert values(ConvolutionMLP, split=UP_DOWN, tp=tp).ok


@pytest.mark.parametrize(
    ("how", "split"),
    [
        ("torch.nn", {"up.*": "column", "down.weight": "row"}),
        ("torch.nn", {"up.parametrizations.weight": "column", "down.weight": "row"}),
        ("functional", {"up": "column", "down.weight": "row"}),
        ("written", {"up": "column", "down.weight": "row"}),
        ("written", {"up": "column", "length": "column", "down.weight": "row"}),
    ],
)
def test_normalised_weights_are_split(how: str, split: dict[str, str]) -> None:
    assert set(layouts(run(build(NormedWeights, how)[1], split)).values()) >= {"tp:S(0)", "tp:S(1)"}
    assert values(NormedWeights, how, split=split).ok


def test_a_norm_over_the_cut_is_refused() -> None:
    with pytest.raises(PlanError, match=r"plan: up = row: .* cannot work with a part of %up_weight"):
        run(build(NormedWeights, "functional")[1], {"up": "row", "up.bias": "replicate"})


def test_a_weight_made_of_several_is_split_with_them() -> None:
    split = {**UP_DOWN, "b": "column"}
    found = layouts(run(build(MergedAdapter)[1], split))
    assert (found["b"], found["a"]) == ("tp:S(0)", "tp:I")
    assert values(MergedAdapter, split=split).ok


def test_the_product_of_a_table_and_its_bias_are_split() -> None:
    split = {"q": "head", "r": "head"}
    found = layouts(run(build(Table)[1], split))
    assert (found["r.weight"], found["r.bias"]) == ("tp:S(0)", "tp:S(0)")
    assert values(Table, split=split).ok


@pytest.mark.parametrize("split", [{"*up": "column", "down": "row"}, UP_DOWN])
def test_unused_parameters_stay_whole(split: dict[str, str]) -> None:
    found = layouts(run(build(SometimesUsed)[1], split))
    assert (found["up.weight"], found["spare_up.weight"], found["spare_up.bias"]) == ("tp:S(0)", "tp:I", "tp:I")


def test_unused_parameters_are_reported() -> None:
    result = run(build(SometimesUsed)[1], UP_DOWN)
    assert unsplit(result) == [("spare_up.weight", "no cut fits: no operation uses it")]


def test_a_line_for_unused_parameters_alone_is_refused() -> None:
    with pytest.raises(PlanError, match=r"split\['spare_up'\]: no operation uses spare_up\.weight; leave it out"):
        run(build(SometimesUsed)[1], {"up": "column", "spare_up": "column"})


class Many(nn.Module):
    """Sixteen equal parts: as fine as a fused dimension is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 16 * 12, bias=False), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return squares(self.out(sum(self.fc(x).chunk(16, -1))))


@pytest.mark.parametrize("tp", [2, 4])
def test_sixteen_parts_are_cut_one_by_one(tp: int) -> None:
    result = run(build(Many)[1], {"fc": "column", "out": "row"}, tp)
    assert layouts(result)["fc.weight"] == "tp:S(0: 16 x 12)"
    assert [(one.phase, one.op) for one in collectives(result)] == [("forward", "all_reduce")]
    assert values(Many, split={"fc": "column", "out": "row"}, tp=tp).ok
