"""What a program calls on a GPU, lowered without one: fused attention where its bits may be its own, else exact."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest

from fxpar.capture import capture
from fxpar.errors import InputError
from fxpar.manager import PassManager
from fxpar.ops import counter
from fxpar.ops.collectives import Group
from fxpar.ops.lower import Lowered, lower
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.program.program import Program
from tests.zoo import CASES


@cache
def captured(name: str, is_checkpointed: bool) -> Program:
    case = CASES[name]
    model: Any = case.model()
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    return capture(model, case.example(), None, case.loss).program


def lowered(name: str, plan: Plan, device: str = "cuda", is_checkpointed: bool = False) -> Lowered:
    program = PassManager(DEFAULT_PASSES).run(captured(name, is_checkpointed).with_(plan=plan))
    return lower(program, {axis: Group(axis, n) for axis, n in program.axes.items()}, device)


def attention_forms(found: Lowered) -> set[Any]:
    return {node.target for node in found.module.graph.nodes} & {counter.attention, counter.fused_attention}


def test_attention_with_dropout_is_fused_on_gpus() -> None:
    found = lowered("llama", Plan(tp=2))
    assert attention_forms(found) == {counter.fused_attention}
    assert found.draws


def test_attention_keeps_the_exact_form_where_it_must() -> None:
    # Asked for, on a CPU; recomputed; with eight heads that three ranks hold alike.
    exact = [
        lowered("llama", Plan(tp=2, rng="exact")),
        lowered("llama", Plan(tp=2), "cpu"),
        lowered("llama", Plan(tp=2), is_checkpointed=True),
        lowered("llama", Plan(tp=3)),
    ]
    for found in exact:
        assert attention_forms(found) == {counter.attention}
        assert not found.draws


def test_dropout_on_a_gpu_asks_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="Triton is not installed") as caught:
        lowered("gpt2", Plan())
    assert caught.value.where == "dropout"
