"""The parallel module: one rank's part of a model, which trains, evaluates and saves under the author's names.

Enters: a model, its plan and the processes. Leaves: `ParallelModule`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.checkpoint.safetensors_files import Checkpoint
from fxpar.checkpoint.state_dicts import fingerprints
from fxpar.cost import Report, make_report
from fxpar.errors import InputError
from fxpar.ir.program import Program
from fxpar.manager import Pass
from fxpar.plan.plan import Plan
from fxpar.runtime import batch as calls
from fxpar.runtime.graph_modes import GraphFigures, graphs_of
from fxpar.runtime.inputs import Inputs
from fxpar.runtime.outputs import returned
from fxpar.runtime.programs import Programs
from fxpar.runtime.rank_consensus import together
from fxpar.runtime.runner import ForwardBackward, Runner
from fxpar.runtime.stateful import Stateful
from fxpar.runtime.steps import TRANSPORTS
from fxpar.runtime.training import StepFlags, Training, check_norm
from fxpar.runtime.world import World


class ParallelModule(Stateful):
    """One rank's part of a model. Made by `fxpar.parallelize`.

    It and its modules are instances of the author's classes too: `isinstance`, containers, attributes and methods are
    the author's, where this class has none of the name. Methods that look at modules, names, shapes and modes, or treat
    each element by itself, give what they give on the model. What would run a part of it, write what no program would
    see, draw random numbers into weights, or read values that this rank has not, raises an error.

    Parameters are this rank's shards, of the whole's shapes, under the author's names. With a pipeline `parameters()`
    has those of this rank's stages, and one of another stage, `model.norm.weight`, has a shape and no values.

    Programs are compiled on first use for each mode of the modules (training, evaluation), each structure of the batch,
    and sizes for which the model takes other branches; sizes of one, for example a batch of one sample, have programs
    of their own.

    Attributes:
        plan: how the model is split.
        world: the processes.
        saved_names: the keys of the unsplit model's state dict, in order.
        line: the ranks of its pipeline; None without one.
        loading: memory that this rank's weights took while they were put in their places.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        world: World,
        example: Any,
        loss: Callable[[Any, Any], Tensor] | str | None,
        passes: Sequence[Pass],
        checkpoint: Checkpoint | None = None,
        check_inputs: bool = True,
    ) -> None:
        super().__init__(model, plan, world)
        random = self._random
        world.agreement.step = lambda: random.step
        self._takes_lists = isinstance(example, list)
        self._graphs = graphs_of(plan.cuda_graphs, world.device, world.agreement.enter)
        self._mailboxes = TRANSPORTS["copy"](plan, world)
        self._programs = Programs(model, plan, world, loss, passes, self._graphs, self._mailboxes)
        facts = {"option check_inputs": str(check_inputs), **fingerprints(model)}
        self._programs.start(model, calls.canonical(example), facts)
        settings = self._adopt(model, checkpoint)
        self._runner = Runner(self, random, is_graphed=self._graphs.is_on)
        inputs = Inputs(world) if check_inputs and world.size > 1 else None
        self._batches = ForwardBackward(self._programs, self._runner, loss, inputs)
        self._training = Training(
            plan,
            world,
            self._programs.first.program,
            runner=self._runner,
            batches=self._batches,
            random=random,
            graphs=self._graphs,
        )
        self._flags = StepFlags()
        self._seal(settings)

    # ------------------------------------------------------------------ calls

    @property
    def program(self) -> Program:
        """The program of the example's mode and structure."""
        return self._programs.first.program

    @together
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output for a call as the author defined it; sharded tensors come as DTensor.

        Raises:
            InputError: an argument that the model's forward does not take, or a value that no program can.
        """
        self._settings.check()
        call, outputs = self._batches.forward(calls.called_with(self._programs.skeleton, args, kwargs))
        self._mailboxes.mark()
        return returned(call, outputs, self.world)

    @together
    def train_step(
        self,
        batch: Any,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        max_norm: float | None = None,
    ) -> Tensor:
        """Forward and backward of one batch; gradients are added to `.grad`. Returns the loss, detached.

        Args:
            batch: what the model's forward takes. A list of such is the microbatches of one step: their losses are
                averaged (`Plan.loss_reduction` says how), and the ranks' gradients of parameters summed once, behind
                the last.
            scaler: scales the loss that is differentiated (not the one returned), and with it the gradients: call its
                `unscale_`, `step` and `update` as always. float16 gradients need it.
            optimizer: steps too, and the gradients are freed behind it; with `CudaGraphs("full_iteration")` inside of
                the graph, with the learning rates that its groups have at each call. It must be fused and capturable
                then. `step_flags` tells what became of the step.
            max_norm: to which the norm of all gradients is clipped before the optimizer steps.

        Raises:
            InputError: the module is in evaluation mode, gradients are off, the model has no loss, the batch does
                not fit the model, or a scaler is missing or of no use.
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
        self._flags = StepFlags(step.norm, step.is_finite)
        self._mailboxes.mark()
        return step.loss

    @property
    def step_flags(self) -> StepFlags:
        """What became of the last `train_step` with an optimizer: tensors of the device, which nobody waited for."""
        return self._flags

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls inside leave their gradients unsummed; the next call outside sums those of all, once.

        As of `DistributedDataParallel`: `.grad` has them behind that call alone.
        """
        waiting = self._runner.waiting
        before, waiting.holds = waiting.holds, True
        try:
            yield
        finally:
            waiting.holds = before

    def own_rows(self, batch: Any) -> Any:
        """This rank's rows of a batch, or of a list of microbatches, that has those of all data ranks."""
        if type(batch) is list and not self._takes_lists:
            return [self.own_rows(part) for part in batch]
        return calls.own_rows(self.program, batch, self.world.coordinates)

    # ------------------------------------------------------------------ gradients

    @together
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; returns the norm before.

        What `torch.nn.utils.clip_grad_norm_` does, with one collective for all parameters. All ranks must call it.
        """
        check_norm(max_norm)
        self.world.agreement.enter()
        return self._training.clip(max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of `nn.Module`; the modules are not walked, which of a deep model takes longer than a replay."""
        leaves = [leaf for leaf in self._training.leaves.values() if leaf.grad is not None]
        if set_to_none:
            for leaf in leaves:
                leaf.grad = None
        elif leaves:
            torch._foreach_zero_([leaf.grad.detach() for leaf in leaves if leaf.grad is not None])

    @property
    def graph_figures(self) -> GraphFigures | None:
        """How many CUDA graphs there are by now, and what they took; None where the plan has none."""
        return self._graphs.figures

    def close(self) -> None:
        """Frees the CUDA graphs and the memory that ranks copy into; the weights stay.

        Nothing can be replayed or recorded any more, and no step can run that copies.
        Graphs hold the communicators of process groups: call it before `dist.destroy_process_group()`. At the end of a
        process it is called by itself.
        """
        self._graphs.close()
        self._mailboxes.close()

    def report(self, sizes: Mapping[str, int] | None = None, optimizer: str = "adamw") -> Report:
        """Passes, collectives, memory of each rank, and what is not split and why; printed, it is a table.

        Of the program of the example's mode and structure. Counted, not run: nothing communicates. Where ranks hold
        different experts it has the load of the last `train_step` too, for which it waits.

        Args:
            sizes: of the inputs by symbol (`b`, `s`); the example's where they are not given.
            optimizer: adamw, sgd, sgd-momentum or none.

        Raises:
            InputError: an unknown optimizer or symbol, or a size that the ranks cannot share out.
        """
        compiled = self._programs.first
        reach = self._mailboxes.reach
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
            findings=(*compiled.captured.findings, *notes),
            reach=reach,
        )
        load = self._training.load
        return report if load is None else replace(report, loads=load.read(self.plan))
