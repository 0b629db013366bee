"""Control flow on values, caches and the like are refused with the author's line and a remedy."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo import trace_rules

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError, InputError
from tests.capture.models import Net, example, faithful, net, seeded, written
from tests.zoo import CASES


def branch(m: Net, x: Tensor) -> Any:
    if x.sum() > 0:
        return m.up(x).sum()
    return m.down(m.up(x)).sum()


def nonzero(m: Net, x: Tensor) -> Any:
    rows = (x[:, 0, 0] > 0).nonzero()
    return m.down(m.up(x[rows[:, 0]])).sum()


DEPENDING: dict[str, Callable[[Net, Tensor], Any]] = {
    "Branch": branch,
    "Check": lambda m, x: m.up(x).sum() if torch.all(x > 100) else m.down(m.up(x)).sum(),
    "Nonzero": nonzero,
    "MaskedRows": lambda m, x: m.down(m.up(x)[x[..., 0] > 0]).sum(),
    "IntegerItem": lambda m, x: m.down(m.up(x)).sum() * x.argmax().item(),
    "FloatOf": lambda m, x: m.down(m.up(x)).sum() * sum(float(v) for v in x[0, 0]),
}


@pytest.mark.parametrize("name", DEPENDING)
def test_what_depends_on_values_is_refused_at_its_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    place = r"^test_refusals\.py:\d+: .*(values of tensors|value of a tensor)"
    with pytest.raises(CaptureError, match=place) as caught:
        capture(written(DEPENDING[name]), example())
    assert caught.value.remedy
    assert "def forward" not in "".join(capfd.readouterr())  # torch prints the graph of a failed trace


def test_masks_that_keep_the_shape_are_no_obstacle() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        h = m.up(x)
        h[x[..., 0] > 0] = 0.0
        return m.down(torch.where(x[..., :1] < 0, h, h * 2)).sum()

    faithful(net(forward), example())


def numpy_array(m: Net, x: Tensor) -> Any:
    """Makes numpy raise where sizes are symbolic, after a draw and before the forward is at its end."""
    np.put_along_axis(np.zeros((2, x.shape[1])), np.random.rand(2, 1), -1, 1)  # type: ignore[arg-type]
    return m.down(m.up(x)).sum()


def wrong_index(m: Net, x: Tensor) -> Any:
    np.put_along_axis(np.zeros((2, 5)), np.full((2, 1), 0.5), -1, 1)
    return m.down(m.up(x)).sum()


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (
            lambda m, x: m.down(m.up(x)).sum() * random.random(),
            r"test_refusals.py:\d+: the forward draws random numbers on the host, which",
        ),
        (
            lambda m, x: m.down(m.up(x)[:, np.random.permutation(5)]).sum() * 1.5,
            r"Net: the forward draws random numbers on the host \(numpy\)",
        ),
        (numpy_array, r"Net: the forward draws random numbers on the host \(numpy\)"),
        (wrong_index, r"test_refusals.py:\d+: the model cannot be traced, it raises IndexError"),
    ],
    ids=["PythonDraw", "NumpyDraw", "NumpyArray", "WrongIndex"],
)
def test_random_numbers_of_the_host_and_errors_of_numpy_are_refused(
    forward: Callable[[Net, Tensor], Any], text: str
) -> None:
    python, array = random.getstate(), np.random.get_state(legacy=False)
    with pytest.raises(CaptureError, match=text):
        capture(net(forward), example())
    assert random.getstate() == python
    assert str(np.random.get_state(legacy=False)) == str(array)


def test_a_cache_in_the_outputs_is_refused_by_name() -> None:
    model = CASES["gpt2"].model()
    model.config.use_cache = True  # type: ignore[union-attr]
    with pytest.raises(CaptureError, match=r"model\.config\.use_cache: the model returns a cache.*use_cache = False"):
        capture(model, CASES["gpt2"].example())


def test_a_cache_as_an_argument_is_refused() -> None:
    batch = {**CASES["gpt2"].example(), "past_key_values": transformers.DynamicCache()}
    with pytest.raises(CaptureError, match="past_key_values"):
        capture(CASES["gpt2"].model(), batch)


class KeyedBySize(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length)
        return self.down(self.up(x)).sum() * self.tables[length].sum()


def test_a_size_as_a_dictionary_key_is_refused_for_what_it_is() -> None:
    with pytest.raises(
        CaptureError, match=r"test_refusals\.py:\d+: the model uses a size as a dictionary key.*in each call"
    ):
        capture(seeded(KeyedBySize), example())


def conditional(m: Net, x: Tensor) -> Any:
    h = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (m.up(x),))
    return m.down(h).sum()


def test_control_flow_operators_are_refused() -> None:
    with pytest.raises(CaptureError, match="higher-order operator cond is not supported"):
        capture(net(conditional), example())


def test_dynamo_knows_torch_s_functions_after_a_trace_in_which_it_looked_them_up() -> None:
    trace_rules.clear_lru_cache()  # as `torch.distributed.init_process_group` does
    with pytest.raises(CaptureError, match="higher-order operator cond is not supported"):
        capture(net(conditional), example())
    compiled = torch.compile(lambda x: x if torch.compiler.is_compiling() else -x, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).eq(1).all()


def test_where_nothing_works_both_reasons_are_given() -> None:
    with pytest.raises(CaptureError, match=r"test_refusals\.py:\d+: the model cannot be traced: .*; and with Dynamo: "):
        capture(net(lambda m, x: m.down(x).sum()), example())


def test_refusals_are_input_errors() -> None:
    with pytest.raises(InputError):
        capture(net(branch), example())


# Models that something wrapped before fxpar saw them are refused by that, and not by what it leads to.


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
