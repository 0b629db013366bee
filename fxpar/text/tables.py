"""Tables and amounts as people read them.

Enters: texts and numbers. Leaves: tables that cut nothing at any width, and bytes in binary units. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# Where a text may go on in the next line: between words, and behind a sign inside of a name, but not of a number.
_BREAK = re.compile(r"(?<=\s)(?=\S)|(?<=[\w\]][._/-])(?=[A-Za-z%])")
# Columns and the spaces between them.
_GAP = 2


class FittedTable:
    """A table that is read at any width: names break at their signs, and columns beyond the width follow below, each
    part with the first column again.
    """

    def __init__(self, columns: Sequence[str], right: Sequence[str] = (), whole: Sequence[str] = ()) -> None:
        self._columns, self._right, self._whole = tuple(columns), frozenset(right), frozenset(whole)
        self._rows: list[list[Text]] = []
        self._ends: set[int] = set()

    def add_row(self, *cells: str | Text) -> None:
        """Adds a row; cells that are missing are empty."""
        empty = [""] * (len(self._columns) - len(cells))
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in (*cells, *empty)])

    def add_section(self) -> None:
        """Draws a line below the last row."""
        self._ends.add(len(self._rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, (columns, widths) in enumerate(self._parts(options.max_width)):
            if number:
                yield Text("")
            yield self._part(columns, widths)

    def _parts(self, width: int) -> list[tuple[list[int], list[int]]]:
        """Returns columns and their widths, of each part."""
        natural, least = (
            [max(self._needs(i, is_whole)) for i in range(len(self._columns))] for is_whole in (True, False)
        )
        parts: list[list[int]] = [[0]]
        for column in range(1, len(self._columns)):
            together = [*parts[-1], column]
            if len(parts[-1]) > 1 and sum(least[i] + _GAP for i in together) - 1 > width:
                parts.append([0, column])
            else:
                parts[-1] = together
        return [(columns, _shared(width, [(least[i], natural[i]) for i in columns])) for columns in parts]

    def _needs(self, column: int, is_whole: bool) -> Iterator[int]:
        """Yields the widths of a column's texts, or of the longest parts that do not break."""
        name = self._columns[column]
        yield max(map(len, name.split() if not is_whole else [name]), default=0)
        for row in self._rows:
            for line in row[column].plain.split("\n"):
                keeps = is_whole or name in self._right or name in self._whole
                # What stands alone in its row, as a heading, goes on over the other columns.
                yield len(line) if keeps else max(map(len, map(str.rstrip, _BREAK.split(line))))

    def _part(self, columns: Sequence[int], widths: Sequence[int]) -> Table:
        drawn = Table(header_style="bold", box=box.SIMPLE_HEAD)
        drawn.show_edge, drawn.padding = False, (0, 1, 0, 0)
        for column, width in zip(columns, widths, strict=True):
            name = self._columns[column]
            is_number = name in self._right
            drawn.add_column(name, justify="right" if is_number else "left", overflow="fold", width=width)
        for number, row in enumerate(self._rows):
            cells = [_broken(row[i], width) for i, width in zip(columns, widths, strict=True)]
            drawn.add_row(*cells, end_section=number in self._ends)
        return drawn


def _shared(width: int, needs: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the widths of columns: what each needs, and of the rest as much as helps, by equal parts."""
    widths = [least for least, _ in needs]
    rest = width - sum(widths) - _GAP * len(widths) + 1
    while rest > 0 and (short := [i for i, (_, natural) in enumerate(needs) if widths[i] < natural]):
        for i in short[:rest]:
            widths[i] += 1
        rest -= len(short)
    return widths


def _broken(cell: Text, width: int) -> Text:
    """Returns a text whose lines end where names and words do."""
    lines: list[Text] = []
    for line in cell.split("\n", allow_blank=True):
        places = [match.start() for match in _BREAK.finditer(line.plain)]
        ends: list[int] = []
        start = 0
        for place, end in zip(places, [*places[1:], len(line)], strict=False):  # a line without a place has no ends
            if len(line.plain[start:end].rstrip()) > width:
                ends.append(place)
                start = place
        lines += line.divide(ends)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> FittedTable:
    """Returns an empty table. Columns in `right` are numbers; they and those in `whole` do not break."""
    return FittedTable(columns, right, whole)


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


def time_text(seconds: float) -> str:
    """Returns `10.1 µs` or `2.50 ms`."""
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"


def few(names: Sequence[str], most: int = 4) -> str:
    """Returns the first names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
