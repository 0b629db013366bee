"""An optimizer's step inside of a graph.

Enters: an optimizer. Leaves: what a graph with its step depends on, and learning rates as tensors, into which the
numbers of the parameter groups are written before each replay, so that schedulers act.

torch's capturable and fused optimizers take a learning rate as a tensor and no other number: a step is recorded again
where one of those has changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpar.errors import InputError

_RATE = "lr"


def check_optimizer(optimizer: Any, device: torch.device) -> None:
    """Refuses what cannot step in a graph.

    Raises:
        InputError: it is no optimizer, reads the device on the host, or has hooks.
    """
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"a {type(optimizer).__name__} is no optimizer", where="optimizer", remedy="pass one of torch.optim"
        )
    name = type(optimizer).__name__
    # torch refuses to step while a GPU captures where an optimizer that could be capturable is not.
    waits = device.type == "cuda" and any(group.get("capturable") is False for group in optimizer.param_groups)
    if waits or not takes_tensors(optimizer):
        raise InputError(
            "counts its steps on the host, and a graph runs no Python",
            where=name,
            remedy=f"make it with fused=True and, where it takes that, capturable=True: {name}(…, fused=True)",
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InputError(
            "has hooks of steps, and a graph runs no Python", where=name, remedy="remove them, or step behind the graph"
        )


def takes_tensors(optimizer: Optimizer) -> bool:
    """Whether learning rates may be tensors, and nothing is asked of the device."""
    return all(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)


def state_of(optimizer: Optimizer) -> Hashable:
    """Equal where a recorded step does the same: numbers but rates, and where parameters and state are."""
    groups = []
    for group in optimizer.param_groups:
        numbers = tuple((k, v) for k, v in sorted(group.items()) if k not in ("params", _RATE, "initial_lr"))
        groups.append((repr(numbers), tuple(map(id, group["params"]))))
    values = (value for state in optimizer.state.values() for value in state.values())
    return id(optimizer), tuple(groups), tuple(value.data_ptr() for value in values if isinstance(value, Tensor))


class Rates:
    """Learning rates of an optimizer's groups as tensors."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._groups = optimizer.param_groups
        dtype = torch.float32 if device.type == "cuda" else torch.float64  # as torch's fused kernels read them
        self._known: list[float] = [float(group[_RATE]) for group in optimizer.param_groups]
        self._tensors = [torch.tensor(rate, dtype=dtype, device=device) for rate in self._known]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The groups have tensors."""
        before = [group[_RATE] for group in self._groups]
        for group, tensor in zip(self._groups, self._tensors, strict=True):
            group[_RATE] = tensor
        try:
            yield
        finally:
            for group, rate in zip(self._groups, before, strict=True):
                group[_RATE] = rate

    def refresh(self) -> None:
        """Writes the numbers that the groups have by now."""
        for i, group in enumerate(self._groups):
            rate = float(group[_RATE])
            if rate != self._known[i]:
                self._tensors[i].fill_(rate)
                self._known[i] = rate
