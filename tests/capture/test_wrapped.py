"""Models that something wrapped before fxpar saw them are refused by that, and not by what it leads to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError

X = torch.randn(3, 6)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y.square().mean()


def _twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def run(*args: Any) -> Tensor:
        return 2 * function(*args)

    return run


def _around(model: nn.Module) -> None:
    model.forward = _twice(model.forward)


def _around_a_layer(model: Layers) -> None:
    model.up.forward = _twice(model.up.forward)  # type: ignore[method-assign]


def _around_twice(model: nn.Module) -> None:
    model.forward = _twice(_twice(model.forward))


def _lambda(model: nn.Module) -> None:
    model.forward = lambda x: type(model).forward(model, x)


def _compiled_forward(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward)


def _compiled_layer(model: Layers) -> None:
    model.up = torch.compile(model.up)  # type: ignore[assignment]


def _compiled_in_place(model: Layers) -> None:
    model.up.compile()


@pytest.mark.parametrize(
    ("wrap", "where", "reason"),
    [
        (_around, "Layers", "its forward was replaced by the function Layers.forward"),
        (_around_a_layer, "up", "its forward was replaced by the function Linear.forward"),
        (_around_twice, "Layers", "its forward was replaced"),
        (_lambda, "Layers", "its forward was replaced by the function _lambda.<locals>.<lambda>"),
        (_compiled_forward, "Layers", "is compiled already"),
        (_compiled_layer, "up", "is compiled already"),
        (_compiled_in_place, "up", "is compiled already"),
    ],
)
def test_wrapped_models_are_refused_by_name(wrap: Callable[[Any], None], where: str, reason: str) -> None:
    model = Layers()
    wrap(model)
    with pytest.raises(CaptureError) as caught:
        capture(model, (X,))
    assert caught.value.where == where
    assert caught.value.reason.startswith(reason)
    assert "pass the model as it was before" in caught.value.remedy


def _partial(model: nn.Module) -> None:
    model.forward = functools.partial(type(model).forward, model)


def _method(model: nn.Module) -> None:
    model.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), model)


def _pure(model: nn.Module) -> None:
    model.get_submodule("up").forward = lambda x: torch.cat([x, x[:, :2]], 1)


@pytest.mark.parametrize("replace", [_partial, _method, _pure])
def test_a_forward_that_a_copy_takes_along_is_captured(replace: Callable[[Any], None]) -> None:
    model = Layers()
    replace(model)
    assert capture(model, (X,)).how == "export"


def test_autocast_around_the_call_is_named() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CaptureError) as caught:
        capture(Layers(), (X,))
    assert (caught.value.where, "switched on around the call" in caught.value.reason) == ("autocast on cpu", True)


def test_a_loss_of_other_arguments_is_named() -> None:
    with pytest.raises(CaptureError, match="loss: cannot be called with outputs and batch: too many positional"):
        capture(Layers(), (X,), loss=lambda outputs: outputs)
