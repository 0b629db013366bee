"""Floating numbers that a model reads on the host are operators of the program, and the model's values stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fxpar
from fxpar.compile import compile_model
from fxpar.plan.plan import Plan
from fxpar.verification import verify
from tests.capture.models import Net


class Item(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)).sum() * x.sum().item()


class OfWeights(Net):
    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        return self.down(y / y.square().mean().item()).mean()


class ToList(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)).sum() * x[0, 0].tolist()[1]


class Numpy(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)).sum() * float(x.numpy().sum())


KINDS = [Item, OfWeights, ToList, Numpy]


def _loss(output: Tensor, batch: Any) -> Tensor:
    return output


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 5, 4, dtype=torch.float64)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_read_stays_what_it_was_and_so_do_gradients(kind: type[Net]) -> None:
    model, batch = kind(), _batch()
    split = fxpar.parallelize(model, Plan(), batch, loss=_loss)
    targets = [str(node.target) for node in split.program.graph.nodes]
    assert targets.count("fxpar.item") == 1
    loss = model(**batch)
    loss.backward()
    assert split.train_step(batch).item() == pytest.approx(loss.item(), rel=1e-12)
    for mine, own in zip(split.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert own.grad is not None
        assert torch.allclose(mine.grad, own.grad, rtol=1e-12)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_read_the_number_of_all(tp: int, dp: int) -> None:
    plan = Plan(tp=tp, dp=dp)
    assert verify(OfWeights(), _batch(), plan, loss=_loss).ok
    compiled = compile_model(OfWeights(), _batch(), plan, _loss).program
    assert "fxpar.item" in {str(node.target) for node in compiled.graph.nodes}
