"""A program's text in lines that a test can edit.

Enters: the text of a program. Leaves: `Source`, its lines in parts, and edits of them that know nothing of programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpar.ops.collectives import COERCION_OF

ROWS = {row.operator.__name__: row for row in COERCION_OF.values()}

_LINE = re.compile(r'%(\w+) = (.*?)( : [^{#"]*?)?( \{.*\})?(  # .*)?$')
_LAYOUT = re.compile(r"tp:(I|R|P|V|S\(\d+(?:: [^)]*)?\))")
_ARROW = re.compile(r"tp:(?:I|R|P|V|S\([^)]*\))→")
_SHAPE = re.compile(r"\w+\[([^\]]*)\]")
_COERCION = re.compile(r"fxpar\.(\w+)\[tp\]\(%(\w+)\)$")


@dataclass(frozen=True)
class Line:
    """A node's line in parts; `type` with its colon, `rest` with attributes and comment."""

    name: str
    head: str
    type: str
    rest: str

    def __str__(self) -> str:
        return f"%{self.name} = {self.head}{self.type}{self.rest}"

    @property
    def layouts(self) -> list[str]:
        return _LAYOUT.findall(self.type)

    @property
    def shapes(self) -> list[list[str]]:
        return [[size for size in found.split(", ") if size] for found in _SHAPE.findall(self.type)]

    @property
    def coercion(self) -> tuple[str, str] | None:
        """Operator and operand of a coercion."""
        found = _COERCION.fullmatch(self.head)
        return (found[1], found[2]) if found is not None and found[1] in ROWS else None

    @property
    def parameter(self) -> bool:
        return self.head.startswith("parameter[")

    def with_layout(self, placement: str, position: int = 0) -> Line:
        """Another layout on one output."""
        count = iter(range(len(self.layouts)))
        return replace(
            self, type=_LAYOUT.sub(lambda m: f"tp:{placement}" if next(count) == position else m[0], self.type)
        )


@dataclass(frozen=True)
class Source:
    """A text in lines; arrows of coercions are left out, so that a changed operand is no error of the text."""

    lines: tuple[Line | str, ...]

    @staticmethod
    def of(text: str) -> Source:
        """The lines of a program's text."""
        lines: list[Line | str] = []
        for line in _ARROW.sub("tp:", text).splitlines():
            found = _LINE.fullmatch(line)
            if found is None:
                lines.append(line)
            else:
                name, head, kind, attributes, comment = found.groups(default="")
                lines.append(Line(name, head, kind, attributes + comment))
        return Source(tuple(lines))

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines) + "\n"

    @property
    def nodes(self) -> list[Line]:
        return [line for line in self.lines if isinstance(line, Line)]

    @property
    def coercions(self) -> list[Line]:
        return [line for line in self.nodes if line.coercion]

    def users(self, name: str) -> list[Line | str]:
        """The lines that use a node, the return line too."""
        return [line for line in self.lines if _uses(line, name)]

    def edited(self, *edits: tuple[Line, Sequence[Line]]) -> Source:
        """Lines replaced by others, by none or by several."""
        table = {old.name: new for old, new in edits}
        found: list[Line | str] = []
        for line in self.lines:
            found.extend(table.get(line.name, [line]) if isinstance(line, Line) else [line])
        return Source(tuple(found))

    def redirected(self, old: str, new: str, which: Callable[[Line | str], bool] = lambda line: True) -> Source:
        """Users of one node use another."""
        pattern = re.compile(rf"%{old}(?!\w)")

        def change(line: Line | str) -> Line | str:
            if not _uses(line, old) or not which(line):
                return line
            if isinstance(line, str):
                return pattern.sub(f"%{new}", line)
            return replace(line, head=pattern.sub(f"%{new}", line.head))

        return Source(tuple(change(line) for line in self.lines))


def _uses(line: Line | str, name: str) -> bool:
    return re.search(rf"%{name}(?!\w)", line.head if isinstance(line, Line) else line) is not None
