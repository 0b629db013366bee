"""Sub-graphs that a program calls: equal layers, written once.

Enters: a program with calls. Leaves: `Region`, the target of a call, and `inlined`, the program with each call's nodes
in its place. Checks and lowering read programs inlined: what holds of them holds of the calls.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from fxpar.errors import CheckFailed
from fxpar.ir.program import (
    Note,
    Program,
    changed,
    copy_node,
    describe,
    module_of,
    note,
    output_layouts,
    output_node,
    output_types,
    set_note,
)

BETWEEN_MODULES = "+"


@dataclass(frozen=True, eq=False)
class Region:
    """A sub-graph as the target of nodes; each is equal to itself alone.

    A node that calls it has its operands as arguments, and as `random` the identities of the draws: the note of a node
    inside has its position among these, from 1. It gives a tuple.

    Attributes:
        name: as the text calls it.
        graph: placeholders are the operands; the output is a tuple of nodes. It is shared and never changed.
        fqn: modules of the author from whose call the notes inside are, with a plus between them; a call's note has its
            own, in the same order. The first one is that of most nodes: a layer; the others are what else is computed
            with it, the norm of the next layer say.
    """

    name: str
    graph: fx.Graph
    fqn: str = ""

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def operands(self) -> list[fx.Node]:
        """Returns the placeholders, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def body(self) -> list[fx.Node]:
        """Returns what it computes, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """Returns the nodes whose values it gives."""
        return tuple(output_node(self.graph).args[0])  # type: ignore[arg-type]

    def reordered(self, body: Sequence[fx.Node]) -> tuple[Region, dict[fx.Node, fx.Node]]:
        """Returns a copy with the nodes of the body in an order, and the copy of each node."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in (*self.operands, *body):
            copies[node] = copy_node(graph, node, copies, node.name)
        graph.output(tuple(copies[node] for node in self.results))
        return Region(self.name, graph, self.fqn), copies

    def note_of(self, node: fx.Node, call: Note, **changes: Any) -> Note:
        """Returns the note that a node inside has in a call.

        Args:
            node: of `body`.
            call: the note of the call.
            changes: other fields of it.
        """
        inner, there = note(node), call.fqn.split(BETWEEN_MODULES)
        fqn = there[0] or inner.fqn
        for module, other in zip(self.fqn.split(BETWEEN_MODULES), there, strict=False):
            # With the dots, layers.1 is no prefix of layers.10.
            if module and f"{inner.fqn}.".startswith(f"{module}."):
                fqn = other + inner.fqn[len(module) :]
                break
        return changed(inner, fqn=fqn, **changes)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Makes it callable, since FX takes callables alone for targets.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{self} is a part of a program: lower the program first")

    def __repr__(self) -> str:
        return f"region.{self.name}"


def region_of(node: Any) -> Region | None:
    """Returns what a node calls, if that is a region; None of what is no node too."""
    return node.target if isinstance(node, fx.Node) and isinstance(node.target, Region) else None


def regions(program: Program) -> list[Region]:
    """Returns those that a program calls, in the order of their first calls."""
    return list(dict.fromkeys(region for node in program.graph.nodes if (region := region_of(node)) is not None))


def identities(node: fx.Node) -> tuple[int, ...]:
    """Returns identities of the draws that a call passes."""
    return tuple(node.kwargs.get("random", ()))  # type: ignore[arg-type]


