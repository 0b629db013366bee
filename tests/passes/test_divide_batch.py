"""divide_batch: what it writes, and that sums over counts are the means."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.torch_version import TorchVersion

from fxpar.capture.capture import capture
from fxpar.errors import LayoutError, PlanError
from fxpar.ir.program import Program, operands, tensor_type
from fxpar.manager import PassManager
from fxpar.passes import canonicalize
from fxpar.passes.divide_batch import divide_batch
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from fxpar.verify.values import call_inputs, program_state, reference_run
from tests.products import few


class Rows(nn.Module):
    """Scores of rows, and a loss over them."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 5)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.up(x), y)


def batch(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 5, (rows,), generator=generator)
    y[1] = -100
    return {"x": torch.randn(rows, 6, generator=generator), "y": y}


def divided(loss: Any, plan: Plan, rows: int = 8) -> Program:
    captured = capture(Rows(loss), batch(rows), plan)
    return PassManager([canonicalize, divide_batch]).run(captured.program)


def test_a_mean_over_rows_is_a_sum_over_a_count() -> None:
    text = print_program(divided(lambda z, y: z.square().mean(), Plan(dp=2)))
    lines = [line.split("  #")[0] for line in text.splitlines()]
    assert lines[3] == "symbol b = x.0 / 2 like 4"
    assert lines[-7:] == [
        "%mean_sum = aten.sum.default(%square, dtype=dtype.f32) : f32[]",
        "%mean_row = aten.select.int(%square, 1, 0) : f32[2*b]",
        "%mean_ones = aten.ones_like.default(%mean_row, dtype=dtype.f32) : f32[2*b]",
        "%mean_count = aten.sum.default(%mean_ones) : f32[]",
        "%mean_elements = aten.mul.Tensor(%mean_count, 5) : f32[]",
        "%mean = aten.div.Tensor(%mean_sum, %mean_elements) : f32[]",
        "return output=%mean",
    ]


def test_nothing_changes_without_data_ranks() -> None:
    plain = PassManager([canonicalize]).run(capture(Rows(lambda z, y: z.mean()), batch(), Plan(tp=2)).program)
    after = PassManager([divide_batch]).run(plain)
    assert print_program(after) == print_program(plain)


WEIGHT = torch.tensor([1.0, 0.5, 2.0, 0.1, 3.0])


