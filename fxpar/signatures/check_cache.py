"""Facts: what every check asks of each node, worked out for a program once, and again only of what a pass changed.

Enters: a program, and the facts of the one that was checked before it. Leaves: what each node reads, whether gradients
flow through it, and a *number* that is equal for nodes of which rules and checks are told the same. What a check found
sound of a number it need not ask again: equal layers, and nodes that a pass left as they were, cost a look-up.

Which nodes a pass left alone it is not asked: those of the same name are compared by all that a node is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from torch import fx

from fxpar.ir.grad_flow import carried, plain
from fxpar.ir.program import Note, Program, TensorType, note, operands, output_node
from fxpar.ir.step import RECOMPUTE
from fxpar.signatures.op_call import decides

# Kind of node, operator, arguments with the names of nodes, and note.
Sighting = tuple[str, Any, Hashable, Note | None]


_NAME = attrgetter("name")


def sightings(graph: fx.Graph) -> dict[str, Sighting]:
    """Lists all that each node is, by name and in order."""
    return {
        node.name: (node.op, node.target, plain((node.args, node.kwargs), _NAME), _note(node)) for node in graph.nodes
    }


def _note(node: fx.Node) -> Note | None:
    try:
        return note(node)
    except KeyError:  # the output
        return None


@dataclass(frozen=True)
class CheckCache:
    """What was found sound, in one run of passes over programs of one plan and the same symbols.

    Attributes:
        numbers: of nodes, by all that a check is told of one.
        values: numbers of types with layouts.
        found: what each check remembers.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    values: dict[Hashable, int] = field(default_factory=dict)
    found: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """Of the nodes of one program, which stays as it is.

    Attributes:
        program: without calls of regions.
        header: its plan and symbols, as they were.
        seen: its nodes as they were.
        memory: shared with the programs before and after it.
        nodes: by name, in order, without the output.
        numbers: equal where operator, literals, types and layouts of what is read, and what the note says of the
            node's own type, layout, needs, phase and stages are equal.
        values: equal where types and layouts are.
        reads: the nodes among the arguments, each as often as it is there.
        operands: as `fxpar.ir.program.operands`.
        carries: `flags`, once they were asked for.
    """

    program: Program
    header: str
    seen: Mapping[str, Sighting]
    memory: CheckCache
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    numbers: dict[fx.Node, int] = field(default_factory=dict)
    values: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    carries: list[dict[fx.Node, tuple[bool, ...]]] = field(default_factory=list)

    @property
    def flags(self) -> dict[fx.Node, tuple[bool, ...]]:
        """Returns flags as `fxpar.ir.grad_flow.carried` does."""
        if not self.carries:
            self.carries.append(carried(self.program, self.operands))
        return self.carries[0]

    def known(self, *check: Hashable) -> dict[Any, Any]:
        """Returns what a check remembers.

        Args:
            check: its name, and whatever of a program its answers depend on besides plan, symbols and the node.
        """
        answers: dict[Any, Any] = self.memory.found.setdefault(check, {})
        return answers


def facts_of(program: Program, seen: Mapping[str, Sighting] | None = None, before: Facts | None = None) -> Facts:
    """Returns the facts of a program without calls of regions.

    Args:
        seen: its `sightings`, where they are known.
        before: of a program that was checked; what was found sound there is so here.
    """
    header = f"{program.plan}{program.all_symbols}{program.conditions}"
    seen = sightings(program.graph) if seen is None else seen
    before = before if before is not None and before.header == header else None
    facts = Facts(program, header, seen, CheckCache() if before is None else before.memory)
    if (
        before is not None
        and list(seen.items()) == list(before.seen.items())
        and _has_tables_of(program, before.program)
    ):
        return replace(before, program=program.with_(graph_module=before.program.graph_module))
    for node in program.graph.nodes:
        if node.op != "output":
            _add(facts, node, before)
    return facts


def has_same_operations(one: Facts, other: Facts) -> bool:
    """Returns whether two programs make the same of the same, in any order and under any names.

    Of notes all counts but the place in the author's model and the reason for a layout. Programs of other symbols or
    another plan are others.
    """
    if one.memory is not other.memory:
        return False
    known: dict[Hashable, int] = {}
    return _operations(one, known) == _operations(other, known)


