"""One rank's part of a model: its parameters and buffers in the modules of the author's classes, and where they lie.

Enters: a model, its first program and this rank's weights. Leaves: `LocalModel`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxpar.errors import InputError, shown
from fxpar.ir.step import is_mixed
from fxpar.layout.layout import Layout
from fxpar.pipeline.compiler.builtin_schedules import local_stages
from fxpar.plan.plan import Plan
from fxpar.runtime.parameters import Elsewhere, MainParameter, WholeParameter, class_of, original_of, set_shard_spec
from fxpar.runtime.programs import Programs
from fxpar.runtime.random_state import RandomState
from fxpar.runtime.refusals import (
    BOOKKEEPING,
    RECORD,
    Record,
    Root,
    Settings,
    Submodule,
    Table,
    Unwrappable,
    check_free,
    names_of,
)
from fxpar.runtime.shard_spec import ShardSpec, named_tensors
from fxpar.runtime.sharded import Sharded, ShardedParameter
from fxpar.runtime.sharded_ops import part_of
from fxpar.runtime.world import World

# Returns this rank's parts of a model's weights by first name, on the rank's device and in the types of the plan; it is
# called with the module, whose first program is there, and the author's model.
LocalWeights = Callable[[Any, nn.Module], Mapping[str, Tensor]]


class LocalModel(Root):
    """Holds this rank's part of a model, and says where it lies."""

    _programs: Programs

    def __init__(self, model: nn.Module, plan: Plan, world: World) -> None:
        super().__init__()
        self.plan, self.world = plan, world
        self.saved_names = list(model.state_dict().keys())
        self._random = RandomState(plan.seed, world.device)
        self._shapes = {name: tuple(entry.tensor.shape) for entry in named_tensors(model) for name in entry.names}

    def _adopt(self, model: nn.Module, local_weights: LocalWeights) -> dict[str, Any]:
        """Takes the modules of a model, of which the first program is there, and this rank's weights.

        Args:
            model: is left as it is.

        Returns:
            The author's attributes of the module, for `_seal`.

        Raises:
            InputError, CheckpointError: as of `local_weights` and `attach`.
        """
        with torch.device("cpu"):  # and not that of a context in which the model was built
            weights, taken = local_weights(self, model), dict[int, Any]()
            for entry in named_tensors(self._programs.skeleton):
                name = entry.first
                if name in self.foreign:
                    taken[id(entry.tensor)] = Elsewhere(entry.tensor, name, self.world.device)
                    continue
                spec = self._spec_of(name)
                if entry.is_parameter:
                    taken[id(entry.tensor)] = self._parameter(weights[name], spec, entry.tensor.requires_grad)
                else:
                    taken[id(entry.tensor)] = Sharded(weights[name], spec) if spec.cuts else weights[name]
            settings = attach(self, self._programs.skeleton, taken, self.world.device)
        self._programs.follow(self)
        _OptimizerHooks(self, model)
        return settings

    def _spec_of(self, name: str) -> ShardSpec:
        """Returns where this rank's part of a parameter or buffer lies."""
        return ShardSpec(name, torch.Size(self.shape_of(name)), self.layout_of(name), self.world)

    def _parameter(self, part: Tensor, spec: ShardSpec, requires_grad: bool) -> nn.Parameter:
        if spec.cuts:
            cut: Any = ShardedParameter(part, spec, requires_grad)
            return cut  # type: ignore[no-any-return]
        kind = MainParameter if is_mixed(self.plan) and part.is_floating_point() else nn.Parameter
        if self.world.size == 1:
            return kind(part, requires_grad)
        whole = (WholeParameter if kind is nn.Parameter else kind)(part, requires_grad)
        set_shard_spec(whole, spec)
        return whole

    def _seal(self, settings: Mapping[str, Any]) -> None:
        """Refuses from now on what no program would see; it has all attributes of ours, and `settings` of the author.

        What the author's modules hold in configurations and lists is compared at each call.
        """
        self._settings = Settings(self, settings)
        seal(self, settings, self.world.device)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Returns the layout of each parameter, buffer and constant by its first name."""
        return self._programs.layouts

    @property
    def foreign(self) -> frozenset[str]:
        """Returns the first names of the parameters that only other ranks of the pipeline hold."""
        return self._programs.foreign

    @property
    def stages(self) -> tuple[int, ...]:
        """Returns the pipeline's stages that this rank holds, in their order; empty without a pipeline."""
        return local_stages(self.plan, self.world.place)

    def layout_of(self, name: str) -> Layout:
        """Returns the layout of a parameter or buffer under any of its names; empty if no program uses it."""
        return self.layouts.get(self._programs.aliases.get(name, name), Layout())

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the whole shape of a parameter or buffer of the unsplit model.

        Raises:
            InputError: the model has no parameter or buffer of this name.
        """
        if name not in self._shapes:
            raise InputError("names no parameter or buffer", where=shown(name), remedy="take one of saved_names")
        return self._shapes[name]

    @property
    def step(self) -> int:
        """Returns how many calls have drawn random bits. Set it to continue the masks of a resumed run."""
        return self._random.step

    @step.setter
    def step(self, value: int) -> None:
        self._random.step = value


# Optimizers of a module's parameters: state that torch has distributed becomes parts.


class _OptimizerHooks:
    """Prepares optimizers before their first step and after they loaded state; notes which step never ended.

    Args:
        module: sees all optimizers for as long as it lives; its agreement is told of the steps that begin and end.
        model: the unsplit one; an optimizer of its parameters would train nothing.
    """

    def __init__(self, module: LocalModel, model: nn.Module) -> None:
        self._module, self._agreement = weakref.ref(module), module.world.agreement
        self._prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._steps_module: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._originals = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        for handle in (register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)):
            remove: Callable[[], None] = handle.remove
            weakref.finalize(module, remove)

    def _begin(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        self._prepare(optimizer)
        # A closure makes calls of its own within the step.
        if len(arguments) <= 1 and not options and self._is_of_module(optimizer):
            self._agreement.stepping = type(optimizer).__name__

    def _end(self, optimizer: Optimizer, arguments: Any, options: Any) -> None:
        if self._is_of_module(optimizer):
            self._agreement.stepping = ""

    def _is_of_module(self, optimizer: Optimizer) -> bool:
        """Returns whether it steps a parameter of the module."""
        if optimizer not in self._steps_module:
            module = self._module()
            parameters = set() if module is None else {id(parameter) for parameter in module.parameters()}
            self._steps_module[optimizer] = any(id(p) in parameters for p in _parameters_of(optimizer))
        return self._steps_module[optimizer]

    def _prepare(self, optimizer: Optimizer) -> None:
        """Prepares an optimizer, once.

        Raises:
            InputError: it holds the parameters of the unsplit model, and they have no gradients.
        """
        if optimizer in self._prepared:
            return
        parameters = _parameters_of(optimizer)
        if any(isinstance(parameter, ShardedParameter) for parameter in parameters):
            self._prepared.add(optimizer)
            _keep_parts(optimizer)
            optimizer.register_load_state_dict_post_hook(_keep_parts)
        elif parameters and all(self._is_original(p) and p.grad is None for p in parameters):
            raise InputError(
                "holds the parameters of the model that was split, which nothing trains",
                where=type(optimizer).__name__,
                remedy="make the optimizer of parallelize(…).parameters()",
            )

    def _is_original(self, parameter: Tensor) -> bool:
        original = self._originals.get(id(parameter))
        return original is not None and original() is parameter


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _keep_parts(optimizer: Optimizer) -> None:
    """Takes a parameter's state that torch has distributed as its own parts."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, ShardedParameter):
            for key, value in state.items():
                if isinstance(value, DTensor) and not isinstance(value, Sharded):
                    state[key] = Sharded(part_of(value, parameter.place), parameter.place)


