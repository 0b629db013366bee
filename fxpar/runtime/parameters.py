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

# What says on which device a tensor is.
_OF_DEVICE = (
    *(getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")),
    *(Tensor.type, Tensor.get_device),
)
_DRAW = "draw before parallelize, or draw a whole tensor, the same on every rank, and copy_ it"


def _refuse(name: str) -> Any:
    def method(tensor: Tensor, *args: Any, **options: Any) -> NoReturn:
        raise InputError(f"{name} would draw numbers of each rank's own", where="a parameter", remedy=_DRAW)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = "Refused: other ranks would draw other numbers."
    return method


class Undrawn(Tensor):
    """A tensor that takes no random numbers of this process: what initialisers call is refused."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    normal_ = _refuse("normal_")
    uniform_ = _refuse("uniform_")
    bernoulli_ = _refuse("bernoulli_")
    cauchy_ = _refuse("cauchy_")
    exponential_ = _refuse("exponential_")
    geometric_ = _refuse("geometric_")
    log_normal_ = _refuse("log_normal_")
    random_ = _refuse("random_")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def new_empty(self, *size: Any, **options: Any) -> Tensor:
        """Makes a tensor that takes none either: `nn.init.orthogonal_` draws into one and copies."""
        return Tensor.new_empty(self, *size, **options).as_subclass(Undrawn)


class _ParameterKind(Alike, type(nn.Parameter)):  # type: ignore[misc]
    """Makes classes of parameters equal to `nn.Parameter`: torch's optimizers ask `type(p)` for their fast ways."""


class WholeParameter(Undrawn, nn.Parameter, metaclass=_ParameterKind):  # type: ignore[metaclass]
    """A parameter that this rank has whole, as other ranks have."""

    _stands_for = nn.Parameter

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

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

    _stands_for = nn.Parameter
    place: tuple[str, torch.device]

    @staticmethod
    def __new__(cls, like: Tensor, name: str, device: torch.device) -> Elsewhere:
        """Makes one of a tensor's shape and type.

        Args:
            like: of the meta device.
            name: the parameter's.
            device: of this rank, which `device` names: code moves batches there.
        """
        tensor: Elsewhere = torch.Tensor._make_subclass(cls, like.detach(), like.requires_grad)
        tensor.place = name, device
        return tensor

    @property
    def data(self) -> Tensor:
        """Its shape and type without a history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_replaced(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter on another rank of the pipeline: {self.place[0]}, {self.dtype}{list(self.shape)}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        elsewhere = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Elsewhere))
        what = getattr(func, "__name__", "reading it")
        if func in _OF_DEVICE and len(args) == 1:
            return func(torch.empty(0, dtype=elsewhere.dtype, device=elsewhere.place[1]))
        is_written = bool(args) and isinstance(args[0], Elsewhere) and what.endswith("_") and not what.endswith("__")
        if is_written:  # here the values that are written are of no effect
            args, kwargs = pytree.tree_map_only(Tensor, _without_values, (args, kwargs))
        if func in _READS or any(isinstance(v, Tensor) and not v.is_meta for v in _others((args, kwargs))):
            elsewhere.refuse(what)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if "meta" not in str(error).lower():
                    raise
                elsewhere.refuse(what)
        if type(result) in (list, tuple):  # and no torch.Size
            return type(result)(_placed(item, elsewhere) for item in result)
        return _placed(result, elsewhere)

    def refuse(self, what: str) -> NoReturn:
        """Refuses to read values."""
        raise InputError(
            f"{what} needs values that other ranks of the pipeline hold",
            where=self.place[0],
            remedy="read it on a rank that has it: named_parameters() lists those of a rank, and full_state_dict() "
            "gives all to every rank",
        )


_READS = (Tensor.numpy, Tensor.__array__, Tensor.__format__)


def _others(nest: Any) -> list[Any]:
    return [value for value in pytree.tree_leaves(nest) if not isinstance(value, Elsewhere)]


def _without_values(value: Tensor) -> Tensor:
    return value if isinstance(value, Elsewhere) or value.is_meta else value.detach().to("meta")


def _placed(value: Any, like: Elsewhere) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, Elsewhere) or not value.is_meta:
        return value
    placed: Any = value.as_subclass(Elsewhere)
    placed.place = like.place
    return placed
