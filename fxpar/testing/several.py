"""The rule oracle on meshes of several axes: is what the type check allows there right?

Enters: an operator, sample calls, the sizes of two axes. Leaves: an `OracleReport`.

Rules speak of one axis; a node is judged axis by axis over what the outer ones leave (`fxpar.rules.inference`), and
that judgement itself is asked here. Operands are tried as rules allow them on the outer axis and then on the inner one,
either axis being the outer one, and with the layout of one operand exchanged for another that occurred. What is
accepted is compared with the ranks of the whole mesh, each with its own part by the definition of a layout
(`fxpar.testing.trial`), in values and gradients. What is refused is a *miss* where all cuts are plain and the ranks
show some layout of each output to be right.

There are too many layouts to try all: of each class of signatures (kinds of placement, forms of a cut, axes that share
a dimension) as many as asked are drawn.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from fxpar.errors import LayoutError
from fxpar.ir.operators import GraphOperator
from fxpar.layout.layout import Layout, P, Placement, R, V, shard
from fxpar.layout.nesting import misfit, spelled
from fxpar.rules import OpCall, Refusal, call_of, key_of, partial_signatures, rule_of, seed_signature
from fxpar.rules.inference import Context, infer_node, peeled_call
from fxpar.rules.table import inferred
from fxpar.testing.check import Judge, OracleReport, candidates, make_node, mixtures, padded
from fxpar.testing.ranks import Sample, sample, shuffled
from fxpar.testing.trial import Target, Trial, fits, local_bounds

Layouts = tuple[Layout, ...]
_Placements = tuple[Placement, ...]
_T = TypeVar("_T")


def check_on_mesh(
    target: Target, samples: Sequence[Sample], axes: Mapping[str, int], count: int, *, seed: int = 0
) -> OracleReport:
    """Checks what the type check says of an operator on two axes.

    Args:
        target: the overload, or a graph operator of fxpar that has a kernel.
        samples: calls with concrete arguments; float64 operands of a few elements.
        axes: sizes of the two axes, in the order of the mesh.
        count: how many layouts of all operands to draw for each sample and outer axis.
        seed: of the draws, the summands and the gradients.
    """
    report = OracleReport(key_of(target))
    for call in samples:
        generator = torch.Generator().manual_seed(seed)
        indexed = _with_two_indices(target, call)
        trial = Trial(target, indexed, axes, generator)
        judge = _TypeCheckJudge(trial, Trial(target, shuffled(indexed, generator), axes, generator), report)
        draw = random.Random(f"{seed} {report.operation}")
        drawn = [layouts for order in (tuple(axes), tuple(axes)[::-1]) for layouts in _drawn(trial, order, count, draw)]
        for layouts in dict.fromkeys((*drawn, *_exchanged(drawn, draw))):
            judge.judge(layouts)
        for layouts in _plain(trial, count, draw):
            judge.judge(layouts)
    return report


def _with_two_indices(target: Target, call: Sample) -> Sample:
    """Returns an operator that takes one axis' index takes those of both."""
    if not isinstance(target, GraphOperator) or "indices" not in target.signature.parameters:
        return call
    place = list(target.signature.parameters).index("indices")
    args = list(call.args)
    if place < len(args) and args[place]:
        args[place] = [args[place][0], args[place][0].clone()]
    return sample(*args, segments=call.segments, fixed=call.fixed, **call.kwargs)


