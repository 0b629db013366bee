"""Gradients in buffers whose addresses stay."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxpar.runtime.grad_buffers import Buffers


@pytest.mark.parametrize("graphed", [False, True])
def test_placed_gradients_are_in_the_memory_where_optimizers_find_them(graphed: bool) -> None:
    """Graphs find them where they were; without them memory is free once its gradient is."""
    leaf = nn.Parameter(torch.zeros(3))
    buffers, made = Buffers(graphed), torch.tensor([1.0, 2.0, 3.0])
    placed = buffers.placed({"w": leaf}, {"w": made})
    assert leaf.grad is None  # nothing is seen of a step that is not over
    buffers.add({"w": leaf}, placed)
    assert leaf.grad is placed["w"]
    assert leaf.grad.data_ptr() != made.data_ptr()
    assert torch.equal(leaf.grad, made)
    again = buffers.placed({"w": leaf}, {"w": made})
    buffers.add({"w": leaf}, again)
    assert torch.equal(leaf.grad, 2 * made)
    address, memory, leaf.grad = leaf.grad.data_ptr(), weakref.ref(leaf.grad), None
    del placed, again
    assert (memory() is None) == (not graphed)
    buffers.add({"w": leaf}, buffers.placed({"w": leaf}, {"w": made}))
    grad = leaf.grad
    assert isinstance(grad, torch.Tensor)
    assert not graphed or grad.data_ptr() == address
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


def freed(leaves: dict[str, nn.Parameter]) -> None:
    for leaf in leaves.values():
        leaf.grad = None


def one_freed(leaves: dict[str, nn.Parameter]) -> None:
    leaves["b"].grad = None


def of_the_user(leaves: dict[str, nn.Parameter]) -> None:
    leaves["a"].grad = torch.ones(2, 2)


def moved(leaves: dict[str, nn.Parameter]) -> None:
    if leaves["a"].grad is not None:
        leaves["a"].grad.data = leaves["a"].grad.data.clone()


def transposed(leaves: dict[str, nn.Parameter]) -> None:
    if leaves["a"].grad is not None:
        leaves["a"].grad.data = leaves["a"].grad.data.t()


def hooked(leaves: dict[str, nn.Parameter]) -> None:
    leaves["b"].register_post_accumulate_grad_hook(lambda leaf: None)


def swapped(leaves: dict[str, nn.Parameter]) -> None:
    leaves["a"].grad, leaves["b"].grad = leaves["b"].grad, leaves["a"].grad


def handed_on(leaves: dict[str, nn.Parameter]) -> None:
    if leaves["a"].grad is not None:
        leaves["b"].grad, leaves["a"].grad = leaves["a"].grad, None


def left(leaves: dict[str, nn.Parameter]) -> None:
    pass


ACTIONS = (freed, one_freed, of_the_user, moved, transposed, swapped, handed_on, hooked, left, left)


@given(st.lists(st.sampled_from(ACTIONS), max_size=12))
def test_a_look_at_what_has_not_changed_says_what_a_whole_one_does(actions: list[Callable[..., None]]) -> None:
    leaves = {name: nn.Parameter(torch.zeros(2, 2)) for name in "ab"}
    buffers, names = Buffers(graphed=True), tuple(leaves)
    for action in actions:
        action(leaves)
        state = buffers.state(leaves)
        is_hooked = buffers.is_hooked
        fresh = Buffers(graphed=True)
        fresh._buffers, fresh._kinds, fresh._remade = buffers._buffers, buffers._kinds, buffers._remade
        assert state == fresh.state(leaves)
        assert is_hooked == any(leaf._post_accumulate_grad_hooks for leaf in leaves.values())
        wanted = {name: 1 if leaf.grad is None else leaf.grad + 1 for name, leaf in leaves.items()}
        for name, leaf in leaves.items():  # what a graph does: over what is there, or added to it
            if leaf.grad is None or buffers._is_apart(name, leaf):
                buffers._buffers[name].fill_(1)
            else:
                leaf.grad.add_(1)
        buffers.attach(leaves, names)
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert bool((leaf.grad == wanted[name]).all())


def test_gradients_without_elements_are_nobodys_buffers() -> None:
    leaves = {name: nn.Parameter(torch.zeros(0)) for name in "ab"}
    buffers = Buffers(graphed=True)
    assert buffers.state(leaves) is None
    buffers.attach(leaves, tuple(leaves))
    assert buffers.state(leaves) == buffers.state(dict(leaves))  # none was made anew
