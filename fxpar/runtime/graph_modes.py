"""Modes of CUDA graphs as the runtime calls them: what of a module's calls is replayed.

Enters: calls of steps. Leaves: what runs them. Without graphs that is the call itself; modes are subclasses of
`NoGraphs`, whose names `fxpar.api` fills in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fxpar.plan.plan_options import CudaGraphs
from fxpar.runtime.calls import Boxed, ForwardCalls, Runnable, StepCalls
from fxpar.runtime.grad_buffers import Buffers, Waiting
from fxpar.runtime.microbatches import StepOptions, StepResult
from fxpar.runtime.random_state import RandomState

# Gives the names of the values whose addresses change from call to call; only a mode that replays the call asks.
MovingInputs = Callable[[], Collection[str]]
# Runs a forward alone through the stages of a pipeline, with its batch and what gives its random state.
RunEvaluation = Callable[[Any, Callable[[], Tensor]], dict[str, Tensor]]
# Runs a forward alone, of values by name and sizes by symbol, and gives its outputs by name.
RunForward = Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, Tensor]]


class Run(Protocol):
    """Runs a step."""

    def __call__(self, batches: Sequence[Any], state: Callable[[], Tensor], *, is_recorded: bool = False) -> StepResult:
        """Runs the step.

        Args:
            batches: its microbatches.
            state: gives its random state.
            is_recorded: whether a graph records it, so that nothing may be read on the host.
        """


@dataclass(frozen=True)
class GraphFigures:
    """What graphs take.

    Attributes:
        graphs: how many there are.
        variants: sets of shapes, addresses and modes that they are for.
        slots: sets of graphs with memory of their own, one for each forward whose backward is to come.
        seconds: that recording took.
        bytes: memory that recording has left occupied; 0 where there is no GPU.
        static_bytes: of the tensors into which inputs are copied before a replay.
    """

    graphs: int
    variants: int
    slots: int
    seconds: float
    bytes: int
    static_bytes: int

    def __str__(self) -> str:
        slots = f" in {self.slots} slots" if self.slots > 1 else ""
        static = f"{self.static_bytes / 2**20:,.1f} MiB of static inputs"
        size = f", for which they have taken {self.bytes / 2**20:,.0f} MiB of the device" if self.bytes else ""
        recorded = f"recorded in {self.seconds:.2f} s{size}"
        return f"CUDA graphs: {self.graphs} for {self.variants} variants{slots}, with {static}, {recorded}."


class NoGraphs:
    """What of a module's calls is replayed: nothing. Modes of CUDA graphs are subclasses.

    Attributes:
        is_on: whether any call is replayed.
        holds_steps: whether one graph holds a whole training step, and no Python runs in it.
    """

    is_on = False
    holds_steps = False

    @property
    def figures(self) -> GraphFigures | None:
        """Returns what graphs take by now; None where the mode has none."""
        return None

    def check(self, node: fx.Node | None) -> None:
        """Refuses an operation that graphs of the mode cannot hold.

        Args:
            node: the first of a step or a forward that no graph can hold; None if there is none.

        Raises:
            InputError: names the operation and the reason.
        """

    def stage(self, number: int) -> NoGraphs:
        """Returns what of the calls of a pipeline's stage is replayed; the same for all programs.

        Args:
            number: of the stage, counted over all ranks.
        """
        return NoGraphs()

    def step(self, calls: StepCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable) -> Runnable:
        """Returns what runs forward and backward of a batch.

        Args:
            values: of the program's inputs, by name.
            inputs: gives the names of those whose addresses change from call to call.
            key: by what its graphs differ besides shapes and addresses.
        """
        return calls

    def forward(
        self, calls: ForwardCalls, values: Mapping[str, Any], inputs: MovingInputs, key: Hashable
    ) -> RunForward:
        """Returns what runs a forward alone; as for `step`."""
        return calls

    def evaluate(self, batch: Any, run: RunEvaluation, random: RandomState, key: Hashable) -> dict[str, Tensor]:
        """Runs a forward alone through the stages of a pipeline; returns the outputs by name.

        Args:
            batch: a `BoundBatch`.
            run: what the forward does.
            random: the random state of calls that are not replayed.
            key: equal where `run` does the same.
        """
        return run(batch, random.draw)

    def train(
        self,
        batches: Sequence[Any],
        run: Run,
        options: StepOptions,
        random: RandomState,
        buffers: Buffers,
        waiting: Waiting,
    ) -> StepResult:
        """Runs a training step.

        Args:
            batches: its microbatches, each a `BoundBatch`.
            run: what the step does.
            options: what else the step is called with.
            random: the random state of steps that are not replayed.
            buffers: of the gradients.
            waiting: gradients that are not summed over the ranks yet, which no graph knows.

        Raises:
            InputError: something of the step cannot be replayed.
        """
        return run(batches, random.draw)

    def close(self) -> None:
        """Frees all graphs; no call can be made any more."""


# Makes the graphs of a mode, by its name in a plan: of the plan's options, for a device; the last argument is called in
# front of what communicates, and gives the smallest number of all ranks.
MODES: dict[str, Callable[[CudaGraphs, torch.device, Callable[[int], int]], NoGraphs]] = {}


def graphs_of(options: CudaGraphs, device: torch.device, enter: Callable[[int], int]) -> NoGraphs:
    """Returns the graphs of a module, of the mode that its plan names.

    Args:
        enter: called in front of what communicates, with a number; gives the smallest of all ranks.

    Raises:
        InputError: the mode needs a device or a library that is not there.
    """
    return MODES[options.impl](options, device, enter) if options.is_on else NoGraphs()


# Runs compiled code, whose kernels no mode of torch sees, as one call of what a stand-in for graphs records; None where
# none does.
recorder: ContextVar[Callable[[Boxed, list[Any]], Sequence[Any]] | None] = ContextVar("fxpar's recorder", default=None)


def opaque(function: Boxed) -> Boxed:
    """Returns compiled code as a recording takes it: one call."""

    def call(operands: list[Any]) -> Sequence[Any]:
        record = recorder.get()
        return function(operands) if record is None else record(function, operands)

    return call
