"""Full iteration: forward and backward of all microbatches of a step, and the reductions of gradients, in one graph.

Enters: what a step does, and the values that it takes. Leaves: its loss and gradients, replayed.

The graph has its own copy of the random state, which it counts up, so that each replay draws other bits. What the host
decides between two steps (the shapes of batches, where parameters and gradients are, whether gradients are added) is
what variants differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fxpar.errors import InputError
from fxpar.runtime.expert_loads import Loads
from fxpar.runtime.forward_backward import Bound
from fxpar.runtime.grad_buffers import Waiting
from fxpar.runtime.graphs.graph_cache import Graphs, key_of
from fxpar.runtime.graphs.optimizer import check_optimizer, state_of
from fxpar.runtime.graphs.partial import Static
from fxpar.runtime.graphs.pool import Pool, Recording
from fxpar.runtime.random_state import RandomState
from fxpar.runtime.runner import Prepared


@dataclass(frozen=True)
class Found:
    """What a step gives.

    Attributes:
        loss: of it.
        names: of the parameters that have gradients of it.
        norm: of all gradients before they were clipped; None where they were not.
        is_finite: with an optimizer, whether loss and norm are, a bool scalar on the device.
        load: of experts; None where no rank holds other ones than another.
    """

    loss: Tensor
    names: tuple[str, ...]
    norm: Tensor | None = None
    is_finite: Tensor | None = None
    load: Loads | None = None

    def copied(self) -> Found:
        """With tensors of its own."""
        norm, is_finite = (None if tensor is None else tensor.clone() for tensor in (self.norm, self.is_finite))
        load = None if self.load is None else replace(self.load, counts=self.load.counts.clone())
        return Found(self.loss.clone(), self.names, norm, is_finite, load)


# Runs a step with the values of its microbatches and what gives its random state.
Run = Callable[[Sequence[Prepared], Callable[[], Tensor]], Found]


@dataclass(frozen=True)
class Ending:
    """What a step is given besides batches.

    Attributes:
        scaler: scales the loss that is differentiated.
        optimizer: steps at the end.
        max_norm: of all gradients, to which they are clipped before.
    """

    scaler: torch.amp.GradScaler | None = None
    optimizer: Optimizer | None = None
    max_norm: float | None = None

    @property
    def state(self) -> Hashable:
        """Equal where a recorded step does the same."""
        scale = None if self.scaler is None or self.scaler._scale is None else self.scaler._scale.data_ptr()
        stepped = None if self.optimizer is None else state_of(self.optimizer)
        return id(self.scaler), scale, stepped, self.max_norm


class FullIteration:
    """Training steps as graphs.

    Args:
        graphs: where they are kept.
        random: the random state of steps that are not replayed.
        waiting: gradients that are not summed over the ranks yet, which no graph knows.
    """

    def __init__(self, graphs: Graphs, random: RandomState, waiting: Waiting) -> None:
        self._graphs, self._random, self._waiting = graphs, random, waiting

    def __call__(
        self,
        bounds: Sequence[Bound],
        ready: Sequence[Prepared],
        run: Run,
        gradients: Hashable,
        ending: Ending,
        hooked: Mapping[str, Tensor],
    ) -> Found:
        """A step.

        Args:
            gradients: equal where they are placed alike.
            ending: what else the step is given.
            hooked: parameters' tensors, where some have hooks.

        Raises:
            InputError: something of the step cannot be replayed.
        """
        self._check(hooked, ending)
        moving = [
            bound.call.ready.moving(prepared.others, prepared.others)
            for bound, prepared in zip(bounds, ready, strict=True)
        ]
        key: Any = ("iteration", gradients, ending.state)
        for bound, prepared, names in zip(bounds, ready, moving, strict=True):
            key += (id(bound.call.ready), bound.call.rows, bound.loss, prepared.placed)
            key += key_of(prepared.others, names)
        iteration = self._graphs.variant(key, lambda pool: Iteration(pool, self._random), None)
        self._graphs.enter()
        if iteration is None:
            return run(ready, self._random.draw)
        step: Found = iteration(ready, moving, run)
        return step

    def _check(self, leaves: Mapping[str, Tensor], ending: Ending) -> None:
        if ending.optimizer is not None:
            check_optimizer(ending.optimizer, self._random.device)
            if ending.scaler is not None:
                raise InputError(
                    "asks on the host whether gradients overflow",
                    where="scaler with an optimizer",
                    remedy="step the optimizer behind train_step, or train in bf16",
                )
        if not self._waiting.is_idle:
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


class Iteration:
    """One graph of a step.

    Args:
        pool: in which it is recorded.
        random: whose steps it counts.
    """

    def __init__(self, pool: Pool, random: RandomState) -> None:
        self._pool, self._random = pool, random
        self._static: list[Static] = []
        self._recording: Recording | None = None
        self._found: Found | None = None
        self._state = self._one = torch.empty(0)
        self._step = -1

    @property
    def graphs(self) -> int:
        """How many there are."""
        return int(self._recording is not None)

    def __call__(self, ready: Sequence[Prepared], moving: Sequence[Sequence[str]], run: Run) -> Found:
        """Replays the step; the loss is the caller's own.

        Args:
            moving: names of the values whose addresses change from call to call, of each microbatch.
        """
        if self._recording is None:
            self._record(ready, moving, run)
        else:
            for static, prepared in zip(self._static, ready, strict=True):
                static.fill(prepared.values)
        assert self._recording is not None
        assert self._found is not None
        if self._step != self._random.step:
            self._state.copy_(self._random.peek())
        self._recording.replay()
        draws = any(prepared.random for prepared in ready) or len(ready) > 1
        self._step = self._random.step = self._random.step + draws
        copied = self._found.copied()
        self._pool.scramble([value for static in self._static for value in static.tensors.values()], (), ())
        return copied

    def _record(self, ready: Sequence[Prepared], moving: Sequence[Sequence[str]], run: Run) -> None:
        self._state = self._random.peek()
        self._step = self._random.step
        self._one = torch.tensor([0, 1, 0], device=self._state.device)
        self._static = [
            Static({name: prepared.values[name] for name in names if name in prepared.values})
            for prepared, names in zip(ready, moving, strict=True)
        ]
        static_ready = [
            replace(prepared, values={**prepared.values, **static.tensors})
            for prepared, static in zip(ready, self._static, strict=True)
        ]

        def work() -> Found:
            state = self._state.clone()
            self._state.add_(self._one)
            return run(static_ready, lambda: state)

        self._recording, self._found = self._pool.record(work)

    def reset(self) -> None:
        """Frees the graph and what it holds."""
        if self._recording is not None:
            self._recording.reset()
        self._found = None
