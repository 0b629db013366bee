"""Floating tensors that a forward takes come in the plan's type, as FSDP2 casts them, or as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.errors import InputError
from fxpar.verification import verify
from tests.products import few

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16_weights": torch.bfloat16}


class Nested(nn.Module):
    """Takes floating tensors in a nest, beside integers and a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, more: dict[str, list[Tensor]], ids: Tensor, mask: Tensor) -> Tensor:
        """The features of x: [b, 6]."""
        shift, scale = more["both"]
        x = x.where(mask[:, None], shift) * scale + ids[:, None]
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x, shift, scale = torch.randn(3, 4, 6, generator=generator, dtype=dtype)
    return {"x": x, "more": {"both": [shift, scale]}, "ids": torch.arange(4), "mask": torch.arange(4) > 0}


def loss(outputs: Tensor, given: dict[str, Any]) -> Tensor:
    """Of the outputs and of what the forward has got too, which is none of its arguments here."""
    assert given["x"].dtype == torch.float64
    return functional.mse_loss(outputs.double(), given["x"])


def by_hand(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs and loss as FSDP2 computes them."""
    model, whole = Nested().to(dtype), batch()
    shift, scale = (t.to(dtype) for t in whole["more"]["both"])
    outputs = model(whole["x"].to(dtype), {"both": [shift, scale]}, whole["ids"], whole["mask"])
    return outputs.detach(), loss(outputs, whole).detach()


@pytest.mark.parametrize("precision", few(DTYPES, ["bf16", "fp16"]))
def test_floating_inputs_have_the_plan_s_type(precision: str) -> None:
    outputs, value = by_hand(DTYPES[precision])
    plan = fxpar.Plan(precision=precision)
    with_loss = fxpar.parallelize(Nested(), plan, batch(), loss)
    plain = fxpar.parallelize(Nested(), plan, batch())
    unit = 16 * torch.finfo(DTYPES[precision]).eps
    torch.testing.assert_close(plain(**batch()), outputs, rtol=unit, atol=unit)
    torch.testing.assert_close(with_loss(**batch()), outputs, rtol=unit, atol=unit)
    scaler = torch.amp.GradScaler("cpu") if precision == "fp16" else None
    torch.testing.assert_close(with_loss.train_step(batch(), scaler=scaler), value, rtol=unit, atol=unit)


def test_they_are_left_where_the_plan_says_so() -> None:
    own = fxpar.parallelize(Nested().bfloat16(), fxpar.Plan(), batch(torch.bfloat16))
    assert own(**batch(torch.bfloat16)).dtype == torch.bfloat16
    left = fxpar.Plan(precision="bf16", cast_inputs=False)
    with pytest.raises(InputError, match="same dtype"):
        fxpar.parallelize(Nested(), left, batch())
    assert fxpar.parallelize(Nested(), left, batch(torch.bfloat16))(**batch(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("function", [None, loss])
def test_a_proof_by_values_has_them_too(function: Any) -> None:
    found = verify(Nested(), batch(), fxpar.Plan(tp=2, dp=2, precision="bf16"), loss=function)
    assert found.ok, found.values
    kinds = {node.meta["custom"]["fxpar"].type.dtype for node in found.program.graph.nodes if "linear" in node.name}
    assert kinds == {torch.bfloat16}
