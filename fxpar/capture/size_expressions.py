"""Sizes that a program can write: polynomials in the sizes of its inputs.

Enters: sizes of a trace. Leaves: nothing, or a `SizeError` as soon as one is none; with fewer symbols it may be a
number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxpar.errors import CaptureError, TextError
from fxpar.ir.program import Program, describe, operands, tensor_type
from fxpar.layout.symbolic_sizes import Size, names, parse_size, product, shape_text, simplify, symbol
from fxpar.signatures.op_call import bind_arguments

# Rows that a model takes in groups: `rewards.view(-1, 4)` is right for multiples of four rows alone.

_REMAINDERS = ("Mod", "PythonMod")


def divisors(environment: Any) -> dict[str, int]:
    """Returns for each symbol that a trace assumed to be a multiple of a number that number.

    Args:
        environment: the sizes of the trace; None where none is symbolic.
    """
    divisors: dict[str, int] = {}
    for guard in environment.guards if environment is not None else ():
        for size, by in _divided(guard.expr):
            size = environment.replacements.get(size, size)
            if size.is_Symbol and by.is_Integer and by > 1:
                divisors[str(size)] = math.lcm(divisors.get(str(size), 1), int(by))
    return divisors


def _divided(relation: Any) -> Iterator[tuple[Any, Any]]:
    """A size and what divides it: `b % 4 == 0`, `b == 4 * (b // 4)`."""
    if not isinstance(relation, sympy.Eq):
        return
    for one, other in (relation.args, relation.args[::-1]):
        if other == 0 and type(one).__name__ in _REMAINDERS:
            yield one.args
        by, rest = other.as_coeff_Mul()
        if type(rest).__name__ == "FloorDiv" and rest.args == (one, by):
            yield one, by


def of_rows(shapes: Iterable[Any], values: Iterable[Any]) -> dict[str, int]:
    """Returns for each symbol that counts rows, the first dimension of inputs, how many rows are a group.

    A number that the author's code asks about and that no size is divided by is a branch, and no group.

    Args:
        shapes: of the inputs. Those that have as many rows in the example have one number of rows.
        values: of all nodes of the trace.
    """
    rows = [shape[0] for shape in shapes if len(shape) and isinstance(shape[0], torch.SymInt)]
    known = divisors(rows[0].node.shape_env) if rows else {}
    if known:
        divided = set(_divided_in(values))
        known = {name: by for name, by in known.items() if name in divided}
    groups: dict[int, int] = {}
    for size in rows:
        hint = int(size.node.hint)
        groups[hint] = math.lcm(groups.get(hint, 1), known.get(str(size.node.expr), 1))
    by_symbol = {str(size.node.expr): groups[int(size.node.hint)] for size in rows if size.node.expr.is_Symbol}
    return {name: group for name, group in by_symbol.items() if group > 1}


def _divided_in(values: Iterable[Any]) -> Iterator[str]:
    """Symbols that sizes of values are divided parts of."""
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and not size.node.expr.is_Symbol:
                parts = (part for part in sympy.preorder_traversal(size.node.expr) if type(part).__name__ == "FloorDiv")
                yield from (str(part.args[0]) for part in parts)


def in_groups(expression: Any, groups: Mapping[str, int]) -> Any:
    """Returns a size with each symbol of `groups` as that multiple of one of its name."""
    return expression.xreplace({s: groups[str(s)] * s for s in expression.free_symbols if str(s) in groups})


class SizeError(CaptureError):
    """A size that a program cannot write; with fewer symbols it could be a number."""


def written(size: torch.SymInt, groups: Mapping[str, int] = MappingProxyType({})) -> Size:
    """The size in the symbols of the trace.

    Args:
        groups: for symbols that are multiples of a number that number: `b // 4` is `b / 4` then.

    Raises:
        SizeError: it is no polynomial.
    """
    try:
        parsed = parse_size(str(in_groups(size.node.expr, groups)))
    except TextError:
        raise SizeError(
            f"the size {size.node.expr} is no polynomial in the inputs' sizes", remedy="reshape with explicit sizes"
        ) from None
    shares = {symbol(name): symbol(name) / groups[name] for name in names((parsed,)) & groups.keys()}
    return simplify(parsed.subs(shares)) if shares and not isinstance(parsed, int) else parsed


def check_views(program: Program) -> None:
    """Checks that views hold as many elements as what they are of, at all sizes.

    Raises:
        SizeError: an author's number (`reshape(48, 24)`) is that of one batch.
    """
    aten = torch.ops.aten
    for node in program.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            before, after, sizes = tensor_type(operands(node)[0]).shape, tensor_type(node).shape, node.args[1]
            assert isinstance(sizes, (list, tuple))
            # A number where the trace has found that sizes must make it so.
            fixed = any(isinstance(a, int) and a not in (-1, b) for a, b in zip(sizes, after, strict=True))
            if fixed or product(before) != product(after):
                raise SizeError(
                    f"a view of {shape_text(before)} with sizes written as numbers is right for one size alone",
                    where=describe(node),
                    remedy="take sizes from the inputs' shapes",
                )


def check_splits(program: Program) -> None:
    """Checks that tensors are split into as many parts at all sizes.

    Raises:
        SizeError: how many there are is that of one batch (`split(16)` of a size that varies).
    """
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.split.Tensor and isinstance(node.args[1], int):
            shape, dim = tensor_type(operands(node)[0]).shape, bind_arguments(node)["dim"]
            if not isinstance(shape[dim], int):
                raise SizeError(
                    f"a dimension of {shape[dim]} is split into parts of {node.args[1]}, whose number is that of one "
                    "size alone",
                    where=describe(node),
                    remedy="split it into a number of parts (chunk), or give batches of one size",
                )


class SizeChecker:
    """Checks sizes while they arise: a trace that is no use takes long where every size is one of many terms."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def check(self, result: Any) -> None:
        """Checks the shapes of what an operation gives.

        Raises:
            SizeError: one is no polynomial.
        """
        for value in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            for size in value.shape if isinstance(value, Tensor) else ():
                if isinstance(size, torch.SymInt) and size.node.expr not in self._known:
                    try:
                        written(size)
                    except SizeError:
                        written(size, divisors(size.node.shape_env))
                    self._known.add(size.node.expr)
