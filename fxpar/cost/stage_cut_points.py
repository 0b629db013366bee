"""What a forward is cut into stages by, and what the stages have each.

Enters: a program whose sizes are a rank's. Leaves: the operations that have a place in the order, those that each stage
computes for itself, and for each place between two operations what crosses it; of a program that was cut a `StageShare`
for each stage.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import fx

from fxpar.cost.communication import symbol_sizes, value_bytes
from fxpar.cost.flops import computed_part, matmul_flops
from fxpar.cost.parameter_memory import held_bytes, local_elements
from fxpar.cost.seconds import access_seconds, filled_part, materialised, product_seconds
from fxpar.ir.grad_flow import summed, weights_of
from fxpar.ir.program import Program, ScalarType, note, operands, output_layouts, output_types, tensor_type
from fxpar.ir.stages import crossings, holders, is_transfer, stage_of
from fxpar.layout.layout import P
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.collectives import sum_gradients
from fxpar.ops.operator import Operator

aten = torch.ops.aten

# A value of parameters alone is computed again where it has at most so many times their bytes.
MOST_OF_PARAMETERS = 8
# Operations an element of a cheap node: a rotary table is an outer product.
_CHEAP = 8
# Summands cross where nothing else is to be had: what they are summed to is no larger.
_SUMMANDS = 1.5
# Bytes for each byte of a trained parameter: itself, its gradient and two moments.
_STATES = 4


@dataclass(frozen=True)
class Divisible:
    """A forward, and what it has to do with a cut.

    Attributes:
        order: operations that are computed by one stage, in the program's order.
        anywhere: operations that each stage that reads them computes for itself.
    """

    program: Program
    order: tuple[fx.Node, ...]
    anywhere: frozenset[fx.Node]

    @cached_property
    def places(self) -> Mapping[fx.Node, int]:
        """Returns each operation's place in the order; a part of several results has that of what gives them."""
        places: dict[fx.Node, int] = {}
        for i, node in enumerate(self.order):
            source = node.args[0] if node.target is operator.getitem else None
            places[node] = places[source] if isinstance(source, fx.Node) and source in places else i
        return places

    @cached_property
    def last(self) -> int:
        """Returns the last place at which a cut may lie: that of the loss, which is the last stage's."""
        loss = self.program.output_nodes().get(self.program.loss)
        end = len(self.order) - 1
        return end if loss is None else min(self.places.get(loss, end), end)

    @cached_property
    def last_read(self) -> Mapping[fx.Node, int]:
        """Returns the last place at which each operation is read, directly or by what stages compute for themselves."""
        last_reads: dict[fx.Node, int] = {}
        for node in reversed(self.program.graph.nodes):
            if node.op == "call_function":
                users = [user for user in node.users if user.op != "output"]
                places = [self.places[user] if user in self.places else last_reads.get(user, 0) for user in users]
                last_reads[node] = max(places, default=self.places.get(node, 0))
        return last_reads

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return symbol_sizes(self.program, None)

    def bytes_of(self, node: fx.Node, sizes: Mapping[str, int] | None = None) -> int:
        """Returns bytes of a node's values on a rank, for inputs of the example's sizes if no others are given."""
        return value_bytes(self.program, node, sizes or self._sizes)

    @cached_property
    def live(self) -> list[float]:
        """Returns bytes that cross each place: of values that are there before it and read after it."""
        changes = [0.0] * (len(self.order) + 1)
        for node in self.order:
            first, last = self.places[node], self.last_read[node]
            if last > first and not isinstance(note(node).type, tuple):
                size = self.bytes_of(node) * (_SUMMANDS if self._is_partial(node) else 1)
                changes[first + 1] += size
                changes[last + 1] -= size
        live, now = [], 0.0
        for change in changes[: len(self.order)]:
            now += change
            live.append(now)
        return live

    def _is_partial(self, node: fx.Node) -> bool:
        return any(placement == P for layout in output_layouts(node) for _, placement in layout)

    @cached_property
    def seconds(self) -> list[float]:
        """Returns the seconds of each operation in the order, forward and backward.

        A product of few rows fills fewer multiprocessors: layers of small microbatches are longer next to the head.
        """
        cost, axes = self.program.plan.cost, self.program.axes
        products = dict(matmul_flops(self.program))
        owned = self.program.placeholders()
        weights = weights_of(self.program.graph, [owned[p.node] for p in self.program.parameters])
        stored = materialised(self.program, products.keys(), weights)
        seconds = []
        for node in self.order:
            flops = evaluate(products[node], self._sizes) if node in products else 0
            part = computed_part(node, axes) / filled_part(self.program, node, self._sizes) if flops else 0.0
            is_stored = node in stored and not (self.program.plan.compile and _widens(node))
            accessed = access_seconds(self.bytes_of(node), 1, cost) if is_stored else 0.0
            seconds.append(product_seconds(flops, part, cost) + accessed)
        return seconds

    @cached_property
    def state_bytes(self) -> list[float]:
        """Returns bytes of the parameters that each operation is the first to read, with what trains them."""
        first: dict[fx.Node, int] = {}
        for node in reversed(self.program.graph.nodes):
            for read in _made_of(node) if node.op == "call_function" else ():
                place = self.places.get(node, first.get(node))
                if place is not None:
                    first[read] = min(place, first.get(read, place))
        nodes = self.program.placeholders()
        sizes = [0.0] * len(self.order)
        for p in self.program.parameters:
            if nodes[p.node] in first:
                sizes[first[nodes[p.node]]] += self.bytes_of(nodes[p.node]) * (_STATES if p.trainable else 1)
        return sizes

    @cached_property
    def reads(self) -> Mapping[fx.Node, frozenset[str]]:
        """Returns the parameters that each operation reads, itself or by what stages compute for themselves."""
        fqns: dict[fx.Node, frozenset[str]] = {}
        for node in self.program.graph.nodes:
            parameter = self.program.parameter(node) if node.op == "placeholder" else None
            if parameter is not None and parameter.kind == "parameter":
                fqns[node] = frozenset({parameter.fqn})
            elif node.op == "call_function":
                same = summed(node)  # one of many whose gradients are summed together
                sources = [read for read in node.all_input_nodes if read not in self.places] if same is None else [same]
                fqns[node] = frozenset().union(*(fqns.get(read, frozenset()) for read in sources))
        return fqns

    @cached_property
    def saved_bytes(self) -> list[float]:
        """Returns bytes of a microbatch that each operation in the order leaves for the backward."""
        products = {node for node, _ in matmul_flops(self.program)}
        stored = materialised(self.program, products, set())
        return [float(self.bytes_of(node)) if node in stored else 0.0 for node in self.order]


