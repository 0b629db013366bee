"""One operation as a training step: its sample calls under every signature that its rule proposes.

A program holds the operation alone. Float operands are parameters, made what a signature asks for by coercions (I to R,
I to P, reduced shares to shared ones), other operands are inputs; outputs are made what callers can differentiate.
`differentiate` adds the backward, the static checks judge it, simulated ranks run it, and each rank's gradients are
compared with its block of those that autograd gives of the whole call, in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxpar.errors import FxparError
from fxpar.ir.grad_flow import carried
from fxpar.ir.operators import as_parameter, canonical_placement, is_finer
from fxpar.ir.program import Input, Note, Parameter, Program, TensorType, note, set_note
from fxpar.ir.properties import Property
from fxpar.layout.layout import I, Layout, Placement, R, fits
from fxpar.layout.nesting import pieces_of
from fxpar.layout.shards import local_block
from fxpar.ops.collectives import coercion, dual_layout
from fxpar.passes.differentiate import differentiate
from fxpar.passes.localize import localize
from fxpar.plan.plan import Plan
from fxpar.rules import Refusal, call_of, partial_signatures, rule_of, seed_signature
from fxpar.rules.table import inferred
from fxpar.testing.check import candidates, make_node, padded
from fxpar.testing.ranks import Sample, is_continuous, tensors_of, with_tensors
from fxpar.testing.samples import Draw
from fxpar.testing.trial import Target, Trial
from fxpar.verify.simulate_ranks import cotangents, run_ranks
from fxpar.verify.static import verify_static

AXIS = "tp"
TOLERANCE = 1e-10
# Before `localize`.
_PROPERTIES = frozenset(
    {
        *(Property.CANONICAL, Property.MASKS, Property.SEQUENCE, Property.LAYOUTS, Property.COLLECTIVES),
        *(Property.VOCABULARY, Property.RNG),
    }
)


class Fours(Draw):
    """Sizes that four ranks divide."""

    def sizes(self, count: int) -> list[int]:
        return self._random.sample((4, 8, 12, 16) if count > 3 else (4, 8, 12), count)


@dataclass(frozen=True)
class Signed:
    """Placements of a call's operands and outputs on one axis."""

    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        left = ", ".join(map(str, self.operands))
        return f"{left} → {', '.join(dict.fromkeys(map(str, self.outputs)))}"


class Unmade(ValueError):
    """No program has the operands, or the outputs, so laid out."""


def signatures(trial: Trial, n: int) -> list[Signed]:
    """Those that the rule proposes, each also with what is whole invariant where it may be; and all whole."""
    call = call_of(make_node(trial), n)
    rule, count = rule_of(trial.target), len(trial.operands)
    tried: dict[tuple[Placement, ...], None] = {(I,) * count: None, (R,) * count: None}
    if rule is not None:
        tried |= dict.fromkeys(signature.operands for signature in partial_signatures(rule, call))
        for index, operand in enumerate(trial.operands):
            for placement in (*candidates(operand, n, (2, 3), trial.sample.segments), *padded(operand, n)):
                found = seed_signature(rule, call, index, placement) if placement.is_shard else Refusal("")
                if not isinstance(found, Refusal):
                    tried[found.operands] = None
    signed = []
    for ins in tried:
        given = tuple(R if p == I and not carries else p for p, carries in zip(ins, trial.carries, strict=True))
        outs = inferred(call, given, trial.carries, composite=False)
        if not isinstance(outs, Refusal):
            signed.append(Signed(given, tuple(outs)))
    return list(dict.fromkeys(signed))


def carried_by(trial: Trial) -> list[bool]:
    """Which outputs carry a gradient, as programs take it (`fxpar.ir.grad_flow`)."""
    graph = fx.Graph()
    owned = [set_note(graph.placeholder(f"x{i}"), Note(TensorType(t.dtype, ()))) for i, t in enumerate(trial.operands)]
    args, kwargs = with_tensors((trial.sample.args, dict(trial.sample.kwargs)), owned)
    call = graph.call_function(trial.target, args, kwargs)
    set_note(call, Note(tuple(TensorType(t.dtype, ()) for t in trial.outputs)))
    made = graph.output(())
    parameters = tuple(
        Parameter(node.name, node.name, "parameter", TensorType(torch.float64, ()), flag)
        for node, flag in zip(owned, trial.carries, strict=True)
    )
    assert made.op == "output"
    program = Program(fx.GraphModule(torch.nn.Module(), graph), parameters, (), (), (), Plan())
    return list(carried(program)[call])


