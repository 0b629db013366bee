"""A step compiled for the shapes of calls: each distinct unit once, and the calls of them in order.

Enters: a lowered step, and values that tell its shapes; `Scope` has the sizes that are symbols. Leaves: its forward
and its backward as lists of calls, which run without autograd.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxpar.ir.step import BACKWARD, PARAMETER, WEIGHT
from fxpar.layout.symbolic_sizes import Size
from fxpar.plan.plan import Plan
from fxpar.runtime.calls import Boxed, ForwardCalls, LoweredStep, StepCalls, UnitCall, Values, emptying, size_name
from fxpar.runtime.inductor import Inductor, Pair
from fxpar.runtime.units import Segment, StepUnits, Unit, graph_of, is_number, units_of

# Is called with how many of a step's units are compiled, and of how many.
Progress = Callable[[int, int], None]


class CompiledUnits:
    """What is compiled of a program's steps and forwards in one scope, by text and shapes of the unit.

    Args:
        device: of the identities that units take.
        scope: of the sizes; each unit takes those that are symbols as its first operands, so that what is compiled
            knows them.
    """

    def __init__(self, inductor: Inductor, device: torch.device, progress: Progress, scope: Scope) -> None:
        self._inductor, self._device, self._progress, self._scope = inductor, device, progress, scope
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
        arriving: Sequence[UnitCall] = (),
        *,
        paired: bool,
    ) -> tuple[list[UnitCall], list[UnitCall], Values, int]:
        """Returns the calls of a forward and of its backward, the identities that they take, by name, and how many of
        the backward come before those of the phase `weight`.

        Args:
            graph: lowered.
            phases: those of the backward.
            values: of the shapes it is compiled for, by name of the placeholder.
            tangents: for each placeholder that is one, the value whose gradient it is.
            needed: names of the values that are wanted at the end.
            arriving: as of `LoweredStep`; what they take is among `values`, or what they give.
            paired: as for `units_of`.
        """
        units = units_of(graph, phases, frozenset(needed) | frozenset(tangents.values()), paired=paired)
        fakes = {name: self._scope.fake(name, value) for name, value in values.items()}
        with self._mode:
            for call in (call for call in arriving if fakes.keys() >= {*call.takes}):
                fakes.update(zip(call.gives, call.function([fakes[name] for name in call.takes]), strict=True))
        self._propagate(units, fakes, tangents)
        compiled = self._compile_all(units, fakes)
        number = {unit: i for i, unit in enumerate(units.forward)}
        forward = [self._forward_call(unit, units, compiled[unit], number[unit]) for unit in units.forward]
        backward = [self._backward_call(unit, units, compiled[unit], number.get(unit)) for unit in units.backward]
        drawn = {i for unit in (*units.forward, *units.backward) for i in unit.identities}
        early = sum(unit.backward is not None and unit.backward.phase != WEIGHT for unit in units.backward)
        return forward, backward, {_identity(i): self._tensor(i) for i in drawn}, early

    def _tensor(self, identity: int) -> Tensor:
        if identity not in self._identities:
            self._identities[identity] = torch.tensor(identity, device=self._device)
        return self._identities[identity]

    def _fake(self, value: Tensor) -> Tensor:
        return self._mode.from_tensor(value.detach(), static_shapes=True)

    def _drawn(self, unit: Unit) -> list[Tensor]:
        return [self._fake(self._tensor(identity)) for identity in unit.identities]

    def _another(self, fake: Tensor) -> Tensor:
        """Returns one of the same shape: units of one text share fakes, and a trace tells values apart by their
        objects."""
        with self._mode:
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)

    def _propagate(self, units: StepUnits, fakes: dict[str, Tensor], tangents: Mapping[str, str]) -> None:
        """Computes shapes of all that units give, those of units of one text once."""
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
            operands = [*(fakes[name] for name in takes), *self._drawn(alone)]
            with torch.no_grad(), enable_python_dispatcher(), self._mode:
                self._shapes[key] = module(*operands)
        # What is computed again may lie in memory in another way than what the forward gives to others.
        again = {node.name for node in segment.again}
        named = zip(gives, self._shapes[key], strict=True)
        fakes.update((name, fake) for name, fake in named if name not in again)

    def _compile_all(self, units: StepUnits, fakes: Mapping[str, Tensor]) -> dict[Unit, Pair | Boxed]:
        keys = {unit: self._key(unit, units, fakes) for unit in (*units.forward, *units.backward)}
        for unit, key in keys.items():
            if unit.eager and key not in self._known:
                self._known[key] = emptying(graph_of(unit, units.results[unit], self._scope.names))
        # Reversed, so that of several units with one key the first is compiled.
        new = {key: unit for unit, key in reversed(keys.items()) if key not in self._known}
        for i, (key, unit) in enumerate(reversed(new.items())):
            self._progress(i, len(new))
            self._known[key] = self._compile(unit, units, fakes)
        if new:
            self._progress(len(new), len(new))
        return {unit: self._known[key] for unit, key in keys.items()}

    def _takes(self, unit: Unit) -> tuple[str, ...]:
        return (*map(size_name, self._scope.names), *unit.early, *map(_identity, unit.identities))

    def _forward_call(self, unit: Unit, units: StepUnits, compiled: Pair | Boxed, number: int) -> UnitCall:
        gives = tuple(unit.nodes[i].name for i in units.results[unit][0])
        if isinstance(compiled, Pair):
            saved = _saved(number, compiled)
            return UnitCall(compiled.forward, self._takes(unit), (*gives, *saved), uncaptured=unit.uncaptured)
        return UnitCall(compiled, self._takes(unit), gives, uncaptured=unit.uncaptured)

    def _backward_call(self, unit: Unit, units: StepUnits, compiled: Pair | Boxed, number: int | None) -> UnitCall:
        gives = tuple(unit.nodes[i].name for i in units.results[unit][1])
        if isinstance(compiled, Pair):
            assert number is not None
            # Only those late values that min-cut has left: what no call takes is freed at once.
            late = (unit.late[i] for i in compiled.late)
            takes = (*_saved(number, compiled), *late)
            return UnitCall(compiled.backward, takes, gives, uncaptured=unit.uncaptured)
        return UnitCall(compiled, self._takes(unit), gives, uncaptured=unit.uncaptured)

    def _key(self, unit: Unit, units: StepUnits, fakes: Mapping[str, Tensor]) -> Any:
        metas = tuple(_meta(fakes[name]) for name in (*unit.early, *unit.late))
        return unit.text, unit.forward is None, unit.backward is None, units.results[unit], metas

    def _compile(self, unit: Unit, units: StepUnits, fakes: Mapping[str, Tensor]) -> Pair | Boxed:
        results = units.results[unit]
        function = graph_of(unit, results, self._scope.names)
        operands: list[Any] = self._scope.integers
        operands += [self._another(fakes[name]) for name in unit.early]
        operands += self._drawn(unit)
        early = len(operands)
        operands += [self._another(fakes[name]) for name in unit.late]
        if unit.forward is None or unit.backward is None:
            return self._inductor.alone(function, operands, self._mode, backward=unit.forward is None)
        return self._inductor.pair(function, operands, self._mode, early, len(results[0]))


def _meta(value: Any) -> Any:
    """Returns what a unit is compiled for; symbolic sizes are told by their names, which are those of one scope."""
    if not isinstance(value, Tensor):  # what only eager units hand on: a tensor, and what tells that it is there
        return tuple(_meta(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    # As texts: comparing symbolic sizes by == would add a guard to the scope.
    return tuple(map(str, value.shape)), tuple(map(str, value.stride())), value.dtype, value.device


def _identity(identity: int) -> str:
    return f"identity {identity}"


def _saved(unit: int, pair: Pair) -> tuple[str, ...]:
    return tuple(f"saved {unit} {i}" for i in range(pair.saved))


class Compiler:
    """What is compiled of a program's steps and forwards, for the sizes they were called with.

    Args:
        shapes: what a rank has of the inputs, in the program's symbols, by name of the placeholder.
    """

    def __init__(self, plan: Plan, device: torch.device, shapes: Mapping[str, tuple[Size, ...]]) -> None:
        self._inductor, self._progress, self._device, self._shapes = Inductor(plan), CompileProgress(), device, shapes
        self._known: dict[Hashable, Variants[Any]] = {}
        # All functions of a program share the scopes, so that a unit of equal
        # text and shapes is compiled once for them.
        self._symbolic: list[tuple[Scope, CompiledUnits]] = []

    def step(
        self, step: LoweredStep, sizes: Mapping[str, int], values: Mapping[str, Tensor], *, whole: bool
    ) -> StepCalls:
        """Returns a step.

        Args:
            values: of the program's inputs that it reads, by name, of the shapes it is compiled for.
            whole: whether the parameter phase belongs to the backward.
        """

        def make(units: CompiledUnits) -> StepCalls:
            tangents = {tangent: step.results[name] for name, tangent in step.tangents.items()}
            needed = (*step.results.values(), *(step.gradients.values() if whole else step.ends))
            phases = (BACKWARD, WEIGHT, PARAMETER) if whole else (BACKWARD, WEIGHT)
            paired = not step.recomputes
            arguments = step.graph, phases, values, tangents, needed, step.arriving
            forward, backward, drawn, early = units.calls(*arguments, paired=paired)
            return StepCalls(step, forward, backward, drawn, whole=whole, early=early)

        step_calls: StepCalls = self._variants((id(step), whole)).of(sizes, make)
        return step_calls

    def forward(
        self, graph: fx.Graph, results: Mapping[str, str], sizes: Mapping[str, int], values: Mapping[str, Tensor]
    ) -> ForwardCalls:
        """Returns a forward alone.

        Args:
            graph: lowered, with the wanted outputs.
            results: of each of them the name of its value.
            values: of the program's inputs, by name, of the shapes it is compiled for.
        """

        def make(units: CompiledUnits) -> ForwardCalls:
            calls, _, identities, _ = units.calls(graph, (), values, {}, results.values(), paired=False)
            return ForwardCalls(calls, results, identities)

        forward_calls: ForwardCalls = self._variants((id(graph), tuple(results))).of(sizes, make)
        return forward_calls

    def _variants(self, key: Hashable) -> Variants[Any]:
        return self._known.setdefault(key, Variants(self))

    def _units(self, scope: Scope) -> CompiledUnits:
        return CompiledUnits(self._inductor, self._device, self._progress, scope)

    @cached_property
    def fixed(self) -> CompiledUnits:
        """Compiles for numbers: units are known by their shapes."""
        return self._units(Scope({}, {}))

    def symbolic(self, sizes: Mapping[str, int], varying: Sequence[str]) -> Iterator[tuple[Scope, CompiledUnits]]:
        """Yields the scopes in which these sizes are symbols and that fit so far, then a new one."""
        for scope, units in self._symbolic:
            if scope.names == tuple(varying) and scope.admits(sizes):
                yield scope, units
        new_scope = Scope(self._shapes, sizes, varying)
        self._symbolic.append((new_scope, self._units(new_scope)))
        yield self._symbolic[-1]


class CompileProgress:
    """Tells of regions that are being compiled."""

    def __init__(self) -> None:
        self._start = 0.0

    def __call__(self, done: int, count: int) -> None:
        """Writes the line anew; the last one stays."""
        if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
            return
        if done == 0:
            self._start = time.monotonic()
        seconds = time.monotonic() - self._start
        what = f"compiling region {done + 1} of {count}" if done < count else f"compiled {count} regions"
        sys.stderr.write(f"\r\x1b[Kfxpar: {what} ({seconds:.0f} s)" + ("\n" if done == count else ""))
        sys.stderr.flush()


# The sizes for which a step is compiled: numbers at first, symbols from the second ones on.


Shape = tuple[Size, ...]


class Scope:
    """Sizes of which some are symbols, and the values without memory that have them.

    Attributes:
        mode: in which these values are made.
        names: of the sizes that are symbols.

    Args:
        shapes: of what has sizes that vary, by name of the placeholder.
        sizes: by symbol; what is a symbol of PyTorch's has this one as its hint.
        varying: names of those that are to be symbols; none of them is 0 or 1.
    """

    def __init__(self, shapes: Mapping[str, Shape], sizes: Mapping[str, int], varying: Sequence[str] = ()) -> None:
        self.names, self._shapes, self._env = tuple(varying), shapes, ShapeEnv()
        self._fixed = {name: size for name, size in sizes.items() if name not in varying}
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._integers: dict[str, Any] = dict(self._fixed)
        for name in varying:
            source, hint = ConstantSource(name), sizes[name]
            symbol = self._env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            self._integers[name] = self._env.create_symintnode(symbol, hint=hint, source=source)

    @property
    def integers(self) -> list[Any]:
        """Returns PyTorch's symbolic integers of `names`."""
        return [self._integers[name] for name in self.names]

    def fake(self, name: str, value: Tensor) -> Tensor:
        """Returns a contiguous value without memory, of sizes that are symbols where its own are.

        Args:
            name: of its placeholder.
        """
        shape = self._shapes.get(name, ())
        if not any(str(s) in self.names for size in shape if isinstance(size, sympy.Expr) for s in size.free_symbols):
            return self.mode.from_tensor(value.detach(), static_shapes=True)
        with self.mode:
            return torch.empty([self._integer(size) for size in shape], dtype=value.dtype, device=value.device)

    def _integer(self, size: Size) -> Any:
        if isinstance(size, int):
            return size
        names = sorted(size.free_symbols, key=str)
        return sympy.lambdify(names, size)(*[self._integers[str(name)] for name in names])

    def admits(self, sizes: Mapping[str, int], guards: str | None = None) -> bool:
        """Returns whether what was compiled is right for other sizes.

        Args:
            guards: those that held when it was compiled; by default all that there are by now.
        """
        if any(sizes[name] != size for name, size in self._fixed.items()):
            return False
        code = self.guards() if guards is None else guards
        return not code or bool(self._env.evaluate_guards_expression(code, [sizes[name] for name in self.names]))

    def guards(self) -> str:
        """Returns what compiling has assumed of the symbols so far, as PyTorch writes it; empty for nothing."""
        return (self._env.produce_guards_expression(self.integers) or "") if self.names else ""


