"""divide_sequence: sequence lengths as multiples of the ranks that share them out."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import sympy
import torch

from fxpar.errors import PlanError
from fxpar.ir.program import (
    Input,
    Parameter,
    Program,
    ScalarType,
    TensorType,
    ValueType,
    note,
    operands,
    output_types,
    update,
)
from fxpar.ir.properties import Property
from fxpar.ir.symbols import in_groups_of
from fxpar.layout.symbolic_sizes import Size, simplify, symbol
from fxpar.manager import register_pass
from fxpar.rules import bind_arguments

aten = torch.ops.aten


@register_pass(
    "divide_sequence", requires={Property.CANONICAL}, provides={Property.SEQUENCE}, invalidates={Property.LAYOUTS}
)
def divide_sequence(program: Program) -> Program:
    """Writes every sequence length as n times a symbol, for n ranks that split each layer.

    Before (tp 2)::

        symbol s = input_ids.1 like 16
        %x = aten.embedding.default(%wte, %ids) : f32[b, s, 96]

    After::

        symbol s = input_ids.1 / 2 like 8
        %x = aten.embedding.default(%wte, %ids) : f32[b, 2*s, 96]

    Terms: a *sequence length* is a symbolic size over which attention runs, whichever dimension of an input it is; in a
    model without attention the size that an input has after its batch. Notes alone change. A shard of the
    sequence then has an even size for every value of the symbol, so that nothing later assumes what it cannot prove;
    batches of other lengths are refused when they come. Without `sequence_parallel` nothing changes.

    Refuses an example whose sequence the ranks do not divide.
    """
    n = program.plan.splitting
    if not program.plan.sequence_parallel or n == 1:
        return program
    remedy = f"pad the example to a multiple of {n}, or set sequence_parallel=False"
    return divide(program, n, _lengths(program), where="sequence_parallel", remedy=remedy)


def _lengths(program: Program) -> set[str]:
    """Returns names of the symbols that are sequence lengths."""
    sizes: set[Size] = set()
    for node in program.graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            sizes |= {output_types(operand)[0].shape[-2] for operand in operands(node)[:2]}
        elif node.target in (aten.softmax.int, aten._softmax.default):
            shape = output_types(node)[0].shape
            sizes.add(shape[int(bind_arguments(node)["dim"])] if shape else 1)
    lengths = {s.name for s in program.symbols if s.size in sizes}
    return lengths or {s.name for s in program.symbols if s.dim == 1}


def divide(program: Program, n: int, names: Set[str], *, where: str, remedy: str) -> Program:
    """Writes the named symbolic sizes as n times a symbol.

    Args:
        where, remedy: of the error.

    Raises:
        PlanError: the example's size is not divisible by n.
    """
    divided = {}
    for s in program.symbols:
        if s.name in names:
            if s.example % n:
                reason = f"{s.path} has {s.example * s.multiple} in dimension {s.dim}, which {n} ranks cannot share out"
                reason += in_groups_of(s)
                raise PlanError(reason, where=where, remedy=remedy)
            divided[s.name] = replace(s, example=s.example // n, multiple=n * s.multiple)
    sizes = {symbol(name): n * symbol(name) for name in divided}
    for node in program.graph.nodes:
        if node.op != "output" and note(node).type is not None:
            update(node, type=_type(note(node).type, sizes))
    return program.with_(
        symbols=tuple(divided.get(s.name, s) for s in program.symbols),
        inputs=tuple(Input(i.path, i.node, _tensor(i.type, sizes)) for i in program.inputs),
        conditions=tuple(condition.with_sizes(sizes) for condition in program.conditions),
        parameters=tuple(Parameter(**{**vars(p), "type": _tensor(p.type, sizes)}) for p in program.parameters),
    )


def _size(size: Size, sizes: Mapping[sympy.Symbol, Size]) -> Size:
    return size if isinstance(size, int) else simplify(size.subs(sizes, simultaneous=True))


def _tensor(kind: TensorType, sizes: Mapping[sympy.Symbol, Size]) -> TensorType:
    return TensorType(kind.dtype, tuple(_size(size, sizes) for size in kind.shape))


def _type(kind: ValueType, sizes: Mapping[sympy.Symbol, Size]) -> ValueType:
    if isinstance(kind, ScalarType):
        return ScalarType(_size(kind.value, sizes))
    if isinstance(kind, TensorType):
        return _tensor(kind, sizes)
    return None if kind is None else tuple(_tensor(item, sizes) for item in kind)
