"""Sizes that a program can write, polynomials in the sizes of its inputs, and floating numbers computed of them.

Enters: sizes of a trace, or a converted program. Leaves: nothing or the program with typed numbers, or a `SizeError` as
soon as there is none; with fewer symbols it may be a number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fxpar.errors import CaptureError, TextError
from fxpar.ir.program import (
    Program,
    ScalarType,
    TensorType,
    describe,
    is_tensor,
    note,
    operands,
    set_note,
    tensor_type,
)
from fxpar.layout.symbolic_sizes import Size, names, parse_size, product, shape_text, simplify, symbol
from fxpar.ops.small_operators import item
from fxpar.signatures.op_call import bind_arguments

aten = torch.ops.aten

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
    """Yields a size and what divides it: `b % 4 == 0`, `b == 4 * (b // 4)`."""
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
    """Yields symbols that sizes of values are divided parts of."""
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
    """Returns the size in the symbols of the trace.

    Args:
        groups: for symbols that are multiples of a number that number: `b // 4` is `b / 4` then.

    Raises:
        SizeError: it is no polynomial.
    """
    try:
        parsed = parse_size(str(in_groups(size.node.expr, groups)))
    except TextError:
        raise SizeError(
            f"the size {size.node.expr} is not a polynomial in the inputs' sizes", remedy="reshape with explicit sizes"
        ) from None
    shares = {symbol(name): symbol(name) / groups[name] for name in names((parsed,)) & groups.keys()}
    return simplify(parsed.subs(shares)) if shares and not isinstance(parsed, int) else parsed


def check_views(program: Program) -> None:
    """Checks that views hold as many elements as what they are of, at all sizes.

    Raises:
        SizeError: an author's number (`reshape(48, 24)`) is that of one batch.
    """
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
        if node.target is aten.split.Tensor and isinstance(node.args[1], int):
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


# What Python computes of sizes (`1 / b`, `s ** -0.5`) has no type in a trace. It becomes an f64[] tensor, and each
# operation that takes it the one that takes a tensor.
#
# Python computes in double precision, and a number leaves the element type of the tensor that it meets as it is.
# Tensors without dimensions would raise that of others without dimensions: they are cast before they meet. They hold
# sizes of the whole, as every size in a program does, and where data ranks share the rows out `divide_batch` counts
# these.

_NUMBER = TensorType(torch.float64, ())
# What Python computes, the same of two tensors, and of a tensor and a number where there is such.
_BINARY: Mapping[Any, tuple[Any, Any]] = {
    operator.add: (aten.add.Tensor, aten.add.Tensor),
    operator.sub: (aten.sub.Tensor, aten.sub.Tensor),
    operator.mul: (aten.mul.Tensor, aten.mul.Tensor),
    operator.truediv: (aten.div.Tensor, aten.div.Tensor),
    operator.pow: (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar),
    operator.mod: (aten.remainder.Tensor, aten.remainder.Scalar),
    torch.sym_max: (aten.maximum.default, None),
    torch.sym_min: (aten.minimum.default, None),
}
# Which reads a value of a tensor on the host.
_READ = frozenset({aten.item.default, aten._local_scalar_dense.default})
_COMMUTING = frozenset({operator.add, operator.mul})
_UNARY: Mapping[Any, Any] = {
    operator.neg: aten.neg.default,
    operator.abs: aten.abs.default,
    torch.sym_sqrt: aten.sqrt.default,
}
# Operations of a tensor and a number, and of two tensors.
_ARITHMETIC: Mapping[Any, Any] = {
    **{packet.Tensor: packet.Tensor for packet in (aten.add, aten.sub, aten.mul, aten.div)},
    **{packet.Scalar: packet.Tensor for packet in (aten.add, aten.sub, aten.mul, aten.div, aten.rsub)},
    aten.div.Tensor_mode: aten.div.Tensor_mode,
    aten.div.Scalar_mode: aten.div.Tensor_mode,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.fmod.Scalar: aten.fmod.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
}
_COMPARISONS: Mapping[Any, Any] = {
    packet.Scalar: packet.Tensor for packet in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
}
# Operations that take some of their values from numbers, the same with tensors, and the names of these numbers.
_CHOOSING: Mapping[Any, tuple[Any, tuple[str, ...]]] = {
    aten.masked_fill.Scalar: (aten.masked_fill.Tensor, ("value",)),
    aten.where.ScalarOther: (aten.where.self, ("other",)),
    aten.where.ScalarSelf: (aten.where.self, ("self",)),
    aten.where.Scalar: (aten.where.self, ("self", "other")),
    aten.clamp.default: (aten.clamp.Tensor, ("min", "max")),
    aten.clamp_min.default: (aten.clamp.Tensor, ("min",)),
    aten.clamp_max.default: (aten.clamp.Tensor, ("max",)),
}
# Of which every element is the number.
_FILLING: Mapping[Any, str] = {
    aten.full.default: "fill_value",
    aten.full_like.default: "fill_value",
    aten.new_full.default: "fill_value",
    aten.fill.Scalar: "value",
}
_CALCULATED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def floats_as_tensors(program: Program) -> None:
    """Rewrites the floating numbers that a program computes of sizes.

    Before::

        %b = aten.sym_size.int(%x, 0) : b
        %half = operator.truediv(%b, 2)
        %mean = aten.div.Tensor(%sum, %half) : f32[]

    After::

        %b = aten.sym_size.int(%x, 0) : b
        %half_size = aten.scalar_tensor.default(%b, dtype=f64) : f64[]
        %half = aten.div.Tensor(%half_size, 2) : f64[]
        %mean_number = aten._to_copy.default(%half, dtype=f32) : f32[]
        %mean = aten.div.Tensor(%sum, %mean_number) : f32[]

    Half precision is left where a number comes in, as in torch's kernels, which compute in float32.

    Args:
        program: is changed.

    Raises:
        SizeError: an operation takes such a number alone, or a size is computed of one.
    """
    floats = _Floats(program.graph)
    for node in list(program.graph.nodes):
        if node.op == "call_function":
            floats.see(node)
    for node in reversed(floats.numbers):
        if not node.users:
            program.graph.erase_node(node)


def _is_untyped(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_function" and note(value).type is None


class _Floats:
    """The numbers of a graph, and the tensors that stand for them.

    Attributes:
        numbers: the nodes that were numbers; only assertions, which `canonicalize` drops, use them still.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.numbers: list[fx.Node] = []
        self.tensors: dict[fx.Node, fx.Node] = {}
        self.sizes: dict[fx.Node, fx.Node] = {}

    def see(self, node: fx.Node) -> None:
        """Rewrites one operation; those before it are."""
        kind = note(node).type
        if kind is None and (node.target in (torch.sym_float, *_READ) or node.target in (*_BINARY, *_UNARY)):
            self.numbers.append(node)
            self.tensors[node] = self._computed(node)
        elif kind is not None and node.users and any(_is_untyped(x) for x in node.all_input_nodes):
            self._take(node, kind)

    def call(self, node: fx.Node, suffix: str, target: Any, args: tuple[Any, ...], kind: TensorType, **kw: Any) -> Any:
        """Adds an operation in front of a node, with its place."""
        with self.graph.inserting_before(node):
            new = self.graph.create_node("call_function", target, args, kw, name=f"{node.name}_{suffix}")
        return set_note(new, replace(note(node), type=kind))

    def made(self, node: fx.Node, suffix: str, value: Any, dtype: torch.dtype) -> fx.Node:
        """Returns a number as a tensor."""
        kind = TensorType(dtype, ())
        tensor: fx.Node = self.call(node, suffix, aten.scalar_tensor.default, (value,), kind, dtype=dtype)
        return tensor

    def cast(self, node: fx.Node, x: fx.Node, dtype: torch.dtype, suffix: str = "number") -> fx.Node:
        """Returns a tensor in a type."""
        kind = TensorType(dtype, tensor_type(x).shape)
        if kind == tensor_type(x):
            return x
        tensor: fx.Node = self.call(node, suffix, aten._to_copy.default, (x,), kind, dtype=dtype)
        return tensor

    def number(self, node: fx.Node, value: Any, dtype: torch.dtype) -> fx.Node:
        """Returns what a node is given as a number, as a tensor of a type."""
        if value in self.tensors:
            return self.cast(node, self.tensors[value], dtype)
        return self.made(node, "number", value, dtype)

    def _operand(self, node: fx.Node, value: Any) -> Any:
        """Returns of what a number is computed: tensors, or a number that is written."""
        if value in self.tensors:
            return self.tensors[value]
        if not isinstance(value, fx.Node):
            return value
        if value not in self.sizes:
            self.sizes[value] = self.made(node, "size", value, torch.float64)
        return self.sizes[value]

    def _computed(self, node: fx.Node) -> fx.Node:
        if node.target in _READ:
            read = self.call(node, "value", item, tuple(node.args), _NUMBER)
            self._take_name(read, node)
            return read  # type: ignore[no-any-return]
        operands = [self._operand(node, value) for value in node.args]
        if node.target is torch.sym_float:
            computed: fx.Node = operands[0]
            return computed
        if node.target in _UNARY:
            target = _UNARY[node.target]
        else:
            target, with_number = _BINARY[node.target]
            if node.target in _COMMUTING and not isinstance(operands[0], fx.Node):
                operands.reverse()
            if with_number is not None and not isinstance(operands[1], fx.Node):
                target = with_number
            elif not all(isinstance(x, fx.Node) for x in operands):
                operands = [x if isinstance(x, fx.Node) else self.made(node, "of", x, torch.float64) for x in operands]
        computed = self.call(node, "value", target, tuple(operands), _NUMBER)
        self._take_name(computed, node)
        return computed

    def _take_name(self, new: fx.Node, old: fx.Node) -> None:
        name = old.name
        old.name = self.graph._graph_namespace.create_name(f"{name}_number", None)
        new.name = name

    def _take(self, node: fx.Node, kind: Any) -> None:
        """Gives the tensor to what takes a number.

        Raises:
            SizeError: nothing does.
        """
        taken: Callable[[fx.Node, dict[str, Any]], fx.Node] | None = None
        is_float = isinstance(kind, TensorType) and (kind.dtype.is_floating_point or kind.dtype in _REAL)
        if node.target in _ARITHMETIC and is_float:
            taken = self._calculated
        elif node.target in _COMPARISONS:
            taken = self._compared
        elif node.target in _CHOOSING and is_float:
            taken = self._chosen
        elif node.target in _FILLING and is_float:
            taken = self._filled
        elif node.target is aten.scalar_tensor.default and is_float:
            taken = self._written
        arguments = bind_arguments(node)
        if taken is None or any(_is_untyped(x) and x not in self.tensors for x in arguments.values()):
            number = next(x for x in node.all_input_nodes if _is_untyped(x))
            shown = f"%{self.tensors.get(number, number).name}, a floating number that depends on sizes"
            is_size = isinstance(kind, ScalarType)
            raise SizeError(
                f"is a size computed of {shown}" if is_size else f"takes {shown}, as no tensor",
                where=describe(node),
                remedy="compute sizes in integers (s // 2); multiply or add numbers where they are no arguments",
            )
        new = taken(node, arguments)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self._take_name(new, node)
        if not node.users:
            self.graph.erase_node(node)

    def _calculated(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
        kind, alpha = tensor_type(node), arguments.get("alpha", 1)
        dtype = _CALCULATED.get(kind.dtype, kind.dtype)
        values = [arguments["self"], arguments["exponent" if "exponent" in arguments else "other"]]
        values = [self._value(node, value, dtype) for value in values]
        more = {"rounding_mode": arguments["rounding_mode"]} if "rounding_mode" in arguments else {}
        if alpha in self.tensors:
            scale, scaled = self.number(node, alpha, _REAL.get(dtype, dtype)), values[1]
            values[1] = self.call(
                node, "scaled", aten.mul.Tensor, (scaled, scale), TensorType(dtype, tensor_type(scaled).shape)
            )
        elif alpha != 1:
            more["alpha"] = alpha
        target = _ARITHMETIC[node.target]
        new = self.call(node, "value", target, tuple(values), TensorType(dtype, kind.shape), **more)
        return self.cast(node, new, kind.dtype, "rounded")

    def _value(self, node: fx.Node, value: Any, dtype: torch.dtype) -> Any:
        """Returns an operand in the type in which the operation computes; integers stay next to floating numbers."""
        if value in self.tensors:
            return self.number(node, value, _REAL.get(dtype, dtype))
        if not isinstance(value, fx.Node) or not is_tensor(value):
            return self.made(node, "number", value, dtype)
        return self.cast(node, value, dtype, "wide") if tensor_type(value).dtype in _CALCULATED else value

    def _compared(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
        x = arguments["self"]
        dtype = torch.result_type(torch.empty(1, dtype=tensor_type(x).dtype), 1.0)
        other = self.number(node, arguments["other"], dtype)
        new: fx.Node = self.call(node, "value", _COMPARISONS[node.target], (x, other), tensor_type(node))
        return new

    def _chosen(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
        target, names = _CHOOSING[node.target]
        dtype = tensor_type(node).dtype
        values = {k: self.number(node, arguments[k], dtype) for k in names if arguments[k] is not None}
        order = [a.name for a in target._schema.arguments]
        args = tuple({**arguments, **values}.get(name) for name in order)
        new: fx.Node = self.call(node, "value", target, args, tensor_type(node))
        return new

    def _filled(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
        """Multiplies ones by the number."""
        kind, name = tensor_type(node), _FILLING[node.target]
        number = self.number(node, arguments[name], _REAL.get(kind.dtype, kind.dtype))
        value = arguments[name]
        node.args = tuple(1.0 if x is value else x for x in node.args)
        node.kwargs = {k: 1.0 if x is value else x for k, x in node.kwargs.items()}
        with self.graph.inserting_after(node):
            new = self.graph.call_function(aten.mul.Tensor, (node, number))
        return set_note(new, replace(note(node), type=kind))

    def _written(self, node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
        return self.number(node, arguments["s"], tensor_type(node).dtype)
