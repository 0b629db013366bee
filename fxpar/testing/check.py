"""The rule oracle: is what the rules allow right, and do they allow what is right?

Enters: an operator and sample calls. Leaves: an `OracleReport` for each operator, and their table.

For every sample and number of ranks all placements of the operands are tried: I, R, P, and shards of every dimension,
plain, in several runs, by segments and with blocks that neighbours share; and V, the rank's index, for operators that
draw random bits. The rule answers first; then the ranks are computed one by one (`fxpar.testing.trial`) and their
results and gradients are compared with those of the whole call. An answer that is wrong is a *false accept*. A refusal
of operands for which some placement of each output is right, for these values and for shuffled ones, is a *miss*.
Operands that do not divide must be refused. This is the method of PyTorch's `strategy_validation`, with gradients.

Not counted, because every rule has them: operands that are all R or all I. Not counted as misses: shards of the first
or second half of a dimension without a sample's word that there are segments, and I next to R, S or P, which the type
system excludes.

A rule of your own is checked in one line::

    print(check_operation(torch.ops.mylib.gated.default, [sample(torch.randn(6, 12), torch.randn(12))]))
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from fxpar.errors import InputError
from fxpar.ir.program import Note, TensorType, set_note
from fxpar.layout.layout import I, Layout, P, Piece, Placement, R, V, shard
from fxpar.layout.nesting import pieces_of
from fxpar.rules import OpCall, Refusal, Rule, call_of, infer, key_of, partial_signatures, rule_of, seed_signature
from fxpar.signatures.engine import signature_of_summands
from fxpar.testing.ranks import Sample, divides, sample, shuffled, tensors_of, with_tensors
from fxpar.testing.trial import Target, Trial

__all__ = ["Finding", "OracleReport", "Sample", "check_operation", "make_node", "report_table", "sample"]


@dataclass(frozen=True)
class Finding:
    """A signature that the rule and the ranks judge differently.

    Attributes:
        signature: operands and, where the rule accepted them, outputs.
        ranks: how many there are; of several axes the number of each.
        shapes: global shapes of the operands.
        reason: what is wrong with the answer, or why the rule refused.
    """

    signature: str
    ranks: str
    shapes: str
    reason: str

    def __str__(self) -> str:
        return f"{self.signature}  on {self.ranks} ranks, {self.shapes}: {self.reason}"


@dataclass
class OracleReport:
    """What the oracle found about one operator.

    Attributes:
        operation: the operator's name.
        accepted: the legal signatures the rule accepts, with the number of times each occurred.
        false_accepts: signatures the rule accepts although the ranks compute something else.
        missed: legal signatures the rule refuses.
        refused: operands that the rule and the ranks refuse alike.
    """

    operation: str
    accepted: dict[str, int] = field(default_factory=dict)
    false_accepts: list[Finding] = field(default_factory=list)
    missed: list[Finding] = field(default_factory=list)
    refused: int = 0

    @property
    def legal(self) -> int:
        """Returns legal signatures tried: accepted and missed."""
        return sum(self.accepted.values()) + len(self.missed)

    @property
    def has_shard(self) -> bool:
        """Returns whether a signature with a sharded operand is accepted."""
        return any("S(" in text.partition(" → ")[0] for text in self.accepted)

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.legal} legal, {len(self.missed)} missed, {len(self.false_accepts)} wrong"]
        lines += [f"    {text}" for text in plain_signatures(self)]
        lines += [f"    missed  {finding}" for finding in _first_of_each(self.missed)]
        lines += [f"    WRONG   {finding}" for finding in _first_of_each(self.false_accepts)]
        return "\n".join(lines)


def plain_signatures(report: OracleReport) -> list[str]:
    """Returns the accepted signatures without those of factored dimensions, where there are any without."""
    plain = [text for text in report.accepted if " x " not in text and "|" not in text]
    return plain or list(report.accepted)


def _first_of_each(findings: Iterable[Finding]) -> list[Finding]:
    firsts: dict[str, Finding] = {}
    for finding in findings:
        firsts.setdefault(finding.signature, finding)
    return list(firsts.values())


# The mesh of a rule is one axis.
_AXIS = "axis"


@cache
def on_one_axis(placement: Placement) -> Layout:
    """Returns the layout on the mesh of a rule."""
    return Layout(((_AXIS, placement),))


def make_node(trial: Trial) -> fx.Node:
    """Returns the call of a sample as a node of a graph."""
    graph = fx.Graph()

    def kind(t: torch.Tensor) -> TensorType:
        return TensorType(t.dtype, tuple(t.shape))

    nodes = [set_note(graph.placeholder(f"x{i}"), Note(kind(t))) for i, t in enumerate(trial.operands)]
    args, kwargs = with_tensors((trial.sample.args, dict(trial.sample.kwargs)), nodes)
    node = graph.call_function(trial.target, args, kwargs)
    kinds = tuple(kind(t) for t in trial.outputs)
    returns = trial.target._schema.returns if isinstance(trial.target, torch._ops.OpOverload) else ()
    is_single = [str(value.type) for value in returns] == ["Tensor"] or (not returns and len(kinds) == 1)
    return set_note(node, Note(kinds[0] if is_single else kinds))


def shards(size: int, dim: int, n: int, outers: Iterable[int], segments: Iterable[Sequence[int]]) -> list[Placement]:
    """Returns shards of a dimension: the plain one even where n does not divide it, and the factored ones that fit."""
    placements = {shard(dim, size): None} if size > 1 else {}
    divisors = [c for c in range(2, n) if n % c == 0]  # neighbours that may share a block
    for outer in outers:
        if size % outer == 0 and size // outer % n == 0:
            placements[Placement("S", dim, (Piece(outer, size // outer),))] = None
    for outer, copies in itertools.product((1, 2, 3) if divisors else (), divisors):
        if size % outer == 0 and size // outer % (n // copies) == 0:
            placements[Placement("S", dim, (Piece(outer, size // outer, copies=copies),))] = None
    for lengths in segments:
        if sum(lengths) != size:
            continue
        for cut in itertools.product((1, n, *divisors), repeat=len(lengths)):
            pieces = pieces_of(
                [Piece(1, length, c < n, c if c < n else 1) for length, c in zip(lengths, cut, strict=True)]
            )
            if any(c < n for c in cut) and all(not p.sharded or int(p.size) * p.copies % n == 0 for p in pieces):
                placements[Placement("S", dim, pieces)] = None
    return list(placements)


def candidates(
    t: torch.Tensor | TensorType, n: int, outers: Sequence[int], segments: Sequence[Sequence[int]], halves: bool = False
) -> list[Placement]:
    """Returns placements to try for a tensor; `halves` adds a shard of the first half of each dimension."""
    placements = [R] if t.dtype == torch.bool else [R, P]
    for dim, size in enumerate(t.shape):
        more = [*segments, (size // 2, size - size // 2)] if halves and size % (2 * n) == 0 else segments
        placements += shards(size, dim, n, outers, more)
    return placements


def padded(t: torch.Tensor | TensorType, n: int) -> list[Placement]:
    """Returns each dimension in blocks with one or two elements of padding at its end."""
    sizes = [(dim, size, -(-size // n) * n + n) for dim, size in enumerate(t.shape) if size > 1]
    return [Placement("S", dim, (Piece(1, size, padded=padded),)) for dim, size, padded in sizes]


def _choices(trial: Trial, call: OpCall, outers: Sequence[int], halves: bool) -> list[list[Placement]]:
    """Returns placements to try for each operand of a call."""
    choices = [candidates(t, call.n, outers, trial.sample.segments, halves) for t in trial.operands]
    for i, name in enumerate(call.names):
        if name == "indices" and not isinstance(trial.target, torch._ops.OpOverload):
            choices[i] = [R, V]
        elif name == "rng" and len(trial.operands) > 3:  # fewer operands show what a state does that differs
            choices[i] = [R]
    return choices


def _tried(trial: Trial, call: OpCall) -> Iterator[tuple[tuple[Placement, ...], bool]]:
    """Yields placements of all operands, and whether refusing them can be a miss. Only few operands get many shards.

    Of many operands some combinations are drawn, one or two of which are not whole, and what the rule proposes is
    tried besides (`_RuleJudge.seeds`).
    """
    count = len(trial.operands)
    outers = {1: tuple(range(2, 13)), 2: (2, 3), 3: (2,), 4: (2,)}.get(count, ())
    counted = [set(options) for options in _choices(trial, call, outers, False)]
    choices = _choices(trial, call, outers, count <= 2)
    tried: Iterable[tuple[Placement, ...]] = itertools.product(*choices)
    if math.prod(map(len, choices)) > _MOST_TRIED:
        tried = _some(choices)
    for placements in tried:
        yield placements, all(p in known for p, known in zip(placements, counted, strict=True))


# More combinations of a sample's operands are not tried one by one.
_MOST_TRIED = 40_000


def _some(choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[Placement, ...]]:
    """Yields all with at most two operands that are not whole, and as many again with any."""
    for first, second in itertools.combinations(range(len(choices)), 2):
        for p, q in itertools.product(choices[first], choices[second]):
            yield tuple(p if i == first else q if i == second else R for i in range(len(choices)))
    draw = random.Random(0)
    for _ in range(_DRAWN):
        yield tuple(draw.choice(options) for options in choices)


_DRAWN = 200


def mixtures(placements: tuple[Placement, ...], carries: Sequence[bool]) -> Iterator[tuple[Placement, ...]]:
    """Yields the same with one or all replicated operands invariant: no operation takes both kinds."""
    places = [i for i, p in enumerate(placements) if p == R and carries[i]]
    for chosen in [*([i] for i in places), places] if len(places) > 1 else [places] * bool(places):
        yield tuple(I if i in chosen else p for i, p in enumerate(placements))


class Judge:
    """Compares what is said of one trial with its ranks, and writes into a report.

    Args:
        trial: the call on the ranks.
        other: the same on other values.
        report: what the comparisons are written into.
    """

    def __init__(self, trial: Trial, other: Trial, report: OracleReport) -> None:
        self.trial, self.other, self.report = trial, other, report
        self.node = make_node(trial)
        self.names = call_of(self.node, 1).names

    def finding(self, ins: Sequence[object], outs: Sequence[object], reason: str) -> Finding:
        """Returns operands and outputs with what is wrong.

        Args:
            ins: the placement or layout of each operand.
            outs: those of the outputs; empty where the operands were refused.
        """
        left = ", ".join(f"{name} {entry}" for name, entry in zip(self.names, ins, strict=True))
        text = f"{left} → {', '.join(dict.fromkeys(map(str, outs)))}" if outs else left
        shapes = " ".join(str(list(t.shape)) for t in self.trial.operands)
        return Finding(text, " x ".join(map(str, self.trial.axes.values())), shapes, reason)

    def wrong(self, ins: Sequence[object], outs: Sequence[object], fault: str) -> None:
        """Notes a false accept once, whichever way it was come by."""
        finding = self.finding(ins, outs, fault)
        if finding not in self.report.false_accepts:
            self.report.false_accepts.append(finding)

    def note(self, ins: Sequence[object], outs: Sequence[object], fault: str, *, count: bool = True) -> None:
        """Notes what was accepted, wrongly where there is a fault."""
        if fault:
            self.wrong(ins, outs, fault)
        elif count:
            text = self.finding(ins, outs, "").signature
            self.report.accepted[text] = self.report.accepted.get(text, 0) + 1


def on_axis(placements: Iterable[Placement]) -> list[Layout]:
    """Returns the layouts on the mesh of a rule."""
    return [on_one_axis(placement) for placement in placements]


def _first_fault(trial: Trial, ins: Sequence[Placement], outs: Sequence[Placement]) -> str:
    """Returns what is wrong with the first wrong output; empty where all are right."""
    faults = (trial.fault(on_axis(ins), index, on_one_axis(out)) for index, out in enumerate(outs))
    return next(filter(None, faults), "")


class _RuleJudge(Judge):
    """Judges one rule."""

    def __init__(self, rule: Rule | None, trial: Trial, other: Trial, report: OracleReport) -> None:
        super().__init__(trial, other, report)
        self.rule, self.call = rule, call_of(self.node, trial.axes[_AXIS])
        few = len(trial.operands) <= 2
        outers, cuts = tuple(range(2, 37)) if few else (2,), trial.sample.segments
        self.outs = [candidates(o, self.call.n, outers, cuts, few) for o in trial.outputs]

    def seeds(self) -> None:
        """Checks the signatures that the rule proposes: `infer` must accept them, and they must be right."""
        if self.rule is None:
            return
        signatures = partial_signatures(self.rule, self.call)
        for index, t in enumerate(self.trial.operands):
            tried = candidates(t, self.call.n, (2, 3), self.trial.sample.segments, True)
            for placement in (*tried, *padded(t, self.call.n)):
                if placement.is_shard:
                    signature = seed_signature(self.rule, self.call, index, placement)
                    signatures += [] if isinstance(signature, Refusal) else [signature]
        for ins, outs in dict.fromkeys((s.operands, s.outputs) for s in signatures):
            answer = infer(self.rule, self.call, ins, self.trial.carries)
            if answer != outs:
                self.wrong(ins, outs, f"proposed, but inferred is {answer}")
            else:
                self.accept(ins, outs, count=False)

    def judge(self, ins: tuple[Placement, ...], counted: bool) -> None:
        """Checks the rule's answer for operands so placed, and every mixture of them with invariant ones."""
        carries = self.trial.carries
        for mixed in mixtures(ins, carries):
            answer = infer(self.rule, self.call, mixed, carries)
            if not isinstance(answer, Refusal):
                self.accept(mixed, answer, count=False)
        answer = infer(self.rule, self.call, ins, carries)
        if not isinstance(answer, Refusal):
            self.accept(ins, answer, count=any(p != R for p in ins))
        elif counted and self.is_legal(ins):
            self.report.missed.append(self.finding(ins, (), answer.reason))
        else:
            self.report.refused += 1

    def accept(self, ins: Sequence[Placement], outs: tuple[Placement, ...], count: bool = True) -> None:
        """Checks that an answer divides, runs, and is right in values and gradients."""
        fault = ""
        if len(outs) != len(self.trial.outputs):
            fault = f"{len(outs)} placements for {len(self.trial.outputs)} outputs"
        for p, t in zip(ins, self.trial.operands, strict=True):
            if not divides(p, t.shape, self.call.n):
                fault = f"{p} does not divide {list(t.shape)}"
        self.note(ins, outs, fault or _first_fault(self.trial, ins, outs), count=count)

    def is_legal(self, ins: Sequence[Placement]) -> bool:
        """Returns whether every output has a placement that is right."""
        if not all(divides(p, t.shape, self.call.n) for p, t in zip(ins, self.trial.operands, strict=True)):
            return False
        layouts = on_axis(ins)
        return all(
            any(not any(t.fault(layouts, index, on_one_axis(out)) for t in (self.trial, self.other)) for out in outs)
            for index, outs in enumerate(self.outs)
        )


