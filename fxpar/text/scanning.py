"""The parts of a line of a program's text: values, types, layouts, operators and the plan.

Enters: pieces of text. Leaves: what they stand for, or a `TextError` without a place, to which `fxpar.text.parsing`
adds the line. Names are looked up in fixed tables and among the operators that torch has registered: nothing is
imported, evaluated or called.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import fx

from fxpar.errors import TextError
from fxpar.ir.operators import GraphOperator
from fxpar.ir.program import DTYPES, ScalarType, TensorType, ValueType
from fxpar.layout.layout import Layout, Placement, fits, parse_placement
from fxpar.layout.nesting import peel
from fxpar.layout.symbolic_sizes import Size, parse_size, shape_text
from fxpar.plan.plan import GROUPS, Plan
from fxpar.text.printing import FUNCTIONS, value_text

IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
INTEGER = r"[0-9]{1,18}"  # fits 64 bits
STRING = r'"(?:[^"\\]|\\.)*"'

_STRING = re.compile(STRING)
_NAME = re.compile(rf"%({IDENTIFIER})")
_SEPARATOR = re.compile(r",\s*")
_QUALIFIED = re.compile(rf"(dtype|device|memory_format|layout)\.({IDENTIFIER})")
_REAL = r"-?(?:inf|[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)(?![A-Za-z0-9_.])|nan"
_NUMBER = re.compile(_REAL)
_COMPLEX = re.compile(rf"complex\(({_REAL}), ({_REAL})\)")
_SINGLETON = re.compile(r"(?:None|True|False)(?![A-Za-z0-9_])")
_TENSOR = re.compile(r"([a-z0-9]+)\[(.*)\]")
_AXIS = re.compile(rf"({IDENTIFIER}):(.*)")

_LONG_NUMBER = re.compile(r"[0-9]{19}|[^\x00-\x7f]")  # of more than 64 bits, or of other digits than 0 to 9
_DEEPEST_LIST = 32  # the generated code of a graph module is read by Python's parser, which has a limit of its own

_SINGLETONS: Mapping[str, bool | None] = {"None": None, "True": True, "False": False}
_TORCH_VALUES: Mapping[str, Any] = {
    **{f"dtype.{name}": value for name, value in DTYPES.items()},
    **{f"device.{name}": torch.device(name) for name in ("cpu", "cuda", "meta", "mps", "xpu", "hpu")},
    **{value_text(v): v for v in vars(torch).values() if isinstance(v, (torch.memory_format, torch.layout))},
}


def fail(reason: str, remedy: str) -> NoReturn:
    """Raises a `TextError` without a place."""
    raise TextError(reason, remedy=remedy)


class Scanner:
    """A line and a position in it."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Matches here and steps over the match; None leaves the position."""
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def take(self, sign: str) -> bool:
        """Steps over the sign if it stands here."""
        if not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        return True

    def expect(self, sign: str) -> None:
        """Steps over the sign, which must stand here."""
        if not self.take(sign):
            ahead = self.text[self.at : self.at + 20]
            fail(f"expected '{sign}' {f'before {ahead!r}' if ahead else 'at the end'}", "check brackets and commas")

    def string(self) -> str:
        """Steps over a text in double quotes."""
        match = self.match(_STRING)
        if match is None:
            fail(f"expected a text in quotes before '{self.text[self.at : self.at + 20]}'", 'write it as "…"')
        return unquote(match[0])

    def items(self, closing: str) -> Iterator[None]:
        """Yields at the start of every item of a list, and steps over commas and the closing bracket."""
        if self.take(closing):
            return
        yield
        while self.match(_SEPARATOR):
            yield
        self.expect(closing)


def unquote(text: str) -> str:
    """Returns a name: JSON where it stands in quotes."""
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        fail(f"{text} is not a text", "escape quotes, backslashes and control characters as JSON does")


