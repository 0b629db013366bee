"""Mutants by a generator that knows nothing of programs: edits of words of a text.

Enters: a text and a seed. Leaves: edited texts. Words are exchanged for others of their sort found in the same text or
among all operators of torch; lines are dropped, repeated and moved.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from tests.verify.edits import Mutant

_NUMBER = re.compile(r"(?<![\w%])-?\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)")
_NAME = re.compile(r"%\w+")
_OPERATOR = re.compile(r"(?:aten|fxpar|operator)\.\w+(?:\.\w+)?(?:\[\w+\])?(?=\()")
_DTYPE = re.compile(r"\b(?:f32|f64|bf16|f16|i64|i32|bool|u8)\b")
_LAYOUT = re.compile(r"tp:(?:I|R|P|V|S\([^)]*\))")
_WORD = re.compile(r'"[^"]*"|True|False|None|\b[bs]\b')

_NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "-1",
    "-2",
    "4",
    "8",
    "12",
    "24",
    "16",
    "0.5",
    "1.5",
    "-0.1",
    "inf",
    "nan",
    "999999999999",
)


def _exchange(text: str, pattern: re.Pattern[str], generator: random.Random, others: tuple[str, ...] = ()) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text
    at = generator.choice(found)
    new = generator.choice([*others, *(m[0] for m in found)])
    return text[: at.start()] + new + text[at.end() :]


def _lines(text: str, generator: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    at, how = generator.randrange(len(lines)), generator.choice("drms")
    line = lines[at]
    if how == "d":
        del lines[at]
    elif how == "r":
        lines.insert(at, re.sub(r"^%(\w+)", r"%\1_again", line))
    elif how == "m":
        lines.insert(generator.randrange(len(lines)), lines.pop(at))
    else:
        other = generator.randrange(len(lines))
        lines[at], lines[other] = lines[other], line
    return "".join(lines)


def _operators(pool: tuple[str, ...]) -> Callable[[str, random.Random], str]:
    return lambda text, generator: _exchange(text, _OPERATOR, generator, generator.sample(pool, min(len(pool), 40)))  # type: ignore[arg-type]


def foreign(text: str, operators: dict[str, tuple[str, ...]], seed: int, count: int) -> list[Mutant]:
    """Mutants of one to two edits.

    Args:
        operators: by operator, others whose schemas take the same kinds of arguments.
    """
    generator = random.Random(seed)

    def sibling(body: str, generator: random.Random) -> str:
        found = [m for m in _OPERATOR.finditer(body) if operators.get(m[0])]
        if not found:
            return body
        at = generator.choice(found)
        return body[: at.start()] + generator.choice(operators[at[0]]) + body[at.end() :]

    edits: dict[str, Callable[[str, random.Random], str]] = {
        "number": lambda body, g: _exchange(body, _NUMBER, g, _NUMBERS * 4),
        "name": lambda body, g: _exchange(body, _NAME, g),
        "operator": lambda body, g: _exchange(body, _OPERATOR, g),
        "sibling": sibling,
        "element type": lambda body, g: _exchange(body, _DTYPE, g),
        "layout": lambda body, g: _exchange(body, _LAYOUT, g, ("tp:I", "tp:R", "tp:P")),
        "word": lambda body, g: _exchange(body, _WORD, g),
        "line": _lines,
    }
    found: list[Mutant] = []
    seen = {text}
    while len(found) < count:
        kinds = generator.choices(list(edits), k=generator.choice((1, 1, 1, 2)))
        other = text
        for kind in kinds:
            other = edits[kind](other, generator)
        if other not in seen:
            seen.add(other)
            found.append(Mutant(" and ".join(kinds), "", other))
    return found
