"""Autograd functions that pass a value through and add the gradient of a scalar loss (`Plan.added_losses`).

Enters: a call of one. Leaves: what it passes, the loss, and by what that is multiplied; or an error that says what else
the function does. Router losses of mixtures of experts are written so: the loss reaches no output, and the backward of
the function gives it the gradient that it would have as a term of the model's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from fxpar.errors import PlanError
from fxpar.ir.program import Program, describe, operands, tensor_type
from fxpar.layout.symbolic_sizes import evaluate, names
from fxpar.signatures.autograd_functions import resolve_function

_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError, KeyError)
_SIZE = 2  # of symbols, in a trial
_TRIALS = ((0.7, 0), (-3.0, 1))  # values of the loss, and seeds of the gradient that comes in


@dataclass(frozen=True)
class AddedLoss:
    """A loss that a function adds.

    Attributes:
        passed: the operand that the function returns.
        loss: the scalar operand.
        factor: its gradient, where that of the model's loss is 1.
    """

    passed: fx.Node
    loss: fx.Node
    factor: float


def adding_nodes(program: Program) -> list[fx.Node]:
    """Returns the calls of functions that the plan declares to add a loss."""
    globs = program.plan.added_losses
    calls = [node for node in program.graph.nodes if "path" in node.kwargs] if globs else []
    return [node for node in calls if any(fnmatchcase(str(node.kwargs["path"]), glob) for glob in globs)]


def check_added_losses(program: Program) -> None:
    """Checks that each glob of the plan's `added_losses` names a function that the program calls.

    Raises:
        PlanError: one names none.
    """
    called = sorted({str(node.kwargs["path"]) for node in program.graph.nodes if "path" in node.kwargs})
    for glob in program.plan.added_losses:
        if not any(fnmatchcase(path, glob) for path in called):
            remedy = f"autograd functions of the model are {', '.join(called)}" if called else "leave it out"
            raise PlanError("matches no autograd function", where=f"added_losses: {glob!r}", remedy=remedy)


def added_loss(node: fx.Node) -> AddedLoss:
    """Tries what a declared function does, forward and backward.

    Raises:
        PlanError: it is no function that passes its first operand and adds a multiple of its only other one.
    """
    tensors = operands(node)
    if len(tensors) != 2 or node.args[0] is not tensors[0] or not all(tensor_type(t).is_float for t in tensors):
        _refuse(node, "it takes other tensors than the value that it passes, first, and a scalar loss")
    passed, loss = tensors
    if tensor_type(loss).shape:
        _refuse(node, f"its loss is no scalar, but {tensor_type(loss)}")
    factors = {_factor(node, passed, loss, value, seed) for value, seed in _TRIALS}
    if len(factors) > 1:
        _refuse(node, "the gradient of its loss depends on the loss, or on the gradient that comes in")
    return AddedLoss(passed, loss, factors.pop())


def _factor(node: fx.Node, passed: fx.Node, loss: fx.Node, value: float, seed: int) -> float:
    kind = tensor_type(passed)
    shape = [evaluate(size, dict.fromkeys(names(kind.shape), _SIZE)) for size in kind.shape]
    generator = torch.Generator().manual_seed(seed)
    x, upstream = (torch.randn(shape, generator=generator).to(kind.dtype) for _ in range(2))
    tensors = {passed: x.requires_grad_(), loss: torch.tensor(value, dtype=tensor_type(loss).dtype).requires_grad_()}
    try:
        with torch.enable_grad():
            args = [tensors[a] if isinstance(a, fx.Node) else a for a in node.args]
            result = resolve_function(str(node.kwargs["path"])).apply(*args)
        if not isinstance(result, Tensor) or not torch.equal(result, x):
            _refuse(node, "it does not return its first operand")
        gradients: Sequence[Any] = torch.autograd.grad(result, list(tensors.values()), upstream, allow_unused=True)
    except _FAILURES as error:
        _refuse(node, f"it raises {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}")
    if gradients[0] is None or not torch.equal(gradients[0], upstream):
        _refuse(node, "it does not hand the gradient on to its first operand")
    return 0.0 if gradients[1] is None else float(gradients[1])


def _refuse(node: fx.Node, reason: str) -> NoReturn:
    raise PlanError(
        f"{node.kwargs['path']} is declared to add a loss, and {reason}",
        where=describe(node),
        remedy="leave it out of added_losses, and add the loss to the one that the model returns",
    )
