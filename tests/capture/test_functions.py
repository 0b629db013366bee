"""Hand-written gradients: each call of an autograd function is one node of its own, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxpar.capture.capture import Captured, capture
from fxpar.errors import CaptureError
from fxpar.ir.program import note
from fxpar.ops.small_operators import function
from fxpar.text.printing import print_program
from tests.capture.functions import (
    InPlace,
    Largest,
    Noisy,
    Outer,
    Pair,
    Product,
    Scaled,
    Scope,
    Seven,
    Shaped,
)
from tests.capture.models import Net, example, faithful, net

PATH = "tests.capture.functions"


def paths(captured: Captured) -> list[Any]:
    return [n.kwargs["path"] for n in captured.program.graph.nodes if n.target is function]


def call(cls: Any, *args: Any) -> Any:
    return cls.apply(*args)


def through(cls: Any, *more: Any) -> Net:
    return net(lambda m, x: m.down(cls.apply(m.up(x), *more)).sum())


def test_torch_export_alone_loses_the_gradient() -> None:
    """The trap itself: without the recording the forward is differentiated."""
    model, x = through(Seven), example()
    exported = torch.export.export(model, (x,), strict=False).module()
    (wanted,) = torch.autograd.grad(model(x), [model.up.weight])
    (found,) = torch.autograd.grad(exported(x), [exported.get_parameter("up.weight")])
    assert not torch.allclose(wanted, found)


def test_a_function_is_one_node_with_its_own_gradient() -> None:
    captured = faithful(through(Seven), example())
    assert paths(captured) == [f"{PATH}.Seven"]
    assert captured.how == "export"


def test_a_function_called_twice_is_two_nodes() -> None:
    captured = faithful(net(lambda m, x: m.down(call(Seven, call(Seven, m.up(x)))).sum()), example())
    assert paths(captured) == [f"{PATH}.Seven"] * 2


def test_several_outputs_and_arguments_that_are_no_tensors() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        p, q = call(Scaled, m.up(x), 2.5, True, "scaled")
        return m.down(p * q).sum()

    captured = faithful(net(forward), example())
    node = next(n for n in captured.program.graph.nodes if n.target is function)
    assert node.args[1:] == (2.5, True, "scaled")


def test_an_output_that_is_not_used() -> None:
    faithful(net(lambda m, x: m.down(call(Scaled, m.up(x), 2.5, True, "scaled")[1]).sum()), example())


def test_an_output_without_gradient() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        doubled, place = call(Largest, m.up(x))
        return m.down(doubled).sum() + place.sum()

    faithful(net(forward), example())


def test_setup_context_and_a_parameter_as_argument() -> None:
    faithful(net(lambda m, x: call(Product, m.up(x), m.down.weight[0]).sum()), example())


def test_a_function_that_calls_a_function_is_one_node() -> None:
    assert paths(faithful(through(Outer), example())) == [f"{PATH}.Outer"]


def test_a_function_under_no_grad_has_no_gradient() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        h = m.up(x)
        with torch.no_grad():
            g = call(Seven, h)
        return m.down(h * g).sum()

    faithful(net(forward), example())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_inside_a_checkpoint(reentrant: bool) -> None:
    def forward(m: Net, x: Tensor) -> Any:
        h = checkpoint(lambda v: call(Seven, v).tanh(), m.up(x), use_reentrant=reentrant)
        return m.down(h).sum()

    captured = faithful(net(forward), example())
    node = next(n for n in captured.program.graph.nodes if n.target is function)
    assert note(node).recompute == 1


def test_names_are_the_functions_own_and_stable() -> None:
    first, second = (print_program(capture(through(Seven), example()).program) for _ in range(2))
    assert first == second
    assert '%seven = fxpar.function(%linear, path="tests.capture.functions.Seven")' in first


def local_function() -> Any:
    class Local(Scope.Inner):
        """In a function."""

    return Local


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: through(local_function()), "another scope"),
        (lambda: through(Scope.Inner), "another scope"),
        (lambda: through(InPlace), "changes its argument in place"),
        (lambda: through(Noisy), "draws random numbers"),
        (lambda: net(lambda m, x: m.down(call(Pair, m.up(x))[0]).sum()), "something else than tensors"),
        (lambda: net(lambda m, x: call(Shaped, m.up(x), x.shape[0]).sum()), "type SymInt"),
    ],
    ids=["local", "nested class", "in place", "random", "number output", "size argument"],
)
def test_functions_that_no_node_can_hold_are_refused(model: Callable[[], Net], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(model(), example())
    assert caught.value.where
    assert caught.value.remedy
