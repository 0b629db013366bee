"""Operators without gradients refuse operands that ask for one, where torch would only warn."""

from __future__ import annotations

import pytest
import torch

from fxpar.errors import InputError
from fxpar.ops.dropped_attention import dropped_attention
from fxpar.ops.peer_copies import added, arrived, one_shot_sum, send_copies, take_copies, taken_sum


@pytest.mark.parametrize(
    "call",
    [
        lambda x: added(x, x.detach(), "none"),
        lambda x: arrived(torch.zeros(1, dtype=torch.uint8), x, "none", 1),
        lambda x: one_shot_sum(x, "none", 1),
        lambda x: send_copies(x, "sum", "none", 1),
        lambda x: take_copies(torch.zeros(1, dtype=torch.uint8), x, "gather", "none", 1),
        lambda x: taken_sum(torch.zeros(1, dtype=torch.uint8), x, "none", 1),
        lambda x: dropped_attention(x, x, x, None, x.detach().int(), 0.5, False, 1.0),
    ],
    ids=["added", "arrived", "one_shot_sum", "send_copies", "take_copies", "taken_sum", "dropped_attention"],
)
def test_an_operand_that_asks_for_a_gradient_is_refused(call: object) -> None:
    assert callable(call)
    x = torch.ones(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(InputError, match=r"an operand asks for a gradient.*torch\.no_grad\(\)"):
        call(x)
