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


class _Between:
    """A call that no graph holds, on static tensors.

    Args:
        call: frees nothing that is static.
        operands: what it takes.
        results: where what it gives is to be, None for what nobody reads.

    Attributes:
        operands: these.
    """

    def __init__(self, call: UnitCall, operands: Sequence[Any], results: Sequence[Any]) -> None:
        self.operands = operands
        self._call, self._results = call, results

    def replay(self) -> None:
        """Runs it."""
        values = self._call.function(list(self.operands))
        for name, static, value in zip(self._call.gives, self._results, values, strict=True):
            if name and isinstance(static, Tensor):
                static.copy_(value)


class Replayed:
    """Calls in order, some of them as graphs.

    Args:
        pool: in which they are recorded.
        calls: what they are; runs of those that can be are one graph.
        values: by name, of fixed addresses; what the calls give is there afterwards.
        make: runs one of the calls.
    """

    def __init__(self, pool: Pool, calls: Sequence[UnitCall], values: Values, make: RunCall) -> None:
        self.graphs: list[Recording] = []
        self._pieces: list[Recording | _Between] = []
        runs = itertools.groupby(range(len(calls)), key=lambda index: bool(calls[index].uncaptured))
        for is_between, run in runs:
            # Calls without a graph stay single, as each needs its results copied to where the next graph reads them.
            for indices in [[index] for index in run] if is_between else [list(run)]:
                if is_between:
                    self._pieces.append(self._run_between(calls[indices[0]], values))
                else:
                    self._record(pool, indices, values, make)

    def _record(self, pool: Pool, indices: Sequence[int], values: Values, make: RunCall) -> None:
        def work() -> None:
            for index in indices:
                make(index, values)

        recording, _ = pool.record(work)
        recording.replay()  # recording computes nothing, and what stands after it may read values
        self.graphs.append(recording)
        self._pieces.append(recording)

    def _run_between(self, call: UnitCall, values: Values) -> _Between:
        operands = [values[name] for name in call.takes]
        call(values)
        return _Between(call, operands, [values.get(name) if name else None for name in call.gives])

    @property
    def reads(self) -> list[Tensor]:
        """Returns what is read between graphs."""
        between = (piece for piece in self._pieces if isinstance(piece, _Between))
        return [operand for piece in between for operand in piece.operands if isinstance(operand, Tensor)]

    def replay(self) -> None:
        """Runs all."""
        for piece in self._pieces:
            piece.replay()

    def reset(self) -> None:
        """Frees the graphs."""
        for graph in self.graphs:
            graph.reset()
        self._pieces.clear()


