"""The derivative of one operation of PyTorch in a program: its traced backward as typed nodes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.errors import FxparError, InputError
from fxpar.ir.grad_flow import plain
from fxpar.ir.program import ScalarType, TensorType, describe, has_note, note, operands, output_types
from fxpar.ir.symbols import Condition, Counted, Symbol
from fxpar.rewrite.emit import BackwardEmitter
from fxpar.rewrite.forms import BY_ITEM, form_of
from fxpar.rewrite.symints import MORE, Assumed, SymbolicSizes
from fxpar.rewrite.traced_derivative import Derivative, Number, Operand, trace
from fxpar.signatures.autograd_functions import resolve_function

aten = torch.ops.aten

# Nothing is written to: a copy is what it is a copy of.
_SAME = frozenset({aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default})
# Of what the backward needs these are made again there: they cost nothing, and a saved view would keep two names.
_VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
    }
)
_LITERALS = frozenset({"device", "pin_memory", "layout"})
# What PyTorch raises where a derivative or a function of shapes is missing.
_FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, IndexError)


_REMEDY = "detach its operand, or write it with other operations"


# So many programs' symbols are remembered. A step is differentiated when it is made and when it is checked, and a
# model's programs for training, for evaluation and for other batches repeat the same calls.
_PROGRAMS = 8
# Of one call: a trace names all that it has assumed so far, and assumes more where that is known.
_MOST_CONDITIONS = 8


@dataclass(frozen=True)
class Needs:
    """What sizes must satisfy so that PyTorch differentiates.

    Attributes:
        conditions: that the example satisfies.
        numbers: the symbols in whose place numbers are to stand, by name, and for each the operation that needs it.
    """

    conditions: tuple[Condition, ...] = ()
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _DifferentiatedCall:
    """A call to be differentiated; see `trace`."""

    function: Any
    args: Any
    kwargs: Any
    operands: Sequence[Operand]
    tangents: Sequence[bool]

    def traced(self, sizes: SymbolicSizes) -> Derivative:
        """The derivative on such sizes."""
        return trace(self.function, self.args, self.kwargs, self.operands, self.tangents, sizes)

    @property
    def key(self) -> Any:
        """Equal for calls whose derivatives are; numbers are of the default type."""
        arguments = plain((self.args, self.kwargs), _unexpected)
        return self.function, torch.get_default_dtype(), arguments, tuple(self.tangents)


class _Traces:
    """Traces of calls on sizes in some symbols, which satisfy some conditions, each distinct one once."""

    def __init__(self, symbols: tuple[Symbol | Counted, ...], conditions: tuple[Condition, ...]) -> None:
        self._symbols, self._conditions = symbols, conditions
        self._sizes: dict[tuple[int, bool], SymbolicSizes] = {}
        self._known: dict[Any, Derivative] = {}
        self._examples = {symbol.name: symbol.example for symbol in symbols}

    def of(self, call: _DifferentiatedCall) -> Derivative:
        """The derivative of a call; see `trace`."""
        key = call.key
        if key not in self._known:
            self._known[key] = self._made(call)
        return self._known[key]

    def _made(self, call: _DifferentiatedCall) -> Derivative:
        """As the first of the ways has it that has one; the first one's error where none has."""
        first: Exception | None = None
        for more in (MORE, 0) if self._conditions else (MORE,):
            for in_python in (False, True):
                try:
                    derivative = self._traced(call, more, in_python)
                except _FAILURES as error:
                    first = first or error
                    continue
                if not in_python or self._has_all(call, derivative):
                    return derivative
        assert first is not None
        raise first

    def _has_all(self, call: _DifferentiatedCall, derivative: Derivative) -> bool:
        """Whether there are as many gradients as where sizes are numbers: PyTorch may lose one in silence."""
        try:
            numbers = call.traced(SymbolicSizes(self._symbols, numbers=self._examples))
        except _FAILURES:
            return False
        pairs = ((numbers.gradients[index], gradient) for index, gradient in derivative.gradients.items())
        return all((one is None) == (other is None) for one, other in pairs)

    def _traced(self, call: _DifferentiatedCall, more: int, in_python: bool) -> Derivative:
        way = more, in_python
        if way not in self._sizes:
            self._sizes[way] = SymbolicSizes(self._symbols, self._conditions, more=more, in_python=in_python)
        try:
            return call.traced(self._sizes[way])
        except _FAILURES:
            # What failed may have left assumptions about sizes, in which those of other traces are written.
            del self._sizes[way]
            self._known.clear()
            raise


