"""What wraps or changes modules, refused by name.

Enters: the attributes and methods by which wrappers of other libraries reach a module. Leaves: `Unwrappable`, whose
subclasses raise an error that names the wrapper. Models that are wrapped already: `capture.guards`.

No wrapper asks whether it may. Each looks for an attribute of its own first; that attribute is there, and raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from fxpar.errors import InputError
from fxpar.runtime.writes import FREE, RECORD, TABLES, check_free

_HOOKS = "the compiled program calls no hooks: it runs operators and no modules"
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


def _state_hook_method(name: str) -> Any:
    def method(module: nn.Module, hook: Any) -> NoReturn:
        _refuse(name, "state_dict() of a parallel module calls no hooks", "change the dict that state_dict() returns")

    method.__name__ = method.__qualname__ = name
    method.__doc__ = "Refused: `state_dict` and `load_state_dict` are fxpar's."
    return method


def _place_of(module: nn.Module) -> str:
    """What errors name a module."""
    return vars(module)[RECORD].path or type(module).__name__


def _refuse_copy(module: nn.Module) -> NoReturn:
    remedy = "copy its parameters (p.detach().clone()), or parallelize another copy of the model"
    _refuse(_place_of(module), "cannot be copied", remedy)


class Unwrappable(nn.Module):
    """A module that runs as a part of a compiled program, and by itself not at all.

    Its instances become those of the author's classes too, whose methods they have: what these read is there, and what
    no program would see of what they write is refused. Without a record it is still being made.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Ends here: the author's own would take a part's class for one of the author's."""

    # Hooks and what authors do around a call are in the trace.
    __call__ = nn.Module.__call__
    _call_impl = nn.Module._call_impl

    def __setattr__(self, name: str, value: Any) -> None:
        record = self.__dict__.get(RECORD)
        if record is None:
            check_free(self, name)
            nn.Module.__setattr__(self, name, value)
        elif name in record.ours or name in FREE:
            object.__setattr__(self, name, value)
        else:
            if not any(name in self.__dict__[table] for table in TABLES):
                record.check(name, value)
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        record = self.__dict__[RECORD]
        if name in record.settings:
            record.refuse(name)
        super().__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        record = self.__dict__.get(RECORD)
        if record is not None and name in record.elsewhere:
            return record.elsewhere[name]
        return super().__getattr__(name)

    # ------------------------------------------------------------------ moves and copies

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module itself where it has the device and type already.

        Raises:
            InputError: it has not.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = self.__dict__[RECORD].device
        stays = device is None or (device.type == here.type and device.index in (None, here.index))
        parameters = [*self.parameters(), *(p for m in self.modules() for p in vars(m)[RECORD].elsewhere.values())]
        if stays and (dtype is None or {p.dtype for p in parameters if p.is_floating_point()} <= {dtype}):
            return self
        return self._apply(lambda tensor: tensor)

    def cpu(self) -> Any:
        """Moves as `to`."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Any:
        """Moves as `to`."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def float(self) -> Any:
        """Casts as `to`."""
        return self.to(torch.float32)

    def double(self) -> Any:
        """Casts as `to`."""
        return self.to(torch.float64)

    def half(self) -> Any:
        """Casts as `to`."""
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        """Casts as `to`."""
        return self.to(torch.bfloat16)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        _refuse(
            _place_of(self),
            "cannot be moved or cast: its programs are compiled for one device and element type",
            "leave out .to(), .half(), .cuda() and share_memory(): it is on the process group's device, and "
            "Plan(precision=…) casts; a trainer that moves or wraps its model (transformers' Trainer, accelerate) "
            "cannot drive it: write the loop, loss = model.train_step(batch)",
        )

    def __copy__(self) -> NoReturn:
        _refuse_copy(self)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copy(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(_place_of(self), "cannot be copied or pickled", "save full_state_dict() of the whole model")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: transformers' own would write this rank's parts."""
        _refuse("save_pretrained()", "would write one rank's parts", "call save_checkpoint(folder) on all ranks")

    push_to_hub = save_pretrained

    # ------------------------------------------------------------------ wrappers

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


class Root(Unwrappable):
    """The model itself; its modules are of the class `Submodule`."""

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: generation needs caches."""
        _refuse("generate()", "is not supported", "load full_state_dict() into the plain model")

    register_state_dict_pre_hook = _state_hook_method("register_state_dict_pre_hook")
    register_state_dict_post_hook = _state_hook_method("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _state_hook_method("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _state_hook_method("register_load_state_dict_post_hook")


class Submodule(Unwrappable):
    """One of the modules in a parallel model."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: parts of a program do not run alone."""
        _refuse(
            f"forward of {_place_of(self)}",
            "the program runs the model as a whole",
            "call the parallel module, and return what you need from the model's forward",
        )

    # Before the author's hooks run.
    __call__ = forward

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copies whole tensors in place, of which this rank takes its parts; what other ranks hold is left to them.

        Raises:
            InputError: `assign` is true.
        """
        if assign:
            remedy = "leave it out: values are copied"
            _refuse(
                f"load_state_dict() of {_place_of(self)}",
                "assign=True would exchange the memory of the programs",
                remedy,
            )
        modules = self.named_modules(remove_duplicate=False)
        elsewhere = {f"{path}.{name}".lstrip(".") for path, m in modules for name in vars(m)[RECORD].elsewhere}
        return super().load_state_dict({n: v for n, v in state_dict.items() if n not in elsewhere}, strict)
