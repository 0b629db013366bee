"""The shape of a model without its memory, to trace it again in another mode or for another batch.

Enters: a model. Leaves: a copy whose parameters and buffers are on the meta device, and modules of a parallel model
that are as its modules are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxpar.errors import InputError
from fxpar.runtime.parameters import Elsewhere, class_of, original_of
from fxpar.runtime.refusals import (
    BOOKKEEPING,
    RECORD,
    Record,
    Root,
    Submodule,
    Table,
    Unwrappable,
    check_free,
    names_of,
)


def skeleton_of(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Returns a copy of the model, in its modes, whose tensors have shapes and no memory.

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
