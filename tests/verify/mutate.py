"""Mutants of a program's text: single faults of the kinds that tensor parallelism invites.

Enters: the text of a program, its text before `localize`, and a seed. Leaves: edited texts, each with its kind and what
was edited. Every edit is on lines of text; a mutant may be malformed, illegal, wrong or, rarely, right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.verify import mutate_buckets, mutate_chosen
from tests.verify.edits import Edit, Edits, Mutant, sampled
from tests.verify.lines import ROWS, Line, Source

_CUT = re.compile(r"S\((\d+)(?:: ([^)]*))?\)")
_LITERAL = re.compile(r"(?<![\w.%])\d+(?![\w.])")
_SIZED = (
    "aten.view.default",
    "aten.expand.default",
    "aten.reshape.default",
    "aten.slice.Tensor",
    "aten.split_with_sizes.default",
)


def delete(source: Source) -> Edits:
    """A coercion is missing: its users take its operand; or one of several users does."""
    for line in source.coercions:
        assert line.coercion
        yield Edit(line.name, source.edited((line, [])).redirected(line.name, line.coercion[1]))
        users = source.users(line.name)
        if len(users) > 1:
            for user in users:
                yield Edit(f"{line.name} for one user", source.redirected(line.name, line.coercion[1], user.__eq__))


def repeat(source: Source) -> Edits:
    """A coercion is applied twice."""
    for line in source.coercions:
        assert line.coercion
        head = line.head.replace(f"%{line.coercion[1]}", f"%{line.name}")
        again = replace(line, name=f"{line.name}_again", head=head)
        moved = source.redirected(line.name, again.name)
        yield Edit(line.name, moved.edited((line, [line, again])))


def copy(source: Source) -> Edits:
    """A second coercion of the same value serves every other user."""
    for line in source.coercions:
        users = source.users(line.name)
        if len(users) > 1:
            twin = replace(line, name=f"{line.name}_twin")
            shared = source.redirected(line.name, twin.name, users[::2].__contains__)
            yield Edit(line.name, shared.edited((line, [line, twin])))


def _operators(line: Line, names: Sequence[str]) -> Iterator[tuple[str, Line]]:
    """The coercion with other operators, its layout as it is and as each of them would claim it."""
    assert line.coercion
    mine, operand = line.coercion
    for name in names:
        if name == mine:
            continue
        other = replace(line, head=f"fxpar.{name}[tp](%{operand})")
        yield f"{name} for {mine} {line.name}", other
        target = ROWS[name].target
        claims = [target] if target != "S" else [f"S({dim})" for dim in range(len(line.shapes[0]))]
        for claim in claims:
            if claim != line.layouts[0]:
                yield f"{name} for {mine} {line.name} as {claim}", other.with_layout(claim)


def dual(source: Source) -> Edits:
    """Another operator of the table stands for a coercion."""
    for line in source.coercions:
        for edit, other in _operators(line, [name for name in ROWS if name not in ("s_to_i", "all_gather")]):
            yield Edit(edit, source.edited((line, [other])))


def gather(source: Source) -> Edits:
    """A gather stands for a reduction, or for another coercion."""
    for line in source.coercions:
        for edit, other in _operators(line, ("s_to_i", "all_gather")):
            yield Edit(edit, source.edited((line, [other])))


def _cuts(line: Line, change: Callable[[str, str, list[str]], Iterator[str]]) -> Iterator[tuple[str, Line]]:
    """The line with changed shards: `change` gets dimension, pieces and shape."""
    for position, layout in enumerate(line.layouts):
        found = _CUT.fullmatch(layout)
        if found is not None and position < len(line.shapes):
            for new in change(found[1], found[2] or "", line.shapes[position]):
                if new != layout:
                    yield f"{line.name}: {layout} to {new}", line.with_layout(new, position)


def _other_dims(dim: str, pieces: str, shape: list[str]) -> Iterator[str]:
    for other, size in enumerate(shape):
        if other != int(dim):
            yield f"S({other})"
            if pieces and size == shape[int(dim)]:
                yield f"S({other}: {pieces})"


def _other_factors(dim: str, pieces: str, shape: list[str]) -> Iterator[str]:
    size = shape[int(dim)]
    if pieces:
        yield f"S({dim})"
        outer, mark, run = pieces.rpartition(" x ")
        if mark:
            yield f"S({dim}: {run} x {outer})"
    for parts in (2, 3, 4):
        if size.isdigit() and int(size) % (2 * parts) == 0:
            yield f"S({dim}: {parts} x {int(size) // parts})"


def _lost_segments(dim: str, pieces: str, shape: list[str]) -> Iterator[str]:
    outer, _, run = pieces.rpartition(" x ")
    size = shape[int(dim)]
    if outer.isdigit() and run.isdigit():
        most, run_ = int(outer) - 1, int(run)
        yield f"S({dim}: {most} x {run_})" if most > 1 else f"S({dim}: {run_})"
        yield f"S({dim}: {most} x {run_} | !{run_})" if most > 1 else f"S({dim}: {run_} | !{run_})"
        yield f"S({dim}: !{run_} | {most} x {run_})" if most > 1 else f"S({dim}: !{run_} | {run_})"
    elif size.isdigit() and int(size) % 4 == 0:
        yield f"S({dim}: {int(size) // 2} | !{int(size) // 2})"
        yield f"S({dim}: {int(size) // 2})"


def _shared(dim: str, pieces: str, shape: list[str]) -> Iterator[str]:
    """Blocks that ranks share are their own, or every rank's; or reduced where they are not, or not where they are."""
    body, rest, _ = pieces.partition("; I")
    if " / " not in body and "!" not in body:
        size = shape[int(dim)]
        if size.isdigit() and int(size) % 2 == 0:
            yield f"S({dim}: {body or size} / 2)"
            yield f"S({dim}: {body or size} / 2; I)"
        return
    yield f"S({dim}: {body})" if rest else f"S({dim}: {body}; I)"
    for other in (re.sub(r" / \d+", "", body), re.sub(r"(\d+) / \d+", r"!\1", body), body.replace("!", "")):
        yield f"S({dim}: {other}{rest})"
        yield f"S({dim}: {other})"


