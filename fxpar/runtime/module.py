"""One rank's part of a model, which trains and evaluates.

Enters: a model, its plan, the processes and this rank's weights. Leaves: `RankModule`, of which `fxpar.ParallelModule`
is a subclass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.cost import Report, ReportBasis, make_report
from fxpar.errors import InputError
from fxpar.ir.program import Program
from fxpar.manager import Pass
from fxpar.pipeline.compiler.partition import run_pipeline
from fxpar.plan.plan import Plan
from fxpar.runtime import batch as calls
from fxpar.runtime.alarm import retire
from fxpar.runtime.graph_modes import GraphFigures, graphs_of
from fxpar.runtime.local_model import LocalModel, LocalWeights
from fxpar.runtime.outputs import returned
from fxpar.runtime.programs import Programs
from fxpar.runtime.rank_batches import Inputs
from fxpar.runtime.rank_consensus import together
from fxpar.runtime.runner import STAGE_RUNNERS, ForwardBackward, Runner
from fxpar.runtime.shard_spec import fingerprints
from fxpar.runtime.steps import TRANSPORTS
from fxpar.runtime.training import StepFlags, Training, check_norm, check_norm_type
from fxpar.runtime.world import World


class RankModule(LocalModel):
    """Runs and trains one rank's part of a model; `fxpar.ParallelModule` adds how it is saved and loaded."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        world: World,
        example: Any,
        loss: Callable[[Any, Any], Tensor] | str | None,
        passes: Sequence[Pass],
        local_weights: LocalWeights,
        check_inputs: bool = True,
    ) -> None:
        super().__init__(model, plan, world)
        random = self._random
        world.agreement.step = lambda: random.step
        self._takes_lists = isinstance(example, list)
        self._graphs = graphs_of(plan.cuda_graphs, world.device, world.agreement.enter_with)
        self._peer_memory = TRANSPORTS["copy"](plan, world)
        self._programs = Programs(model, plan, world, loss, passes, self._graphs, self._peer_memory)
        facts = {"option check_inputs": str(check_inputs), **fingerprints(model)}
        self._programs.start(model, calls.canonical(example), facts)
        plan = self.plan = plan.with_slots_of(self.program.plan)
        settings = self._adopt(model, local_weights)
        self._runner = Runner(self, random, is_graphed=self._graphs.is_on)
        inputs = Inputs(world) if check_inputs and world.size > 1 else None
        self._batches = ForwardBackward(self._programs, self._runner, loss, inputs)
        if plan.pp > 1:
            program, waiting = self._programs.first.program, self._runner.waiting
            self._runner.pipeline = STAGE_RUNNERS["pp"](plan, world, waiting, program, self._peer_memory)
        self._training = Training(
            plan, world, runner=self._runner, batches=self._batches, random=random, graphs=self._graphs
        )
        self._flags = StepFlags()
        weakref.finalize(self, retire, world.agreement.alarm).atexit = False
        self._seal(settings)

    # ------------------------------------------------------------------ calls

    @property
    def program(self) -> Program:
        """Returns the program of the example's mode and structure."""
        return self._programs.first.program

    @together
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's own output for a call as the author defined it; sharded tensors are DTensors.

        Raises:
            InputError: the model's forward does not take an argument, or no program can take a value.
        """
        self._settings.check()
        call, outputs = self._batches.forward(calls.called_with(self._programs.skeleton, args, kwargs))
        self._peer_memory.mark()
        return returned(call, outputs, self.world)

    @together
    def train_step(
        self,
        batch: Any,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        max_norm: float | None = None,
    ) -> Tensor:
        """Runs forward and backward of one batch, adds gradients to `.grad`, and returns the detached loss.

        Args:
            batch: what the model's forward takes. A list of batches is the microbatches of one step. Their losses are
                averaged (`Plan.loss_reduction` says how), and gradients of parameters are summed over the ranks once,
                after the last microbatch.
            scaler: scales the loss that is differentiated (not the returned one), and with it the gradients. Call its
                `unscale_`, `step` and `update` as always. float16 gradients need it.
            optimizer: also makes its step, after which the gradients are freed. With `CudaGraphs("full_iteration")`
                the graph contains the step, with the learning rates of its groups at each call. The optimizer must be
                fused and capturable then. `step_flags` says what became of the step.
            max_norm: the norm to which all gradients together are clipped before the optimizer's step.

        Raises:
            InputError: the module is in evaluation mode, gradients are off, the model has no loss, the batch does
                not fit the model, or a scaler is missing or useless.
        """
        if not self.training:
            raise InputError("the module is in evaluation mode", where="train_step", remedy="call train() before")
        if not torch.is_grad_enabled():
            raise InputError("gradients are off", where="train_step", remedy="leave torch.no_grad()")
        self._settings.check()
        options = self._training.options(scaler, optimizer, max_norm)
        parts = calls.microbatches(batch, self._takes_lists)
        is_list = type(batch) is list and not self._takes_lists
        count = 1 if is_list else self.plan.microbatches
        step = self._training.step(parts, count, options)
        self._flags = StepFlags(step.norm, step.is_finite, self._training.volume)
        self._peer_memory.mark()
        return step.loss

    @property
    def step_flags(self) -> StepFlags:
        """Returns what became of the last `train_step`: tensors stay on the device, so that nobody waits."""
        return self._flags

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defers the sums of gradients over ranks: the next call outside of it sums those of all calls, once.

        It works like that of `DistributedDataParallel`. `.grad` has the gradients only after that next call.
        """
        waiting = self._runner.waiting
        before, waiting.holds = waiting.holds, True
        try:
            yield
        finally:
            waiting.holds = before

    def own_rows(self, batch: Any) -> Any:
        """Returns this rank's rows of a batch, or of a list of microbatches, that has the rows of all data ranks."""
        if type(batch) is list and not self._takes_lists:
            return [self.own_rows(part) for part in batch]
        return calls.own_rows(self.program, batch, self.world.coordinates)

    # ------------------------------------------------------------------ gradients

    @together
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`, and returns the norm before that.

        It does the same as `torch.nn.utils.clip_grad_norm_`, with one collective for all parameters. All ranks must
        call it.

        Args:
            max_norm: at least 0.
            norm_type: order of the norm, above 0; infinite for the largest element.

        Raises:
            InputError: one of them is not.
        """
        check_norm(max_norm)
        check_norm_type(norm_type)
        self.world.agreement.enter()
        return self._training.clip(max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees or zeroes all gradients, without the walk over modules that takes longer than a replay."""
        leaves = [leaf for leaf in self._training.leaves.values() if leaf.grad is not None]
        if set_to_none:
            for leaf in leaves:
                leaf.grad = None
        elif leaves:
            torch._foreach_zero_([leaf.grad.detach() for leaf in leaves if leaf.grad is not None])

    @property
    def graph_figures(self) -> GraphFigures | None:
        """Returns how many CUDA graphs there are by now, and what they took; None if the plan has none."""
        return self._graphs.figures

    def close(self) -> None:
        """Frees the CUDA graphs and the memory that ranks copy into. The weights stay.

        Afterwards no graph can be replayed or recorded, and no step can run that copies between ranks. Graphs hold the
        communicators of process groups, so call this before `dist.destroy_process_group()`. It is called by itself at
        the end of a process.
        """
        self._graphs.close()
        self._peer_memory.close()

    def report(self, sizes: Mapping[str, int] | None = None, optimizer: str = "adamw") -> Report:
        """Returns passes, collectives, memory of each rank, and what is not split and why; printed, it is a table.

        The report is about the program of the example's mode and structure. It is counted, not run, and nothing
        communicates. If ranks hold different experts, it also has the load of the last `train_step`, and waits for it.

        Args:
            sizes: sizes of the inputs by symbol (`b`, `s`); those of the example by default.
            optimizer: whose state to count: adamw, sgd, sgd-momentum or none.

        Raises:
            InputError: an unknown optimizer or symbol, or a size that the ranks cannot share out.
        """
        compiled = self._programs.first
        reach = self._peer_memory.reach
        figures = self.graph_figures
        notes = [str(figure) for figure in (figures, self._training.budget) if figure is not None]
        sizes_of = self._programs.of_sizes
        notes += [f"Programs for sizes of their own: {'; '.join(sizes_of)}."] if sizes_of else []
        report = make_report(
            compiled.program,
            compiled.ready.counted(reach.names),
            name=type(self._programs.skeleton).__name__,
            device=self.world.device,
            sizes=sizes,
            optimizer=optimizer,
            reach=reach,
            basis=ReportBasis(
                (*compiled.captured.findings, *notes), compiled.captured.program, run_pipeline=run_pipeline
            ),
        )
        load = self._training.load
        return report if load is None else replace(report, loads=load.read(self.plan))
