"""Writes `docs/dev/passes.md` from the contracts of the passes.

    python tools/passes_page.py    # run it after a change to a contract or to the first line of a pass's docstring

`tests/packaging/test_readme.py` fails while the page differs from the contracts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES, STEP_PASSES, step_passes

PAGE = Path(__file__).parents[1] / "docs" / "dev" / "passes.md"

_HEAD = """\
# The passes

This page lists the passes in the order in which they run, with their contracts.
`tools/passes_page.py` writes it from the source: do not edit it by hand.

A pass runs only if the program has all properties that it *requires*. Afterwards the program has those that it
*provides*, and no longer those that it *invalidates*. *Preserves* says what stays equal: `dataflow` is the
expression of every output, `values` are loss, outputs and gradients. [Write a pass](write-a-pass.md) says more.

The docstring of each pass shows a program before and after it. `fxpar passes` prints these tables in a terminal.
"""
_FORWARD = """
## The program of a rank

These passes split the captured program. `DEFAULT_PASSES` in `passes/__init__.py` has their order.
"""
_STEP = """
## The training step

These passes make a training step of the program of a rank. `step_passes` in `passes/__init__.py` has their
order. `split_backward` runs only under a schedule whose backward has two parts.
"""


def page() -> str:
    """Returns the page's text."""
    # The first pass of `step_passes` is `differentiate` with its arguments bound, which has no docstring.
    steps = (STEP_PASSES[0], *step_passes((), (), (), splits=True)[1:])
    return _HEAD + _FORWARD + _table(DEFAULT_PASSES) + _STEP + _table(steps)


def _table(passes: Iterable[Pass]) -> str:
    head = ["", "| pass | what it does | requires | provides | invalidates | preserves |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *_rows(passes)]) + "\n"


def _rows(passes: Iterable[Pass]) -> Iterator[str]:
    for item in passes:
        file = f"passes/{item.run.__module__.rpartition('.')[2]}.py"
        summary = item.summary + (f" Only where {item.condition}." if item.condition else "")
        properties = (", ".join(sorted(names)) for names in (item.requires, item.provides, item.invalidates))
        yield f"| {' | '.join([f'`{file}`', summary, *properties, item.preserves])} |"


if __name__ == "__main__":
    PAGE.write_text(page())