def _whole(dim: str, pieces: str, shape: list[str]) -> Iterator[str]:
    yield from ("R", "I", "P")


def _layout_edits(source: Source, change: Callable[[str, str, list[str]], Iterator[str]]) -> Edits:
    for line in source.nodes:
        for edit, new in _cuts(line, change):
            mutant = source.edited((line, [new]))
            yield Edit(edit, mutant)
            yield Edit(f"{edit}, and downstream", mutant, line.name)


def wrong_dim(source: Source) -> Edits:
    """A shard of another dimension."""
    yield from _layout_edits(source, _other_dims)


def wrong_axis(source: Source) -> Edits:
    """Another mesh axis than the plan has."""
    for line in source.coercions:
        yield Edit(line.name, source.edited((line, [replace(line, head=line.head.replace("[tp]", "[dp]"))])))


def wrong_factor(source: Source) -> Edits:
    """A shard of another factor of its dimension."""
    yield from _layout_edits(source, _other_factors)


def segment(source: Source) -> Edits:
    """A segment of a fused dimension is left out, or held by every rank."""
    yield from _layout_edits(source, _lost_segments)


def shared(source: Source) -> Edits:
    """It is mistaken which blocks of a shard several ranks hold, or what they hold of their gradients."""
    yield from _layout_edits(source, _shared)


def whole(source: Source) -> Edits:
    """A shard is said to be no shard."""
    yield from _layout_edits(source, _whole)


def kind_of_whole(source: Source) -> Edits:
    """I, R and P are mistaken for each other."""
    for line in source.nodes:
        if line.layouts and line.layouts[0] in "IRP":
            for new in "IRP":
                if new != line.layouts[0]:
                    mutant = source.edited((line, [line.with_layout(new)]))
                    yield Edit(f"{line.name}: {line.layouts[0]} to {new}", mutant)
                    yield Edit(f"{line.name}: {line.layouts[0]} to {new}, and downstream", mutant, line.name)


def early_bias(source: Source) -> Edits:
    """The bias of a row-split product is added before the reduction, by every rank."""
    by_name = {line.name: line for line in source.nodes}
    for line in source.nodes:
        found = re.fullmatch(r"aten\.add\.Tensor\(%(\w+), %(\w+)\)", line.head)
        reduced = by_name.get(found[1]) if found else None
        if found is None or reduced is None or reduced.coercion is None or reduced.coercion[0] != "reduce_from":
            continue
        operand, bias = reduced.coercion[1], by_name[found[2]]
        added = replace(line, head=f"aten.add.Tensor(%{operand}, %{bias.name})").with_layout("P")
        last = replace(reduced, head=f"fxpar.reduce_from[tp](%{line.name})")
        moved = source.redirected(line.name, reduced.name).edited((reduced, []), (line, [added, last]))
        yield Edit(line.name, moved)
        for claim in ("R", "P"):
            yield Edit(f"{line.name}, bias as {claim}", moved.edited((bias, [bias.with_layout(claim)])))


