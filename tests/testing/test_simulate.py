"""All ranks of a split model in one process, put together again: they are the author's model."""

from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.errors import InputError
from tests.zoo import CASES


@pytest.mark.parametrize(
    ("case", "plan", "name", "ranks", "part"),
    [
        ("gpt2", fxpar.Plan(tp=2), "transformer.h.0.mlp.c_fc.weight", [0, 1], 2),
        ("llama", fxpar.Plan(tp=2, dp=2, shard="parameters"), "model.layers.0.mlp.up_proj.weight", [0, 1, 2, 3], 4),
        ("gpt2", fxpar.Plan(pp=2), "transformer.h.0.mlp.c_fc.weight", [0], 1),
        ("gpt2", fxpar.Plan(pp=2), "transformer.wte.weight", [0, 1], 1),
    ],
    ids=["split", "shared", "stage", "tied over stages"],
)
def test_a_simulated_step_is_that_of_the_model(
    case: str, plan: fxpar.Plan, name: str, ranks: list[int], part: int
) -> None:
    model: Any = CASES[case].model().double().eval()
    batch = {key: torch.cat([value, value[:1]]) for key, value in CASES[case].example().items()}
    split = fxpar.testing.simulate(model, batch, plan)
    output = model(**batch)
    output.loss.backward()
    assert split.loss is not None
    # transformers computes losses in float32.
    torch.testing.assert_close(split.loss, output.loss.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split.outputs["logits"], output.logits)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert split.gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(split.gradients[key], gradient, rtol=1e-5, atol=1e-6, msg=key)
    assert list(split.shards[name]) == ranks
    assert all(shard.numel() * part == model.get_parameter(name).numel() for shard in split.shards[name].values())


def test_outputs_of_a_model_without_a_loss_are_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    split = fxpar.testing.simulate(model, x, fxpar.Plan(dp=2, tp=3, split={"0": "column", "2": "row"}))
    assert split.loss is None
    (output,) = split.outputs.values()
    torch.testing.assert_close(output, model(x))
    assert [part.shape for part in split.shards["0.weight"].values()] == [(3, 6)] * 6
    torch.testing.assert_close(torch.cat([split.shards["0.weight"][rank] for rank in range(3)]), model[0].weight)


def test_more_ranks_than_one_process_simulates_are_refused() -> None:
    with pytest.raises(InputError, match="1024 ranks are more than the 512"):
        fxpar.testing.simulate(nn.Linear(4, 4), torch.randn(2, 4), fxpar.Plan(dp=1024))
