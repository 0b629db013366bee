"""Gradients of weights in steps of several microbatches: the products add them up themselves."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpar
from fxpar.runtime.calls import LoweredStep, StepCalls, UnitCall
from fxpar.runtime.grad_buffers import MicrobatchSum, Waiting
from tests.cudagraphs import stages
from tests.products import product
from tests.runtime.test_placed_products import Net
from tests.runtime.world import World

# Of `Net`: weights of products alone. The embedding is the head too, and `twice` is used twice: these are sums.
PRODUCTS = ("up.weight", "down.weight")


def batches(count: int, length: int = 5) -> list[dict[str, Tensor]]:
    return [{"ids": torch.randint(7, (3, length)), "labels": torch.randint(7, (3, length))} for _ in range(count)]


def parallel(reference: nn.Module, batch: Any, impl: str = "none", **plan: Any) -> fxpar.ParallelModule:
    plan |= {"cuda_graphs": fxpar.CudaGraphs(impl)}
    return fxpar.parallelize(copy.deepcopy(reference), fxpar.Plan(**plan), batch, check_inputs=False)


@pytest.mark.parametrize("impl", ["none", "partial", "full_iteration"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["eager", "compiled"])
def test_gradients_are_those_of_autograd(impl: str, compiled: bool) -> None:
    """With weights that are tied, frozen, hooked and used twice; for steps that add to gradients, and others."""
    torch.manual_seed(0)
    reference = Net().double()
    parts = batches(3)
    model = parallel(reference, parts[0], impl, compile=compiled)
    models, seen = (model, reference), list[list[Tensor]]()
    for owner in models if impl != "full_iteration" else ():
        seen.append([])
        weight = dict(owner.named_parameters())["up.weight"]
        weight.register_hook(lambda gradient, values=seen[-1]: values.append(gradient) or gradient * 2)
    for step, count in enumerate((3, 2, 3, 3, 1, 3, 3)):
        if step in (3, 5):
            for owner in models:
                owner.zero_grad(set_to_none=step == 3)
        torch.stack([reference(**part)["loss"] for part in parts[:count]]).mean().backward()
        model.train_step(parts[:count])
        local = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            if parameter.grad is None:
                assert local[name].grad is None
            else:
                torch.testing.assert_close(local[name].grad, parameter.grad, rtol=1e-9, atol=1e-12)
    model.close()
    if seen:  # a hook sees the whole step's, and may keep it
        for value, other in zip(*seen, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-12)


class Adds(TorchDispatchMode):
    """Counts the additions to matrices, by shape: those of products, and those of kernels that only add."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products, self.kernels = Counter[torch.Size](), Counter[torch.Size]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is torch.ops.aten.addmm_:
            self.products[args[0].shape] += 1
        if packet in (torch.ops.aten.add, torch.ops.aten.add_):
            self.kernels[args[0].shape] += 1
        if packet in (torch.ops.aten._foreach_add, torch.ops.aten._foreach_add_):
            self.kernels.update(value.shape for value in args[0])
        return func(*args, **(kwargs or {}))


def test_no_kernel_only_adds_what_a_product_may() -> None:
    torch.manual_seed(0)
    parts = batches(4)
    model = parallel(Net(), parts[0])
    model.train_step(parts)
    model.zero_grad()
    shapes = [parameter.shape for name, parameter in model.named_parameters() if name in PRODUCTS]
    with Adds() as adds:
        model.train_step(parts)
    assert [adds.products[shape] for shape in shapes] == [len(parts)] * len(PRODUCTS)
    assert [adds.kernels[shape] for shape in shapes] == [0] * len(PRODUCTS)
    assert adds.kernels[torch.Size([7, 6])] >= len(parts) - 1  # that of the tied weight is a sum
    model.close()


def counted(plan: dict[str, Any], count: int) -> tuple[int, int]:
    """How many products of a rank have added, and how many kernels have added to a matrix that one could."""
    torch.manual_seed(0)
    (parts,) = stages.microbatches([count])
    model = fxpar.parallelize(stages.Deep(), fxpar.Plan(pp=2, **plan), parts[0])
    model.train_step(parts)
    model.zero_grad()
    with Adds() as adds:
        model.train_step(parts)
    model.close()
    square = torch.Size([stages.SIZE, stages.SIZE])
    return adds.products[square], adds.kernels[square]


