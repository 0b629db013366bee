"""Floating numbers of sizes (`1 / b`, `s ** -0.5`) on ranks: sizes of the whole, counts where ranks share the rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.errors import LayoutError, PlanError
from fxpar.manager import PassManager
from fxpar.passes import canonicalize, divide_batch
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from fxpar.verify.simulate_ranks import step_of
from tests.products import alternate, few

Loss = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two layers and a loss of [b, s, 5]."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.norm(self.up(x)).relu()))


def batch(rows: int = 6, length: int = 10) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, 6, generator=torch.Generator().manual_seed(1))}


LOSSES: dict[str, Loss] = {
    "one over the rows": lambda z: z.square().sum() * (1.0 / z.shape[0]),
    "over a root": lambda z: (z / z.shape[0] ** 0.5).square().sum(),
    "over math's root": lambda z: z.square().sum() / math.sqrt(z.shape[0] * z.shape[1]),
    "a negative power": lambda z: (z * z.shape[1] ** -0.5).square().sum(),
    "half": lambda z: z.square().sum() / (z.shape[0] / 2),
    "all elements": lambda z: z.square().sum() / (0.5 * z.numel()),
    "added": lambda z: (z + 1 / z.shape[0] - z.shape[1] / 3).square().sum(),
    "an exponent": lambda z: ((z.square() + 1) ** (1 / z.shape[0])).sum(),
    "a whole exponent": lambda z: (z.sigmoid() ** z.shape[0]).sum(),
    "a whole base": lambda z: (z.shape[1] ** z.sigmoid()).sum(),
    "half of a size": lambda z: (z * (z.shape[1] // 3)).square().sum() * max(z.shape[0], 4) / (z.shape[1] % 4),
    "bounds": lambda z: z.clamp(-1 / z.shape[0], z.shape[1] / 20).sum(),
    "a fill": lambda z: z.masked_fill(z > 1 / z.shape[0], z.shape[0] / 9).square().sum(),
    "a scale of a sum": lambda z: torch.add(z, z.exp(), alpha=1 / z.shape[0]).sum(),
    "filled": lambda z: (torch.full((5,), 1 / z.shape[0]) * z).square().sum(),
    "a tensor": lambda z: (torch.tensor(z.shape[0]) * z).sum() + (torch.tensor(1 / z.shape[0]) * z).square().sum(),
}
PLANS = {
    "tp": Plan(tp=2),
    "dp": Plan(dp=2),
    "dp, tp": Plan(dp=2, tp=2),
    "sequence": Plan(tp=2, sequence_parallel=True),
    "dp, sequence": Plan(dp=3, tp=2, sequence_parallel=True),
}


# Under every plan; the first of them every time.
FULL = ("one over the rows", "a negative power", "a tensor")
PAIRS = [
    pytest.param(
        name,
        plan,
        marks=[] if name == FULL[0] or plan == ("dp, tp", "sequence")[i % 2] else [pytest.mark.matrix],
    )
    for i, name in enumerate(LOSSES)
    for plan in PLANS
    if name in FULL or plan in ("dp, tp", "sequence")
]


@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_ranks_compute_with_sizes_of_the_whole(name: str, plan: str) -> None:
    found = expect(verify(Net(LOSSES[name]), batch(), PLANS[plan]))
    text = print_program(found.program)
    assert print_program(parse_program(text)) == text


POWERS: dict[str, Loss] = {
    "all pairs of rows": lambda z: (z.mean(1) @ z.mean(1).t()).reshape(-1).softmax(0).square().mean(),
    "all triples of rows": lambda z: torch.einsum("ic,jc,kc->ijk", *[z.mean(1)] * 3).sigmoid().mean(),
    "rows of the bound": lambda z: z.new_ones(max(z.shape[0], 4), 1).mul(z.mean()).square().sum() / z.shape[0] ** 3,
}


@pytest.mark.parametrize("name", few(POWERS, [*POWERS][1:]))
def test_powers_of_sizes_are_sizes(name: str) -> None:
    for sizes in ((6, 10), (5, 7)):
        found = expect(verify(Net(POWERS[name]), batch(*sizes), Plan(tp=2)))
    step = print_program(step_of(found.program))
    assert "**" in step
    assert print_program(parse_program(step)) == step


BEHIND: dict[str, Loss] = {
    "all": lambda z: (z[:, -z.shape[1] :] * torch.arange(1.0, z.shape[1] + 1)[:, None]).square().mean() + z.mean(),
    "all but one": lambda z: (z[:, -(z.shape[1] - 1) :] * z[:, : z.shape[1] - 1]).square().mean(),
    "more than there are": lambda z: z[:, -2 * z.shape[1] :].square().mean(),
}


@pytest.mark.parametrize("name", BEHIND)
def test_slices_that_begin_at_a_size_from_the_end_have_their_gradient(name: str) -> None:
    expect(verify(Net(BEHIND[name]), batch(4, 7), Plan(tp=2)))


class Orders:
    """opt_einsum, which compares sizes."""

    @staticmethod
    def contract_path(equation: str, *shapes: Any, **options: Any) -> Any:
        sizes = [int(size) for shape in shapes for size in getattr(shape, "shape", shape)]
        return ([(0, 1), (0, 1)] if max(sizes) > 1 else [(1, 2), (0, 1)]), ""


def test_sizes_by_which_products_are_ordered_stay_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.opt_einsum, "get_opt_einsum", lambda: Orders)
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", True)
    program = verify(Net(POWERS["all triples of rows"]), batch(6, 10), Plan(tp=2)).program
    assert len(program.symbols) == 2


@pytest.mark.parametrize("name", ["all pairs of rows", "all triples of rows"])
def test_losses_of_all_pairs_of_rows_are_refused_where_ranks_have_part_of_them(name: str) -> None:
    with pytest.raises(LayoutError, match=r"on axis dp: .* set dp=1"):
        verify(Net(POWERS[name]), batch(), Plan(dp=2))


@pytest.mark.parametrize("name", ["one over the rows", "over math's root", "a fill"])
def test_sizes_may_be_odd(name: str) -> None:
    assert verify(Net(LOSSES[name]), batch(5, 7), Plan(tp=2)).ok
    assert verify(Net(LOSSES[name]), batch(9, 7), Plan(dp=3)).ok


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_number_of_rows_is_a_count_in_double_precision(precision: str) -> None:
    model = Net(LOSSES["half"])
    program = capture(model, batch(), Plan(dp=2, precision=precision)).program
    lines = print_program(PassManager([canonicalize, divide_batch]).run(program)).splitlines()
    kind = "bf16" if precision == "bf16" else "f32"  # inputs are cast
    assert [line.split("  #")[0] for line in lines[-9:]] == [
        "%sum_1 = aten.sum.default(%square) : f32[]",
        f"%truediv_size_row = aten.select.int(%x, 2, 0) : {kind}[2*b, s]",
        f"%truediv_size_row_1 = aten.select.int(%truediv_size_row, 1, 0) : {kind}[2*b]",
        "%truediv_size_ones = aten.ones_like.default(%truediv_size_row_1, dtype=dtype.f64) : f64[2*b]",
        "%truediv_size = aten.sum.default(%truediv_size_ones) : f64[]",
        "%truediv = aten.div.Tensor(%truediv_size, 2) : f64[]",
        "%div_number = aten._to_copy.default(%truediv, dtype=dtype.f32) : f32[]",
        "%div = aten.div.Tensor(%sum_1, %div_number) : f32[]",
        "return output=%div",
    ]


def test_words_are_counted_where_the_loss_is_over_a_floating_number() -> None:
    assert verify(Net(LOSSES["half"]), batch(), Plan(dp=2, loss_reduction="token")).ok
    for reduction in ("token", "local_mean"):
        with pytest.raises(PlanError, match=r"the loss is not one mean|the loss is not a mean over the batch"):
            verify(Net(LOSSES["one over the rows"]), batch(), Plan(dp=2, loss_reduction=reduction))


@pytest.mark.parametrize("loss", [lambda z: z.sum() / float(z.shape[0]), lambda z: z.sum() / len(z)])
def test_numbers_that_python_itself_makes_are_those_of_one_batch(loss: Loss) -> None:
    assert verify(Net(loss), batch(), Plan(tp=2)).ok
    with pytest.raises(PlanError, match=r"write x.shape\[0\] for len\(x\), b \* 1.0 for float\(b\)"):
        verify(Net(loss), batch(), Plan(dp=2))


@pytest.mark.parametrize("by", alternate([3, 5], 0))
def test_an_operation_of_one_size_leaves_other_derivatives_as_they_are(by: int) -> None:
    mixed = torch.ones(5, 5)
    fixing = Net(lambda z: ((z / z.std(-1, correction=z.shape[1] // by, keepdim=True)) @ mixed).square().mean())
    assert verify(fixing, batch(), Plan(tp=2)).ok
    expect(verify(Net(lambda z: (z @ mixed).square().mean()), batch(), Plan(tp=2)))
