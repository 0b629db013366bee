"""Tables and amounts as people read them.

Enters: texts and numbers. Leaves: rich tables that cut nothing, and bytes in binary units. Needs no torch.
"""

from __future__ import annotations

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


def few(names: Sequence[str], most: int = 4) -> str:
    """Returns the first names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
