"""What a rank runs of a step: calls in order over named values, which need no autograd.

Enters: functions, compiled or not, that take one list of values. Leaves: `StepCalls`, the forward and the backward of a
step, and `ForwardCalls`, a forward alone.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen
from torch.profiler import record_function

from fxpar.ir.program import Program, has_note, note
from fxpar.ir.step import ONCE, PHASES, RECOMPUTE, phase_of
from fxpar.ops.process_group import start_gather, start_gathers
from fxpar.ops.small_operators import Destination, into, place_products, product_in_place
from fxpar.runtime.units import Segment, is_number, segments

Values = dict[str, Any]
Boxed = Callable[[list[Any]], Sequence[Any]]


# Ranges of a profile with the names of the program's nodes. When they are off, a call reads one attribute.


class _Switch:
    is_on = False


_SWITCH = _Switch()


@contextmanager
def node_ranges() -> Iterator[None]:
    """Makes all calls of steps leave ranges with the names of nodes."""
    _SWITCH.is_on = True
    try:
        yield
    finally:
        _SWITCH.is_on = False


class _NamedNodes(fx.Interpreter):
    """Runs a graph node by node, which computes the same as its code."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        with record_function(n.name):
            return super().run_node(n)


def _called(function: Callable[[list[Any]], Sequence[Any]], operands: list[Any], gives: Sequence[str]) -> Sequence[Any]:
    """Calls a unit, with ranges where they are on.

    Args:
        function: takes a list, which it empties.
        gives: names of the values that it returns.
    """
    if not _SWITCH.is_on:
        return function(operands)
    if isinstance(function, fx.GraphModule):
        taken = tuple(operands)
        operands.clear()
        results: Sequence[Any] = _NamedNodes(function).run(*taken)
        return results
    with record_function("unit", ", ".join(filter(None, gives))):
        return function(operands)


class GradientSink(Protocol):
    """Where gradients are to stay: by parameter those of a whole backward, else by name of the value."""

    def __call__(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Puts gradients there, but those that are there already; gives the places."""

    def destination(self, name: str) -> Destination | None:
        """Returns where one may be written at once; None where something else comes first."""


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit.

    Attributes:
        function: takes one list, which it empties.
        takes: names of the values that it takes.
        gives: names of those that it gives; empty for what nobody reads.
        frees: those of `takes` that nothing reads later.
        uncaptured: why no CUDA graph can hold it; empty where one can.
    """

    function: Boxed
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    frees: frozenset[str] = frozenset()
    uncaptured: str = ""

    def __call__(self, values: Values) -> None:
        """Takes from `values`, and puts there what it gives."""
        operands = [values[name] for name in self.takes]  # one may be taken twice
        # Freed before the call: the function empties its list, and so memory is free at the last use inside of it.
        for name in self.frees:
            del values[name]
        for name, value in zip(self.gives, _called(self.function, operands, self.gives), strict=True):
            if name:
                values[name] = value


def freeing(calls: Sequence[UnitCall], needed: Iterable[str]) -> list[UnitCall]:
    """Returns the calls, each of which frees what it reads last.

    Args:
        needed: names of the values that are wanted at the end, which stay.
    """
    later = set(needed)
    # From the end on, since only what comes later says whether a read is the last one.
    reversed_calls = []
    for call in reversed(calls):
        frees = frozenset(name for name in call.takes if name not in later)
        gives = tuple(name if name in later else "" for name in call.gives)
        later.update(call.takes)
        reversed_calls.append(replace(call, frees=frees, gives=gives))
    return reversed_calls[::-1]


def size_name(name: str) -> str:
    """Returns the name of the value that is a size."""
    return f"size {name}"


class Runnable(Protocol):
    """A step as a rank runs it.

    Attributes:
        whole: whether the backward ends with the parameters' gradients, and not with what each rank has of them.
    """

    whole: bool

    def forward(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], Values]:
        """Returns the model's outputs by name, and what the backward takes before the tangents.

        Args:
            values: of the program's inputs, by name of the placeholder.
            sizes: of the call, by symbol.
        """

    def input_backward(
        self, saved: Values, tangents: Mapping[str, Tensor], place: GradientSink | None = None
    ) -> dict[str, Tensor]:
        """Runs the backward, but for what only gradients of weights need where a schedule splits it.

        Args:
            saved: what the forward left; `weight_backward` takes it afterwards.
            tangents: by name of the output.
            place: called with gradients as soon as they are there.

        Returns:
            The gradients of a stage's inputs, by name of the value.
        """

    def weight_backward(self, saved: Values, place: GradientSink | None = None) -> dict[str, Tensor]:
        """Runs the rest of the backward, after `input_backward`; as for that.

        Returns:
            The parameters' gradients, or what this rank has of them, by name of the value. The next forward of a
            stage may overwrite its.
        """


