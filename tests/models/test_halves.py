"""Two half batches in turn give what one device computes of the whole: loss, outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest

from fxpar.plan.plan import Plan
from fxpar.verify.values import verify_values
from tests.models.test_data_parallel import compiled, loaded, reference

MODELS = ("gpt2", "llama", "bert", "t5", "gpt_neox", "bloom", "encoder", "mixtral", "gemma3_text")
PLANS: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 4},
    {"dp": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"tp": 2, "dp": 3, "loss_reduction": "local_mean"},
)
FEW = {("gpt2", 4), ("llama", 1)}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if (name, number) in FEW else [pytest.mark.matrix], id=f"{name}-{plan}")
        for name in MODELS
        for number, plan in enumerate(PLANS)
    ],
)
def test_halves_give_what_one_device_does(name: str, plan: dict[str, Any]) -> None:
    program = compiled(name, Plan(**plan, interleave_halves=True))
    assert program.plan.interleave_halves
    assert all(axis in plan for axis in program.axes)
    state, inputs, wanted = reference(name)
    if "loss_reduction" in plan:
        whole = compiled(name, Plan(**plan))
        expected = verify_values(loaded(name)[2].program, whole, state, inputs, reference=wanted)
        found = verify_values(loaded(name)[2].program, program, state, inputs, reference=wanted)
        assert (found.loss_error, found.worst) == pytest.approx((expected.loss_error, expected.worst))
        return
    report = verify_values(loaded(name)[2].program, program, state, inputs, reference=wanted)
    assert report.ok, report
    assert report.gradients == len(wanted.gradients)