def split(text: str, separator: str) -> list[str]:
    """Returns the parts between separators that stand in no bracket, stripped; separators of spaces may be repeated."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if depth < 0:
            break
        if sign == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    if depth != 0:
        fail(f"unbalanced brackets in '{text}'", "close every bracket that was opened")
    if not text.strip():
        return []
    return [part.strip() for part in parts if part or separator != " "]


def parse_value(scanner: Scanner, nodes: Mapping[str, fx.Node], depth: int = 0) -> Any:
    """Returns the argument at the scanner's position; steps over it."""
    if scanner.take("["):
        if depth == _DEEPEST_LIST:
            fail("lists are nested too deeply", f"nest at most {_DEEPEST_LIST}")
        return [parse_value(scanner, nodes, depth + 1) for _ in scanner.items("]")]
    if match := scanner.match(_NAME):
        if match[1] not in nodes:
            fail(f"%{match[1]} is not defined", "define it on a line above")
        return nodes[match[1]]
    if match := scanner.match(_SINGLETON):
        return _SINGLETONS[match[0]]
    if match := scanner.match(_NUMBER):
        return _number(match[0])
    if match := scanner.match(_COMPLEX):
        return complex(*map(_number, match.groups()))
    if match := scanner.match(_QUALIFIED):
        if match[0] not in _TORCH_VALUES:
            known = [name for name in _TORCH_VALUES if name.startswith(f"{match[1]}.")]
            fail(f"{match[0]} is unknown", f"choose one of {', '.join(known)}")
        return _TORCH_VALUES[match[0]]
    if scanner.text.startswith('"', scanner.at):
        return scanner.string()
    ahead = scanner.text[scanner.at : scanner.at + 20]
    fail(
        f"expected a value {f'before {ahead!r}' if ahead else 'at the end'}", 'write %name, a number, "text" or [1, 2]'
    )


def _number(text: str) -> int | float:
    if not text.removeprefix("-").isdigit():
        return float(text)
    try:
        return int(text)
    except ValueError:  # Python's limit on digits
        fail(f"the number {text[:10]}… has {len(text)} digits", "write a number that a tensor can hold")


def parse_layout(text: str, shape: Sequence[Size], axes: Mapping[str, int]) -> Layout:
    """Returns the inverse of `fxpar.text.printing.layout_text`.

    Args:
        text: `dp:I tp:S(1)`, or `-` for the empty layout.
        shape: the global shape of the value.
        axes: sizes of the plan's mesh axes.

    Raises:
        TextError: the text is no layout of that shape, or names an axis twice or one that is not in `axes`.
    """
    placements: dict[str, Placement] = {}
    seen = tuple(shape)
    for part in [] if text == "-" else split(text, " "):
        match = _AXIS.fullmatch(part)
        if match is None:
            fail(f"'{part}' is not a layout", "write axis:I, axis:R, axis:P, axis:V or axis:S(dim)")
        check_axis(match[1], axes)
        if match[1] in placements:
            fail(f"the axis {match[1]} has two layouts", "keep one")
        placements[match[1]] = placement(match[2], seen)
        if fits(placements[match[1]], seen, axes[match[1]]):
            seen = peel(seen, placements[match[1]], axes[match[1]])
    if not placements and text != "-":
        fail("a layout is missing", "write axis:I and so on, or - for none")
    return Layout.of(placements)


def placement(text: str, shape: Sequence[Size]) -> Placement:
    """Returns the inverse of `fxpar.text.printing.placement_text`."""
    if _LONG_NUMBER.search(text):
        fail(f"'{text[:20]}…' is not a layout of {shape_text(shape)}", "write I, R, P, V or S(dim)")
    return parse_placement(text, shape)


def check_axis(axis: str, axes: Collection[str]) -> None:
    """Refuses a mesh axis that the plan does not have."""
    if axis not in axes:
        fail(f"the plan has no mesh axis {axis}", f"name one of {', '.join(axes) or 'none: the plan is of one rank'}")


def _parse_tensor(text: str) -> TensorType:
    match = _TENSOR.fullmatch(text)
    if match is None:
        fail(f"'{text}' is not a tensor type", "write dtype[sizes], for example f32[b, 64]")
    if match[1] not in DTYPES:
        fail(f"the element type {match[1]} is unknown", f"choose one of {', '.join(DTYPES)}")
    shape = tuple(parse_size(size) for size in split(match[2], ","))
    if any(isinstance(size, int) and size < 0 for size in shape):
        fail(f"'{text}' has a negative size", "write sizes from 0 on")
    return TensorType(DTYPES[match[1]], shape)


