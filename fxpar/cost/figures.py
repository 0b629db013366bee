"""The figures of a report.

Enters: numbers. Leaves: frozen records that print as tables and turn into plain mappings. Bytes are those of one rank
unless said otherwise; formulas are in the sizes of the inputs (`b`, `s`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group

from fxpar.cost.load_balance import ExpertLoad
from fxpar.cost.stage_cut_points import Received


@dataclass(frozen=True)
class PassLine:
    """A pass that ran: wall time, and how many nodes it added, erased and changed."""

    name: str
    seconds: float
    added: int
    erased: int
    changed: int


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a training step.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter or all_to_all.
        axis: mesh axis.
        phase: forward, backward, parameter (value or gradient of what parameters alone make), or recompute (forward
            ones of checkpointed regions, which run again in the backward).
        count: how many.
        bytes: of the whole values (what an all-gather yields, a reduction takes in), all together.
        formula: the same in closed form.
        copied: how many of them are copies between the ranks' memories.
        one_shot: how many of these are one kernel, as nothing is computed beside them, or as it picks the rows.
        reasons: why the others go through the process group.
        needed: bytes of the copied ones that are expected to travel, where these are tokens for ranks that need them
            alone; 0 where nothing is picked.
    """

    op: str
    axis: str
    phase: str
    count: int
    bytes: int
    formula: str
    copied: int = 0
    one_shot: int = 0
    reasons: tuple[str, ...] = ()
    needed: int = 0


@dataclass(frozen=True)
class ModelSize:
    """Parameters of the model as its author wrote it, and of a rank. Tied ones count once.

    Attributes:
        elements: of the model.
        bytes: of the model.
        rank_elements: what a rank holds, padding included.
        split_flops: share of the matrix FLOPs that the ranks divide among them.
    """

    elements: int
    bytes: int
    rank_elements: int
    split_flops: float


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank in a training step.

    Attributes:
        rank: its number.
        parameters: all that it holds.
        whole: of these, what every rank holds.
        shared: of these, blocks that a neighbour holds too (key and value heads that are fewer than the ranks).
        padding: of these, elements that are none of the model's.
        copies: of parameters in the program's type, where those are main values in float32 (mixed precision).
        buffers: buffers and constants.
        gradients: after the backward.
        optimizer: its state.
        activations: what autograd keeps between forward and backward.
        peak: the most that is alive at one time in forward and backward, all of the above included as far as it exists
            then.
    """

    rank: int
    parameters: int
    whole: int
    shared: int
    padding: int
    copies: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


@dataclass(frozen=True)
class ModuleMemory:
    """Bytes of a part of the model: a layer, or a module outside of the layers.

    Attributes:
        module: its name, empty for the model itself (its loss).
        parameters: those that it holds.
        gradients: of these.
        optimizer: state for these.
        activations: what autograd keeps that the module was the first to ask for.
        tensors: how many storages that are.
        formula: `activations` in closed form; empty where there is none.
    """

    module: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    tensors: int
    formula: str


@dataclass(frozen=True)
class Moment:
    """When and where: phase (forward, backward, recompute), module (of the forward) and operator, with the bytes."""

    bytes: int
    phase: str
    module: str
    operator: str


@dataclass(frozen=True)
class Whole:
    """A matrix that every rank holds whole: its bytes and the reason."""

    parameter: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class StageLine:
    """A stage of a pipeline: what it has of the model, and bytes of a rank that holds it.

    Attributes:
        stage: its number.
        rank: on which rank of the pipeline it is.
        first: the module with which it begins.
        last: the module with which it ends.
        flops: of its matrix products in the forward of a microbatch.
        share: these as a part of all stages'.
        elements: of its parameters; what two stages hold is counted by both.
        parameters: bytes of these.
        gradients: of these.
        optimizer: state for these.
        activations: what a microbatch keeps for its backward, with what the stage received.
        in_flight: microbatches that keep it at the peak of 1F1B, interleaved where ranks have several stages, where
            there are so many.
        received: what crosses the cut in front of it.
    """

    stage: int
    rank: int
    first: str
    last: str
    flops: int
    share: float
    elements: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    received: tuple[Received, ...]


@dataclass(frozen=True)
class Report:
    """What a split program costs, and what is not split and why. Made by `fxpar.cost.make_report`.

    Memory is that of eager execution, counted on tensors: a compiled program keeps at most as much. What kernels use
    inside and the allocator's rounding come on top.

    Attributes:
        name: of the model.
        plan: as `Plan.to_dict`.
        sizes: of the inputs by symbol.
        optimizer: its kind.
        device: type of the device whose kernels are assumed.
        passes: in order.
        collectives: by operation, axis and phase.
        copied_into: bytes of a rank's memory into which others copy, so far; of a program that does not run, none.
        size: parameters.
        ranks: memory of each rank.
        modules: memory of a rank by part of the model; all ranks' are equal.
        activations: closed form of `RankMemory.activations`; empty where there is none.
        peak: when most of a step is alive; its bytes leave out parameters, buffers, inputs and optimizer state.
        phases: when most is alive in each phase, of which `peak` is the largest.
        largest: the largest tensor of a step that is no parameter, and where it is made.
        inputs: bytes of the batch, which `RankMemory.peak` includes.
        unsplit: matrices that every rank holds whole.
        without_rule: operators that no rule can split.
        remarks: what was checked of the capture, and what else the plan asked for and did not get.
        stages: of a pipeline; empty without one. Then `ranks` counts all microbatches in flight, `peak`, `phases` and
            `largest` are those of one microbatch on the stage whose rank holds most, and all else is of one microbatch
            on all stages.
        loads: of experts in the last step of a module that has taken one; empty where no rank holds other experts than
            another, and through a pipeline.
    """

    name: str
    plan: Mapping[str, Any]
    sizes: Mapping[str, int]
    optimizer: str
    device: str
    passes: tuple[PassLine, ...]
    collectives: tuple[Traffic, ...]
    size: ModelSize
    ranks: tuple[RankMemory, ...]
    modules: tuple[ModuleMemory, ...]
    activations: str
    peak: Moment
    phases: tuple[Moment, ...]
    largest: Moment
    inputs: int
    unsplit: tuple[Whole, ...]
    without_rule: tuple[str, ...]
    remarks: tuple[str, ...]
    stages: tuple[StageLine, ...] = ()
    loads: tuple[ExpertLoad, ...] = ()
    copied_into: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain mappings, lists, numbers and texts."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def __rich__(self) -> Group:
        from fxpar.cost.rich_tables import as_group
        from fxpar.cost.sections import all_sections

        return as_group(all_sections(self))

    def __str__(self) -> str:
        stream = io.StringIO()
        Console(file=stream, markup=False, emoji=False, highlight=False, width=_WIDTH).print(self)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


_WIDTH = 120
