"""Faults of what programs hold whose layouts were chosen: composite operators, padded cuts, divided sequences.

Enters: the lines of a program. Leaves: edits of them by kind, as `tests.verify.mutate` samples them.

Left out is what is no fault of a split, so that no layout can tell it: other options of an operation (`ignore_index`,
`reduction`, `padding_idx`), and a sequence whose length is a longer multiple.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from fxpar.ops.registry import COMPOSITE_OF, OPERATORS
from tests.verify.edits import Edit, Edits
from tests.verify.lines import Line, Source

_PADDED = re.compile(r"S\((\d+): (\d+) ~ (\d+)\)")
_SHARED_OUT = re.compile(r"symbol (\w+) = (\S+?)(?: / (\d+))? like (\d+)$")

# What stands before the arguments, of each composite operator and of the operation that it stands for.
_TO_ATEN = {f"{composite}[tp](": f"{composite.like}(" for composite in COMPOSITE_OF.values()}
_TO_COMPOSITE = {f"{target}(": f"{composite}[tp](" for target, composite in COMPOSITE_OF.items()}
assert all(name[len("fxpar.") : -len("[tp](")] in OPERATORS for name in _TO_ATEN)


def _has(source: Source, name: str) -> bool:
    """Whether the program has a property."""
    return any(
        isinstance(line, str) and line.startswith("properties ") and name in line.split() for line in source.lines
    )


def _claims(line: Line) -> Iterator[tuple[str, Line]]:
    """The line as it is, and with other layouts of its first output."""
    yield "", line
    for claim in ("I", "R", "P", *(f"S({dim})" for dim in range(len(line.shapes[0])))):
        if claim != line.layouts[0]:
            yield f" as {claim}", line.with_layout(claim)


def _renamed_operators(source: Source, table: Mapping[str, str]) -> Edits:
    for line in source.nodes:
        for old, new in table.items():
            if not line.head.startswith(old) or not line.layouts:
                continue
            for claim, other in _claims(replace(line, head=new + line.head.removeprefix(old))):
                mutant = source.edited((line, [other]))
                yield Edit(f"{line.name}{claim}", mutant)
                yield Edit(f"{line.name}{claim}, and downstream", mutant, line.name)


def not_composite(source: Source) -> Edits:
    """An operation that needs the whole vocabulary stands for a composite operator."""
    yield from _renamed_operators(source, _TO_ATEN)


def composite(source: Source) -> Edits:
    """A composite operator stands where no vocabulary is cut; before `vocab_parallel` both stand for one another."""
    if _has(source, "vocabulary"):
        yield from _renamed_operators(source, _TO_COMPOSITE)


def _layouts(source: Source, change: Callable[[str, list[str]], Iterator[str]]) -> Edits:
    """Every layout of a node's outputs that `change` changes; it gets the layout and the shape."""
    for line in source.nodes:
        for position, (layout, shape) in enumerate(zip(line.layouts, line.shapes, strict=False)):
            for new in change(layout, shape):
                if not _is_room(source, line, new):
                    mutant = source.edited((line, [line.with_layout(new, position)]))
                    yield Edit(f"{line.name}: {layout} to {new}", mutant)
                    yield Edit(f"{line.name}: {layout} to {new}, and downstream", mutant, line.name)


def _is_room(source: Source, line: Line, new: str) -> bool:
    """Whether it is more padding of a table that embeddings alone read, which is no fault: no value has room for it."""
    found = _PADDED.fullmatch(new)
    heads = [user.head if isinstance(user, Line) else "" for user in source.users(line.name)]
    if found is None or not line.parameter or not all(re.match(r"(aten|fxpar)\.embedding\b", head) for head in heads):
        return False
    return found[1] == "0" and int(found[3]) >= int(found[2]) and int(found[3]) % 4 == 0


def _other_padding(layout: str, shape: list[str]) -> Iterator[str]:
    found = _PADDED.fullmatch(layout)
    if found is None:
        return
    dim, size, padded = int(found[1]), int(found[2]), int(found[3])
    for other in (size, padded - 4, padded + 1, padded + 4, 2 * padded, 768):
        yield f"S({dim}: {size} ~ {other})"
    yield f"S({dim}: {padded} ~ {padded})"
    yield f"S({dim}: {padded})"
    yield f"S({dim}: {size})"
    yield f"S({dim})"
    yield from (f"S({d}: {size} ~ {padded})" for d in range(len(shape)) if d != dim)


def _needless_padding(layout: str, shape: list[str]) -> Iterator[str]:
    found = re.fullmatch(r"S\((\d+)\)", layout)
    if found is not None and shape[int(found[1])].isdigit():
        yield f"S({found[1]}: {shape[int(found[1])]} ~ {int(shape[int(found[1])]) + 4})"


def padding(source: Source) -> Edits:
    """A cut has another padded size, none, or padding where the ranks divide it."""
    yield from _layouts(source, _other_padding)
    yield from _layouts(source, _needless_padding)


