"""Full iteration: forward and backward of all microbatches of a step, and the reductions of gradients, in one graph.

Enters: what a step does, and the values that it takes. Leaves: its loss and gradients, replayed.

The graph has its own copy of the random state, which it counts up, so that each replay draws other bits. What the host
decides between two steps (the shapes of batches, where parameters and gradients are, whether gradients are added) is
what variants differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from fxpar.cudagraphs.graph_cache import CachedGraphs, key_of_batch, refuse_uncaptured
from fxpar.cudagraphs.partial import Static
from fxpar.cudagraphs.pool import Pool, Recording
from fxpar.errors import InputError
from fxpar.runtime.bound_batch import BoundBatch
from fxpar.runtime.expert_loads import check
from fxpar.runtime.grad_buffers import Buffers, Waiting
from fxpar.runtime.graph_modes import Run, RunEvaluation
from fxpar.runtime.microbatches import StepOptions, StepResult
from fxpar.runtime.random_state import RandomState
from fxpar.runtime.training import RATE, ClippingOptimizer, takes_tensors


def _state_of(options: StepOptions) -> Hashable:
    """Returns what is equal where a recorded step does the same."""
    scaler = options.scaler
    scale = None if scaler is None or scaler._scale is None else scaler._scale.data_ptr()
    stepped = None if options.optimizer is None else state_of(options.optimizer)
    return id(scaler), scale, stepped, options.max_norm


def _refuse(leaves: Mapping[str, Tensor], options: StepOptions, device: torch.device, waiting: Waiting) -> None:
    """Refuses a step in which Python would have to run.

    Args:
        leaves: parameters' tensors, where some have hooks.

    Raises:
        InputError: says what needs Python.
    """
    if options.optimizer is not None:
        check_optimizer(options.optimizer, device)
        if options.scaler is not None:
            raise InputError(
                "asks on the host whether gradients overflow",
                where="scaler with an optimizer",
                remedy="step the optimizer behind train_step, or train in bf16",
            )
    if not waiting.is_idle:
        raise InputError(
            "one graph holds a whole step, and no_sync parts it",
            where="no_sync",
            remedy="pass the microbatches of a step as a list, or set CudaGraphs('partial')",
        )
    hooked = next((name for name, leaf in leaves.items() if leaf._backward_hooks), None)
    if hooked is not None:
        raise InputError(
            "has a hook that sees its gradient, and a graph runs no Python",
            where=hooked,
            remedy="register it by register_post_accumulate_grad_hook, or set CudaGraphs('partial')",
        )


class FullIterationGraphs(CachedGraphs):
    """A training step is one graph, the reductions of gradients in it; plain calls are graphs of their forward."""

    holds_steps = True

    def check(self, node: fx.Node | None) -> None:
        """Implements `NoGraphs.check`."""
        refuse_uncaptured(node)

    def train(
        self,
        batches: Sequence[BoundBatch],
        run: Run,
        options: StepOptions,
        random: RandomState,
        buffers: Buffers,
        waiting: Waiting,
    ) -> StepResult:
        """Implements `NoGraphs.train`."""
        leaves = batches[0].leaves
        gradients = buffers.state(leaves, options.optimizer is not None)
        _refuse(leaves if buffers.is_hooked else {}, options, random.device, waiting)
        moving = [batch.ready.moving(batch.others, batch.others) for batch in batches]
        key: Any = ("iteration", gradients, _state_of(options))
        key += tuple(key_of_batch(batch) for batch in batches)
        iteration = self.shared_variant(key, lambda pool: Iteration(pool, random, StepResult.copied))
        if iteration is None:
            return run(batches, random.draw)
        step: StepResult = iteration(batches, moving, partial(run, is_recorded=True))
        # The host waits for the device here: no step may follow one that is to be repeated.
        check(step.has_overflowed)
        return step

    def evaluate(self, batch: BoundBatch, run: RunEvaluation, random: RandomState, key: Hashable) -> dict[str, Tensor]:
        """Implements `NoGraphs.evaluate`."""
        names = batch.ready.moving(batch.others, batch.others)
        key = ("evaluation", key, *key_of_batch(batch))
        iteration = self.shared_variant(key, lambda pool: Iteration(pool, random, _copies))
        if iteration is None:
            return run(batch, random.draw)

        def forward(batches: Sequence[BoundBatch], state: Callable[[], Tensor]) -> dict[str, Tensor]:
            return run(batches[0], state)

        # Of what is made in inference mode nothing could be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            outputs: dict[str, Tensor] = iteration([batch], [names], forward)
        return outputs


def _copies(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


Result = TypeVar("Result")


class Iteration(Generic[Result]):
    """One graph of a step, or of a forward alone through the stages of a pipeline.

    Args:
        pool: in which it is recorded.
        random: whose steps it counts.
        copied: makes the caller's own of what is recorded.
    """

    def __init__(self, pool: Pool, random: RandomState, copied: Callable[[Result], Result]) -> None:
        self._pool, self._random = pool, random
        self._copied, self._draws = copied, False
        self._static: list[Static] = []
        self._recording: Recording | None = None
        self._result: Result | None = None
        self._state = self._one = torch.empty(0)
        self._step = -1

    @property
    def graphs(self) -> int:
        """Returns how many graphs there are."""
        return int(self._recording is not None)

    def __call__(
        self, calls: Sequence[BoundBatch], moving: Sequence[Collection[str]], run: Callable[..., Result]
    ) -> Result:
        """Replays; what it gives is the caller's own.

        Args:
            moving: names of the values whose addresses change from call to call, of each microbatch.
            run: what is recorded, of microbatches and what gives the random state.
        """
        if self._recording is None:
            self._record(calls, moving, run)
        else:
            for static, call in zip(self._static, calls, strict=True):
                static.fill(call.values)
        assert self._recording is not None
        assert self._result is not None
        # Replays count the state up themselves. It is written only where
        # something else moved the step, as a resume does.
        if self._step != self._random.step:
            self._state.copy_(self._random.peek())
        self._recording.replay()
        self._step = self._random.step = self._random.step + self._draws
        copied = self._copied(self._result)
        self._pool.scramble([value for static in self._static for value in static.tensors.values()], (), ())
        return copied

    def _record(
        self, calls: Sequence[BoundBatch], moving: Sequence[Collection[str]], run: Callable[..., Result]
    ) -> None:
        self._state = self._random.peek()
        self._step = self._random.step
        self._one = torch.tensor([0, 1, 0], device=self._state.device)
        self._static = [
            Static({name: call.values[name] for name in names if name in call.values}, self._pool)
            for call, names in zip(calls, moving, strict=True)
        ]
        static_calls = [
            replace(call, values={**call.values, **static.tensors})
            for call, static in zip(calls, self._static, strict=True)
        ]

        def work() -> Result:
            # The copy is part of the graph: microbatches read the state as it was,
            # while the next replay finds it counted up.
            state = self._state.clone()
            self._state.add_(self._one)

            def drawn() -> Tensor:
                self._draws = True  # a replay counts a step where what is recorded does
                return state

            return run(static_calls, drawn)

        self._recording, self._result = self._pool.record(work)

    def reset(self) -> None:
        """Frees the graph and what it holds."""
        if self._recording is not None:
            self._recording.reset()
        self._pool.static_bytes -= sum(value.nbytes for static in self._static for value in static.tensors.values())
        self._static, self._result = [], None


# An optimizer's step inside of a graph.


def check_optimizer(optimizer: Any, device: torch.device) -> None:
    """Refuses what cannot step in a graph.

    Raises:
        InputError: it is no optimizer, reads the device on the host, or has hooks.
    """
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"must be an optimizer, got a {type(optimizer).__name__}",
            where="optimizer",
            remedy="pass one of torch.optim",
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, ClippingOptimizer) and optimizer.waits_for_host:
        raise InputError(
            "waits for the host in its step, which no graph can hold",
            where=name,
            remedy="step it behind train_step, or make it with nonfinite='skip', without main_weights and offload",
        )
    # torch refuses to step while a GPU captures where an optimizer that could be capturable is not.
    waits = device.type == "cuda" and any(group.get("capturable") is False for group in optimizer.param_groups)
    if waits or not takes_tensors(optimizer):
        raise InputError(
            "counts its steps on the host, and a graph runs no Python",
            where=name,
            remedy=f"make it with fused=True and, where it takes that, capturable=True: {name}(…, fused=True)",
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InputError(
            "has hooks of steps, and a graph runs no Python", where=name, remedy="remove them, or step behind the graph"
        )


def state_of(optimizer: Optimizer) -> Hashable:
    """Returns what is equal where a recorded step does the same: numbers but rates, and where parameters and state
    are."""
    groups = []
    for group in optimizer.param_groups:
        numbers = tuple((k, v) for k, v in sorted(group.items()) if k not in ("params", RATE, "initial_lr"))
        groups.append((repr(numbers), tuple(map(id, group["params"]))))
    values = (value for state in optimizer.state.values() for value in state.values())
    return id(optimizer), tuple(groups), tuple(value.data_ptr() for value in values if isinstance(value, Tensor))
