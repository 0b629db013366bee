"""Sizes of a program as PyTorch's symbolic integers, and back.

Enters: the symbols of a program, and the conditions that their sizes satisfy. Leaves: a symbolic integer for each of
its sizes, and the size that one stands for; or what a trace has assumed of sizes besides that.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from fxpar.errors import TextError
from fxpar.ir.program import TensorType
from fxpar.ir.symbols import SIZE_FUNCTIONS, Condition, Counted, Symbol, condition_of
from fxpar.layout.symbolic_sizes import Size, last_operation, simplify, symbol
from fxpar.torch_internals import FakeTensorMode, enable_python_dispatcher

# PyTorch's functions of sizes in those of sympy.
_FUNCTIONS: Mapping[Any, Callable[..., sympy.Expr]] = {
    FloorDiv: lambda a, b: sympy.floor(a / b),
    Mod: sympy.Mod,
    PythonMod: sympy.Mod,
    Max: sympy.Max,
    Min: sympy.Min,
}
_LEAST = 2
_NO_DERIVATIVE = ".*an autograd kernel was not registered"
# Hints are at first so much larger than the example's sizes that no part of one, such as an expert's capacity, is taken
# for one that is broadcast; they decide nothing else. What small numbers leave of a size is what they leave of the
# example's.
MORE = 27720


@dataclass(frozen=True)
class Number:
    """A symbolic number among the arguments of a call."""

    size: Size


class Assumed(ValueError):
    """A trace that is right for some sizes alone.

    Attributes:
        conditions: what it assumes; empty where it takes a size for a number, or what no condition says.
    """

    def __init__(self, text: str, conditions: Sequence[Condition] = ()) -> None:
        super().__init__(text)
        self.conditions = tuple(conditions)


class SymbolicSizes:
    """Symbolic integers for the sizes of a program.

    Attributes:
        mode: in which tensors of such sizes are made.

    Args:
        conditions: what is known of the sizes.
        numbers: sizes that are no symbols, by name.
        more: by how much hints are larger than the example's sizes. Where branches on sizes go another way so far from
            the example, 0: a trace then assumes more, of small sizes too.
        in_python: whether operations are what PyTorch writes of them in Python, where it does: some of what is written
            in C++ takes sizes for numbers.
    """

    def __init__(
        self,
        symbols: Sequence[Symbol | Counted],
        conditions: Sequence[Condition] = (),
        numbers: Mapping[str, int] | None = None,
        more: int = MORE,
        in_python: bool = False,
    ) -> None:
        self._shapes = ShapeEnv()
        self._conditions, self._in_python = conditions, in_python
        # An operation that has no function of shapes is refused, and not run on values that are none.
        self.mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.mode.cache_enabled = False  # each call is traced once: to remember it takes longer than it saves
        self._ours: dict[sympy.Symbol, sympy.Symbol] = {}
        self._theirs: dict[sympy.Symbol, Any] = {}
        self._read: dict[sympy.Basic, Size] = {}
        # Of the tensors of all traces: guards are of all traces as well.
        self._dimensions: set[sympy.Expr] = set()
        # Of what they ask that which is known to hold: with more dimensions it does too.
        self._sound: set[sympy.Basic] = set()
        for declared in symbols:
            ours = symbol(declared.name)
            if numbers and declared.name in numbers:
                self._theirs[ours] = numbers[declared.name]
                continue
            source, hint = ConstantSource(declared.name), declared.example + more
            theirs = self._shapes.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            self._theirs[ours] = self._shapes.create_symintnode(theirs, hint=hint, source=source)
            self._ours[theirs] = ours

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Traces operations on tensors of such sizes.

        Raises:
            NotImplementedError: one written in Python has no derivative, of which PyTorch only warns.
        """
        logger = logging.getLogger("torch._subclasses.fake_tensor")  # it prints what is an error here
        was, logger.disabled = logger.disabled, True
        try:
            with self._differentiable() if self._in_python else self.mode:
                yield
        finally:
            logger.disabled = was

    @contextlib.contextmanager
    def _differentiable(self) -> Iterator[None]:
        """Runs PyTorch's operations in Python; one that has no derivative there is an error."""
        always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)  # else it warns of each once in a process
        try:
            with warnings.catch_warnings(), enable_python_dispatcher(), self.mode:
                warnings.filterwarnings("error", message=_NO_DERIVATIVE)
                yield
        except UserWarning as warning:
            raise NotImplementedError(str(warning).split(":", 1)[0]) from warning
        finally:
            torch.set_warn_always(always)

    def check(self, values: Iterable[Any]) -> None:
        """Refuses what a trace has assumed of sizes, but that its tensors have two elements or more along a dimension.

        That much PyTorch asks for to decide on strides, which no result depends on.

        Args:
            values: what the nodes of the trace give.

        Raises:
            Assumed: it holds for some sizes alone.
        """
        if self._shapes.replacements:
            fixed = ", ".join(sorted(str(self._ours.get(s, s)) for s in self._shapes.replacements))
            raise Assumed(f"it takes a size for a number ({fixed})")
        if not self._shapes.guards:
            return
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        self._dimensions |= {self._expression(size) for shape in shapes for size in shape if not isinstance(size, int)}
        parts = dict.fromkeys(part for guard in self._shapes.guards for part in _parts(self._named(guard.expr)))
        assumed = [part for part in parts if part not in self._sound and not self._is_known(part)]
        self._sound |= parts.keys() - set(assumed)
        if assumed:
            text = f"it is traced for some sizes alone ({', '.join(map(str, assumed))})"
            raise Assumed(text, self._written(assumed))

    def _is_known(self, relation: sympy.Basic) -> bool:
        if _holds(relation, self._dimensions):
            return True
        known = {_normal(condition.expression) for condition in self._conditions}
        if _normal(relation) in known:
            return True
        # Equal sizes of another form; and bounds of one symbol.
        equal = {c.left: c.right for c in self._conditions if c.relation == "==" and not isinstance(c.left, int)}
        least = {unknown: value for c in self._conditions for unknown, value in _least(c).items()}
        return _holds(relation.subs(equal), self._dimensions, least)

    def _written(self, assumed: Iterable[sympy.Basic]) -> list[Condition]:
        """Returns the assumptions as conditions; none where one has no text form, or speaks of what values decide."""
        ours, conditions = set(self._ours.values()), []
        for relation in assumed:
            if not isinstance(relation, sympy.core.relational.Relational) or not relation.free_symbols <= ours:
                return []
            try:
                conditions.append(condition_of(relation))
            except TextError:
                return []
        return conditions

    def integer(self, size: Size) -> Any:
        """Returns the size as PyTorch takes it: an int, or a symbolic integer."""
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
        """Returns what an integer of a trace stands for.

        Raises:
            ValueError: it is no arithmetic in the program's symbols.
        """
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression not in self._read:
            renamed = self._named(expression)
            unknown = renamed.free_symbols - set(self._ours.values())
            if unknown or any(type(part).__module__.startswith("torch") for part in renamed.atoms(sympy.Function)):
                raise ValueError(f"the size {renamed} is made of values")
            self._read[expression] = simplify(renamed)
        return self._read[expression]

    def _expression(self, value: Any) -> sympy.Expr:
        return self._named(value.node.expr)

    def _named(self, expression: sympy.Basic) -> Any:
        """Returns an expression of PyTorch's in the program's symbols."""
        for theirs, ours in _FUNCTIONS.items():
            expression = expression.replace(theirs, ours)
        return expression.subs(self._ours)

    def tensor(self, kind: TensorType, requires_grad: bool) -> torch.Tensor:
        """Returns a tensor of a type, without values, on no device: one would be a guess at a kernel."""
        with self.mode:
            tensor = torch.empty([self.integer(size) for size in kind.shape], dtype=kind.dtype, device="meta")
        return tensor.requires_grad_(requires_grad)

    def type_of(self, value: torch.Tensor) -> TensorType:
        """Returns the type of a tensor of a trace."""
        return TensorType(value.dtype, tuple(self.size(size) for size in value.shape))