# Modules of the parallel model, as those of the author.


def attach(root: Root, skeleton: nn.Module, tensors: Mapping[int, Any], device: torch.device) -> dict[str, Any]:
    """Gives `root` modules as the skeleton has them, and makes it and them instances of the author's classes.

    What the skeleton's modules have in attributes is copied, and tensors are replaced wherever they stand there: in a
    list that an author made of the weights that decay, too. A module under two names is one.

    Args:
        root: of no class of the author's yet.
        tensors: what takes the place of the skeleton's parameters and buffers, by identity.
        device: on which programs run.

    Returns:
        What `root` has of the author's attributes, for `seal`.

    Raises:
        InputError: a name is taken by an attribute of `root`, or a module cannot be copied or change its class.
    """
    kind, ours = type(root), frozenset(vars(root)) - BOOKKEEPING | names_of(type(root))
    classes: dict[tuple[type, type], type] = {}
    state = copy.deepcopy(skeleton.__getstate__(), {**tensors, id(skeleton): root})
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name not in ours and name != RECORD}
    _become(root, kind, type(skeleton), classes)
    root.__setstate__(state)  # type: ignore[no-untyped-call]
    for name in ours:
        check_free(root, name)
    copies = dict(root.named_modules())
    shared = {id(module) for module in skeleton.modules()}
    for path, module in copies.items():
        if id(module) in shared:
            raise InputError("copies itself as itself", where=path, remedy="leave __deepcopy__ out of its class")
        if module is not root:
            _become(module, Submodule, type(module), classes)
            _record(module, path, _settings(module, frozenset()), frozenset(), device)
    return _settings(root, ours)


def seal(root: Root, settings: Mapping[str, Any], device: torch.device) -> None:
    """Makes `root` refuse what no program would see, as its modules do; it has all attributes of ours."""
    authors = {name: value for name, value in settings.items() if vars(root)[name] is value}
    ours = frozenset(vars(root)) - BOOKKEEPING - authors.keys()
    _record(root, "", authors, ours | names_of(type(root)), device)


def _settings(module: nn.Module, ours: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in ours and name not in BOOKKEEPING}


def _become(module: nn.Module, ours: type[Unwrappable], author: type, classes: dict[tuple[type, type], type]) -> None:
    if (ours, author) not in classes:
        classes[ours, author] = class_of(ours, author)
    try:
        object.__setattr__(module, "__class__", classes[ours, author])
    except TypeError as error:
        remedy = "leave __slots__ and base classes that are no modules out of it"
        raise InputError(
            f"cannot be a part of a parallel model: {error}", where=author.__name__, remedy=remedy
        ) from None


def _record(
    module: nn.Module, path: str, settings: Mapping[str, Any], ours: frozenset[str], device: torch.device
) -> None:
    """Makes the module refuse what no program would see. Hooks are in the trace, and nobody else calls them."""
    state, fresh = vars(module), vars(nn.Module())
    state.update({name: hooks for name, hooks in fresh.items() if name.startswith(("_forward_", "_backward_"))})
    elsewhere = {name: p for name, p in state["_parameters"].items() if isinstance(p, Elsewhere)}
    entries = {name: None if name in elsewhere else p for name, p in state["_parameters"].items()}
    state["_parameters"] = Table(entries, path, elsewhere)
    state["_buffers"] = Table(state["_buffers"], path, {}, exchanged=True)
    state["_modules"] = Table(state["_modules"], path, {})
    state[RECORD] = Record(path, original_of(type(module)), settings, ours, elsewhere, device)
