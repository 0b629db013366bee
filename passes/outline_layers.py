"""outline_layers: equal parts of a program become one sub-graph that is called."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import fx

from fxpar.cost.communication import collectives, symbol_sizes, value_bytes
from fxpar.cost.flops import matmul_flops
from fxpar.cost.layers import behind_gathers, behind_rows, parts, row_runs
from fxpar.ir.grad_flow import plain
from fxpar.ir.program import (
    Note,
    Program,
    ScalarType,
    TensorType,
    ancestors,
    copy_node,
    module_of,
    note,
    output_layouts,
    output_node,
    set_note,
)
from fxpar.ir.properties import Property
from fxpar.ir.regions import BETWEEN_MODULES, Region, call_region
from fxpar.ir.step import BACKWARD, PHASES, RECOMPUTE, WEIGHT, phase_of
from fxpar.manager import register_pass
from fxpar.ops.collectives import all_gather

_LEAST = 24  # operations of a part; fewer are not worth a call

_NAMES = {"": "layer", BACKWARD: "layer_backward", WEIGHT: "layer_weights"}


@register_pass("outline_layers", requires={Property.CANONICAL}, provides={Property.REGIONS}, preserves="dataflow")
def outline_layers(program: Program) -> Program:
    """Replaces equal layers by calls of one region.

    Before::

        %h = aten.tanh.default(%x) : f32[b, 8] tp:I
        %y = aten.mul.Tensor(%h, %x) : f32[b, 8] tp:I
        %h_1 = aten.tanh.default(%y) : f32[b, 8] tp:I
        %z = aten.mul.Tensor(%h_1, %y) : f32[b, 8] tp:I

    After::

        region layer
        %x = operand : f32[b, 8] tp:I
        %h = aten.tanh.default(%x) : f32[b, 8] tp:I
        %y = aten.mul.Tensor(%h, %x) : f32[b, 8] tp:I
        result %h, %y

        %layer_1 = region.layer(%x) gives %h, %y
        %layer_2 = region.layer(%y) gives %h_1, %z

    Terms: a *token* is an operation without its operands: literals, types and layouts. A *part* is a run of nodes of
    one phase. Its *canonical text* names inner operands by position, outer ones by the first use, draws by the first of
    their identity. Parts of one canonical text are one region, whose results are what is used of any of them.

    Algorithm: the tokens of each phase in order are cut where they repeat and fewest bytes live (`fxpar.cost.layers`);
    neither a name nor a number of layers enters. In front of a norm that is between the residual connection and what
    reads it: the norm would read from memory what the kernel before had, and no sum of ranks could be computed in one
    kernel with it. So the cuts are moved after the operations on rows that follow (`row_runs`), to
    where fewest values are read again: in front of the next product or collective, which reads from memory in any case.
    The first layer's norm is then outside, the last layer has that after it; where that is none or another one, or
    reads another value, cuts stay, since the last layer would be none of the region. A backward's part that would begin
    with a gather leaves it to the part before, whose gradients of weights it hides behind. A cut is a guess and texts
    are the proof: wrong cuts make more regions, never another program. What is called once stays where it is, and so
    does the phase *parameter*. Numbers of the inputs' sizes come first, then the forward, then the backward; of other
    sizes each phase has its own.

    Values stay equal: written out, the calls are what was there.
    """
    numbers_by_phase(program)
    order, costs = _ordered(program), _costs(program)
    known: dict[Hashable, list[_Part]] = {}
    for phase in PHASES[:-1]:
        nodes = [node for node in order if phase_of(node) == phase]  # and not what is sent once, in front of all
        for part in _parts(nodes, costs):
            known.setdefault((phase, part.text), []).append(part)
    classes = _named([alike for alike in known.values() if len(alike) > 1])
    return _rebuilt(program, order, classes) if classes else program


def _ordered(program: Program) -> list[fx.Node]:
    """Returns the operations: numbers of sizes, then phase by phase, parts of tuples after their tuples."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    early: set[fx.Node] = set()
    for node in calls:
        reads = (read.op == "placeholder" or read in early for read in node.all_input_nodes)
        if isinstance(note(node).type, ScalarType) and all(reads):
            early.add(node)
    ordered = dict.fromkeys(node for node in calls if node in early)
    by_phase: dict[str, list[fx.Node]] = {phase: [] for phase in PHASES}
    for node in calls:
        by_phase[note(node).phase].append(node)
    for nodes in by_phase.values():
        for node in nodes:
            ordered[node] = None
            ordered.update(dict.fromkeys(user for user in node.users if user.target is operator.getitem))
    return list(ordered)


