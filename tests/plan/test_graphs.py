"""Options of CUDA graphs: what contradicts itself is refused with what to write."""

from __future__ import annotations

from typing import Any

import pytest

from fxpar.errors import PlanError
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import CudaGraphs


def test_a_plan_keeps_them_through_yaml() -> None:
    plan = Plan(tp=2, cuda_graphs=CudaGraphs("partial", scope=("mlp", "attn", "mlp"), variants=3))
    assert plan.cuda_graphs.scope == ("attn", "mlp")
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.to_dict()["cuda_graphs"] == {"impl": "partial", "scope": ["attn", "mlp"], "variants": 3}
    assert "cuda_graphs" not in Plan(tp=2).to_dict()
    assert not plan.on_one_rank().cuda_graphs.is_on


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"impl": "whole"}, "cuda_graphs.impl='whole' is unknown: choose one of none, partial"),
        ({"impl": "full_iteration", "scope": ("attn",)}, "scope is of impl partial"),
        ({"impl": "partial", "scope": "attn"}, "must be a list"),
        ({"impl": "partial", "scope": ("attention",)}, "choose from attn, mlp"),
        ({"impl": "partial", "scope": ("moe_preprocess",)}, "needs moe_router"),
        ({"impl": "partial", "scope": ("moe", "moe_router")}, "name one or the others"),
        ({"impl": "partial", "variants": 0}, "must be an integer from 1 to 10000"),
        ({"impl": "partial", "variants": True}, "must be an integer from 1 to 10000"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Plan(cuda_graphs=CudaGraphs(**options))


@pytest.mark.parametrize("text", ["cuda_graphs: partial", "cuda_graphs: {how: partial}"])
def test_a_file_that_says_something_else_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="cuda_graphs"):
        Plan.from_yaml(text)
