"""What wraps or changes modules, refused by name.

Enters: the attributes and methods by which wrappers of other libraries reach a module. Leaves: `Unwrappable`, whose
subclasses raise an error that names the wrapper. Models that are wrapped already: `capture.guards`.

No wrapper asks whether it may. Each looks for an attribute of its own first; that attribute is there, and raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from fxpar.errors import InputError
from fxpar.runtime.world import World

_HOOKS = "the compiled program calls no hooks: it runs operators and no modules"
_PLAIN = (bool, int, float, str, type(None))
_FSDP = "parameters are split and sharded by the plan"


def _refuse(where: str, reason: str, remedy: str) -> NoReturn:
    raise InputError(reason, where=where, remedy=remedy)


def _attribute(where: str, reason: str, remedy: str) -> Any:
    def found(module: nn.Module, *value: Any) -> NoReturn:
        _refuse(where, reason, remedy)

    return property(found, found)


def _hook_method(name: str) -> Any:
    def method(module: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> NoReturn:
        owner = type(getattr(hook, "__self__", None))
        if owner.__module__.startswith("torch.distributed.fsdp"):
            _refuse("fully_shard", _FSDP, "use the module as it is")
        _refuse(
            name,
            _HOOKS,
            "return what you want to see from the model's forward; gradients have p.register_hook(…)",
        )

    method.__name__ = method.__qualname__ = name
    method.__doc__ = "Refused: the compiled program calls no hooks."
    return method


# Attributes of a parallel module itself, which may have names of the author's.
_OURS = frozenset(("plan", "world", "step", "saved_names", "loading", "training"))


class Unwrappable(nn.Module):
    """A module that runs as a part of a compiled program, and by itself not at all."""

    _authors: Mapping[str, Any] = MappingProxyType({})

    def keep_settings(self, module: nn.Module) -> None:
        """From now on refuses to change the settings that the author's module has: its programs are compiled."""
        settings = {name: v for name, v in vars(module).items() if not name.startswith("_") and name not in _OURS}
        object.__setattr__(self, "_authors", settings)

    def __setattr__(self, name: str, value: Any) -> None:
        known = self._authors.get(name, value)
        same = known is value or (isinstance(known, _PLAIN) and type(known) is type(value) and known == value)
        part = self.__dict__.get("_modules", {}).get(name, value)
        if not same or (isinstance(part, Submodule) and part is not value):
            _refuse(
                f"{type(self).__name__}.{name} = …",
                "the programs are compiled, and would not see another value",
                "change the model before parallelize; pass what changes from call to call as an argument",
            )
        super().__setattr__(name, value)

    # DistributedDataParallel reads it first, FullyShardedDataParallel and torch.compile set or read theirs.
    _ddp_params_and_buffers_to_ignore = _attribute(
        "DistributedDataParallel",
        "would average over ranks that hold different parts of one model",
        "use the module as it is; data parallelism is an axis of the plan",
    )
    _is_fsdp_managed_module = _attribute("FullyShardedDataParallel", _FSDP, "use the module as it is")
    _initialize_hook = _attribute(
        "torch.compile", "the module's programs are compiled by itself", "pass fxpar.Plan(compile=True)"
    )
    _distribute_module_applied = _attribute(
        "distribute_module", "its parameters are split already", "say how in the plan: Plan(split={…})"
    )

    register_forward_hook = _hook_method("register_forward_hook")
    register_forward_pre_hook = _hook_method("register_forward_pre_hook")
    register_full_backward_hook = _hook_method("register_full_backward_hook")
    register_full_backward_pre_hook = _hook_method("register_full_backward_pre_hook")
    register_backward_hook = _hook_method("register_backward_hook")

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: programs are compiled by the plan."""
        _refuse("compile()", "the module's programs are compiled by itself", "pass fxpar.Plan(compile=True)")

    def _replicate_for_data_parallel(self) -> NoReturn:
        _refuse("DataParallel", "would copy one rank's part to other devices", "use the module as it is")


class Immovable(Unwrappable):
    """A module that stays where its programs run, in the types that they were compiled for."""

    world: World

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: generation needs caches."""
        raise InputError("is not supported", where="generate()", remedy="load full_state_dict() into the plain model")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The module itself where it has the device and type already.

        Raises:
            InputError: it has not.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        own = self.world.device
        stays = device is None or (device.type == own.type and device.index in (None, own.index))
        if stays and ({p.dtype for p in self.parameters()} <= {dtype} or dtype is None):
            return self
        return self._apply(lambda tensor: tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise InputError(
            "cannot be moved or cast: its programs are compiled for one device and element type",
            where="ParallelModule",
            remedy="leave out .to(), .half(), .cuda() and share_memory(): it is on the process group's device, and "
            "Plan(precision=…) casts; a trainer that moves or wraps its model (transformers' Trainer, accelerate) "
            "cannot drive it: write the loop, loss = model.train_step(batch)",
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise InputError(
            "cannot be copied",
            where="ParallelModule",
            remedy="copy its parameters (p.detach().clone()), or parallelize another copy of the model",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError("cannot be copied or pickled", where="ParallelModule", remedy="save full_state_dict()")


class Submodule(Unwrappable):
    """Holds the parameters of one of the author's modules, under its name."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: parts of a program do not run alone."""
        _refuse(
            "forward of a submodule",
            "the program runs the model as a whole",
            "call the parallel module, and return what you need from the model's forward",
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("copy.deepcopy", "a part of a parallel module cannot be copied", "copy its parameters")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickle", "a part of a parallel module cannot be pickled", "save full_state_dict() of the whole")
