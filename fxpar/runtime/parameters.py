"""Parameters of which a rank has all elements, or none.

Enters: a rank's tensor, or the shape of what other ranks of a pipeline have. Leaves: parameters into which no rank
writes random numbers of its process alone: replicas of one weight would drift apart without an error.
"""

from __future__ import annotations

import weakref
from abc import ABCMeta
from collections.abc import Mapping, MutableMapping, ValuesView
from itertools import chain
from operator import is_
from typing import Any, NoReturn, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fxpar.errors import InputError
from fxpar.runtime.calls import OnceCalls
from fxpar.runtime.shard_spec import ShardSpec
from fxpar.runtime.sharded import Sharded, leaf_of, local_of

# Classes that code takes for the author's: of what the parts of a parallel module are instances.


_ORIGINAL = "_stands_for"
_Module = TypeVar("_Module", bound=nn.Module)


class Alike(type):
    """Makes classes equal to those that they stand for: `type(m) == nn.Linear`, and tables by class, go on to work."""

    def __eq__(cls, other: object) -> bool:
        """Compares what the classes stand for."""
        return isinstance(other, type) and original_of(cls) is original_of(other)

    def __hash__(cls) -> int:
        """Agrees with the class that it stands for."""
        return type.__hash__(original_of(cls))


def original_of(cls: type) -> type:
    """Returns the class that a class stands for; itself where it stands for none."""
    original: type = vars(cls).get(_ORIGINAL, cls)
    return original


def class_of(ours: type[_Module], author: type[nn.Module]) -> type[_Module]:
    """Makes a class of ours that stands for one of the author's.

    Calling it makes a module of the author's class: slices of containers do (`model.blocks[:2]`), and so does code that
    replaces a layer by a new one of the same class.

    Args:
        ours: a class whose methods go before the author's, and which defines an `__init_subclass__` that ends there.
        author: is left as it is.
    """

    def make(cls: type, *args: Any, **options: Any) -> nn.Module:
        return author(*args, **options)

    namespace = {
        "__module__": author.__module__,
        "__qualname__": author.__qualname__,
        "__doc__": author.__doc__,
        "__new__": make,
        "__class__": property(lambda module: author),
        _ORIGINAL: author,
    }
    metaclass, maker = type(author), ABCMeta if isinstance(author, ABCMeta) else type
    alike = Alike if metaclass is type else type(metaclass.__name__, (Alike, metaclass), {})
    stand_in: type[_Module] = maker.__new__(alike, author.__name__, (ours, author), namespace)
    return stand_in


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
        """Returns the values without their history."""
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


# Of whole parameters. As an attribute it would be pickled with them, and it refers to process groups.
_SPECS: MutableMapping[Tensor, ShardSpec] = WeakTensorKeyDictionary()


def set_shard_spec(parameter: nn.Parameter, spec: ShardSpec) -> None:
    """Notes among which ranks a parameter is whole on all.

    Args:
        spec: without cuts.
    """
    _SPECS[parameter] = spec


def shard_spec_of(parameter: Tensor) -> ShardSpec | None:
    """Returns where the ranks' parts of a module's parameter lie; None of other tensors, or if there is one rank."""
    return parameter.place if isinstance(parameter, Sharded) else _SPECS.get(parameter)


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
        """Returns its shape and type without a history."""
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
                # torch raises several types for what the meta device cannot do, and its texts name the device.
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


# The parameters and buffers of a module, found once.