def _operations(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[int, list[fx.Node]]]:
    """Returns for each node a number, equal where all that it is without its operands is equal, and the operands.

    That is all but its place in the author's model, its identity, and why its layout is what it is.
    """
    ids: dict[Hashable, int] = {}
    operations: dict[fx.Node, tuple[int, list[fx.Node]]] = {}
    for node in nodes:
        noted, reads = note(node), list[fx.Node]()
        args = plain((node.args, node.kwargs), reads.append)
        # Whether a node draws is part of its token. Which draw it is differs from layer to layer, and is an operand.
        more = noted.random > 0, noted.role, noted.recompute > 0, noted.origin == RECOMPUTE, noted.uncaptured
        operations[node] = ids.setdefault((node.target, args, *_kind(node), more), len(ids)), reads
    return operations


def _kind(node: fx.Node) -> tuple[Hashable, Hashable]:
    return note(node).type, output_layouts(node)


@dataclass(frozen=True)
class _Costs:
    """What a cut between two nodes costs.

    Attributes:
        sizes: bytes of what a node gives.
        sends: names of those that communicate.
        products: matrix products and attention.
    """

    sizes: Mapping[fx.Node, int]
    sends: Set[str]
    products: Set[fx.Node]


def _costs(program: Program) -> _Costs:
    values = symbol_sizes(program, None)
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return _Costs(
        {node: value_bytes(program, node, values) for node in calls},
        {collective.node for collective in collectives(program)},
        {node for node, _ in matmul_flops(program)},
    )


def _until(nodes: Sequence[fx.Node], costs: _Costs) -> list[int]:
    """Finds for each node the last of these that reads it, or itself; its complement where no cut is in front of it.

    That is in front of parts of a tuple, whose values count as none. And in front of a cut all that is on its way is
    waited for: what travels beside products, as chunks of tokens do, stays with these up to its first reader or to what
    is sent next.
    """
    position = {node: i for i, node in enumerate(nodes)}
    readers = [[position[user] for user in node.users if user in position] for node in nodes]
    inside: set[int] = set()
    product = send = stop = len(nodes)  # the next product and the next that is sent, and the first that is after it
    for i, node in reversed([*enumerate(nodes)]):
        if node in costs.products:
            product, stop = i, send
        if node.name in costs.sends:
            send, reader = i, min(readers[i], default=i)
            inside.update(range(i + 1, min(stop, reader)) if reader > product else ())
    until = (max(after, default=i) for i, after in enumerate(readers))
    return [
        -1 if node.target is operator.getitem else ~last if i in inside else last
        for i, (node, last) in enumerate(zip(nodes, until, strict=True))
    ]


def _parts(nodes: Sequence[fx.Node], costs: _Costs) -> list[_Part]:
    """Returns what may be called of the nodes of a phase, in order."""
    operations = _operations(nodes)
    tokens, until = [number for number, _ in operations.values()], _until(nodes, costs)
    runs = parts(tokens, until, sizes=[costs.sizes[node] for node in nodes], least=_LEAST)

    def whole(cuts: Sequence[tuple[int, int]]) -> list[_Part]:
        candidates = (_Part(nodes[start:stop], operations) for start, stop in cuts)
        return [part for part in candidates if part.is_whole]

    after_rows = behind_rows(runs, tokens, until, row_runs(nodes))
    gathers = [node.target is all_gather and note(node).phase != "" for node in nodes]
    # Tokens do not tell what the operations after the last layer read: its text may be another one with them.
    unmoved = whole(runs)
    for moved in (whole(behind_gathers(after_rows, tokens, gathers)), whole(after_rows)):
        if len({part.text for part in moved}) <= len({part.text for part in unmoved}) and len(moved) >= len(unmoved):
            return moved
    return unmoved


