"""The graph operators of fxpar: one record each, with what a rank runs in their place.

For models it has functions that consist of operators of torch which fxpar registers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Functions for models, which stand with their features: this room imports none of them.
_OF_FEATURES = {"experts": "fxpar.experts.operators.expert_layer"}


def __getattr__(name: str) -> Any:
    """Returns a function for models when it is first read."""
    if name in _OF_FEATURES:
        return getattr(import_module(_OF_FEATURES[name]), name)
    raise AttributeError(f"module 'fxpar.ops' has no attribute {name!r}")
