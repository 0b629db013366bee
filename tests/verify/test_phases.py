"""A wrong phase is refused: each node of three steps in each other phase, judged by values at three microbatches."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor

from fxpar.errors import CheckFailed, FxparError
from fxpar.ir.program import note, update
from fxpar.verify.static import verify_static
from fxpar.verify.values import verify_values
from tests.passes.experts import Routed
from tests.passes.test_recompute import Regions
from tests.products import few
from tests.verify.phases import ALLOWED, CannotRunError, Microbatches, sample
from tests.verify.steps import Small


def _words(count: int, rows: int, length: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {name: torch.randint(0, count, (rows, length), generator=generator) for name in ("ids", "labels")}
        for _ in range(3)
    ]


@cache
def case(name: str) -> Microbatches:
    """A step of three microbatches."""
    torch.manual_seed(5)
    if name == "dense":
        return Microbatches(Small().double(), _words(20, 4, 6), dp=2, tp=2, sequence_parallel=True)
    if name == "experts":
        return Microbatches(Routed("learned", True).double(), _words(16, 8, 5), dp=2, tp=2, ep=2)
    batches = [{"x": torch.randn(4, 5, 6, dtype=torch.float64)} for _ in range(3)]
    return Microbatches(Regions(False).double(), batches, dp=2, tp=2)


NAMES = ("dense", "experts", "recompute")


@pytest.mark.parametrize("name", few(NAMES, NAMES[1:]))
def test_the_executor_gives_the_gradients_of_one_device(name: str) -> None:
    verify_static(case(name).step)
    assert case(name).is_reference()


@pytest.mark.parametrize(
    ("name", "count"), few([(name, count) for count in (10, 0) for name in NAMES], [(name, 10) for name in NAMES[1:]])
)
def test_no_phase_that_changes_a_gradient_passes(name: str, count: int) -> None:
    own, tally, escaped = case(name), Counter[str](), []
    for edit in sample(own.step, count, seed=1):
        try:
            verify_static(edit.program)
            verdict = "accepted"
        except FxparError:
            verdict = "refused"
        try:
            outcome = "differs" if own.deviation(edit.program) > ALLOWED else "same"
        except CannotRunError:
            outcome = "cannot run"
        tally[f"{outcome}, {verdict}"] += 1
        if outcome != "same" and verdict == "accepted":
            escaped.append(edit.what)
    print(f"\n{name}: {tally.total()} edits of phases, {dict(tally)}")
    assert escaped == []
    wrong = sum(count for what, count in tally.items() if not what.startswith("same"))
    assert wrong >= 0.6 * tally.total()


def test_a_product_that_waits_is_named_and_seen_by_value() -> None:
    """One microbatch alone gives the right gradient."""
    own = case("dense")
    mm = torch.ops.aten.mm.default
    products = [n for n in own.step.graph.nodes if n.target is mm and note(n).phase == "backward"]
    last = next(n for n in reversed(products) if all(note(user).phase == "parameter" for user in n.users))
    made = own.step.copy()
    update(made.node(last.name), phase="parameter")
    message = rf"%{last.name} .*: is of the phase parameter and not linear in what it reads .*; write phase=backward"
    with pytest.raises(CheckFailed, match=message):
        verify_static(made)
    inputs = own.inputs[0]
    assert verify_values(own.captured.program, own.step, own.state, inputs).ok
    assert verify_values(own.captured.program, made, own.state, inputs).max_grad_error > 1e-3
