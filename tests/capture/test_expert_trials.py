"""What a trial of a module of experts finds beside its output: state, what only some routings show, missing experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import capture
from fxpar.errors import PlanError
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Experts
from fxpar.verification import expect, verify
from tests.capture.named import EXPERTS, Listed, Looped, Named
from tests.passes.experts import rolled

ALL = ("layers.*.experts",)


class Counting(Looped):
    """Counts the rows of each expert.

    Args:
        dtype: of the counts.
    """

    load: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS, dtype=dtype))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.count(torch.bincount(top_k_index.flatten(), minlength=EXPERTS).to(self.load.dtype))
        return super().forward(hidden_states, top_k_index, top_k_weights)

    def count(self, rows: Tensor) -> None:
        """Of one call."""
        self.load += rows


class Unseen(Counting):
    """The same where autograd does not see it."""

    def count(self, rows: Tensor) -> None:
        self.load.data.add_(rows)


class Leaving(Looped):
    """A loss that another module reads.

    Args:
        kept: what it is put into.
    """

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.loss = kept

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        loss = top_k_weights.square().mean()
        if isinstance(self.loss, list):
            self.loss.append(loss)
        elif isinstance(self.loss, dict):
            self.loss["z"] = loss
        else:
            self.loss = loss
        return super().forward(hidden_states, top_k_index, top_k_weights)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Counting(torch.int64), "load"),
        (Counting(torch.float32), "load"),
        (Unseen(torch.int64), "load"),
        (Unseen(torch.float32), "load"),
        (Leaving(None), "loss"),
        (Leaving(0.0), "loss"),
        (Leaving([]), "loss"),
        (Leaving({}), "loss"),
    ],
)
def test_what_a_forward_leaves_behind_is_noticed(module: Any, name: str) -> None:
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(PlanError, match=rf"names layers.0.experts: .*it changes {name}, which.*fxpar.ops.experts"):
        capture(Named(module), rolled(), Plan(experts=Experts(expert_modules=ALL)))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


class Kept(Looped):
    """State that is not touched, numbers that are none in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.tensor([torch.nan, 1.0]))
        self.unset, self.sizes = torch.tensor(torch.nan), {"a": [1]}


def test_state_that_is_not_touched_is_no_difference() -> None:
    assert (
        capture(Named(Kept()), rolled(), Plan(experts=Experts(expert_modules=ALL))).program.plan.experts.expert_modules
        == ALL
    )


class Limited(Listed):
    """Rows beyond a capacity are dropped, which is more than random choices need."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total, most = torch.zeros_like(hidden), int(1.9 * chosen.numel() / len(self))
        for e, expert in enumerate(self):
            tokens, places = (each[:most] for each in torch.where(chosen == e))
            total.index_add_(0, tokens, expert(hidden[tokens]) * weights[tokens, places, None])
        return total


class Last(Listed):
    """Many experts, the last of which is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.extend([Listed()[0] for _ in range(92)])

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, chosen, torch.where(chosen == len(self) - 1, 2 * weights, weights))


@pytest.mark.parametrize("module", [Limited, Last])
def test_what_some_routings_show_is_tried(module: Any) -> None:
    with pytest.raises(PlanError, match="its output differs by"):
        capture(Named(module()), rolled(), Plan(experts=Experts(expert_modules=ALL)))


class Hit(Listed):
    """A loop over the experts that have rows."""

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for e in chosen.unique().tolist():
            tokens, places = torch.where(chosen == e)
            total.index_add_(0, tokens, self.of(e, hidden[tokens]) * weights[tokens, places, None])
        return total

    def of(self, e: int, rows: Tensor) -> Tensor:
        """What an expert makes of its rows."""
        return self[e](rows)  # type: ignore[no-any-return]


class Detached(Hit):
    """One expert is not trained."""

    def of(self, e: int, rows: Tensor) -> Tensor:
        return super().of(e, rows).detach() if e == 2 else super().of(e, rows)


def test_experts_without_rows_may_be_left_out() -> None:
    torch.manual_seed(0)
    model: nn.Module = Named(Hit()).double()
    expect(verify(model, rolled(), Plan(experts=Experts(expert_modules=ALL), dp=2, ep=2)))
    with pytest.raises(PlanError, match="other parameters get a gradient"):
        capture(Named(Detached()), rolled(), Plan(experts=Experts(expert_modules=ALL)))
