"""A training step through the stages of a pipeline: what each rank does of it, in the order of a schedule.

Enters: microbatches that are bound to their programs, and a verified schedule. Leaves: the loss on all ranks, and the
gradients of this rank's parameters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ir.program import Program, tensor_type
from fxpar.ir.stages import Stage, holders, received_name
from fxpar.ir.step import RNG_PATH, buffer_name, is_buffer, is_excess, written
from fxpar.ops.process_group import Group, hold, max_over, sum_over
from fxpar.pipeline.compiler.builtin_schedules import schedule_of
from fxpar.pipeline.compiler.schedules import Action, Phase, Schedule
from fxpar.pipeline.compiler.simulation import Kind, VerifiedSchedule, received, sent
from fxpar.pipeline.runtime.channels import (
    PIPELINE_BUFFERS,
    Channels,
    CopyChannels,
    GroupChannels,
    Shapes,
    WayGroups,
)
from fxpar.pipeline.runtime.evaluation import Evaluation, largest_message, part_of, received_parts
from fxpar.plan.plan import Plan
from fxpar.rewrite.loss_reduction import COUNT
from fxpar.runtime.bound_batch import BoundBatch, Written
from fxpar.runtime.calls import LoweredStep
from fxpar.runtime.expert_loads import check, overflowed
from fxpar.runtime.grad_buffers import MicrobatchSum, Waiting
from fxpar.runtime.microbatches import Microbatch, joined_loss, unit_of, weight
from fxpar.runtime.rank_consensus import is_lost
from fxpar.runtime.sharded import Sharded, local_of
from fxpar.runtime.sharded_ops import norms
from fxpar.runtime.steps import FinishedForward, PeerMemory, Steps
from fxpar.runtime.world import World

# With which the backward of a microbatch ends.
_LAST = (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)


class PipelineExecutor(Evaluation):
    """The stages that a rank holds of a module; a `fxpar.runtime.runner.StageRunner`.

    Args:
        waiting: gradients that are not summed over the ranks yet.
        program: after all passes, of whose parameters several stages hold some.
        peer_memory: through which the ranks of a pipeline copy, where they can.
    """

    def __init__(self, plan: Plan, world: World, waiting: Waiting, program: Program, peer_memory: PeerMemory) -> None:
        self._plan, self._waiting = plan, waiting
        self._orders: dict[int, VerifiedSchedule] = {}
        first = self.order(plan.microbatches).schedule
        line = peer_memory.line(PIPELINE_BUFFERS)
        way = {"name": line} if line else {"groups": WayGroups(world, first)}
        super().__init__(world, first, partial(CopyChannels if line else GroupChannels, world, **way))
        self._side = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._shared = TiedStageParams(
            world, {name: {first.rank_of[s] for s in stages} for name, stages in holders(program).items()}
        )

    def order(self, microbatches: int) -> VerifiedSchedule:
        """Returns the schedule of a step of so many microbatches, with its proof.

        Raises:
            ScheduleError: the plan's has no order for them.
        """
        if microbatches not in self._orders:
            self._orders[microbatches] = schedule_of(self._plan, microbatches)
        return self._orders[microbatches]

    def prepare(self, calls: Sequence[BoundBatch]) -> None:
        """Implements `StageRunner`."""
        for call in {id(call.ready): call for call in calls}.values():
            for stage, steps in call.ready.stages.values():
                if steps is not None:
                    call.ready.graphs.check(_lowered(call, stage, steps).uncaptured)

    @torch.no_grad()
    def step(
        self,
        calls: Sequence[BoundBatch],
        state: Callable[[], Tensor],
        scaler: torch.amp.GradScaler | None,
        new: Written,
        is_recorded: bool,
    ) -> tuple[Tensor, Mapping[str, Tensor], Tensor | None]:
        """Implements `StageRunner`."""
        order = self.order(len(calls))
        schedule = order.schedule
        self._world.agreement.enter()
        channels = self._channels(order, largest_message(calls))
        self._waiting.start()
        run = _PipelineStep(channels, schedule, calls, self._random_state(calls, state), scaler, new, self._waiting)
        actions = schedule.ranks[self._world.place]
        # A later action of a stage replaces the one before it, so that the last of each is left.
        ends = {action.stage: action for action in actions if action.phase in _LAST}.values()
        for position, action in enumerate(actions):
            try:
                channels.at(position)
                run.act(action)
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                raise dist.DistError(f"{_said(action)}: {str(error).splitlines()[0]}") from error
            if self._waiting.is_idle and action in ends:
                self._reduce(run, action.stage)
        loss, factor, has_overflowed = self._loss(run, calls[0])
        channels.finish()
        if self._side is not None:
            torch.cuda.current_stream(self._world.device).wait_stream(self._side)
        if not is_recorded:
            check(has_overflowed)  # all messages have come, and what waits for its sum is as it was
            has_overflowed = None
        gradients = self._finished(run)
        self._share(calls, new)
        return loss, {name: g if factor is None else g * factor for name, g in gradients.items()}, has_overflowed

    def norms(
        self, parameters: Mapping[str, Tensor], order: float, dtype: torch.dtype | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Implements `StageRunner`."""
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        counted = {name: g for name, g in gradients.items() if name in self._shared.counted and g.numel()}
        local_norms = norms([g if isinstance(g, Sharded) else local_of(g) for g in counted.values()], order, dtype)
        single = dict(zip(counted, local_norms, strict=True))
        # In float64: the square of a norm that float32 holds may be beyond it.
        wide = torch.stack([norm.double() for norm in local_norms]) if local_norms else None
        nothing = torch.zeros((), dtype=torch.float64, device=self._world.device)
        kind = dtype or next(iter(gradients.values() or parameters.values()), nothing).dtype
        group = self._world.groups["pp"]
        if math.isinf(order):
            largest = max_over(nothing if wide is None else wide.amax(), group)
            # A maximum over ranks need not keep NaN, and a sum does.
            lost = sum_over(nothing if wide is None else wide.isnan().any().double(), group) > 0
            return largest.masked_fill(lost, math.nan).to(kind), single
        powers = sum_over(nothing if wide is None else wide.pow(order).sum(), group)
        return powers.pow(1 / order).to(kind), single

    def join(self, scaler: torch.amp.GradScaler) -> None:
        """Implements `StageRunner`."""
        if not scaler.is_enabled():
            return
        untyped: Any = scaler
        if not isinstance(untyped.__dict__.get("_unscale_grads_"), _Joined):
            untyped._unscale_grads_ = _Joined(scaler, self._world)
        # The last stage alone scales a loss, and a scaler has no scale before it has scaled something.
        scaler.scale(torch.ones((), device=self._world.device))

    def _random_state(self, calls: Sequence[BoundBatch], state: Callable[[], Tensor]) -> Tensor | None:
        draws = any(call.compiled.random_inputs for call in calls)
        # As without a pipeline: several microbatches are a step that is counted, whatever they draw.
        return state() if draws or len(calls) > 1 else None

    def _reduce(self, run: _PipelineStep, stage: int) -> None:
        """Sums the gradients of a stage over data ranks, alongside what other stages have yet to compute."""
        if self._side is None:
            run.gradients[stage] = run.last[stage].parameter(run.total[stage])
            return
        main = torch.cuda.current_stream(self._world.device)
        # The side stream reads gradients that the main one has queued but maybe not computed.
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            gradients = run.last[stage].parameter(run.total[stage])
        # Without record_stream memory of the side stream is given away as soon as Python
        # drops it, while the main stream may still read it.
        for value in gradients.values():
            value.record_stream(main)
        run.gradients[stage] = gradients

    def _finished(self, run: _PipelineStep) -> dict[str, Tensor]:
        """Returns the gradients of what the microbatches have left: summed over data ranks, then over stages."""
        call = run.calls[0]
        trained = {fqn for stage, _ in call.ready.stages.values() for fqn in stage.trained if fqn in call.leaves}

        def zeros(fqn: str) -> Tensor:
            node = next(p.node for p in call.compiled.program.parameters if p.fqn == fqn)
            return torch.zeros_like(call.values[node], dtype=call.leaves[fqn].dtype)

        totals = {f"{stage} {name}": value for stage, total in run.total.items() for name, value in total.items()}
        signature: Hashable = tuple((stage, pending.step.signature) for stage, pending in run.last.items())

        def finish(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            gradients: dict[str, Tensor] = {}
            for stage, pending in sorted(run.last.items()):
                local = {name: values[f"{stage} {name}"] for name in run.total[stage]}
                reduced = run.gradients[stage] if stage in run.gradients else pending.parameter(local)
                for fqn, gradient in reduced.items():
                    gradients[fqn] = gradients[fqn] + gradient if fqn in gradients else gradient
            return self._shared.summed(gradients, trained, zeros)

        return dict(self._waiting.finished(totals, signature, finish))

    def _share(self, calls: Sequence[BoundBatch], new: Written) -> None:
        """Gives all ranks of the pipeline the new values of buffers; all have the same programs."""
        like: dict[str, Tensor] = {}
        maker: dict[str, int] = {}
        rank_of = self.order(len(calls)).schedule.rank_of
        for call in calls:
            nodes = written(call.compiled.program)
            for number, (stage, _) in call.ready.stages.items():
                maker |= {fqn: rank_of[number] for fqn in nodes if buffer_name(fqn) in stage.program.outputs}
            like |= {fqn: call.values[node] for fqn, node in nodes.items()}
        new.share(self._world, maker, like)

    def _loss(self, run: _PipelineStep, call: BoundBatch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the loss of the step on all ranks. No rank has it before all have received all that was sent to them.

        Returns:
            The loss; where gradients were weighed by counts, what they are multiplied by; and where experts have fewer
            places than rows may need, whether rows had none on any rank, a bool scalar.
        """
        kind = tensor_type(call.compiled.program.output_nodes()[call.loss])
        is_counted = COUNT in call.compiled.program.outputs
        # One sum for all of them: the ranks of a pipeline meet once at the end of a step.
        totals = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        holder = run.schedule.rank_of[-1]
        if self._world.place == holder:
            losses = [run.losses[i] for i in range(len(run.calls))]
            if is_counted and len(run.calls) > 1:
                counts = torch.stack([run.counts[i] for i in range(len(run.calls))])
                totals[0] = (torch.stack(losses) * counts).sum() / counts.sum()
                assert run.unit is not None
                totals[1] = unit_of(run.unit) / counts.sum()
            else:
                totals[0] = joined_loss(losses, call.adds)
        of_stages = overflowed(run.rows, self._world, self._plan)
        if of_stages is not None:
            totals[2] = of_stages
        loss, factor, overflows = sum_over(totals, self._world.groups["pp"])
        has_budget = any(map(is_excess, call.compiled.program.outputs))
        return (
            loss.to(kind.dtype),
            factor if is_counted and len(run.calls) > 1 else None,
            overflows > 0 if has_budget else None,
        )


def _said(action: Action) -> str:
    what = {Phase.FORWARD: "the forward", Phase.BACKWARD_WEIGHT: "the weights' backward"}.get(
        action.phase, "the backward"
    )
    return f"{what} of microbatch {action.microbatch} on stage {action.stage}"


class _PipelineStep:
    """One step of a pipeline on one rank.

    Args:
        state: random state, i64[3]; None where nothing draws.
        waiting: adds up what microbatches leave.

    Attributes:
        losses: of the microbatches so far, on the last stage.
        counts: what counted in them, where microbatches are weighed by that.
        total: what this rank has of the gradients, by stage and name of the value.
        last: of each stage the step that ran last.
        gradients: of the stages whose microbatches have all run, by stage and name of the parameter.
        unit: what counted in the microbatch whose loss was there first.
        rows: of each forward so far, for how many rows of experts there was no place, by name of the output.
    """

    def __init__(
        self,
        channels: Channels,
        schedule: Schedule,
        calls: Sequence[BoundBatch],
        state: Tensor | None,
        scaler: torch.amp.GradScaler | None,
        new: Written,
        waiting: Waiting,
    ) -> None:
        self._channels, self.schedule, self.calls, self._waiting = channels, schedule, calls, waiting
        self._new, self._state, self._scaler = new, state, scaler
        self.losses: dict[int, Tensor] = {}
        self.counts: dict[int, Tensor] = {}
        self.total: dict[int, dict[str, Tensor]] = {}
        self.last: dict[int, FinishedForward] = {}
        self.gradients: dict[int, Mapping[str, Tensor]] = {}
        self.unit: Tensor | None = None
        self.rows: list[dict[str, Tensor]] = []
        self._flying: dict[tuple[int, int], FinishedForward] = {}
        # What stays on this rank: by kind, sending stage and microbatch.
        self._kept: dict[tuple[Kind, int, int], list[Tensor]] = {}

    def act(self, action: Action) -> None:
        """Runs an action of the schedule."""
        if action.phase is Phase.FORWARD:
            self._forward(action)
        if action.phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT):
            self._input_backward(action)
        if action.phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT):
            pending = self._flying.pop((action.stage, action.microbatch))
            self._add(action, pending, pending.weight_backward(self._sum(action, pending.step)))

    def _sum(self, action: Action, step: LoweredStep) -> MicrobatchSum:
        """Returns where what the microbatches of a stage leave is added up."""
        return self._waiting.sum_of((action.stage, step.signature))

    def _stage(self, action: Action) -> tuple[Stage, Steps]:
        stage, steps = self.calls[action.microbatch].ready.stages[action.stage]
        assert steps is not None, "a rank runs its own stages alone"
        return stage, steps

    def _take(self, action: Action, kind: Kind, sender: int, shapes: Shapes) -> list[Tensor]:
        message = received(self.schedule, action)
        if message is None:
            return self._kept.pop((kind, sender, action.microbatch))
        return self._channels.receive(message, shapes)

    def _give(self, action: Action, kind: Kind, values: list[Tensor]) -> None:
        message = sent(self.schedule, action)
        if message is None:
            self._kept[kind, action.stage, action.microbatch] = values
        else:
            self._channels.send(message, values)

    def _forward(self, action: Action) -> None:
        stage, steps = self._stage(action)
        call = self.calls[action.microbatch]
        values = self._sources(action, stage, steps)
        if stage.number:
            taken = self._take(action, Kind.ACTIVATION, stage.number - 1, received_parts(stage, call.sizes))
            values |= dict(zip(stage.received.values(), taken, strict=True))
        step = _lowered(call, stage, steps)
        places = self._sum(action, step)
        pending = steps.run(call.sizes, step, values, whole=False, gradients=places, rows=call.rows)
        if call.loss in stage.program.outputs:
            self.losses[action.microbatch] = pending.outputs[call.loss]
            if COUNT in stage.program.outputs:
                self.counts[action.microbatch] = pending.outputs[COUNT]
        if action.stage + 1 < self.schedule.stages:
            self._give(action, Kind.ACTIVATION, [pending.outputs[name] for name in stage.sent])
        self._new.add(pending.outputs)
        self.rows.append({name: value for name, value in pending.outputs.items() if is_excess(name)})
        pending.release(stage.sent)
        self._flying[action.stage, action.microbatch] = pending

    def _sources(self, action: Action, stage: Stage, steps: Steps) -> dict[str, Any]:
        """Returns what a stage takes besides what it receives."""
        call = self._new.read(self.calls[action.microbatch])
        sources: dict[str, Any] = {}
        for entry in stage.program.inputs:
            if entry.path == RNG_PATH:
                assert self._state is not None
                sources[entry.node] = Microbatch(action.microbatch, len(self.calls), self._state).random_state
            elif not received_name(entry.path):
                sources[entry.node] = call.values[entry.node]
        # Of the values, not of the call: a graph reads what it copies these into.
        sources |= {name: call.values[name] for name in steps.lowered.places}
        sources |= {name: call.values[name] for name in steps.gathered}
        sources |= {p.node: call.values[p.node] for p in stage.program.parameters}
        return sources

    def _input_backward(self, action: Action) -> None:
        stage, _ = self._stage(action)
        call, pending = self.calls[action.microbatch], self._flying[action.stage, action.microbatch]
        tangents: dict[str, Tensor] = {}
        names = [name for name in stage.tangents if name in stage.sent]
        # Messages without a part travel too, as where all before a stage is frozen: receipts follow from them.
        if action.stage + 1 < self.schedule.stages:
            nodes = stage.program.output_nodes()
            shapes = [part_of(stage.program, nodes[name].name, call.sizes) for name in names]
            tangents |= dict(zip(names, self._take(action, Kind.GRADIENT, stage.number + 1, shapes), strict=True))
        if call.loss in stage.tangents:
            tangents[call.loss] = self._share(action.microbatch, pending.outputs[call.loss])
        gradients = pending.input_backward(tangents, self._sum(action, pending.step))
        if stage.number:
            self._give(action, Kind.GRADIENT, [gradients[name] for name in stage.returned.values()])

    def _share(self, microbatch: int, loss: Tensor) -> Tensor:
        """Returns the gradient of a microbatch's loss, of that of the step."""
        counted = self.counts.get(microbatch)
        count, adds = len(self.calls), self.calls[microbatch].adds
        share = torch.ones_like(loss)
        if count > 1:
            assert self._state is not None
            share = share * weight(counted, Microbatch(microbatch, count, self._state, self.unit, adds))
            self.unit = counted if self.unit is None else self.unit
        return share if self._scaler is None else self._scaler.scale(share)

    def _add(self, action: Action, pending: FinishedForward, gradients: Mapping[str, Tensor]) -> None:
        before = self.last.get(action.stage)
        if before is not None and before.step.signature != pending.step.signature:
            raise InputError(
                "leaves other gradients than another",
                where=f"microbatch {action.microbatch}",
                remedy="pass microbatches of one structure and kind of sizes",
            )
        local = {name: gradients[name] for name in pending.step.unfinished}
        self.total[action.stage] = self._sum(action, pending.step).add(local)
        self.last[action.stage] = pending


def _lowered(call: BoundBatch, stage: Stage, steps: Steps) -> LoweredStep:
    """Returns the step of a stage."""
    leaves = frozenset(call.leaves) & {p.fqn for p in stage.program.parameters}
    more = [n for n in stage.program.outputs if n in (call.loss, COUNT) or is_buffer(n) or is_excess(n)]
    return steps.step(stage.tangents, leaves, (*stage.sent, *more))


# Loss scaling over the stages of a pipeline.


class _Joined:
    """In place of a scaler's `_unscale_grads_`, which torch's own sharded scaler overrides for the same reason.

    Gradients cannot say it by themselves, as parts of cut ones do: an optimizer may have none on some stage.
    """

    def __init__(self, scaler: torch.amp.GradScaler, world: World) -> None:
        self._scaler, self._world = weakref.ref(scaler), world

    def __call__(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[Any, Tensor]:
        scaler: Any = self._scaler()
        local = type(scaler)._unscale_grads_(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        total = torch.zeros((), dtype=torch.float32, device=self._world.device)
        for value in local.values():
            total = total.maximum(value.to(total.device))
        return {total.device: max_over(total, self._world.groups["pp"])}


# Parameters that several stages of a pipeline hold: one value, whose gradients are summed.


class TiedStageParams:
    """The groups of ranks that hold parameters together. Making one is a collective call.

    Args:
        ranks: by name of the parameter, places in the pipeline.

    Attributes:
        counted: names of the parameters that count on this rank where each is to count once: those of which it is the
            first to hold them.
    """

    def __init__(self, world: World, ranks: Mapping[str, Collection[int]]) -> None:
        lines = world.mesh.groups("pp")
        place = world.mesh.coordinates(world.rank)["pp"]
        self.counted = frozenset(name for name, holders in ranks.items() if min(holders) == place)
        self._groups: dict[str, Group] = {}
        several = sorted({tuple(sorted(holders)) for holders in ranks.values() if len(holders) > 1})
        for places in several:
            timeout = timedelta(seconds=world.agreement.seconds)
            members = [[line[i] for i in places] for line in lines]
            with world.agreement.alarm.opening():
                subgroup, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
            if subgroup is not None:
                group = Group(subgroup.group_name, subgroup.size())
                hold(self, [group])
                self._groups |= {name: group for name, holders in ranks.items() if tuple(sorted(holders)) == places}

    def summed(
        self, gradients: Mapping[str, Tensor], trained: Collection[str], zeros: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Returns gradients of this rank's parameters, of which those that others hold too are summed. A collective
        call.

        Args:
            trained: names of the parameters to which some stage gives a gradient, the same on all ranks.
            zeros: a gradient of a parameter to which no stage of this rank gives one.
        """
        summed = dict(gradients)
        # Sorted, as all members must sum in one order: NCCL matches collectives by their order and nothing else.
        for name in sorted(self._groups):
            if name in trained:
                # Of one order in memory on all ranks: that of a transposed use is transposed.
                local = summed[name] if name in summed else zeros(name)
                summed[name] = sum_over(local, self._groups[name])
        return summed
