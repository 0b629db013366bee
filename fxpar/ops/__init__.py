"""The graph operators of fxpar: one record each, with what a rank runs in their place.

For models it has `experts`, which consists of operators of torch that fxpar registers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Returns `experts` when it is first read: operators import modules of this package themselves."""
    if name == "experts":
        return import_module("fxpar.ops.expert_layer").experts
    raise AttributeError(f"module 'fxpar.ops' has no attribute {name!r}")
