"""What a step of microbatches makes of losses and gradients, on one process and without a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.runtime.grad_buffers import Waiting
from fxpar.runtime.microbatches import Microbatch, MicrobatchResult, run_microbatches, weight

REDUCED: list[tuple[str, ...]] = []
ROWS = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def leaf() -> Tensor:
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


def finish(held: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A sum over ranks, of which there is one."""
    REDUCED.append(tuple(held))
    return {"w": held["w_gradient"]}


def stepped(
    w: Tensor, lengths: Sequence[int], *, counts: bool, odd: bool = False, waiting: Waiting | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Loss and gradients of a step over so many rows a microbatch; an odd last one leaves something else."""
    REDUCED.clear()

    def run(rows: Tensor, microbatch: Microbatch) -> MicrobatchResult:
        counted = torch.tensor(float(len(rows)), dtype=torch.float64) if counts else None
        with torch.enable_grad():
            loss = (rows @ w).square().sum() / max(len(rows), 1)
            (gradient,) = torch.autograd.grad(loss * weight(counted, microbatch), w)
        is_odd = odd and microbatch.index == len(lengths) - 1
        signature = "odd" if is_odd else "even"
        return MicrobatchResult(loss.detach(), {}, {"w_gradient": gradient}, finish, signature, counted)

    parts = ROWS[: sum(lengths)].split(list(lengths))
    waiting = waiting or Waiting()
    return run_microbatches(parts, torch.tensor([1, 2, 3]), run, waiting.finished, waiting)


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
def test_a_step_is_the_mean_of_all_and_sums_over_ranks_once(lengths: tuple[int, ...], counts: bool) -> None:
    """Where rows count, a microbatch without any adds nothing, the first too."""
    loss, wanted = gradient(lengths, counts=counts)
    found, gradients = stepped(leaf(), lengths, counts=counts)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(gradients["w"], wanted)
    assert REDUCED == [("w_gradient",)]


@pytest.mark.parametrize("counts", [False, True])
def test_a_microbatch_that_leaves_something_else_is_summed_by_itself(counts: bool) -> None:
    loss, wanted = gradient((1, 2, 3), counts=counts)
    found, gradients = stepped(leaf(), (1, 2, 3), counts=counts, odd=True)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(gradients["w"], wanted)
    assert REDUCED == [("w_gradient",)] * 2


def test_what_waits_of_several_kinds_is_summed_with_the_next_of_these() -> None:
    waiting = Waiting()
    waiting.holds = True
    _, first = stepped(leaf(), (1, 3), counts=False, odd=True, waiting=waiting)
    assert (first, REDUCED) == ({}, [])
    waiting.holds = False
    with pytest.raises(InputError, match="no_sync"):
        stepped(leaf(), (1, 3), counts=False, waiting=waiting)
    _, both = stepped(leaf(), (1, 3), counts=False, odd=True, waiting=waiting)
    torch.testing.assert_close(both["w"], 2 * gradient((1, 3), counts=False)[1])
    assert REDUCED == [("w_gradient",)] * 2


def test_what_waits_is_summed_with_the_next() -> None:
    waiting = Waiting()
    waiting.holds = True
    _, first = stepped(leaf(), (1, 3), counts=False, waiting=waiting)
    assert (first, REDUCED) == ({}, [])
    waiting.holds = False
    _, both = stepped(leaf(), (1, 3), counts=False, waiting=waiting)
    torch.testing.assert_close(both["w"], 2 * gradient((1, 3), counts=False)[1])
    assert REDUCED == [("w_gradient",)]
    assert waiting.is_idle


def test_what_waits_is_of_one_program() -> None:
    waiting = Waiting()
    waiting.holds = True
    stepped(leaf(), (1, 3), counts=False, waiting=waiting)
    with pytest.raises(InputError, match="no_sync"):
        waiting.finished({"w_gradient": torch.ones(3)}, "odd", finish)


def test_each_microbatch_has_random_bits_of_its_own() -> None:
    states = [Microbatch(index, 3, torch.tensor([5, 6, 0])).random_state.tolist() for index in range(3)]
    assert states == [[5, 6, 0], [5, 6, 1], [5, 6, 2]]