class _TypeCheckJudge(Judge):
    """Judges the type check."""

    def __init__(self, trial: Trial, other: Trial, report: OracleReport) -> None:
        super().__init__(trial, other, report)
        self.flags = [output.requires_grad for output in trial.outputs]

    def judge(self, layouts: Layouts) -> None:
        """Checks the answer for operands so laid out, which the type check has let pass so far."""
        for layout, operand in zip(layouts, self.trial.operands, strict=True):
            is_right = fits(layout, operand.shape, self.trial.axes)
            if is_right != (not misfit(layout, operand.shape, self.trial.axes)):
                self.wrong(layouts, (), f"{layout} {'fits' if is_right else 'does not fit'}")
            if not is_right:
                return
        try:
            outs = self.inferred(layouts)
        except LayoutError as error:
            self.report.refused += 1
            if all(_is_plain(p) for layout in layouts for _, p in layout) and self.is_legal(layouts):
                self.report.refused -= 1
                self.report.missed.append(self.finding(layouts, (), str(error)))
            return
        self.accept(layouts, outs)
        if self.trial.target is torch.ops.aten.slice.Tensor:
            self.as_localised(layouts)

    def inferred(self, layouts: Layouts) -> Layouts:
        """Returns what the type check says."""
        return infer_node(self.node, Context(layouts, self.trial.carries, self.flags, self.trial.axes))

    def as_localised(self, layouts: Layouts) -> None:
        """Checks the same with the bounds of a rank's part, as a localised program has them."""
        bounds = local_bounds(self.trial, layouts[0])
        if isinstance(bounds, str):
            return
        node, names = make_node(self.trial), ("self", "dim", "start", "end", "step")
        arguments = {name: self.trial.argument(name) for name in names[1:]} | dict(
            zip(("start", "end"), bounds, strict=True)
        )
        node.args, node.kwargs = (node.args[0], *(arguments[name] for name in names[1:])), {}
        try:
            outs = infer_node(node, Context(layouts, self.trial.carries, self.flags, self.trial.axes, local=True))
        except LayoutError:
            return  # several bounds of the whole may have one of a part
        self.accept(layouts, outs)

    def accept(self, layouts: Layouts, outs: Layouts) -> None:
        """Checks that an answer runs, and is right in values and gradients."""
        faults = (self.trial.fault(layouts, index, out) for index, out in enumerate(outs))
        self.note(layouts, outs, next(filter(None, faults), ""))

    def is_legal(self, layouts: Layouts) -> bool:
        """Returns whether every output has a plain layout that is right, for these values and for shuffled ones."""
        return all(
            any(
                not self.trial.fault(layouts, index, out) and not self.other.fault(layouts, index, out)
                for out in _plain_layouts(output.shape, self.trial.axes)
            )
            for index, output in enumerate(self.trial.outputs)
        )


# ---------------------------------------------------------------------- what is tried