def call_region(
    graph: fx.Graph, region: Region, values: Sequence[fx.Node], random: Sequence[int], name: str, like: Note
) -> tuple[fx.Node, list[fx.Node]]:
    """Adds a call at the graph's insertion point.

    Args:
        values: the operands.
        random: identities of the draws.
        name: of the node.
        like: place of the call in the author's model, and its phase.

    Returns:
        The call, and for each result the node that takes it.
    """
    kwargs: dict[str, Any] = {"random": tuple(random)} if random else {}
    call = graph.create_node("call_function", region, tuple(values), kwargs, name=name)
    types = tuple(kind for node in region.results for kind in output_types(node))
    layouts = tuple(layout for node in region.results for layout in output_layouts(node))
    set_note(call, changed(like, type=types, layout=layouts or None, random=0))
    items = []
    for index, inside in enumerate(region.results):
        item = graph.create_node("call_function", operator.getitem, (call, index))
        inner = region.note_of(inside, like)
        set_note(item, Note(inner.type, inner.layout, fqn=inner.fqn, source=inner.source, phase=inner.phase))
        items.append(item)
    return call, items


def inlined(program: Program) -> Program:
    """Returns the program with the nodes of each call in its place, whose notes name the call as their `region`.

    Raises:
        CheckFailed: a call passes or takes other values than its region says.
    """
    if not regions(program):
        return program
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        region = region_of(node)
        if region is not None:
            _check_call(node, region)
            _write_out(graph, node, region, copies)
        elif node not in copies:  # results of calls are there
            copies[node] = copy_node(graph, node, copies, node.name)
    return program.with_(graph_module=module_of(graph))


def _write_out(graph: fx.Graph, call: fx.Node, region: Region, copies: dict[fx.Node, fx.Node]) -> None:
    items: dict[int, list[fx.Node]] = {}
    for user in call.users:
        items.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
    takers = {node: items.get(index, []) for index, node in enumerate(region.results)}
    inside: dict[fx.Node, fx.Node] = dict(zip(region.operands, (copies[arg] for arg in call.args), strict=True))  # type: ignore[index]
    random, like = identities(call), note(call)
    for node in region.body:
        taken = takers.get(node, [])
        # A result keeps the name that it has outside, by which other nodes and texts speak of it.
        name = taken[0].name if taken else f"{call.name}_{node.name}"
        new = inside[node] = copy_node(graph, node, inside, name)
        drawn = note(node).random
        identity = random[drawn - 1] if drawn else 0
        set_note(new, region.note_of(node, like, region=call.name, random=identity))
        copies.update(dict.fromkeys(taken, new))


def _check_call(call: fx.Node, region: Region) -> None:
    """Checks that operands, draws and results are those of the region."""
    operands = region.operands
    if len(call.args) != len(operands):
        raise CheckFailed(
            f"passes {len(call.args)} values to {region}, which takes {len(operands)}", where=describe(call)
        )
    for value, inside in zip(call.args, operands, strict=True):
        if not isinstance(value, fx.Node) or not _is_alike(value, inside):
            kind = f"{note(value).type} {note(value).layout}" if isinstance(value, fx.Node) else value
            reason = f"passes {kind} as %{inside.name} of {region}, which is {note(inside).type} {note(inside).layout}"
            raise CheckFailed(reason, where=describe(call), remedy="pass what is alike, or write the call out")
    drawn = {note(node).random for node in region.body} - {0}
    if drawn != set(range(1, len(identities(call)) + 1)):
        raise CheckFailed(
            f"passes {len(identities(call))} identities of draws to {region}, which has {len(drawn)}",
            where=describe(call),
            remedy="number the draws of a region from 1, and pass an identity for each",
        )
    later = next((node for node in region.body if note(node).phase != note(call).phase), None)
    if later is not None:
        raise CheckFailed(f"calls {region}, of which %{later.name} is of another phase", where=describe(call))
    for user in call.users:
        index = user.args[1] if user.target is operator.getitem else None
        if not isinstance(index, int) or not 0 <= index < len(region.results):
            raise CheckFailed(f"takes {index} of the results of {region}", where=describe(user))
        if not _is_alike(user, region.results[index]):
            raise CheckFailed(f"is {note(user).type} and result {index} of {region} is not", where=describe(user))


def _is_alike(one: fx.Node, other: fx.Node) -> bool:
    return (note(one).type, note(one).layout) == (note(other).type, note(other).layout)
