"""What a reviewer found that graphed modules did differently from others, or silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import InputError
from tests.cudagraphs import engine
from tests.products import product
from tests.runtime.world import World

IMPLEMENTATIONS = ("none", "partial", "full_iteration")


class Sums(nn.Module):
    """Two parameters that are only used as their sum, so that both have one value as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x @ (self.first + self.second) + self.bias
        return {"y": y, "loss": y.square().mean()}


class Scaled(Sums):
    """Divides by a number that it reads of a value that has a gradient."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)["y"]
        return {"loss": (y / y.abs().max().item()).square().mean()}


class Dropped(Sums):
    """Draws random bits."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": torch.dropout(super().forward(x)["y"], 0.5, self.training).square().mean()}


@torch.library.custom_op("fxpar_tests::fragile", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def fragile(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("fxpar_tests::fragile_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def fragile_backward(x: Tensor) -> Tensor:
    if Fragile.breaks:
        raise ValueError("broken")
    return x.clone()


fragile.register_fake(torch.empty_like)
fragile_backward.register_fake(torch.empty_like)
fragile.register_autograd(lambda ctx, gradient: fragile_backward(gradient))


class Fragile(Sums):
    """Has an operation no graph holds, whose backward fails when it is told to."""

    breaks = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": fragile(super().forward(x)["y"]).square().mean()}


def batch(index: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(index))}


def made(implementation: str, kind: type[nn.Module] = Sums, variants: int = 16, **options: Any) -> ParallelModule:
    torch.manual_seed(0)
    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs(implementation, variants=variants), **options)
    return fxpar.parallelize(kind(), plan, batch())


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_equal(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_gradient_of_two_parameters_is_added_to_what_each_has(implementation: str) -> None:
    module = made(implementation)
    plain = Sums()
    plain.load_state_dict(module.full_state_dict())
    for index in range(4):
        module.train_step(batch(index))
        plain(**batch(index))["loss"].backward()
        if index == 0:
            for each in (module, plain):
                each.get_parameter("second").grad = None
    torch.testing.assert_close(gradients(module), gradients(plain))


def test_a_gradient_that_a_hook_keeps_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine.install(monkeypatch)
    kept = {}
    for implementation in ("none", "partial", "transformer_engine"):
        module, seen = made(implementation), list[Tensor]()
        module.train_step(batch())
        module.get_parameter("bias").register_hook(seen.append)
        for index in range(4):
            module.train_step(batch(index))
        kept[implementation] = seen, gradients(module)
    assert_equal(kept["partial"], kept["none"])
    assert_equal(kept["transformer_engine"], kept["none"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_what_is_transposed_is_not_what_has_its_address(implementation: str) -> None:
    module, plain = made(implementation), made("none")
    own = [torch.zeros(4, 4), torch.zeros(4, 4)]
    for index in range(6):
        for each, memory in zip((module, plain), own, strict=True):
            memory.zero_()
            each.zero_grad()
            each.get_parameter("first").grad = memory if index < 3 else memory.t()
            each.train_step(batch(index))
        assert_equal(gradients(module), gradients(plain))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_that_are_transposed_in_their_memory_are_seen(implementation: str) -> None:
    module = made(implementation)
    for index in range(3):
        module.train_step(batch(index))
        module.zero_grad()
    first = module.get_parameter("first")
    first.data = first.data.t()
    plain = Sums()
    plain.load_state_dict(module.full_state_dict())
    plain(**batch())["loss"].backward()
    module.train_step(batch())
    torch.testing.assert_close(gradients(module), gradients(plain))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_a_forward_recorded_in_inference_mode_is_replayed_outside_of_it(implementation: str) -> None:
    module, plain = made(implementation), made("none")
    for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert_equal(module(**batch())["y"], plain(**batch())["y"])


def test_a_mode_may_be_met_first_in_inference_mode() -> None:
    module, plain = made("none").eval(), Sums().eval()
    plain.load_state_dict(module.full_state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(module(**batch())["loss"], plain(**batch())["loss"])


def test_a_number_may_be_read_of_a_value_that_has_a_gradient() -> None:
    module, plain = made("partial", Scaled), Scaled()
    plain.load_state_dict(module.full_state_dict())
    for index in range(3):
        module.train_step(batch(index))
        plain(**batch(index))["loss"].backward()
    torch.testing.assert_close(gradients(module), gradients(plain))
    assert module.graph_figures is not None
    assert module.graph_figures.graphs > 2


@pytest.mark.parametrize("breaking", [0, 1, 2])
def test_a_backward_that_fails_does_not_spoil_the_next(breaking: int) -> None:
    found = {}
    for implementation in ("none", "partial"):
        module = made(implementation, Fragile)
        for index in range(5):
            Fragile.breaks = index == breaking
            loss = module(**batch(index))["loss"]
            if Fragile.breaks:
                with pytest.raises(ValueError, match="broken"):
                    loss.backward()
            else:
                loss.backward()
        found[implementation] = gradients(module)
    Fragile.breaks = False
    assert_equal(found["partial"], found["none"])


def test_gradients_are_in_no_pool_where_the_first_step_fails() -> None:
    module, Fragile.breaks = made("partial", Fragile), True
    with pytest.raises(ValueError, match="broken"):
        module.train_step(batch())
    Fragile.breaks = False
    module.train_step(batch())  # recorded, before any step has ended
    before = gradients(module)
    with torch.no_grad():
        for _ in range(2):
            module(**batch())
    assert_equal(gradients(module), before)


def test_forwards_wait_for_their_backwards_in_pools_of_their_own() -> None:
    found = {}
    for implementation in ("none", "partial"):
        module = made(implementation, Dropped)
        for index in range(4):
            first, second = module(**batch(index))["loss"], module(**batch(index + 9))["loss"]
            (second / 4).backward()
            first.backward()
        found[implementation] = gradients(module)
    assert_equal(found["partial"], found["none"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_the_number_of_the_step_may_be_set_between_replays(implementation: str) -> None:
    module, plain = made(implementation, Dropped), made("none", Dropped)
    for number in (0, 1, 2, 7, 8, 1, 2, 50):
        for each in (module, plain):
            each.step = number
        assert_equal(module.train_step(batch()), plain.train_step(batch()))
        assert module.step == plain.step == number + 1
        module.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_what_is_refused_has_drawn_nothing(implementation: str) -> None:
    module, plain = made(implementation, Dropped, variants=1), made("none", Dropped)
    longer = {"x": torch.randn(5, 4)}
    # Microbatches of which the first is accepted; a call that is differentiated, and one that is not.
    refused: list[Any] = [lambda: module.train_step(longer), lambda: module.train_step([batch(), longer])]
    refused += [] if implementation == "full_iteration" else [lambda: module(**longer)]
    for index in range(4):
        for call in refused if index else ():
            with pytest.raises(InputError, match="variants of graphs"):
                call()
        assert_equal(module.train_step(batch(index)), plain.train_step(batch(index)))
        module.zero_grad()
        plain.zero_grad()
    assert module.step == plain.step == 4


def test_a_backward_behind_close_says_so() -> None:
    module = made("partial")
    module(**batch())["loss"].backward()
    loss = module(**batch())["loss"]
    module.close()
    with pytest.raises(InputError, match="freed"):
        loss.backward()


def uneven(implementation: str, variants: int) -> tuple[list[Any], int]:
    """Steps of which the other rank's rows change alone; gradients or why a step was refused, and how many graphs."""
    module, found = made(implementation, dp=2, variants=variants), list[Any]()
    for rows in (1, 2, 1, 3, 1, 2):
        own = torch.randn(rows if dist.get_rank() else 2, 4, generator=torch.Generator().manual_seed(rows))
        try:
            module.train_step({"x": own})
            found.append([gradient.tolist() for gradient in gradients(module)])
        except InputError as error:
            found.append(error.reason)
        module.zero_grad()
    figures = module.graph_figures
    module.close()
    return found, figures.graphs if figures is not None else 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_ranks_of_uneven_rows_record_in_the_same_call(implementation: str, world2: World) -> None:
    plain = world2.run(uneven, "none", 16)
    found = world2.run(uneven, implementation, 16)
    assert [gradients for gradients, _ in found] == [gradients for gradients, _ in plain]
    assert found[0][1] == found[1][1] > 0
    first, second = world2.run(uneven, implementation, 2)
    assert first == second  # what one rank refuses, all do
    assert "has 2 variants" in first[0][3]


@product(implementation=IMPLEMENTATIONS[1:], order=["autograd first", "autograd behind", "own memory"])
def test_gradients_that_others_made_are_no_variants(implementation: str, order: str) -> None:
    # Calls, of which each is seen by itself: training and gradients that are none, ours, or somebody else's.
    module, plain = made(implementation, Dropped, variants=4), made("none", Dropped)
    kept = list[Tensor]()
    for index in range(6):
        found = list[Tensor]()
        for each in (module, plain):
            each.zero_grad()
            if order == "own memory":
                own = torch.full((4, 4), float(index))
                each.get_parameter("first").grad = own
                found.append(own)
            if order == "autograd first":
                each(**batch(index))["loss"].backward()
            each.train_step(batch(index + 9))
            each.train_step(batch(index + 19))
            if order == "autograd behind":
                each(**batch(index))["loss"].backward()
                each.train_step(batch(index + 29))
            kept += [p.grad for p in each.parameters() if p.grad is not None]  # no address comes twice
        assert_equal(gradients(module), gradients(plain))
        if found:
            assert_equal(*found)
            assert module.get_parameter("first").grad is found[0]
    assert module.graph_figures is not None
    assert module.graph_figures.graphs >= 1


def test_a_gradient_that_an_optimizer_in_the_graph_takes_may_be_anyones() -> None:
    module, plain = made("full_iteration"), made("none")
    own = [torch.zeros(4, 4), torch.zeros(4, 4)]
    adam = [torch.optim.AdamW(each.parameters(), fused=True) for each in (module, plain)]
    for index in range(5):
        for each, memory, optimizer in zip((module, plain), own, adam, strict=True):
            each.get_parameter("first").grad = memory.fill_(float(index))
            each.train_step(batch(index), optimizer=optimizer, max_norm=1.0)
        assert_equal([*module.parameters()], [*plain.parameters()])
        assert_equal(*own)


@pytest.mark.parametrize("implementation", ["none", "partial"])
def test_a_gradient_that_a_hook_keeps_is_its_own_where_there_was_none(implementation: str) -> None:
    module, seen = made(implementation), list[Tensor]()
    module.get_parameter("bias").register_hook(seen.append)
    expected = []
    for index in range(4):
        module.zero_grad()
        module.train_step(batch(index))
        grad = module.get_parameter("bias").grad
        assert grad is not None
        expected.append(grad.clone())
    assert_equal(seen, expected)