def check_operation(
    target: Target,
    samples: Sequence[Sample],
    shards: Sequence[int] = (2, 3),
    *,
    rule: Rule | None = None,
    seed: int = 0,
) -> OracleReport:
    """Checks the rule of an operator by brute force.

    Args:
        target: the overload, or fxpar's `dropout`, `attention` or `function`.
        samples: calls with concrete arguments; float64 operands of a few elements.
        shards: numbers of ranks.
        rule: the rule to check instead of the registered one.
        seed: of the summands and gradients.

    Raises:
        InputError: a sample has no tensor operand, or its result is not a number.
    """
    checked = rule if rule is not None else rule_of(target)
    report = OracleReport(key_of(target))
    for call in samples:
        for n in shards:
            generator = torch.Generator().manual_seed(seed)
            axes = {_AXIS: n}
            trial = Trial(target, call, axes, generator)
            if not trial.operands or any(bool(o.isnan().any()) for o in tensors_of(trial.outputs)):
                raise InputError(
                    "a sample needs a tensor operand and a result without NaN",
                    where=report.operation,
                    remedy="pass sample(torch.randn(…), …)",
                )
            judge = _RuleJudge(checked, trial, Trial(target, shuffled(call, generator), axes, generator), report)
            judge.seeds()
            for placements, counted in _tried(trial, judge.call):
                judge.judge(placements, counted)
    return report


