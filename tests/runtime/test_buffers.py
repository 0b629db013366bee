"""Gradients in buffers whose addresses stay."""

from __future__ import annotations

import torch
from torch import nn

from fxpar.runtime.buffers import Buffers


def test_placed_gradients_are_in_the_memory_where_optimizers_find_them() -> None:
    leaf = nn.Parameter(torch.zeros(3))
    buffers, made = Buffers(), torch.tensor([1.0, 2.0, 3.0])
    placed = buffers.placed({"w": leaf}, {"w": made})
    assert leaf.grad is None  # nothing is seen of a step that is not over
    buffers.add({"w": leaf}, placed)
    assert leaf.grad is placed["w"]
    assert leaf.grad.data_ptr() != made.data_ptr()
    assert torch.equal(leaf.grad, made)
    again = buffers.placed({"w": leaf}, {"w": made})
    buffers.add({"w": leaf}, again)
    assert torch.equal(leaf.grad, 2 * made)
    address, leaf.grad = leaf.grad.data_ptr(), None
    buffers.add({"w": leaf}, buffers.placed({"w": leaf}, {"w": made}))
    grad = leaf.grad
    assert isinstance(grad, torch.Tensor)
    assert grad.data_ptr() == address
    assert torch.equal(grad, made)


def test_hooks_see_placed_gradients() -> None:
    leaf, buffers = nn.Parameter(torch.zeros(2)), Buffers()
    leaf.register_hook(lambda gradient: gradient * 10)
    buffers.add({"w": leaf}, buffers.placed({"w": leaf}, {"w": torch.ones(2)}))
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [10.0, 10.0]


def test_one_tensor_may_be_the_gradient_of_two() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    leaves, buffers, made = {"a": first, "b": second}, Buffers(), torch.tensor([1.0, 2.0])
    buffers.add(leaves, buffers.placed(leaves, {"a": made, "b": made}))
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.tolist() == second.grad.tolist() == [1.0, 2.0]
    assert first.grad.data_ptr() != second.grad.data_ptr()