class _Part:
    """A run of nodes that may be called.

    Attributes:
        nodes: what it computes.
        outer: what it reads of others, in the order of first use.
        random: identities of its draws, likewise.
        text: equal for parts of one phase that compute the same of what they read.
    """

    def __init__(self, nodes: Sequence[fx.Node], operations: Mapping[fx.Node, tuple[int, list[fx.Node]]]) -> None:
        self.nodes = tuple(nodes)
        places = {node: i for i, node in enumerate(self.nodes)}
        outer: dict[fx.Node, int] = {}
        random: dict[int, int] = {}
        lines: list[Hashable] = []
        for node in self.nodes:
            number, reads = operations[node]
            named = [places[read] if read in places else -1 - outer.setdefault(read, len(outer)) for read in reads]
            noted = note(node)
            identity = random.setdefault(noted.random, len(random) + 1) if noted.random else 0
            lines.append((number, identity, *named))
        self.outer, self.random = tuple(outer), tuple(random)
        self.text: Hashable = tuple(map(_kind, outer)), tuple(lines)

    @property
    def used(self) -> set[int]:
        """Returns positions of the nodes that are used outside."""
        inner = set(self.nodes)
        return {i for i, node in enumerate(self.nodes) if any(user not in inner for user in node.users)}

    @property
    def is_whole(self) -> bool:
        """Returns whether what leaves it are tensors, and what enters it tensors or numbers."""
        entering = all(not isinstance(note(node).type, tuple) for node in self.outer)
        return entering and all(isinstance(note(self.nodes[i]).type, TensorType) for i in self.used)


class _Class:
    """Parts of one text, and the region that stands for them."""

    def __init__(self, alike: Sequence[_Part], name: str) -> None:
        self.parts, first = tuple(alike), alike[0]
        # The union over all calls. A result that one call does not need costs nothing
        # there, while another region would be compiled anew.
        self.used = sorted(set[int]().union(*(part.used for part in alike)))
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in first.outer:
            copies[node] = graph.placeholder(node.name)
            noted = note(node)
            set_note(copies[node], Note(noted.type, noted.layout))
        for node in first.nodes:
            new = copies[node] = copy_node(graph, node, copies, node.name)
            noted = note(node)
            identity = first.random.index(noted.random) + 1 if noted.random else 0
            set_note(new, replace(noted, random=identity))
        graph.output(tuple(copies[first.nodes[i]] for i in self.used))
        # The name of the layer is what differs between two calls, so that no list of the author's names is needed.
        layer = _module(first, alike[1])[0]
        self._others = _others(alike, layer)
        self.region = Region(name, graph, self._joined(layer, first))

    def fqn(self, part: _Part) -> str:
        """Returns the author's modules that a part is of."""
        return self.region.fqn if part is self.parts[0] else self._joined(_module(self.parts[0], part)[1], part)

    def _joined(self, layer: str, part: _Part) -> str:
        return BETWEEN_MODULES.join((layer, *(note(part.nodes[i]).fqn for i in self._others)))


def _module(one: _Part, other: _Part) -> tuple[str, str]:
    """Returns the modules in which two parts differ: of most nodes, their names up to the first other word."""
    modules: Counter[tuple[str, str]] = Counter()
    for pair in zip(one.nodes, other.nodes, strict=True):
        words = [note(node).fqn.split(".") for node in pair]
        odd = next((i for i, (a, b) in enumerate(zip(*words, strict=False)) if a != b), None)
        if odd is not None:
            modules[".".join(words[0][: odd + 1]), ".".join(words[1][: odd + 1])] += 1
    return modules.most_common(1)[0][0] if modules else ("", "")