def of_chances(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(z, z.detach().roll(1, -1).softmax(-1))


LOSSES = {
    "mean": lambda z, y: z.square().mean(),
    "mean over rows": lambda z, y: z.mean(0).square().sum(),
    "mean, kept": lambda z, y: (z - z.mean(0, keepdim=True)).abs().sum(),
    "mean over columns": lambda z, y: z.mean(1).square().sum(),
    "cross entropy": functional.cross_entropy,
    "smoothed": lambda z, y: functional.cross_entropy(z, y, label_smoothing=0.2),
    "weighted": lambda z, y: functional.cross_entropy(z, y, WEIGHT.to(z), label_smoothing=0.1),
    "sum": lambda z, y: functional.cross_entropy(z, y, reduction="sum"),
    "chances of classes": of_chances,
    "chances of classes, weighted": lambda z, y: functional.cross_entropy(
        z, z.roll(1, -1).softmax(-1), WEIGHT.to(z), label_smoothing=0.1
    ),
    "chances of classes, summed": lambda z, y: functional.cross_entropy(z, z.softmax(-1), reduction="sum") / z.numel(),
    "over the number of targets": lambda z, y: z.square().sum() / y.numel(),
    "nll": lambda z, y: functional.nll_loss(z.log_softmax(-1), y),
    "squared": lambda z, y: functional.mse_loss(z, z.detach().roll(1, -1)),
    "absolute": lambda z, y: functional.l1_loss(z, torch.ones_like(z)),
    "binary": lambda z, y: functional.binary_cross_entropy_with_logits(z, torch.ones_like(z)),
    "huber": lambda z, y: functional.huber_loss(z, torch.ones_like(z)),
    "smooth": lambda z, y: functional.smooth_l1_loss(z, torch.ones_like(z)),
    "divergence": lambda z, y: functional.kl_div(z.log_softmax(-1), torch.ones_like(z), log_target=True),
    "chances": lambda z, y: functional.binary_cross_entropy(z.sigmoid(), torch.ones_like(z), WEIGHT.to(z)),
    "binary by classes": lambda z, y: functional.binary_cross_entropy_with_logits(
        z, torch.ones_like(z), pos_weight=WEIGHT.to(z)
    ),
    "two losses": lambda z, y: functional.cross_entropy(z, y) + 0.1 * z.square().mean(),
    "another class left out": lambda z, y: functional.cross_entropy(z, y.clamp(min=0), ignore_index=4),
    "over the number of rows": lambda z, y: z.square().sum() / z.shape[0],
    "by numbers of rows": lambda z, y: torch.add(z, z.shape[0], alpha=0.5).square().sum() * (9 - z.shape[0]),
}

# torch 2.11 traces these for one number of rows alone, so that data ranks are refused by name.
OF_ONE_SIZE = (
    {name for name in LOSSES if name.startswith("chances")} if TorchVersion(torch.__version__) < "2.12" else ()
)
LOSSES = {name: loss for name, loss in LOSSES.items() if name not in OF_ONE_SIZE}


# One of each kind of mean: of all, by classes, by weights, of chances, of several losses, and what is none.
FEW = {
    *("mean over columns", "cross entropy", "weighted", "chances of classes", "squared", "binary by classes"),
    *("divergence", "two losses", "another class left out"),
}


# Those whose mean of means is verified below run in the matrix.
EVERY_TIME = [(name, 2) for name in LOSSES if name not in FEW - {"mean over columns"}]


@pytest.mark.parametrize(("name", "dp"), few(itertools.product(LOSSES, (2, 4)), EVERY_TIME))
def test_ranks_have_the_mean_of_all_rows(name: str, dp: int) -> None:
    expect(verify(Rows(LOSSES[name]), batch(), Plan(dp=dp)))


REFUSED = {
    "a softmax over rows": (lambda z, y: (z.softmax(0) ** 2).sum(), "the operation needs the whole of dimension 0"),
    "rows in another order": (lambda z, y: (z.flip(0) * z).sum(), "the operation needs the whole of dimension 0"),
    "the largest of all": (lambda z, y: z.max(), "needs the whole of dimension"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused(name: str) -> None:
    loss, reason = REFUSED[name]
    with pytest.raises(LayoutError, match=f"on axis dp: .*{reason}"):
        verify(Rows(loss), batch(), Plan(dp=2))


def test_rows_that_the_ranks_cannot_share_out_are_refused() -> None:
    with pytest.raises(PlanError, match="dp: x has 7 in dimension 0, which 2 ranks cannot share out"):
        divided(functional.cross_entropy, Plan(dp=2), rows=7)


class Two(nn.Module):
    """Two inputs with rows of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)

    def forward(self, x: Tensor, z: Tensor) -> Any:
        return self.up(x).sum() + self.up(z).sum()


def test_inputs_with_different_rows_are_refused() -> None:
    captured = capture(Two(), {"x": torch.randn(4, 6), "z": torch.randn(6, 6)}, Plan(dp=2))
    with pytest.raises(PlanError, match="dp: inputs differ in their rows"):
        PassManager([canonicalize, divide_batch]).run(captured.program)


def test_the_loss_may_be_the_mean_of_each_ranks_mean() -> None:
    lines = print_program(divided(functional.cross_entropy, Plan(dp=2, loss_reduction="local_mean"))).splitlines()
    assert [line.split("  #")[0] for line in lines[-11:-1]] == [
        "%cross_entropy_loss_rows = aten.cross_entropy_loss.default(%linear_bias, %y, None, 0, -100, 0.0) : f32[2*b]",
        "%cross_entropy_loss_own = aten.view.default(%cross_entropy_loss_rows, [2, -1]) : f32[2, b]",
        "%cross_entropy_loss_sum = aten.sum.dim_IntList(%cross_entropy_loss_own, [1], False) : f32[2]",
        "%cross_entropy_loss_counted = aten.ne.Scalar(%y, -100) : bool[2*b]",
        "%cross_entropy_loss_ones = aten._to_copy.default(%cross_entropy_loss_counted, dtype=dtype.f32) : f32[2*b]",
        "%cross_entropy_loss_own_1 = aten.view.default(%cross_entropy_loss_ones, [2, -1]) : f32[2, b]",
        "%cross_entropy_loss_count = aten.sum.dim_IntList(%cross_entropy_loss_own_1, [1], False) : f32[2]",
        "%cross_entropy_loss_quotient = aten.div.Tensor(%cross_entropy_loss_sum, %cross_entropy_loss_count) : f32[2]",
        "%cross_entropy_loss_means = aten.sum.default(%cross_entropy_loss_quotient) : f32[]",
        "%cross_entropy_loss = aten.div.Tensor(%cross_entropy_loss_means, 2) : f32[]",
    ]


SUMS = (
    "mean over rows",
    "mean, kept",
    "sum",
    "chances of classes, summed",
    "over the number of targets",
    "over the number of rows",
    "by numbers of rows",
)
AVERAGED = [name for name in LOSSES if name not in SUMS]


@pytest.mark.parametrize("name", few(AVERAGED, FEW))
def test_the_mean_of_ranks_means_is_what_ranks_alone_would_have(name: str) -> None:
    model, rows, dp = Rows(LOSSES[name]), batch(), 4
    if name == "mean over columns":
        with pytest.raises(PlanError, match="the loss is not a mean over the batch"):
            verify(model, rows, Plan(dp=dp, loss_reduction="local_mean"))
        return
    expect(verify(model, rows, Plan(dp=dp, loss_reduction="local_mean")))
    captured = capture(model, rows, Plan(dp=dp, loss_reduction="local_mean"))
    state, inputs = program_state(captured.program, model), call_inputs(captured, model, rows)
    run = reference_run(captured.program, state, inputs)
    alone = [model.double()(rows["x"].double()[i : i + 2], rows["y"][i : i + 2]) for i in range(0, 8, 2)]
    wanted = torch.stack(alone).mean()
    assert float(run.outputs["output"]) == pytest.approx(float(wanted), abs=1e-12)
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(wanted, [*model.parameters()]), strict=True):
        own = run.gradients[next(n for n, p in model.named_parameters() if p is parameter)]
        assert torch.allclose(own, gradient, atol=1e-12)


def test_a_mean_over_rows_counts_rows_alone() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Any:
            return self.up(x).mean(0).square().sum()

    assert verify(Places(), {"x": torch.randn(4, 7, 6)}, Plan(dp=2)).ok


NO_MEANS = {
    "local_mean": {
        "sum": "the loss is not a mean over the batch",
        "mean over rows": "is not a mean of the whole",
        "mean squared": "is not a mean of each rank's own",
        "times a mean": "is not a mean of each rank's own",
    },
    "token": dict.fromkeys(("sum", "two losses", "times words"), "the loss is not one mean"),
}


@pytest.mark.parametrize(("reduction", "name"), [(r, name) for r, found in NO_MEANS.items() for name in found])
def test_a_loss_that_is_no_mean_cannot_be_averaged_otherwise(reduction: str, name: str) -> None:
    losses = {
        **LOSSES,
        "mean squared": lambda z, y: z.square().mean() ** 2,
        "times a mean": lambda z, y: z.mean() * z.square().mean(),
        "times words": lambda z, y: functional.cross_entropy(z, y) * (y != -100).sum(),
    }
    with pytest.raises(PlanError, match=NO_MEANS[reduction][name]):
        divided(losses[name], Plan(dp=2, loss_reduction=reduction))


@pytest.mark.parametrize("dp", [1, 2])
def test_what_counts_in_the_loss_is_an_output_where_words_count(dp: int) -> None:
    program = divided(lambda z, y: 3 * functional.cross_entropy(z, y), Plan(dp=dp, loss_reduction="token"))
    assert program.outputs == ("output", "fxpar.count")
    assert "count" in program.output_nodes()["fxpar.count"].name
    assert verify(Rows(functional.cross_entropy), batch(), Plan(dp=dp, loss_reduction="token")).ok


def test_where_no_word_counts_the_loss_is_zero_and_moves_nothing() -> None:
    model, rows, plan = Rows(functional.cross_entropy), batch(), Plan(dp=2, loss_reduction="token")
    rows["y"].fill_(-100)
    captured = capture(model, rows, plan)
    state, inputs = program_state(captured.program, model), call_inputs(captured, model, rows)
    run = reference_run(captured.program, state, inputs)
    assert (float(run.outputs["output"]), float(run.outputs["fxpar.count"])) == (0.0, 0.0)
    assert all(not gradient.any() for gradient in run.gradients.values())


@pytest.mark.parametrize("reduction", ["mean", "local_mean"])
def test_sums_and_counts_of_half_precision_are_taken_in_single(reduction: str) -> None:
    program = divided(lambda z, y: functional.cross_entropy(z.bfloat16(), y), Plan(dp=2, loss_reduction=reduction))
    (quotient,) = (node for node in program.graph.nodes if node.name.endswith("_quotient"))
    assert [tensor_type(node).dtype for node in operands(quotient)] == [torch.float32] * 2
    assert tensor_type(program.output_nodes()["output"]).dtype == torch.bfloat16


def test_a_mean_beside_the_loss_is_that_of_all_rows() -> None:
    def loss(z: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(z, y), "centre": z.mean(0)}

    program = divided(loss, Plan(dp=2, loss_reduction="local_mean"))
    assert [node.name for node in operands(program.output_nodes()["centre"])] == ["mean_sum", "mean_count"]


def test_the_batch_may_be_another_dimension_than_the_first() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(self.up(x).flatten(0, 1), y.flatten())

    rows = {"x": torch.randn(7, 4, 6), "y": torch.randint(0, 5, (7, 4))}
    with pytest.raises(PlanError, match="x has 7 in dimension 0"):
        verify(Turned(), rows, Plan(dp=2))
    assert verify(Turned(), rows, Plan(dp=2, batch_dims={"x": 1})).ok
    with pytest.raises(PlanError, match=r"batch_dims\['z'\]: names no input; choose from x, y"):
        verify(Turned(), rows, Plan(dp=2, batch_dims={"z": 1}))
    with pytest.raises(PlanError, match=r"has no dimension 3"):
        verify(Turned(), rows, Plan(dp=2, batch_dims={"x": 3}))
    with pytest.raises(PlanError, match=r"batch_dims\['x'\]: dimension 2 of .* is not as long"):
        verify(Turned(), rows, Plan(dp=2, batch_dims={"x": 2, "y": 1}))


NO_COUNTS = {
    **({} if OF_ONE_SIZE else {"rows of scores": of_chances}),
    "clamped": lambda z, y: z.square().sum() / (y != -100).sum().clamp(min=1),
    "by what is learned": lambda z, y: functional.cross_entropy(z, y) / z.detach().abs().sum(),
}


@pytest.mark.parametrize("name", NO_COUNTS)
def test_what_is_no_count_weighs_no_microbatch(name: str) -> None:
    with pytest.raises(PlanError, match="divided by what is not a count"):
        divided(NO_COUNTS[name], Plan(dp=2, loss_reduction="token"))


def test_means_beside_sums_of_all_are_none_of_the_ranks() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(z, y) + z.square().sum() / (y != -100).sum()

    with pytest.raises(PlanError, match="is not a mean of each rank's own"):
        divided(loss, Plan(dp=2, loss_reduction="local_mean"))
