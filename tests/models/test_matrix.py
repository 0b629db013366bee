"""Every model with every combination of options, by value. `make test-matrix` runs it and prints the table."""

from __future__ import annotations

from itertools import product

import pytest

from fxpar.verify.values import TOLERANCE
from tests.models.table import Record, add_row
from tests.models.variants import PADDINGS, Variant, run
from tests.zoo import CASES

# What one trace serves varies fastest.
_VARIANTS = [
    Variant(tp, padding, recompute, frozen, attention, odd)
    for odd, attention, frozen, recompute, padding, tp in product(
        (False, True), ("sdpa", "eager"), (False, True), (False, True), PADDINGS, (2, 4)
    )
]
_MATRIX = [(name, variant) for name in CASES for variant in _VARIANTS if variant.possible(name)]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "variant"), _MATRIX, ids=[f"{n}-{v}" for n, v in _MATRIX])
def test_every_combination_by_value(name: str, variant: Variant, record_property: Record) -> None:
    found = run(name, variant)
    assert found.ok, found.values
    assert found.values is not None
    assert max(found.values.loss_error, found.values.output_error, found.values.max_grad_error) <= TOLERANCE
    add_row(record_property, name, variant.tp, variant.padding, found)
