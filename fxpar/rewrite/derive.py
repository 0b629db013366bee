"""Derivatives of a program's calls, as autograd computes them on global shapes.

Autograd's formulas are torch's own; none is written here. A call is traced once for its operator, numbers and types:
equal layers repeat them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg

from fxpar.errors import FxparError, InputError
from fxpar.ir.grad_flow import plain
from fxpar.ir.program import ScalarType, TensorType, describe, note, operands
from fxpar.ir.symbols import Condition, Counted, Symbol
from fxpar.rewrite.composed import COMPOSED
from fxpar.rewrite.symints import MORE, Assumed, Number, SymbolicSizes
from fxpar.signatures.autograd_functions import resolve_function
from fxpar.torch_internals import get_decompositions, without_modules

aten = torch.ops.aten

# Of which PyTorch's function of shapes takes no symbolic sizes.
_DECOMPOSED: Any = get_decompositions([aten.baddbmm, aten.addmm, aten.addbmm, aten.addmv, aten.addr, aten.lerp])

# What PyTorch raises where a derivative or a function of shapes is missing.
_FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, IndexError)

# So many programs' symbols are remembered. A step is differentiated when it is made and when it is checked, and a
# model's programs for training, for evaluation and for other batches repeat the same calls.
_PROGRAMS = 8
# Of one call: a trace names all that it has assumed so far, and assumes more where that is known.
_MOST_CONDITIONS = 8


@dataclass(frozen=True)
class Operand:
    """A tensor argument of a call.

    Attributes:
        index: which of the call's tensors it is.
        kind: its type.
        differentiated: whether its gradient is wanted.
    """

    index: int
    kind: TensorType
    differentiated: bool


@dataclass(frozen=True)
class Derivative:
    """A traced call.

    Attributes:
        graph: placeholders are the call's tensors, then the gradients of its outputs.
        tensors: placeholders of the call's tensors.
        tangents: placeholders of the gradients of its outputs, those that were given.
        outputs: what the forward returns; None for what is no tensor.
        forward: nodes of the forward.
        gradients: by index of the operand, None where there is none.
        sizes: reads sizes off the values that nodes have under `meta["val"]`.
    """

    graph: fx.Graph
    module: fx.GraphModule
    tensors: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    forward: frozenset[fx.Node]
    gradients: Mapping[int, fx.Node | None]
    sizes: SymbolicSizes
    _types: dict[fx.Node, TensorType | tuple[TensorType, ...]] = field(default_factory=dict, repr=False)

    def type_of(self, node: fx.Node) -> Any:
        """Returns the type of a value of the trace, a tuple of several; each call that was traced once asks."""
        if node not in self._types:
            value = node.meta["val"]
            if isinstance(value, Tensor):
                self._types[node] = self.sizes.type_of(value)
            else:
                dtype = next(item.dtype for item in value if item is not None)
                absent = TensorType(dtype, (0,))  # a gradient that nobody asks for
                self._types[node] = tuple(absent if item is None else self.sizes.type_of(item) for item in value)
        return self._types[node]

    @cached_property
    def needed(self) -> tuple[fx.Node, ...]:
        """Returns nodes of the backward on which a gradient depends, in order."""
        needed: set[fx.Node] = {node for node in self.gradients.values() if node is not None}
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        backward = (node for node in self.graph.nodes if node.op == "call_function")
        return tuple(node for node in backward if node in needed and node not in self.forward)


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
    """A call to be differentiated.

    Attributes:
        function: of tensors and numbers.
        args: its arguments, `Operand` in place of tensors and `Number` of symbolic sizes, each tensor as often as it
            occurs.
        kwargs: likewise.
        operands: each once, in the order of their index.
        tangents: for each output whether it has a gradient.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    operands: Sequence[Operand]
    tangents: Sequence[bool]

    @property
    def key(self) -> Any:
        """Returns what is equal for calls whose derivatives are; numbers are of the default type."""
        arguments = plain((self.args, self.kwargs), _unexpected)
        return self.function, torch.get_default_dtype(), arguments, tuple(self.tangents)

    def traced(self, sizes: SymbolicSizes) -> Derivative:
        """Traces forward and backward of the call on such sizes.

        Raises:
            RuntimeError, TypeError, ValueError, NotImplementedError: PyTorch cannot differentiate it on symbolic
                shapes.
        """
        inputs = [sizes.tensor(operand.kind, False) for operand in self.operands]
        numbers = [leaf.size for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Number)]
        integers = [sizes.integer(size) for size in numbers]
        forward: set[str] = set()
        upstream: list[str] = []

        def run(tensors: list[Tensor], integers: list[Any]) -> Any:
            return self._run(tensors, iter(integers), forward, upstream)

        # What an author wrote may call modules.
        apart = without_modules() if _is_own(self.function) else contextlib.nullcontext()
        with apart, sizes.tracing(), torch.enable_grad():
            module = make_fx(run, decomposition_table=_DECOMPOSED)(inputs, integers)
        graph = module.graph
        sizes.check(leaf for node in graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
        _functional(graph, forward)
        _conjugate_numbers(graph)
        incoming = tuple(_as_placeholder(graph, name) for name in upstream)
        nodes = list(graph.nodes)
        places = [node for node in nodes if node.op == "placeholder" and node not in incoming]
        (returned,) = next(node for node in nodes if node.op == "output").args
        results, gradients = returned[: len(self.tangents)], returned[len(self.tangents) :]
        return Derivative(
            graph,
            module,
            tuple(places[: len(inputs)]),
            incoming,
            tuple(results),
            frozenset(node for node in nodes if node.name in forward),
            dict(zip(self._differentiated, gradients, strict=True)),
            sizes,
        )

    @property
    def _differentiated(self) -> list[int]:
        return [operand.index for operand in self.operands if operand.differentiated]

    def _run(self, tensors: list[Tensor], numbers: Iterator[Any], forward: set[str], upstream: list[str]) -> Any:
        """Runs forward and backward, inside of a tracer.

        Args:
            numbers: what stands for symbolic sizes, in order.
            forward: is filled with the names of the forward's nodes.
            upstream: is filled with the names of the nodes that stand for gradients of outputs.

        Returns:
            The outputs, None for what is no tensor, and the gradients.
        """
        graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        leaves = [
            t.detach().requires_grad_(operand.differentiated) for t, operand in zip(tensors, self.operands, strict=True)
        ]

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                return leaves[leaf.index]
            return next(numbers) if isinstance(leaf, Number) else leaf

        def tangent(output: Tensor) -> Tensor:
            with torch.no_grad():
                # A placeholder for the gradient: its node is looked up by name and made
                # an input later, so that nothing is filled.
                direction = torch.empty_like(output)
            upstream.append(next(iter(reversed(graph.nodes))).name)
            return direction

        positional, named = pytree.tree_map(value, (self.args, self.kwargs))
        with torch.enable_grad():
            result = COMPOSED.get(self.function, self.function)(*positional, **named)
            outputs = list(result) if isinstance(result, (list, tuple)) else [result]
            forward.update(node.name for node in graph.nodes)
            pairs = [(o, tangent(o)) for o, flag in zip(outputs, self.tangents, strict=True) if flag]
            # Some operations give values besides their results that PyTorch lets no gradient through.
            pairs = [(o, g) for o, g in pairs if o.requires_grad]
            sources = [leaves[i] for i in self._differentiated]
            gradients: list[Tensor | None] = [None for _ in sources]
            if pairs:
                ends, directions = zip(*pairs, strict=True)
                # Inside of make_fx the engine runs its formulas on fakes, and
                # the operators that they call become nodes.
                gradients = list(torch.autograd.grad(ends, sources, directions, allow_unused=True))
        return [o if isinstance(o, Tensor) else None for o in outputs], gradients


class _Traces:
    """Traces of calls on sizes in some symbols, which satisfy some conditions, each distinct one once."""

    def __init__(self, symbols: tuple[Symbol | Counted, ...], conditions: tuple[Condition, ...]) -> None:
        self._symbols, self._conditions = symbols, conditions
        self._sizes: dict[tuple[int, bool], SymbolicSizes] = {}
        self._known: dict[Any, Derivative] = {}
        self._examples = {symbol.name: symbol.example for symbol in symbols}

    def of(self, call: _DifferentiatedCall) -> Derivative:
        """Returns the derivative of a call."""
        key = call.key
        if key not in self._known:
            self._known[key] = self._made(call)
        return self._known[key]

    def _made(self, call: _DifferentiatedCall) -> Derivative:
        """Takes the derivative of the first way that has one; raises the first one's error where none has."""
        first: Exception | None = None
        for more in (MORE, 0) if self._conditions else (MORE,):
            # PyTorch's C++ first: it is what eager runs. Its Python forms follow,
            # as some C++ formulas take sizes for numbers.
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
        """Returns whether there are as many gradients as where sizes are numbers: PyTorch may lose one in silence."""
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


def _is_own(function: Any) -> bool:
    """Returns whether a function is an operator of PyTorch or of fxpar, and none of an author."""
    return isinstance(function, torch._ops.OpOverload) and function.namespace in ("aten", "fxpar")


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
        """Returns the derivative of a call.

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
            return self._of(call)
        except _FAILURES as error:
            raise _not_differentiated(node, error) from error

    def has(self, node: fx.Node, args: Any, kwargs: Any, needed: Sequence[bool], tangents: Sequence[bool]) -> bool:
        """Returns whether `of` has an answer, or gives another reason than PyTorch's; arguments as there."""
        try:
            call = self._call(node, args, kwargs, needed, tangents)
        except (FxparError, AssertionError):
            return True
        try:
            self._of(call)
        except _FAILURES:
            return False
        return True

    def needs(self, node: fx.Node, args: Any, kwargs: Any, needed: Sequence[bool], tangents: Sequence[bool]) -> Needs:
        """Returns what sizes must satisfy so that `of` has an answer; arguments as there.

        Conditions that the example satisfies come first, then numbers in place of symbols, as few as do, of what is no
        first dimension before what is one.

        Where PyTorch has no derivative for any sizes, nothing helps, and nothing is needed.
        """
        if self.has(node, args, kwargs, needed, tangents):
            return Needs()
        call = self._call(node, args, kwargs, needed, tangents)
        return self._conditions_of(call) or self._numbers_of(call, describe(node)) or Needs()

    def _of(self, call: _DifferentiatedCall) -> Derivative:
        return (self._of_pytorch if _is_own(call.function) else self._of_others).of(call)

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
        # Rows last: data ranks cannot share out a number of rows.
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


def _as_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Returns a placeholder for a value that was made to have its shape alone."""
    with graph.inserting_before(next(iter(graph.nodes))):
        place = graph.placeholder(f"{name}_given")
    for node in [node for node in graph.nodes if node.name == name]:
        place.meta = dict(node.meta)
        node.replace_all_uses_with(place)
        graph.erase_node(node)
    return place


def _functional(graph: fx.Graph, forward: set[str]) -> None:
    """Replaces operations in place by those that give a new tensor; what is read later reads that.

    Autograd's formulas and PyTorch's composite operators write into tensors that they have just made.

    Args:
        forward: names of the nodes of the forward; those that are made are added.

    Raises:
        NotImplementedError: there is no such operation, or what is written to is seen through a view.
    """
    for node in list(graph.nodes):
        target = node.target
        if target is aten._unsafe_view.default:
            node.target = aten.view.default
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        written = node.args[0]
        functional = _functional_form(target)
        if functional is None or any(_is_view(user) for user in written.users):
            raise NotImplementedError(f"{target} writes in place")
        node.target = functional
        later = set()
        at = node.next
        while at.op != "root":
            later.add(at)
            at = at.next
        # Only what comes later: earlier readers had the old values, which the functional form leaves as they are.
        written.replace_all_uses_with(node, lambda user, later=later: user in later)
        _write_through(graph, written, node, later, forward)


# What a tensor is whose part has other values, by the view that takes the part.
_SCATTERS: Mapping[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


def _write_through(
    graph: fx.Graph, view: fx.Node, value: fx.Node | None, later: set[fx.Node], forward: set[str]
) -> None:
    """Gives what reads the tensor of a view later the view's new values.

    Args:
        value: that in place of the view.
        forward: names of the nodes of the forward.

    Raises:
        NotImplementedError: it is read, and the view is no part of it that can be written.
    """
    while _is_view(view):
        base = view.all_input_nodes[0]
        if any(user in later for user in base.users):
            scatter = _SCATTERS.get(view.target)
            if scatter is None or value is None:
                raise NotImplementedError(f"writes in place through {view.target}")
            with graph.inserting_after(value):
                new = graph.call_function(scatter, (base, value, *view.args[1:]), dict(view.kwargs))
            new.meta = dict(base.meta)
            forward |= {new.name} if value.name in forward else set()
            base.replace_all_uses_with(new, lambda user: user in later)
            value = new
        else:
            value = None
        view = base


def _conjugate_numbers(graph: fx.Graph) -> None:
    """Conjugates complex factors, which are tensors to autograd and numbers in the trace."""
    numbers: dict[fx.Node, complex] = {}
    for node in graph.find_nodes(op="call_function", target=aten._conj.default):
        if isinstance(node.args[0], complex):
            numbers[node] = node.args[0].conjugate()

    def value(arg: fx.Node) -> Any:
        return numbers.get(arg, arg)

    for user in [user for node in numbers for user in node.users]:
        user.args = map_arg(user.args, value)
    for node in numbers:
        graph.erase_node(node)


def _functional_form(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Returns the operation that gives a new tensor of the same arguments; its overload may have another name."""
    name = target._schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    arguments = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for overload in packet.overloads():
        form: torch._ops.OpOverload = getattr(packet, overload)
        if [(argument.name, str(argument.type)) for argument in form._schema.arguments] == arguments:
            return form
    return None


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.is_view
