"""With `loss_reduction="sum"` the loss of data ranks is the sum of what each computes of its rows, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import PlanError
from fxpar.plan.plan import Plan
from fxpar.verification import verify
from fxpar.verify.values import call_inputs, program_state, reference_run

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


def batch() -> dict[str, Tensor]:
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
    model, whole = Scored(ADDED[name]).double(), batch()
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
        verify(Scored(REFUSED[name]).double(), batch(), SUMS)


def test_a_loss_without_rows_is_refused() -> None:
    with pytest.raises(PlanError, match="the loss depends on no row"):
        verify(Scored(lambda m, z, y: m.weight.sum()).double(), batch(), SUMS)
