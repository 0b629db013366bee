"""Operators of fxpar's own that have no gradient, for what a step calls hundreds of times.

Enters: a function of tensors and numbers. Leaves: an operator of `torch.ops.fxpar`, which compilers leave whole.

Where a step is launched by the host, what stands around a call counts: `torch.library.custom_op` wraps a function in
three more, for gradients and for checks of aliasing, and a call takes four times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from fxpar.errors import InputError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_LIBRARY = torch.library.Library("fxpar", "FRAGMENT")


class TorchOperator(Generic[_P, _R]):
    """An operator that is called like the function that computes it, and changes none of its operands."""

    def __init__(self, name: str, function: Callable[_P, _R], tags: Sequence[torch.Tag]) -> None:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(name, _without_gradients(name, function), "CompositeExplicitAutograd")
        self.__doc__, self._name = function.__doc__, name
        self._overload: Any = getattr(torch.ops.fxpar, name).default

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Through the dispatcher, as a graph calls it."""
        outputs: _R = self._overload(*args, **kwargs)
        return outputs

    def register_fake(self, function: Callable[..., _R]) -> Callable[..., _R]:
        """Tells the shapes of what it gives, by a function of the same operands."""
        torch.library.register_fake(f"fxpar::{self._name}", function, lib=_LIBRARY)
        return function


def _without_gradients(name: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function; it refuses operands that ask for a gradient, which autograd would take from what it computes.

    That of a rank alone is not that of a sum over ranks, and torch only warns.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.is_grad_enabled() and any(map(_asks, (*args, *kwargs.values()))):
            raise InputError(
                "an operand asks for a gradient, and the operator has none",
                where=f"fxpar::{name}",
                remedy="call it under torch.no_grad(), as the steps of a module do",
            )
        return function(*args, **kwargs)

    return run


def _asks(x: object) -> bool:
    if isinstance(x, Tensor):
        return x.requires_grad
    return isinstance(x, (list, tuple)) and any(map(_asks, x))


def torch_operator(name: str, *tags: torch.Tag) -> Callable[[Callable[_P, _R]], TorchOperator[_P, _R]]:
    """Makes `torch.ops.fxpar.<name>` of a function, whose signature says what it takes."""
    return lambda function: TorchOperator(name, function, tags)