def _holds(
    relation: sympy.Basic, dimensions: Iterable[sympy.Expr], least: Mapping[sympy.Symbol, int] | None = None
) -> bool:
    """Returns whether it is seen to be true wherever these dimensions, and all symbols, are two or more.

    Args:
        least: of symbols that are larger.
    """
    known = set(dimensions)
    # A product as one unknown is enough to see some things, and as a product of unknowns to see others.
    return any(
        _follows(relation, sizes, least or {}) for sizes in (known, {size for size in known if size.is_Function})
    )


def _follows(relation: sympy.Basic, dimensions: Iterable[sympy.Expr], bounds: Mapping[sympy.Symbol, int]) -> bool:
    least = {unknown: max(_LEAST, bounds.get(unknown, _LEAST)) for unknown in relation.free_symbols}
    for size in sorted(dimensions, key=sympy.count_ops, reverse=True):
        bound = _bound(size)
        if bound is not None:
            least.update({unknown: max(least.get(unknown, _LEAST), value) for unknown, value in bound.items()})
        else:
            relation = relation.subs(size, _from(_LEAST))
    relation = relation.subs({unknown: _from(value) for unknown, value in least.items()})
    if isinstance(relation, sympy.core.relational.Relational):
        relation = relation.func(sympy.expand(relation.lhs - relation.rhs), 0)
    return bool(relation == sympy.true)


def _bound(size: sympy.Expr) -> dict[sympy.Symbol, int] | None:
    """Returns the least value of a size's symbol with which it is two; None where it is not linear in one."""
    if len(size.free_symbols) != 1:
        return None
    (unknown,) = size.free_symbols
    slope = sympy.expand(size).coeff(unknown)
    rest = sympy.expand(size - slope * unknown)
    if not (slope.is_Integer and slope > 0 and rest.is_Integer):
        return None
    return {unknown: int(sympy.ceiling((_LEAST - rest) / slope))}


def _from(least: int) -> sympy.Expr:
    """Returns any integer that is not smaller."""
    return sympy.Dummy(integer=True, nonnegative=True) + least


def _parts(guard: sympy.Basic) -> Sequence[sympy.Basic]:
    """Returns what is to hold, one by one."""
    return [part for operand in guard.args for part in _parts(operand)] if isinstance(guard, sympy.And) else [guard]


def _normal(relation: sympy.Basic) -> sympy.Basic:
    """Returns one form of a relation and of what it says turned round."""
    if not isinstance(relation, sympy.core.relational.Relational):
        return relation
    relation = relation.func(sympy.expand(relation.lhs - relation.rhs), 0)
    return relation.canonical if isinstance(relation, sympy.core.relational.Relational) else relation


def _least(condition: Condition) -> dict[sympy.Symbol, int]:
    """Returns the least value of a symbol that a condition bounds."""
    relation = condition.expression
    if not isinstance(relation, (sympy.Ge, sympy.Gt)) or not relation.lhs.is_Symbol or not relation.rhs.is_Integer:
        return {}
    return {relation.lhs: int(relation.rhs) + isinstance(relation, sympy.Gt)}
