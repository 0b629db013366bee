"""What is asked of all parameters at each step, in few calls: whatever has changed is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxpar.runtime.grad_buffers import TensorAddresses
from fxpar.runtime.parameters import Tensors


def square() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(3, 3)) for _ in range(4)]


def moved(p: nn.Parameter) -> None:
    p.data = p.data.clone()


def transposed(p: nn.Parameter) -> None:
    p.data = p.data.t()  # at the same address


def cut(p: nn.Parameter) -> None:
    p.data = p.data[:2]  # at the same address


def frozen(p: nn.Parameter) -> None:
    p.requires_grad_(False)


@pytest.mark.parametrize("change", [moved, transposed, cut, frozen])
def test_a_tensor_that_lies_elsewhere_is_seen(change: Callable[[nn.Parameter], None]) -> None:
    tensors = square()
    before = TensorAddresses(tensors)
    assert before.holds(tensors)
    assert before == TensorAddresses(tensors)
    change(tensors[2])
    assert not before.holds(tensors)
    assert before != TensorAddresses(tensors)
    assert TensorAddresses(tensors).holds(tensors)


def test_values_may_change() -> None:
    tensors = square()
    before = TensorAddresses(tensors)
    with torch.no_grad():
        tensors[0].add_(1)
    assert before.holds(tensors)
    assert hash(before) == hash(TensorAddresses(tensors))


class Model(nn.Module):
    """Two layers, a buffer, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 3), nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)


def other_parameter(m: Model) -> None:
    m.up.weight = nn.Parameter(m.up.weight.detach())


def in_the_table(m: Model) -> None:
    m.up._parameters["weight"] = nn.Parameter(torch.ones(3, 2))


def other_module(m: Model) -> None:
    m.down = nn.Linear(3, 2)


def other_buffer(m: Model) -> None:
    m.norm.running_mean = torch.zeros(2)


def no_bias(m: Model) -> None:
    m.up.register_parameter("bias", None)


def deleted(m: Model) -> None:
    del m.norm


def renamed(m: Model) -> None:
    m.down._parameters["offset"] = m.down._parameters.pop("bias")


def exchanged(m: Model) -> None:
    m.up, m.down = m.down, m.up


@pytest.mark.parametrize(
    "change", [other_parameter, in_the_table, other_module, other_buffer, no_bias, deleted, renamed, exchanged]
)
def test_what_a_module_has_otherwise_is_seen(change: Callable[[Model], None]) -> None:
    model = Model()
    tensors = Tensors(model)
    before = tensors.version
    tensors.refresh()
    assert tensors.version == before
    change(model)
    tensors.refresh()
    assert tensors.version == before + 1
    assert [*tensors.parameters] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(tensors.parameters.values(), model.parameters(), strict=True))
    tensors.refresh()
    assert tensors.version == before + 1
