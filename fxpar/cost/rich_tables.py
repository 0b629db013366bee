"""Sections as rich tables.

Enters: sections. Leaves: what a rich console prints. No text of a model is read as markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fxpar.cost.sections import Section
from fxpar.text.printing import table


def as_group(sections: Sequence[Section]) -> Group:
    """Tables under their titles, an empty line between."""
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
