"""How a rank's batch is made to fit those of the others, on one process: what stands behind an end, and who has how
many rows."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.compile import compile_model
from fxpar.errors import InputError
from fxpar.plan.plan import Plan
from fxpar.runtime.bound_batch import BoundBatch
from fxpar.runtime.rank_batches import FittedBatch, fit_batch, ignored_targets, largest
from fxpar.runtime.runner import check_padding
from tests.runtime.uneven_jobs import Pooled


class Words(nn.Module):
    """Targets that are moved on their way to the loss, beside a mask, positions, and what is padded with 7."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor, attention_mask: Tensor, places: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        x = self.words(ids) * attention_mask.unsqueeze(-1) + self.words(places)
        targets = functional.pad(y, (0, 1), value=-5)[:, 1:].reshape(-1)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets, ignore_index=-5)


def words(rows: int, length: int) -> dict[str, Tensor]:
    return {name: torch.ones(rows, length, dtype=torch.long) for name in ("ids", "attention_mask", "places", "y")}


def scores(rows: int, length: int = 6) -> dict[str, Tensor]:
    return {"ids": torch.ones(rows, length, dtype=torch.long), "y": torch.zeros(rows, dtype=torch.long)}


@cache
def compiled(kind: str, dp: int) -> Any:
    """What a rank holds of a compiled program, as far as batches are made to fit it."""
    plan = Plan(dp=dp, pad_values={"places": 7} if kind == "words" else {})
    model, batch = (Words(), words(2 * dp, 6)) if kind == "words" else (Pooled(kind), scores(2 * dp))
    made = compile_model(model, batch, plan)
    return SimpleNamespace(captured=made.captured, program=made.program, padded=set())


def fitted(kind: str, batches: list[dict[str, Tensor]], rank: int) -> FittedBatch:
    """What a rank of so many makes of its own batch."""
    made = compiled(kind, len(batches))
    world: Any = SimpleNamespace(mesh=made.program.plan.mesh, rank=rank, device=torch.device("cpu"))
    shapes = [[tuple(value.shape) for value in batch.values()] for batch in batches]
    return fit_batch(made, batches[rank], shapes, world)


def test_sequences_are_as_long_as_the_longest_and_what_pads_them_is_what_is_said() -> None:
    assert ignored_targets(compiled("words", 3).captured.program) == {"y": -5}
    batches = [words(2, 4), words(2, 6), words(2, 5)]
    for rank, batch in enumerate(batches):
        found, length = fitted("words", batches, rank), batch["ids"].shape[1]
        for path, fill in (("ids", 0), ("attention_mask", 0), ("places", 7), ("y", -5)):
            assert found.batch[path].tolist() == [[1] * length + [fill] * (6 - length)] * 2
        assert found.unproven == {"ids"}
        assert found.fills["ids"].tolist() == [[1] * 6] * 2, "other words behind the end"
        assert all(torch.equal(found.fills[path], found.batch[path]) for path in ("attention_mask", "places", "y"))
        assert (found.rows, found.places) == ((), ())


def test_each_rank_knows_the_rows_of_all_and_those_before_it() -> None:
    batches = [words(n, 6) for n in (3, 1, 2)]
    found = [fitted("words", batches, rank) for rank in range(3)]
    assert [[int(n) for n in each.places] for each in found] == [[6, 0], [6, 3], [6, 4]]
    assert all(each.rows == (3, 1, 2) and each.fills is None and not each.unproven for each in found)
    assert all(torch.equal(each.batch["ids"], own["ids"]) for each, own in zip(found, batches, strict=True))


def test_the_largest_batch_is_the_same_in_shape_on_all_ranks() -> None:
    batches = [words(3, 4), words(1, 6)]
    shapes = [[tuple(value.shape) for value in batch.values()] for batch in batches]
    for batch in batches:
        assert {tuple(value.shape) for value in largest(batch, shapes).values()} == {(3, 6)}


REFUSED = {
    "numbered": "every rank holds the rows of all",
    "ones": "takes together rows that every rank makes for all",
    "filled": "takes the number of rows as a number",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_right_for_equal_rows_alone_is_refused_on_every_rank(kind: str) -> None:
    for rank in range(2):
        with pytest.raises(InputError, match=REFUSED[kind]):
            fitted(kind, [scores(3), scores(2)], rank)
        assert fitted(kind, [scores(3), scores(3)], rank).rows == ()


def test_one_size_of_the_program_is_one_size_of_each_batch() -> None:
    odd = {**scores(2), "y": torch.zeros(3, dtype=torch.long)}
    for rank in range(2):
        with pytest.raises(InputError, match="has size 3 in dimension 0 on data rank 1, but ids dimension 0 has 2"):
            fitted("pooled", [scores(2), odd], rank)


def values(*numbers: float) -> list[Tensor | None]:
    return [torch.tensor(2.0), None, torch.tensor(numbers)]


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [
        (values(1.0, 100.0), False),
        (values(1.00001, 100.0), False),  # as the order of a sum may have it, in units of the largest
        (values(1.001, 100.0), True),
        (values(1.0, float("nan")), True),
        ([torch.tensor(2.1), None, torch.tensor([1.0, 100.0])], True),
        ([torch.tensor(2.0), None, None], True),
    ],
)
def test_a_loss_or_a_gradient_that_depends_on_padding_is_refused(other: list[Tensor | None], is_refused: bool) -> None:
    compiled: Any = SimpleNamespace(padded=set())
    filled = {"ids": torch.zeros(1)}
    call = BoundBatch(
        compiled, ready=compiled, inputs={}, sizes={}, places=(), fills=filled, unproven=frozenset(filled)
    )

    def check() -> None:
        check_padding(call, lambda tried: other if tried.inputs else values(1.0, 100.0), bool)

    if is_refused:
        with pytest.raises(InputError, match="depends on what pads it") as error:
            check()
        assert error.value.where == "batch entry ids"
        assert not call.compiled.padded
    else:
        check()
        assert call.compiled.padded == {"ids"}
