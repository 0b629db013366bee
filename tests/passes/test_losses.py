"""Torch's losses on data ranks: each reduction of each, as one device computes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError, PlanError
from fxpar.plan.plan import Plan
from fxpar.verification import expect, verify
from fxpar.verify.values import call_inputs, program_state, reference_run
from tests.products import alternate, few

Loss = Callable[..., Tensor]


class Scores(nn.Module):
    """Three scores of rows, [b, 5] each, and a loss of them and of classes [b]."""

    def __init__(self, loss: Loss, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(6, 5) for _ in range(3))
        self.loss, self.reduction = loss, reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss; of several their squares."""
        found = self.loss(self.first(x), self.second(x), self.third(x), y, reduction=self.reduction)
        return found if found.dim() == 0 else found.square().sum()


def batch(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 6, generator=generator), "y": torch.randint(0, 5, (rows,), generator=generator)}


def signs(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, -1.0).to(x)


def members(y: Tensor) -> Tensor:
    """The classes of a row, -1 behind the last."""
    return functional.pad(y[:, None], (0, 4), value=-1)


WEIGHT = torch.tensor([1.0, 0.5, 2.0, 0.1, 3.0])
LOSSES: dict[str, Loss] = {
    "poisson": lambda a, b, c, y, **r: functional.poisson_nll_loss(a, b.detach().exp(), **r),
    "poisson, full": lambda a, b, c, y, **r: functional.poisson_nll_loss(
        a.exp(), 3 * b.detach().exp(), log_input=False, full=True, **r
    ),
    "soft margin": lambda a, b, c, y, **r: functional.soft_margin_loss(a, signs(b), **r),
    "soft margins of labels": lambda a, b, c, y, **r: functional.multilabel_soft_margin_loss(a, signs(b) + 1, **r),
    "triplet": lambda a, b, c, y, **r: functional.triplet_margin_loss(a, b, c, swap=True, **r),
    "triplet by distance": lambda a, b, c, y, **r: functional.triplet_margin_with_distance_loss(a, b, c, **r),
    "cosine": lambda a, b, c, y, **r: functional.cosine_embedding_loss(a, b, signs(y - 2.5), margin=0.1, **r),
    "hinge": lambda a, b, c, y, **r: functional.hinge_embedding_loss(a, signs(b), **r),
    "ranking": lambda a, b, c, y, **r: functional.margin_ranking_loss(a, b, signs(c), margin=0.1, **r),
    "margins": lambda a, b, c, y, **r: functional.multi_margin_loss(a, y, **r),
    "margins, weighed": lambda a, b, c, y, **r: functional.multi_margin_loss(a, y, p=2, weight=WEIGHT.to(a), **r),
    "margins of labels": lambda a, b, c, y, **r: functional.multilabel_margin_loss(a, members(y), **r),
}


# Each loss once every time: a sum over rows here, or the mean below, beside tensor parallelism.
CASES = itertools.product(LOSSES, ("sum", "mean", "none"))


@pytest.mark.parametrize(("name", "reduction"), few(CASES, [(name, "sum") for name in [*LOSSES][::2]]))
def test_ranks_have_the_loss_of_all_rows(name: str, reduction: str) -> None:
    expect(verify(Scores(LOSSES[name], reduction), batch(), Plan(dp=2)))


@pytest.mark.parametrize("name", alternate(LOSSES, 1))
def test_beside_tensor_parallelism_too(name: str) -> None:
    assert verify(Scores(LOSSES[name], "mean"), batch(), Plan(dp=2, tp=2)).ok


@pytest.mark.parametrize("name", alternate(["poisson", "soft margin", "margins", "margins of labels", "triplet"], 0))
def test_the_mean_may_be_that_of_each_rank(name: str) -> None:
    assert verify(Scores(LOSSES[name], "mean"), batch(), Plan(dp=2, loss_reduction="local_mean")).ok


def test_a_loss_that_asks_whether_a_variance_is_negative_is_refused() -> None:
    def loss(a: Tensor, b: Tensor, c: Tensor, y: Tensor, **reduction: Any) -> Tensor:
        return functional.gaussian_nll_loss(a, b, c.exp(), **reduction)

    with pytest.raises(CaptureError, match="the model branches on values of tensors"):
        capture(Scores(loss, "mean"), batch())