def _parse_output(text: str, axes: Mapping[str, int]) -> tuple[TensorType | ScalarType, Layout | None]:
    """Returns one output: `f32[b, s, 64] tp:S(2)` or `b*s`."""
    tokens = split(text, " ")
    start = next((i for i, token in enumerate(tokens) if _AXIS.fullmatch(token)), len(tokens))
    if tokens and tokens[-1] == "-":
        start = len(tokens) - 1
    head, rest = " ".join(tokens[:start]), " ".join(tokens[start:])
    kind: TensorType | ScalarType
    kind = _parse_tensor(head) if "[" in head or "]" in head else ScalarType(parse_size(head))
    shape = kind.shape if isinstance(kind, TensorType) else ()
    return kind, parse_layout(rest, shape, axes) if rest else None


def parse_type(text: str, axes: Mapping[str, int]) -> tuple[ValueType, Layout | tuple[Layout, ...] | None]:
    """Returns type and layout of a node, several of them in parentheses."""
    if not text.startswith("("):
        return _parse_output(text, axes)
    if not text.endswith(")"):
        fail(f"unbalanced brackets in '{text}'", "close every bracket that was opened")
    pairs = [_parse_output(part, axes) for part in split(text[1:-1], ";")]
    kinds = tuple(kind for kind, _ in pairs if isinstance(kind, TensorType))
    layouts = tuple(layout for _, layout in pairs if layout is not None)
    if len(kinds) != len(pairs):
        fail("a number stands among several outputs", "write tensor types only, separated by ';'")
    if len(layouts) not in (0, len(kinds)):
        fail(f"{len(kinds)} outputs have {len(layouts)} layouts", "write a layout for each output or for none")
    return kinds, layouts or None


def resolve(name: str, operators: Mapping[str, GraphOperator]) -> Any:
    """Returns the operator of that name, from the tables or among those that torch has registered.

    Args:
        name: as the text writes it, without an axis.
        operators: what may stand after `fxpar.`, by name.
    """
    parts = name.split(".")
    if len(parts) == 3:
        try:
            overload = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
        except (AttributeError, RuntimeError):
            overload = None
        if isinstance(overload, torch._ops.OpOverload):
            return overload
    elif len(parts) == 2 and parts[0] == "fxpar" and parts[1] in operators:
        return operators[parts[1]]
    elif name in FUNCTIONS:
        return FUNCTIONS[name]
    remedy = "name a registered one with its overload (aten.add.Tensor) or fxpar's"
    if parts[0] == "fxpar":
        remedy += "; those of experts are there after import fxpar.experts.operators"
    fail(f"the operator {name} is unknown", remedy)


def check_call(name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses arguments that the operator does not take, or lacks."""
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema.arguments
        positional = [a.name for a in schema if not a.kwarg_only]
        passed = [*positional[: len(args)], *kwargs]
        required = {a.name for a in schema if not a.has_default_value()}
        fits = len(args) <= len(positional) and len(set(passed)) == len(passed)
        fits = fits and required <= set(passed) <= {a.name for a in schema}
    else:
        try:
            takes = target.signature if isinstance(target, GraphOperator) else inspect.signature(target)
            takes.bind(*args, **kwargs)
            fits = not (kwargs and name in FUNCTIONS)  # builtins name their arguments, but take none by name
        except TypeError:
            fits = False
        except ValueError:  # a builtin without a signature
            fits = not kwargs
    if target is operator.getitem and not (fits and isinstance(args[0], fx.Node)):
        fail(f"{name} does not take these arguments", "write operator.getitem(%node, 0)")
    if not fits:
        fail(f"{name} does not take these arguments", "compare them with the operator's signature")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON itself would take the last of two equal names in silence.
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        fail(f"the plan names '{twice}' twice", "name it once")
    return dict(pairs)


@lru_cache(maxsize=64)
def parse_plan(text: str) -> Plan:
    """Returns the plan of a header's line.

    Raises:
        TextError: the text is no mapping of options in JSON.
        PlanError: it holds a value that a plan refuses.
    """
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        fail("the plan is not JSON", 'write, for example, plan {"tp": 2}')
    known = [f.name for f in dataclasses.fields(Plan)]
    of_records = {
        f.name for kind in GROUPS.values() for f in dataclasses.fields(kind)
    }  # the plan says where they stand
    if not isinstance(values, dict) or not set(values) <= of_records.union(known):
        fail("the plan must be a mapping of its options", f"choose from {', '.join(known)}")
    return Plan.from_dict(values)
