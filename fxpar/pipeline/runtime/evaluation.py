"""A forward alone through the stages of a pipeline.

Enters: a call that is bound to its program. Leaves: the model's outputs on all ranks of the pipeline, each rank its
part where they are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ir.program import Program, TensorType, note, output_layouts
from fxpar.ir.stages import Stage, received_name
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.process_group import sum_over
from fxpar.pipeline.compiler.builtin_schedules import evaluation_of
from fxpar.pipeline.compiler.schedules import Schedule
from fxpar.pipeline.compiler.simulation import Kind, Message, VerifiedSchedule
from fxpar.pipeline.runtime.channels import Channels, padded
from fxpar.runtime.bound_batch import BoundBatch
from fxpar.runtime.rank_consensus import is_lost
from fxpar.runtime.world import World

# Makes the channels of a step: of its order, and the bytes of its largest message.
OpenChannels = Callable[[VerifiedSchedule, int], Channels]


class Evaluation:
    """Runs the stages of a module one after the other.

    Args:
        schedule: which stages a rank has.
        channels: opens those between the ranks.
    """

    def __init__(self, world: World, schedule: Schedule, channels: OpenChannels) -> None:
        self._world, self._channels = world, channels
        self._evaluation = evaluation_of(schedule)
        self._rank_of = schedule.rank_of

    def check(self, call: BoundBatch, requested: Sequence[str]) -> None:
        """Implements `fxpar.runtime.runner.StageRunner`."""
        for stage, steps in call.ready.stages.values():
            # Where graphs are of stages, what none can hold stands between them in a forward alone.
            if steps is not None and call.ready.graphs.holds_steps:
                call.ready.graphs.check(steps.uncaptured(_names(stage, requested)))
        if not torch.is_grad_enabled() or not call.ready.differentiable:
            return
        has_leaves = int(bool(call.leaves))
        met = self._world.agreement.meet("asks who trains", [has_leaves])
        if has_leaves if met is None else met.largest[0]:
            raise InputError(
                "a plain call is not differentiated through the stages of a pipeline",
                where="forward",
                remedy="train with train_step(batch), or call it under torch.no_grad()",
            )

    @torch.no_grad()
    def outputs(
        self,
        call: BoundBatch,
        requested: Sequence[str],
        state: Callable[[], Tensor],
    ) -> dict[str, Tensor]:
        """Implements `StageRunner`."""
        self._world.agreement.enter()
        inputs = dict(call.values)
        draws = call.compiled.random_inputs
        if draws:
            inputs |= dict.fromkeys(draws, state())
        outputs: dict[str, Tensor] = {}
        channels = self._channels(self._evaluation, largest_message([call]))
        local = [(number, stage) for number, (stage, steps) in sorted(call.ready.stages.items()) if steps is not None]
        for position, (number, stage) in enumerate(local):
            channels.at(position)
            try:
                outputs |= self._stage(channels, call, stage, requested, inputs, outputs)
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                reason = str(error).splitlines()[0]
                raise dist.DistError(f"the forward on stage {number}: {reason}") from error
        # Nobody ends this before all ranks have received what was sent to them.
        sum_over(torch.zeros(1, device=self._world.device), self._world.groups["pp"])
        channels.finish()
        return {name: self._everywhere(call, name, outputs.get(name)) for name in requested}

    def _stage(
        self,
        channels: Channels,
        call: BoundBatch,
        stage: Stage,
        requested: Sequence[str],
        values: Mapping[str, Any],
        before: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Returns what a stage gives, after it has sent the next one its part."""
        _, steps = call.ready.stages[stage.number]
        assert steps is not None, "a rank runs its own stages alone"
        inputs = {p.node: values[p.node] for p in stage.program.parameters}
        inputs |= {e.node: values[e.node] for e in stage.program.inputs if not received_name(e.path)}
        inputs |= {name: values[name] for name in steps.lowered.places}
        if stage.number:
            inputs |= dict(zip(stage.received.values(), self._taken(channels, call, stage, before), strict=True))
        outputs = steps.outputs(call.sizes, _names(stage, requested), inputs, call.rows)
        last = len(self._rank_of) - 1
        if stage.number < last and self._rank_of[stage.number + 1] != self._world.place:
            message = Message(Kind.ACTIVATION, stage.number, stage.number + 1, 0)
            channels.send(message, [outputs.pop(name) for name in stage.sent])
        return outputs

    def _taken(self, channels: Channels, call: BoundBatch, stage: Stage, before: Mapping[str, Tensor]) -> list[Tensor]:
        if self._rank_of[stage.number - 1] == self._world.place:
            return [before[name] for name in stage.received]
        message = Message(Kind.ACTIVATION, stage.number - 1, stage.number, 0)
        return channels.receive(message, received_parts(stage, call.sizes))

    def _everywhere(self, call: BoundBatch, name: str, value: Tensor | None) -> Tensor:
        """Returns an output on all ranks of the pipeline, from the one whose stage computes it."""
        stages = call.ready.stages.values()
        maker = self._rank_of[next(stage.number for stage, _ in stages if name in stage.program.outputs)]
        program = call.ready.program
        shape, dtype = part_of(program, program.output_nodes()[name].name, call.sizes)
        if maker == self._world.place:
            assert value is not None, "a stage gives the outputs that it computes"
            output = value.contiguous()
        else:
            output = torch.empty(shape, dtype=dtype, device=self._world.device)
        self._world.broadcast(output, maker)
        return output


def _names(stage: Stage, requested: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of what a stage gives."""
    return *(name for name in requested if name in stage.program.outputs), *stage.sent


def part_of(program: Program, name: str, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns what a rank has of a value: shape and type."""
    node = program.node(name)
    kind = note(node).type
    assert isinstance(kind, TensorType)
    (layout,) = output_layouts(node)
    return tuple(int(evaluate(size, sizes)) for size in local_shape(kind.shape, layout, program.axes)), kind.dtype


def largest_message(calls: Sequence[BoundBatch]) -> int:
    """Returns the bytes of the largest message of some microbatches, as channels pad it: the same on all ranks."""
    # A gradient has the parts of the activation, or some of them.
    different = {(id(call.ready), tuple(call.sizes.values())): call for call in calls}.values()
    return max(
        (
            sum(padded(math.prod(shape) * dtype.itemsize) for shape, dtype in received_parts(stage, call.sizes))
            for call in different
            for stage, _ in call.ready.stages.values()
        ),
        default=0,
    )


def received_parts(stage: Stage, sizes: Mapping[str, int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns shapes and types of what a stage receives of the one before it."""
    return [part_of(stage.program, node, sizes) for node in stage.received.values()]
