"""The table of what was verified by value, printed behind the tests (DESIGN section 5).

Rows travel with the tests' reports, so that they come back from the workers of a parallel run too. `tests/conftest.py`
takes the hook from here: the main process of a parallel run loads no conftest below it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fxpar.verification import Verification

_KEY = "by value"
Record = Callable[[str, object], None]


def add_row(record: Record, model: str, tp: int, padding: str, found: Verification) -> None:
    """Adds one verification; `record` is the test's `record_property`."""
    values = found.values
    assert values is not None
    errors = [values.gradients, values.loss_error, values.max_grad_error, found.split_flops]
    record(_KEY, [model, tp, padding, *errors])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table, if there is one: a line for each model, number of ranks and kind of padding."""
    reports = terminalreporter.getreports("passed")
    rows: list[list[Any]] = sorted(
        value for report in reports if report.when == "call" for key, value in report.user_properties if key == _KEY
    )
    if not rows:
        return
    terminalreporter.section("by value against one device: float64, training mode, dropout on")
    names = ("model", "tp", "padding", "options", "gradients", "loss", "gradient", "split")
    terminalreporter.line("{:8} {:>2} {:9} {:>7} {:>9} {:>8} {:>8} {:>6}".format(*names))
    for (model, tp, padding), group in groupby(rows, key=lambda row: row[:3]):
        own = list(group)
        gradients, loss, gradient = sum(r[3] for r in own), max(r[4] for r in own), max(r[5] for r in own)
        share = min(r[6] for r in own)
        line = f"{model:8} {tp:2} {padding:9} {len(own):7} {gradients:9} {loss:8.1e} {gradient:8.1e} {share:6.3f}"
        terminalreporter.line(line)
    loss, gradient = max(r[4] for r in rows), max(r[5] for r in rows)
    terminalreporter.line(f"{len(rows)} runs, {sum(r[3] for r in rows)} gradients; worst {loss:.1e} and {gradient:.1e}")
    terminalreporter.line("options: combinations of recompute, frozen, attention and sizes. loss and gradient: largest")
    terminalreporter.line(
        "deviation of any rank, over the loss and over the largest gradient. split: smallest share of"
    )
    terminalreporter.line("the matrix FLOPs that tp divides.")