class Tensors:
    """Parameters and buffers of a module by their first names.

    Attributes:
        version: a number that changes where a module, parameter or buffer is another object than before.
        parameters: as `named_parameters` gave them at the last look.
        leaves: of the parameters.
        all: buffers too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.version = 0
        self._module = module
        self._tables: list[Mapping[str, Any]] = []
        self._views: list[ValuesView[Any]] = []
        self._sizes: list[int] = []
        self._names: list[str] = []
        self._objects: list[Any] = []
        self.parameters: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        self.all: dict[str, Tensor] = {}
        self._look()

    def _look(self) -> None:
        self.version += 1
        self.parameters = dict(self._module.named_parameters())
        self.leaves = {name: leaf_of(parameter) for name, parameter in self.parameters.items()}
        self.all = {**dict(self._module.named_buffers()), **self.parameters}
        self._tables = [t for m in self._module.modules() for t in (m._modules, m._parameters, m._buffers) if t]
        self._sizes = list(map(len, self._tables))
        self._names = list(chain.from_iterable(self._tables))
        self._views = [table.values() for table in self._tables]
        self._objects = list(chain.from_iterable(self._views))

    def refresh(self) -> None:
        """Looks whether anything was exchanged."""
        # In one call each, of the thousands of entries that a deep model has: a loop over them is a part of a replay.
        is_same = (
            list(map(len, self._tables)) == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._objects))
            and all(map(is_, chain.from_iterable(self._tables), self._names))
        )
        if not is_same:
            self._look()


# Mixed precision at run time: float32 main values and the copies that programs run on (`fxpar.ir.step`).
#
# What changes a tensor is not always seen. torch counts writes of its operators (`Tensor._version`), but not those of
# its fused optimizers, of collectives or NumPy. So copies are kept only where a call goes on with an accumulation:
# gradients are there, no optimizer has stepped, and no write was counted. Every other call casts anew.


class MainParameter(WholeParameter):
    """A parameter of which copies are made: writes through `data` are counted as all others are."""

    _stands_for = nn.Parameter

    @property
    def data(self) -> Tensor:
        """Returns the values without their history. A write to them counts, which one to torch's own `data` does
        not."""
        return self.detach().as_subclass(Undrawn)

    @data.setter
    def data(self, value: Tensor) -> None:
        check_replaced(self, value)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(self)


class Copies:
    """Copies of main values.

    Attributes:
        casts: how many parameters have been cast so far.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.casts = 0
        self._dtype = dtype
        self._copies: dict[str, Tensor] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        self._mode = (False, False)
        reference = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            copies = reference()
            if copies is not None:
                copies.expire()

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)

    def expire(self) -> None:
        """Makes the next call cast all: the values have been changed."""
        self._seen.clear()

    def current(self, parameters: Mapping[str, Tensor], training: bool, differentiated: bool) -> list[Tensor]:
        """Returns the copies of some parameters, as fresh as their values.

        Args:
            parameters: by name.
            training: the module's mode.
            differentiated: whether the call has a backward.
        """
        mode, self._mode = self._mode, (training, differentiated)
        has_gradients = any(leaf_of(main).grad is not None for main in parameters.values())
        accumulates = mode == self._mode and differentiated and has_gradients
        changed = [name for name, main in parameters.items() if self._seen.get(name) != _state(main)]
        self._cast(parameters, changed if accumulates else list(parameters), changed)
        return [self._copies[name] for name in parameters]

    @torch.no_grad()
    def _cast(self, parameters: Mapping[str, Tensor], names: list[str], changed: list[str]) -> None:
        """Casts some; graphs that saved a copy learn of it where its main values are known to have changed."""
        with torch.inference_mode(False):  # what is made in that mode can never be trained
            for name in names:
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(local_of(parameters[name]), dtype=self._dtype)
        if names:
            # Through `data`, which is not counted: a pending backward may have saved copies that keep their values.
            parts = [local_of(parameters[name]) for name in names]
            torch._foreach_copy_([self._copies[name].data for name in names], parts)
        if changed:
            torch.autograd.graph.increment_version([self._copies[name] for name in changed])
        self._seen.update({name: _state(parameters[name]) for name in names})
        self.casts += len(names)


def _state(main: Tensor) -> tuple[int, ...]:
    """Differs after a write that torch counts."""
    leaf = leaf_of(main)
    return main._version, leaf._version, leaf.data_ptr()


def check_scaler(scaler: Any, precision: str, device: torch.device) -> None:
    """Checks what a training step is given to scale its loss.

    Raises:
        InputError: float16 without a scaler, or something else than one.
    """
    remedy = f"pass scaler=torch.amp.GradScaler({device.type!r}), and step and update with it"
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"must be a GradScaler, got a {type(scaler).__name__}", where="scaler", remedy=remedy)
    if precision != "fp16" or (scaler is not None and scaler.is_enabled()):
        return
    lost = "has no scaler" if scaler is None else "has a scaler that is disabled"
    raise InputError(
        f"a step in float16 {lost}, and small gradients would be lost as zeros", where="train_step", remedy=remedy
    )


# What data ranks share out between steps and have whole in them.


class GatheredParameters:
    """Whole parameters; those that graphs read have memory whose addresses never change."""

    def __init__(self) -> None:
        self._whole: dict[str, Tensor] = {}

    def current(
        self, once: OnceCalls, values: Mapping[str, Tensor], names: Mapping[str, str] | None, *, waits: bool
    ) -> dict[str, Tensor]:
        """Returns the whole of the parameters that a program takes so, by name of the value. A collective call.

        Args:
            once: gathers them.
            values: what this rank has of the program's inputs, by name of the placeholder.
            names: of the parameter, by that of the value; None where addresses may change.
            waits: whether they are to be there; else the step waits for what this gives (`LoweredStep.arriving`).
        """
        whole = {name: values[name] for name in once.start.takes}
        with torch.inference_mode(False):  # what is made in that mode can never be trained
            once.start(whole)
            if not waits:
                return {name: whole[name] for name in once.start.gives}
            for call in once.finish:
                call(whole)
            return {name: whole[name] if names is None else self._kept(names[name], whole[name]) for name in once.gives}

    def _kept(self, fqn: str, value: Tensor) -> Tensor:
        """Returns a value in memory that only it has."""
        known = self._whole.get(fqn)
        if known is None or (known.shape, known.dtype, known.device) != (value.shape, value.dtype, value.device):
            self._whole[fqn] = value
        else:
            # Through `data`, which is not counted: a pending backward may have saved it, whose values are the same.
            known.data.copy_(value)
        return self._whole[fqn]
