"""A program in float64: numbers that torch takes from types stay what they are, and every float is a double."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import CheckFailed
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import verify
from fxpar.verify.reference_program import promote

HIDDEN = 16
EPS = ", eps=1.1920928955078125e-07)"


class Applied(nn.Module):
    """An operation between two linear layers."""

    def __init__(self, operation: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of x: [b, s, h] and y: [b, s, h]."""
        h = torch.relu(self.up(self.operation(x, self.weight)))
        return functional.mse_loss(self.operation(self.down(h), self.weight), y)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 5, HIDDEN, generator=generator) for name in ("x", "y")}


def _small(x: Tensor) -> Tensor:
    """Values whose mean square is not far from float32's eps."""
    return x * 1e-3


DEFAULTS: dict[str, Callable[[Tensor, nn.Parameter], Tensor]] = {
    "rms_norm": lambda x, w: functional.rms_norm(_small(x), (HIDDEN,)),
    "rms_norm of a weight": lambda x, w: functional.rms_norm(_small(x), (HIDDEN,), w),
    "rms_norm by names": lambda x, w: functional.rms_norm(_small(x), (HIDDEN,), weight=w, eps=None),
    "nan_to_num": lambda x, w: torch.nan_to_num(1 / torch.relu(x)) * 1e-37 + x,
    "nan_to_num of one": lambda x, w: torch.nan_to_num(1 / torch.relu(x), neginf=-1.0) * 1e-37 + x,
}
# What torch makes of integers alone, or of nothing, has its default type.
FROM_INTEGERS: dict[str, Callable[[Tensor, nn.Parameter], Tensor]] = {
    "a quotient": lambda x, w: functional.linear(x, (torch.arange(HIDDEN) / 7).expand(HIDDEN, HIDDEN)),
    "a root": lambda x, w: functional.linear(x, torch.arange(HIDDEN).sqrt().expand(HIDDEN, HIDDEN)),
    "eye": lambda x, w: x @ torch.eye(HIDDEN),
    "a window": lambda x, w: x @ torch.outer(torch.hann_window(HIDDEN), w),
    "two numbers": lambda x, w: x @ torch.where(torch.eye(HIDDEN) > 0, 1.0, 0.5),
    "angles": lambda x, w: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(8), torch.arange(8) / 7)
    ).flatten(-2),
}


@pytest.mark.parametrize("name", [*DEFAULTS, *FROM_INTEGERS])
def test_a_model_has_the_values_of_its_own_types(name: str) -> None:
    torch.manual_seed(0)
    found = verify(Applied((DEFAULTS | FROM_INTEGERS)[name]), batch(), Plan(tp=2))
    assert found.ok, found.values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_defaults_are_numbers_that_torch_takes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Applied(DEFAULTS["rms_norm of a weight"]).to(dtype)
    program = capture(model, {name: value.to(dtype) for name, value in batch().items()}).program
    (eps,) = {n.kwargs["eps"] for n in program.graph.nodes if n.target is torch.ops.aten.rms_norm.default}
    x = torch.full((HIDDEN,), 1e-4, dtype=dtype)
    assert torch.equal(functional.rms_norm(x, (HIDDEN,)), functional.rms_norm(x, (HIDDEN,), eps=float(eps)))
    assert not torch.equal(functional.rms_norm(x, (HIDDEN,)), functional.rms_norm(x, (HIDDEN,), eps=2 * float(eps)))


def test_a_text_may_leave_them_out() -> None:
    torch.manual_seed(0)
    model = Applied(DEFAULTS["rms_norm"])
    text = print_program(capture(model, batch()).program)
    assert text.count(EPS) == 2
    assert print_program(promote(parse_program(text.replace(EPS, ")")))).count(EPS) == 2


def test_bits_of_numbers_are_refused_by_value_alone() -> None:
    torch.manual_seed(0)
    model = Applied(lambda x, w: x * (x.detach().view(torch.int32) > 0))
    assert verify(model, batch(), Plan(tp=2), level="static").ok
    with pytest.raises(CheckFailed, match=r"reads the bits of floating numbers, .*--level static"):
        verify(model, batch(), Plan(tp=2))
