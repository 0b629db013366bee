"""Each model by value: loss, outputs and every parameter gradient of all ranks against the single device."""

from __future__ import annotations

import pytest

from fxpar.verify.values import TOLERANCE
from tests.models.table import Record, add_row
from tests.models.variants import Variant, run

# Each model at tp 2 and 4, with odd sizes; every pair of options' values occurs with some model. Every time run the
# first ones, with each value of each option; `test_matrix.py` has all.
_COMBINATIONS = [
    ("gpt2", Variant(4, "positions", recompute=True, frozen=True, attention="eager")),
    ("bert", Variant(2, "right", attention="eager", odd=True)),
    ("llama", Variant(2, "left", recompute=True, odd=True)),
    ("vit", Variant(4, frozen=True, odd=True)),
    ("qwen3", Variant(4, "left", recompute=True)),
    ("bloom", Variant(2, "left", frozen=True, odd=True)),
    ("gpt2", Variant(2, "left", odd=True)),
    ("bert", Variant(4, "left", frozen=True)),
    ("llama", Variant(4, "right", attention="eager")),
    ("qwen3", Variant(2, "none", frozen=True, odd=True)),
    ("encoder", Variant(4, odd=True)),
    ("nanogpt", Variant(2, odd=True)),
    ("gpt2", Variant(2, "right", odd=True)),
    ("llama", Variant(2, "positions", frozen=True)),
    ("bloom", Variant(4, "right", recompute=True)),
    ("nanogpt", Variant(4, frozen=True)),
    ("vit", Variant(2, attention="eager", recompute=True)),
    ("encoder", Variant(2, frozen=True)),
]
_EVERY_TIME = 4


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=[] if i < _EVERY_TIME else [pytest.mark.matrix], id=f"{name}-{variant}")
        for i, (name, variant) in enumerate(_COMBINATIONS)
    ],
)
def test_every_gradient_is_the_single_device_s(name: str, variant: Variant, record_property: Record) -> None:
    assert variant.possible(name)
    found = run(name, variant)
    assert found.ok, found.values
    assert found.values is not None
    assert max(found.values.loss_error, found.values.output_error, found.values.max_grad_error) <= TOLERANCE
    assert found.values.gradients == sum(p.trainable for p in found.program.parameters)
    assert found.split_flops > 0.8
    add_row(record_property, name, variant.tp, variant.padding, found)