def report_table(reports: Sequence[OracleReport], notes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the list of all operators: their legal, missed and wrong signatures, `notes` by name, and the totals."""
    rows: list[tuple[Any, ...]] = [("operation", "legal", "missed", "wrong", "signatures")]
    for report in reports:
        shown = plain_signatures(report)
        text = "; ".join(shown[:4]) + (f"; … {len(report.accepted) - 4} more" if len(report.accepted) > 4 else "")
        rows.append((report.operation, report.legal, len(report.missed), len(report.false_accepts), text))
    lines = [f"{a!s:50} {b!s:>6} {c!s:>6} {d!s:>6}  {e}".rstrip() for a, b, c, d, e in rows]
    for report in reports:
        lines += [f"missed  {report.operation}: {f}" for f in _first_of_each(report.missed)]
        lines += [f"WRONG   {report.operation}: {f}" for f in _first_of_each(report.false_accepts)]
    lines += [f"{name}: {reason}" for name, reason in notes.items()]
    legal, missed = sum(r.legal for r in reports), sum(len(r.missed) for r in reports)
    wrong = sum(len(r.false_accepts) for r in reports)
    lines.append(f"{len(reports)} operations, {legal} legal signatures, {missed} missed, {wrong} wrong")
    return "\n".join(lines)


# Brute force over what gradients are besides blocks: summands among the ranks that share them, zero in their padding.


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
            trial = Trial(target, fixed_sample, {_AXIS: n}, torch.Generator().manual_seed(0))
            judge, seen = Judge(trial, trial, report), call_of(make_node(trial), n)
            for ins in dict.fromkeys(_marked(rule, trial, seen)):
                outs = infer(rule, seen, ins, [False] * len(ins))
                if isinstance(outs, Refusal):
                    report.refused += 1
                else:
                    judge.note(ins, outs, _first_fault(trial, ins, outs))
    return report


def _marked(rule: Rule, trial: Trial, call: OpCall) -> Iterator[tuple[Placement, ...]]:
    """Yields what the rule proposes, and one operand alone, with every choice of at least one mark."""
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
    """Yields the same with one whole operand as summands."""
    for i, placement in enumerate(ins):
        if placement == R:
            yield (*ins[:i], P, *ins[i + 1 :])


def _with_padding(trial: Trial, call: OpCall, index: int, placement: Placement) -> Iterator[tuple[Placement, ...]]:
    """Yields a padded operand next to each other one that is padded alike: what is contracted, or aligned, there."""
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