def sequence(source: Source) -> Edits:
    """A sequence length is shared out by other ranks than its sizes say, or one size is not the multiple it is."""
    for text in source.lines:
        found = _SHARED_OUT.fullmatch(text) if isinstance(text, str) else None
        if not isinstance(text, str) or found is None:
            continue
        name, place, ranks, like = found[1], found[2], int(found[3] or 1), int(found[4])
        for other in (1, 2, 4, 8):
            part = f" / {other}" if other > 1 else ""
            for example in (like, max(1, like * ranks // other)):
                changed = f"symbol {name} = {place}{part} like {example}"
                if other != ranks:
                    yield Edit(f"{text} to {changed}", _line(source, text, changed))
                if other < ranks and ranks % other == 0:  # a larger multiple is right: of fewer batches
                    sizes = _sizes(_line(source, text, changed), name, ranks, other)
                    yield Edit(f"{text} to {changed}, with all sizes", sizes)
        for line in source.nodes:
            yield from _one_size(source, line, name, ranks, like)


def _line(source: Source, old: str, new: str) -> Source:
    return Source(tuple(new if line == old else line for line in source.lines))


def _sized(text: str, name: str, ranks: int, other: str) -> str:
    old = rf"(?<![\w*]){ranks}\*((?:\w+\*)*){name}(?!\w)" if ranks > 1 else rf"(?<![\w*])()({name})(?!\w)"
    return re.sub(old, lambda m: f"{other}{m[1]}{name}", text)


def _sizes(source: Source, name: str, ranks: int, other: int) -> Source:
    factor = f"{other}*" if other > 1 else ""
    lines = [replace(o, type=_sized(o.type, name, ranks, factor)) if isinstance(o, Line) else o for o in source.lines]
    return Source(tuple(lines))


def _one_size(source: Source, line: Line, name: str, ranks: int, like: int) -> Edits:
    for factor in ("", "2*", "4*", "8*"):
        kind = _sized(line.type, name, ranks, factor)
        if kind != line.type:
            yield Edit(f"{line.name}:{kind}", source.edited((line, [replace(line, type=kind)])))
    kind = line.type.replace(f"{ranks}*{name}" if ranks > 1 else name, str(ranks * like))
    if kind != line.type:
        yield Edit(f"{line.name}:{kind}", source.edited((line, [replace(line, type=kind)])))


def _moved_segments(layout: str, shape: list[str]) -> Iterator[str]:
    """Segments in another order, and of other lengths."""
    found = re.fullmatch(r"S\((\d+): (.* \| .*?)(; I)?\)", layout)
    if found is None:
        return
    pieces = found[2].split(" | ")
    yield f"S({found[1]}: {' | '.join(reversed(pieces))}{found[3] or ''})"
    yield f"S({found[1]}: {' | '.join(pieces[1:])}{found[3] or ''})"
    yield f"S({found[1]}: {pieces[0]})"
    if not shape[int(found[1])].isdigit():
        return
    for i in range(len(pieces) - 1):
        sizes = [int(number) for number in re.findall(r"\d+", f"{pieces[i]} {pieces[i + 1]}")]
        for step in {1, 4, 12, 24, *(size // 2 for size in sizes)} if len(sizes) == 2 else ():
            for sign in (1, -1):
                moved = (sizes[0] + sign * step, sizes[1] - sign * step)
                if min(moved) < 1:
                    continue
                two = [re.sub(r"\d+", str(new), pieces[i + k]) for k, new in enumerate(moved)]
                yield f"S({found[1]}: {' | '.join([*pieces[:i], *two, *pieces[i + 2 :]])}{found[3] or ''})"


def segments(source: Source) -> Edits:
    """Segments stand in another order, end elsewhere, or are left out."""
    yield from _layouts(source, _moved_segments)


def part_of_size(source: Source) -> Edits:
    """A size of the whole stands for a rank's part of it, or the reverse."""
    parts = [(o, m[1]) for o in source.nodes if (m := re.search(r"\(%(\w+), \d+\)$", o.head)) and "floordiv" in o.head]
    for part, whole in parts:
        for old, new in ((part.name, whole), (whole, part.name)):
            for user in source.users(old):
                if isinstance(user, Line) and user.name != part.name:
                    yield Edit(f"%{new} for %{old} in {user.name}", source.redirected(old, new, user.__eq__))


def copies(source: Source) -> Edits:
    """Blocks are shared by more neighbours than they are, or a segment that all hold by some."""

    def change(layout: str, shape: list[str]) -> Iterator[str]:
        for old, new in ((r" / 2", " / 4"), (r" / 4", " / 2"), (r"!(\d+)", r"\1 / 2"), (r" / \d+", "")):
            other = re.sub(old, new, layout)
            if layout.startswith("S(") and other != layout:
                yield other
                yield other.replace("; I", "") if "; I" in other else f"{other[:-1]}; I)"

    yield from _layouts(source, change)


KINDS: Mapping[str, Callable[[Source], Edits]] = {
    "not composite": not_composite,
    "composite": composite,
    "padding": padding,
    "sequence symbol": sequence,
    "copies": copies,
    "other segments": segments,
    "part of a size": part_of_size,
}
