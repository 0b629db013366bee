"""The loss and what counts in it are on the last stage, wherever the model computes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.compile import compile_model
from fxpar.errors import CheckFailed, InputError
from fxpar.ir.program import Program, update
from fxpar.ir.stages import stage_of, stages_of
from fxpar.plan.option_groups import Pipeline
from fxpar.rewrite.loss_reduction import COUNT
from fxpar.verify.static import check_stages


class _Counted(nn.Module):
    """Counts before its first layer, and has a layer behind the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.behind = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        count = mask.sum()
        h = self.second(self.first(x).tanh())
        return {"loss": (h.square().mean(-1) * mask).sum() / count, "more": self.behind(h)}


def _compiled(**options: object) -> Program:
    plan = fxpar.Plan(pp=2, microbatches=2, **options)  # type: ignore[arg-type]
    return compile_model(_Counted(), {"x": torch.randn(8, 8), "mask": torch.ones(8)}, plan).program


def test_the_last_stage_has_the_count() -> None:
    program = _compiled(dp=2, loss_reduction="token", pipeline=Pipeline({"second": 1}))
    assert COUNT in program.outputs
    assert {COUNT, "loss"} <= set(stages_of(program)[-1].program.outputs)
    check_stages(program)
    node = program.output_nodes()[COUNT]
    assert stage_of(node) == 1
    update(node, stages=(0,))
    with pytest.raises(CheckFailed):
        check_stages(program)


def test_a_stage_that_would_begin_behind_the_loss_is_refused_with_a_reason() -> None:
    with pytest.raises(InputError) as caught:
        _compiled(pipeline=Pipeline({"behind": 1}))
    assert "behind the loss" in caught.value.reason
