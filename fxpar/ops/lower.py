"""From a program to a module that runs: graph operators become implementations bound to process groups.

Enters: a program (a whole one, or a localised one) and the process groups of its axes. Leaves: a `GraphModule` whose
inputs are the program's placeholders, copies of main values under mixed precision, and one rank index for each axis,
and whose outputs are the program's. The module is the same on every rank: ranks differ by the index tensors they pass.
What stands in place of a graph operator its record says (`fxpar.ops.operator`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxpar.ops.coalesced import prune_buckets
from fxpar.ops.collectives import Group
from fxpar.ops.deferred import Reduction, take_out
from fxpar.ops.onrank import OnRank
from fxpar.ops.operator import Operator
from fxpar.program.program import Program, operands

# Operators without a derivative, which Python's functions of that name do not ask for.
_UNDERIVED = frozenset({torch.ops.aten.randint_like.default, torch.ops.aten.randint_like.low_dtype})


@dataclass(frozen=True)
class Lowered:
    """A runnable module.

    Attributes:
        module: called with `inputs` in order, then the copies, the indices and the rows.
        inputs: names of the program's placeholders. Those that have copies are main values (`fxpar.program.mixed`).
        copies: names of the placeholders whose copies, in the program's type, follow.
        indices: axes whose rank index (i64 scalar) follows.
        outputs: names of the results.
        takes_rows: whether the numbers of rows that all ranks and those before this one bring (i64 scalars) follow.
        draws: whether fused kernels draw from the device's generator, which must be seeded apart for each rank.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    copies: tuple[str, ...]
    indices: tuple[str, ...]
    outputs: tuple[str, ...]
    takes_rows: bool
    draws: bool

    def only(self, wanted: tuple[str, ...]) -> Lowered:
        """A copy, with code of its own, that returns some of the outputs."""
        graph = fx.Graph()
        results: Any = graph.graph_copy(self.module.graph, {})
        by_name = dict(zip(self.outputs, results, strict=True))
        prune_buckets(graph, [by_name[name] for name in wanted])
        graph.output(tuple(by_name[name] for name in wanted))
        return replace(self, module=fx.GraphModule(self.module, graph), outputs=wanted)

    def without_reductions(self) -> tuple[Lowered, tuple[Reduction, ...]]:
        """A copy that leaves gradients of parameters as each rank has them, and the reductions that it lacks."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))
        reductions = take_out(graph, self.inputs)
        return replace(self, module=fx.GraphModule(self.module, graph)), reductions


def lower(
    program: Program,
    groups: Mapping[str, Group],
    device: torch.device | str = "cpu",
    *,
    main_values: bool = False,
    uneven_rows: bool = False,
) -> Lowered:
    """Lowers a program.

    Args:
        program: a program with property `local`, or one without mesh axes.
        groups: process group of each axis of the program.
        device: where factory operators put their tensors.
        main_values: whether the plan's mixed precision is carried out: the module takes main values and copies. Else
            it takes parameters in the program's own types.
        uneven_rows: whether data ranks may bring other numbers of rows.

    Raises:
        KeyError: an axis has no group.
    """
    program = program.copy()
    graph, draws = program.graph, False
    inputs = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    rank = OnRank(program, groups, torch.device(device), main_values=main_values, uneven_rows=uneven_rows)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, Operator):
            draws |= _replace(node, node.target, rank)
        elif isinstance(node.target, torch._ops.OpOverload):
            _place(node, rank.device)
    copies: tuple[str, ...] = ()
    if rank.mixed is not None:
        rank.mixed.enter()
        copies = tuple(rank.mixed.copies)
    module = fx.GraphModule(nn.Module(), graph)
    return Lowered(module, inputs, copies, tuple(rank.indices), tuple(program.outputs), uneven_rows, draws)


def _replace(node: fx.Node, record: Operator, rank: OnRank) -> bool:
    """Puts what a rank runs in place of a graph operator; whether that draws from the device's generator."""
    found = record.lower(node, rank)
    if isinstance(found, fx.Node):
        node.replace_all_uses_with(found)
        node.graph.erase_node(node)
        return False
    node.target, node.args, node.kwargs = found.function, found.arguments, {}
    return found.draws


def _place(node: fx.Node, device: torch.device) -> None:
    """Operators that make tensors from nothing are told the device; the text names none.

    Views become reshapes: the strides of the trace are those of one kernel on one device.
    """
    if node.target is torch.ops.aten.view.default:
        node.target = torch.ops.aten.reshape.default
    if node.target in _UNDERIVED:
        with node.graph.inserting_before(node):
            node.args = (node.graph.call_function(torch.ops.aten.detach.default, node.args[:1]), *node.args[1:])
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    if any(a.name == "device" for a in schema) and not operands(node):
        node.kwargs = {**node.kwargs, "device": device}
