"""Optimizers that need whole matrices, of which ranks hold parts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {"Muon": "fxpar.optim.muon"}


def __getattr__(name: str) -> Any:
    """Returns an optimizer when it is first read."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'fxpar.optim' has no attribute {name!r}")
