"""What processes share of compilations is what each of them would make, and nothing that differs is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.compile import compile_model
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from tests import captures


class Scaled(nn.Module):
    """A model with a weight, a buffer, and a number that no tensor holds."""

    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.dropout(self.linear(x) * self.factor + self.offset, 0.1, self.training)
        return {"loss": hidden.square().mean()}


def scaled(change: Callable[[Scaled], Any] = lambda model: None, factor: float = 0.5) -> Scaled:
    torch.manual_seed(0)
    model = Scaled(factor)
    change(model)
    return model


def batch(rows: int = 3) -> dict[str, Tensor]:
    return {"x": torch.ones(rows, 4)}


@pytest.fixture
def count(tmp_path: Path) -> Iterator[mock.Mock]:
    """Counts the captures that are made."""
    made = mock.Mock(wraps=captures.CAPTURE)
    with mock.patch.object(captures, "CAPTURE", made), captures.captured_once(tmp_path):
        yield made


def test_equal_models_are_captured_once(count: mock.Mock) -> None:
    first, second = (capture(scaled(), batch(), Plan(tp=tp)) for tp in (1, 2))
    assert count.call_count == 1
    assert first.program is not second.program
    assert (first.program.plan.tp, second.program.plan.tp) == (1, 2)
    again = captures.CAPTURE(scaled(), batch(), Plan(tp=2), None, frozenset())
    assert print_program(second.program) == print_program(again.program)
    assert (second.spec, second.how, second.unwalked) == (again.spec, again.how, again.unwalked)


@pytest.mark.parametrize(
    ("model", "example", "plan"),
    [
        (scaled(factor=0.25), batch(), Plan()),
        (scaled(lambda model: model.eval()), batch(), Plan()),
        (scaled(lambda model: model.offset.zero_()), batch(), Plan()),  # type: ignore[operator]
        (scaled(lambda model: model.linear.weight.requires_grad_(False)), batch(), Plan()),
        (scaled().double(), {"x": batch()["x"].double()}, Plan()),
        (scaled(), batch(5), Plan()),
        (scaled(), batch(), Plan(dp=2)),
    ],
)
def test_others_are_captured_anew(count: mock.Mock, model: nn.Module, example: Any, plan: Plan) -> None:
    capture(scaled(), batch(), Plan())
    capture(model, example, plan)
    assert count.call_count == 2


def test_losses_are_known_by_what_they_enclose(count: mock.Mock) -> None:
    def loss(factor: float) -> Callable[[Any, Any], Tensor]:
        return lambda outputs, batch: outputs["loss"] * factor

    texts = [print_program(capture(scaled(), batch(), Plan(), loss(factor)).program) for factor in (2.0, 2.0, 3.0)]
    assert texts[0] == texts[1] != texts[2]
    assert count.call_count == 2


def test_a_model_that_is_no_other_s_equal_is_captured_each_time(count: mock.Mock) -> None:
    class Local(Scaled):
        pass

    for _ in range(2):
        capture(Local(), batch(), Plan())
    assert count.call_count == 2


def test_passes_that_ran_give_the_same_program(count: mock.Mock, tmp_path: Path) -> None:
    plan = Plan(tp=2, split={"linear": "column"})
    alone = compile_model(scaled(), batch(), plan).program
    with captures.passes_run_once(tmp_path):
        first, second = (compile_model(scaled(), batch(), plan).program for _ in range(2))
    assert print_program(first) == print_program(second) == print_program(alone)
    names = [[record.name for record in program.history] for program in (first, second, alone)]
    assert names[0] == names[1] == names[2]
    assert first.history == second.history  # with the seconds that they took
