"""Brute force over what gradients are beside blocks: summands among the ranks that share them, zero in their padding.

Enters: an operator and sample calls. Leaves: an `OracleReport` of what `infer` says of operands that are `S(…; P)` and
`S(…; 0)`. Every placement that the rule proposes is tried with each choice of these marks on the operands that can have
them; an answer is compared with what the ranks compute of such parts. Nothing carries a gradient: these are gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fxpar.layout.layout import P, Placement, R
from fxpar.oracle.check import Finding, OracleReport, candidates, make_node, on_one_axis, padded
from fxpar.oracle.ranks import Sample, sample, tensors_of
from fxpar.oracle.trial import Target, Trial
from fxpar.rules import OpCall, Refusal, Rule, call_of, infer, key_of, rule_of, seed_signature
from fxpar.signatures.engine import signature_of_summands


def check_marks(target: Target, samples: Sequence[Sample], shards: Sequence[int] = (2, 4)) -> OracleReport:
    """Checks what a rule makes of marked operands.

    Args:
        target: the overload, or a graph operator of fxpar that has a kernel.
        samples: calls with concrete arguments.
        shards: numbers of ranks.
    """
    rule, report = rule_of(target), OracleReport(key_of(target))
    assert rule is not None
    for call in samples:
        operands = tensors_of([*call.args, *call.kwargs.values()])
        fixed_sample = sample(*call.args, segments=call.segments, fixed=tuple(range(len(operands))), **call.kwargs)
        for n in shards:
            trial = Trial(target, fixed_sample, {"axis": n}, torch.Generator().manual_seed(0))
            seen = call_of(make_node(trial), n)
            for ins in dict.fromkeys(_marked(rule, trial, seen)):
                _judge(rule, trial, seen, ins, report)
    return report


def _judge(rule: Rule, trial: Trial, call: OpCall, ins: tuple[Placement, ...], report: OracleReport) -> None:
    outs = infer(rule, call, ins, [False] * len(ins))
    if isinstance(outs, Refusal):
        report.refused += 1
        return
    layouts = [on_one_axis(p) for p in ins]
    fault = ""
    for index, out in enumerate(outs):
        fault = fault or trial.fault(layouts, index, on_one_axis(out))
    left = ", ".join(f"{name} {p}" for name, p in zip(call.names, ins, strict=True))
    text = f"{left} → {', '.join(dict.fromkeys(map(str, outs)))}"
    if fault:
        shapes = " ".join(str(list(t.shape)) for t in trial.operands)
        report.false_accepts.append(Finding(text, str(call.n), shapes, fault))
    else:
        report.accepted[text] = report.accepted.get(text, 0) + 1


def _marked(rule: Rule, trial: Trial, call: OpCall) -> Iterator[tuple[Placement, ...]]:
    """What the rule proposes, and what one operand alone is, with every choice of marks, one of them at least."""
    proposed: dict[tuple[Placement, ...], None] = {}
    for index, operand in enumerate(trial.operands):
        for placement in (*candidates(operand, call.n, (2,), trial.sample.segments), *padded(operand, call.n)):
            if not placement.is_shared and not placement.is_padded:
                continue
            alone = tuple(placement if i == index else R for i in range(len(trial.operands)))
            proposed[alone] = None
            for signature in (
                seed_signature(rule, call, index, placement),
                signature_of_summands(rule, call, index, placement),
            ):
                if not isinstance(signature, Refusal):
                    proposed[signature.operands] = None
                    proposed |= dict.fromkeys(_with_sums(signature.operands))
            proposed |= dict.fromkeys(_with_padding(trial, call, index, placement))
    for ins in proposed:
        for marked in itertools.product(*(_marks(p, t) for p, t in zip(ins, trial.operands, strict=True))):
            if any(p.partial or p.zeros for p in marked):
                yield marked


def _with_sums(ins: tuple[Placement, ...]) -> Iterator[tuple[Placement, ...]]:
    """The same with one whole operand as summands."""
    for i, placement in enumerate(ins):
        if placement == R:
            yield (*ins[:i], P, *ins[i + 1 :])


def _with_padding(trial: Trial, call: OpCall, index: int, placement: Placement) -> Iterator[tuple[Placement, ...]]:
    """A padded operand beside each other one that is padded alike: what is contracted, or aligned, there."""
    if not placement.is_padded or len(trial.operands) > 3:
        return
    size = trial.operands[index].shape[placement.dim]
    places = [
        [None, *(dim for dim, other in enumerate(t.shape) if other == size)] if i != index else [placement.dim]
        for i, t in enumerate(trial.operands)
    ]
    for dims in itertools.product(*places):
        yield tuple(R if dim is None else placement.at(dim) for dim in dims)


def _marks(placement: Placement, value: torch.Tensor) -> list[Placement]:
    placements = [placement]
    if placement.is_shared and value.is_floating_point():
        placements.append(replace(placement, partial=True))
    if placement.is_padded:
        placements.append(replace(placement, zeros=True))
    return placements