class _Calls:
    """Calls, and the values that they take besides the program's inputs, by name."""

    constants: Mapping[str, Any]

    def start(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Values:
        """Returns what is there before the first call."""
        return {**self.constants, **{size_name(name): size for name, size in sizes.items()}, **values}


class StepCalls(_Calls):
    """The calls of a step.

    Args:
        forward: its calls, and those of its backward, which free nothing yet.
        constants: values that they take besides the program's inputs, by name.
        whole: as for `Runnable`.
        early: how many calls of a backward in two parts come before those that only gradients of weights need.

    Attributes:
        early: how many calls are the first part; all of a whole backward.
        gives: names of the parameters' gradients, or of what this rank has of them.
    """

    def __init__(
        self,
        step: LoweredStep,
        forward: Sequence[UnitCall],
        backward: Sequence[UnitCall],
        constants: Mapping[str, Any],
        *,
        whole: bool,
        early: int,
    ) -> None:
        self.step, self.whole, self.early = step, whole, len(backward) if whole else early
        self.gives = tuple(step.gradients.values()) if whole else step.unfinished
        needed = (*step.results.values(), *self.gives, *step.returned.values())
        calls = freeing([*forward, *backward], needed)
        self.forward_calls, self.backward_calls = calls[: len(forward)], calls[len(forward) :]
        self.constants = dict(constants)
        self.ready = self._ready()
        self._arriving = self._arrivals()

    def forward(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], Values]:
        """Implements `Runnable`."""
        environment = self.start(values, sizes)
        for call, arriving in zip((*self.forward_calls, None), self._arriving, strict=True):
            for arrival in arriving:
                if environment.keys() >= arrival.frees:  # else the caller has waited
                    arrival(environment)
            if call is not None:
                call(environment)
        return {name: environment[value] for name, value in self.step.results.items()}, environment

    def _arrivals(self) -> list[list[UnitCall]]:
        """Returns what is waited for in front of each call of the forward, of which it is the first reader, and behind
        the last."""
        arriving: list[list[UnitCall]] = [[] for _ in range(len(self.forward_calls) + 1)]
        for arrival in self.step.arriving:
            readers = (i for i, call in enumerate(self.forward_calls) if not {*arrival.gives}.isdisjoint(call.takes))
            arriving[next(readers, -1)].append(arrival)
        return arriving

    def input_backward(
        self, saved: Values, tangents: Mapping[str, Tensor], place: GradientSink | None = None
    ) -> dict[str, Tensor]:
        """Implements `Runnable`."""
        saved.update({self.step.tangents[name]: tangent for name, tangent in tangents.items()})
        for index in range(self.early):
            self.run_backward(index, saved, place)
        return {name: saved[name] for name in self.step.returned.values()}

    def weight_backward(self, saved: Values, place: GradientSink | None = None) -> dict[str, Tensor]:
        """Implements `Runnable`."""
        for index in range(self.early, len(self.backward_calls)):
            self.run_backward(index, saved, place)
        return {name: saved[name] for name in self.gives}

    def run_backward(self, index: int, values: Values, place: GradientSink | None) -> None:
        """Runs one call of the backward, and places the gradients that are ready then."""
        call, ready = self.backward_calls[index], self.ready[index]
        if place is None or not ready:
            call(values)
            return
        names = {value: name for name, value in ready.items()}
        # A kernel may write a gradient straight into its buffer, which spares a copy after it.
        with into([place.destination(names[value]) if value in names else None for value in call.gives]):
            call(values)
        placed = place({name: values[value] for name, value in ready.items()})
        values.update({value: placed[name] for name, value in ready.items()})

    def _ready(self) -> list[dict[str, str]]:
        """Returns, for each call of the backward, the gradients that are there then and that nobody else reads.

        Not what is the gradient of several parameters: one place would be given to all of them.
        """
        ready: list[dict[str, str]] = []
        names = self.step.gradients if self.whole else {value: value for value in self.gives}
        shared = Counter(names.values())
        gradients = {name: value for name, value in names.items() if shared[value] == 1}
        read = set(self.step.returned.values())
        for call in reversed(self.backward_calls):
            ready.append({f: v for f, v in gradients.items() if v in call.gives and v not in read})
            read.update(call.takes)
        return ready[::-1]


