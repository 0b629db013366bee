"""partition_stages: the program of a pipeline, each node on its stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from fxpar.analysis.divisible import Divisible, candidates, divisible
from fxpar.analysis.layers import layers
from fxpar.analysis.storages import storages
from fxpar.choice.cuts import Units, best_cuts, stage_ends
from fxpar.errors import InputError, PassError
from fxpar.manager import Pass, register_pass
from fxpar.ops.coercions import sum_gradients
from fxpar.ops.transfers import transfer
from fxpar.passes.prune import shrink
from fxpar.passes.recompute import mark_layers
from fxpar.program.copying import copy_node
from fxpar.program.program import Note, Program, TensorType, describe, note, set_note, update
from fxpar.program.properties import Property
from fxpar.program.stages import stage_of


def _has_stages(program: Program) -> bool:
    """the plan has a pipeline"""
    return program.plan.pipeline_stages > 1


@register_pass("partition_stages", requires={Property.LOCAL}, provides={Property.STAGES}, when=_has_stages)
def partition_stages(program: Program) -> Program:
    """Gives each operation to a stage of the pipeline; what a later stage reads is transferred.

    Before (pp 2)::

        %h = aten.add.Tensor(%x, %y) : f32[b, 96]
        %out = aten.mm.default(%h, %w) : f32[b, 64]

    After::

        %h = aten.add.Tensor(%x, %y) : f32[b, 96] {stage=0}
        %h_on_1 = fxpar.transfer(%h) : f32[b, 96] {stage=1}
        %out = aten.mm.default(%h_on_1, %w) : f32[b, 64] {stage=1}

    Terms: a *place* lies between two operations in the program's order; what *crosses* it is there before it and read
    behind it. A value is passed from stage to stage until the last that reads it, and its gradient the same way back.

    Algorithm: cheap values of inputs (positions, masks, rotary tables) and values of parameters alone are computed by
    each stage that reads them, and never sent; a parameter is held by each stage that reads it, so tied ones are by
    several. Of the other operations, places are candidates where no less crosses another one near. Over the candidates
    the cut is exact (`fxpar.choice.cuts`): the longest stage is as short as it can be, then what a stage holds and
    keeps as little, then what crosses. `Plan.stages` says where some or all stages begin.

    Values stay equal. Refuses more stages than there are places, and a plan's place that is none.
    """
    found = divisible(program)
    return _cut(found, _chosen(found))


def holding(held: Mapping[str, tuple[int, ...]]) -> Pass:
    """`partition_stages` for a further program of a module that exists already.

    Args:
        held: the stages that hold each parameter in the module, by its name. The program is cut so that they do.
    """

    def run(program: Program) -> Program:
        found = divisible(program)
        return _cut(found, _as_held(found, held))

    return replace(partition_stages, run=run)


def _chosen(found: Divisible) -> list[int]:
    """The places of the cuts, by the plan and by cost."""
    plan = found.program.plan
    count = plan.pipeline_stages
    fixed = _asked(found, plan.stages, count)
    order = [0, *(place for _, place in sorted(fixed.items()))]
    if any(later <= sooner for sooner, later in pairwise(order)):
        raise InputError(
            "the modules do not run in the order of their stages, or the first one runs first of all",
            where="stages",
            remedy="give each stage a module that runs later, and leave stage 0 out",
        )
    places = candidates(found, count, tuple(fixed.values()))
    if len(places) < count - 1:
        raise InputError(
            f"{count} stages need {count - 1} places to cut at, and the model has {len(places)}",
            where="pp",
            remedy="ask for fewer stages",
        )
    bounds = [0, *places, len(found.order)]
    try:
        cuts = best_cuts(
            _units(found, bounds), plan.pp, plan.virtual_stages, {k: bounds.index(p) for k, p in fixed.items()}
        )
    except ValueError as error:
        remedy = "give other modules, in the order in which they run"
        raise InputError(f"{error} with these beginnings", where="stages", remedy=remedy) from None
    return [bounds[i] for i in cuts]


def _as_held(found: Divisible, held: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The places at which parameters come to be on the stages that hold them; of several those that least crosses.

    Raises:
        InputError: an operation reads parameters of different stages, or one of an earlier stage than is due.
    """
    count = found.program.plan.pipeline_stages
    # By stage, the last place that must be on it or before, and the first that must be on it or behind.
    last, first = [-1] * count, [len(found.order)] * (count + 1)
    now = 0
    for node in found.order:
        names = [name for name in found.reads[node] if name in held]
        legal = set(range(now, count)).intersection(*(held[name] for name in names))
        if not legal:
            raise InputError(
                f"reads {', '.join(sorted(names))}, which is on no stage behind those of what runs before",
                where=describe(node),
                remedy="call the module so that parameters are used in the order in which the example uses them",
            )
        if names:
            now = min(legal)
            last[now] = found.places[node]
            first[now] = min(first[now], found.places[node])
    cuts, start = [], 0
    for number in range(1, count):
        low = max(start, *last[:number]) + 1
        high = min(*first[number:], len(found.order) - (count - number))
        if low > high:
            raise InputError(
                f"leaves stage {number} of {count} nothing to compute",
                where="this call",
                remedy="call the module with what the example had",
            )
        start = min(range(low, high + 1), key=lambda place: (found.live[place], -place))
        cuts.append(start)
    return cuts


def _cut(found: Divisible, cuts: Sequence[int]) -> Program:
    if found.program.plan.recompute == "full":
        mark_layers(found.program)
    stage: dict[fx.Node, int] = {}
    for index, (start, end) in enumerate(stage_ends(cuts, len(found.order))):
        stage.update({node: index for node in found.order if start <= found.places[node] < end})
    _Stages(found.program, stage).place()
    return found.program


