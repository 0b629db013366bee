"""A step compiled for the shapes of calls: each distinct unit once, and the calls of them in order.

Enters: a lowered step, values that tell its shapes, and which sizes are symbols (`fxpar.runtime.sizes`). Leaves: its
forward and its backward as lists of calls, which run without autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from fxpar.layout.symbols import Size
from fxpar.plan.plan import Plan
from fxpar.program.program import output_node
from fxpar.program.step import BACKWARD, PARAMETER
from fxpar.runtime.inductor import Boxed, Inductor, Pair
from fxpar.runtime.parts import Step
from fxpar.runtime.progress import Progress
from fxpar.runtime.segments import Segment, Unit, graph_of, is_number
from fxpar.runtime.sizes import Scope, Scopes, Variants
from fxpar.runtime.units import Units, units_of

Values = dict[str, Any]
# Gradients by parameter to where they are to stay.
Place = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
# Told how many of a step's units are compiled, and of how many.
Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Run:
    """One call of a compiled unit.

    Attributes:
        function: takes one list, which it empties.
        takes: names of the values that it takes.
        gives: names of those that it gives; empty for what nobody reads.
        frees: those of `takes` that nothing reads later.
    """

    function: Boxed
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    frees: frozenset[str]

    def __call__(self, values: Values) -> None:
        """Takes from `values`, and puts there what it gives."""
        given = [values.pop(name) if name in self.frees else values[name] for name in self.takes]
        for name, value in zip(self.gives, self.function(given), strict=True):
            if name:
                values[name] = value


class CompiledUnits:
    """What is compiled of a program's steps and forwards in one scope, by text and shapes of the unit.

    Args:
        device: of the identities that units take.
        scope: of the sizes; each unit takes those that are symbols as its first operands, so that what is compiled
            knows them.
    """

    def __init__(self, inductor: Inductor, device: torch.device, told: Told, scope: Scope) -> None:
        self._inductor, self._device, self._told, self._scope = inductor, device, told, scope
        self._mode = scope.mode
        self._known: dict[Any, Pair | Boxed] = {}
        self._shapes: dict[Any, Sequence[Tensor]] = {}
        self._identities: dict[int, Tensor] = {}

    def calls(
        self,
        graph: fx.Graph,
        phases: Collection[str],
        values: Mapping[str, Tensor],
        tangents: Mapping[str, str],
        needed: Iterable[str],
        *,
        paired: bool,
    ) -> tuple[list[Run], list[Run], Values]:
        """The calls of a forward and of its backward, and the identities that they take, by name.

        Args:
            graph: lowered.
            phases: those of the backward.
            values: of the shapes it is compiled for, by name of the placeholder.
            tangents: for each placeholder that is one, the value whose gradient it is.
            needed: names of the values that are wanted at the end.
            paired: as for `units_of`.
        """
        units = units_of(graph, phases, frozenset(needed) | frozenset(tangents.values()), paired=paired)
        fakes = {name: self._scope.fake(name, value) for name, value in values.items()}
        self._propagate(units, fakes, tangents)
        compiled = self._compile_all(units, fakes)
        number = {unit: i for i, unit in enumerate(units.forward)}
        forward = [self._forward_run(unit, units, compiled[unit], number[unit]) for unit in units.forward]
        backward = [self._backward_run(unit, units, compiled[unit], number.get(unit)) for unit in units.backward]
        runs = _freeing([*forward, *backward], frozenset(needed))
        drawn = {i for unit in (*units.forward, *units.backward) for i in unit.identities}
        return runs[: len(forward)], runs[len(forward) :], {_identity(i): self._tensor(i) for i in drawn}

    def _tensor(self, identity: int) -> Tensor:
        if identity not in self._identities:
            self._identities[identity] = torch.tensor(identity, device=self._device)
        return self._identities[identity]

    def _fake(self, value: Tensor) -> Tensor:
        return self._mode.from_tensor(value.detach(), static_shapes=True)

    def _drawn(self, unit: Unit) -> list[Tensor]:
        return [self._fake(self._tensor(identity)) for identity in unit.identities]

    def _another(self, fake: Tensor) -> Tensor:
        """One of the same shape: units of one text share fakes, and a trace tells values apart by their objects."""
        with self._mode:
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)

    def _propagate(self, units: Units, fakes: dict[str, Tensor], tangents: Mapping[str, str]) -> None:
        """Shapes of all that units give, those of units of one text computed once."""
        for unit in units.forward:
            assert unit.forward is not None
            self._shape(unit, unit.forward, fakes)
        with self._mode:
            like = torch.contiguous_format
            fakes.update({n: torch.empty_like(fakes[value], memory_format=like) for n, value in tangents.items()})
        for unit in units.backward:
            assert unit.backward is not None
            self._shape(unit, unit.backward, fakes)

    def _shape(self, unit: Unit, segment: Segment, fakes: dict[str, Tensor]) -> None:
        takes = [node.name for node in segment.outer]
        gives = [node.name for node in segment.nodes if not is_number(node)]
        key = (unit.text, segment is unit.forward, tuple(_meta(fakes[name]) for name in takes))
        if key not in self._shapes:
            alone = Unit(segment, None, tuple(takes), ())
            module = graph_of(alone, [[alone.position(name) for name in gives]], [])
            given = [*(fakes[name] for name in takes), *self._drawn(alone)]
            with torch.no_grad(), enable_python_dispatcher(), self._mode:
                self._shapes[key] = module(*given)
        fakes.update(zip(gives, self._shapes[key], strict=True))

    def _compile_all(self, units: Units, fakes: Mapping[str, Tensor]) -> dict[Unit, Pair | Boxed]:
        keys = {unit: self._key(unit, units, fakes) for unit in (*units.forward, *units.backward)}
        new = {key: unit for unit, key in reversed(keys.items()) if key not in self._known}
        for i, (key, unit) in enumerate(reversed(new.items())):
            self._told(i, len(new))
            self._known[key] = self._compile(unit, units, fakes)
        if new:
            self._told(len(new), len(new))
        return {unit: self._known[key] for unit, key in keys.items()}

    def _takes(self, unit: Unit) -> tuple[str, ...]:
        return (*map(_size, self._scope.names), *unit.early, *map(_identity, unit.identities))

    def _forward_run(self, unit: Unit, units: Units, compiled: Pair | Boxed, number: int) -> Run:
        gives = tuple(unit.nodes[i].name for i in units.results[unit][0])
        if isinstance(compiled, Pair):
            return Run(compiled.forward, self._takes(unit), (*gives, *_saved(number, compiled)), frozenset())
        return Run(compiled, self._takes(unit), gives, frozenset())

    def _backward_run(self, unit: Unit, units: Units, compiled: Pair | Boxed, number: int | None) -> Run:
        gives = tuple(unit.nodes[i].name for i in units.results[unit][1])
        if isinstance(compiled, Pair):
            assert number is not None
            late = (unit.late[i] for i in compiled.late)
            return Run(compiled.backward, (*_saved(number, compiled), *late), gives, frozenset())
        return Run(compiled, self._takes(unit), gives, frozenset())

    def _key(self, unit: Unit, units: Units, fakes: Mapping[str, Tensor]) -> Any:
        metas = tuple(_meta(fakes[name]) for name in (*unit.early, *unit.late))
        return unit.text, unit.forward is None, unit.backward is None, units.results[unit], metas

    def _compile(self, unit: Unit, units: Units, fakes: Mapping[str, Tensor]) -> Pair | Boxed:
        results = units.results[unit]
        function = graph_of(unit, results, self._scope.names)
        given: list[Any] = self._scope.integers
        given += [self._another(fakes[name]) for name in unit.early]
        given += self._drawn(unit)
        early = len(given)
        given += [self._another(fakes[name]) for name in unit.late]
        if unit.forward is None or unit.backward is None:
            return self._inductor.alone(function, given, self._mode, backward=unit.forward is None)
        return self._inductor.pair(function, given, self._mode, early, len(results[0]))


def _meta(value: Tensor) -> Any:
    """What a unit is compiled for; symbolic sizes are told by their names, which are those of one scope."""
    return tuple(map(str, value.shape)), tuple(map(str, value.stride())), value.dtype, value.device


def _identity(identity: int) -> str:
    return f"identity {identity}"


def _size(name: str) -> str:
    return f"size {name}"


def _named(sizes: Mapping[str, int]) -> Values:
    return {_size(name): size for name, size in sizes.items()}


def _saved(unit: int, pair: Pair) -> tuple[str, ...]:
    return tuple(f"saved {unit} {i}" for i in range(pair.saved))


def _freeing(runs: Sequence[Run], needed: frozenset[str]) -> list[Run]:
    """Each value is freed behind its last reader; what is wanted at the end stays."""
    later = set(needed)
    found = []
    for run in reversed(runs):
        frees = frozenset(name for name in run.takes if name not in later)
        gives = tuple(name if name in later else "" for name in run.gives)
        later.update(run.takes)
        found.append(Run(run.function, run.takes, gives, frees))
    return found[::-1]


class CompiledStep:
    """Forward and backward of a step.

    Args:
        compiled: units that are known already.
        values: of the program's inputs that it reads, by name, of the shapes it is compiled for.
        whole: whether the parameter phase belongs to the backward.
    """

    def __init__(self, compiled: CompiledUnits, step: Step, values: Mapping[str, Tensor], whole: bool) -> None:
        self._step = step
        self.gives = tuple(step.gradients.values()) if whole else step.held
        tangents = {tangent: step.results[name] for name, tangent in step.tangents.items()}
        needed = (*step.results.values(), *self.gives)
        phases = (BACKWARD, PARAMETER) if whole else (BACKWARD,)
        self._forward, self._backward, self._identities = compiled.calls(
            step.graph, phases, values, tangents, needed, paired=not step.recomputes
        )
        self._ready = self._gradients()

    def forward(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Any], Values]:
        """The model's outputs by name, and what the backward takes before the tangents.

        Args:
            sizes: of the call, by symbol.
        """
        own = {**self._identities, **_named(sizes), **values}
        for run in self._forward:
            run(own)
        return {name: own[value] for name, value in self._step.results.items()}, own

    def backward(self, own: Values, tangents: Mapping[str, Tensor], place: Place | None = None) -> dict[str, Tensor]:
        """What the backward gives, by name of the value.

        Args:
            place: as for `Pending.backward`.
        """
        own.update({self._step.tangents[name]: tangent for name, tangent in tangents.items()})
        for run, ready in zip(self._backward, self._ready, strict=True):
            run(own)
            if place is not None and ready:
                placed = place({fqn: own[value] for fqn, value in ready.items()})
                own.update({value: placed[fqn] for fqn, value in ready.items()})
        return {name: own[name] for name in self.gives}

    def _gradients(self) -> list[dict[str, str]]:
        """Behind each call of the backward, the gradients that are there from then on, and that no later call reads."""
        found: list[dict[str, str]] = []
        read: set[str] = set()
        for run in reversed(self._backward):
            found.append({fqn: v for fqn, v in self._step.gradients.items() if v in run.gives and v not in read})
            read.update(run.takes)
        return found[::-1]


class CompiledForward:
    """A forward alone, for which nothing is kept.

    Args:
        compiled: units that are known already.
        graph: lowered, with the wanted outputs.
        wanted: their names.
        values: of the program's inputs, by name, of the shapes it is compiled for.
    """

    def __init__(
        self, compiled: CompiledUnits, graph: fx.Graph, wanted: Sequence[str], values: Mapping[str, Tensor]
    ) -> None:
        results: Any = output_node(graph).args[0]
        self._results = dict(zip(wanted, (node.name for node in results), strict=True))
        self._runs, _, self._identities = compiled.calls(graph, (), values, {}, self._results.values(), paired=False)

    def __call__(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The outputs by name; sizes as for a step."""
        own = {**self._identities, **_named(sizes), **values}
        for run in self._runs:
            run(own)
        return {name: own[value] for name, value in self._results.items()}


