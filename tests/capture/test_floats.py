"""Floating numbers of sizes: Python's in the model, tensors in the program, the same values at every size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.capture.capture import capture
from fxpar.capture.size_expressions import SizeError
from fxpar.ir.program import ScalarType, TensorType, note
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from tests.capture.models import Net, eager, example, faithful, net, run
from tests.products import few

Forward = Callable[[Any, Tensor], Tensor]
NUMBERS: dict[str, Forward] = {
    "one over the rows": lambda m, x: m.up(x).sum() * (1.0 / x.shape[0]),
    "over a root": lambda m, x: (m.up(x) / x.shape[0] ** 0.5).square().sum(),
    "over math's root": lambda m, x: (m.up(x) / math.sqrt(x.shape[1])).square().sum(),
    "a negative power": lambda m, x: (m.up(x) * x.shape[1] ** -0.5).square().sum(),
    "half": lambda m, x: m.up(x).sum() / (x.shape[0] / 2),
    "a number cast": lambda m, x: m.up(x).sum() / torch.sym_float(x.shape[0]),
    "all elements": lambda m, x: m.up(x).square().sum() / (0.5 * x.numel()),
    "arithmetic": lambda m, x: (m.up(x) * (7 - abs(-(x.shape[1] / 3)) + (x.shape[0] / 3) % 2.0 - x.shape[0])).sum(),
    "a base": lambda m, x: (m.up(x) * 0.5 ** (x.shape[1] / 2)).sum(),
    "the larger": lambda m, x: m.up(x).sum() / max(x.shape[0] / 2, 0.5) + m.up(x).sum() * min(x.shape[0] / 2, 9.5),
    "added": lambda m, x: (m.up(x) + 1 / x.shape[0] - x.shape[1] / 3).square().sum(),
    "taken from": lambda m, x: (1 / x.shape[0] - m.up(x)).square().sum(),
    "divided by values": lambda m, x: ((x.shape[0] / 2) / m.up(x).exp()).sum(),
    "an exponent": lambda m, x: (m.up(x).abs() ** (1 / x.shape[1])).sum(),
    "powers of it": lambda m, x: ((x.shape[1] / 2) ** m.up(x)).sum(),
    "a remainder": lambda m, x: m.up(x).remainder(x.shape[1] / 7).sum(),
    "bounds": lambda m, x: m.up(x).clamp(-1 / x.shape[0], 0.5).sum() + m.up(x).clamp_max(1 / x.shape[0]).sum(),
    "a fill": lambda m, x: m.up(x).masked_fill(m.up(x) > 0, 1 / x.shape[0]).square().sum(),
    "a choice": lambda m, x: torch.where(m.up(x) > 0, m.up(x), 1 / x.shape[0]).square().sum(),
    "a threshold": lambda m, x: torch.where(m.up(x) > 1 / x.shape[0], m.up(x), 0).sum(),
    "a scale of a sum": lambda m, x: torch.add(m.up(x), m.up(x).exp(), alpha=1 / x.shape[0]).sum(),
    "filled": lambda m, x: (torch.full((6,), 1 / x.shape[0], dtype=x.dtype) * m.up(x)).sum(),
    "filled alike": lambda m, x: (torch.full_like(m.up(x), x.shape[1] / 3) * m.up(x)).sum(),
    "a tensor": lambda m, x: (torch.tensor(1 / x.shape[0]) * m.up(x)).sum(),
    "integers meet it": lambda m, x: (torch.arange(6) * (1 / x.shape[0]) * m.up(x)).sum(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_sizes_are_those_of_every_size(name: str) -> None:
    others = [example(*shape) for shape in ((7, 5, 4), (2, 3, 4), (4, 9, 4))]
    captured = faithful(net(NUMBERS[name]), example(), None, *others)
    assert [s.name for s in captured.program.symbols] == ["b", "s"]
    kinds = [note(n).type for n in captured.program.graph.nodes if n.op == "call_function" and n.users]
    assert all(isinstance(kind, (TensorType, ScalarType)) for kind in kinds)


def test_a_number_is_a_tensor_in_double_precision_until_it_meets_another() -> None:
    captured = capture(Net(NUMBERS["half"]).float(), example().float())
    lines = [line.split("  #")[0] for line in print_program(captured.program).splitlines()]
    assert lines[-6:] == [
        "%sum_1 = aten.sum.default(%linear) : f32[]",
        "%truediv_size = aten.scalar_tensor.default(%sym_size_int, dtype=dtype.f64) : f64[]",
        "%truediv = aten.div.Tensor(%truediv_size, 2) : f64[]",
        "%div_number = aten._to_copy.default(%truediv, dtype=dtype.f32) : f32[]",
        "%div = aten.div.Tensor(%sum_1, %div_number) : f32[]",
        "return output=%div",
    ]


TYPES = (torch.float32, torch.bfloat16, torch.float16)


OF_ALL_TYPES = [name for name in NUMBERS if name not in ("a tensor", "a remainder")]
EVERY_TIME = [*zip(OF_ALL_TYPES, itertools.cycle(TYPES), strict=False)]


@pytest.mark.parametrize(("name", "dtype"), few(itertools.product(OF_ALL_TYPES, TYPES), EVERY_TIME))
def test_numbers_leave_element_types_and_roundings_as_they_are(name: str, dtype: torch.dtype) -> None:
    model, batch = net(NUMBERS[name]).to(dtype), example().to(dtype)
    captured = capture(model, batch)
    wanted, found = eager(captured, model, batch), run(captured, model, batch)
    # One rounding more or less where the backward multiplies by what the forward had before it was rounded.
    torch.testing.assert_close(dict(found.outputs), dict(wanted.outputs), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for key, gradient in wanted.gradients.items():
        unit = 4 * torch.finfo(dtype).eps * float(gradient.abs().max())
        torch.testing.assert_close(found.gradients[key], gradient, rtol=0.0, atol=unit)


ALONE: dict[str, Forward] = {
    "steps": lambda m, x: (torch.linspace(0, 1 / x.shape[1], 6, dtype=x.dtype) * m.up(x)).sum(),
    "a size": lambda m, x: m.up(x)[:, : round(x.shape[1] / 2)].sum(),
    "an integer": lambda m, x: (torch.full((6,), x.shape[1] / 2, dtype=torch.long) * m.up(x)).sum(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_takes_numbers_alone_fixes_the_size(name: str) -> None:
    captured = faithful(net(ALONE[name]), example(), None, example(2, 5, 4))
    assert [s.name for s in captured.program.symbols] == ["b"]


def test_what_fixes_the_rows_is_refused_where_ranks_share_them_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        scaled: Tensor = torch.linspace(0, 1 / x.shape[0], 6, dtype=x.dtype) * m.up(x)
        return scaled.sum()

    reason = (
        r"%linspace \(.*test_floats.py:\d+\): takes %truediv, a floating number that depends on sizes, as no tensor"
    )
    with pytest.raises(SizeError, match=reason):
        capture(net(forward), example(4, 5, 4), Plan(dp=2))
    faithful(net(forward), example())
