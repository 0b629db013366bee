"""Sizes of a program as PyTorch's symbolic integers, and back.

Enters: the symbols of a program. Leaves: a symbolic integer for each of its sizes, and the size that one stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from fxpar.layout.symbols import Size, last_operation, simplify, symbol
from fxpar.program.program import TensorType
from fxpar.program.symbols import SIZE_FUNCTIONS, Counted, Symbol

# PyTorch's functions of sizes in those of sympy.
_FUNCTIONS: Mapping[Any, Callable[..., sympy.Expr]] = {
    FloorDiv: lambda a, b: sympy.floor(a / b),
    Mod: sympy.Mod,
    PythonMod: sympy.Mod,
    Max: sympy.Max,
    Min: sympy.Min,
}
_LEAST = 2
# Hints are so much larger than the example's sizes that no part of one, such as an expert's capacity, is taken for one
# that is broadcast; they decide nothing else. What small numbers leave of a size is what they leave of the example's.
_MORE = 27720


class Sizes:
    """Symbolic integers for the sizes of a program.

    Attributes:
        mode: in which tensors of such sizes are made.
    """

    def __init__(self, symbols: Sequence[Symbol | Counted]) -> None:
        self._shapes = ShapeEnv()
        # An operation that has no function of shapes is refused, and not run on values that are none.
        self.mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.mode.cache_enabled = False  # each call is traced once: to remember it takes longer than it saves
        self._ours: dict[sympy.Symbol, sympy.Symbol] = {}
        self._theirs: dict[sympy.Symbol, Any] = {}
        self._read: dict[sympy.Basic, Size] = {}
        # Of the tensors of all traces: guards are of all traces as well.
        self._dimensions: set[sympy.Expr] = set()
        for each in symbols:
            source, hint = ConstantSource(each.name), each.example + _MORE
            made = self._shapes.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            own = symbol(each.name)
            self._theirs[own] = self._shapes.create_symintnode(made, hint=hint, source=source)
            self._ours[made] = own

    def check(self, values: Iterable[Any]) -> None:
        """Refuses what a trace has assumed of sizes, but that its tensors have two elements or more along a dimension.

        That much PyTorch asks for to decide on strides, which no result depends on.

        Args:
            values: what the nodes of the trace give.

        Raises:
            ValueError: it holds for some sizes alone.
        """
        if self._shapes.replacements:
            fixed = ", ".join(f"{self._ours.get(s, s)} = {e}" for s, e in self._shapes.replacements.items())
            raise ValueError(f"it is traced for one size alone ({fixed})")
        if not self._shapes.guards:
            return
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        self._dimensions |= {self._expression(size) for shape in shapes for size in shape if not isinstance(size, int)}
        asked = [self._named(guard.expr) for guard in self._shapes.guards]
        assumed = [str(each) for each in asked if not _holds(each, self._dimensions)]
        if assumed:
            raise ValueError(f"it is traced for some sizes alone ({', '.join(assumed)})")

    def integer(self, size: Size) -> Any:
        """The size as PyTorch takes it: an int, or a symbolic integer."""
        if isinstance(size, int):
            return size
        return self._integer(size)

    def _integer(self, size: sympy.Expr) -> Any:
        if size.is_Integer:
            return int(size)
        if size.is_Symbol:
            return self._theirs[size]
        operation = last_operation(size)
        if operation is None:
            raise ValueError(f"no integer is made of the size {size}")
        name, *sizes = operation
        return SIZE_FUNCTIONS[name](*map(self.integer, sizes))

    def size(self, value: Any) -> Size:
        """What an integer of a trace stands for.

        Raises:
            ValueError: it is no arithmetic in the program's symbols.
        """
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression not in self._read:
            found = self._named(expression)
            unknown = found.free_symbols - set(self._ours.values())
            if unknown or any(type(part).__module__.startswith("torch") for part in found.atoms(sympy.Function)):
                raise ValueError(f"the size {found} is made of values")
            self._read[expression] = simplify(found)
        return self._read[expression]

    def _expression(self, value: Any) -> sympy.Expr:
        return self._named(value.node.expr)

    def _named(self, expression: sympy.Basic) -> Any:
        """An expression of PyTorch's in the program's symbols."""
        for theirs, ours in _FUNCTIONS.items():
            expression = expression.replace(theirs, ours)
        return expression.subs(self._ours)

    def tensor(self, kind: TensorType, requires_grad: bool) -> torch.Tensor:
        """A tensor of a type, without values. It is on no device, of which one kernel or another would be a guess."""
        with self.mode:
            made = torch.empty([self.integer(size) for size in kind.shape], dtype=kind.dtype, device="meta")
        return made.requires_grad_(requires_grad)

    def type_of(self, value: torch.Tensor) -> TensorType:
        """The type of a tensor of a trace."""
        return TensorType(value.dtype, tuple(self.size(size) for size in value.shape))


def _holds(asked: sympy.Basic, dimensions: Iterable[sympy.Expr]) -> bool:
    """Whether it is true wherever these dimensions, and all symbols, are two or more; False where that is not seen."""
    known = set(dimensions)
    # A product as one unknown is enough to see some things, and as a product of unknowns to see others.
    return _follows(asked, known) or _follows(asked, {size for size in known if size.is_Function})


def _follows(asked: sympy.Basic, dimensions: Iterable[sympy.Expr]) -> bool:
    least = dict.fromkeys(asked.free_symbols, _LEAST)
    for size in sorted(dimensions, key=sympy.count_ops, reverse=True):
        bound = _bound(size)
        if bound is not None:
            least.update({own: max(least.get(own, _LEAST), value) for own, value in bound.items()})
        else:
            asked = asked.subs(size, _from(_LEAST))
    asked = asked.subs({own: _from(value) for own, value in least.items()})
    if isinstance(asked, sympy.core.relational.Relational):
        asked = asked.func(sympy.expand(asked.lhs - asked.rhs), 0)
    return bool(asked == sympy.true)


def _bound(size: sympy.Expr) -> dict[sympy.Symbol, int] | None:
    """The least value of the symbol of a size, with which that is two; None where it is not linear in one symbol."""
    if len(size.free_symbols) != 1:
        return None
    (own,) = size.free_symbols
    slope = sympy.expand(size).coeff(own)
    rest = sympy.expand(size - slope * own)
    if not (slope.is_Integer and slope > 0 and rest.is_Integer):
        return None
    return {own: int(sympy.ceiling((_LEAST - rest) / slope))}


def _from(least: int) -> sympy.Expr:
    """Any integer that is not smaller."""
    return sympy.Dummy(integer=True, nonnegative=True) + least