def program_of(trial: Trial, signed: Signed, n: int) -> Program:
    """The forward of a call so laid out.

    Raises:
        Unmade: no coercion gives an operand, or makes an output differentiable.
    """
    graph, plan = fx.Graph(), Plan(tp=n)
    parameters, inputs = [], []
    values: list[fx.Node] = []

    def kind(t: torch.Tensor) -> TensorType:
        return TensorType(t.dtype, tuple(t.shape))

    starts = [
        _start(p, is_continuous(operand), carries)
        for p, operand, carries in zip(signed.operands, trial.operands, trial.carries, strict=True)
    ]
    for i, (operand, start) in enumerate(zip(trial.operands, starts, strict=True)):
        node = graph.placeholder(f"x{i}")
        values.append(set_note(node, Note(kind(operand), _layout(start))))
        if is_continuous(operand):
            parameters.append(Parameter(f"x{i}", node.name, "parameter", kind(operand), trial.carries[i]))
        else:
            inputs.append(Input(f"x{i}", node.name, kind(operand)))
    for i, (node, start, wanted) in enumerate(zip(values, starts, signed.operands, strict=True)):
        values[i] = _converted(graph, node, start, wanted)
    args, kwargs = with_tensors((trial.sample.args, dict(trial.sample.kwargs)), values)
    call = graph.call_function(trial.target, args, kwargs)
    kinds = tuple(kind(t) for t in trial.outputs)
    flows = carried_by(trial)
    placed = [canonical_placement(p, flag) for p, flag in zip(signed.outputs, flows, strict=True)]
    layouts = tuple(map(_layout, placed))
    single = note(make_node(trial)).type
    if not isinstance(single, tuple):
        results = [set_note(call, Note(kinds[0], layouts[0]))]
    else:
        set_note(call, Note(kinds, layouts))
        results = [
            set_note(graph.call_function(operator.getitem, (call, i)), Note(kinds[i], layouts[i]))
            for i in range(len(kinds))
        ]
    ends = {
        f"y{i}": _ended(graph, node, p, n) for i, (node, p) in enumerate(zip(results, placed, strict=True)) if flows[i]
    }
    graph.output(tuple(ends.values()))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Program(module, tuple(parameters), tuple(inputs), tuple(ends), (), plan, _PROPERTIES)


def _layout(placement: Placement) -> Layout:
    return Layout(((AXIS, placement),))


def _start(wanted: Placement, owned: bool, carries: bool) -> Placement:
    """What a placeholder is that is to become that: inputs are whole."""
    if wanted.is_shard and owned:
        return as_parameter(wanted) if carries else wanted
    return I if carries else R


def _converted(graph: fx.Graph, node: fx.Node, start: Placement, wanted: Placement) -> fx.Node:
    if start == wanted:
        return node
    row = coercion(start, wanted)
    if row is None:
        raise Unmade(f"nothing makes {wanted} of {start}")
    made = graph.call_function(row.operator, (node,), {"axis": AXIS})
    return set_note(made, replace(note(node), layout=_layout(wanted)))


def _ended(graph: fx.Graph, node: fx.Node, found: Placement, n: int) -> fx.Node:
    """The output as callers may have it: invariant, or in blocks of which each rank has its own."""
    if found.is_shared:
        wanted = replace(found, pieces=pieces_of([replace(p, sharded=True, copies=1) for p in found.pieces]))
        if not is_finer(found, wanted) or not fits(wanted, note(node).type.shape, n):  # type: ignore[union-attr]
            raise Unmade(f"{found} is no output")
        return _converted(graph, node, found, wanted)
    return _converted(graph, node, found, found if found.is_shard else I)


def symbols_are_none(program: Program) -> dict[str, int]:
    """Sizes of the symbols, of which there are none."""
    assert not program.symbols
    return {}


def step_of(program: Program) -> Program:
    """The rank's step, statically checked."""
    try:
        verify_static(program)
        made = localize(program.copy())
        made = made.with_(properties=made.properties | {Property.LOCAL})
        verify_static(made)
    except FxparError as error:
        raise Unmade(f"the forward is none: {error}") from error
    step = differentiate(made.copy())
    step = step.with_(properties=step.properties | {Property.STEP})
    step.graph.lint()
    verify_static(step)
    return step


def fault(trial: Trial, signed: Signed, n: int) -> str:
    """What is wrong with the step of a call so laid out; empty where all gradients are right.

    Raises:
        Unmade: there is no such program.
        FxparError: a pass or a check refused it.
    """
    step = step_of(program_of(trial, signed, n))
    return deviation(trial, step)


def deviation(trial: Trial, step: Program) -> str:
    """The worst gradient of any rank, against autograd of the whole call."""
    values = {f"x{i}": operand for i, operand in enumerate(trial.operands)}
    state = {p.fqn: values[p.fqn] for p in step.parameters}
    inputs = {i.path: values[i.path] for i in step.inputs if i.path in values}
    leaves = [v.clone().requires_grad_(c) for v, c in zip(trial.operands, trial.carries, strict=True)]
    args, kwargs = with_tensors((trial.sample.args, dict(trial.sample.kwargs)), leaves)
    outputs = tensors_of(trial.target(*args, **kwargs))
    upstream = cotangents(step, {})
    roots = {name: outputs[int(name[1:])] for name in upstream if outputs[int(name[1:])].requires_grad}
    torch.autograd.backward(list(roots.values()), [upstream[name] for name in roots])
    wanted = {f"x{i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
    layouts = {p.fqn: dual_layout(note(step.node(p.node)).layout) for p in step.parameters}  # type: ignore[arg-type]
    for rank, run in enumerate(run_ranks(step, state, inputs, {})):
        for name, whole in wanted.items():
            if name not in run.gradients:
                if bool(whole.any()):
                    return f"no gradient of {name}"
                continue
            layout = layouts[name]
            own = local_block(whole, layout, step.axes, {AXIS: rank}, {})
            mine = run.gradients[name]
            if mine.shape != own.shape or mine.dtype != own.dtype:
                return f"gradient of {name} is {mine.dtype} {list(mine.shape)}, not {own.dtype} {list(own.shape)}"
            scale = max(float(whole.abs().max()) if whole.numel() else 0.0, 1e-3)
            gap = float((mine - own).abs().max()) / scale if own.numel() else 0.0
            if not gap <= TOLERANCE:
                return f"gradient of {name} on rank {rank}: {gap:.2g}"
    return ""


def trials(target: Target, samples: Sequence[Sample], n: int) -> Iterator[Trial]:
    """Calls that something is differentiated of."""
    for sample in samples:
        trial = Trial(target, sample, {AXIS: n}, torch.Generator().manual_seed(0))
        if any(trial.carries) and any(carried_by(trial)):
            yield trial