def test_a_loss_that_reads_lengths_on_the_host_is_refused() -> None:
    def loss(a: Tensor, b: Tensor, c: Tensor, y: Tensor, **reduction: Any) -> Tensor:
        lengths = torch.ones_like(y)
        scores = torch.stack([a, b, c]).log_softmax(-1)
        return functional.ctc_loss(scores, y.clamp(1)[:, None], 3 * lengths, lengths, **reduction)

    reason = r"test_losses.py:\d+: aten._ctc_loss.Tensor gives shapes that depend on values .*; return what it takes"
    with pytest.raises(CaptureError, match=reason):
        capture(Scores(loss, "mean"), batch())


class OfWords(nn.Module):
    """Scores [b, s, 5] of words, whose classes stand where torch's losses of images have channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.scores(x).log_softmax(-1).transpose(1, 2)
        return functional.nll_loss(scores, y) + functional.nll_loss(scores, y, ignore_index=3, reduction="sum")


@pytest.mark.parametrize("plan", few([Plan(), Plan(tp=2), Plan(dp=2)], [Plan(dp=2)]), ids=["one", "tp", "dp"])
def test_scores_that_lie_across(plan: Plan) -> None:
    words = {"x": torch.randn(4, 3, 6), "y": torch.randint(0, 5, (4, 3))}
    assert verify(OfWords(), words, plan)


# With `loss_reduction="sum"` the loss of data ranks is the sum of what each computes of its rows, or is refused.


SUMS = Plan(dp=2, loss_reduction="sum")


class Scored(nn.Module):
    """A classifier with a loss of its scores."""

    def __init__(self, loss: Callable[[nn.Linear, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.loss = nn.Linear(6, 5), loss

    def forward(self, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
        """The loss of x: [b, 6], y: [b] and a number."""
        return self.loss(self.score, self.score(x), y) / count


def halves() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 5, (8,), generator=generator), "count": torch.tensor(3.5)}


ADDED: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {
    "a sum": lambda m, z, y: functional.cross_entropy(z, y, reduction="sum"),
    "a mean": lambda m, z, y: functional.cross_entropy(z, y),
    "both": lambda m, z, y: functional.mse_loss(z, z.detach() + 1, reduction="sum") - 0.3 * z.square().mean(),
    "a term without rows": lambda m, z, y: z.square().sum() + 0.1 * m.weight.square().sum(),
    "a number": lambda m, z, y: 2.0 - z.sum(dim=(0, 1)) + 3.0,
    "a stack": lambda m, z, y: torch.stack([z.square().sum(), m.bias.sum()]).sum(),
}
REFUSED: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {
    "a root of a mean": lambda m, z, y: z.square().mean().sqrt(),
    "over the rows": lambda m, z, y: z.square().sum() / z.shape[0],
    "over what counts": lambda m, z, y: (z.sum(1) * (y > 1)).sum() / (y > 1).sum(),
    "a product of sums": lambda m, z, y: z.sum() * z.square().sum(),
}


@pytest.mark.parametrize("name", ADDED)
def test_losses_of_ranks_are_added(name: str) -> None:
    model, whole = Scored(ADDED[name]).double(), halves()
    captured = capture(model, whole, SUMS)
    found = reference_run(captured.program, program_state(captured.program, model), call_inputs(captured, model, whole))
    own = [{k: v.chunk(2)[i] if v.dim() else v for k, v in whole.items()} for i in range(2)]
    loss = model(**own[0]) + model(**own[1])
    loss.backward()
    torch.testing.assert_close(found.outputs["output"], loss.detach(), rtol=1e-12, atol=0)
    for parameter, p in model.named_parameters():
        torch.testing.assert_close(found.gradients[parameter], p.grad, rtol=0, atol=1e-12)
    assert verify(model, whole, SUMS).ok


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="is not a sum over rows, nor made of such; write the loss as sums over rows"):
        verify(Scored(REFUSED[name]).double(), halves(), SUMS)


def test_a_loss_without_rows_is_refused() -> None:
    with pytest.raises(PlanError, match="the loss depends on no row"):
        verify(Scored(lambda m, z, y: m.weight.sum()).double(), halves(), SUMS)
