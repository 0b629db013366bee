"""Models that are unusual to cut into stages have the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime import staged
from tests.runtime.world import World


@pytest.mark.parametrize("plan", [{"pp": 2, "microbatches": 2}], ids=str)
@pytest.mark.parametrize("name", staged.MODELS)
def test_each_rank_has_the_gradients_of_one_process(world2: World, name: str, plan: dict[str, Any]) -> None:
    one = staged.step(name, {})
    found = world2.run(staged.step, name, plan)
    for rank in found:
        assert rank.loss == pytest.approx(one.loss, rel=1e-12)
        for fqn, gradient in rank.gradients.items():
            torch.testing.assert_close(gradient, one.gradients[fqn], rtol=1e-10, atol=1e-12, msg=f"{fqn} of {name}")
    assert all("layers.0.weight" in rank.gradients for rank in found)  # which both hold
    assert set().union(*(rank.gradients for rank in found)) == set(one.gradients)
