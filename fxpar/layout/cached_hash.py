"""Frozen values that work out their hash once: layouts and types are keys of whatever equal layers ask again.

Enters: a frozen dataclass. Leaves: the class, whose values keep their hash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def remembers_hash(kind: _Class) -> _Class:
    """Class decorator of a frozen dataclass; hashes of strings are others in another process, so it is no state."""
    changed: Any = kind
    compute: Callable[[Any], int] = changed.__hash__

    def kept(self: Any) -> int:
        try:
            return self._hash  # type: ignore[no-any-return]
        except AttributeError:
            computed = self.__dict__["_hash"] = compute(self)
            return computed

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    changed.__hash__, changed.__getstate__ = kept, state
    return kind
