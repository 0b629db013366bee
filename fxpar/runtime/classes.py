"""Classes that code takes for the author's: of what the parts of a parallel module are instances.

Enters: a class of ours and one of the author's. Leaves: a class with the methods of both, ours first, and with the name
of the author's. Nothing of the author's runs while it is made: neither `__init_subclass__` nor a metaclass.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, TypeVar

from torch import nn

_ORIGINAL = "_stands_for"
_Module = TypeVar("_Module", bound=nn.Module)


class Alike(type):
    """Makes classes equal to those that they stand for: `type(m) == nn.Linear`, and tables by class, go on to work."""

    def __eq__(cls, other: object) -> bool:
        """Compares what the classes stand for."""
        return isinstance(other, type) and original_of(cls) is original_of(other)

    def __hash__(cls) -> int:
        """Agrees with the class that it stands for."""
        return type.__hash__(original_of(cls))


def original_of(cls: type) -> type:
    """Returns the class that a class stands for; itself where it stands for none."""
    original: type = vars(cls).get(_ORIGINAL, cls)
    return original


def class_of(ours: type[_Module], author: type[nn.Module]) -> type[_Module]:
    """Makes a class of ours that stands for one of the author's.

    Calling it makes a module of the author's class: slices of containers do (`model.blocks[:2]`), and so does code that
    replaces a layer by a new one of the same class.

    Args:
        ours: a class whose methods go before the author's, and which defines an `__init_subclass__` that ends there.
        author: is left as it is.
    """

    def make(cls: type, *args: Any, **options: Any) -> nn.Module:
        return author(*args, **options)

    namespace = {
        "__module__": author.__module__,
        "__qualname__": author.__qualname__,
        "__doc__": author.__doc__,
        "__new__": make,
        "__class__": property(lambda module: author),
        _ORIGINAL: author,
    }
    metaclass, maker = type(author), ABCMeta if isinstance(author, ABCMeta) else type
    alike = Alike if metaclass is type else type(metaclass.__name__, (Alike, metaclass), {})
    stand_in: type[_Module] = maker.__new__(alike, author.__name__, (ours, author), namespace)
    return stand_in
