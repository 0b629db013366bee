"""Gradients in the memory in which optimizers find them: buffers whose addresses never change.

Enters: gradients of a step by parameter. Leaves: `.grad` of the parameters. After `zero_grad(set_to_none=True)` a
buffer is overwritten, else added to.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """Gradients in the memory where they will be, as long as that is free: what they were in can be freed at once.

        Args:
            leaves: the parameters' tensors by name.
            gradients: of some, of this rank's whole step.
        """
        moved = [name for name in gradients if leaves[name].grad is None]
        found = {**gradients, **{name: self._buffer(name, leaves[name]) for name in moved}}
        if moved:
            torch._foreach_copy_([found[name] for name in moved], [gradients[name] for name in moved])
        return found

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
        for name in gradients:
            leaf = leaf_of(parameters[name])
            for hook in list((getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values()):
                hook(leaf)

    def _buffer(self, name: str, leaf: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is None or known.shape != leaf.shape or known.dtype != leaf.dtype or known.device != leaf.device:
            known = self._buffers[name] = torch.empty_like(leaf, memory_format=torch.preserve_format).detach()
        return known


def _hooked(leaf: Tensor, gradient: Tensor) -> Tensor:
    """What the hooks of a tensor make of its gradient."""
    for hook in list((leaf._backward_hooks or {}).values()):
        made: Any = hook(gradient)
        if made is not None:
            gradient = made
    return gradient
