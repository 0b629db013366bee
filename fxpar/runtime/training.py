"""A training step: forward and backward of all its microbatches, and the gradients in their buffers.

Enters: microbatches that are bound to their programs. Leaves: the loss; `.grad` of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpar.runtime.buffers import Buffers, call_hooks
from fxpar.runtime.forward_backward import Bound, ForwardBackward
from fxpar.runtime.graphs.full import FullIteration
from fxpar.runtime.graphs.table import Graphs
from fxpar.runtime.microbatches import run_microbatches
from fxpar.runtime.randomness import RandomState
from fxpar.runtime.runner import Prepared
from fxpar.runtime.tensors import Tensors
from fxpar.runtime.waiting import Waiting

Scaler = torch.amp.GradScaler | None


class Training:
    """Steps of one module.

    Args:
        tensors: of the module, whose parameters get the gradients.
        batches: runs single batches.
        waiting: gradients that are not summed over the ranks yet.
        graphs: of the module; with `full_iteration` a step is one of them.
    """

    def __init__(
        self,
        tensors: Tensors,
        batches: ForwardBackward,
        waiting: Waiting,
        random: RandomState,
        gradients: Buffers,
        graphs: Graphs | None,
    ) -> None:
        self._tensors, self._batches, self._waiting = tensors, batches, waiting
        self._random, self._gradients = random, gradients
        self._full = None
        if graphs is not None and graphs.options.impl == "full_iteration":
            self._full = FullIteration(graphs, random, waiting)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Of the module, by name."""
        self._tensors.refresh()
        return self._tensors.parameters

    def step(self, parts: Sequence[Any], scaler: Scaler) -> Tensor:
        """Forward and backward of the microbatches of a step; the loss, detached.

        Raises:
            InputError: a batch does not fit the model, what pads it matters, or there is no loss or nothing to train.
        """
        bounds = [self._batches.bind(part) for part in parts]
        ready = self._batches.prepare(bounds)
        parameters = self._tensors.parameters
        if self._full is None:
            loss, names = self._run(bounds, ready, self._random.draw, parameters, scaler)
        else:
            run = partial(self._run, bounds, parameters=parameters, scaler=scaler)
            loss, names = self._full(bounds, ready, run, self._gradients.state(ready[0].leaves), scaler)
            self._gradients.attach(parameters, names)
        call_hooks(parameters, names)
        for bound in bounds:
            loss = loss if bound.are_equal is None else loss.where(bound.are_equal, torch.nan)
        return loss

    def _run(
        self,
        bounds: Sequence[Bound],
        ready: Sequence[Prepared],
        state: Callable[[], Tensor],
        parameters: Mapping[str, Tensor],
        scaler: Scaler,
    ) -> tuple[Tensor, tuple[str, ...]]:
        """The loss, and the names of the parameters that have gradients of it."""
        if len(bounds) == 1:
            done = self._batches.train(bounds[0], ready[0], state, None, scaler)
            loss, found = done.loss, self._waiting.finished(done.ran.held, done.ran.signature, done.ran.finish)
        else:
            drawn = state()

            def run(index: int, microbatch: Any) -> Any:
                return self._batches.train(bounds[index], ready[index], state, microbatch, scaler)

            loss, found = run_microbatches(range(len(bounds)), drawn, run, self._waiting.finished)
        self._gradients.add(parameters, found)
        return loss, tuple(found)