def _unexpected(node: fx.Node) -> Any:
    raise AssertionError(f"%{node.name} is neither a tensor's type nor a number")


_of_pytorch = lru_cache(_PROGRAMS)(_Traces)


class Derivatives:
    """Derivatives of a program's calls.

    Those of PyTorch's own operators outlive it. What an author's function computes is another thing tomorrow.
    """

    def __init__(self, symbols: Sequence[Symbol | Counted], conditions: Sequence[Condition] = ()) -> None:
        self._symbols, self._conditions = tuple(symbols), tuple(conditions)
        self._of_pytorch = _of_pytorch(self._symbols, self._conditions)
        self._of_others = _Traces(self._symbols, self._conditions)

    def of(self, node: fx.Node, args: Any, kwargs: Any, needed: Sequence[bool], tangents: Sequence[bool]) -> Derivative:
        """The derivative of a call.

        Args:
            args: of the whole, nodes in place of values.
            kwargs: likewise.
            needed: for each of its tensors, in the order of `operands`, whether its gradient is needed.
            tangents: for each output, whether it has one.

        Raises:
            InputError: PyTorch has no derivative, or none for symbolic sizes.
        """
        call = self._call(node, args, kwargs, needed, tangents)
        try:
            return self._of(node, call)
        except _FAILURES as error:
            raise _not_differentiated(node, error) from error

    def has(self, node: fx.Node, args: Any, kwargs: Any, needed: Sequence[bool], tangents: Sequence[bool]) -> bool:
        """Whether `of` has an answer, or gives another reason than PyTorch's; arguments as there."""
        try:
            call = self._call(node, args, kwargs, needed, tangents)
        except (FxparError, AssertionError):
            return True
        try:
            self._of(node, call)
        except _FAILURES:
            return False
        return True

    def needs(self, node: fx.Node, args: Any, kwargs: Any, needed: Sequence[bool], tangents: Sequence[bool]) -> Needs:
        """What sizes must satisfy so that `of` has an answer; arguments as there.

        Conditions that the example satisfies come first, then numbers in place of symbols, as few as do, of what is no
        first dimension before what is one.

        Where PyTorch has no derivative for any sizes, nothing helps, and nothing is needed.
        """
        if self.has(node, args, kwargs, needed, tangents):
            return Needs()
        call = self._call(node, args, kwargs, needed, tangents)
        return self._conditions_of(call) or self._numbers_of(call, describe(node)) or Needs()

    def _of(self, node: fx.Node, call: _DifferentiatedCall) -> Derivative:
        is_own = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "fxpar")
        return (self._of_pytorch if is_own else self._of_others).of(call)

    def _conditions_of(self, call: _DifferentiatedCall) -> Needs | None:
        examples = {symbol.name: symbol.example for symbol in self._symbols if isinstance(symbol, Symbol)}
        for more in (MORE, 0):
            known = self._conditions
            for _ in range(_MOST_CONDITIONS):
                try:
                    call.traced(SymbolicSizes(self._symbols, known, more=more))
                except Assumed as error:
                    new = [condition for condition in error.conditions if condition not in known]
                    if not new or not all(condition.holds(examples) for condition in new):
                        break
                    known = (*known, *new)
                except _FAILURES:
                    break
                else:
                    return Needs(known[len(self._conditions) :])
        return None

    def _numbers_of(self, call: _DifferentiatedCall, place: str) -> Needs | None:
        fixed = [symbol for symbol in self._symbols if isinstance(symbol, Symbol)]
        sets = [some for count in range(1, len(fixed) + 1) for some in combinations(fixed, count)]
        for some in sorted(sets, key=lambda some: (any(symbol.dim == 0 for symbol in some), len(some))):
            numbers = {symbol.name: symbol.example for symbol in some}
            for more in (MORE, 0):
                try:
                    call.traced(SymbolicSizes(self._symbols, self._conditions, numbers, more))
                except Assumed as error:
                    if not error.conditions:  # else they are what the program for these numbers needs
                        continue
                except _FAILURES:
                    continue
                return Needs(numbers=dict.fromkeys(numbers, place))
        return None

    def _call(
        self, node: fx.Node, args: Any, kwargs: Any, needed: Sequence[bool], tangents: Sequence[bool]
    ) -> _DifferentiatedCall:
        unique: dict[fx.Node, Operand] = {}
        for operand, flag in zip(operands(node), needed, strict=True):
            kind = note(operand).type
            if not isinstance(kind, TensorType):
                raise InputError(
                    f"takes several tensors as one, %{operand.name}", where=describe(node), remedy="take them apart"
                )
            unique.setdefault(operand, Operand(len(unique), kind, flag))

        def value(item: Any) -> Any:
            if item in unique:
                return unique[item]
            kind = note(item).type
            assert isinstance(kind, ScalarType), f"%{item.name} is neither a tensor nor a number"
            return kind.value if isinstance(kind.value, int) else Number(kind.value)

        function: Any = node.target
        if not isinstance(function, torch._ops.OpOverload):
            function = resolve_function(str(kwargs["path"])).apply
            kwargs = {name: item for name, item in kwargs.items() if name != "path"}
        positional, named = map_arg((tuple(args), dict(kwargs)), value)
        return _DifferentiatedCall(function, positional, named, list(unique.values()), tangents)


