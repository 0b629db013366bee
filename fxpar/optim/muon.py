"""Muon for parameters of which ranks hold parts.

Momentum is computed on the parts. The update of a matrix needs all of it: the matrices are shared out over the ranks of
a stage by work, and a rank orthogonalises whole ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpar.errors import InputError, shown
from fxpar.runtime.matrix_exchange import MatrixExchange, MatrixParameter, in_part, plan_exchange
from fxpar.runtime.parameters import shard_spec_of
from fxpar.runtime.sharded import local_of

_SIGNATURE = inspect.signature(torch.optim.Muon)
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MOST_STEPS = 99  # as torch's


class Muon(Optimizer):
    """Does what `torch.optim.Muon` does, on the parameters of a parallel module or on any others.

    A parameter of three dimensions is a stack of matrices, such as the weights of experts. All ranks of a stage must
    call `step` together. A CUDA graph can hold it.

    Args:
        params: parameters of two or three dimensions, or groups of them; the same in the same order on all ranks.
        lr: learning rate, a number or a tensor of one element.
        weight_decay: decoupled weight decay.
        momentum: of the moving average of gradients.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: of the polynomial a·x + b·x³ + c·x⁵ of singular values.
        eps: the smallest norm that a matrix is divided by.
        ns_steps: how often the polynomial is applied.
        adjust_lr_fn: `original` (also None) scales the rate of a matrix by sqrt(max(1, rows/columns)),
            `match_rms_adamw` by 0.2·sqrt(max(rows, columns)).

    Raises:
        InputError: a parameter is no matrix, or an option is out of its range.
    """

    __signature__ = _SIGNATURE
    # In which matrices travel and are computed. Not an option of a group: checkpoints have these.
    ns_dtype = torch.bfloat16
    _exchange: tuple[object, MatrixExchange] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        try:
            bound = _SIGNATURE.bind(*arguments, **options)
        except TypeError as error:
            remedy = f"pass the arguments of torch.optim.Muon: {', '.join(_SIGNATURE.parameters)}"
            raise InputError(str(error), where="Muon", remedy=remedy) from None
        bound.apply_defaults()
        # torch asks whether it is capturable where a step is recorded in a CUDA graph.
        defaults = {**bound.arguments, "capturable": True}
        super().__init__(defaults.pop("params"), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group.

        Raises:
            InputError: as of the class.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for name, parameter in zip(_names(group, len(self.param_groups) - 1), group["params"], strict=True):
                _check_matrix(name, parameter)
        except InputError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step. A collective call of the ranks of a stage.

        Args:
            closure: computes the loss again, which is returned.

        Raises:
            InputError: ranks step other parameters, or the parameters are of several modules.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [
            (number, parameter)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if trained:
            exchange = self._exchange_of(trained)
            self._update(exchange, [(number, local_of(parameter)) for number, parameter in trained])
        return loss

    def _exchange_of(self, trained: Sequence[tuple[int, Tensor]]) -> MatrixExchange:
        """Returns how the matrices travel. It is computed when other parameters have gradients than before."""
        steps = [group["ns_steps"] for group in self.param_groups]
        key = [(number, steps[number], id(parameter)) for number, parameter in trained], self.ns_dtype
        if self._exchange is None or self._exchange[0] != key:
            names = {
                id(parameter): name
                for number, group in enumerate(self.param_groups)
                for name, parameter in zip(_names(group, number), group["params"], strict=True)
            }
            matrices = [
                MatrixParameter(names[id(p)], tuple(p.shape), shard_spec_of(p), number, steps[number])
                for number, p in trained
            ]
            self._exchange = key, plan_exchange(matrices, self.ns_dtype)
        return self._exchange[1]

    def _update(self, exchange: MatrixExchange, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Writes to the parts of parameters.

        Args:
            parts: with the numbers of their groups.
        """
        rates = [_rate(group["lr"], parts[0][1].device) for group in self.param_groups]
        for number, group in enumerate(self.param_groups):
            decayed = [part for other, part in parts if other == number]
            if decayed:
                torch._foreach_mul_(decayed, 1 - rates[number] * group["weight_decay"])
        alike: dict[tuple[int, float], tuple[list[Tensor], list[Tensor]]] = {}
        for matrix, box, update in exchange.run(self._directions(), self.ns_dtype, self._orthogonalise):
            number, part = parts[matrix.parameter]
            targets, updates = alike.setdefault((number, self._ratio(number, matrix.parts.shape)), ([], []))
            targets.append(in_part(part, box))
            # In float32 at least: a rate in bf16 would have three digits.
            updates.append(update.to(torch.promote_types(part.dtype, torch.float32)))
        for (number, ratio), (targets, updates) in alike.items():
            torch._foreach_mul_(updates, rates[number] * -ratio)
            torch._foreach_add_(targets, updates)

    def _directions(self) -> list[Tensor]:
        """Advances the momenta; returns what is to be orthogonalised, this rank's parts."""
        directions: list[Tensor] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            if parameters:
                momenta = [local_of(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
                gradients = [local_of(parameter.grad) for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                if group["nesterov"]:
                    momenta = list(torch._foreach_lerp(gradients, momenta, group["momentum"]))
                directions += momenta
        return directions

    def _orthogonalise(self, matrices: Tensor, number: int) -> Tensor:
        group = self.param_groups[number]
        return newton_schulz(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def _ratio(self, number: int, shape: tuple[int, int]) -> float:
        """Returns what the rate is multiplied by for a matrix of some rows and columns."""
        rows, columns = shape
        if self.param_groups[number]["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


def newton_schulz(matrices: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Returns matrices with the same singular vectors, whose singular values are near 1.

    Args:
        matrices: [k, m, n], m ≤ n; overwritten.
        coefficients: a, b and c of the polynomial a·x + b·x³ + c·x⁵ of singular values.
        steps: how often it is applied.
        eps: the smallest norm that a matrix is divided by.
    """
    a, b, c = coefficients
    x = matrices.div_(torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _rate(rate: float | Tensor, device: torch.device) -> Any:
    """Returns a learning rate: a number, or a scalar on the device, of which the host reads nothing."""
    if isinstance(rate, Tensor):
        return rate.reshape(()) if rate.device == device else float(rate)
    return rate


# Checks.


def _names(group: dict[str, Any], number: int) -> list[str]:
    """Returns names of a group's parameters for messages."""
    names = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
    specs = map(shard_spec_of, group["params"])
    return [name if spec is None else spec.name for name, spec in zip(names, specs, strict=True)]


def _check_options(group: dict[str, Any]) -> None:
    """Refuses options that are out of range.

    Raises:
        InputError: names the option.
    """
    rate = group["lr"]
    if isinstance(rate, Tensor) and rate.numel() != 1:
        raise InputError(f"has {rate.numel()} elements", where="lr", remedy="pass a number, or a tensor of one element")
    for option in ("lr", "weight_decay", "momentum", "eps"):
        if not group[option] >= 0:
            raise InputError(
                f"must be at least 0, got {shown(group[option])}", where=option, remedy="pass a number of at least 0"
            )
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if type(steps) is not int or not 0 <= steps <= _MOST_STEPS:
        raise InputError(
            f"must be an integer from 0 to {_MOST_STEPS}, got {shown(steps)}", where="ns_steps", remedy="pass 5"
        )
    if not isinstance(coefficients, Sequence) or len(coefficients) != 3:
        remedy = "pass a, b and c of a·x + b·x³ + c·x⁵"
        raise InputError(f"must be three numbers, got {shown(coefficients)}", where="ns_coefficients", remedy=remedy)
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        remedy = f"choose from {', '.join(map(repr, _ADJUSTMENTS))}"
        raise InputError(f"{shown(group['adjust_lr_fn'])} is unknown", where="adjust_lr_fn", remedy=remedy)


def _check_matrix(name: str, parameter: Tensor) -> None:
    """Refuses parameters without matrices.

    Raises:
        InputError: names the parameter.
    """
    if parameter.dim() not in (2, 3):
        raise InputError(
            f"has {parameter.dim()} dimensions, and Muon orthogonalises matrices",
            where=name,
            remedy="give it to AdamW; in fxpar.Optimizer by a rule with {'algorithm': 'adamw'}",
        )
    if not parameter.is_floating_point():
        raise InputError(
            f"is of {parameter.dtype}, and Muon computes with real numbers", where=name, remedy="give it to AdamW"
        )
