"""Parameters of which a rank has all elements, or none.

Enters: a rank's tensor, or the shape of what other ranks of a pipeline have. Leaves: parameters into which no rank
writes random numbers of its process alone: replicas of one weight would drift apart without an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.errors import InputError
from fxpar.runtime.classes import Alike

_DRAW = "draw before parallelize, or draw a whole tensor, the same on every rank, and copy_ it"


def _refuse(name: str) -> Any:
    def method(tensor: Tensor, *args: Any, generator: torch.Generator | None = None, **options: Any) -> Tensor:
        if generator is None:
            raise InputError(f"{name} would draw numbers of each rank's own", where="a parameter", remedy=_DRAW)
        drawn: Tensor = getattr(Tensor, name)(tensor, *args, generator=generator, **options)
        return drawn

    method.__name__ = method.__qualname__ = name
    method.__doc__ = "Refused without a generator: other ranks would draw other numbers."
    return method


class Undrawn(Tensor):
    """A tensor that takes no random numbers of this process: what initialisers call is refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    normal_ = _refuse("normal_")
    uniform_ = _refuse("uniform_")
    bernoulli_ = _refuse("bernoulli_")
    cauchy_ = _refuse("cauchy_")
    exponential_ = _refuse("exponential_")
    geometric_ = _refuse("geometric_")
    log_normal_ = _refuse("log_normal_")
    random_ = _refuse("random_")

    def new_empty(self, *size: Any, **options: Any) -> Tensor:
        """Makes a tensor that takes none either: `nn.init.orthogonal_` draws into one and copies."""
        return Tensor.new_empty(self, *size, **options).as_subclass(Undrawn)


class _ParameterKind(Alike, type(nn.Parameter)):  # type: ignore[misc]
    """Makes classes of parameters equal to `nn.Parameter`: torch's optimizers ask `type(p)` for their fast ways."""


class WholeParameter(Undrawn, nn.Parameter, metaclass=_ParameterKind):
    """A parameter that this rank has whole, as other ranks have."""

    _stands_for = nn.Parameter

    @property
    def data(self) -> Tensor:
        """The values without their history."""
        values: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return values.as_subclass(Undrawn)

    @data.setter
    def data(self, value: Tensor) -> None:
        check_replaced(self, value)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


def check_replaced(parameter: Tensor, value: Tensor) -> None:
    """Refuses values of another shape, type or device in place of a parameter's."""
    if value.shape != parameter.shape or value.dtype != parameter.dtype or value.device != parameter.device:
        raise InputError(
            f"{value.dtype}{list(value.shape)} on {value.device} cannot take the place of "
            f"{parameter.dtype}{list(parameter.shape)} on {parameter.device}",
            where="data of a parameter",
            remedy="write values of the same type and shape; Plan(precision=…) sets the type",
        )


class Elsewhere(WholeParameter):
    """A parameter of a stage that other ranks of the pipeline hold: a shape and a type.

    Writes to it have no effect here, as they have theirs on the ranks that hold it; reading its values is refused.
    """

    place: tuple[str, torch.device]

    @staticmethod
    def __new__(cls, like: Tensor, name: str, device: torch.device) -> Elsewhere:
        """Makes one of a tensor's shape and type.

        Args:
            like: of the meta device.
            name: the parameter's.
            device: of this rank, which `device` names: code moves batches there.
        """
        made: Elsewhere = torch.Tensor._make_subclass(cls, like.detach(), like.requires_grad)
        made.place = name, device
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Elsewhere)]
        name, device = values[0].place
        if func is Tensor.device.__get__:  # type: ignore[attr-defined]
            return device
        if func in (Tensor.numpy, Tensor.__array__):
            _refuse_values(name, func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if not values or "meta" not in str(error):
                    raise
                _refuse_values(name, getattr(func, "__name__", "reading"))
        return pytree.tree_map_only(Tensor, lambda tensor: _placed(tensor, values[0]), result)


def _placed(tensor: Tensor, like: Elsewhere) -> Tensor:
    if isinstance(tensor, Elsewhere) or not tensor.is_meta:
        return tensor
    made: Any = tensor.as_subclass(Elsewhere)
    made.place = like.place
    return made  # type: ignore[no-any-return]


def _refuse_values(name: str, what: str) -> NoReturn:
    raise InputError(
        f"{what} needs values that other ranks of the pipeline hold",
        where=name,
        remedy="read it on a rank that has it: named_parameters() lists those of a rank, and full_state_dict() gives "
        "all to every rank",
    )
