"""Damaged texts: what a hand or an editor does to lines of a program's text, with no regard to what they mean.

Enters: a text and a seed. Leaves: edited texts. Most are no program any more; whatever they are, a check may say so
and nothing else may.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

Lines = list[str]
Damage = Callable[[Lines, random.Random], Lines]

_NAME = re.compile(r"%(\w+)")
_DEFINITION = re.compile(r"%(\w+) = ")
_CALL = re.compile(r"%\w+ = ([\w.]+)(\[[\w-]+\])?\((.*?)\)(?= : | \{|$|  #| gives)")
_TYPE = re.compile(r" : ([^{#\"]*)")
_INTEGER = re.compile(r"(?<![\w.%])-?\d+(?![\w.])")
_ATTRIBUTES = re.compile(r"\{([^}]*)\}")
_ITEM = re.compile(r"operator\.getitem\(%(\w+), (\d+)\)")
_SIZE = re.compile(r"\[([^\]]*)\]")
_AXES = re.compile(r"\[(dp|tp|dp-tp)\]")

_NUMBERS = ("0", "1", "-1", "2", "3", "7", "-3", "99", "1000000", "9223372036854775807", "-9223372036854775808", "0.5")
_VALUES = ("None", "True", "nan", "inf", "[]", "[1, 2]", '"sum"', "dtype.f16", "device.cuda", "complex(0.0, 1.0)")
_TYPES = ("f32[]", "f64[b]", "i64[2, 3]", "b", "2*b", "(f64[2] ; f64[3])", "f64[0, 8]", "bool[4]", "q", "f64[q]")
_SIZES = ("0", "1", "b", "b*s", "s/2", "floor(b*s/3)", "2*b + 1", "q", "1000000000000")
_PLACEMENTS = ("I", "R", "P", "V", "S(0)", "S(1)", "S(7)", "S(0: 2 x 4)", "S(0: 8 / 2)", "S(0: 9 ~ 16)")
_ATTRIBUTE = (
    *(f"phase={phase}" for phase in ("backward", "weight", "parameter")),
    *(f"{key}={value}" for key in ("random", "recompute", "buffer") for value in (0, 1, 2, 999999999999)),
    *(f"stage={stage}" for stage in ("0", "1", "7", "0+1", "1+0")),
    "one_shot=true",
    "region=layer",
    'origin="recompute"',
    'uncaptured="asks the host"',
    'role="column"',
    "needs=tp:R",
)
_PROPERTIES = ("canonical", "layouts", "collectives", "local", "rng", "vocabulary", "step", "stages", "experts")
_PLANS = ('"tp": 4', '"tp": 1', '"dp": 2', '"pp": 2', '"microbatches": 3', '"sequence_parallel": true')


def _nodes(lines: Lines) -> list[int]:
    return [i for i, line in enumerate(lines) if line.startswith("%")]


def _names(lines: Lines) -> list[str]:
    return [match[1] for line in lines if (match := _DEFINITION.match(line))]


def duplicate(lines: Lines, generator: random.Random) -> Lines:
    """A node stands twice, under another name, and some of what is behind reads the second."""
    i = generator.choice(_nodes(lines))
    name = _DEFINITION.match(lines[i])[1]  # type: ignore[index]
    again = lines[i].replace(f"%{name} = ", f"%{name}_twin = ", 1)
    pattern = re.compile(rf"%{name}(?!\w)")
    rest = [pattern.sub(f"%{name}_twin", line) if generator.random() < 0.5 else line for line in lines[i + 1 :]]
    return [*lines[: i + 1], again, *rest]


def same_line_twice(lines: Lines, generator: random.Random) -> Lines:
    """A line stands twice."""
    i = generator.randrange(len(lines))
    return [*lines[: i + 1], *lines[i:]]


def drop(lines: Lines, generator: random.Random) -> Lines:
    """A line is missing."""
    i = generator.randrange(len(lines))
    return [*lines[:i], *lines[i + 1 :]]


def bypass(lines: Lines, generator: random.Random) -> Lines:
    """A node is missing, and what read it reads one of its operands."""
    i = generator.choice(_nodes(lines))
    name, reads = _DEFINITION.match(lines[i])[1], _NAME.findall(lines[i])[1:]  # type: ignore[index]
    if not reads:
        return drop(lines, generator)
    other = generator.choice(reads)
    return [re.sub(rf"%{name}(?!\w)", f"%{other}", line) for line in [*lines[:i], *lines[i + 1 :]]]


def swap(lines: Lines, generator: random.Random) -> Lines:
    """Two lines change places, neighbours or any."""
    i = generator.randrange(len(lines) - 1)
    k = i + 1 if generator.random() < 0.5 else generator.randrange(len(lines))
    edited = list(lines)
    edited[i], edited[k] = edited[k], edited[i]
    return edited


def redirect(lines: Lines, generator: random.Random) -> Lines:
    """An operand is another node, itself, or unknown."""
    i = generator.choice([k for k, line in enumerate(lines) if _NAME.findall(line)[1:] or line.startswith("return")])
    names = list(_NAME.finditer(lines[i]))
    match = generator.choice(names[1:] if lines[i].startswith("%") else names) if names[1:] else names[0]
    other = generator.choice([*_names(lines), "nobody"])
    return [*lines[:i], f"{lines[i][: match.start()]}%{other}{lines[i][match.end() :]}", *lines[i + 1 :]]


def item(lines: Lines, generator: random.Random) -> Lines:
    """A part of a tuple is another one, there twice, or out of range."""
    places = [i for i, line in enumerate(lines) if _ITEM.search(line)]
    if not places:
        return number(lines, generator)
    i = generator.choice(places)
    index = generator.choice(("0", "1", "2", "-1", "99", "True", "None", "0.5", "%nobody"))
    return [*lines[:i], _ITEM.sub(lambda m: f"operator.getitem(%{m[1]}, {index})", lines[i]), *lines[i + 1 :]]


def _replaced(lines: Lines, generator: random.Random, pattern: re.Pattern[str], values: tuple[str, ...]) -> Lines:
    """One place that the pattern matches, in any line, has another value."""
    places = [(i, match) for i, line in enumerate(lines) for match in pattern.finditer(line)]
    if not places:
        return drop(lines, generator)
    i, match = generator.choice(places)
    line, (start, end) = lines[i], match.span(match.lastindex or 0)
    return [*lines[:i], f"{line[:start]}{generator.choice(values)}{line[end:]}", *lines[i + 1 :]]


def number(lines: Lines, generator: random.Random) -> Lines:
    """A number is another."""
    return _replaced(lines, generator, _INTEGER, _NUMBERS)


def value(lines: Lines, generator: random.Random) -> Lines:
    """A number, or an operand, is another kind of value."""
    return _replaced(lines, generator, generator.choice((_INTEGER, re.compile(r"(?<=[(, \[])%\w+"))), _VALUES)


def retype(lines: Lines, generator: random.Random) -> Lines:
    """A node has another type, that of another node, or none."""
    kinds = [match[0] for line in lines if (match := _TYPE.search(line))]
    i = generator.choice([k for k, line in enumerate(lines) if _TYPE.search(line)])
    new = generator.choice(("", f" : {generator.choice(_TYPES)} ", generator.choice(kinds), generator.choice(kinds)))
    return [*lines[:i], _TYPE.sub(lambda _: new, lines[i], count=1), *lines[i + 1 :]]


def size(lines: Lines, generator: random.Random) -> Lines:
    """A size in a type is another."""
    return _replaced(lines, generator, re.compile(r" : \w+\[(?:[^\],]*, )*([^\],]+)"), _SIZES)


def placement(lines: Lines, generator: random.Random) -> Lines:
    """A layout is another."""
    return _replaced(lines, generator, re.compile(r"(?:dp|tp):(S\([^)]*\)|[IRPV])"), _PLACEMENTS)


def arguments(lines: Lines, generator: random.Random) -> Lines:
    """An operation takes one argument less, one more, or two in the other order."""
    places = [i for i, line in enumerate(lines) if (match := _CALL.match(line)) and match[3]]
    i = generator.choice(places)
    match = _CALL.match(lines[i])
    assert match is not None
    parts = re.split(r", (?![^\[(]*[\])])", match[3])
    how, k = generator.randrange(4), generator.randrange(len(parts))
    if how == 0:
        parts.pop(k)
    elif how == 1:
        parts.insert(k, generator.choice((*_VALUES, *_NUMBERS, f"%{generator.choice(_names(lines))}")))
    else:
        parts[k], parts[0] = parts[0], parts[k]
    start, end = match.span(3)
    return [*lines[:i], f"{lines[i][:start]}{', '.join(parts)}{lines[i][end:]}", *lines[i + 1 :]]


def operator(lines: Lines, generator: random.Random) -> Lines:
    """An operation is another one of the text, or of torch."""
    calls = [i for i, line in enumerate(lines) if _CALL.match(line)]
    i, k = generator.choice(calls), generator.choice(calls)
    heads = [_CALL.match(lines[index]) for index in (i, k)]
    (start, end) = heads[0].span(1)  # type: ignore[union-attr]
    names = ("aten.item.default", "aten.nonzero.default", "aten.mm.default", "aten.split.Tensor", "fxpar.size")
    name = heads[1][1] if generator.random() < 0.7 else generator.choice(names)  # type: ignore[index]
    return [*lines[:i], f"{lines[i][:start]}{name}{lines[i][end:]}", *lines[i + 1 :]]


def axis(lines: Lines, generator: random.Random) -> Lines:
    """A collective is over other axes."""
    return _replaced(lines, generator, _AXES, ("tp", "dp", "dp-tp", "tp-dp", "pp", "ep", "tp-tp"))


def attribute(lines: Lines, generator: random.Random) -> Lines:
    """A node has another attribute, or one less."""
    i = generator.choice(_nodes(lines))
    match = _ATTRIBUTES.search(lines[i])
    new = generator.choice(_ATTRIBUTE)
    if match is None:
        head, mark, comment = lines[i].partition("  #")
        return [*lines[:i], f"{head} {{{new}}}{mark}{comment}", *lines[i + 1 :]]
    parts = [part for part in match[1].split(", ") if part.partition("=")[0] != new.partition("=")[0]]
    if generator.random() < 0.4:
        parts = match[1].split(", ")[1:]
    else:
        parts.append(new)
    inside = f"{{{', '.join(parts)}}}" if parts else ""
    return [*lines[:i], f"{lines[i][: match.start()]}{inside}{lines[i][match.end() :]}", *lines[i + 1 :]]


def header(lines: Lines, generator: random.Random) -> Lines:
    """The header says something else."""
    edited = list(lines)
    i = generator.choice([k for k, line in enumerate(lines) if line and not line.startswith(("%", " "))])
    if lines[i].startswith("properties"):
        known = set(lines[i].split()[1:]) ^ {generator.choice(_PROPERTIES)}
        edited[i] = " ".join(["properties", *sorted(known)])
    elif lines[i].startswith("plan"):
        edited[i] = lines[i].replace("{", "{" + generator.choice(_PLANS) + ", ", 1)
    elif lines[i].startswith("return"):
        parts = lines[i].removeprefix("return ").split(", ")
        k = generator.randrange(len(parts))
        parts = [*parts[:k], *parts[k + 1 :]] if generator.random() < 0.5 else [*parts[k:], *parts[:k]]
        edited[i] = f"return {', '.join(parts)}"
    else:
        return number(lines, generator)
    return edited


def owner(lines: Lines, generator: random.Random) -> Lines:
    """A parameter, or an input, is of another kind or name, frozen, or says that it has a gradient."""
    places = [i for i in _nodes(lines) if re.search(r"= (input|parameter|buffer|constant)\[", lines[i])]
    i = generator.choice(places)
    names = re.findall(r'\["([^"]*)"\]', "\n".join(lines[k] for k in places))
    kind = generator.choice(("input", "parameter", "buffer", ""))
    how = generator.choice(("", "(frozen)", "(gradient)", "(left_out)", '(tied="other")', f'(tied="{names[0]}")'))
    name = generator.choice((*names, "fxpar.tangent.loss", "fxpar.tangent.nobody", "fxpar.rng", "fxpar.received.x", ""))

    def other(match: re.Match[str]) -> str:
        return f'{kind or match[1]}["{name or match[2]}"]{how}'

    edited = re.sub(r'(input|parameter|buffer|constant)\["([^"]*)"\]', other, lines[i], count=1)
    return [*lines[:i], edited, *lines[i + 1 :]]


DAMAGES: tuple[Damage, ...] = (
    duplicate,
    same_line_twice,
    drop,
    bypass,
    swap,
    redirect,
    item,
    number,
    value,
    retype,
    size,
    placement,
    arguments,
    operator,
    axis,
    attribute,
    header,
    owner,
)


def damaged(text: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Edited texts, each with what was done; one damage at a time, and every third time two.

    Args:
        count: how many.
        seed: of the choice.
    """
    generator, lines = random.Random(seed), text.splitlines()
    for index in range(count):
        chosen = [DAMAGES[index % len(DAMAGES)], *([generator.choice(DAMAGES)] if index % 3 == 2 else [])]
        edited = lines
        for damage in chosen:
            edited = damage(edited, generator)
        yield f"{index}: {', '.join(damage.__name__ for damage in chosen)}", "\n".join(edited) + "\n"
