"""A training step: forward and backward of all its microbatches, and the gradients in their buffers.

Enters: microbatches that are bound to their programs. Leaves: the loss; `.grad` of the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpar.checkpoint.sharded import Sharded, local_of
from fxpar.checkpoint.sharded_ops import norms
from fxpar.errors import InputError, shown
from fxpar.runtime.buffer_updates import Written
from fxpar.runtime.expert_loads import Budget, Loads, Overflow
from fxpar.runtime.forward_backward import Bound, ForwardBackward
from fxpar.runtime.grad_buffers import Buffers, Waiting, call_hooks
from fxpar.runtime.graphs.full import Ending, Found, FullIteration
from fxpar.runtime.graphs.graph_cache import Graphs
from fxpar.runtime.graphs.optimizer import Rates, takes_tensors
from fxpar.runtime.microbatches import run_microbatches
from fxpar.runtime.parameters import Tensors
from fxpar.runtime.pipeline import Pipeline
from fxpar.runtime.random_state import RandomState
from fxpar.runtime.runner import Prepared


@dataclass(frozen=True)
class StepFlags:
    """What became of a step with an optimizer.

    Attributes:
        norm: of all gradients before they were clipped, a scalar; None where they were not.
        is_finite: whether the loss is, and the norm, a bool scalar; None without an optimizer.
    """

    norm: Tensor | None = None
    is_finite: Tensor | None = None


def check_norm(max_norm: Any) -> None:
    """Refuses what is no norm to clip to.

    Raises:
        InputError: it is no number of at least 0.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise InputError(f"{shown(max_norm)} is no norm", where="max_norm", remedy="pass a number of at least 0")


