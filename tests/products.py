"""Tests of all combinations of values: a few every time, the rest in the matrix."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest

MATRIX = [pytest.mark.matrix]


def product(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """A case for each combination; every time as many as it takes for each value of each argument to occur.

    Args:
        axes: the values of each argument; of several arguments at once, `a__b`, pairs of values.
    """
    longest = max(map(len, axes.values()))
    every_time = {tuple(i % len(values) for values in axes.values()) for i in range(longest)}
    cases = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        case: list[Any] = []
        for i, (names, values) in zip(places, axes.items(), strict=True):
            case += values[i] if "__" in names else [values[i]]
        cases.append(pytest.param(*case, marks=[] if places in every_time else MATRIX))
    return pytest.mark.parametrize([name for names in axes for name in names.split("__")], cases)


def few(cases: Iterable[Any], every_time: Container[Any]) -> list[Any]:
    """Marks the cases that are not named with `matrix`; a tuple is one case of several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in every_time else MATRIX)
        for case in cases
    ]


def alternate(cases: Iterable[Any], turn: int) -> list[Any]:
    """Marks every second case with `matrix`: the others run every time in a test of the other turn, 0 or 1."""
    return [pytest.param(case, marks=[] if i % 2 == turn else MATRIX) for i, case in enumerate(cases)]
