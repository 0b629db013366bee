"""One optimizer for all parameters of a parallel module: groups by rules, clipping, and what to do about NaN.

Enters: a module, and the class of an optimizer that treats each element by itself, or one that fxpar knows. Leaves: a
`torch.optim.Optimizer`, for schedulers, loggers, `train_step` and saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxpar.errors import InputError, shown
from fxpar.optim.muon import Muon
from fxpar.runtime.chunked_step import MAIN, ChunkedStep, option_names, taken
from fxpar.runtime.module import RankModule
from fxpar.runtime.sharded import Sharded, local_of
from fxpar.runtime.training import ClippingOptimizer, check_norm, check_norm_type

# Selects parameters: a glob over names, a class of modules, or a function of name and parameter.
Selector = str | type[nn.Module] | Callable[[str, Tensor], bool]
Kind = type[torch.optim.Optimizer]
ALGORITHMS: dict[str, Kind] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "muon": Muon,
    "sgd": torch.optim.SGD,
}
# Make of an element what other elements say.
_MIXING = (torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)
_NONFINITE = ("ignore", "skip", "raise")
# How torch computes a step, and not what.
_WAYS = ("foreach", "fused", "differentiable")


class Optimizer(ClippingOptimizer):
    """Steps all parameters of a module.

    Its state is that of the algorithm. Schedulers change `param_groups`, of which the first has the parameters that no
    rule selects.

    Example:
        ```python
        optimizer = fxpar.Optimizer(model, "adamw", lr=3e-4, max_norm=1.0, groups={"*.bias": {"weight_decay": 0.0}})
        loss = model.train_step(batch, optimizer=optimizer)
        ```

    Args:
        module: as `parallelize` returns it.
        algorithm: `adamw`, `adam`, `sgd`, `muon`, or a class of `torch.optim` or of your own.
        groups: options of parameters that rules select; the others have `options`. A rule is a glob over names
            (`"*.bias"`), a class of modules (`nn.LayerNorm`), or a function of name and parameter. The first rule that
            selects a parameter counts. With an `algorithm` of its own a rule has none of `options`.
        max_norm: the norm to which gradients are clipped in each step; None clips nothing.
        norm_type: order of that norm, above 0; infinite for the largest element.
        nonfinite: what a step does where a gradient is NaN or infinite. `ignore` does not look, `raise` raises an error
            that names the gradient, `skip` changes nothing, and the host does not wait for it.
        main_weights: keeps float32 values of parameters in half precision, on which it steps.
        offload: keeps its state, and main weights, in the host's memory.
        options: of the algorithm, such as `lr` and `weight_decay`.

    Raises:
        InputError: an option or a rule is none, the algorithm mixes elements of parameters that are cut, or the host
            has too little memory.
    """

    def __init__(
        self,
        module: RankModule,
        algorithm: str | Kind = "adamw",
        *,
        groups: Mapping[Selector, Mapping[str, Any]] | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        nonfinite: str = "ignore",
        main_weights: bool = False,
        offload: bool = False,
        **options: Any,
    ) -> None:
        _check(module, max_norm, norm_type, nonfinite, main_weights)
        self._module, self._max_norm, self._norm_type, self._nonfinite = module, max_norm, norm_type, nonfinite
        is_chunked = main_weights or offload
        self.waits_for_host = nonfinite == "raise" or is_chunked
        rest, *rules = reversed(_grouped(module, groups or {}, is_whole=module.plan.pp == 1))
        sorted_groups = [rest, *reversed(rules)]
        self._names = {parameter: name for _, parameters in sorted_groups for name, parameter in parameters.items()}
        kinds, complete = [], []
        for chosen, parameters in sorted_groups:
            kind, full = _completed(chosen, parameters, algorithm, options, module.world.device)
            kinds.append(kind)
            complete.append({"params": [*parameters.values()], **full, "algorithm": kind.__name__})
        super().__init__(complete, {})
        # Schedulers that change momenta look here. Set last, so that groups of another algorithm do not get them.
        self.defaults = {name: value for name, value in complete[0].items() if name not in ("params", "algorithm")}
        device, wide = module.world.device, any(p.dtype == torch.float64 for p in self._names)
        # Graphs of several shapes write them, so their addresses never change.
        self._norm = torch.full((), torch.nan, dtype=torch.float64 if wide else torch.float32, device=device)
        self._finite = torch.ones(len(self._names), dtype=torch.bool, device=device)
        self._steps: list[tuple[torch.optim.Optimizer | ChunkedStep, list[int]]] = []
        for kind in dict.fromkeys(kinds):
            if is_chunked and issubclass(kind, (Muon, *_MIXING)):
                raise InputError(
                    "steps whole matrices, and not chunks of elements",
                    where=f"algorithm {kind.__name__}",
                    remedy="leave out main_weights and offload, or take adamw",
                )
            numbers = [number for number, other in enumerate(kinds) if other is kind]
            some = [self.param_groups[number] for number in numbers]
            where = {"main_weights": main_weights, "offload": offload}
            step = ChunkedStep(kind, some, device, **where) if is_chunked else kind(some, **taken(kind, some[0]))
            self._steps.append((step, numbers))
            self.state.update(step.state)
        # torch's GradScaler and fxpar's steps leave what is to be skipped to the kernels where this is true.
        is_fused = all(_is_fused(step) for step, _ in self._steps)
        if nonfinite == "skip" and not is_fused:
            raise InputError(
                "cannot skip a step on the device",
                where="nonfinite='skip'",
                remedy="pass nonfinite='raise', or algorithms that torch has fused (adamw, adam, sgd)",
            )
        if is_fused and nonfinite != "raise":
            self._step_supports_amp_scaling = True

    @property
    def max_norm(self) -> float | None:  # type: ignore[override]
        """Returns the norm to which it clips; None where it does not. It stays: graphs have recorded it."""
        return self._max_norm

    @property
    def norm(self) -> Tensor | None:  # type: ignore[override]
        """Returns the norm of all gradients in the last step, before they were clipped, a scalar on the device.

        None where none is counted. It is NaN before the first step.
        """
        return self._norm if self._counts else None

    @property
    def _counts(self) -> bool:
        return self._max_norm is not None or self._nonfinite != "ignore"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clips the gradients and makes a step. A collective call.

        Args:
            closure: computes gradients before, and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            InputError: a gradient is not finite, where the optimizer is to raise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skipped: Tensor | None = getattr(self, "found_inf", None)
        divisor: Tensor | None = getattr(self, "grad_scale", None)  # of a scaler that has not unscaled gradients
        if self._counts:
            norm, single = self._module._training.norms(self._norm_type, self._norm.dtype)
            self._norm.copy_(norm if divisor is None else norm / divisor)
            skipped = self._looked_at(single, skipped)
        if self._max_norm is not None:
            # As torch clips: by at most 1, and with a small number in place of no gradient.
            over = ((self._norm + 1e-6) / self._max_norm).clamp(min=1.0)
            divisor = over if divisor is None else divisor * over
        self._share()
        for step, _ in self._steps:
            is_fused = _is_fused(step)
            # Fused kernels divide gradients where they read them, by a float32.
            scale = divisor if is_fused and self._norm.dtype == torch.float32 else None
            if divisor is not None and scale is None:
                some = [p.grad for group in step.param_groups for p in group["params"] if p.grad is not None]
                torch._foreach_div_([local_of(gradient) for gradient in some], divisor)
            # They change nothing where `found_inf` is not 0.
            with _attributes(step, grad_scale=scale, found_inf=skipped) if is_fused else nullcontext():
                step.step()
        return loss

    def _looked_at(self, single: Mapping[str, Tensor], skipped: Tensor | None) -> Tensor | None:
        """Returns whether a step is to be skipped, f32[]; None where nothing tells.

        Args:
            single: norms of gradients, by name of the parameter.

        Raises:
            InputError: as of `step`.
        """
        if self._nonfinite == "ignore":
            return skipped
        zero = self._norm.new_zeros(())
        if self._names:
            self._finite.copy_(torch.stack([single.get(name, zero) for name in self._names.values()]).isfinite())
        if self._nonfinite == "raise":
            if not bool(self._norm.isfinite()):
                name = self.nonfinite_gradient()
                # All ranks come here, and nothing has changed: the training may go on.
                self._module.world.agreement.stepping = ""
                raise InputError(
                    "is not finite",
                    where=f"gradient of {name}" if name else "the norm of all gradients",
                    remedy="lower the learning rate, look at the batch, or leave such steps out by nonfinite='skip'",
                )
            return skipped
        is_skipped = (~self._norm.isfinite()).float()
        return is_skipped if skipped is None else torch.maximum(is_skipped, skipped.to(is_skipped.dtype))

    def nonfinite_gradient(self) -> str | None:
        """Returns the parameter whose gradient was not finite in the last step; None where all were.

        Of several it is the last one of the model, as the backward computes its gradient first. A collective call, for
        which the host waits.

        Raises:
            InputError: the optimizer does not look at gradients.
        """
        if self._nonfinite == "ignore":
            remedy = "make the optimizer with nonfinite='skip' or 'raise'"
            raise InputError("looks at no gradients", where="nonfinite='ignore'", remedy=remedy)
        order = {name: number for number, name in enumerate(self._module._shapes)}
        bad = torch.zeros(len(order), dtype=torch.int32)
        for name, is_finite in zip(self._names.values(), self._finite.tolist(), strict=True):
            bad[order[name]] = not is_finite
        bad = bad.to(self._finite.device)
        if self._module.world.size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        last = [name for name, is_bad in zip(order, bad.tolist(), strict=True) if is_bad][-1:]
        return last[0] if last else None

    def empty_state(self, parameter: Tensor, key: str) -> Tensor | None:
        """Implements `ClippingOptimizer`: what it steps itself.

        Raises:
            InputError: main weights, of an optimizer without.
        """
        for step, _ in self._steps:
            if isinstance(step, ChunkedStep) and step.has(parameter, key):
                return step.view(parameter, key)
        if key == MAIN:
            raise InputError(
                "has float32 values of parameters, which this optimizer would lose",
                where="a loaded state of the optimizer",
                remedy="make the optimizer with main_weights=True",
            )
        return None

    # ------------------------------------------------------------------ what torch's optimizers have

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: rules say which groups there are."""
        if "_steps" in vars(self):
            remedy = "make another Optimizer with a rule in groups"
            raise InputError("cannot be added", where="a parameter group", remedy=remedy)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave.

        Raises:
            InputError: it steps on main weights, or its state is on the host.
        """
        if any(isinstance(step, ChunkedStep) for step, _ in self._steps):
            raise InputError(
                "torch would load main weights in half precision, and all state on the device",
                where="load_state_dict",
                remedy="save by model.save_training(folder, optimizer), and load by model.resume_training",
            )
        super().load_state_dict(state_dict)

    def _share(self) -> None:
        """Gives the steps the groups and the state of this optimizer, which loads and users exchange."""
        for step, numbers in self._steps:
            step.state = self.state
            step.param_groups = [self.param_groups[number] for number in numbers]


def _check(module: Any, max_norm: Any, norm_type: Any, nonfinite: Any, main_weights: bool) -> None:
    if not isinstance(module, RankModule):
        raise InputError(
            f"must be a parallel module, got a {type(module).__name__}",
            where="module",
            remedy="pass what fxpar.parallelize returns, and not its parameters",
        )
    if max_norm is not None:
        check_norm(max_norm)
    check_norm_type(norm_type)
    if nonfinite not in _NONFINITE:
        remedy = f"choose from {', '.join(_NONFINITE)}"
        raise InputError(f"must be one of them, got {shown(nonfinite)}", where="nonfinite", remedy=remedy)
    is_half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.parameters())
    if main_weights and module.plan.pp == 1 and not is_half:
        remedy = "leave it out, or set Plan(precision='bf16_weights')"
        raise InputError("no parameter is in half precision", where="main_weights", remedy=remedy)


# Rules that select parameters.


def _grouped(
    module: nn.Module, rules: Mapping[Selector, Mapping[str, Any]], *, is_whole: bool
) -> list[tuple[Mapping[str, Any], dict[str, Tensor]]]:
    """Returns options and parameters by name of each rule in turn, and at last of all that no rule selects.

    Every parameter is in one group: that of the first rule that selects it under any of its names.

    Args:
        rules: by selector.
        is_whole: whether the module has all parameters, and not those of some stages of a pipeline.

    Raises:
        InputError: something else than a selector, options that are no mapping, or a rule that selects nothing.
    """
    if not isinstance(rules, Mapping):
        remedy = 'pass options by selector: {"*.bias": {"weight_decay": 0.0}}'
        raise InputError(f"must be a dict of rules, got {shown(rules)}", where="groups", remedy=remedy)
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    holders = dict(module.named_modules(remove_duplicate=False))
    left = dict(names)
    groups: list[tuple[Mapping[str, Any], dict[str, Tensor]]] = []
    for selector, options in rules.items():
        where = f"groups[{_shown(selector)}]"
        if not isinstance(options, Mapping):
            remedy = 'pass a dict of options: {"weight_decay": 0.0}'
            raise InputError(f"must be options, got {shown(options)}", where=where, remedy=remedy)
        test = _test(selector, holders, where)
        selected = {parameter for parameter, aliases in names.items() if any(test(n, parameter) for n in aliases)}
        if not selected and is_whole:
            listed = ", ".join(aliases[0] for aliases in list(names.values())[:4])
            raise InputError("selects no parameter", where=where, remedy=f"names look like {listed}, …")
        groups.append((options, {left.pop(p)[0]: p for p in list(left) if p in selected}))
    return [*groups, ({}, {aliases[0]: parameter for parameter, aliases in left.items()})]


def _test(selector: Any, holders: Mapping[str, nn.Module], where: str) -> Callable[[str, Tensor], bool]:
    """Returns whether a name and its parameter are selected."""
    if isinstance(selector, str):
        return lambda name, parameter: fnmatchcase(name, selector)
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        kind = selector
        return lambda name, parameter: isinstance(holders[name.rpartition(".")[0]], kind)
    if callable(selector) and not isinstance(selector, type):
        return lambda name, parameter: bool(selector(name, parameter))
    raise InputError(
        f"selects no parameters: a {type(selector).__name__}",
        where=where,
        remedy="pass a glob over names, a class of modules, or a function of name and parameter",
    )


def _shown(selector: Any) -> str:
    return getattr(selector, "__name__", "") or shown(selector)


# Options of a group.


def _completed(
    chosen: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    algorithm: str | Kind,
    options: Mapping[str, Any],
    device: torch.device,
) -> tuple[Kind, dict[str, Any]]:
    """Returns the class of a group, and a value of each of its options.

    Raises:
        InputError: as of `Optimizer`.
    """
    kind = _kind_of(chosen.get("algorithm", algorithm), parameters)
    is_other = "algorithm" in chosen and kind is not _kind_of(algorithm, {})
    merged: dict[str, Any] = {**({} if is_other else options), **chosen}
    merged.pop("algorithm", None)
    known = option_names(kind)
    for name in merged:
        if name not in known:
            raise InputError(f"{kind.__name__} has no option of this name", where=name, remedy=_choose(known))
    if "fused" in known and not any(name in merged for name in _WAYS):
        merged["fused"] = all(p.is_floating_point() for p in parameters.values())
    elif "foreach" in known and not any(name in merged for name in _WAYS):
        merged["foreach"] = True
    if "capturable" in known and device.type == "cuda":
        merged.setdefault("capturable", True)
    try:
        (group,) = kind([torch.zeros(1, 1, device=device, requires_grad=True)], **merged).param_groups
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(str(error), where=f"options of {kind.__name__}", remedy="pass a value that it takes") from None
    return kind, {name: value for name, value in group.items() if name != "params"}


def _choose(names: Sequence[str]) -> str:
    return f"choose from {', '.join(names)}"


def _kind_of(algorithm: Any, parameters: Mapping[str, Tensor]) -> Kind:
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            remedy = f"{_choose([*ALGORITHMS])}, or pass a class of torch.optim"
            raise InputError(f"no optimizer has the name {shown(algorithm)}", where="algorithm", remedy=remedy)
        return ALGORITHMS[algorithm]
    if not (isinstance(algorithm, type) and issubclass(algorithm, torch.optim.Optimizer)):
        remedy = f"{_choose([*ALGORITHMS])}, or pass a class of torch.optim, and not what it makes"
        raise InputError(f"must be a class of optimizers, got {shown(algorithm)}", where="algorithm", remedy=remedy)
    if issubclass(algorithm, torch.optim.LBFGS):
        remedy = _choose([*ALGORITHMS])
        raise InputError("computes the loss several times in a step", where="algorithm LBFGS", remedy=remedy)
    if issubclass(algorithm, _MIXING):
        for name, parameter in parameters.items():
            if isinstance(parameter, Sharded):
                raise InputError(
                    f"mixes elements of a parameter, and {name} is cut",
                    where=f"algorithm {algorithm.__name__}",
                    remedy=f"{_choose([*ALGORITHMS])}, or another class that treats each element by itself",
                )
    return algorithm


@contextmanager
def _attributes(step: Any, **values: Tensor | None) -> Iterator[None]:
    """Gives a step attributes that torch's fused optimizers look for."""
    vars(step).update(values)
    try:
        yield
    finally:
        for name in values:
            delattr(step, name)


def _is_fused(step: torch.optim.Optimizer | ChunkedStep) -> bool:
    return bool(getattr(step, "_step_supports_amp_scaling", False)) and all(g.get("fused") for g in step.param_groups)
