"""What a step of microbatches leaves in gradients, on one process and without a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ops.collectives import Group
from fxpar.ops.deferred import Reduction
from fxpar.runtime.step import Microbatch, Ran, run_microbatches, weighed

REDUCED: list[tuple[str, ...]] = []


class Recorded(Reduction):
    """A sum over ranks of which just one has a gradient."""

    def run(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The gradients as they are."""
        REDUCED.append(self.names)
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}


SUMMED = (Recorded(("w_node",), (None,), Group("ranks", 2)),)
PROGRAM: Any = SimpleNamespace(parameters=[SimpleNamespace(node="w_node", fqn="w")])
ROWS = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def leaf() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


def stepped(w: Tensor, lengths: Sequence[int], *, counts: bool, odd: bool = False) -> Tensor:
    """The loss of a step over so many rows a microbatch; an odd last one reduces nothing."""
    REDUCED.clear()

    def run(rows: Tensor, microbatch: Microbatch) -> Ran:
        counted = torch.tensor(float(len(rows)), dtype=torch.float64) if counts else None
        loss = (rows @ w).square().sum() / max(len(rows), 1)
        weighed(loss, counted, microbatch).backward()
        is_odd = odd and microbatch.index == len(lengths) - 1
        return Ran(loss.detach(), () if is_odd else SUMMED, PROGRAM, counted)

    parts = ROWS[: sum(lengths)].split(list(lengths))
    return run_microbatches(parts, {"w": w}, torch.tensor([1, 2, 3]), run)


def gradient(lengths: Sequence[int], *, counts: bool) -> tuple[Tensor, Tensor]:
    """The loss and its gradient by one formula: a mean over all rows, or over the microbatches' means."""
    w = leaf()
    if counts:
        loss = (ROWS[: sum(lengths)] @ w).square().mean()
    else:
        loss = torch.stack([(rows @ w).square().mean() for rows in ROWS[: sum(lengths)].split(list(lengths))]).mean()
    return loss.detach(), torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [((1, 3, 2), False), ((1, 3, 2), True), ((3,), True), ((0, 4, 2), True), ((4, 0, 2), True), ((2, 4, 0), True)],
)
def test_a_step_is_the_mean_of_all_and_adds_to_what_was_there(lengths: tuple[int, ...], counts: bool) -> None:
    """Where rows count, a microbatch without any adds nothing, the first too."""
    w, (loss, wanted) = leaf(), gradient(lengths, counts=counts)
    found = stepped(w, lengths, counts=counts)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(w.grad, wanted)
    assert REDUCED == [("w_node",)]
    stepped(w, lengths, counts=counts)
    torch.testing.assert_close(w.grad, 2 * wanted)


@pytest.mark.parametrize("before", [None, torch.ones(3, dtype=torch.float64)], ids=["none", "some"])
def test_a_step_that_fails_leaves_the_gradients_of_before(before: Tensor | None) -> None:
    w = leaf()
    w.grad = before
    with pytest.raises(InputError, match="microbatch 2"):
        stepped(w, (2, 2, 2), counts=False, odd=True)
    assert w.grad is before


def test_each_microbatch_has_random_bits_of_its_own() -> None:
    states = [Microbatch(index, 3, torch.tensor([5, 6, 0])).random_state.tolist() for index in range(3)]
    assert states == [[5, 6, 0], [5, 6, 1], [5, 6, 2]]