def _units(found: Divisible, bounds: Sequence[int]) -> Units:
    """What stands between two neighbouring places."""
    cost = found.program.plan.cost.on(("pp",))
    spans = list(pairwise(bounds))
    crossing = [found.live[place] for place in bounds[:-1]]
    return Units(
        [sum(found.seconds[a:b]) for a, b in spans],
        [sum(found.held[a:b]) for a, b in spans],
        [sum(found.kept[a:b]) for a, b in spans],
        crossing,
        # Without the latency: an example may be smaller than what is trained, and all else grows with it.
        [size / cost.bandwidth for size in crossing],
    )


def _asked(found: Divisible, asked: Mapping[str, int] | Sequence[int], count: int) -> dict[int, int]:
    """Places that the plan asks for, by number of the stage that begins there.

    Raises:
        InputError: a module computes nothing, or the layers are others.
    """
    if isinstance(asked, Mapping):
        return {number: _beginning(found, name) for name, number in sorted(asked.items(), key=lambda e: e[1])}
    if not asked:
        return {}
    runs = layers(found.program, storages(found.program, frozenset()))
    if sum(asked) != len(runs):
        raise InputError(
            f"{' + '.join(map(str, asked))} layers are {sum(asked)}, and the model has {len(runs)}",
            where="stages",
            remedy="give numbers whose sum is that, or modules at which stages begin",
        )
    starts = [next(found.places[node] for node in run if node in found.places) for run in runs]
    return {number: starts[sum(asked[:number])] for number in range(1, count)}


def _beginning(found: Divisible, name: str) -> int:
    for node in found.order:
        fqn = note(node).fqn
        if fqn == name or fqn.startswith(f"{name}."):
            return found.places[node]
    own = any(note(node).fqn == name or note(node).fqn.startswith(f"{name}.") for node in found.anywhere)
    raise InputError(
        "each stage computes this module for itself" if own else "no operation of the program is of this module",
        where=f"stages[{name!r}]",
        remedy="name a module as the model does: `fxpar trace` lists them behind each node",
    )


class _Stages:
    """Puts copies and transfers into a program.

    Args:
        stage: of each operation that is computed by one.
    """

    def __init__(self, program: Program, stage: Mapping[fx.Node, int]) -> None:
        self.program, self.graph, self.stage = program, program.graph, stage
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}
        # Of a copy what it is a copy of.
        self.origin: dict[fx.Node, fx.Node] = {}

    def place(self) -> None:
        """Gives every node its stages."""
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        for node, stage in self.stage.items():
            update(node, stages=(stage,))
            self.made[node, stage] = node
        for node in nodes:
            if node in self.stage:
                self._read_here(node, self.stage[node])
        end = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        last = max(self.stage.values())
        for value in end.all_input_nodes:
            if value.op == "call_function" and value not in self.stage:
                end.replace_input_with(value, self._on(value, last, end))
        for node in reversed(nodes):
            if node not in self.stage and not node.users:
                self.graph.erase_node(node)
        for node in self.graph.nodes:
            if node.target is sum_gradients and isinstance(note(node).type, tuple):
                shrink(node)
        self._hold()

    def _read_here(self, node: fx.Node, stage: int) -> None:
        """Lets a node read what its stage has."""
        for read in dict.fromkeys(node.all_input_nodes):
            if read.op == "call_function":
                own = self._on(read, stage, node)
                if own is not read:
                    node.replace_input_with(read, own)

    def _on(self, value: fx.Node, stage: int, reader: fx.Node) -> fx.Node:
        """A value on a stage, computed there or received."""
        value = self.origin.get(value, value)
        known = self.made.get((value, stage))
        if known is not None:
            return known
        new = self._received(value, stage, reader) if value in self.stage else self._computed(value, stage, reader)
        self.made[value, stage] = new
        return new

    def _received(self, value: fx.Node, stage: int, reader: fx.Node) -> fx.Node:
        if not isinstance(note(value).type, TensorType):
            raise PassError(
                f"%{reader.name} of stage {stage} reads it, and only tensors can be sent",
                where=describe(value),
                remedy="move the beginning of that stage by Plan(stages=…)",
            )
        source = self._on(value, stage - 1, reader)
        name = f"{value.name}_on_{stage}"
        with self.graph.inserting_before(reader):
            new = self.graph.create_node("call_function", transfer, (source,), name=name)
        kept = note(value)
        return set_note(
            new, Note(type=kept.type, layout=kept.layout, fqn=kept.fqn, source=kept.source, stages=(stage,))
        )

    def _computed(self, value: fx.Node, stage: int, reader: fx.Node) -> fx.Node:
        """A copy of what each stage computes for itself; the first takes the node itself."""
        sources = {read: self._on(read, stage, reader) for read in value.all_input_nodes if read.op == "call_function"}
        sources |= {read: read for read in value.all_input_nodes if read.op == "placeholder"}
        if not note(value).stages:
            for read, own in sources.items():
                if own is not read:
                    value.replace_input_with(read, own)
            return update(value, stages=(stage,))
        with self.graph.inserting_after(value):
            new = copy_node(self.graph, value, sources, f"{value.name}_on_{stage}")
        self.origin[new] = value
        return update(new, stages=(stage,))

    def _hold(self) -> None:
        """Parameters are held by the stages that read them; what nothing reads by the first."""
        for parameter in self.program.parameters:
            node = self.program.node(parameter.node)
            stages = {stage_of(user) for user in node.users if user.op == "call_function"}
            update(node, stages=tuple(sorted(stages)) or (0,))
