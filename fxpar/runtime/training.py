"""A training step: forward and backward of all its microbatches, and the gradients in their buffers.

Enters: microbatches that are bound to their programs. Leaves: the loss; `.grad` of the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxpar.cost.work import Volume
from fxpar.errors import InputError, shown
from fxpar.plan.plan import Plan
from fxpar.runtime.bound_batch import BoundBatch, Written
from fxpar.runtime.expert_loads import Budget, Finished, Loads, Overflow, gathered, overflowed
from fxpar.runtime.grad_buffers import call_hooks
from fxpar.runtime.graph_modes import NoGraphs, Run
from fxpar.runtime.microbatches import Microbatch, MicrobatchResult, StepOptions, StepResult, run_microbatches
from fxpar.runtime.parameters import check_scaler
from fxpar.runtime.random_state import RandomState
from fxpar.runtime.runner import ForwardBackward, Runner
from fxpar.runtime.sharded import local_of
from fxpar.runtime.world import World


@dataclass(frozen=True)
class StepFlags:
    """Says what became of a step.

    Attributes:
        norm: the norm of all gradients before they were clipped, a scalar; None if they were not clipped.
        is_finite: whether the loss and the norm are finite, a bool scalar; None without an optimizer.
        volume: samples, tokens and FLOPs of all its microbatches and data ranks, on the host.
    """

    norm: Tensor | None = None
    is_finite: Tensor | None = None
    volume: Volume = Volume()  # noqa: RUF009 - it is frozen


class ClippingOptimizer(Optimizer):
    """Clips and looks at gradients in its own step.

    Attributes:
        max_norm: to which it clips; None where it does not.
        norm: of all gradients in the last step, before they were clipped, a scalar on the device; None where it counts
            none.
        waits_for_host: whether a step reads on the host.
    """

    max_norm: float | None
    norm: Tensor | None
    waits_for_host: bool

    def empty_state(self, parameter: Tensor, key: str) -> Tensor | None:
        """Returns memory like a parameter for a state that is to be loaded; None where it is to lie beside it.

        Args:
            key: of the state.
        """
        return None


def check_norm(max_norm: Any) -> None:
    """Refuses what is no norm to clip to.

    Raises:
        InputError: it is no number of at least 0.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise InputError(
            f"must be a number of at least 0, got {shown(max_norm)}",
            where="max_norm",
            remedy="pass a number of at least 0",
        )


def check_norm_type(norm_type: Any) -> None:
    """Refuses what is no order of a norm.

    Raises:
        InputError: it is no number above 0 and no infinity.
    """
    if isinstance(norm_type, bool) or not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise InputError(
            f"must be a number above 0, got {shown(norm_type)}",
            where="norm_type",
            remedy="pass 2.0, or float('inf') for the largest element",
        )