def _not_differentiated(node: fx.Node, error: BaseException) -> InputError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return InputError(
        f"PyTorch does not differentiate it on symbolic shapes: {reason}",
        where=describe(node),
        remedy="detach its operand, or write it with other operations",
    )


class Derived:
    """One call's derivative, put into a program.

    Args:
        node: the call.
        derivative: its trace.
        outputs: nodes of its results, in the order of the trace's; None for those that nothing uses.
        tangents: gradients of those results that have one.
    """

    def __init__(
        self,
        emit: BackwardEmitter,
        node: fx.Node,
        derivative: Derivative,
        outputs: Sequence[fx.Node | None],
        tangents: Sequence[fx.Node],
    ) -> None:
        self.emit, self.node, self.derivative, self.like = emit, node, derivative, note(node)
        self.sources = list(dict.fromkeys(operands(node)))
        self.env: dict[fx.Node, Any] = dict(zip(derivative.tensors, self.sources, strict=True))
        self.env.update(zip(derivative.tangents, tangents, strict=True))
        for traced, output in zip(derivative.outputs, outputs, strict=True):
            if traced is not None and output is not None:
                self.env[origin_of(traced)] = output
        self.is_decomposed = False
        self._shapes = [*self.sources, *(output for output in outputs if output is not None)]

    def saved(self) -> list[fx.Node]:
        """Values of the traced forward that the backward reads, and that the program lacks."""
        saved: dict[fx.Node, None] = {}
        for traced in self.derivative.needed:
            for read in traced.all_input_nodes:
                origin = origin_of(read)
                if origin in self.derivative.forward and not self._is_at_hand(origin):
                    saved[origin] = None
        return list(saved)

    def _is_at_hand(self, traced: fx.Node) -> bool:
        """Whether a value is there, or a view of what is."""
        traced = origin_of(traced)
        if traced in self.env or not isinstance(traced.meta.get("val"), Tensor) or traced.op == "get_attr":
            return True
        return traced.target in _VIEWS and all(self._is_at_hand(read) for read in traced.all_input_nodes)

    def gradients(self) -> dict[fx.Node, fx.Node]:
        """The gradient of each operand that has one; nodes of the backward are made."""
        for traced in self.derivative.needed:
            is_value = isinstance(traced.meta.get("val"), (Tensor, tuple, list))
            if origin_of(traced) is traced and is_value and traced.target not in BY_ITEM:
                self.value(traced)
        ends = self.derivative.gradients.items()
        return {self.sources[index]: self.value(traced) for index, traced in ends if traced is not None}

    def value(self, traced: fx.Node) -> Any:
        """What stands for a traced value in the program; nodes of the backward are made."""
        traced = origin_of(traced)
        if traced not in self.env:
            self.env[traced] = self._number(traced) if _is_number(traced) else self._emitted(traced)
        return self.env[traced]

    def _number(self, traced: fx.Node) -> Any:
        value = traced.meta["val"]
        if isinstance(value, (torch.SymFloat, float)):
            raise InputError("its derivative computes a number of sizes", where=describe(self.node), remedy=_REMEDY)
        return self.emit.number(self.derivative.sizes.size(value))

    def _emitted(self, traced: fx.Node) -> fx.Node:
        if traced.op == "get_attr":
            return self._constant(getattr(self.derivative.module, str(traced.target)))
        special = form_of(traced)
        emitted = special(self, traced) if special is not None else None
        if emitted is not None:
            return emitted
        args, kwargs = self.arguments(traced)
        return self.call(traced.target, args, kwargs, self.kind(traced))

    def arguments(self, traced: fx.Node) -> tuple[Any, dict[str, Any]]:
        """A traced call's arguments in the program."""
        args, kwargs = map_arg((traced.args, traced.kwargs), self.value)
        return args, {name: value for name, value in kwargs.items() if name not in _LITERALS}

    def kind(self, traced: fx.Node) -> Any:
        """Type of a traced value."""
        return self.derivative.type_of(traced)

    def call(self, target: Any, args: Sequence[Any], kwargs: Any, kind: Any) -> fx.Node:
        """A node of the backward."""
        return self.emit.call(target, args, kwargs, kind, self.like)

    def like_one(self, kind: TensorType) -> fx.Node | None:
        """A value of the forward that has this type."""
        return next((node for node in self._shapes if output_types(node) == (kind,)), None)

    def sizes(self, kind: TensorType) -> list[Any]:
        """The shape of a type as a call takes it."""
        return [self.emit.number(size) for size in kind.shape]

    def _constant(self, value: Tensor) -> fx.Node:
        if value.numel() != 1:
            raise InputError("its derivative has a constant tensor", where=describe(self.node), remedy=_REMEDY)
        kind = TensorType(value.dtype, tuple(value.shape))
        return self.call(aten.full.default, (list(value.shape), value.item()), {"dtype": value.dtype}, kind)

    def replaced(self) -> list[fx.Node | None]:
        """Puts the traced forward in place of the call, whose results are then those that are returned."""
        needed = {node for node in (*self.derivative.outputs, *self.saved()) if node is not None}
        for node in reversed(self.derivative.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        count = 0
        for traced in self.derivative.graph.nodes:
            is_made = traced in self.derivative.forward and traced in needed and traced.op == "call_function"
            if not is_made or origin_of(traced) is not traced or _is_number(traced):
                continue
            if traced not in self.derivative.tensors:
                args, kwargs = self.arguments(traced)
                self.env[traced] = self.emit.forward(traced.target, args, kwargs, self.kind(traced), self.node)
                count += traced.target is not operator.getitem
        self.is_decomposed = count > 1
        return [None if traced is None else self.env[origin_of(traced)] for traced in self.derivative.outputs]


def _is_number(traced: fx.Node) -> bool:
    return isinstance(traced.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat))


def origin_of(traced: fx.Node) -> fx.Node:
    """What a traced value is the same as."""
    while traced.target in _SAME:
        traced = traced.all_input_nodes[0]
    return traced


def items_of(node: fx.Node) -> dict[int, fx.Node]:
    """The nodes that take a result of several."""
    return {int(user.args[1]): user for user in node.users if user.target is operator.getitem and has_note(user)}  # type: ignore[arg-type]
