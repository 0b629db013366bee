"""A forward alone through the stages of a pipeline.

Enters: a call that is bound to its program. Leaves: the model's outputs on all ranks of the pipeline, each rank its
part where they are cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ir.program import Program, TensorType, note, output_layouts
from fxpar.ir.stages import Stage, received_name
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.mesh_process_groups import hold, process_group, refuse_group
from fxpar.ops.process_group import Group
from fxpar.pipeline.compiler.schedules import Schedule
from fxpar.pipeline.compiler.simulation import Kind, Message
from fxpar.runtime.bound_batch import BoundBatch
from fxpar.runtime.rank_consensus import is_lost
from fxpar.runtime.world import World


class Evaluation:
    """Runs the stages of a module one after the other.

    Args:
        rank_of: of each stage its place in the pipeline.
        channels: between the ranks.
    """

    def __init__(self, world: World, rank_of: Sequence[int], channels: Channels) -> None:
        self._world, self._rank_of, self._channels = world, tuple(rank_of), channels

    def check(self, call: BoundBatch, has_leaves: bool) -> None:
        """Implements `fxpar.runtime.runner.StageRunner`."""
        if not torch.is_grad_enabled() or not call.ready.differentiable:
            return
        met = self._world.agreement.meet("asks who trains", [int(has_leaves)])
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
        for number, (stage, steps) in sorted(call.ready.stages.items()):
            if steps is None:
                continue
            try:
                outputs |= self._stage(call, stage, requested, inputs, outputs)
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                reason = str(error).splitlines()[0]
                raise dist.DistError(f"the forward on stage {number}: {reason}") from error
        self._channels.finish()
        return {name: self._everywhere(call, name, outputs.get(name)) for name in requested}

    def _stage(
        self,
        call: BoundBatch,
        stage: Stage,
        requested: Sequence[str],
        values: Mapping[str, Any],
        before: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Returns what a stage gives, after it has sent the next one its part."""
        _, steps = call.ready.stages[stage.number]
        assert steps is not None, "a rank runs its own stages alone"
        places = dict(zip(call.ready.lowered.places, call.places, strict=True))
        inputs = {p.node: values[p.node] for p in stage.program.parameters}
        inputs |= {e.node: values[e.node] for e in stage.program.inputs if not received_name(e.path)}
        inputs |= {name: places[name] for name in steps.lowered.places}
        if stage.received:
            inputs |= dict(zip(stage.received.values(), self._taken(call, stage, before), strict=True))
        names = (*(name for name in requested if name in stage.program.outputs), *stage.sent)
        outputs = steps.outputs(call.sizes, names, inputs, call.rows)
        if stage.sent and self._rank_of[stage.number + 1] != self._world.place:
            message = Message(Kind.ACTIVATION, stage.number, stage.number + 1, 0)
            self._channels.send(message, [outputs.pop(name) for name in stage.sent])
        return outputs

    def _taken(self, call: BoundBatch, stage: Stage, before: Mapping[str, Tensor]) -> list[Tensor]:
        if self._rank_of[stage.number - 1] == self._world.place:
            return [before[name] for name in stage.received]
        shapes = [part_of(stage.program, node, call.sizes) for node in stage.received.values()]
        return self._channels.receive(Message(Kind.ACTIVATION, stage.number - 1, stage.number, 0), shapes)

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


def part_of(program: Program, name: str, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns what a rank has of a value: shape and type."""
    node = program.node(name)
    kind = note(node).type
    assert isinstance(kind, TensorType)
    (layout,) = output_layouts(node)
    return tuple(int(evaluate(size, sizes)) for size in local_shape(kind.shape, layout, program.axes)), kind.dtype


# How the ranks of a pipeline send each other what crosses a cut.


# Of the ranks of a pipeline, whether the sender stands before the receiver.
_Way = tuple[Kind, bool]


class Channels:
    """The process groups of one module's pipeline. Making one is a collective call.

    Args:
        schedule: whose messages travel; others of the same stages have no further channels.
    """

    def __init__(self, world: World, schedule: Schedule) -> None:
        lines = world.mesh.groups("pp")
        self._line = world.line
        self._schedule = schedule
        self._groups: dict[_Way, Group] = {}
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._device = world.device
        # Activations and gradients have groups of their own. NCCL knows no tags, and with two ranks and virtual stages
        # both kinds travel between the same pair in other orders.
        for way in _ways(schedule):
            timeout = timedelta(seconds=world.agreement.seconds)
            with world.agreement.alarm.opening():
                subgroup, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], timeout=timeout)
            assert subgroup is not None
            self._groups[way] = Group(subgroup.group_name, subgroup.size())
            hold(self, [self._groups[way]])
            world.agreement.alarm.on_failure(partial(refuse_group, self._groups[way]))
            self._meet(world.place, way)

    def _meet(self, place: int, way: _Way) -> None:
        """Sends a word between all ranks of a way, pair by pair.

        NCCL makes a communicator when two ranks first send each other something, and both wait for that: in the middle
        of a schedule they might wait in a circle.
        """
        word, group = torch.zeros(1, device=self._device), process_group(self._groups[way])
        for sender, receiver in _pairs(self._schedule, way):
            work = dist.isend(word, self._line[receiver], group) if place == sender else None
            work = dist.irecv(word, self._line[sender], group) if place == receiver else work
            if work is not None:
                work.wait()

    def send(self, message: Message, values: Sequence[Tensor]) -> None:
        """Sends the parts of a message; they may not be written to until they are there."""
        if not values:
            return
        receiver = self._schedule.rank_of[message.receiver]
        group = process_group(self._groups[self._way(message)])
        for value in values:
            dense = value.contiguous()
            work = dist.isend(dense, self._line[receiver], group)
            assert work is not None
            self._sends.append((work, dense))
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()

    def receive(self, message: Message, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """Returns the parts of a message, of these shapes and types. On a GPU the stream waits for them, not the
        host."""
        if not shapes:
            return []
        sender = self._schedule.rank_of[message.sender]
        group = process_group(self._groups[self._way(message)])
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        works = [dist.irecv(value, self._line[sender], group) for value in tensors]
        for work in works:
            assert work is not None
            work.wait()
        return tensors

    def finish(self) -> None:
        """Waits until all that was sent is there."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _way(self, message: Message) -> _Way:
        rank_of = self._schedule.rank_of
        return message.kind, rank_of[message.sender] < rank_of[message.receiver]


def _pairs(schedule: Schedule, way: _Way) -> list[tuple[int, int]]:
    """Returns the ranks of a pipeline that send each other messages of a kind in a direction, senders first."""
    kind, is_up = way
    neighbours = ((a, b) if kind is Kind.ACTIVATION else (b, a) for a, b in pairwise(schedule.rank_of) if a != b)
    return sorted({(sender, receiver) for sender, receiver in neighbours if (sender < receiver) == is_up})


def _ways(schedule: Schedule) -> list[_Way]:
    """Returns the kinds and directions of the messages between neighbours, in one order on all ranks."""
    pairs = [(a, b) for a, b in pairwise(schedule.rank_of) if a != b]
    return sorted({(Kind.ACTIVATION, a < b) for a, b in pairs} | {(Kind.GRADIENT, b < a) for a, b in pairs})
