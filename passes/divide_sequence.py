"""divide_sequence: sequence lengths as multiples of the ranks that share them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from fxpar.errors import PlanError
from fxpar.manager import register_pass
from fxpar.program import Input, Parameter, Program, ScalarType, Symbol, TensorType, ValueType, note, update
from fxpar.symbols import Size, simplify, symbol


@register_pass("divide_sequence", requires={"canonical"}, provides={"sequence"}, invalidates={"layouts"})
def divide_sequence(program: Program) -> Program:
    """Writes every sequence length as n times a symbol, n being the ranks of the tp axis.

    Before (tp 2)::

        symbol s = input_ids.1 like 16
        %x = aten.embedding.default(%wte, %ids) : f32[b, s, 96]

    After::

        symbol s = input_ids.1 / 2 like 8
        %x = aten.embedding.default(%wte, %ids) : f32[b, 2*s, 96]

    Terms: a *sequence length* is a symbolic size that an input has behind its batch. Notes alone change. A shard of the
    sequence then has an even size for every value of the symbol, so that nothing later assumes what it cannot prove;
    batches of other lengths are refused when they come. Without `sequence_parallel` nothing changes.

    Refuses an example whose sequence the ranks do not divide.
    """
    n = program.axes.get("tp", 1)
    return divide(program, n, 1) if program.plan.sequence_parallel and n > 1 else program


def divide(program: Program, n: int, dim: int) -> Program:
    """Writes the symbolic sizes that inputs have in dimension `dim` as n times a symbol; see `divide_sequence`."""
    divided = {s.name: _divided(s, n) for s in program.symbols if s.dim == dim}
    sizes = {symbol(name): n * symbol(name) for name in divided}
    for node in program.graph.nodes:
        if node.op != "output" and note(node).type is not None:
            update(node, type=_type(note(node).type, sizes))
    return program.with_(
        symbols=tuple(divided.get(s.name, s) for s in program.symbols),
        inputs=tuple(Input(i.path, i.node, _tensor(i.type, sizes)) for i in program.inputs),
        parameters=tuple(Parameter(**{**vars(p), "type": _tensor(p.type, sizes)}) for p in program.parameters),
    )


def _divided(found: Symbol, n: int) -> Symbol:
    if found.example % n:
        raise PlanError(
            f"{found.path} has {found.example} in dimension {found.dim}, which {n} ranks cannot share out",
            where="sequence_parallel",
            remedy=f"pad the example to a multiple of {n}, or set sequence_parallel=False",
        )
    return replace(found, example=found.example // n, multiple=n)


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
