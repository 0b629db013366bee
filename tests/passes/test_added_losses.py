"""Autograd functions that the plan declares to add a loss: terms of the loss, or refused for what else they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.errors import LayoutError, PlanError
from fxpar.manager import PassManager
from fxpar.passes.canonicalize import canonicalize
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Operators
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.products import few
from tests.runtime.added_jobs import NAME, AddLoss, Routed, batch


class Squared(nn.Module):
    """A linear layer whose result's mean square is added as a loss by a function."""

    def __init__(self, function: Any = AddLoss, is_used: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.function, self.is_used = nn.Linear(6, 5, bias=False), function, is_used

    def forward(self, x: Tensor) -> Tensor:
        """The loss of x: [b, 6]."""
        z = self.score(x)
        added = self.function.apply(z, z.square().mean() if self.function is not OfRows else z.square().mean(1))
        return (added if self.is_used else added.detach() + z).sum()  # type: ignore[no-any-return]


class _Adds(AddLoss):
    """What other functions change."""


class OfRows(_Adds):
    """Gets a loss of each row."""


class Changes(_Adds):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x + 1e-3


class Scales(_Adds):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return gradient * 0.5, torch.ones_like(loss)


class Depends(_Adds):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return gradient, 2 * loss


class OfGradient(_Adds):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.sum()


REFUSED = {
    OfRows: "its loss is no scalar",
    Changes: "it does not return its first operand",
    Scales: "it does not hand the gradient on",
    Depends: "depends on the loss, or on the gradient that comes in",
    OfGradient: "depends on the loss, or on the gradient that comes in",
}


def test_a_loss_is_a_term_of_the_model_s() -> None:
    captured = capture(
        Squared().double(), {"x": torch.randn(4, 6).double()}, Plan(operators=Operators(added_losses=(NAME,)))
    )
    lines = print_program(PassManager([canonicalize]).run(captured.program)).splitlines()
    assert [line.split("  #")[0] for line in lines if " = " in line][-4:] == [
        "%mean_value = aten.detach.default(%mean) : f64[]",
        "%mean_gradient = aten.sub.Tensor(%mean, %mean_value) : f64[]",
        "%mean_term = aten.mul.Tensor(%mean_gradient, 0.1) : f64[]",
        "%sum_1_added = aten.add.Tensor(%sum_1, %mean_term) : f64[]",
    ]


PLANS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 2},
    {"pp": 2, "microbatches": 2},
    {"dp": 2, "loss_reduction": "token"},
    {"dp": 2, "loss_reduction": "local_mean"},
]


@pytest.mark.parametrize("options", few(PLANS, PLANS[:3:2]), ids=str)
def test_ranks_have_the_gradients_of_one_device(options: dict[str, Any]) -> None:
    expect(verify(Routed().double(), batch(), Plan(operators=Operators(added_losses=("*.AddLoss",)), **options)))


def test_without_the_plan_s_word_data_ranks_are_refused() -> None:
    with pytest.raises(LayoutError, match=f'added_losses=\\("{NAME}",\\)'):
        verify(Routed(), batch(), Plan(dp=2))


def test_a_function_that_gets_no_gradient_adds_nothing() -> None:
    assert verify(
        Squared(is_used=False).double(),
        {"x": torch.randn(4, 6).double()},
        Plan(operators=Operators(added_losses=(NAME,))),
    ).ok


@pytest.mark.parametrize("function", REFUSED, ids=lambda each: each.__name__)
def test_a_function_that_does_something_else_is_refused(function: Any) -> None:
    name = f"{__name__}.{function.__name__}"
    with pytest.raises(PlanError, match=f"is declared to add a loss, and .*{REFUSED[function]}"):
        verify(Squared(function), {"x": torch.randn(4, 6)}, Plan(operators=Operators(added_losses=(name,))))


def test_a_name_that_is_none_of_the_model_s_is_refused() -> None:
    with pytest.raises(PlanError, match=f"added_losses: 'Other': matches no autograd function; .* are {NAME}"):
        verify(Squared(), {"x": torch.randn(4, 6)}, Plan(operators=Operators(added_losses=("Other",))))
    capture(Squared().eval(), {"x": torch.randn(4, 6)}, Plan(operators=Operators(added_losses=("Other",))))
