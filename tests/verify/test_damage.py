"""Whatever is done to the lines of a text, the checks accept it or say what is wrong: no other exception gets out."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fxpar.compile import compile_model
from fxpar.errors import CheckFailed, FxparError
from fxpar.ir.stages import stages_of
from fxpar.manager import PassManager
from fxpar.passes import step_passes
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Communication
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC, verify_static
from tests.passes.experts import Routed, batch
from tests.passes.test_recompute import Regions
from tests.verify.damage import DAMAGES, damaged
from tests.verify.steps import Small
from tests.zoo import step_of

_WORDS = {name: torch.arange(24).reshape(4, 6) % 20 for name in ("ids", "labels")}


@cache
def texts(name: str) -> tuple[str, ...]:
    """What was captured, what a rank runs forward, and the step; of a pipeline the last stage's."""
    torch.manual_seed(5)
    if name == "dense":
        plan = Plan(dp=2, tp=2, sequence_parallel=True, communication=Communication("copy"))
        compiled = compile_model(Small().double(), _WORDS, plan)
    elif name == "experts":
        compiled = compile_model(Routed("learned", True).double(), batch(5), Plan(dp=2, tp=2, ep=2))
    elif name == "recompute":
        compiled = compile_model(Regions(False).double(), {"x": torch.randn(4, 5, 6).double()}, Plan(dp=2, tp=2))
    else:
        compiled = compile_model(Small().double(), _WORDS, Plan(tp=2, pp=2, microbatches=2))
    program = compiled.program
    found = [compiled.captured.program, program]
    if program.plan.pipeline_stages > 1:
        stage = stages_of(program)[-1]
        trained = [p.fqn for p in stage.program.parameters if p.trainable]
        passes = step_passes(stage.program.outputs, stage.tangents, trained, splits=True)
        found += [stage.program, PassManager(passes, STATIC, checked=True).run(stage.program)]
    else:
        found.append(step_of(program, program.outputs))
    return tuple(map(print_program, found))


def _check(text: str) -> str:
    try:
        verify_static(parse_program(text))
    except FxparError as error:
        return type(error).__name__
    return "accepted"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("recompute", 2 * len(DAMAGES)),
        ("stages", len(DAMAGES)),
        *(pytest.param(name, 900, marks=pytest.mark.matrix) for name in ("dense", "experts", "recompute", "stages")),
    ],
)
def test_damage_is_accepted_or_refused(name: str, count: int) -> None:
    for place, text in enumerate(texts(name)):
        for what, edited in damaged(text, count, seed=10 * count + place):
            try:
                _check(edited)
            except Exception as error:
                error.add_note(f"text {place} of {name}, {what}")
                raise


def test_a_part_of_a_tuple_that_is_taken_twice_is_named() -> None:
    text = texts("stages")[-1]
    first, second = "operator.getitem(%native_layer_norm, 1)", "operator.getitem(%native_layer_norm, 2)"
    assert first in text
    assert second in text
    with pytest.raises(
        CheckFailed, match=r"takes item 1 of %native_layer_norm a second time; use %\w+, or take another"
    ):
        verify_static(parse_program(text.replace(second, first)))
