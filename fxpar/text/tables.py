"""Tables and amounts as people read them.

Enters: texts and numbers. Leaves: rich tables that cut nothing, and bytes in binary units. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """Returns an empty table. Columns in `right` are numbers; they and those in `whole` break last."""
    result = Table(header_style="bold", box=box.SIMPLE_HEAD)
    result.show_edge, result.padding = False, (0, 1, 0, 0)
    for name in columns:
        whole_line = name in right or name in whole
        result.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=whole_line)
    return result


def amount(size: float) -> str:
    """Returns bytes for people: `512 B`, `9.0 KiB`, `1.5 MiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    power = 0
    while size >= 1024 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.0f} {units[power]}" if power == 0 else f"{size:.1f} {units[power]}"


def span(what: str, numbers: Sequence[int]) -> str:
    """Returns `stage 1`, or `stages 1–6, each`; without a word `1` or `1–6`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}".strip()
    ends = f"{numbers[0]}–{numbers[-1]}"
    return f"{what}s {ends}, each" if what else ends


def span_of_names(names: Sequence[str]) -> str:
    """Returns the name, or the first of several that differ in a number with the last number: `layers.0–9, each`."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]}–{re.findall(r'[0-9]+', names[-1])[-1]}, each"


def few(names: Sequence[str], most: int = 4) -> str:
    """Returns the first names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
