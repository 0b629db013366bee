"""Partial graphs: the calls of a step, replayed by regions.

Enters: the calls of a step or of a forward, and the values it is called with. Leaves: the same, recorded once: each run
of calls that a graph can hold is one, forward and backward; what stands between them runs as it is.

A recording has addresses. Parameters stay where they are; inputs and tangents are copied into static tensors before a
replay; results are copied out after it, so that whoever has them keeps them. Gradients are added into their buffers
inside of the graph. All graphs of a step share one pool, so what the forward leaves for the backward lies there, and
nothing else may run in the pool until the backward has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxpar.cudagraphs.pool import Flight, Pool, Recording
from fxpar.errors import InputError
from fxpar.ops.small_operators import Destination
from fxpar.runtime.calls import (
    ForwardCalls,
    GradientSink,
    StepCalls,
    UnitCall,
    Values,
)

_FLIGHT = "flight"
_PARTS = 2  # of a backward: up to the gradients of a stage's inputs, and the rest
# Runs a call of a list by its number.
RunCall = Callable[[int, Values], None]


@dataclass(frozen=True)
class _Between:
    """A call that no graph holds.

    Attributes:
        index: its number among the calls.
        operands: what it takes of fixed addresses, by name.
        results: by name of what graphs read of its results, the static tensors into which its tensors are copied; None
            for those that lie in operands.
    """

    index: int
    operands: Values
    results: dict[str, list[Tensor | None]]

    def replay(self, values: Values, run: RunCall) -> None:
        """Runs it, on dynamic values too; as for `Replayed`."""
        values.update(self.operands)
        run(self.index, values)
        for name in self.operands:
            values.pop(name, None)
        for name, statics in self.results.items():
            for static, value in zip(statics, pytree.tree_leaves(values.pop(name)), strict=True):
                if static is not None:
                    static.copy_(value)


def dynamic_values(calls: Sequence[UnitCall], results: Collection[str]) -> frozenset[str]:
    """Returns names of the values that only calls without a graph make and read: their sizes may change.

    Args:
        calls: of forward and backward.
        results: names of the values that are read after the forward.
    """
    of_graphs = {name for call in calls if not call.uncaptured for name in call.takes}
    return frozenset(name for call in calls if call.uncaptured for name in call.gives if name) - of_graphs - {*results}


class Replayed:
    """Calls in order, some of them as graphs.

    Args:
        pool: in which they are recorded.
        calls: what they are; runs of those that can be are one graph.
        values: by name; what the calls give is there afterwards.
        run: runs one of the calls.
        dynamic: names of the values that are new at each replay (`dynamic_values`); all others have fixed addresses.
    """

    def __init__(
        self, pool: Pool, calls: Sequence[UnitCall], values: Values, run: RunCall, dynamic: Collection[str]
    ) -> None:
        self.graphs: list[Recording] = []
        self._pieces: list[Recording | _Between] = []
        groups = itertools.groupby(range(len(calls)), key=lambda index: bool(calls[index].uncaptured))
        for is_between, indices in groups:
            if is_between:
                self._pieces += [_run_between(index, calls[index], values, run, dynamic) for index in indices]
            else:
                self._record(pool, list(indices), values, run)

    def _record(self, pool: Pool, indices: Sequence[int], values: Values, run: RunCall) -> None:
        def work() -> None:
            for index in indices:
                run(index, values)

        recording, _ = pool.record(work)
        recording.replay()  # recording computes nothing, and what stands after it may read values
        self.graphs.append(recording)
        self._pieces.append(recording)

    @property
    def reads(self) -> list[Tensor]:
        """Returns what is read between graphs, but dynamic values."""
        between = (piece for piece in self._pieces if isinstance(piece, _Between))
        return [operand for piece in between for operand in piece.operands.values() if isinstance(operand, Tensor)]

    @property
    def fills(self) -> list[Tensor]:
        """Returns the static tensors that are filled between graphs."""
        between = (piece for piece in self._pieces if isinstance(piece, _Between))
        statics = (static for piece in between for result in piece.results.values() for static in result)
        return [static for static in statics if static is not None]

    def replay(self, values: Values, run: RunCall) -> None:
        """Runs all.

        Args:
            values: dynamic values by name; those that are read later are there afterwards.
            run: runs a call that no graph holds.
        """
        for piece in self._pieces:
            if isinstance(piece, _Between):
                piece.replay(values, run)
            else:
                piece.replay()

    def reset(self) -> None:
        """Frees the graphs."""
        for graph in self.graphs:
            graph.reset()
        self._pieces.clear()


def _run_between(index: int, call: UnitCall, values: Values, run: RunCall, dynamic: Collection[str]) -> _Between:
    """Runs a call that no graph holds for the first time; as for `Replayed`."""
    operands = {name: values[name] for name in call.takes if name not in dynamic}
    run(index, values)
    taken = (leaf for leaf in pytree.tree_leaves(list(operands.values())) if isinstance(leaf, Tensor))
    fixed = {tensor.untyped_storage().data_ptr() for tensor in taken}

    def static(value: Any) -> Any:
        # A view of a parameter is there in any case, and nothing else may be copied over it.
        is_new = isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in fixed
        return value.clone() if is_new else None

    results: dict[str, list[Tensor | None]] = {}
    for name in call.gives:
        if name and name not in dynamic:
            leaves, structure = pytree.tree_flatten(values[name])
            results[name] = [static(leaf) for leaf in leaves]
            read = [leaf if new is None else new for leaf, new in zip(leaves, results[name], strict=True)]
            values[name] = pytree.tree_unflatten(read, structure)
    return _Between(index, operands, results)


class Static:
    """Static tensors into which values are copied.

    Args:
        values: of which they have the shapes, by name.
        pool: of the graphs that read them.
    """

    def __init__(self, values: Mapping[str, Tensor], pool: Pool) -> None:
        self.tensors = {name: value.clone() for name, value in values.items()}
        pool.static_bytes += sum(value.nbytes for value in self.tensors.values())

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copies values in."""
        for name, static in self.tensors.items():
            static.copy_(values[name], non_blocking=True)


