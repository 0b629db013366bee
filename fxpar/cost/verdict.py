"""The verdict of a report: whether a step fits a machine, and how long it is expected to take.

Enters: the steps of all stages, as they were counted and priced by the plan's constants. Leaves: a `Verdict` with every
part of its seconds, and in words what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fxpar.cost.communication import symbol_sizes, value_bytes
from fxpar.cost.flops import matmul_flops
from fxpar.cost.seconds import StepTimes, access_seconds, materialised
from fxpar.cost.stage_cut_points import in_flight
from fxpar.cost.work import Volume
from fxpar.errors import ScheduleError
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.program import Program
from fxpar.ir.step import ONCE, PARAMETER, is_forward, phase_of
from fxpar.plan.cost import Cost
from fxpar.plan.plan import Plan
from fxpar.text.tables import amount, time_text

# Dense products of 16-bit numbers a second, as the vendors state them, by a part of the GPU's name.
PEAK_FLOPS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "B200": 2250e12}


@dataclass(frozen=True)
class Machine:
    """A rank's GPU.

    Attributes:
        name: as people call it.
        memory: bytes that a process can use of it; None where they are not known.
        flops: the most FLOPs a second of products of 16-bit numbers, as the vendor states them; None likewise.
    """

    name: str
    memory: int | None
    flops: float | None


# Of its 141 GB a process can use so much: what PyTorch says is there.
_H200 = Machine("H200", 139 * 2**30, PEAK_FLOPS["H200"])


def machine_of(cost: Cost, memory: int | None = None) -> Machine:
    """Returns the machine that a plan's constants are of.

    Args:
        memory: bytes of a rank, where the user says them.
    """
    known = (cost.flops, cost.memory, cost.multiprocessors) == (Cost.flops, Cost.memory, Cost.multiprocessors)
    machine = _H200 if known else Machine("machine of the plan's cost", None, None)
    return machine if memory is None else replace(machine, memory=memory)


class PipelineAction(NamedTuple):
    """What a rank of a pipeline runs: stage, phase (F, B, or I and W) and microbatch, from when to when in seconds."""

    stage: int
    phase: str
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class PipelineRun:
    """When the ranks of a pipeline run what, by rank; without what passes once a step."""

    ranks: tuple[tuple[PipelineAction, ...], ...]

    @property
    def seconds(self) -> float:
        """Returns when the last action ends."""
        return max(action.end for actions in self.ranks for action in actions)


# Runs a pipeline whose stages take so many seconds for the forward and for the backward of a microbatch.
RunPipeline = Callable[[Plan, Sequence[tuple[float, float]]], PipelineRun]


@dataclass(frozen=True)
class CountedStep:
    """The step of a stage, or of the whole program, for one microbatch.

    Attributes:
        program: with property `local` and without calls of regions.
        times: of its products and collectives.
        stored: seconds in which the values that are stored are written and read, forward and backward.
        live: of each operation in order its phase, and the most bytes that are alive while it runs, as of `Measured`.
    """

    program: Program
    times: StepTimes
    stored: float
    live: tuple[tuple[str, int], ...]

    @property
    def of_microbatch(self) -> tuple[float, float]:
        """Returns seconds of the forward and of the backward: products, waits for collectives, and stored values."""
        forward, backward = self.times.of_microbatch
        return forward + self.stored / 2, backward + self.stored / 2

    @property
    def once(self) -> float:
        """Returns seconds that pass once a step."""
        return self.times.before + self.times.after


def stored_seconds(program: Program, sizes: Mapping[str, int]) -> float:
    """Returns seconds in which the stored values of a forward are written and read, and their gradients.

    Args:
        program: a forward, or a step, of whose forward they are; local and without calls of regions.
        sizes: of the inputs by symbol.
    """
    owned = program.placeholders()
    weights = weights_of(program.graph, [owned[p.node] for p in program.parameters])
    products = {node for node, _ in matmul_flops(program)}
    values = symbol_sizes(program, sizes)
    stored = (node for node in materialised(program, products, weights) if is_forward(node))
    # Exact, since the nodes come in no order.
    return math.fsum(access_seconds(value_bytes(program, node, values), 1.0, program.plan.cost) for node in stored)


@dataclass(frozen=True)
class Verdict:
    """Whether a step fits, and how long it is expected to take.

    Attributes:
        machine: what a rank is taken for.
        rank: the rank that needs most memory.
        peak: the bytes that it needs.
        microbatches: of the step.
        seconds: of the step; None where `unknown` says why it is not known.
        products: of these, on the rank that ends last: matrix products and attention.
        waits: for collectives that no product hides.
        stored: values that are written and read.
        optimizer: its state, parameters and gradients, which are read and written.
        idle: the bubble of the pipeline.
        unhidden: seconds by which a step is longer without `compile=True`, which waits for each collective at once.
        tokens: of the step, over all data ranks.
        flops: of the author's forward and its backward, likewise; 0 where they are not known.
        ranks: how many compute.
        unknown: why there are no seconds.
    """

    machine: Machine
    rank: int
    peak: int
    microbatches: int
    seconds: float | None
    products: float
    waits: float
    stored: float
    optimizer: float
    idle: float
    unhidden: float
    tokens: int
    flops: float
    ranks: int
    unknown: str = ""

    @property
    def fits(self) -> bool | None:
        """Returns whether the peak is within the machine's memory; None where that is not known."""
        return None if self.machine.memory is None else self.peak <= self.machine.memory

    @property
    def tokens_per_second(self) -> float | None:
        """Returns tokens a second of all ranks."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def rate(self) -> float | None:
        """Returns FLOPs a second of one rank."""
        return self.flops / (self.seconds * self.ranks) if self.seconds and self.flops else None

    @property
    def mfu(self) -> float | None:
        """Returns the part of the machine's FLOPs that are those of the author's model."""
        return self.rate / self.machine.flops if self.rate and self.machine.flops else None


def verdict_of(
    steps: Sequence[CountedStep],
    plan: Plan,
    *,
    peaks: Sequence[int],
    optimizers: Sequence[float],
    volume: Volume,
    machine: Machine,
    run_pipeline: RunPipeline | None = None,
) -> tuple[Verdict, PipelineRun | None]:
    """Returns the verdict, and of a pipeline when its ranks run what.

    Args:
        steps: of all stages in order, or of the whole.
        peaks: bytes of each rank.
        optimizers: of each rank of the pipeline the seconds of its optimizer; of one rank without a pipeline.
        volume: of a microbatch.
        machine: of a rank.
        run_pipeline: runs a pipeline; without it no seconds of one are known.
    """
    count, fullest = plan.microbatches, max(range(len(peaks)), key=peaks.__getitem__)
    known = Verdict(
        *(machine, fullest, peaks[fullest], count, None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        *(volume.tokens * count, volume.flops * count, len(peaks)),
    )
    if len(steps) == 1:
        return _of_stages(known, steps, optimizers[0], sum(steps[0].of_microbatch) * count), None
    if run_pipeline is None:
        return replace(known, unknown="no schedule was run"), None
    try:
        run = run_pipeline(plan, [step.of_microbatch for step in steps])
    except ScheduleError as error:
        return replace(known, unknown=str(error)), None
    ranks = [
        _of_stages(
            known, [steps[stage] for stage in dict.fromkeys(a.stage for a in actions)], optimizer, actions[-1].end
        )
        for actions, optimizer in zip(run.ranks, optimizers, strict=True)
    ]
    return max(ranks, key=lambda verdict: verdict.seconds or 0.0), run


def _of_stages(known: Verdict, stages: Sequence[CountedStep], optimizer: float, seconds: float) -> Verdict:
    """Returns the verdict of a rank that runs these stages, whose last microbatch ends after some seconds."""
    count = known.microbatches
    computed = sum(length for step in stages for _, length in step.times.products.values())
    once = sum(step.once for step in stages)
    # The clock stands still for nothing: what passes besides products is waited for.
    waits = once + count * max(0.0, sum(sum(step.times.of_microbatch) for step in stages) - computed)
    stored = count * sum(step.stored for step in stages)
    total = seconds + once + optimizer
    idle = total - count * computed - waits - stored - optimizer
    return replace(
        known,
        seconds=total,
        products=count * computed,
        waits=waits,
        stored=stored,
        optimizer=optimizer,
        idle=idle if idle > 1e-6 * total else 0.0,
        unhidden=sum(_unhidden(step, count) for step in stages),
    )


def stages_in_flight(plan: Plan, run_pipeline: RunPipeline | None) -> dict[int, tuple[int, int]]:
    """Returns of each stage its rank of the pipeline, and microbatches that it keeps where that rank keeps most.

    Args:
        run_pipeline: runs the plan's schedule; without it figures are those of (interleaved) 1F1B.

    Raises:
        ScheduleError: the schedule does not run.
    """
    if run_pipeline is None:
        ranks = [stage % plan.pp for stage in range(plan.pipeline_stages)]
        flights = [in_flight(plan.pp, plan.virtual_stages, rank) for rank in ranks]
        return {stage: (rank, flights[stage][stage // plan.pp]) for stage, rank in enumerate(ranks)}
    # With one, `train_step` takes lists of any number.
    count = plan.microbatches if plan.microbatches > 1 else 2 * plan.pipeline_stages
    run = run_pipeline(plan.replace(microbatches=count), [(1.0, 2.0)] * plan.pipeline_stages)
    places: dict[int, tuple[int, int]] = {}
    for rank, actions in enumerate(run.ranks):
        now = dict.fromkeys((action.stage for action in actions), 0)
        most = dict(now)
        for action in actions:
            # What the input part of a backward leaves, the weight part reads.
            now[action.stage] += {"F": 1, "I": 0}.get(action.phase, -1)
            if sum(now.values()) > sum(most.values()):
                most = dict(now)
        places |= {stage: (rank, flying) for stage, flying in most.items()}
    return places


def _unhidden(step: CountedStep, count: int) -> float:
    """Returns the seconds of collectives that products hide, in all microbatches."""
    hidden = 0.0
    for travel in step.times.travels:
        once = phase_of(step.program.node(travel.collective.node)) in (ONCE, PARAMETER)
        hidden += (travel.seconds - travel.exposed) * (1 if once else count)
    return hidden


# ---------------------------------------------------------------------- words


def fit_text(verdict: Verdict) -> str:
    """Returns in a sentence whether the step fits."""
    machine, peak = verdict.machine, amount(verdict.peak)
    if machine.memory is None:
        return f"rank {verdict.rank} needs {peak}; the memory of the {machine.name} is not known"
    # Another size than the GPU's is the user's word.
    has = f"the {amount(machine.memory)} of the {machine.name}" if machine == _H200 else amount(machine.memory)
    if verdict.fits:
        return f"fits: rank {verdict.rank} needs {peak} of {has}, {amount(machine.memory - verdict.peak)} are left"
    return f"does not fit: rank {verdict.rank} needs {peak}, {amount(verdict.peak - machine.memory)} more than {has}"


def step_text(verdict: Verdict) -> str:
    """Returns the seconds of a step and their parts, or why they are not known."""
    if verdict.seconds is None:
        return f"not known: {verdict.unknown}"
    parts = {
        "products": verdict.products,
        "waits for collectives": verdict.waits,
        "stored values": verdict.stored,
        "optimizer": verdict.optimizer,
        "the pipeline's idle time": verdict.idle,
    }
    said = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in parts.items() if seconds)
    return f"{time_text(verdict.seconds)} predicted: {said}"


def speed_text(verdict: Verdict) -> str:
    """Returns tokens a second, and the FLOPs of a rank next to the most that its machine has."""
    if verdict.tokens_per_second is None:
        return "not known"
    text = f"{verdict.tokens_per_second:,.0f} tokens/s of {verdict.ranks} rank{'s' if verdict.ranks > 1 else ''}"
    machine = verdict.machine
    if verdict.rate is not None:
        most = "" if machine.flops is None else f" of {machine.flops / 1e12:,.0f}"
        text += f"; {verdict.rate / 1e12:,.1f}{most} TFLOP/s a rank"
    if verdict.mfu is not None:
        text += f", MFU {_share(verdict.mfu)} ({machine.name})"
    return text


def _share(part: float) -> str:
    return f"{part:.1%}" if part >= 0.01 else f"{part:.2g}" if part < 1e-4 else f"{part:.2%}"


def verdict_notes(verdict: Verdict, cost: Cost, *, compiled: bool, wide: bool) -> list[str]:
    """Returns what the seconds rest on, and what they leave out.

    Args:
        compiled: whether the plan compiles.
        wide: whether products are of types with more than 16 bits.
    """
    if verdict.seconds is None:
        return []
    several = f" of {verdict.microbatches} microbatches" if verdict.microbatches > 1 else ""
    notes = [f"Seconds are by the constants of the plan's cost, of a compiled step{several}."]
    if not compiled and verdict.unhidden > 1e-3 * verdict.seconds:
        notes.append(f"Without compile=True no product hides a collective: {time_text(verdict.unhidden)} more.")
    if wide:
        rate = f"{cost.flops / 1e12:,.0f} TFLOP/s"
        notes.append(f"Products are timed at {rate}, a rate of 16-bit types; the model's have more bits.")
    left_out = ["launches of kernels", "element-wise work between stored values", "loading of batches"]
    left_out += ["what crosses the cuts of the pipeline"] if verdict.idle else []
    return [*notes, f"Not counted: {', '.join(left_out)}, uneven loads of experts, the allocator's rounding."]
