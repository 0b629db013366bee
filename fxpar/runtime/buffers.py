"""Gradients in the memory in which optimizers find them: buffers whose addresses never change.

Enters: gradients of a step by parameter. Leaves: `.grad` of the parameters. After `zero_grad(set_to_none=True)` a
buffer is overwritten, else added to.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxpar.state.sharded_parameter import leaf_of


class Buffers:
    """Gradients of a module's parameters, made when they first have one."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def placed(self, leaves: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients in the memory where they will be: what they were in can be freed at once.

        Where there are gradients already, they are added to those, but for what a hook is to see first.

        Args:
            leaves: the parameters' tensors by name.
            gradients: of some, of this rank's whole step.
        """
        moved = [name for name in gradients if leaves[name].grad is None]
        added = [name for name in gradients if leaves[name].grad is not None and not leaves[name]._backward_hooks]
        found = {**gradients, **{name: self._buffer(name, leaves[name]) for name in moved}}
        found |= {name: grad for name in added if (grad := leaves[name].grad) is not None}
        for names, function in ((moved, torch._foreach_copy_), (added, torch._foreach_add_)):
            if names:
                function([found[name] for name in names], [gradients[name] for name in names])
        return found

    def state(self, leaves: Mapping[str, Tensor]) -> Hashable:
        """Equal where gradients are placed alike: at the same addresses, over what is there or added to it.

        Strides too: what is transposed has the address of what it is made of. Buffers are made here: one made while a
        graph is recorded would lie in its pool.
        """
        for name, leaf in leaves.items():
            if leaf.grad is None:
                self._buffer(name, leaf)
        grads = ((leaf.grad, bool(leaf._backward_hooks)) for leaf in leaves.values())
        return tuple((None if g is None else (g.data_ptr(), g.stride()), is_hooked) for g, is_hooked in grads)

    @torch.no_grad()
    def add(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Adds gradients to those of the parameters, with the hooks that autograd would call.

        Args:
            parameters: by name.
            gradients: of some, as each rank has them; those of `placed` are where they belong.
        """
        fresh: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for name, found in gradients.items():
            leaf = leaf_of(parameters[name])
            if leaf.grad is not None and found.data_ptr() == leaf.grad.data_ptr():  # added already
                continue
            gradient = _hooked(leaf, found)
            if leaf.grad is None:
                leaf.grad = self._buffer(name, leaf)
                if gradient is not leaf.grad:
                    fresh.append((leaf.grad, gradient))
            else:
                more.append((leaf.grad, gradient))
        for pairs, function in ((fresh, torch._foreach_copy_), (more, torch._foreach_add_)):
            if pairs:
                function([buffer for buffer, _ in pairs], [gradient for _, gradient in pairs])

    def attach(self, parameters: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Gives parameters that have no gradients their buffers, in which they are."""
        for name in names:
            leaf = leaf_of(parameters[name])
            if leaf.grad is None:
                leaf.grad = self._buffer(name, leaf)

    def _buffer(self, name: str, leaf: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is None or known.shape != leaf.shape or known.dtype != leaf.dtype or known.device != leaf.device:
            known = self._buffers[name] = torch.empty_like(leaf, memory_format=torch.preserve_format).detach()
        return known


def call_hooks(parameters: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Calls the hooks of what follows a gradient that is there."""
    for name in names:
        leaf = leaf_of(parameters[name])
        hooks = getattr(leaf, "_post_accumulate_grad_hooks", None)
        for hook in list(hooks.values()) if hooks else ():
            hook(leaf)


def _hooked(leaf: Tensor, gradient: Tensor) -> Tensor:
    """What the hooks of a tensor make of its gradient."""
    for hook in list((leaf._backward_hooks or {}).values()):
        made: Any = hook(gradient)
        if made is not None:
            gradient = made
    return gradient