class GraphedStep:
    """A step as graphs; a `fxpar.runtime.calls.Runnable`.

    Args:
        calls: what it does.
        inputs: names of the values whose addresses change from call to call.
        pool: of its graphs.
    """

    def __init__(self, calls: StepCalls, inputs: Collection[str], pool: Pool) -> None:
        self.whole = calls.whole
        self._calls, self._inputs, self._pool = calls, inputs, pool
        static = (*calls.step.results.values(), *calls.step.returned.values())
        self._dynamic = dynamic_values((*calls.forward_calls, *calls.backward_calls), static)
        self._static: Static | None = None
        self._tangents: Static | None = None
        self._forward: Replayed | None = None
        self._backward: list[Replayed] = []
        self._results: dict[str, Tensor] = {}
        self._values: Values = {}
        self._returned: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._placed: list[Tensor] = []

    @property
    def graphs(self) -> int:
        """Returns how many graphs there are."""
        parts = (*self._backward, *([] if self._forward is None else [self._forward]))
        return sum(len(part.graphs) for part in parts)

    @property
    def is_recorded(self) -> bool:
        """Returns whether all its graphs are there."""
        return self._forward is not None and len(self._backward) == _PARTS

    def forward(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], Values]:
        """Implements `Runnable.forward`."""
        flight = self._pool.flight = Flight()
        if self._forward is None:
            self._backward = []
            self._static = Static({name: values[name] for name in self._inputs}, self._pool)
            self._values = self._calls.start({**values, **self._static.tensors}, sizes)
            calls = self._calls.forward_calls
            self._forward = Replayed(self._pool, calls, self._values, self._run_forward, self._dynamic)
            self._hand_over(flight)
            self._results = {name: self._values[value] for name, value in self._calls.step.results.items()}
        else:
            assert self._static is not None
            self._pool.scramble((), (), self._placed)  # gradients of the flight before may be there still
            self._static.fill(values)
            self._forward.replay(flight.values, self._run_forward)
        outputs = {name: value.clone() for name, value in self._results.items()}
        self._scramble(self._backward, flight)
        return outputs, {_FLIGHT: flight}

    def input_backward(
        self, saved: Values, tangents: Mapping[str, Tensor], place: GradientSink | None = None
    ) -> dict[str, Tensor]:
        """Implements `Runnable.input_backward`."""
        flight = saved[_FLIGHT]
        if not self._backward:
            self._check_open()
            self._tangents = Static(tangents, self._pool)
            names = self._calls.step.tangents
            self._values.update({names[name]: static for name, static in self._tangents.tensors.items()})
            self._placed = []
            self._record(range(self._calls.early), None if place is None else Noting(place, self._placed), flight)
            self._returned = {name: self._values[name] for name in self._calls.step.returned.values()}
        else:
            assert self._tangents is not None
            self._tangents.fill(tangents)
            self._backward[0].replay(flight.values, lambda i, known: self._calls.run_backward(i, known, place))
        returned = {name: value.clone() for name, value in self._returned.items()}
        self._scramble(self._backward[1:], flight, self._gradients.values())
        return returned

    def weight_backward(self, saved: Values, place: GradientSink | None = None) -> dict[str, Tensor]:
        """Implements `Runnable.weight_backward`; returns the places of what is placed, what is dynamic, and copies of
        all else."""
        gradients = self.weight_gradients(saved, place)
        dynamic = [gradients[name] for name in self._dynamic & gradients.keys()]
        return copied(gradients, [*self._placed, *dynamic])

    def weight_gradients(self, saved: Values, place: GradientSink | None) -> dict[str, Tensor]:
        """Runs the rest of the backward; returns what it gives, which stays until the next forward."""
        flight = saved[_FLIGHT]
        saved.clear()
        late = range(self._calls.early, len(self._calls.backward_calls))
        if not self.is_recorded:
            self._check_open()
            self._record(late, None if place is None else Noting(place, self._placed), flight)
            self._gradients = {name: self._values[name] for name in self._calls.gives if name not in self._dynamic}
            # What is dropped here the pool may give to recordings that come later.
            self._values = {}
        else:
            self._backward[1].replay(flight.values, lambda i, known: self._calls.run_backward(late[i], known, place))
        self._pool.flight = None
        self._scramble((), flight, [*self._gradients.values(), *self._placed])
        return {name: flight.values.get(name, self._gradients.get(name)) for name in self._calls.gives}

    def _check_open(self) -> None:
        if self._forward is None:
            raise InputError(
                "the graphs of this call's forward are freed", where="close()", remedy="close behind the last backward"
            )

    def _run_forward(self, index: int, values: Values) -> None:
        self._calls.forward_calls[index](values)

    def _hand_over(self, flight: Flight) -> None:
        """Gives a flight its dynamic values: what is recorded keeps none of them."""
        flight.values = {name: self._values.pop(name) for name in self._dynamic & self._values.keys()}

    def _record(self, indices: range, place: GradientSink | None, flight: Flight) -> None:
        """Records some calls of the backward."""
        forward, self._forward = self._forward, None  # where recording fails, all parts are recorded anew
        calls = [self._calls.backward_calls[index] for index in indices]
        self._values.update(flight.values)
        part = Replayed(
            self._pool,
            calls,
            self._values,
            lambda i, values: self._calls.run_backward(indices[i], values, place),
            self._dynamic,
        )
        self._hand_over(flight)
        self._backward.append(part)
        self._forward = forward

    def _scramble(self, later: Sequence[Replayed], flight: Flight, live: Iterable[Tensor] = ()) -> None:
        """Fills what neither later parts nor others read, where recordings are tried."""
        # Until all parts are there, those that are not recorded yet read what nobody knows of.
        if not self.is_recorded:
            return
        assert self._static is not None
        assert self._tangents is not None
        assert self._forward is not None
        filled = (fill for part in (self._forward, *self._backward) for fill in part.fills)
        static = (*self._static.tensors.values(), *self._tangents.tensors.values(), *filled)
        graphs = [graph for part in later for graph in part.graphs]
        # A dynamic value may be a view of what a graph has computed.
        dynamic = (leaf for leaf in pytree.tree_leaves(flight.values) if isinstance(leaf, Tensor))
        self._pool.scramble(static, graphs, [*live, *dynamic, *(read for part in later for read in part.reads)])

    def reset(self) -> None:
        """Frees the graphs and what they hold."""
        for part in (*self._backward, *([] if self._forward is None else [self._forward])):
            part.reset()
        self._forward, self._backward = None, []
        self._results, self._values, self._returned, self._gradients, self._placed = {}, {}, {}, {}, []


