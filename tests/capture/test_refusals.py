"""Control flow on values, caches and the like are refused with the author's line and a remedy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo import trace_rules

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError, InputError
from tests.capture.models import Net, example, faithful, net, seeded
from tests.zoo import CASES


class Branch(Net):
    def forward(self, x: Tensor) -> Any:
        if x.sum() > 0:
            return self.up(x).sum()
        return self.down(self.up(x)).sum()


class Check(Net):
    def forward(self, x: Tensor) -> Any:
        return self.up(x).sum() if torch.all(x > 100) else self.down(self.up(x)).sum()


class Nonzero(Net):
    def forward(self, x: Tensor) -> Any:
        rows = (x[:, 0, 0] > 0).nonzero()
        return self.down(self.up(x[rows[:, 0]])).sum()


class MaskedRows(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)[x[..., 0] > 0]).sum()


class IntegerItem(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)).sum() * x.argmax().item()


class FloatOf(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)).sum() * sum(float(v) for v in x[0, 0])


@pytest.mark.parametrize("kind", [Branch, Check, Nonzero, MaskedRows, IntegerItem, FloatOf], ids=lambda k: k.__name__)
def test_what_depends_on_values_is_refused_at_its_line(kind: type[Net], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        CaptureError, match=r"^test_refusals\.py:\d+: .*(values of tensors|value of a tensor)"
    ) as caught:
        capture(seeded(kind), example())
    assert caught.value.remedy
    assert "def forward" not in "".join(capfd.readouterr())  # torch prints the graph of a failed trace


def test_masks_that_keep_the_shape_are_no_obstacle() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        h = m.up(x)
        h[x[..., 0] > 0] = 0.0
        return m.down(torch.where(x[..., :1] < 0, h, h * 2)).sum()

    faithful(net(forward), example())


class PythonDraw(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)).sum() * random.random()


class NumpyDraw(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)[:, np.random.permutation(5)]).sum() * 1.5


class NumpyArray(Net):
    """What is drawn makes numpy raise where sizes are symbolic, before the forward is at its end."""

    def forward(self, x: Tensor) -> Any:
        np.put_along_axis(np.zeros((2, x.shape[1])), np.random.rand(2, 1), -1, 1)  # type: ignore[arg-type]
        return self.down(self.up(x)).sum()


class WrongIndex(Net):
    def forward(self, x: Tensor) -> Any:
        np.put_along_axis(np.zeros((2, 5)), np.full((2, 1), 0.5), -1, 1)
        return self.down(self.up(x)).sum()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PythonDraw, r"test_refusals.py:\d+: the forward draws random numbers on the host, which"),
        (NumpyDraw, r"NumpyDraw: the forward draws random numbers on the host \(numpy\)"),
        (NumpyArray, r"NumpyArray: the forward draws random numbers on the host \(numpy\)"),
        (WrongIndex, r"test_refusals.py:\d+: the model cannot be traced, it raises IndexError"),
    ],
)
def test_random_numbers_of_the_host_and_errors_of_numpy_are_refused(kind: type[Net], text: str) -> None:
    python, array = random.getstate(), np.random.get_state(legacy=False)
    with pytest.raises(CaptureError, match=text):
        capture(seeded(kind), example())
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


class Conditional(Net):
    def forward(self, x: Tensor) -> Any:
        h = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (self.up(x),))
        return self.down(h).sum()


def test_control_flow_operators_are_refused() -> None:
    with pytest.raises(CaptureError, match="higher-order operator cond is not supported"):
        capture(seeded(Conditional), example())


def test_dynamo_knows_torch_s_functions_after_a_trace_in_which_it_looked_them_up() -> None:
    trace_rules.clear_lru_cache()  # as `torch.distributed.init_process_group` does
    with pytest.raises(CaptureError, match="higher-order operator cond is not supported"):
        capture(seeded(Conditional), example())
    compiled = torch.compile(lambda x: x if torch.compiler.is_compiling() else -x, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).eq(1).all()


class Broken(Net):
    def forward(self, x: Tensor) -> Any:
        return self.down(x).sum()


def test_where_nothing_works_both_reasons_are_given() -> None:
    with pytest.raises(CaptureError, match=r"test_refusals\.py:\d+: the model cannot be traced: .*; and with Dynamo: "):
        capture(seeded(Broken), example())


def test_refusals_are_input_errors() -> None:
    with pytest.raises(InputError):
        capture(seeded(Branch), example())
