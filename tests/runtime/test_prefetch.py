"""Batches that are copied ahead are the batches, whatever becomes of the memory they came from or were in."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fxpar
from fxpar.errors import InputError
from fxpar.runtime.prefetch import Prefetched
from tests.cudagraphs.graphed import Bag, as_it_is, prefetched, reusing, train, words

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "y"])


def numbers(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.full((2, 3), float(i))} for i in range(count)]


@pytest.mark.parametrize(
    ("impl", "micro"),
    [
        pytest.param("none", 2, marks=pytest.mark.matrix),
        pytest.param("none", 1, marks=pytest.mark.matrix),
        pytest.param("partial", 2, marks=pytest.mark.matrix),
        pytest.param("full_iteration", 1, marks=pytest.mark.matrix),
        ("full_iteration", 2),
    ],
)
def test_a_training_is_the_same_to_the_bit(impl: str, micro: int) -> None:
    assert train(Bag, words(6, micro), impl, feed=prefetched) == as_it_is(Bag, 6, micro)


def test_a_loader_of_torch_trains_and_evaluates_in_epochs() -> None:
    batches = words(4)
    found = []
    for impl in ("none", "partial"):
        torch.manual_seed(0)
        plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs(impl))
        model = fxpar.parallelize(Bag().train(), plan, batches[0])
        loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        feed: Any = fxpar.prefetch(loader, model) if impl == "partial" else batches
        assert len(feed) == 4
        losses = [float(model.train_step(batch)) for _ in range(2) for batch in feed]
        model.eval()
        with torch.inference_mode():
            losses += [float(model(**batch)["loss"]) for batch in feed]
        model.train()
        found.append(losses + [float(model.train_step(batch)) for batch in feed])
    assert found[0] == found[1]


@pytest.mark.parametrize("is_graphed", [False, True])
def test_batches_come_in_order_and_may_be_kept(is_graphed: bool) -> None:
    source = numbers(4) if not is_graphed else reusing(numbers(4))
    assert [float(batch["x"][1, 2]) for batch in list(Prefetched(source, CPU, is_graphed))] == [0, 1, 2, 3]
    assert list(Prefetched([], CPU, is_graphed)) == []


def test_kinds_of_batches_stay_and_what_is_no_tensor_passes() -> None:
    ids, mark = torch.arange(4), object()
    encoding = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    nest = [Pair(ids, "text"), {"more": (ids.view(2, 2).t(), None)}, OrderedDict(b=1, a=ids), mark]
    given: list[Any] = [encoding, nest, MappingProxyType({"x": ids}), ids, None]
    first, second, third, fourth, fifth = Prefetched(given, CPU, True)
    assert type(first) is transformers.BatchEncoding
    assert first.input_ids is first.labels
    assert first.input_ids is not ids
    assert torch.equal(first.input_ids, ids)
    assert encoding.input_ids is ids
    assert type(second[0]) is Pair
    assert second[0].y == "text"
    assert torch.equal(second[1]["more"][0], ids.view(2, 2).t())
    assert second[1]["more"][1] is None
    assert list(second[2]) == ["b", "a"]
    assert second[3] is mark
    assert torch.equal(third["x"], ids)
    assert torch.equal(fourth, ids)
    assert fifth is None


def test_what_a_batch_may_not_hold_is_left_to_the_call() -> None:
    given = [torch.ones(2, requires_grad=True), torch.ones(2, device="meta"), torch.eye(2).to_sparse()]
    (found,) = Prefetched([tuple(given)], CPU, True)
    assert all(a is b for a, b in zip(found, given, strict=True))


@pytest.mark.parametrize("is_graphed", [False, True])
def test_an_error_of_the_source_is_raised_in_place_of_its_batch(is_graphed: bool) -> None:
    error, ended = OSError("no such file"), list[str]()

    def source() -> Iterator[Any]:
        try:
            yield from numbers(2)
            raise error
        finally:
            ended.append("closed")

    batches = iter(Prefetched(source(), CPU, is_graphed))
    assert [float(next(batches)["x"][0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="no such file") as raised:
        next(batches)
    assert raised.value is error
    assert error.__context__ is None
    assert ended == ["closed"]


def test_a_source_that_is_left_early_is_one_ahead_and_goes_on() -> None:
    source = iter(numbers(5))
    for batch in Prefetched(source, CPU, True):
        assert float(batch["x"][0, 0]) == 0
        break
    assert [float(batch["x"][0, 0]) for batch in source] == [2, 3, 4]
    rest = iter(numbers(3))
    for _ in Prefetched(rest, CPU, False):
        break
    assert len(list(rest)) == 2


def test_an_interrupt_is_no_batchs() -> None:
    def source() -> Iterator[Any]:
        yield from numbers(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(iter(Prefetched(source(), CPU, True)))


def test_what_cannot_be_prefetched_is_refused() -> None:
    batch = words(1)[0]
    model = fxpar.parallelize(Bag(), fxpar.Plan(), batch)
    with pytest.raises(InputError, match="cannot be iterated"):
        fxpar.prefetch(3, model)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be a ParallelModule"):
        fxpar.prefetch([batch], Bag())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        len(fxpar.prefetch(iter([batch]), model))
