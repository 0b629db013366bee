"""Optimizers of a module's parameters: state that torch has distributed becomes parts.

Enters: optimizers that step. Leaves: their state as `Sharded`. `set_optimizer_state_dict` with whole tensors makes
plain DTensors of what it distributes; their operations would convert them, or fail.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxpar.checkpoint.sharded import Sharded, ShardedParameter
from fxpar.checkpoint.sharded_ops import part_of
from fxpar.errors import InputError
from fxpar.runtime.rank_consensus import Agreement


class Optimizers:
    """What is done before an optimizer's first step and after it has loaded state; and which step never ended.

    Args:
        model: the unsplit one; an optimizer of its parameters would train nothing.
        agreement: is told of the steps that begin and end on this rank.
    """

    def __init__(self, model: nn.Module, agreement: Agreement) -> None:
        self._agreement = agreement
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._owner: Callable[[], nn.Module | None] = lambda: None
        self._steps_own: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._originals = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}

    def watch(self, owner: Any) -> None:
        """Sees all optimizers for as long as `owner` lives."""
        self._owner = weakref.ref(owner)
        for handle in (register_optimizer_step_pre_hook(self._begins), register_optimizer_step_post_hook(self._ends)):
            remove: Callable[[], None] = handle.remove
            weakref.finalize(owner, remove)

    def _begins(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        self(optimizer)
        # A closure makes calls of its own within the step.
        if len(arguments) <= 1 and not options and self._is_own(optimizer):
            self._agreement.stepping = type(optimizer).__name__

    def _ends(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self._is_own(optimizer):
            self._agreement.stepping = ""

    def _is_own(self, optimizer: Optimizer) -> bool:
        """Whether it steps a parameter of the module."""
        if optimizer not in self._steps_own:
            owner = self._owner()
            owned = set() if owner is None else {id(parameter) for parameter in owner.parameters()}
            stepped = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            self._steps_own[optimizer] = any(parameter in owned for parameter in stepped)
        return self._steps_own[optimizer]

    def __call__(self, optimizer: Optimizer) -> None:
        """Prepares an optimizer, once.

        Raises:
            InputError: it holds the parameters of the unsplit model, and they have no gradients.
        """
        if optimizer in self._known:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(isinstance(parameter, ShardedParameter) for parameter in parameters):
            self._known.add(optimizer)
            _keep_parts(optimizer)
            optimizer.register_load_state_dict_post_hook(_keep_parts)
        elif parameters and all(self._is_original(p) and p.grad is None for p in parameters):
            raise InputError(
                "holds the parameters of the model that was split, which nothing trains",
                where=type(optimizer).__name__,
                remedy="make the optimizer of parallelize(…).parameters()",
            )

    def _is_original(self, parameter: Tensor) -> bool:
        known = self._originals.get(id(parameter))
        return known is not None and known() is parameter


def _keep_parts(optimizer: Optimizer) -> None:
    """Takes a parameter's state that torch has distributed as its own parts."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, ShardedParameter):
            for key, value in state.items():
                if isinstance(value, DTensor) and not isinstance(value, Sharded):
                    state[key] = Sharded(part_of(value, parameter.place), parameter.place)
