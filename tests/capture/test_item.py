"""Floating numbers that a model reads on the host are operators of the program, and the model's values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpar
from fxpar.compile import compile_model
from fxpar.plan.plan import Plan
from fxpar.verification import verify
from tests.capture.models import Net, net


def of_weights(m: Net, x: Tensor) -> Any:
    y = m.up(x)
    return m.down(y / y.square().mean().item()).mean()


READING: dict[str, Callable[[Net, Tensor], Any]] = {
    "Item": lambda m, x: m.down(m.up(x)).sum() * x.sum().item(),
    "OfWeights": of_weights,
    "ToList": lambda m, x: m.down(m.up(x)).sum() * x[0, 0].tolist()[1],
    "Numpy": lambda m, x: m.down(m.up(x)).sum() * float(x.numpy().sum()),
}


def _loss(output: Tensor, batch: Any) -> Tensor:
    return output


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 5, 4, dtype=torch.float64)}


@pytest.mark.parametrize("name", READING)
def test_what_is_read_stays_what_it_was_and_so_do_gradients(name: str) -> None:
    model, batch = net(READING[name]), _batch()
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
    assert verify(net(of_weights), _batch(), plan, loss=_loss).ok
    compiled = compile_model(net(of_weights), _batch(), plan, _loss).program
    assert "fxpar.item" in {str(node.target) for node in compiled.graph.nodes}
