"""Layers that a trace has copied need not run where the eager model is walked: what they do the first one did.

Enters: a model that runs on fakes, and which layer each copied one repeats. Leaves: a run in which those give tensors
like the first one's, with a gradient to what they were given, so that the walk goes on to what is before them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture import patches
from fxpar.capture.values import rebuilt


def repeated(model: nn.Module, copied: Mapping[str, str]) -> contextlib.AbstractContextManager[Any]:
    """While active, copied layers stand still.

    Args:
        copied: paths of layers, each with that of the one that it repeats; both are called once.
    """
    if not copied:
        return contextlib.nullcontext()
    modules = dict(model.named_modules())
    sources = {id(modules[path]): id(modules[first]) for path, first in copied.items()}
    given: dict[int, tuple[list[Tensor], Any]] = dict.fromkeys(sources.values(), ([], None))

    def call(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) in sources:
            return _like(*given[sources[id(module)]], _tensors((args, kwargs)))
        found = original(module, *args, **kwargs)
        if id(module) in given:
            given[id(module)] = (_tensors((args, kwargs)), found)
        return found

    patched: contextlib.AbstractContextManager[Any] = patches.eager_calls_of_modules(call)
    return patched


def _tensors(nest: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(nest) if isinstance(value, Tensor)]


def _like(before: list[Tensor], outputs: Any, now: list[Tensor]) -> Any:
    """Outputs of another call."""
    given = {id(mine): other for mine, other in zip(before, now, strict=True)}
    with torch._C.DisableTorchFunction():
        sources = [value for value in now if value.requires_grad]
        with torch.enable_grad():
            reached = [value.sum().real for value in sources]

        def tensor(value: Tensor) -> Tensor:
            if id(value) in given:
                return given[id(value)]
            found = torch.empty_like(value)
            if not value.requires_grad:
                return found
            with torch.enable_grad():
                found = found.requires_grad_().clone()
                for term in reached:
                    found = found + term.to(value.device, value.dtype)
            return found

        return rebuilt(outputs, tensor)