class Training:
    """Steps of one module.

    Args:
        plan: of the module.
        runner: runs single batches, and the stages of a pipeline.
        batches: binds them to their programs.
        random: the state of steps.
        graphs: which of them are replayed.

    Attributes:
        load: of experts in the last step, on the device; None where no rank holds other experts than another.
        volume: of the last step.
        budget: of the places for rows of experts; None where there are as many as rows may need.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        *,
        runner: Runner,
        batches: ForwardBackward,
        random: RandomState,
        graphs: NoGraphs,
    ) -> None:
        self.load: Loads | None = None
        self.volume = Volume()
        self.budget = None if plan.experts.recv_capacity_factor is None else Budget(plan, world)
        self._plan, self._world = plan, world
        self._runner, self._batches, self._random, self._graphs = runner, batches, random, graphs
        self._tensors, self._buffers, self._waiting = runner.tensors, runner.buffers, runner.waiting
        self._rates: weakref.WeakKeyDictionary[Optimizer, Rates] = weakref.WeakKeyDictionary()
        self._pipeline = runner.pipeline

    def options(self, scaler: Any, optimizer: Optimizer | None, max_norm: Any) -> StepOptions:
        """Returns what a step is called with besides batches.

        Raises:
            InputError: a scaler is missing or of no use, or a norm is none, or has no optimizer.
        """
        check_scaler(scaler, self._plan.precision, self._world.device)
        if optimizer is None and max_norm is not None:
            raise InputError("is of an optimizer's step", where="max_norm", remedy="pass the optimizer too")
        if max_norm is not None:
            check_norm(max_norm)
        if max_norm is not None and isinstance(optimizer, ClippingOptimizer) and optimizer.max_norm is not None:
            remedy = "leave it out here, or make the optimizer without it"
            raise InputError(f"the optimizer itself clips to {optimizer.max_norm}", where="max_norm", remedy=remedy)
        if scaler is not None and self._pipeline is not None:
            self._pipeline.join(scaler)
        return StepOptions(scaler, optimizer, max_norm)

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Returns the module's parameters by name."""
        self._tensors.refresh()
        return self._tensors.parameters

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """Returns the tensors that are trained, by name of the parameter."""
        self._tensors.refresh()
        return self._tensors.leaves

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm is at most `max_norm`; gives the norm before. A collective call."""
        norm, _ = self.norms(norm_type)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm, foreach=True)
        return norm

    def norms(self, norm_type: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the norm of all gradients, and of single ones, by name of the parameter. A collective call.

        Args:
            dtype: in which they are counted; that of the gradients by default, as torch does.

        Returns:
            Of the single ones those that count on this rank: of a tied weight one stage has it.
        """
        order, parameters = float(norm_type), self.parameters
        if self._pipeline is not None:
            return self._pipeline.norms(parameters, order, dtype)
        # torch has no largest element of none.
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None and p.numel()}
        if not gradients:
            return torch.zeros((), device=self._random.device), {}
        single = [local_of(norm) for norm in torch._foreach_norm([*gradients.values()], order, dtype)]
        return torch.linalg.vector_norm(torch.stack(single), order), dict(zip(gradients, single, strict=True))

    def step(self, parts: Sequence[Any], count: int, options: StepOptions) -> StepResult:
        """Runs forward and backward of the microbatches of a step, and what ends it.

        Args:
            parts: the microbatches, or one batch that is cut into so many of them as `count` says.
            options: with an optimizer it steps, and the gradients are freed after it.

        Raises:
            InputError: a batch does not fit the model, what pads it matters, or there is no loss or nothing to train.
        """
        if options.optimizer is not None and takes_tensors(options.optimizer):
            # With and without graphs, so that graphs change no bit.
            rates = self._rates.setdefault(options.optimizer, Rates(self._random.device))
            rates.refresh(options.optimizer.param_groups)
        if self.budget is not None and self._graphs.holds_steps and isinstance(options.optimizer, Optimizer):
            check_skips(options.optimizer)
        whole = len(parts) == 1 and count > 1
        calls = self._batches.bind_rows(parts[0], count) if whole else [self._batches.bind(part) for part in parts]
        calls = self._runner.all_prepared(calls)
        if self._pipeline is not None:
            self._pipeline.prepare(calls)
        parameters, leaves = self._tensors.parameters, self._tensors.leaves
        self.volume = sum((call.volume for call in calls), Volume())
        run = partial(self._run, parameters=parameters, options=options)
        number, gradients = self._random.step, [(leaf, leaf.grad) for leaf in leaves.values()] if self.budget else []
        # A call that the graphs refuse must draw nothing, or all later steps have other masks than without graphs.
        with self._random.of_accepted():
            try:
                outcome = self._graphs.train(calls, run, options, self._random, self._buffers, self._waiting)
            except Overflow:
                self._random.step = number  # the step draws the same bits again
                for leaf, gradient in gradients:
                    leaf.grad = gradient
                outcome = self._repeated(calls, run, options)
        if self.budget is not None:
            self.budget.steps += 1
        if self._graphs.holds_steps:
            self._buffers.attach(leaves, outcome.names)
            if options.optimizer is not None:
                options.optimizer.zero_grad(set_to_none=True)  # a replay has run no Python
                if self._runner.copies is not None:
                    self._runner.copies.expire()  # no optimizer has said in Python that parameters have changed
        if options.optimizer is None and (not self._graphs.holds_steps or self._buffers.is_hooked):
            call_hooks(leaves, outcome.names)
        self.load = outcome.load
        loss = outcome.loss
        # The device may still compare the ranks' batches. NaN says that they differ without a wait of the host.
        for call in calls:
            loss = loss if call.are_equal is None else loss.where(call.are_equal, torch.nan)
        return replace(outcome, loss=loss)

    def _repeated(self, calls: Sequence[BoundBatch], run: Run, options: StepOptions) -> StepResult:
        """Runs a step that has overflowed with as many places as rows may need."""
        assert self.budget is not None
        calls = self._runner.all_prepared(self._batches.with_all_places(calls))
        if self._pipeline is not None:
            self._pipeline.prepare(calls)
        if self._graphs.holds_steps:  # a graph of what seldom comes is not worth its memory
            outcome = run(calls, self._random.draw)
        else:
            outcome = self._graphs.train(calls, run, options, self._random, self._buffers, self._waiting)
        self.budget.repeated += 1
        return outcome

    def _run(
        self,
        calls: Sequence[BoundBatch],
        state: Callable[[], Tensor],
        *,
        is_recorded: bool = False,
        parameters: Mapping[str, Tensor],
        options: StepOptions,
    ) -> StepResult:
        """Runs what a step does on the device alone.

        Raises:
            Overflow: rows had no place, in a step that no graph records.
        """
        calls = self._runner.gathered(calls, waits=len(calls) > 1 or self._pipeline is not None)
        has_overflowed = None
        rows: list[Mapping[str, Tensor]] = []
        new = Written()
        if self._pipeline is not None:
            loss, gradients, has_overflowed = self._pipeline.step(calls, state, options.scaler, new, is_recorded)
        elif len(calls) == 1 and self.budget is None:
            left = self._runner.step(calls[0], state, None, options.scaler)
            rows.append(left.rows)
            new.add(left.outputs)
            loss, gradients = left.loss, self._waiting.finished(left.unfinished, left.signature, left.finish)
        else:
            loss, gradients = self._microbatches(calls, state(), rows, options, new, is_recorded)
            if is_recorded and self.budget is not None:
                has_overflowed = overflowed(rows, self._world, self._plan)
        # After the last backward: it may still read the old values of the buffers that the forward has updated.
        new.commit(self._tensors.all, has_overflowed)
        load = gathered(rows, self._world, self._plan)
        outcome = StepResult(loss, tuple(gradients), load=load, has_overflowed=has_overflowed)
        with self._buffers.put_back(calls[0].leaves, has_overflowed):
            self._buffers.add(parameters, gradients, self._graphs.holds_steps and options.optimizer is None)
            if options.optimizer is None:
                return outcome
            call_hooks(self._tensors.leaves, outcome.names)
            return self._stepped(outcome, parameters, options)

    def _microbatches(
        self,
        calls: Sequence[BoundBatch],
        drawn: Tensor,
        rows: list[Mapping[str, Tensor]],
        options: StepOptions,
        new: Written,
        is_recorded: bool,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns loss and gradients of several; with a budget of one too: they are in no buffer yet."""

        def run(call: BoundBatch, microbatch: Microbatch) -> MicrobatchResult:
            left = self._runner.step(new.read(call), lambda: drawn, microbatch, options.scaler, adds_up=True)
            rows.append(left.rows)
            new.add(left.outputs)
            return left

        finished: Finished = self._waiting.finished
        if self.budget is not None and not is_recorded:
            finished = self.budget.checked(rows, finished)
        return run_microbatches(calls, drawn, run, finished, self._waiting, calls[0].adds)

    def _stepped(self, outcome: StepResult, parameters: Mapping[str, Tensor], options: StepOptions) -> StepResult:
        """Clips, steps and frees the gradients."""
        optimizer, scaler = options.optimizer, options.scaler
        assert optimizer is not None
        if scaler is not None and (options.max_norm is not None or not isinstance(optimizer, ClippingOptimizer)):
            scaler.unscale_(optimizer)  # which others leave to their kernels
        norm = None
        if options.max_norm is not None:
            # Unscaled gradients, so that the norm and the limit are in the same unit under every loss scale.
            norm = local_of(self.clip(options.max_norm))
        elif isinstance(optimizer, ClippingOptimizer) and optimizer.norm is not None:
            optimizer.norm.fill_(torch.nan)  # which it stays where a scaler leaves the step out
        rates = self._rates.get(optimizer)
        in_place = nullcontext() if rates is None else rates.in_place(optimizer.param_groups)
        with in_place, skipping(optimizer, outcome.has_overflowed):
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        if isinstance(optimizer, ClippingOptimizer) and optimizer.norm is not None:
            norm = optimizer.norm.clone()
        is_finite = outcome.loss.isfinite() if norm is None else outcome.loss.isfinite() & norm.isfinite()
        optimizer.zero_grad(set_to_none=True)
        return replace(outcome, norm=norm, is_finite=is_finite)


# Learning rates as tensors, so that a step that is replayed follows the schedulers. torch's capturable and fused
# optimizers take a learning rate as a tensor and no other number.


RATE = "lr"


def takes_tensors(optimizer: Optimizer) -> bool:
    """Returns whether learning rates may be tensors, and nothing is asked of the device."""
    return all(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)


def check_skips(optimizer: Optimizer) -> None:
    """Refuses an optimizer that makes its step in a graph in which rows have had no place.

    Raises:
        InputError: it is not fused.
    """
    # torch sets the attribute where it makes fused kernels, which read `found_inf`: others fail or ignore it.
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not (fused and all(group.get("fused") for group in optimizer.param_groups)):
        raise InputError(
            "cannot skip a step on the device, which recv_capacity_factor needs where more rows come than expected",
            where=type(optimizer).__name__,
            remedy="pass no optimizer and step it after train_step, or make it with fused=True where it takes that",
        )


@contextmanager
def skipping(optimizer: Optimizer, is_skipped: Tensor | None) -> Iterator[None]:
    """Makes a fused optimizer change nothing in its step, not the count of steps either, where a scalar is true.

    Args:
        is_skipped: a bool on the device; None if the step is never skipped.
    """
    if is_skipped is None:
        yield
        return
    # Fused kernels read it on the device, and a GradScaler skips steps by it.
    optimizer.found_inf = is_skipped.float()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


class Rates:
    """Learning rates of an optimizer's groups as tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.float32 if device.type == "cuda" else torch.float64  # as torch's fused kernels read them
        self._known: list[float] = []
        self._tensors: list[Tensor] = []

    @contextmanager
    def in_place(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Puts the tensors into the groups."""
        before = [group[RATE] for group in groups]
        for group, tensor in zip(groups, self._tensors, strict=True):
            group[RATE] = tensor
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group[RATE] = rate

    def refresh(self, groups: Sequence[dict[str, Any]]) -> None:
        """Writes the numbers that the groups have by now: a state that an optimizer loads makes others of them."""
        for i, group in enumerate(groups):
            rate = float(group[RATE])
            if i == len(self._known):
                self._known.append(rate)
                self._tensors.append(torch.tensor(rate, dtype=self._dtype, device=self._device))
            elif rate != self._known[i]:
                self._tensors[i].fill_(rate)
                self._known[i] = rate
