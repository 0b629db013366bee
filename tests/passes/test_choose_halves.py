"""choose_halves: what cost decides, what it leaves as it is, and where there are no halves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture import capture
from fxpar.compile import compile_model, compile_program
from fxpar.errors import PlanError
from fxpar.passes import DEFAULT_PASSES, choose_halves
from fxpar.passes.choose_halves import Weighed, weigh_halves
from fxpar.plan.cost import Cost
from fxpar.plan.plan import Plan
from fxpar.program.program import Program
from fxpar.text.printing import print_program
from fxpar.verification import verify

# Sums that take as long as products, carried by copies that cost nothing else.
_SLOW = Cost(
    bandwidth=1e9,
    latency=1e-9,
    flops=1e9,
    memory=1e15,
    least_copy=1.0,
    copy_latency=0.0,
    kernel_latency=0.0,
    multiprocessors=1,
)


class Net(nn.Module):
    """Layers whose sums over ranks have nothing of their own batch beside them in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 16, bias=False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


class Across(nn.Module):
    """Rows that are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x).softmax(0).square().mean()
        return found


def example(rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))}


def canonical(plan: Plan, rows: int = 4, model: type[nn.Module] = Net) -> Program:
    return compile_program(capture(model(), example(rows), plan).program, until="fold_masks")


def test_cost_decides() -> None:
    for cost, is_halved in ((_SLOW, True), (Cost(), False)):
        plan = Plan(tp=2, cost=cost, interleave_halves="auto")
        chosen = compile_model(Net(), example(), plan).program
        said = compile_model(Net(), example(), plan.replace(interleave_halves=is_halved)).program
        assert chosen.plan.interleave_halves is is_halved
        assert print_program(chosen) == print_program(said)


def test_the_shorter_of_two_steps_is_chosen() -> None:
    found = weigh_halves(canonical(Plan(tp=2, cost=_SLOW)))
    assert found.whole is not None
    assert found.halves is not None
    assert found.halves.exposed < found.whole.exposed
    assert found.saved == pytest.approx(found.whole.total - found.halves.total)
    assert found.saved > 0
    assert (found.reason, Weighed(whole=found.whole).saved) == ("", 0.0)
    assert found.whole.to_json()["total"] == pytest.approx(sum(vars(found.whole).values()))


def test_without_copies_nothing_is_hidden() -> None:
    """Of what the process group sends no part is hidden here, so that a second start is all that halves add."""
    cost = replace(_SLOW, hidden=0.0)
    copied, sent = (weigh_halves(canonical(Plan(tp=2, cost=cost, exchange=how))) for how in ("auto", "nccl"))
    assert copied.saved > 0 > sent.saved


def test_sizes_are_those_of_a_microbatch() -> None:
    one, of_two = (weigh_halves(canonical(Plan(tp=2, microbatches=n), 4 * n)) for n in (1, 2))
    assert one == of_two


@pytest.mark.parametrize(
    ("plan", "rows", "model", "reason", "is_refused"),
    [
        ({"tp": 2}, 3, Net, "a rank's rows are no even number: 3", False),
        ({"tp": 2, "dp": 2}, 6, Net, "a rank's rows are no even number: 6 of 2 data ranks", False),
        ({"tp": 2, "microbatches": 2}, 6, Net, "a rank's rows are no even number: 3", False),
        ({"tp": 2, "pp": 2}, 4, Net, "not supported with pp=2", True),
        ({"tp": 2}, 4, Across, "softmax (test_choose_halves.py", True),
    ],
)
def test_where_there_are_no_halves_it_says_why(
    plan: dict[str, Any], rows: int, model: type[nn.Module], reason: str, is_refused: bool
) -> None:
    found = weigh_halves(canonical(Plan(**plan), rows, model))
    assert reason in found.reason
    assert found.is_refused is is_refused
    assert (found.whole, found.halves, found.saved) == (None, None, 0.0)
    asked = canonical(Plan(**plan, interleave_halves="auto"), rows, model)
    assert choose_halves.run(asked.copy()).plan == Plan(**plan)


def test_what_was_chosen_is_the_model() -> None:
    found = verify(Net(), example(), Plan(tp=2, cost=_SLOW, interleave_halves="auto"))
    assert found.ok
    assert found.program.plan.interleave_halves is True


def test_passes_that_leave_it_open_are_refused() -> None:
    passes = [item for item in DEFAULT_PASSES if item is not choose_halves]
    with pytest.raises(PlanError, match=r"interleave_halves: whether there are halves is open; run the pass choose"):
        compile_model(Net(), example(), Plan(tp=2, interleave_halves="auto"), passes=passes)