def _operations(facts: Facts, known: dict[Hashable, int]) -> Hashable:
    """Returns a program's tables and outputs, and how often each operation occurs, by its number in `known`."""
    program, numbers = facts.program, dict[fx.Node, int]()
    tables = program.parameters, program.inputs, program.outputs, program.all_symbols, program.plan, program.loss
    for node, number in facts.numbers.items():
        name = node.name if node.op == "placeholder" else ""
        key = number, name, _said(node), *[numbers[read] for read in facts.reads[node]]
        numbers[node] = known.setdefault(key, len(known))
    ends = plain(output_node(program.graph).args, numbers.__getitem__)
    constants = frozenset((name, id(value)) for name, value in program.constants.items())
    return (*tables, program.conditions), constants, ends, frozenset(Counter(numbers.values()).items())


def _said(node: fx.Node) -> Hashable:
    """Returns what a note says of the operation that is not in the number."""
    node_note = _note(node)
    return (
        None
        if node_note is None
        else (node_note.random, node_note.role, node_note.origin == RECOMPUTE, node_note.recompute > 0)
    )


def _has_tables_of(program: Program, other: Program) -> bool:
    """Returns whether gradients start at the same parameters and inputs."""
    return (program.parameters, program.inputs) == (other.parameters, other.inputs)


def _add(facts: Facts, node: fx.Node, before: Facts | None) -> None:
    name, nodes = node.name, facts.nodes
    sighting = facts.seen[name]
    old = before.nodes.get(name) if before is not None else None
    # Whether indices that a node finds decide anything is up to its users.
    if old is not None and before.seen[name] == sighting and not _gives_indices(sighting[3]):  # type: ignore[union-attr]
        read_before, reads = before.reads[old], []  # type: ignore[union-attr]
        for other in read_before:
            read = nodes.get(other.name)
            if read is None or facts.values[read] != before.values[other]:  # type: ignore[union-attr]
                break
            reads.append(read)
        else:
            nodes[name] = node
            _take(facts, node, before, old, reads)  # type: ignore[arg-type]
            return
    nodes[name] = node
    _number(facts, node, sighting[3])


def _take(facts: Facts, node: fx.Node, before: Facts, old: fx.Node, reads: list[fx.Node]) -> None:
    """Takes over what held of the node of the same name before."""
    facts.numbers[node], facts.values[node], facts.reads[node] = before.numbers[old], before.values[old], reads
    operands_before = before.operands[old]
    is_all = operands_before == before.reads[old]
    facts.operands[node] = reads if is_all else [facts.nodes[operand.name] for operand in operands_before]


def _number(facts: Facts, node: fx.Node, node_note: Note | None) -> None:
    memory, reads = facts.memory, list[fx.Node]()
    value: Hashable = None if node_note is None else (node_note.type, node_note.layout)

    def read(operand: fx.Node) -> int | None:
        reads.append(operand)
        return facts.values.get(operand)

    args = plain((node.args, node.kwargs), read)
    said = (
        None
        if node_note is None
        else (node_note.needs, node_note.phase, node_note.stages, _gives_indices(node_note) and decides(node))
    )
    try:
        facts.values[node] = memory.values.setdefault(value, len(memory.values))
        key = node.op, node.target, args, facts.values[node], said
        number = memory.numbers.setdefault(key, len(memory.numbers))
    except TypeError:  # what no key can be made of is like nothing else
        number = memory.numbers.setdefault((node, object()), len(memory.numbers))
        facts.values.setdefault(node, -1 - number)
    facts.numbers[node], facts.reads[node], facts.operands[node] = number, reads, operands(node)


def _gives_indices(node_note: Note | None) -> bool:
    kinds = node_note.type if node_note is not None else None
    if isinstance(kinds, TensorType):
        return not (kinds.is_float or kinds.dtype.is_complex)
    return isinstance(kinds, tuple) and any(not (kind.is_float or kind.dtype.is_complex) for kind in kinds)
