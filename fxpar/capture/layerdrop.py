"""Branches on random numbers that have only one way: layer dropping that is switched off.

Enters: calls of torch functions, and of the host's generators, while a forward is traced. Leaves: what a comparison of
a number in [0, 1) with a constant is known to give. `torch.rand([]) < 0.0` is False, and the branch folds.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxpar.capture import patches
from fxpar.errors import CaptureError

_Known = Callable[[float], "bool | None"]
_COMPARISONS: Mapping[str, _Known] = {
    "lt": lambda c: False if c <= 0 else True if c >= 1 else None,
    "le": lambda c: False if c < 0 else True if c >= 1 else None,
    "gt": lambda c: True if c < 0 else False if c >= 1 else None,
    "ge": lambda c: True if c <= 0 else False if c >= 1 else None,
}
_FUNCTIONS: Mapping[Any, _Known] = {
    function: known
    for name, known in _COMPARISONS.items()
    for function in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"__{name}__"))
}


class Decided:
    """Which tensors of a trace are numbers in [0, 1), and which comparisons of them are known."""

    def __init__(self) -> None:
        self._drawn: dict[int, Tensor] = {}  # kept, so that identities stay theirs
        self._known: dict[int, tuple[Tensor, bool]] = {}
        self._open: dict[int, tuple[Tensor, float]] = {}

    def branch(self, func: Any, args: tuple[Any, ...]) -> bool | None:
        """What a branch on a tensor does, where that is known.

        Raises:
            CaptureError: it goes either way, by chance.
        """
        if func != Tensor.__bool__:
            return None
        if id(args[0]) in self._open:
            raise CaptureError(
                f"a random number decides what runs (compared with {self._open[id(args[0])][1]:g}), and a trace would "
                "decide once for all calls",
                remedy="set the rate of layer dropping to 0, or multiply by a factor that is drawn (stochastic depth)",
            )
        return self._known[id(args[0])][1] if id(args[0]) in self._known else None

    def see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Notes a draw, or the comparison of one with a number; what else is done with one may change it."""
        known = _FUNCTIONS.get(func)
        if known is None:
            for value in args:
                self._drawn.pop(id(value), None)
                self._known.pop(id(value), None)
                self._open.pop(id(value), None)
        if func == torch.rand and isinstance(result, Tensor):
            self._drawn[id(result)] = result
        if known is not None and len(args) == 2 and id(args[0]) in self._drawn and isinstance(args[1], (int, float)):
            answer = known(args[1])
            if answer is None:
                self._open[id(result)] = (result, args[1])
            else:
                self._known[id(result)] = (result, answer)


def _refuse(*args: Any) -> NoReturn:
    raise CaptureError(
        "the forward draws random numbers on the host, which a trace would make constants",
        remedy="switch that augmentation or layer dropping off, or draw in the data loader and pass the result",
    )


def _compared(known: _Known) -> Callable[[Any, Any], bool]:
    def compare(number: Any, other: Any) -> bool:
        answer = known(other) if isinstance(other, (int, float)) else None
        return _refuse() if answer is None else answer

    return compare


class _HostNumber:
    """A number in [0, 1) of the host's generator, which a trace would make a constant: only its comparisons may be."""

    __lt__, __le__ = _compared(_COMPARISONS["lt"]), _compared(_COMPARISONS["le"])
    __gt__, __ge__ = _compared(_COMPARISONS["gt"]), _compared(_COMPARISONS["ge"])
    __eq__ = __ne__ = __hash__ = __bool__ = __int__ = __float__ = __round__ = __abs__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __repr__ = __format__ = _refuse


@contextlib.contextmanager
def host_numbers() -> Iterator[None]:
    """While active, `random.random()` and `random.uniform(0, 1)` give numbers that can only be compared."""
    uniform = random.uniform

    def between(a: float, b: float) -> float:
        return _HostNumber() if (a, b) == (0, 1) else uniform(a, b)  # type: ignore[return-value]

    with patches.host_random(_HostNumber, between):
        yield