def _drawn(trial: Trial, order: tuple[str, ...], count: int, draw: random.Random) -> Iterator[Layouts]:
    """Yields layouts that rules allow on the first axis, and on the second over what that leaves."""
    (outer, inner), segments = order, trial.sample.segments
    call = call_of(make_node(trial), trial.axes[outer])
    pairs: dict[Hashable, list[Layouts]] = {}
    answers = _legal(call, trial.carries, segments, draw)
    cut = [tuple(length // call.n for length in lengths) for lengths in segments]
    for ins in _some_of_each(list(answers), _form, count, draw):
        try:
            left = replace(peeled_call(call, ins, answers[ins]), n=trial.axes[inner])
        except ValueError:
            continue
        seconds = list(_legal(left, trial.carries, [*segments, *cut], draw))
        for others in _some_of_each(seconds, partial(_nested_form, ins), count, draw):
            entries = [Layout(((outer, p), (inner, q))) for p, q in zip(ins, others, strict=True)]
            key = _form(ins), _nested_form(ins, others)
            pairs.setdefault(key, []).append(tuple(spelled(layout, trial.axes) for layout in entries))
    yield from _in_turn(list(pairs.values()), count, draw)


def _legal(
    call: OpCall, carries: Sequence[bool], segments: Sequence[Sequence[int]], draw: random.Random
) -> dict[_Placements, _Placements]:
    """Returns operands on a call's axis with their outputs: those the rule proposes, whole ones, and some at random."""
    rule, whole = rule_of(call.target), (R,) * len(call.operands)
    tried = [*mixtures(whole, carries), whole]
    choices = [[*candidates(t, call.n, (2, 3), segments), *padded(t, call.n)] for t in call.operands]
    if rule is not None:
        tried += [signature.operands for signature in partial_signatures(rule, call)]
        for index, options in enumerate(choices):
            proposed = (seed_signature(rule, call, index, p) for p in options if p.is_shard)
            tried += [signature.operands for signature in proposed if not isinstance(signature, Refusal)]
        tried += [tuple(draw.choice(options) for options in choices) for _ in range(8)]
    answers: dict[_Placements, _Placements] = {}
    for ins in dict.fromkeys(variant for placements in tried for variant in _with_index(call, placements)):
        answer = inferred(call, ins, carries, composite=False)
        if not isinstance(answer, Refusal):
            answers[ins] = answer
    return answers


def _with_index(call: OpCall, ins: tuple[Placement, ...]) -> Iterator[tuple[Placement, ...]]:
    """Yields the same operands, and with each of the axes' indices as this axis' own."""
    yield ins
    for index, name in enumerate(call.names):
        if name == "indices" and isinstance(call.target, GraphOperator):
            yield (*ins[:index], V, *ins[index + 1 :])


def _some_of_each(
    choices: Sequence[_Placements], form: Callable[[_Placements], Hashable], count: int, draw: random.Random
) -> list[_Placements]:
    """Returns at least one of each form."""
    groups: dict[Hashable, list[_Placements]] = {}
    for placements in choices:
        groups.setdefault(form(placements), []).append(placements)
    return list(_in_turn(list(groups.values()), max(count, len(groups)), draw))


def _in_turn(groups: Sequence[list[_T]], count: int, draw: random.Random) -> Iterator[_T]:
    """Yields one of each group at random, then another of each, until there are `count`."""
    shuffled_groups = [draw.sample(group, len(group)) for group in draw.sample(list(groups), len(groups))]
    turns = (item for turn in itertools.zip_longest(*shuffled_groups) for item in turn if item is not None)
    yield from itertools.islice(turns, count)


def _form(placements: Sequence[Placement]) -> Hashable:
    """Returns the kinds of the operands and the forms of their cuts."""
    return frozenset(
        (p.kind, len(p.pieces), any(piece.outer != 1 for piece in p.pieces), p.is_shared, p.is_padded)
        for p in placements
    )


def _nested_form(outer: Sequence[Placement], inner: Sequence[Placement]) -> Hashable:
    """Returns the form, and whether some operand has a dimension that both axes cut."""
    pairs = zip(outer, inner, strict=True)
    return _form(inner), any(p.is_shard and q.is_shard and p.dim == q.dim for p, q in pairs)


def _exchanged(drawn: Sequence[Layouts], draw: random.Random) -> Iterator[Layouts]:
    """Yields each with one operand laid out as in another."""
    for layouts in drawn:
        index, other = draw.randrange(len(layouts)), draw.choice(drawn)
        yield (*layouts[:index], other[index], *layouts[index + 1 :])


def _is_plain(p: Placement) -> bool:
    """Returns whether it is neither I, which mixes with nothing, nor a cut in other than one run."""
    return p.kind in "RP" or (p.is_shard and len(p.pieces) == 1 and p.pieces[0].is_plain and p.pieces[0].outer == 1)


def _plain_layouts(shape: Sequence[int], axes: Mapping[str, int]) -> list[Layout]:
    """Returns all layouts without runs, segments and I, either axis being the outer one."""
    layouts: dict[Layout, None] = {}
    for outer, inner in (tuple(axes), tuple(axes)[::-1]):
        for p in (R, P, *(shard(dim, size) for dim, size in enumerate(shape))):
            left = [size // axes[outer] if p.is_shard and dim == p.dim else size for dim, size in enumerate(shape)]
            for q in (R, P, *(shard(dim, size) for dim, size in enumerate(left))):
                layout = Layout(((outer, p), (inner, q)))
                if fits(layout, shape, axes):
                    layouts[spelled(layout, axes)] = None
    return list(layouts)


def _plain(trial: Trial, count: int, draw: random.Random) -> Iterator[Layouts]:
    """Yields plain layouts of all operands at random: most of them are refused."""
    choices = [
        [layout for layout in _plain_layouts(t.shape, trial.axes) if t.dtype != torch.bool or _lacks_sum(layout)]
        for t in trial.operands
    ]
    for _ in range(count):
        yield tuple(draw.choice(layouts) for layouts in choices)


def _lacks_sum(layout: Layout) -> bool:
    return all(placement.kind != "P" for _, placement in layout)
