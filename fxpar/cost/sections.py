"""Tables of records for every medium: titled sections of texts.

Enters: records, and which of their fields are columns. Leaves: sections, and how a terminal shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from rich.console import Group, RenderableType
from rich.text import Text

from fxpar.text.tables import table


@dataclass(frozen=True)
class Section:
    """A table: rows of texts under columns, those in `right` numbers, and sentences below."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FigureColumn:
    """A column of a table. The type of a record's field has one, whose text is that of the field's value.

    Attributes:
        show: turns a record into text.
        right: whether that is a number.
    """

    title: str
    show: Callable[[Any], str] = str
    right: bool = True


def columns(kind: type, names: str) -> list[FigureColumn]:
    """Returns the columns of some fields of a record, by their names."""

    def column(name: str) -> FigureColumn:
        of_value: FigureColumn = hints[name].__metadata__[0]
        return replace(of_value, show=lambda record: of_value.show(getattr(record, name)))

    hints = get_type_hints(kind, include_extras=True)
    return [column(name) for name in names.split()]


def listing(title: str, shown: Sequence[FigureColumn], records: Iterable[Any], notes: Sequence[str] = ()) -> Section:
    """Returns a table with a row for each record."""
    rows = tuple(tuple(column.show(record) for column in shown) for record in records)
    right = tuple(column.title for column in shown if column.right)
    return Section(title, tuple(column.title for column in shown), rows, right, tuple(notes))


def as_group(sections: Sequence[Section]) -> Group:
    """Returns tables under their titles, an empty line between. No text of a model is read as markup."""
    renderables: list[RenderableType] = []
    for section in sections:
        if renderables:
            renderables.append(Text(""))
        renderables.append(Text(section.title, style="bold"))
        if section.rows:
            rows = table(*section.columns, right=section.right)
            for row in section.rows:
                if row[0] == "all":
                    rows.add_section()
                rows.add_row(*[Text(cell) for cell in row])
            renderables.append(rows)
        renderables += [Text(note, style="dim") for note in section.notes]
    return Group(*renderables)
