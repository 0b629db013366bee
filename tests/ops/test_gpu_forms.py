"""What a program needs on a GPU, lowered without one."""

from __future__ import annotations

import importlib.util

import pytest

from fxpar.capture.capture import capture
from fxpar.errors import InputError
from fxpar.manager import PassManager
from fxpar.ops.lower import lower
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from tests.zoo import CASES


def test_dropout_on_a_gpu_asks_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["gpt2"]
    captured = capture(case.model(), case.example(), None, case.loss)
    program = PassManager(DEFAULT_PASSES).run(captured.program.with_(plan=Plan()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="Triton is not installed") as caught:
        lower(program, {}, "cuda")
    assert caught.value.where == "dropout"
