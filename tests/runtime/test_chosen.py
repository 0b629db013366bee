"""Chosen plans on real processes: sequence-parallel training is that of one process, sharded logits are DTensors."""

from __future__ import annotations

import pytest
import torch

from tests.runtime import chosen
from tests.runtime.test_training import assert_same
from tests.runtime.world import World
from tests.zoo import BATCH, SEQUENCE, VOCABULARY


@pytest.mark.matrix
def test_sequence_parallel_training_is_that_of_one_process(world2: World) -> None:
    wanted = chosen.train("gpt2", 20)
    for found in world2.run(chosen.train, "gpt2", 20):
        assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert_same(found["state"], wanted["state"], 1e-5)
        _, where, reason, remedy = found["odd"]
        assert where == "batch entry input_ids"
        assert reason == "has size 15 in dimension 1, which 2 ranks cannot share out"
        assert remedy == "pad it to a multiple of 2, or set sequence_parallel=False"


@pytest.mark.matrix
def test_logits_over_an_odd_vocabulary_are_a_dtensor(world2: World) -> None:
    wanted = chosen.logits("llama")
    parts = []
    for found in world2.run(chosen.logits, "llama"):
        torch.testing.assert_close(found["whole"], wanted["whole"], rtol=0, atol=1e-5)
        assert found["shape"] == (BATCH, SEQUENCE, VOCABULARY)
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
        parts.append(found["part"][-1])
    assert parts == [130, 129]