def parameter_sum(source: Source) -> Edits:
    """The gradient of a whole parameter inside a split region is not summed."""
    by_name = {line.name: line for line in source.nodes}
    for line in source.coercions:
        assert line.coercion
        owner = by_name[line.coercion[1]]
        if owner.parameter:
            without = source.edited((line, [])).redirected(line.name, owner.name)
            yield Edit(line.name, without)
            yield Edit(f"{line.name}, {owner.name} as R", without.edited((owner, [owner.with_layout("R")])))
    for line in source.nodes:
        if line.parameter and line.layouts == ["I"]:
            yield Edit(f"{line.name} as R", source.edited((line, [line.with_layout("R")])))


_IDENTITY = re.compile(r"random=(\d+)")


def random_bits(source: Source) -> Edits:
    """Ranks share bits that should be their own, or have their own where they should share; or nodes share them."""
    drawing = [line for line in source.nodes if _IDENTITY.search(line.rest)]
    indexed = any(line.name == "tp_index" for line in source.nodes)

    def change(line: Line, what: str, head: str = "", rest: str = "") -> Edit:
        new = replace(line, head=head or line.head, rest=rest or line.rest)
        return Edit(f"{line.name} {what}", source.edited((line, [new])))

    for line, other in zip(drawing, [*drawing[1:], *drawing[:1]], strict=True):
        if ", [%tp_index])" in line.head:
            yield change(line, "without index", line.head.replace(", [%tp_index])", ")"))
            yield change(line, "with two indices", line.head.replace("[%tp_index]", "[%tp_index, %tp_index]"))
        elif line.head.startswith("fxpar.") and indexed:
            yield change(line, "with index", f"{line.head[:-1]}, [%tp_index])")
        yield change(line, "without identity", rest=_IDENTITY.sub("random=0", line.rest))
        identity = _IDENTITY.search(other.rest)
        if identity is not None and other is not line:
            yield change(line, f"as {other.name}", rest=_IDENTITY.sub(identity[0], line.rest))


def loss(source: Source) -> Edits:
    """The loss is returned before it is invariant, or converted to something else on its way out."""
    header = next(line for line in source.lines if isinstance(line, str) and line.startswith("loss "))
    last = str(source.lines[-1])
    found = re.search(rf"{re.escape(header.removeprefix('loss '))}=%(\w+)", last)
    line = next(line for line in source.nodes if found is not None and line.name == found[1])
    if line.coercion:
        yield Edit(f"{line.coercion[1]} unreduced", source.redirected(line.name, line.coercion[1], last.__eq__))
    for name, row in ROWS.items():
        if row.source in ("I", line.layouts[0]) and row.target != "S":
            new = replace(line, name=f"{line.name}_end", head=f"fxpar.{name}[tp](%{line.name})").with_layout(row.target)
            moved = source.redirected(line.name, new.name, last.__eq__).edited((line, [line, new]))
            yield Edit(f"{name} behind {line.name}", moved)


def literal(source: Source, before: Source) -> Edits:
    """A size of one rank's part is the whole's as it was before `localize`, or twice what it is."""
    heads = {line.name: line.head for line in before.nodes}
    for line in source.nodes:
        if line.head.partition("(")[0] not in _SIZED:
            continue
        if heads.get(line.name, line.head) != line.head:
            yield Edit(f"{line.name} as before", source.edited((line, [replace(line, head=heads[line.name])])))
        for found in _LITERAL.finditer(line.head):
            if int(found[0]) > 1:
                head = f"{line.head[: found.start()]}{int(found[0]) * 2}{line.head[found.end() :]}"
                yield Edit(f"{line.name}: {found[0]} doubled", source.edited((line, [replace(line, head=head)])))


KINDS: dict[str, Callable[[Source], Edits]] = {
    "delete": delete,
    "apply twice": repeat,
    "copy": copy,
    "dual": dual,
    "gather for reduce": gather,
    "wrong dim": wrong_dim,
    "wrong axis": wrong_axis,
    "wrong factor": wrong_factor,
    "segment": segment,
    "shared blocks": shared,
    "shard as whole": whole,
    "I, R, P": kind_of_whole,
    "early bias": early_bias,
    "parameter sum": parameter_sum,
    "random bits": random_bits,
    "loss": loss,
    **mutate_chosen.KINDS,
    **mutate_buckets.KINDS,
}
ALL = (*KINDS, "literal")


def mutants(text: str, before: str, seed: int, count: int) -> list[Mutant]:
    """A sample of a program's mutants, as of `sampled`.

    Args:
        before: its text before `localize`; the same where it is not localised.
    """
    kinds = {**KINDS, "literal": lambda source: literal(source, Source.of(before))}
    return sampled(kinds, Source.of(text), seed, count)