class Compiler:
    """What is compiled of a program's steps and forwards, for the sizes they were called with.

    Args:
        shapes: what a rank has of the inputs, in the program's symbols, by name of the placeholder.
    """

    def __init__(self, plan: Plan, device: torch.device, shapes: Mapping[str, tuple[Size, ...]]) -> None:
        inductor, told = Inductor(plan), Progress()
        self._scopes = Scopes(shapes, lambda scope: CompiledUnits(inductor, device, told, scope))
        self._known: dict[Hashable, Variants[CompiledUnits, Any]] = {}

    def step(self, step: Step, sizes: Mapping[str, int], values: Mapping[str, Tensor], *, whole: bool) -> CompiledStep:
        """A step; see `CompiledStep`."""
        made: CompiledStep = self._variants((id(step), whole)).of(
            sizes, lambda units: CompiledStep(units, step, values, whole)
        )
        return made

    def forward(
        self, graph: fx.Graph, wanted: Sequence[str], sizes: Mapping[str, int], values: Mapping[str, Tensor]
    ) -> CompiledForward:
        """A forward alone; see `CompiledForward`."""
        made: CompiledForward = self._variants((id(graph), tuple(wanted))).of(
            sizes, lambda units: CompiledForward(units, graph, wanted, values)
        )
        return made

    def _variants(self, key: Hashable) -> Variants[CompiledUnits, Any]:
        return self._known.setdefault(key, Variants(self._scopes))
