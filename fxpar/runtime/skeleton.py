"""The shape of a model without its memory, to trace it again in another mode or for another batch.

Enters: a model. Leaves: a copy whose parameters and buffers are on the meta device, and its modules' tree by name.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fxpar.errors import InputError
from fxpar.runtime.refusals import Submodule, Unwrappable


def skeleton_of(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model, in its modes, whose tensors have shapes and no memory.

    Args:
        model: is left as it is.
        dtype: element type of the copy's floating parameters; None for their own. Buffers keep theirs: rotary
            frequencies in half precision are wrong.

    Raises:
        InputError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        shape = torch.empty_like(parameter, dtype=kind, device="meta")
        memo[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"the model cannot be copied: {str(error).splitlines()[0]}",
            where=type(model).__name__,
            remedy="keep locks, files and tensors with a history out of its attributes",
        ) from error


def attach(root: Unwrappable, skeleton: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Gives `root` empty modules under all names of the skeleton's, in their modes; returns the pairs without the root.

    Raises:
        InputError: a name is taken by an attribute of `root`.
    """
    root.training = skeleton.training
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for name, module in skeleton.named_modules(remove_duplicate=False):
        for leaf in (*module._parameters, *module._buffers) if module is skeleton else ():
            _check_free(root, leaf)
        if not name:
            continue
        path, _, leaf = name.rpartition(".")
        parent = root.get_submodule(path)
        if parent is root:
            _check_free(root, leaf)
        own = Submodule()
        own.training = module.training
        own.keep_settings(module)
        parent.add_module(leaf, own)
        pairs.append((module, own))
    root.keep_settings(skeleton)
    return pairs


def _check_free(root: nn.Module, name: str) -> None:
    if hasattr(type(root), name) or name in vars(root):
        raise InputError(
            f"the name is taken by {type(root).__name__}.{name}", where=name, remedy="rename it in the model"
        )
