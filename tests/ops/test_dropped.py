"""Dropout as Inductor has it: bits of words, which a forward and its backward draw once."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpar.ops
from fxpar.capture.capture import capture
from fxpar.errors import InputError
from fxpar.manager import PassManager
from fxpar.ops import counter, random
from fxpar.ops.lower import lower
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.runtime.inductor import Inductor
from tests.zoo import CASES

ORIGIN = 0xFFFFFFF1
STATE = torch.tensor([5, 3, 1])


def words(count: int, p: float) -> Tensor:
    """Those of a whole tensor, of the plain form."""
    bits = counter.random_words((-(-count // 32) * 32,), STATE, ORIGIN, []) >= int(p * 2**32)
    found = (bits.view(-1, 32).long() << torch.arange(32)).sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).int()


@pytest.mark.parametrize("shape", [(4, 3, 64), (2, 40), (5, 7, 9), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bit_of_a_word_is_an_element(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = random.dropped(x, words(x.numel(), 0.3), 0.3)
    assert torch.equal(found, counter.dropout(x, STATE, 0.3, ORIGIN, []))


def test_a_forward_and_its_backward_have_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(cut: Any, count: int) -> Tensor:
        drawn.append(count)
        return words(count, cut.p)

    names = "rng rank offset identity p origin run ranks unit".split()
    kernels = SimpleNamespace(
        DropoutShard=lambda *given: SimpleNamespace(**dict(zip(names, given, strict=True))), draw=draw
    )
    monkeypatch.setitem(sys.modules, "fxpar.ops.dropout_kernels", kernels)
    monkeypatch.setattr(fxpar.ops, "dropout_kernels", kernels, raising=False)

    def step(x: Tensor, rng: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        y = random.fused_dropout(x.sin(), rng, 0.3, ORIGIN, []) + x
        return y, gradient + random.fused_dropout(gradient, rng, 0.3, ORIGIN, []) * x.cos()

    x, gradient = torch.randn(2, 4, 8, 64)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(each) for each in (x, STATE, gradient)]
    pair = Inductor(Plan()).pair(step, fakes, mode, 2, 1)
    y, *held = pair.forward([x, STATE])
    (found,) = pair.backward([*held, gradient])
    assert drawn == [x.numel()]
    assert sum(each.numel() for each in held) <= x.numel() + x.numel() // 32
    kept = counter.dropout(torch.ones_like(x), STATE, 0.3, ORIGIN, [])
    torch.testing.assert_close(y, kept * x.sin() + x)
    torch.testing.assert_close(found, gradient + kept * gradient * x.cos())


# What a program needs on a GPU, lowered without one.


def test_dropout_on_a_gpu_asks_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["gpt2"]
    captured = capture(case.model(), case.example(), None, case.loss)
    program = PassManager(DEFAULT_PASSES).run(captured.program.with_(plan=Plan()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="Triton is not installed") as caught:
        lower(program, {}, "cuda")
    assert caught.value.where == "dropout"
