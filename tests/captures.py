"""Captures of models of transformers, each made once for all commands that read it: commands differ by their plan."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture.capture import Captured, capture
from fxpar.plan.plan import Plan


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """While active, commands capture a model of the same values once; each gets a program of its own."""
    made: dict[Any, Captured] = {}

    def once(
        model: nn.Module,
        batch: Any,
        plan: Plan | None = None,
        loss: Callable[..., Any] | str | None = None,
        fixed: frozenset[tuple[int, int]] = frozenset(),
    ) -> Captured:
        plan = plan or Plan()
        if (
            not type(model).__module__.startswith("transformers.")
            or callable(loss)
            or plan.operators.batchwise_ops
            or plan.experts.expert_modules
        ):
            return capture(model, batch, plan, loss, fixed)
        key = _described(model), _described_batch(batch), loss, plan.data_ranks > 1, fixed
        if key not in made:
            made[key] = capture(model, batch, plan, loss, fixed)
        found = made[key]
        return replace(found, program=found.program.copy().with_(plan=plan))

    with mock.patch("fxpar.compile.capture", once):
        yield


def _described(model: nn.Module) -> Any:
    config: Any = model.config
    values = [(name, value.requires_grad, _value(value)) for name, value in model.state_dict(keep_vars=True).items()]
    modes = [(name, type(module), module.training) for name, module in model.named_modules()]
    return str(config.to_dict()), config._attn_implementation, str(values), str(modes)


def _described_batch(batch: Any) -> Any:
    leaves, spec = pytree.tree_flatten(batch)
    return spec, str([_value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _value(value: Tensor) -> Any:
    if value.device.type == "meta":
        return value.dtype, value.shape, "meta"
    data = value.detach().double() if value.is_floating_point() else value.detach()
    return value.dtype, tuple(value.shape), hashlib.sha256(data.numpy().tobytes()).hexdigest()