def _others(alike: Sequence[_Part], layer: str) -> list[int]:
    """Returns positions of nodes that are of other modules than the layer, one for each module of the first part's.

    Of modules one of which is inside another one the inner one comes first.
    """
    positions: dict[str, int] = {}
    for i, nodes in enumerate(zip(*(part.nodes for part in alike), strict=True)):
        fqn, *there = (note(node).fqn for node in nodes)
        is_inside = layer and f"{fqn}.".startswith(f"{layer}.")
        if fqn and not is_inside and any(other != fqn for other in there):
            positions.setdefault(fqn, i)
    return [positions[fqn] for fqn in sorted(positions, key=len, reverse=True)]


def _rebuilt(program: Program, order: Sequence[fx.Node], classes: Sequence[_Class]) -> Program:
    """Returns the program in that order, with calls in place of parts."""
    starts = {part.nodes[0]: (known, part) for known in classes for part in known.parts}
    inside = {node for known in classes for part in known.parts for node in part.nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    count: Counter[str] = Counter()
    taken = {node.name for node in program.graph.nodes}
    for node in [*(n for n in program.graph.nodes if n.op == "placeholder"), *order]:
        if node in starts:
            known, part = starts[node]
            count[known.region.name] += 1
            name = _free(f"{known.region.name}_{count[known.region.name]}", taken)
            like = Note(fqn=known.fqn(part), phase=note(node).phase)
            values = [copies[read] for read in part.outer]
            _, items = call_region(graph, known.region, values, part.random, name, like)
            for item, index in zip(items, known.used, strict=True):
                copies[part.nodes[index]] = item
                item.name = part.nodes[index].name
        elif node not in inside:
            copies[node] = copy_node(graph, node, copies, node.name)
    graph.output(fx.node.map_arg(output_node(program.graph).args[0], copies.__getitem__))
    return program.with_(graph_module=module_of(graph))


def _free(name: str, taken: set[str]) -> str:
    """Returns the name, or the next one that nothing has."""
    numbers = itertools.count(2)
    candidate = name
    while candidate in taken:
        candidate = f"{name}_{next(numbers)}"
    taken.add(candidate)
    return candidate


def _named(groups: Sequence[Sequence[_Part]]) -> list[_Class]:
    """Returns the classes, each with a name of its own."""
    count: Counter[str] = Counter()
    classes = []
    for alike in groups:
        name = _NAMES[note(alike[0].nodes[0]).phase]
        count[name] += 1
        classes.append(_Class(alike, name if count[name] == 1 else f"{name}_{count[name]}"))
    return classes


def numbers_by_phase(program: Program) -> None:
    """Copies each number that another phase reads, in front of its first reader there.

    Numbers of the inputs' sizes stay: they come before all phases.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    order = {node: i for i, node in enumerate(calls)}
    # After its readers, so that what a copy reads is copied after it.
    for node in [node for node in reversed(calls) if _is_inner(node)]:
        for phase in PHASES:
            readers = [user for user in node.users if user.op == "call_function" and note(user).phase == phase]
            if phase == note(node).phase or not readers:
                continue
            first = min(readers, key=order.__getitem__)
            with program.graph.inserting_before(first):
                copied = program.graph.node_copy(node)
            set_note(copied, replace(note(node), phase=phase))
            order[copied] = order[first]
            for reader in readers:
                reader.replace_input_with(node, copied)


def _is_inner(node: fx.Node) -> bool:
    """Returns whether a node is a number of what the program makes."""
    above = ancestors([node], _is_number)
    return _is_number(node) and any(read.op != "placeholder" and not _is_number(read) for read in above)


def _is_number(node: fx.Node) -> bool:
    return isinstance(note(node).type, ScalarType)