class StageStep(GraphedStep):
    """A step of a pipeline's stage as graphs, for one microbatch in flight.

    Its first microbatch runs as it is, and `record` repeats that one when the schedule has ended. Recording waits for
    all that is queued on the device. In the middle of a schedule these may be sends to a rank that waits for this one.
    """

    def __init__(self, calls: StepCalls, inputs: Collection[str], pool: Pool) -> None:
        super().__init__(calls, inputs, pool)
        self._operands: tuple[Mapping[str, Any], Mapping[str, int]] = {}, {}
        self._last_tangents: Mapping[str, Tensor] | None = None
        self._place: GradientSink | None = None

    def forward(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], Values]:
        """Implements `Runnable.forward`."""
        if self.is_recorded:
            return super().forward(values, sizes)
        flight = self._pool.flight = Flight()
        self._operands, self._last_tangents = (values, sizes), None
        outputs, saved = self._calls.forward(values, sizes)
        return outputs, {**saved, _FLIGHT: flight}

    def input_backward(
        self, saved: Values, tangents: Mapping[str, Tensor], place: GradientSink | None = None
    ) -> dict[str, Tensor]:
        """Implements `Runnable.input_backward`."""
        if self.is_recorded:
            return super().input_backward(saved, tangents, place)
        self._last_tangents, self._place = tangents, place
        return self._calls.input_backward(saved, tangents, place)

    def weight_backward(self, saved: Values, place: GradientSink | None = None) -> dict[str, Tensor]:
        """Implements `Runnable.weight_backward`; without copies, as the pipeline adds gradients up at once."""
        if self.is_recorded:
            return self.weight_gradients(saved, place)
        del saved[_FLIGHT]
        gradients = self._calls.weight_backward(saved, place)
        self._pool.flight = None
        return gradients

    def record(self) -> None:
        """Records what has run as it is, if anything has."""
        if self.is_recorded or self._last_tangents is None:
            return
        tangents, (values, sizes) = self._last_tangents, self._operands
        self._operands, self._last_tangents = ({}, {}), None
        _, saved = super().forward(values, sizes)
        super().input_backward(saved, tangents, self._place)
        self.weight_gradients(saved, self._place)