class ForwardCalls(_Calls):
    """A forward alone, for which nothing is kept.

    Args:
        results: of each wanted output, the name of its value.
        constants: as for `StepCalls`.
    """

    def __init__(self, calls: Sequence[UnitCall], results: Mapping[str, str], constants: Mapping[str, Any]) -> None:
        self.calls, self.results = freeing(calls, results.values()), dict(results)
        self.constants = dict(constants)

    def __call__(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns the outputs by name; sizes as for a step."""
        environment = self.start(values, sizes)
        for call in self.calls:
            call(environment)
        return {name: environment[value] for name, value in self.results.items()}


def eager_calls(step: LoweredStep, *, whole: bool) -> StepCalls:
    """Returns a step that runs operator by operator."""
    backward = step.whole_backward if whole else step.backward
    return StepCalls(step, step.forward, backward, {}, whole=whole, early=step.early)


# A lowered step, cut by phase: what runs in the forward, in the backward, and once after all microbatches.


class Emptying(CodeGen):
    """Code that takes its arguments as one list and empties it, so that each is freed after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """Returns the head of the function, and how it takes its arguments."""
        names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars]
        names = [name for name in names if name != "self"]
        taken = f"\n    {', '.join(names)}, = values\n    values.clear()" if names else ""
        return f"def {self._func_name}(self, values){maybe_return_annotation}:{taken}"


def emptying(function: fx.GraphModule) -> fx.GraphModule:
    """Returns a function of values as one of a list of them, which it empties."""
    function.graph.set_codegen(Emptying())
    function.recompile()
    return function


Calls = tuple[UnitCall, ...]


@dataclass(frozen=True)
class LoweredStep:
    """A step as a rank runs it, operator by operator.

    Attributes:
        program: forward, backward and parameter phase.
        graph: that, lowered.
        forward: its calls, which hand values on by name.
        backward: leaves what each rank has of the parameters' gradients.
        parameter: makes the gradients of these, once after all microbatches.
        whole_backward: both in one.
        results: names of the model's outputs' values.
        gradients: of each parameter that has one, the name of its value.
        unfinished: names of the values that the backward leaves for the parameter phase, gradients among them.
        tangents: of each output that has one, the name of the tangent's value.
        returned: of each gradient of an input, by name of the output, the name of its value.
        early: how many calls of the backward come before what only gradients of weights need.
        arriving: calls that wait for parameters that are gathered once a step.
    """

    program: Program
    graph: fx.Graph
    forward: Calls
    backward: Calls
    parameter: Calls
    whole_backward: Calls
    results: Mapping[str, str]
    gradients: Mapping[str, str]
    unfinished: tuple[str, ...]
    tangents: Mapping[str, str]
    returned: Mapping[str, str]
    early: int
    arriving: Calls = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """Returns names of the values that a backward leaves whose gradients wait for others."""
        return tuple(dict.fromkeys((*self.unfinished, *self.returned.values())))

    @property
    def signature(self) -> Hashable:
        """Returns what is equal for steps that leave the same of the gradients, and make the same of it."""
        return self.unfinished, tuple(self.gradients.items())

    @cached_property
    def uncaptured(self) -> fx.Node | None:
        """Returns the first operation that no CUDA graph can hold."""
        return uncaptured(self.graph)

    @cached_property
    def recomputes(self) -> bool:
        """Returns whether the program says what is computed again."""
        nodes = (node for node in self.graph.nodes if node.op == "call_function" and has_note(node))
        return any(note(node).recompute or note(node).origin == RECOMPUTE for node in nodes)


def uncaptured(graph: fx.Graph) -> fx.Node | None:
    """Returns the first operation that no CUDA graph can hold."""
    nodes = (node for node in graph.nodes if node.op == "call_function" and has_note(node))
    return next((node for node in nodes if note(node).uncaptured), None)