Compiled = TypeVar("Compiled")


class Variants(Generic[Compiled]):
    """What is compiled of one function, by sizes."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._known: dict[tuple[tuple[str, int], ...], Compiled] = {}
        self._symbolic: list[tuple[Scope, str, Compiled]] = []

    def of(self, sizes: Mapping[str, int], make: Callable[[CompiledUnits], Compiled]) -> Compiled:
        """Returns what is compiled for these sizes; it is made where nothing fits.

        Args:
            make: compiles with the units of a scope.
        """
        key = tuple(sizes.items())
        if key not in self._known:
            fitting = (candidate for scope, guards, candidate in self._symbolic if scope.admits(sizes, guards))
            compiled = next(fitting, None)
            self._known[key] = self._compile(sizes, make) if compiled is None else compiled
        return self._known[key]

    def _compile(self, sizes: Mapping[str, int], make: Callable[[CompiledUnits], Compiled]) -> Compiled:
        seen = [dict(key) for key in self._known]
        # PyTorch specialises 0 and 1, so a symbol of such a size would be a number after the first guard.
        varying = [name for name, size in sizes.items() if size > 1 and any(one[name] != size for one in seen)]
        if not varying:
            return make(self._compiler.fixed)
        for scope, units in self._compiler.symbolic(sizes, varying):
            compiled = make(units)
            guards = scope.guards()
            if scope.admits(sizes, guards):
                self._symbolic.append((scope, guards, compiled))
                return compiled
        raise AssertionError("what was compiled for these sizes does not admit them")
