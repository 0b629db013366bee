"""Sizes of dimensions: integers, or polynomials in symbols such as `b` and `s`.

Enters: ints and sympy expressions. Leaves: exact arithmetic on them, their text and its parser.
No size is ever compared by value where a symbol is involved: `divide` answers only what holds for every value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import sympy

from fxpar.errors import TextError

Size: TypeAlias = int | sympy.Expr


@cache
def symbol(name: str) -> sympy.Symbol:
    """Returns the positive integer symbol of that name."""
    return sympy.Symbol(name, integer=True, positive=True)


def simplify(size: Size) -> Size:
    """Returns expanded form; a plain int where no symbol is left."""
    if isinstance(size, int):
        return size
    expanded = sympy.expand(size)
    return int(expanded) if expanded.is_Integer else expanded


def product(sizes: Iterable[Size]) -> Size:
    """Returns the product of sizes, 1 for none."""
    return _product(tuple(sizes))


@lru_cache(maxsize=65536)
def _product(sizes: tuple[Size, ...]) -> Size:
    result: Size = 1
    for size in sizes:
        result = result * size
    return simplify(result)


@lru_cache(maxsize=65536)
def divide(size: Size, by: Size) -> Size | None:
    """Returns `size / by` where that is an integer for every value of the symbols, else None."""
    if isinstance(size, int) and isinstance(by, int):
        return size // by if by != 0 and size % by == 0 else None
    quotient = sympy.cancel(sympy.sympify(size) / by)
    numerator, denominator = sympy.fraction(quotient)
    if denominator != 1:
        return None
    if not quotient.is_integer:
        return None
    return simplify(numerator)


def sign(size: Size) -> int | None:
    """Returns 1, 0 or -1 where the size has that sign for all values of the symbols, which are at least 1; else None.

    A size with terms of one sign alone has that sign.
    """
    if isinstance(size, int):
        return (size > 0) - (size < 0)
    expanded = sympy.expand(size)
    terms = expanded.as_coefficients_dict()
    if not expanded.is_polynomial():
        return None
    signs = {1 if coefficient > 0 else -1 for coefficient in terms.values() if coefficient != 0}
    return signs.pop() if len(signs) == 1 else None


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """Returns the size for given values of the symbols."""
    return size if isinstance(size, int) else _evaluate(size, tuple(values.items()))


@lru_cache(maxsize=65536)
def _evaluate(size: sympy.Expr, values: tuple[tuple[str, int], ...]) -> int:
    result = size.subs({symbol(name): value for name, value in values})
    if not result.is_Integer:
        missing = sorted(str(s) for s in result.free_symbols)
        raise ValueError(f"size {size} is not an integer: symbols without a value: {missing}")
    return int(result)


def names(sizes: Iterable[Size]) -> set[str]:
    """Returns names of the symbols that occur."""
    return {str(s) for size in sizes if not isinstance(size, int) for s in size.free_symbols}


_OPERATIONS: Mapping[type[sympy.Basic], str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Max: "max",
    sympy.Min: "min",
}


def last_operation(size: sympy.Expr) -> tuple[str, Size, Size] | None:
    """Returns the operation on two sizes whose result is `size`, a size that is neither a number nor a symbol.

    Returns:
        "add", "mul", "mod", "max", "min" or "floordiv", and what it is of; None for any other function.
    """
    if isinstance(size, (sympy.floor, sympy.ceiling)):
        numerator, denominator = sympy.fraction(sympy.together(size.args[0]))
        up = denominator - 1 if isinstance(size, sympy.ceiling) else 0
        return "floordiv", simplify(numerator + up), simplify(denominator)
    numerator, denominator = sympy.fraction(sympy.together(size))
    if denominator != 1:  # a size is an integer: nothing is left over
        return "floordiv", simplify(numerator), simplify(denominator)
    if isinstance(size, sympy.Pow) and size.exp.is_Integer:
        return "mul", simplify(size.base ** (size.exp - 1)), simplify(size.base)
    if isinstance(size, sympy.Mod):
        return "mod", simplify(size.args[0]), simplify(size.args[1])
    name = _OPERATIONS.get(size.func)
    if name is None:
        return None
    first, *rest = size.args
    return name, simplify(size.func(*rest)), simplify(first)


_BINARY: Mapping[type[ast.operator], Callable[[Size, Size], Size]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Pow: lambda a, b: a**b,
    ast.FloorDiv: lambda a, b: sympy.floor(sympy.sympify(a) / b),
    ast.Mod: lambda a, b: sympy.Mod(a, b),
    ast.Div: lambda a, b: sympy.sympify(a) / b,
}
_CALLS: Mapping[str, Callable[..., Size]] = {
    "Max": sympy.Max,
    "Min": sympy.Min,
    "floor": sympy.floor,
    "Mod": sympy.Mod,
    "ceiling": sympy.ceiling,
}

# Bounds on what is read, far above any real size: a text must not be able to exhaust stack, time or memory.
_LONGEST_TEXT, _LARGEST_EXPONENT, _MOST_TERMS = 400, 8, 256
# `1if`: Python's own reader would warn on stderr.
_MISJOINED = re.compile(r"\b\d+[A-Za-z_]")


@lru_cache(maxsize=65536)
def parse_size(text: str) -> Size:
    """Returns the inverse of `str` for a size. Only arithmetic is read: nothing in the text is executed.

    Raises:
        TextError: the text is no arithmetic in integers and symbols, or its value is no integer.
    """
    text = text.strip()
    if len(text) > _LONGEST_TEXT:
        raise _no_size(f"{text[:20]}…")
    if not text.isascii() or _MISJOINED.search(text):
        raise _no_size(text)
    try:
        tree = ast.parse(text, mode="eval").body
        if _terms(tree) > _MOST_TERMS or _power(tree) > _LARGEST_EXPONENT:
            raise _no_size(text)
        size = simplify(_read(tree, text))
    except (SyntaxError, ValueError, TypeError, ArithmeticError):
        raise _no_size(text) from None
    if not isinstance(size, int) and (size.is_integer is False or not size.is_finite):
        raise _no_size(text)
    return size


def _terms(node: ast.AST) -> int:
    """Returns how many terms the expanded form has at most."""
    parts = [_terms(child) for child in ast.iter_child_nodes(node)]
    if not isinstance(node, ast.BinOp):
        return max(parts, default=1)
    left, _, right = parts
    if isinstance(node.op, ast.Pow):
        exponent = node.right.value if isinstance(node.right, ast.Constant) else 0
        return left ** min(exponent, _LARGEST_EXPONENT) if isinstance(exponent, int) and left > 1 else 1
    return left + right if isinstance(node.op, (ast.Add, ast.Sub)) else left * right


def _power(node: ast.AST) -> int:
    """Returns the largest exponent, of powers of powers the product."""
    inner = max(map(_power, ast.iter_child_nodes(node)), default=1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant):
        return inner * max(int(node.right.value), 1)  # type: ignore[arg-type]
    return inner


def _no_size(text: str) -> TextError:
    return TextError(f"'{text}' is not a size", remedy="write an integer or arithmetic in symbols")


def _read(node: ast.expr, text: str) -> Size:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return symbol(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _read(node.left, text), _read(node.right, text)
        # A power of numbers, such as 9**9**9, may not fit into memory.
        if isinstance(node.op, ast.Pow) and (isinstance(left, int) or right not in range(_LARGEST_EXPONENT + 1)):
            raise _no_size(text)
        return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -1 * _read(node.operand, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS and not node.keywords:
        return _CALLS[node.func.id](*[_read(a, text) for a in node.args])
    raise _no_size(text)


def shape_text(shape: Sequence[Size]) -> str:
    """Returns `[b, s, 64]`."""
    return _shape_text(tuple(shape))


@lru_cache(maxsize=65536)
def _shape_text(shape: tuple[Size, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