def cut(graph: fx.Graph) -> tuple[Calls, Calls, Calls, Calls, Calls]:
    """Returns the calls of a lowered step by phase, and those of all phases but the first together.

    Each runs operator by operator what stands between two operations that no CUDA graph can hold. Results of the graph
    have the names of the nodes that give them.
    """
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    returned = frozenset(end.all_input_nodes)

    def calls(phases: Sequence[str]) -> Calls:
        return tuple(_eager_call(segment, returned) for segment in segments(graph, phases, at_regions=False))

    forward, backward, weight, parameter = ((phase,) for phase in PHASES)
    return calls(forward), calls(backward), calls(weight), calls(parameter), calls((*backward, *weight, *parameter))


@dataclass(frozen=True)
class OnceCalls:
    """What a program computes of parameters once a step: gathers of those that data ranks share out.

    Attributes:
        start: starts all gathers.
        finish: waits for one of them and returns its parameters whole, in the order of use. Where nothing can be
            computed between, there is none, and `start` waits itself.
    """

    start: UnitCall
    finish: tuple[UnitCall, ...]

    @property
    def gives(self) -> tuple[str, ...]:
        """Returns names of the whole parameters."""
        return tuple(name for call in self.finish or (self.start,) for name in call.gives)


def once_calls(graph: fx.Graph) -> OnceCalls | None:
    """Returns what a lowered program computes of parameters once a step; None of one without such.

    The rest of the program computes what these values are made of for itself too.
    """
    marked = [node for node in graph.nodes if node.op == "call_function" and has_note(node) and phase_of(node) == ONCE]
    nodes, pending = set(marked), [*marked]
    for node in pending:
        more = [read for read in node.all_input_nodes if read.op == "call_function" and read not in nodes]
        nodes.update(more)
        pending += more
    gives = [node for node in marked if any(user not in nodes for user in node.users)]
    if not gives:
        return None
    ordered = [node for node in graph.nodes if node in nodes]
    groups = _by_gather(ordered)
    if groups is None:
        return OnceCalls(_eager_call(Segment(tuple(ordered), ""), (), gives), ())
    late = set().union(*groups)
    early = tuple(node for node in ordered if node not in late)
    started = [node for node in early if not late.isdisjoint(node.users)]
    # The step, in which these calls end, may have other values of the same names.
    names = {node.name: f"gathering {node.name}" for node in started}
    start = _eager_call(Segment(early, ""), (), started)
    finish = []
    for group in groups:
        call = _eager_call(Segment(tuple(group), ""), (), [node for node in gives if node in group])
        takes = tuple(names[name] for name in call.takes)
        finish.append(replace(call, takes=takes, frees=frozenset(takes)))
    return OnceCalls(replace(start, gives=tuple(names[name] for name in start.gives)), tuple(finish))


def _by_gather(nodes: Sequence[fx.Node]) -> list[list[fx.Node]] | None:
    """Returns the nodes that wait for each gather, and what follows from them; None where they depend on more."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    gathers: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        sources = {gathers[read] for read in node.all_input_nodes if read in gathers}
        is_start = node.target in (start_gather, start_gathers)
        if is_start and not sources:
            gathers[node] = node
            groups[node] = []
        elif sources:
            if is_start or len(sources) > 1 or not gathers.keys() >= {*node.all_input_nodes}:
                return None
            (gathers[node],) = sources
            if node.target is not operator.getitem or node.args[0] not in groups:
                groups[gathers[node]].append(node)
    return list(groups.values())


def _eager_call(segment: Segment, returned: Collection[fx.Node], outputs: Sequence[fx.Node] | None = None) -> UnitCall:
    """Returns what computes the nodes of a segment, with the numbers that they read.

    Args:
        returned: results of the graph.
        outputs: what it gives; by default what others read.
    """
    computed = [node for node in segment.nodes if not is_number(node)]
    inside = frozenset(computed)

    def is_read_outside(node: fx.Node) -> bool:
        """Returns whether others read it, also where another segment reads a size off it, which that makes itself."""
        users = [user for user in node.users if user.op != "output" and user not in inside]
        return any(not is_number(user) or is_read_outside(user) for user in users)

    if outputs is None:
        outputs = [node for node in computed if node in returned or is_read_outside(node)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in segment.outer:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    place_products(graph, product_in_place)
    takes, gives = (tuple(node.name for node in group) for group in (segment.outer, outputs))
    return UnitCall(emptying(fx.GraphModule(nn.Module(), graph)), takes, gives, uncaptured=segment.uncaptured)
