"""Plain values as JSON, and back exactly: what is not JSON's own is spelt out, what cannot be told is refused by name.

Enters: numbers, texts, lists, tuples and mappings, as schedulers and optimizers' options hold. Leaves: a document.
JSON has no tuples, no infinities, no keys but texts and no types of numbers: these are mappings of one tag, `{"tuple":
[1, 2]}`, `{"float": "inf"}`, `{"items": [[3, 0.1]]}`, `{"counter": [[30, 1]]}`, `{"scalar": ["f32", 0.1]}`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import CheckpointError
from fxpar.ir.program import DTYPE_NAMES, DTYPES

_TAGS = ("tuple", "float", "items", "counter", "scalar")


def encode(value: Any, where: str) -> Any:
    """A value of JSON from which `decode` makes the same again.

    Args:
        where: what the value is, for errors.

    Raises:
        CheckpointError: something in it has no plain form; names the place.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) in (list, tuple):
        encoded = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return encoded if type(value) is list else {"tuple": encoded}
    if type(value) is Counter or isinstance(value, dict):
        return _mapping(value, where)
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in DTYPE_NAMES and not value.is_complex():
        return {"scalar": [DTYPE_NAMES[value.dtype], encode(value.item(), where)]}
    raise CheckpointError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be written as JSON",
        where=where,
        remedy="keep numbers, texts, lists and dicts there; set the rest up again before resuming",
    )


def _mapping(value: dict[Any, Any], where: str) -> Any:
    if type(value) not in (dict, Counter):
        raise CheckpointError(
            f"a {type(value).__qualname__} cannot be written as JSON", where=where, remedy="keep a plain dict there"
        )
    items = [[encode(key, f"{where}: a key"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    if type(value) is Counter:
        return {"counter": items}
    if all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)) in _TAGS):
        return dict(items)
    return {"items": items}


def decode(value: Any) -> Any:
    """Inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if tag == "tuple":
        return tuple(decode(content))
    if tag == "float":
        return float(str(content))
    if tag == "items":
        return {_key(key): decode(item) for key, item in content or ()}
    if tag == "counter":
        return Counter({_key(key): decode(item) for key, item in content or ()})
    if tag == "scalar":
        name, number = content or ("f32", 0.0)
        return torch.tensor(decode(number), dtype=DTYPES[name])
    return {key: decode(item) for key, item in value.items()}


def _key(key: Any) -> Any:
    return decode(key)


def document(value: Any) -> bytes:
    """The bytes of a document that `encode` made."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