def _widens(node: fx.Node) -> bool:
    """Returns whether it casts to a larger type: compiled, the kernel that reads the result does, as no product can."""
    if node.target is not aten._to_copy.default:
        return False
    return tensor_type(node).dtype.itemsize > tensor_type(node.all_input_nodes[0]).dtype.itemsize


def divisible(program: Program) -> Divisible:
    """Returns the operations of a forward that has the property `local`."""
    anywhere = _anywhere(program)
    order = tuple(n for n in program.graph.nodes if n.op == "call_function" and n not in anywhere)
    return Divisible(program, order, frozenset(anywhere))


def _anywhere(program: Program) -> set[fx.Node]:
    """Returns what needs no sending: cheap values of inputs alone, or of parameters alone and not much larger.

    Sums of gradients of parameters give the parameters again. Numbers of sizes are no tensors.
    """
    trained = {p.node for p in program.parameters if p.kind == "parameter"}
    products = dict(matmul_flops(program))
    values = symbol_sizes(program, None)
    # Of each node the parameters that it is made of, and whether it is made of inputs.
    origins: dict[fx.Node, tuple[frozenset[fx.Node], bool]] = {}
    anywhere: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            is_input = program.parameter(node) is None
            origins[node] = (frozenset({node}) if node.name in trained else frozenset(), is_input)
            continue
        if node.op != "call_function" or any(read not in origins for read in node.all_input_nodes):
            continue
        if isinstance(note(node).type, ScalarType):
            origins[node] = frozenset(), False
            anywhere.add(node)
            continue
        if _communicates(node) or not _is_cheap(node, products, values):
            continue
        parameters = frozenset().union(*(origins[read][0] for read in _made_of(node)))
        of_inputs = any(origins[read][1] for read in _made_of(node))
        if parameters and of_inputs:
            continue
        largest = MOST_OF_PARAMETERS * sum(value_bytes(program, parameter, values) for parameter in parameters)
        is_whole = node.target is sum_gradients or bool(note(node).shard)
        if parameters and not is_whole and value_bytes(program, node, values) > largest:
            continue
        origins[node] = parameters, of_inputs
        anywhere.add(node)
    return anywhere


def _made_of(node: fx.Node) -> Sequence[fx.Node]:
    """Returns what a node is computed of; of a bucket's sums each is one parameter's, whoever reads the others."""
    if node.target is operator.getitem:
        bucket, index = node.args
        if isinstance(bucket, fx.Node) and bucket.target is sum_gradients and isinstance(index, int):
            return (operands(bucket)[index],)
    return () if node.target is sum_gradients and isinstance(note(node).type, tuple) else operands(node)


def _communicates(node: fx.Node) -> bool:
    """Returns whether its forward does, or it draws bits."""
    record = node.target
    if not isinstance(record, Operator):
        return False
    if record.sums_gradients or note(node).shard:  # each stage gathers the parameters that it reads
        return False
    return record.draws or bool(record.uncaptured) or (record.traffic is not None and record.sends[0] != "")


def _is_cheap(node: fx.Node, products: Mapping[fx.Node, object], values: Mapping[str, int]) -> bool:
    flops = products.get(node)
    if flops is None:
        return note(node).random == 0
    elements = sum(prod(evaluate(size, values) for size in kind.shape) for kind in output_types(node))
    return bool(evaluate(flops, values) <= _CHEAP * elements)


