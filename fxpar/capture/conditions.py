"""Conditions on sizes under which a trace is the model.

Enters: a trace and the program's names of its symbols. Leaves: the branches on sizes that the author's code took, as
sympy relations in `b`, `s`, … that a call must satisfy (`s <= 64`); those that hold for every size are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from fxpar.capture.trace import Trace


def conditions(traced: Trace, names: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Relations between the symbols of a program.

    Args:
        traced: the trace.
        names: the program's symbol for each symbol of the trace.
    """
    environment = _environment(traced.exported)
    if environment is None:
        return ()
    relations: dict[Any, None] = {}
    known = set().union(*(sympy.sympify(size).free_symbols for size in names.values()))
    for expression in (*(guard.expr for guard in environment.guards), *_assumed(traced)):
        relation = _plain(expression, environment.replacements).subs(names)
        if relation is not sympy.true and set(relation.free_symbols) <= known:
            relations[relation] = None
    return tuple(relations)


def _assumed(traced: Trace) -> Iterator[Any]:
    """What Dynamo assumed, in the symbols of the export."""
    specs = traced.exported.graph_signature.input_specs
    holders = [n for n in traced.exported.graph.nodes if n.op == "placeholder"]
    leaves = [n for n, spec in zip(holders, specs, strict=True) if spec.kind is InputKind.USER_INPUT]
    for assumption in traced.assumptions:
        sizes = {}
        for symbol, (leaf, dim) in assumption.sizes.items():
            size = leaves[leaf].meta["val"].shape[dim]
            sizes[symbol] = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        yield assumption.relation.subs(sizes, simultaneous=True)


def _plain(expression: Any, replacements: Mapping[Any, Any]) -> Any:
    """Symbols that the trace replaced by others or by numbers, and the rest by their names' plain symbols."""
    for _ in range(len(replacements) + 1):
        replaced = expression.xreplace(dict(replacements))
        if replaced == expression:
            break
        expression = replaced
    plain = {s: sympy.Symbol(s.name, integer=True, positive=True) for s in expression.free_symbols}
    return expression.xreplace(plain)


def _environment(exported: ExportedProgram) -> Any:
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None
