"""fxpar: a compiler that splits a single-device PyTorch transformer over many devices, and proves it right.

Importing the package loads nothing heavy: names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpar.plan import Plan as Plan

__version__ = "0.1.0"

_WHERE = {
    "Plan": "fxpar.plan",
    "FxparError": "fxpar.errors",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'fxpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
