"""What a trace knows of the values that go into a call of a layer and come out of it.

Enters: nests of tensors and constants. Leaves: their tensors and a description, equal for two nests that no code can
tell apart while it is traced: sizes are compared as expressions, and which tensors are one, or share memory, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

# Containers and constants of exactly these types: any other object may be told apart in ways of its own, and to compare
# symbolic numbers would be a question of the trace's.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


class UnknownValueError(Exception):
    """A value of which no description says all."""


def described(value: Any, tensors: list[Tensor]) -> Any:
    """The structure and the constants of a nest, whose tensors are appended.

    Raises:
        UnknownValueError: it holds something else than tensors and constants.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", of_tensor(value)
    if kind in (tuple, list):
        return kind, tuple(described(item, tensors) for item in value)
    if kind is dict:
        # Equal keys may be of other types (1 and True).
        return kind, tuple((type(key), key, described(item, tensors)) for key, item in value.items())
    if kind in _CONSTANTS and value == value:  # a number that is none is equal to nothing
        return kind, str(value) if kind is float else value  # -0.0 is 0.0
    raise UnknownValueError


def rebuilt(value: Any, tensors: Callable[[Tensor], Tensor]) -> Any:
    """A nest that `described` takes, with other tensors."""
    if isinstance(value, Tensor):
        return tensors(value)
    if type(value) in (tuple, list):
        return type(value)(rebuilt(item, tensors) for item in value)
    if type(value) is dict:
        return {key: rebuilt(item, tensors) for key, item in value.items()}
    return value


def of_tensor(value: Tensor) -> tuple[Any, ...]:
    """What can be known of one tensor without values.

    Raises:
        UnknownValueError: it is no plain tensor of a trace.
    """
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_inference():
        raise UnknownValueError
    if value.constant is not None or value.is_conj() or value.is_neg() or _has_more(value):
        raise UnknownValueError
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return (
        value.dtype,
        value.device,
        value.dim(),
        tuple(size if isinstance(size, int) else size.node.expr for size in sizes),
        value.requires_grad,
        value.is_leaf,
        value._is_view(),  # what reshapes or converts it makes other operations of a view
        isinstance(value, torch.nn.Parameter),
    )


_KNOWN = frozenset(
    {"fake_mode", "fake_device", "_fake_device", "constant", "pytype", "dispatch_keys", "real_tensor", "_is_param"}
)


def _has_more(value: Tensor) -> bool:
    """Whether somebody has given the tensor an attribute; what a mode of fakes remembers of it has these names."""
    return any(name not in _KNOWN and "_memo" not in name for name in vars(value))


def pattern(tensors: list[Tensor]) -> tuple[tuple[int, int], ...]:
    """For each tensor the first one that it is, and the first one whose memory it has."""
    same: dict[int, int] = {}
    memory: dict[int, int] = {}
    return tuple(
        (same.setdefault(id(value), index), memory.setdefault(storage(value), index))
        for index, value in enumerate(tensors)
    )


def storage(value: Tensor) -> int:
    """The identity of a tensor's memory."""
    return int(value.untyped_storage()._cdata)


def new_like(value: Tensor) -> Tensor:
    """A tensor of its own memory, of which a trace knows as much as of another one.

    Raises:
        UnknownValueError: there is none like it.
    """
    with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing(), torch.enable_grad():
        new = torch.empty_like(value)
        if value.requires_grad:
            new = new.requires_grad_()
            if not value.is_leaf:
                new = new.clone()
    if of_tensor(new) != of_tensor(value):
        raise UnknownValueError
    return new
