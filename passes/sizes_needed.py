"""What the sizes of a program must satisfy so that PyTorch differentiates it, before a step is made of it.

Enters: a program without a backward. Leaves: conditions on its sizes, or the symbols in whose place numbers are to
stand. Traces are those that `differentiate` makes: it finds them again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxpar.ops import Operator
from fxpar.passes.derive import Derivatives, Needs, items_of
from fxpar.passes.differentiate import SAVING
from fxpar.passes.global_calls import whole_call_of
from fxpar.program.grad_flow import carried, reached
from fxpar.program.program import Program, note, operands, output_types


def sizes_needed(program: Program) -> Needs:
    """What the sizes must satisfy, with what they satisfy by the program's conditions.

    Numbers are those of the first operation that needs some: of what is captured with them more may be needed.
    """
    conditions = program.conditions
    derivatives = Derivatives(program.all_symbols, conditions)
    for call in _calls(program):
        needs = derivatives.needs(*call)
        if needs.numbers:
            return Needs(conditions, needs.numbers)
        if needs.conditions:
            conditions = (*conditions, *needs.conditions)
            derivatives = Derivatives(program.all_symbols, conditions)
    return Needs(conditions)


def is_differentiable(program: Program) -> bool:
    """Whether PyTorch differentiates a program for all sizes that its conditions admit."""
    derivatives = Derivatives(program.all_symbols, program.conditions)
    return all(derivatives.has(*call) for call in _calls(program))


def _calls(program: Program) -> Iterator[tuple[fx.Node, Any, Any, list[bool], list[bool]]]:
    """What `differentiate` asks PyTorch for, as `Derivatives.of` takes it."""
    flags = carried(program)
    needed = reached(program, flags)
    for node in program.graph.nodes:
        if node not in needed or not _is_traced(node):
            continue
        args, kwargs = whole_call_of(program, node)
        inputs = [any(flags[read]) and all(kind.is_float for kind in output_types(read)) for read in operands(node)]
        items = items_of(node) if isinstance(note(node).type, tuple) else {0: node}
        yield node, args, kwargs, inputs, [i in items and items[i] in needed for i in range(len(output_types(node)))]


def _is_traced(node: fx.Node) -> bool:
    """Whether its derivative is that of PyTorch, as `differentiate` decides it."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if isinstance(node.target, Operator) and (node.target.derivative is not None or node.target.saving is not None):
        return False
    return node.target not in SAVING and (isinstance(node.target, torch._ops.OpOverload) or "path" in node.kwargs)