@dataclass(frozen=True)
class Noting:
    """Puts gradients where `place` does, and notes which are `there`; what is left to hooks stays in the pool."""

    place: GradientSink
    there: list[Tensor]

    def __call__(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Implements `GradientSink.__call__`."""
        placed = self.place(gradients)
        places = ((value, self.destination(name)) for name, value in placed.items())
        self.there.extend(value for value, place in places if place is not None and place.has(value))
        return placed

    def destination(self, name: str) -> Destination | None:
        """Implements `GradientSink.destination`."""
        return self.place.destination(name)


def copied(gradients: Mapping[str, Tensor], placed: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns what a recorded backward gives: of what is placed the places; copies of all else, which hooks may
    keep."""
    placed_ids = {id(value) for value in placed}
    return {name: value if id(value) in placed_ids else value.clone() for name, value in gradients.items()}


class GraphedForward:
    """A forward alone as graphs, for which nothing is kept.

    Args:
        calls: what it does.
        inputs: as for `GraphedStep`.
        pool: of its graphs.
    """

    def __init__(self, calls: ForwardCalls, inputs: Collection[str], pool: Pool) -> None:
        self._calls, self._inputs, self._pool = calls, inputs, pool
        self._static: Static | None = None
        self._replayed: Replayed | None = None
        self._results: dict[str, Tensor] = {}

    @property
    def graphs(self) -> int:
        """Returns how many graphs there are."""
        return len(self._replayed.graphs) if self._replayed is not None else 0

    def __call__(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns the outputs by name."""
        if self._replayed is None:
            # Of what is made in inference mode nothing could be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self._record(values, sizes)
        else:
            assert self._static is not None
            self._static.fill(values)
            self._replayed.replay({}, self._run)
        assert self._static is not None
        outputs = {name: value.clone() for name, value in self._results.items()}
        fills = () if self._replayed is None else self._replayed.fills
        self._pool.scramble((*self._static.tensors.values(), *fills), (), ())
        return outputs

    def _run(self, index: int, values: Values) -> None:
        self._calls.calls[index](values)

    def _record(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self._static = Static({name: values[name] for name in self._inputs}, self._pool)
        environment = self._calls.start({**values, **self._static.tensors}, sizes)
        calls, results = self._calls.calls, self._calls.results.values()
        self._replayed = Replayed(self._pool, calls, environment, self._run, dynamic_values(calls, results))
        self._results = {name: environment[value] for name, value in self._calls.results.items()}

    def reset(self) -> None:
        """Frees the graphs and what they hold."""
        if self._replayed is not None:
            self._replayed.reset()
        self._results = {}
