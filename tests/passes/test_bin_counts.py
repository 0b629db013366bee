"""bincount: as many counts as asked for where no number can be larger, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.compile import compile_model
from fxpar.errors import CaptureError
from fxpar.experts.operators.permute import bin_counts
from fxpar.plan.plan import Plan
from fxpar.verification import expect, verify
from tests.products import product

WORDS, EXPERTS = 16, 4


class Balanced(nn.Module):
    """A router whose loss is how unevenly it chooses, by the counts of its choice.

    Args:
        choose: from scores [T, E] what is counted.
        count: how.
    """

    def __init__(self, choose: Callable[[Tensor], Tensor], count: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.gate = nn.Embedding(WORDS, 8), nn.Linear(8, EXPERTS)
        self.choose, self.count = choose, count

    def forward(self, ids: Tensor) -> Any:
        """[b, s]."""
        scores = self.gate(self.words(ids)).flatten(0, 1).softmax(-1)
        counts = self.count(self.choose(scores))
        return (counts.to(scores.dtype) * scores.mean(0)).sum() / scores.shape[0] * counts.shape[0]


def ids() -> dict[str, Tensor]:
    return {"ids": torch.randint(0, WORDS, (4, 7), generator=torch.Generator().manual_seed(0))}


def plainly(chosen: Tensor) -> Tensor:
    return torch.bincount(chosen.flatten(), minlength=EXPERTS)


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda scores: scores.topk(2, dim=-1).indices,
    "argmax": lambda scores: scores.argmax(-1).to(torch.int32),
    "max": lambda scores: scores.max(dim=1, keepdim=True)[1],
    "min": lambda scores: scores.min(dim=-1).indices,
    "one of none": lambda scores: scores[:, :3].topk(1).indices,
}


@product(name=[*CHOICES], plan=[{"tp": 2}, {"dp": 2}])
def test_counts_are_the_single_device_s(name: str, plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expect(verify(Balanced(CHOICES[name], plainly), ids(), Plan(**plan)))


@pytest.mark.parametrize(
    ("choose", "count"),
    [
        (lambda scores: scores.topk(2, dim=-1).indices + 1, plainly),
        (lambda scores: scores.topk(2, dim=0).indices, plainly),  # of as many as there are tokens
        (lambda scores: scores.repeat(1, 2).argmax(-1), plainly),  # of eight
        (lambda scores: scores.argmax(), lambda chosen: torch.bincount(chosen.view(1), minlength=EXPERTS)),
        (lambda scores: (scores * 3).long(), lambda chosen: chosen.flatten().bincount(minlength=EXPERTS)),
    ],
)
def test_what_may_be_larger_is_refused(choose: Callable[[Tensor], Tensor], count: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"test_bin_counts.py.*may be 4 or more.*one_hot\(x, 4\)"):
        compile_model(Balanced(choose, count), ids(), Plan(tp=2))


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (lambda chosen: torch.bincount(chosen.flatten(), torch.ones(56), minlength=4), "sums of weights by number"),
        (lambda chosen: torch.bincount(chosen.flatten()).sum().expand(4), "depends on values of tensors"),
    ],
)
def test_other_counts_are_refused(count: Callable[[Tensor], Tensor], told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        capture(Balanced(CHOICES["topk"], count), ids(), Plan())


def test_the_remedy_is_one() -> None:
    model = Balanced(lambda scores: (scores * 3).long(), lambda x: functional.one_hot(x.flatten(), 4).sum(0))
    assert verify(model, ids(), Plan(dp=2)).ok


def test_a_larger_number_is_an_error() -> None:
    assert bin_counts(torch.tensor([0, 2, 2]), 4).tolist() == [1, 0, 2, 0]
    with pytest.raises(ValueError, match="4 is among what is counted below 4"):
        bin_counts(torch.tensor([0, 4]), 4)
