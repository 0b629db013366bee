"""What a trace may assume of sizes: that its tensors have two elements or more along a dimension, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxpar.ir.program import TensorType
from fxpar.ir.symbols import Symbol
from fxpar.layout.symbolic_sizes import symbol
from fxpar.rewrite.symints import SymbolicSizes


def _traced(of: Callable[[Any, Any], bool]) -> None:
    """Asks a question of the sizes of [s - 2, t // 2 + 1]; both symbols are 8 where it is answered."""
    sizes = SymbolicSizes([Symbol("s", "x", 0, 8), Symbol("t", "x", 1, 8)])
    s, t = symbol("s"), symbol("t")
    made = sizes.tensor(TensorType(torch.float32, (s - 2, t // 2 + 1)), False)
    of(*made.shape)
    sizes.check([made])


@pytest.mark.parametrize(
    "of",
    [
        lambda a, b: bool(a != 1),
        lambda a, b: bool(b > 1),
        lambda a, b: bool(a * b >= 4),
        lambda a, b: bool(torch.sym_max(1, a) == a),
        lambda a, b: bool(3 * a * b + a != 1),
    ],
)
def test_a_trace_may_assume_two_elements(of: Callable[[Any, Any], bool]) -> None:
    _traced(of)


@pytest.mark.parametrize(
    ("of", "named"),
    [
        (lambda a, b: bool(a > 2), "s"),
        (lambda a, b: bool(a != 3), "s"),
        (lambda a, b: bool(a > b), "t"),
        (lambda a, b: bool(a % 2 == 0), "s"),
        (lambda a, b: bool(b == 5), "t"),
        (lambda a, b: bool(a + 3 != b), "s"),
    ],
)
def test_a_trace_that_assumes_more_is_refused(of: Callable[[Any, Any], bool], named: str) -> None:
    with pytest.raises(ValueError, match=rf"some sizes alone \(.*\b{named}\b|one size alone \(.*\b{named}\b"):
        _traced(of)
