"""What the stages of a pipeline have each: modules, FLOPs, parameters, and what it receives.

Enters: a program that was cut into stages, and sizes. Leaves: a `StageShare` for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxpar.analysis.communication import symbol_sizes
from fxpar.analysis.flops import matmul_flops
from fxpar.analysis.parameter_memory import held_bytes, local_elements
from fxpar.analysis.stage_cut_points import divisible
from fxpar.ir.program import Program, note
from fxpar.ir.stages import crossings, holders, is_transfer, stage_of
from fxpar.layout.symbolic_sizes import evaluate


@dataclass(frozen=True)
class Received:
    """A value that a stage receives: its name, what it is on one device, its bytes on a rank, of a microbatch.

    Attributes:
        returns: whether its gradient, of as many bytes, goes back.
    """

    value: str
    type: str
    bytes: int
    returns: bool


@dataclass(frozen=True)
class StageShare:
    """What one stage has of the model.

    Attributes:
        stage: its number; it lies on rank `stage` modulo the size of the pipeline.
        first: the module that it begins with.
        last: the module that it ends with.
        flops: of its matrix products in a forward, of all ranks that hold the stage together.
        share: these as a part of all stages'.
        elements: of the parameters that a rank of it holds; what two stages hold is counted by both.
        bytes: of these.
        received: in the order in which it is sent.
    """

    stage: int
    first: str
    last: str
    flops: int
    share: float
    elements: int
    bytes: int
    received: tuple[Received, ...]


def stage_shares(program: Program, sizes: Mapping[str, int] | None = None) -> tuple[StageShare, ...]:
    """The shares of all stages.

    Args:
        program: after `partition_stages`.
        sizes: of the inputs by symbol; the example's where they are not given.
    """
    values = symbol_sizes(program, sizes)
    count = program.plan.pipeline_stages
    flops = [0] * count
    for node, formula in matmul_flops(program):
        flops[stage_of(node)] += int(evaluate(formula, values))
    forward = divisible(program)
    modules: list[list[str]] = [[] for _ in range(count)]
    for node in forward.order:
        if note(node).fqn and not is_transfer(node):
            modules[stage_of(node)].append(note(node).fqn)
    stages_of = holders(program)
    total = sum(flops)
    entering = crossings(program)
    shares = []
    for stage in range(count):
        owned = [p for p in program.parameters if p.kind == "parameter" and stage in stages_of[p.fqn]]
        received = tuple(
            Received(c.source.name, str(c.type), forward.bytes_of(c.node, values), c.carries)
            for c in entering
            if c.receiver == stage
        )
        names = modules[stage] or [""]
        elements, size = sum(local_elements(program, p) for p in owned), sum(held_bytes(program, p) for p in owned)
        part = flops[stage] / total if total else 0.0
        shares.append(StageShare(stage, names[0], names[-1], flops[stage], part, elements, size, received))
    return tuple(shares)


def unevenness(shares: Sequence[StageShare]) -> float:
    """The most FLOPs of a stage over the mean; 1 where there are none."""
    flops = [share.flops for share in shares]
    return max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0


def in_flight(ranks: int, virtual: int, rank: int) -> tuple[int, ...]:
    """Microbatches of each of a rank's stages whose activations it keeps at the peak of (interleaved) 1F1B.

    That is behind its warmup and one forward more (SPEC section 3), of microbatches in groups of `ranks`, where there
    are at least as many as that.

    Args:
        rank: of the pipeline.
    """
    if virtual == 1:
        return (ranks - rank,)
    first = 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
    counts = [0] * virtual
    for i in range(first):
        counts[i // ranks % virtual] += 1
    return tuple(counts)
