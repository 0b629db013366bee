"""What wraps or changes modules, refused by name.

Enters: the attributes and methods by which wrappers of other libraries reach a module. Leaves: `Unwrappable`, whose
subclasses raise an error that names the wrapper. Models that are wrapped already: `capture.input_checks`.

No wrapper asks whether it may. Each looks for an attribute of its own first; that attribute is there, and raises.
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter, is_
from pathlib import PurePath
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxpar.errors import InputError
from fxpar.runtime.parameters import original_of, shard_spec_of

_HOOKS = "the compiled program calls no hooks: it runs operators and no modules"
_FSDP = "parameters are split and sharded by the plan"


def _refuse(where: str, reason: str, remedy: str) -> NoReturn:
    raise InputError(reason, where=where, remedy=remedy)


def _attribute(where: str, reason: str, remedy: str) -> Any:
    def refused(module: nn.Module, *value: Any) -> NoReturn:
        _refuse(where, reason, remedy)

    return property(refused, refused)


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
    """Returns the name of a module in errors."""
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

    # ------------------------------------------------------------------ what print shows

    def extra_repr(self) -> str:
        """Returns what the author's class shows, and how the module's own weights are split."""
        return "; ".join(part for part in (super().extra_repr(), self._splits()) if part)

    def __repr__(self) -> str:
        text, splits = super().__repr__(), self._splits()
        author: Any = original_of(type(self))
        if not splits or author.__repr__ is nn.Module.__repr__:
            return text  # which calls extra_repr
        return f"{text.removesuffix(')')}; {splits}{')' * text.endswith(')')}"

    def _splits(self) -> str:
        """Returns of each of its parameters that is not whole here its layout, and the shape of this rank's part."""
        specs = {name: shard_spec_of(p) for name, p in self.__dict__["_parameters"].items() if p is not None}
        texts = [f"{n} {spec.layout} {list(spec.part_shape)}" for n, spec in specs.items() if spec and spec.cuts]
        return ", ".join([*texts, *(f"{name} on other ranks" for name in self.__dict__[RECORD].elsewhere)])

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
            "Plan(precision=…) casts; in place of a trainer that moves or wraps its model take fxpar.Trainer (that of "
            "transformers), fxpar.train, or loss = model.train_step(batch)",
        )

    def __copy__(self) -> NoReturn:
        _refuse_copy(self)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copy(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(_place_of(self), "cannot be copied or pickled", "save full_state_dict() of the whole model")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses, of a part of the model: transformers' own would write this rank's parts."""
        _refuse("save_pretrained()", "would write one rank's parts", "call save_pretrained of the whole model")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: transformers' own would send this rank's parts."""
        _refuse("push_to_hub()", "would send one rank's parts", "save_checkpoint(folder), and send that folder")

    def get_delta_weight(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses what peft adds to a base's weights: merged, and added once more by the program that runs."""
        remedy = "call save_checkpoint(folder, merged=True) on all ranks, and load that into the base model"
        _refuse(_place_of(self), "peft cannot merge the adapter of a layer whose program is compiled", remedy)

    # ------------------------------------------------------------------ wrappers

    # DistributedDataParallel and accelerate read theirs first, FullyShardedDataParallel and torch.compile set or read.
    _ddp_params_and_buffers_to_ignore = _attribute(
        "DistributedDataParallel",
        "would average over ranks that hold different parts of one model",
        "use the module as it is; data parallelism is an axis of the plan",
    )
    _is_fsdp_managed_module = _attribute("FullyShardedDataParallel", _FSDP, "use the module as it is")
    _is_accelerate_prepared = _attribute(
        "accelerate's prepare",
        "would move and wrap a module that its ranks already share",
        "leave the model out; in place of transformers' Trainer take fxpar.Trainer, with the author's model",
    )
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
        """Refuses: programs are compiled by the plan."""
        _refuse("compile()", "the module's programs are compiled by itself", "pass fxpar.Plan(compile=True)")

    def _replicate_for_data_parallel(self) -> NoReturn:
        _refuse("DataParallel", "would copy one rank's part to other devices", "use the module as it is")


class Root(Unwrappable):
    """The model itself; its modules are of the class `Submodule`."""

    # Not of its modules: peft reads it there to merge, which has an error of its own.
    _hf_hook = _attribute(
        "accelerate's save_model",
        "would write one rank's parts, as its hooks would move them",
        "call save_checkpoint(folder) or save_training(folder, …) on all ranks",
    )

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: generation needs caches."""
        remedy = "call save_checkpoint(folder) on all ranks, and from_pretrained(folder).generate(…) in one process"
        _refuse("generate()", "needs caches, which no program has", remedy)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: the backward is compiled."""
        remedy = "pass Plan(recompute=fxpar.Recompute('full')), or call it on the author's model before parallelize"
        _refuse("gradient_checkpointing_enable()", f"what is computed again is chosen: {_COMPILED}", remedy)

    activation_checkpointing_enable = gradient_checkpointing_enable

    register_state_dict_pre_hook = _state_hook_method("register_state_dict_pre_hook")
    register_state_dict_post_hook = _state_hook_method("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _state_hook_method("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _state_hook_method("register_load_state_dict_post_hook")


class Submodule(Unwrappable):
    """One of the modules in a parallel model."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: parts of a program do not run alone."""
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


# What may be written to the modules of a parallel model: what a program sees, and what no code of the author's reads.


# Under which a module has its record.
RECORD = "_fxpar"
TABLES = ("_parameters", "_buffers", "_modules")
# Names that every module's class has, and those of the attributes that a constructor makes.
_OF_ALL = frozenset(dir(nn.Module))
BOOKKEEPING = frozenset(vars(nn.Module()))
# What of it may be set: modes, which each call looks at, and hooks, of which none is called.
FREE = BOOKKEEPING - set(TABLES)
_PLAIN = (bool, int, float, str, type(None))
_MISSING = object()
_COMPILED = "the programs are compiled, and would not see it"
_BEFORE = "change the model before parallelize; pass what changes from call to call as an argument"


class Table(dict[str, Any]):
    """The parameters, buffers or submodules of a module of a parallel model, which stay what they are.

    Args:
        entries: by name.
        path: the module's name.
        elsewhere: what stands for an entry of None: parameters that other ranks hold.
        exchanged: whether another object may take an entry's place, as of buffers, which each call looks at.
    """

    def __init__(
        self, entries: Mapping[str, Any], path: str, elsewhere: Mapping[str, Any], exchanged: bool = False
    ) -> None:
        super().__init__(entries)
        self._path, self._elsewhere, self._exchanged = path, elsewhere, exchanged

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or not (self._exchanged or value is self._elsewhere.get(name, self[name])):
            self._refuse(name)
        if self._exchanged:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> NoReturn:
        self._refuse(name)

    def pop(self, name: str = "*", *default: Any) -> NoReturn:
        """Refuses, as all that changes what a module has."""
        self._refuse(name)

    popitem = clear = pop

    def update(self, *entries: Any, **named: Any) -> None:
        """Sets entries one by one."""
        for name, value in dict(*entries, **named).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Returns an entry; one that is not there is refused."""
        return self[name] if name in self else self._refuse(name)

    def __ior__(self, other: Any) -> Table:  # type: ignore[override,misc]
        self.update(other)
        return self

    def _refuse(self, name: str) -> NoReturn:
        where = f"{self._path}.{name}".lstrip(".")
        reason = f"cannot be added, removed or replaced: {_COMPILED}"
        raise InputError(reason, where=where, remedy=_BEFORE)


@dataclass(frozen=True)
class Record:
    """What is known of a module of a parallel model.

    Attributes:
        path: its name; empty for the model itself.
        author: the author's class.
        settings: the author's attributes.
        ours: names of attributes that are fxpar's, and go before the author's.
        elsewhere: the module's parameters that other ranks of the pipeline hold.
        device: on which programs run.
    """

    path: str
    author: type
    settings: Mapping[str, Any]
    ours: frozenset[str]
    elsewhere: Mapping[str, nn.Parameter]
    device: torch.device

    def check(self, name: str, value: Any) -> None:
        """Refuses a write to an attribute that the author's code reads, where no program would see it."""
        default = inspect.getattr_static(self.author, name, _MISSING)
        if name in self.settings:
            allowed = is_same(self.settings[name], value)
        elif default is _MISSING:
            allowed = not _asks_for(self.author, name)
        elif inspect.isdatadescriptor(default):
            allowed = name != "__class__"  # a setter writes attributes, and these are judged
        else:
            allowed = is_same(default, value) or (name in _OF_ALL and name != "forward")
        if not allowed:
            self.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        """Refuses a write."""
        where = f"{self.path}.{name} = …".lstrip(".")
        raise InputError(f"cannot be changed: {_COMPILED}", where=where, remedy=_BEFORE)


def is_same(before: Any, after: Any) -> bool:
    """Returns whether a value is another's equal for the programs that were compiled of that."""
    return before is after or (isinstance(before, _PLAIN) and type(before) is type(after) and bool(before == after))


def _asks_for(author: type, name: str) -> bool:
    """Returns whether a class's code asks whether there is an attribute of the name: `getattr(self, "scale", 1.0)`."""
    methods = [value for cls in author.__mro__ if cls not in nn.Module.__mro__ for value in vars(cls).values()]
    functions = [getattr(value, "__func__", None) or getattr(value, "fget", None) or value for value in methods]
    pending = [inspect.unwrap(value).__code__ for value in functions if inspect.isfunction(value)]
    while pending:
        code = pending.pop()
        if name in code.co_consts:
            return True
        pending += [item for item in code.co_consts if isinstance(item, CodeType)]
    return False


def names_of(root: type) -> frozenset[str]:
    """Returns names of what a class of ours has and modules have not, the author's class behind it aside."""
    author = original_of(root).__mro__ if original_of(root) is not root else ()
    return frozenset(n for cls in root.__mro__[:-1] if cls not in author for n in vars(cls) if n not in _OF_ALL)


def check_free(root: nn.Module, name: str) -> None:
    """Refuses an attribute of ours whose name the author's class or modules need.

    Raises:
        InputError: it is a property of the class, or a name of a parameter, buffer or submodule.
    """
    author = original_of(type(root))
    is_property = author is not type(root) and inspect.isdatadescriptor(inspect.getattr_static(author, name, None))
    tables = (root.__dict__.get(table, {}) for table in TABLES)
    if (is_property and name not in _OF_ALL) or any(name in table for table in tables):
        raise InputError(f"the name is taken by ParallelModule.{name}", where=name, remedy="rename it in the model")


# What the author's modules have in attributes that are no plain values: configurations, lists, tensors without a name.


_LEAVES = (bool, int, float, complex, str, bytes, type(None), type, Enum, PurePath)
_TORCH_LEAVES = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_CONSTANT_TYPES = (*_LEAVES, *_TORCH_LEAVES, *_FUNCTIONS)
_VERSION = attrgetter("_version")


class Settings:
    """The settings of a model's modules as they were when it was made.

    Settings are what consists of plain values alone, and is not empty: a configuration, a list of window sizes. What
    has something else in it (a tokenizer, a logger), or nothing yet (a history), may change from call to call.

    Args:
        root: the model; its modules have their records.
        authors: its own attributes that are the author's.
    """

    def __init__(self, root: nn.Module, authors: Mapping[str, Any]) -> None:
        named = {id(t) for t in chain(root.parameters(), root.buffers())}
        self._boxes: dict[int, tuple[str, Any]] = {}
        self._tensors: dict[str, Tensor] = {}
        for path, module in root.named_modules():
            for name, value in (vars(module)[RECORD].settings if path else authors).items():
                place = f"{path}.{name}".lstrip(".")
                if isinstance(value, Tensor) and id(value) not in named and not isinstance(value, nn.Parameter):
                    self._tensors[place] = value
                elif not isinstance(value, _CONSTANT_TYPES) and id(value) not in self._boxes:
                    self._boxes |= _boxes(place, value) or {}
        self._look()

    def _look(self) -> None:
        self._views = [_values(box) for _, box in self._boxes.values()]
        self._sizes = list(map(len, self._views))
        self._entries = list(chain.from_iterable(self._views))
        self._versions = list(map(_VERSION, self._tensors.values()))

    def check(self) -> None:
        """Compares them with what they were.

        Raises:
            InputError: one is another.
        """
        # In one call each: a loop over the entries is a part of a replay.
        if not (
            list(map(len, self._views)) == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._entries))
            and list(map(_VERSION, self._tensors.values())) == self._versions
        ):
            self._compare()

    def _compare(self) -> None:
        before = iter(self._entries)
        for (place, box), size in zip(self._boxes.values(), self._sizes, strict=True):
            entries = [next(before) for _ in range(size)]
            now = list(_values(box))
            names = [*_names(box), *range(len(now), size)]
            odd = [name for name, *pair in zip(names, entries, now, strict=False) if not is_same(*pair)]
            odd += names[min(size, len(now)) :]
            if odd:
                _refuse_change(f"{place}.{odd[0]}" if _has_attributes(box) else f"{place}[{odd[0]!r}]")
        for (place, tensor), version in zip(self._tensors.items(), self._versions, strict=True):
            if tensor._version != version:
                _refuse_change(place)
        self._look()


def _boxes(place: str, value: Any) -> dict[int, tuple[str, Any]] | None:
    """Returns what holds values in a value, itself first; None where there is something besides settings, or
    nothing."""
    boxes: dict[int, tuple[str, Any]] = {}
    pending, has_leaf = [(place, value)], False
    while pending:
        place, value = pending.pop()
        if isinstance(value, _CONSTANT_TYPES):
            has_leaf = True
        elif id(value) not in boxes:
            if isinstance(value, (Tensor, nn.Module)) or not (_is_container(value) or _has_attributes(value)):
                return None
            boxes[id(value)] = (place, value)
            sign = ".{}" if _has_attributes(value) else "[{!r}]"
            pending += [(place + sign.format(n), v) for n, v in zip(_names(value), _values(value), strict=True)]
    lasting = {key: box for key, box in boxes.items() if not isinstance(box[1], (tuple, frozenset))}
    return lasting if has_leaf else None


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set, frozenset, deque))


def _has_attributes(value: Any) -> bool:
    return not _is_container(value) and isinstance(getattr(value, "__dict__", None), dict)


def _values(value: Any) -> Any:
    """Returns a view of the values: as long as they are, and iterated anew each time."""
    if _has_attributes(value):
        value = vars(value)
    return value.values() if isinstance(value, Mapping) else value


def _names(value: Any) -> Iterable[Any]:
    if _has_attributes(value):
        value = vars(value)
    return list(value) if isinstance(value, Mapping) else list(range(len(value)))


def _refuse_change(place: str) -> None:
    raise InputError(
        "was changed after parallelize: the programs are compiled, and do not see it",
        where=place,
        remedy="change it before, or put it back; what changes from call to call can be an argument of the model",
    )
