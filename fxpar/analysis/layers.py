"""The layers of a forward, found by structure.

Enters: a forward and its storages. Leaves: runs of nodes that follow each other alike. No name of a module enters, and
no number of layers. A cut between layers is a guess: any cut gives a right program.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from fxpar.analysis.periods import parts
from fxpar.analysis.storages import Storages
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.program import Program, TensorType, note, operands, output_types
from fxpar.ir.step import is_forward

_LEAST = 4  # operations of a layer: query, key and value of one attention are no layers


def layers(program: Program, storages: Storages) -> list[list[fx.Node]]:
    """The layers in order, cut where fewest bytes live.

    Args:
        program: a step, of which the forward is read, or a forward.
        storages: of the forward.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and is_forward(node)]
    position = {node: i for i, node in enumerate(nodes)}
    main = _main(program, nodes)
    ids: dict[str, int] = {}
    tokens = [ids.setdefault(_token(node), len(ids)) for node in main]
    until, sizes = _lives(main, storages)
    layers = []
    for start, stop in parts(tokens, until, sizes=sizes, least=_LEAST):
        first = position[main[start - 1]] + 1 if start else position[main[0]]
        layers.append(nodes[first : position[main[stop - 1]] + 1])
    return layers


def _main(program: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What is computed of inputs and parameters: masks and rotary tables stand in the layer that reads them first."""
    owned = {program.node(p.node) for p in program.parameters}
    trained = {program.node(p.node) for p in program.parameters if p.kind == "parameter"}
    weights = weights_of(program.graph, owned)
    reached = set(trained)
    computed = []
    for node in nodes:
        if any(read in reached for read in operands(node)):
            reached.add(node)
            if node not in weights and all(kind.is_float for kind in output_types(node)):
                computed.append(node)
    return computed


def _token(node: fx.Node) -> str:
    """An operation without its operands."""
    args = fx.node.map_arg((node.args, node.kwargs), lambda operand: "%")
    kind = note(node).type
    types = str(kind) if isinstance(kind, TensorType) else " ".join(map(str, output_types(node)))
    return f"{node.target} {args} {types}"


def _lives(main: Sequence[fx.Node], storages: Storages) -> tuple[list[int], list[int]]:
    """Of each node the last one that reads a storage that it makes, and the bytes of what it makes."""
    place = {node: i for i, node in enumerate(main)}
    maker: dict[int, int] = {}
    until, sizes = list(range(len(main))), [0] * len(main)
    for i, node in enumerate(main):
        last = max((place[user] for user in node.users if user in place), default=i)
        for storage in _of(storages.of, node):
            if storage not in maker:
                maker[storage] = i
                sizes[i] += storages.bytes[storage]
            until[maker[storage]] = max(until[maker[storage]], last)
    return [-1 if node.target is operator.getitem else until[i] for i, node in enumerate(main)], sizes


def _of(of: Mapping[str, frozenset[int]], node: fx.Node) -> frozenset[int]:
    return of.get(node.name, frozenset())
