"""Faults of buckets: one reduction for the gradients of many parameters.

Enters: the lines of a program. Leaves: edits of them by kind, as `tests.verify.mutate` samples them.

Left out are two parameters of one type and layout exchanged, as operands or as items: like two operands of an operation
exchanged that is no fault of a split, and no layout can tell it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.verify.edits import Edit, Edits
from tests.verify.lines import Line, Source

_HEAD = "fxpar.sum_gradients[tp]("
_OPERAND = re.compile(r"%(\w+)")
_ITEM = re.compile(r"operator\.getitem\(%(\w+), (\d+)\)$")
_TYPE = re.compile(r" : (\w+\[[^\]]*\])")


@dataclass(frozen=True)
class _Bucket:
    """A bucket's line, those of its operands, and those of its items in the same order."""

    line: Line
    operands: tuple[Line, ...]
    items: tuple[Line, ...]

    def item(self, line: Line, index: int) -> Line:
        """The line with an item of the bucket as its value."""
        return replace(line, head=f"operator.getitem(%{self.line.name}, {index})")

    def of(self, operands: Sequence[Line], layouts: Sequence[str]) -> Line:
        """The bucket of other operands."""
        return _bucket(self.line, operands, layouts)


def _bucket(line: Line, operands: Sequence[Line], layouts: Sequence[str]) -> Line:
    kinds = [found[1] for operand in operands if (found := _TYPE.match(operand.type))]
    shown = "; ".join(f"{kind} tp:{layout}" for kind, layout in zip(kinds, layouts, strict=True))
    head = _HEAD + ", ".join(f"%{operand.name}" for operand in operands) + ")"
    return replace(line, head=head, type=f" : ({shown})")


def _buckets(source: Source) -> Iterator[_Bucket]:
    by_name = {line.name: line for line in source.nodes}
    for line in source.nodes:
        if line.head.startswith(_HEAD):
            found = ((_ITEM.match(other.head), other) for other in source.nodes)
            items = {int(m[2]): other for m, other in found if m is not None and m[1] == line.name}
            operands = tuple(by_name[name] for name in _OPERAND.findall(line.head))
            yield _Bucket(line, operands, tuple(items[index] for index in range(len(operands))))


def left_out(source: Source) -> Edits:
    """A weight is used as it rests where its item of a bucket should be, by all users or by one of several."""
    for bucket in _buckets(source):
        for owner, item in zip(bucket.operands, bucket.items, strict=True):
            direct = source.redirected(item.name, owner.name)
            yield Edit(owner.name, direct.edited((item, [])))
            users = source.users(item.name)
            for user in users if len(users) > 1 else ():
                yield Edit(f"{owner.name} for one user", source.redirected(item.name, owner.name, user.__eq__))
            kept = [index for index, other in enumerate(bucket.items) if other is not item]
            shorter = bucket.of([bucket.operands[i] for i in kept], [bucket.line.layouts[i] for i in kept])
            moved = [(bucket.items[old], [bucket.item(bucket.items[old], new)]) for new, old in enumerate(kept)]
            without = direct.edited((bucket.line, [shorter] if kept else []), (item, []), *moved)
            yield Edit(f"{owner.name}, and out of the bucket", without)
            claim = owner.with_layout("R" if owner.layouts == ["I"] else owner.layouts[0].replace("; I", ""))
            yield Edit(f"{owner.name} as {claim.layouts[0]}, out of the bucket", without.edited((owner, [claim])))


def needless(source: Source) -> Edits:
    """A parameter whose gradient is the same on all ranks is summed, by a coercion of its own or in a bucket."""
    buckets = list(_buckets(source))
    held = {operand.name for bucket in buckets for operand in bucket.operands}
    for line in source.nodes:
        for user in source.users(line.name) if line.parameter and line.layouts == ["I"] else ():
            if line.name in held or not isinstance(user, Line):
                continue
            new = replace(line, name=f"{line.name}_sum", head=f"fxpar.copy_to[tp](%{line.name})").with_layout("R")
            moved = source.redirected(line.name, new.name, user.__eq__)
            first = next(other for other in moved.nodes if other.name == user.name)
            yield Edit(f"{line.name} for {user.name}", moved.edited((first, [new, first])))
            for bucket in buckets:
                longer = bucket.of([*bucket.operands, line], [*bucket.line.layouts, "R"])
                item = bucket.item(new, len(bucket.operands))
                mutant = moved.edited((bucket.line, [longer]), (first, [item, first]))
                yield Edit(f"{line.name} for {user.name} in {bucket.line.name}", mutant)