def candidates(forward: Divisible, stages: int, must: Sequence[int] = ()) -> list[int]:
    """Returns the places at which the order may be cut, ascending.

    A place is none if less crosses another that is near, so that stages lose next to nothing by taking that. After the
    loss there is none.

    Args:
        stages: how many are wanted.
        must: places that are candidates in any case.
    """
    before = [0.0]
    for seconds in forward.seconds:
        before.append(before[-1] + seconds)
    near = before[-1] / (8 * stages)
    live = forward.live
    places = []
    for place in range(1, forward.last + 1):
        if place in must or not _has_better(place, live, before, near):
            places.append(place)
    return places


def _has_better(place: int, live: Sequence[float], before: Sequence[float], near: float) -> bool:
    for step in (-1, 1):
        other = place + step
        while 0 < other < len(live) and abs(before[other] - before[place]) <= near:
            # Of equal ones the last: it is where a layer ends.
            if live[other] < live[place] or (
                live[other] == live[place] and step > 0 and before[other] == before[place]
            ):
                return True
            other += step
    return False


# ---------------------------------------------------------------------- stages of a program that was cut


@dataclass(frozen=True)
class Received:
    """A value that a stage receives: its name, what it is on one device, its bytes on a rank, of a microbatch.

    Attributes:
        returns: whether its gradient, of as many bytes, goes back.
    """

    value: str
    type: str
    bytes: int
    returns: bool


@dataclass(frozen=True)
class StageShare:
    """What one stage has of the model.

    Attributes:
        stage: its number; it lies on rank `stage` modulo the size of the pipeline.
        first: the module that it begins with.
        last: the module that it ends with.
        flops: of its matrix products in a forward, of all ranks that hold the stage together.
        share: these as a part of all stages'.
        elements: of the parameters that a rank of it holds; what two stages hold is counted by both.
        bytes: of these.
        received: in the order in which it is sent.
    """

    stage: int
    first: str
    last: str
    flops: int
    share: float
    elements: int
    bytes: int
    received: tuple[Received, ...]


def stage_shares(program: Program, sizes: Mapping[str, int] | None = None) -> tuple[StageShare, ...]:
    """Returns the shares of all stages.

    Args:
        program: after `partition_stages`.
        sizes: of the inputs by symbol; the example's where they are not given.
    """
    values = symbol_sizes(program, sizes)
    count = program.plan.pipeline_stages
    flops = [0] * count
    for node, formula in matmul_flops(program):
        flops[stage_of(node)] += int(evaluate(formula, values))
    forward = divisible(program)
    modules: list[list[str]] = [[] for _ in range(count)]
    for node in forward.order:
        if note(node).fqn and not is_transfer(node):
            modules[stage_of(node)].append(note(node).fqn)
    stages_of = holders(program)
    total = sum(flops)
    entering = crossings(program)
    shares = []
    for stage in range(count):
        owned = [p for p in program.parameters if p.kind == "parameter" and stage in stages_of[p.fqn]]
        received = tuple(
            Received(c.source.name, str(c.type), forward.bytes_of(c.node, values), c.carries)
            for c in entering
            if c.receiver == stage
        )
        names = modules[stage] or [""]
        elements, size = sum(local_elements(program, p) for p in owned), sum(held_bytes(program, p) for p in owned)
        part = flops[stage] / total if total else 0.0
        shares.append(StageShare(stage, names[0], names[-1], flops[stage], part, elements, size, received))
    return tuple(shares)


@dataclass(frozen=True)
class Send:
    """A value that a stage sends for each microbatch.

    Attributes:
        stage: that sends it.
        to: the stage that receives it.
        value: its name, or that of the value of which it is the gradient.
        phase: forward, or backward for a gradient.
        bytes: of what one rank sends.
        seconds: by the plan's constants for pp, alone.
    """

    stage: int
    to: int
    value: str
    phase: str
    bytes: int
    seconds: float


def sends(program: Program, sizes: Mapping[str, int] | None = None) -> list[Send]:
    """Returns what the stages of a pipeline send to each other: forward, and gradients back.

    Args:
        program: after `partition_stages`.
        sizes: of the inputs by symbol; the example's where they are not given.
    """
    cost = program.plan.cost.on(["pp"])
    everything = []
    for share in stage_shares(program, sizes):
        for one in share.received:
            seconds = cost.latency + one.bytes / cost.bandwidth
            everything.append(Send(share.stage - 1, share.stage, one.value, "forward", one.bytes, seconds))
            if one.returns:
                everything.append(Send(share.stage, share.stage - 1, one.value, "backward", one.bytes, seconds))
    return sorted(everything, key=lambda one: (one.stage, one.phase != "forward"))


def in_flight(ranks: int, virtual: int, rank: int) -> tuple[int, ...]:
    """Returns microbatches of each of a rank's stages whose activations it keeps at the peak of (interleaved) 1F1B.

    That is after its warmup and one forward more (SPEC section 3), of microbatches in groups of `ranks`, where there
    are at least as many as that.

    Args:
        rank: of the pipeline.
    """
    if virtual == 1:
        return (ranks - rank,)
    first = 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
    counts = [0] * virtual
    for i in range(first):
        counts[i // ranks % virtual] += 1
    return tuple(counts)