class Static:
    """Static tensors into which values are copied.

    Args:
        values: of which they have the shapes, by name.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.tensors = {name: value.clone() for name, value in values.items()}

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
            self._static = Static({name: values[name] for name in self._inputs})
            self._values = self._calls.start({**values, **self._static.tensors}, sizes)
            calls = self._calls.forward_calls
            self._forward = Replayed(
                self._pool, calls, self._values, lambda index, environment: calls[index](environment)
            )
            self._results = {name: self._values[value] for name, value in self._calls.step.results.items()}
        else:
            assert self._static is not None
            self._pool.scramble((), (), self._placed)  # gradients of the flight before may be there still
            self._static.fill(values)
            self._forward.replay()
        outputs = {name: value.clone() for name, value in self._results.items()}
        self._scramble(self._backward)
        return outputs, {_FLIGHT: flight}

    def input_backward(
        self, saved: Values, tangents: Mapping[str, Tensor], place: GradientSink | None = None
    ) -> dict[str, Tensor]:
        """Implements `Runnable.input_backward`."""
        if not self._backward:
            self._check_open()
            self._tangents = Static(tangents)
            names = self._calls.step.tangents
            self._values.update({names[name]: static for name, static in self._tangents.tensors.items()})
            self._placed = []
            self._record(range(self._calls.early), None if place is None else Noting(place, self._placed))
            self._returned = {name: self._values[name] for name in self._calls.step.returned.values()}
        else:
            assert self._tangents is not None
            self._tangents.fill(tangents)
            self._backward[0].replay()
        returned = {name: value.clone() for name, value in self._returned.items()}
        self._scramble(self._backward[1:], self._gradients.values())
        return returned

    def weight_backward(self, saved: Values) -> dict[str, Tensor]:
        """Implements `Runnable.weight_backward`; returns the places of what is placed, and copies of all else."""
        return copied(self.weight_gradients(saved), self._placed)

    def weight_gradients(self, saved: Values) -> dict[str, Tensor]:
        """Runs the rest of the backward; returns what it gives, which stays until the next forward."""
        saved.clear()
        if not self.is_recorded:
            self._check_open()
            self._record(range(self._calls.early, len(self._calls.backward_calls)), None)
            self._gradients = {name: self._values[name] for name in self._calls.gives}
            # What is dropped here the pool may give to recordings that come later.
            self._values = {}
        else:
            self._backward[1].replay()
        self._pool.flight = None
        self._scramble((), [*self._gradients.values(), *self._placed])
        return dict(self._gradients)

    def _check_open(self) -> None:
        if self._forward is None:
            raise InputError(
                "the graphs of this call's forward are freed", where="close()", remedy="close behind the last backward"
            )

    def _record(self, indices: range, place: GradientSink | None) -> None:
        """Records some calls of the backward."""
        forward, self._forward = self._forward, None  # where recording fails, all parts are recorded anew
        calls = [self._calls.backward_calls[index] for index in indices]
        part = Replayed(
            self._pool, calls, self._values, lambda i, values: self._calls.run_backward(indices[i], values, place)
        )
        self._backward.append(part)
        self._forward = forward

    def _scramble(self, later: Sequence[Replayed], live: Iterable[Tensor] = ()) -> None:
        """Fills what neither later parts nor others read, where recordings are tried."""
        # Until all parts are there, those that are not recorded yet read what nobody knows of.
        if not self.is_recorded:
            return
        assert self._static is not None
        assert self._tangents is not None
        static = (*self._static.tensors.values(), *self._tangents.tensors.values())
        graphs = [graph for part in later for graph in part.graphs]
        self._pool.scramble(static, graphs, [*live, *(read for part in later for read in part.reads)])

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
        self._last_tangents = tangents
        return self._calls.input_backward(saved, tangents, place)

    def weight_backward(self, saved: Values) -> dict[str, Tensor]:
        """Implements `Runnable.weight_backward`; without copies, as the pipeline adds gradients up at once."""
        if self.is_recorded:
            return self.weight_gradients(saved)
        del saved[_FLIGHT]
        gradients = self._calls.weight_backward(saved)
        self._pool.flight = None
        return gradients

    def record(self) -> None:
        """Records what has run as it is, if anything has."""
        if self.is_recorded or self._last_tangents is None:
            return
        tangents, (values, sizes) = self._last_tangents, self._operands
        self._operands, self._last_tangents = ({}, {}), None
        _, saved = super().forward(values, sizes)
        super().input_backward(saved, tangents)
        self.weight_gradients(saved)


@dataclass(frozen=True)
class Noting:
    """Puts gradients where `place` does, and notes which are `there`; what is left to hooks stays in the pool."""

    place: GradientSink
    there: list[Tensor]

    def __call__(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Implements `GradientSink.__call__`."""
        placed = self.place(gradients)
        self.there.extend(value for name, value in placed.items() if self.destination(name) is not None)
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
            self._replayed.replay()
        assert self._static is not None
        outputs = {name: value.clone() for name, value in self._results.items()}
        self._pool.scramble(self._static.tensors.values(), (), ())
        return outputs

    def _record(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self._static = Static({name: values[name] for name in self._inputs})
        environment = self._calls.start({**values, **self._static.tensors}, sizes)
        calls = self._calls.calls
        self._replayed = Replayed(self._pool, calls, environment, lambda index, values: calls[index](values))
        self._results = {name: environment[value] for name, value in self._calls.results.items()}

    def reset(self) -> None:
        """Frees the graphs and what they hold."""
        if self._replayed is not None:
            self._replayed.reset()
        self._results = {}