@product(schedule=["1f1b", "zb_h1"], impl=["none", "partial"])
def test_stages_of_a_pipeline_add_in_products(world2: World, schedule: str, impl: str) -> None:
    """A replay of the stand-in makes the same calls."""
    plan = {"schedule": schedule, "cuda_graphs": fxpar.CudaGraphs(impl)}
    (first, more), (second, others) = world2.run(counted, plan, 3)
    assert first + second == 5 * 3  # layers and microbatches
    assert more == others == 0


@pytest.mark.parametrize("impl", ["none", "partial"])
def test_sums_that_wait_outlast_the_next_step(impl: str) -> None:
    torch.manual_seed(0)
    reference = Net().double()
    parts = batches(2)
    model = parallel(reference, parts[0], impl)
    for _ in range(3):
        reference.zero_grad()
        model.zero_grad()
        for _ in range(3):
            torch.stack([reference(**part)["loss"] for part in parts]).mean().backward()
        with model.no_sync():
            model.train_step(parts)
            model.train_step(parts)
        model.train_step(parts)
        compare(model, reference)
        # Calls of the same shapes that are no microbatches of a step: their graphs add to no sum.
        for part in parts:
            reference(**part)["loss"].backward()
        with model.no_sync():
            model.train_step(parts[0])
        model.train_step(parts[1])
        compare(model, reference)
    model.close()


def compare(model: nn.Module, reference: nn.Module) -> None:
    local = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if name in PRODUCTS:
            torch.testing.assert_close(local[name].grad, parameter.grad, rtol=1e-9, atol=1e-12)


def test_what_others_read_is_in_no_sum() -> None:
    """A gradient that goes to another stage too, and one of which a later call makes another."""
    names = ("sent", "read", "alone", "later")
    calls = [UnitCall(list, ("x",), names[:3]), UnitCall(list, ("read",), names[3:])]
    nothing: Any = None
    step = LoweredStep(nothing, nothing, (), (), (), (), {}, {n: n for n in names}, names, {}, {"x": "sent"}, 1)
    assert StepCalls(step, [], calls, {}, whole=False, early=1).ready == [{"alone": "alone"}, {"later": "later"}]


def test_a_first_microbatch_that_has_failed_leaves_no_place() -> None:
    """Graphs that were recorded without its sums would begin anew with each microbatch."""
    waiting = Waiting(graphed=True)
    waiting.start()
    empty = waiting.sum_of("stage")
    empty.destination("w")
    waiting.start()
    again = waiting.sum_of("stage")
    assert again is not empty
    again.add({"w": torch.ones(2, 2)})
    waiting.start()
    assert waiting.sum_of("stage") is again


def test_sums_stay_where_graphs_know_them_and_are_freed_elsewhere() -> None:
    for graphed in (False, True):
        waiting = Waiting(graphed)
        waiting.start()
        first = waiting.sum_of("stage")
        total = first.add({"w": torch.ones(2)})["w"]
        assert first.add({"w": torch.ones(2)})["w"] is total
        assert waiting.finished({"w": total}, "w", dict)["w"].tolist() == [2.0, 2.0]
        waiting.start()
        assert (waiting.sum_of("stage") is first) == graphed
        assert waiting.sum_of("stage").add({"w": torch.ones(2)})["w"].tolist() == [1.0, 1.0]


def test_what_lies_in_its_sum_is_not_added_twice() -> None:
    total = MicrobatchSum()
    value = total.add({"w": torch.ones(2), "b": torch.ones(1)})["w"]
    value.add_(1)
    sums = total.add({"w": value, "b": torch.ones(1)})
    assert (sums["w"].tolist(), sums["b"].tolist()) == ([2.0, 2.0], [2.0])


def test_gradients_that_share_memory_have_sums_apart() -> None:
    total, value = MicrobatchSum(), torch.ones(2)
    for _ in range(2):
        sums = total.add({"w": value, "row": value.view(1, 2)})
    assert (sums["w"].tolist(), sums["row"].tolist(), value.tolist()) == ([2.0, 2.0], [[2.0, 2.0]], [1.0, 1.0])