class Training:
    """Steps of one module.

    Args:
        tensors: of the module, whose parameters get the gradients.
        batches: runs single batches.
        waiting: gradients that are not summed over the ranks yet.
        graphs: of the module; with `full_iteration` a step is one of them.
        expire: is called where parameters have changed and no optimizer has told.
        pipeline: runs the stages of this rank; None without a pipeline.
        gather: gives the load of experts on all ranks, of those of the microbatches.
        budget: of the places for rows of experts; None where there are as many as rows may need.

    Attributes:
        load: of experts in the last step, on the device; None where no rank holds other experts than another.
    """

    def __init__(
        self,
        tensors: Tensors,
        batches: ForwardBackward,
        waiting: Waiting,
        random: RandomState,
        gradients: Buffers,
        graphs: Graphs | None,
        expire: Callable[[], None],
        pipeline: Pipeline | None,
        gather: Callable[[Sequence[Mapping[str, Tensor]]], Loads | None],
        budget: Budget | None,
    ) -> None:
        self.load: Loads | None = None
        self._gather, self.budget = gather, budget
        self._pipeline = pipeline
        self._tensors, self._batches, self._waiting = tensors, batches, waiting
        self._random, self._gradients, self._expire = random, gradients, expire
        self._rates: weakref.WeakKeyDictionary[Optimizer, Rates] = weakref.WeakKeyDictionary()
        self._full = None
        if graphs is not None and graphs.options.impl == "full_iteration":
            self._full = FullIteration(graphs, random, waiting)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Of the module, by name."""
        self._tensors.refresh()
        return self._tensors.parameters

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """Of the parameters, by name."""
        self._tensors.refresh()
        return self._tensors.leaves

    def clip(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; gives the norm before. A collective call."""
        parameters = self.parameters
        if self._pipeline is None:
            return nn.utils.clip_grad_norm_(parameters.values(), max_norm, foreach=True)
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        counted = [g for name, g in gradients.items() if name in self._pipeline.shared.counted]
        local_norms = norms([g if isinstance(g, Sharded) else local_of(g) for g in counted], 2.0, None)
        # In float64: the square of a norm that float32 holds may be beyond it.
        squares = (
            torch.stack([norm.double() for norm in local_norms]).square().sum()
            if local_norms
            else self._pipeline.nothing
        )
        some = next(iter(gradients.values() or parameters.values()), squares)
        norm = self._pipeline.joined(squares).to(some.dtype)
        nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, norm, foreach=True)
        return norm

    def step(self, parts: Sequence[Any], count: int, ending: Ending) -> Found:
        """Forward and backward of the microbatches of a step, and what ends it.

        Args:
            parts: the microbatches, or one batch that is cut into so many of them as `count` says.
            ending: with an optimizer it steps, and the gradients are freed behind it.

        Raises:
            InputError: a batch does not fit the model, what pads it matters, or there is no loss or nothing to train.
        """
        if ending.optimizer is not None and takes_tensors(ending.optimizer):
            # With and without graphs, so that graphs change no bit.
            if ending.optimizer not in self._rates:
                self._rates[ending.optimizer] = Rates(ending.optimizer, self._random.device)
            self._rates[ending.optimizer].refresh()
        whole = len(parts) == 1 and count > 1
        bounds = self._batches.bind_rows(parts[0], count) if whole else self._batches.bind_all(parts)
        ready = self._batches.prepare(bounds)
        parameters, leaves = self._tensors.parameters, self._tensors.leaves
        run = partial(self._run, bounds, parameters=parameters, ending=ending)
        with self._random.of_accepted():
            if self._full is None:
                outcome = run(ready, self._random.draw)
            else:
                gradients = self._gradients.state(ready[0].leaves, ending.optimizer is not None)
                hooked = ready[0].leaves if self._gradients.is_hooked else {}
                outcome = self._full(bounds, ready, run, gradients, ending, hooked)
        if self._full is not None:
            if ending.optimizer is None:
                self._gradients.attach(leaves, outcome.names)
            else:
                self._expire()
        if ending.optimizer is None and (self._full is None or self._gradients.is_hooked):
            call_hooks(leaves, outcome.names)
        self.load = outcome.load
        loss = outcome.loss
        for bound in bounds:
            loss = loss if bound.are_equal is None else loss.where(bound.are_equal, torch.nan)
        return replace(outcome, loss=loss)

    def _run(
        self,
        bounds: Sequence[Bound],
        ready: Sequence[Prepared],
        state: Callable[[], Tensor],
        parameters: Mapping[str, Tensor],
        ending: Ending,
    ) -> Found:
        """What a step does, on the device alone."""
        rows: list[Mapping[str, Tensor]] = []
        new = Written()
        if self._pipeline is not None:
            loss, gradients = self._pipeline.step(bounds, ready, state, ending.scaler, new)
        elif len(bounds) == 1 and self.budget is None:
            done = self._batches.train(bounds[0], ready[0], state, None, ending.scaler)
            rows.append(done.rows)
            new.add(done.ran.outputs)
            loss, gradients = (
                done.loss,
                self._waiting.finished(done.ran.unfinished, done.ran.signature, done.ran.finish),
            )
        else:
            loss, gradients = self._microbatches(bounds, ready, state(), rows, ending, new)
        new.commit(self._tensors.all)
        self._gradients.add(parameters, gradients, self._full is not None and ending.optimizer is None)
        names = tuple(gradients)
        if ending.optimizer is None:
            return Found(loss, names, load=self._gather(rows))
        call_hooks(self._tensors.leaves, names)
        return self._stepped(Found(loss, names, load=self._gather(rows)), parameters, ending)

    def _microbatches(
        self,
        bounds: Sequence[Bound],
        ready: Sequence[Prepared],
        drawn: Tensor,
        rows: list[Mapping[str, Tensor]],
        ending: Ending,
        new: Written,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss and gradients of several; with a budget of one too, whose gradients are then in no buffer yet."""

        def run(index: int, microbatch: Any) -> Any:
            bound = bounds[index]
            prepared = new.read(bound.call.compiled.program, ready[index])
            part = self._batches.train(bound, prepared, lambda: drawn, microbatch, ending.scaler)
            rows.append(part.rows)
            new.add(part.ran.outputs)
            return part

        finished, adds = self._waiting.finished, bounds[0].adds
        if self.budget is None:
            return run_microbatches(range(len(bounds)), drawn, run, finished, adds)
        try:
            return run_microbatches(range(len(bounds)), drawn, run, self.budget.checked(rows, finished), adds)
        except Overflow:
            rows.clear()
            new.clear()
        bounds = self._batches.with_all_places(bounds)
        ready = self._batches.prepare(bounds)
        return run_microbatches(range(len(bounds)), drawn, run, finished, adds)

    def _stepped(self, outcome: Found, parameters: Mapping[str, Tensor], ending: Ending) -> Found:
        """Clips, steps and frees the gradients."""
        optimizer, scaler = ending.optimizer, ending.scaler
        assert optimizer is not None
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = None
        if ending.max_norm is not None:
            norm = local_of(self.clip(ending.max_norm))
        is_finite = outcome.loss.isfinite() if norm is None else outcome.loss.isfinite() & norm.isfinite()
        rates = self._rates.get(optimizer)
        with nullcontext() if rates is None else rates.in_place():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return replace(outcome, norm=norm, is_finite=is_finite)
