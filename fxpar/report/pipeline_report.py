"""The report of a pipeline from those of its stages.

Enters: a program that was cut into stages, and the figures of each stage's step of one microbatch. Leaves: the figures
of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxpar.analysis.balance import in_flight, stage_shares
from fxpar.ir.program import Program
from fxpar.layout.symbolic_sizes import parse_size, simplify
from fxpar.plan.plan import Plan
from fxpar.report.figures import ModuleMemory, RankMemory, Report, StageLine, Traffic

_SUMMED = ("parameters", "whole", "shared", "padding", "copies", "buffers", "gradients", "optimizer")


def stage_lines(program: Program, reports: Sequence[Report], sizes: Mapping[str, int]) -> tuple[StageLine, ...]:
    """A line for each stage.

    Args:
        reports: the figures of each.
    """
    plan, lines = program.plan, []
    for share, report in zip(stage_shares(program, sizes), reports, strict=True):
        rank, memory = share.stage % plan.pp, report.ranks[0]
        flying = in_flight(plan.pp, plan.virtual_stages, rank)[share.stage // plan.pp]
        received = share.received
        lines.append(
            StageLine(
                share.stage,
                rank,
                share.first,
                share.last,
                share.flops,
                share.share,
                share.elements,
                memory.parameters,
                memory.gradients,
                memory.optimizer,
                memory.activations + sum(crossing.bytes for crossing in received),
                flying,
                received,
            )
        )
    return tuple(lines)


def most_elements(lines: Sequence[StageLine], plan: Plan) -> int:
    """Elements of the parameters of the rank that has most."""
    return max(sum(line.elements for line in lines if line.rank == rank) for rank in range(plan.pp))


def joined(reports: Sequence[Report], lines: Sequence[StageLine], plan: Plan) -> Report:
    """The figures of all stages and ranks.

    Args:
        reports: the figures of each stage.
        lines: of each stage.
    """
    ranks: list[RankMemory] = []
    worst: dict[int, int] = {}
    for rank in range(plan.pp):
        stages = [line.stage for line in lines if line.rank == rank]
        # The stage whose step makes the rank's peak.
        top = max(stages, key=lambda stage: reports[stage].peak.bytes - reports[stage].ranks[0].gradients)
        for place in range(len(reports[0].ranks)):
            ranks.append(_rank(len(ranks), place, stages, top, reports, lines))
        worst[top] = ranks[-1].peak
    fullest = reports[max(worst, key=lambda stage: worst[stage])]
    return replace(
        fullest,
        collectives=_traffic(reports),
        ranks=tuple(ranks),
        modules=_modules(reports),
        activations=_sum([report.activations for report in reports if report.ranks[0].activations]),
        inputs=max(report.inputs for report in reports),
        stages=tuple(lines),
    )


def _rank(
    number: int, place: int, stages: Sequence[int], top: int, reports: Sequence[Report], lines: Sequence[StageLine]
) -> RankMemory:
    """What a rank of the pipeline holds: all its stages, of each the microbatches in flight."""
    parts = [reports[stage].ranks[place] for stage in stages]
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    activations = sum(lines[stage].in_flight * lines[stage].activations for stage in stages)
    step = reports[top].peak.bytes  # with what one microbatch keeps, and the gradients of that stage
    step -= reports[top].ranks[place].activations + reports[top].ranks[place].gradients
    resident = sum(sums[name] for name in ("parameters", "copies", "buffers", "gradients", "optimizer"))
    peak = resident + reports[top].inputs + activations + max(step, 0)
    return RankMemory(rank=number, **sums, activations=activations, peak=peak)


def _traffic(reports: Sequence[Report]) -> tuple[Traffic, ...]:
    groups: dict[tuple[str, str, str], list[Traffic]] = {}
    for report in reports:
        for one in report.collectives:
            groups.setdefault((one.axis, one.phase, one.op), []).append(one)
    return tuple(
        replace(
            mine[0],
            count=sum(one.count for one in mine),
            bytes=sum(one.bytes for one in mine),
            copied=sum(one.copied for one in mine),
            one_shot=sum(one.one_shot for one in mine),
            reasons=tuple(sorted({reason for one in mine for reason in one.reasons})),
            needed=sum(one.needed for one in mine),
            formula=_sum([one.formula for one in mine]),
        )
        for mine in groups.values()
    )


def _sum(formulas: Sequence[str]) -> str:
    """In closed form, where each has one."""
    return str(simplify(sum(parse_size(text) for text in formulas))) if formulas and all(formulas) else ""


def _modules(reports: Sequence[Report]) -> tuple[ModuleMemory, ...]:
    """Of all stages; what several have a part of says which."""
    counts = Counter(module.module for report in reports for module in report.modules)
    return tuple(
        replace(module, module=f"{module.module or 'the model'} on stage {stage}")
        if counts[module.module] > 1
        else module
        for stage, report in enumerate(reports)
        for module in report.modules
    )