def bucket(source: Source) -> Edits:
    """A bucket gives another item, holds one weight twice, takes what is no parameter, or is summed again."""
    for found in _buckets(source):
        for position in range(len(found.items)):
            yield from _other_items(source, found, position)
            yield from _other_operands(source, found, position)
            yield from _converted(source, found, position)
    yield from _activations(source)


def _other_items(source: Source, bucket: _Bucket, position: int) -> Edits:
    item, owner = bucket.items[position], bucket.operands[position]
    for index in range(len(bucket.items) + 1):
        other = bucket.operands[index] if index < len(bucket.items) else None
        if other is None or (other.layouts, other.shapes) != (owner.layouts, owner.shapes):
            yield Edit(f"{item.name}: item {index}", source.edited((item, [bucket.item(item, index)])))


def _other_operands(source: Source, bucket: _Bucket, position: int) -> Edits:
    owner = bucket.operands[position]
    for other in bucket.operands:
        if other is not owner:
            operands = [other if operand is owner else operand for operand in bucket.operands]
            typed = bucket.of(operands, bucket.line.layouts)
            for line in (typed, replace(bucket.line, head=typed.head)):
                yield Edit(f"{owner.name} is {other.name}", source.edited((bucket.line, [line])))
    for claim in ("I", "P", owner.layouts[0]):
        if claim != bucket.line.layouts[position]:
            line = bucket.line.with_layout(claim, position)
            yield Edit(f"{bucket.line.name}: {owner.name} as {claim}", source.edited((bucket.line, [line])))


def _converted(source: Source, bucket: _Bucket, position: int) -> Edits:
    """A weight is converted apart too, an item is summed again, or reduced."""
    item, owner = bucket.items[position], bucket.operands[position]

    def behind(what: str, claim: str, *lines: Line) -> Edit:
        last = lines[-1].with_layout(claim)
        moved = source.redirected(item.name, last.name).edited((item, [item, *lines[:-1], last]))
        return Edit(f"{item.name} {what}", moved)

    def named(name: str, head: str) -> Line:
        return replace(item, name=f"{item.name}_{name}", head=head)

    operator = "share" if "; I" in owner.layouts[0] else "copy_to"
    yield behind("converted apart", item.layouts[0], named("twin", f"fxpar.{operator}[tp](%{owner.name})"))
    yield behind("converted again", item.layouts[0], named("again", f"fxpar.{operator}[tp](%{item.name})"))
    yield behind("reduced", "I", named("reduced", f"fxpar.r_to_i[tp](%{item.name})"))
    again = _bucket(named("bucket", ""), [item], item.layouts)
    last = named("last", f"operator.getitem(%{again.name}, 0)")
    yield behind("summed again", item.layouts[0], again, last)


def _activations(source: Source) -> Edits:
    """A bucket takes the place of a coercion of what is no parameter, or of another one than `copy_to` and `share`."""
    by_name = {line.name: line for line in source.nodes}
    for line in source.coercions:
        assert line.coercion
        operator, operand = line.coercion
        if by_name[operand].parameter and operator in ("copy_to", "share"):
            continue
        for claim in dict.fromkeys((line.layouts[0], "R")):
            whole = _bucket(replace(line, name=f"{line.name}_all"), [by_name[operand]], [claim])
            item = replace(line, head=f"operator.getitem(%{whole.name}, 0)").with_layout(claim)
            edited = source.edited((line, [whole, item]))
            yield Edit(f"{operator} of {operand} in a bucket, as {claim}", edited)
            yield Edit(f"{operator} of {operand} in a bucket, as {claim}, and downstream", edited, item.name)


KINDS: Mapping[str, Callable[[Source], Edits]] = {
    "left out": left_out,
    "needless sum": needless,
    "bucket": bucket,
}
