"""annotate: a layout for every value, from the plan's overrides."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.gradients import carried
from fxpar.layout import I, Layout, Placement, R
from fxpar.manager import register_pass
from fxpar.operators import COERCIONS
from fxpar.program import Program, TensorType, note, operands, output_types, update
from fxpar.rules import Refusal, call_of, infer, rule_of, seed_signature
from fxpar.rules.inference import resting
from fxpar.rules.overrides import Pin, resolve_overrides
from fxpar.symbols import evaluate, names

# Relative cost of a collective in units of the value's bytes (ring algorithms, (n - 1)/n left out).
_VOLUME = {"": 0.0, "all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
# Symbols are compared at one size: tiny examples must not decide how a model is split.
_REFERENCE_SIZE = 1024


@dataclass(frozen=True)
class _Choice:
    """What an operation wants of its operands, what it gives, and the bytes that conversions move."""

    needs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    cost: float
    why: str


@register_pass("annotate", requires={"canonical"}, provides={"layouts"})
def annotate(program: Program) -> Program:
    """Gives every value a layout on every mesh axis.

    Before::

        %w = parameter["c_fc.weight"] : f32[96, 384]
        %y = aten.mm.default(%x, %w) : f32[b*s, 384]

    After (`split={"c_fc": "column"}`)::

        %w = parameter["c_fc.weight"] : f32[96, 384] tp:S(1)
        %y = aten.mm.default(%x, %w) : f32[b*s, 384] tp:S(1) {needs=tp:R ; tp:S(1)}

    Terms: a *pin* is the placement an override gives a parameter; *needs* are the layouts in which an operation wants
    its operands. Values stay equal: the pass changes notes only. It refuses plan lines that match nothing, contradict
    each other or ask for a cut that the model's shapes cannot carry.

    Algorithm: overrides become pins (a fused dimension is cut in the way that nothing downstream tears). Then, in
    graph order, each operation takes the signature whose conversions move the fewest bytes, forward and backward;
    pinned parameters are never converted, and partial sums are reduced as soon as they are made.
    """
    flags = carried(program)
    chosen: dict[fx.Node, dict[str, tuple[Placement, ...]]] = {node: {} for node in program.graph.nodes}
    needs: dict[fx.Node, dict[str, tuple[Placement, ...]]] = {node: {} for node in program.graph.nodes}
    why: dict[fx.Node, str] = {}
    for axis, n in program.axes.items():
        pins = resolve_overrides(program, n) if axis == "tp" else {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                chosen[node][axis] = _placeholder(node, flags, pins)
            elif node.op == "call_function" and output_types(node):
                choice = _choose(node, axis, n, chosen, flags, pins)
                chosen[node][axis], needs[node][axis] = choice.outputs, choice.needs
                why[node] = choice.why
        for node, pin in pins.items():
            update(node, role=pin.role, origin=pin.origin)
            if pin.product is not None and pin.role:
                update(pin.product, role=pin.role)
    _write(program, chosen, needs, why)
    return program


def _placeholder(
    node: fx.Node, flags: Mapping[fx.Node, Sequence[bool]], pins: Mapping[fx.Node, Pin]
) -> tuple[Placement, ...]:
    placement = pins[node].placement if node in pins else I
    return tuple(resting(placement, flag) for flag in flags[node])


def _choose(
    node: fx.Node,
    axis: str,
    n: int,
    chosen: Mapping[fx.Node, Mapping[str, tuple[Placement, ...]]],
    flags: Mapping[fx.Node, tuple[bool, ...]],
    pins: Mapping[fx.Node, Pin],
) -> _Choice:
    inputs = operands(node)
    if node.target is operator.getitem:
        return _Choice(chosen[inputs[0]][axis], (chosen[inputs[0]][axis][int(node.args[1])],), 0.0, "")  # type: ignore[arg-type]
    # A partial value is reduced where it is made: its users see it invariant.
    given = tuple(I if (p := chosen[o][axis][0]).kind == "P" else p for o in inputs)
    carries = tuple(flags[o][0] for o in inputs)
    kinds = tuple(output_types(o)[0] for o in inputs)
    pinned = tuple(o in pins and pins[o].placement.is_shard for o in inputs)
    options = [_whole(node, n, given, carries), *_sharded(node, n, given)]
    priced = []
    for order, option in enumerate(options):
        if isinstance(option, _Choice):
            cost = sum(
                _conversion(a, b, kind, carry, fixed)
                for a, b, kind, carry, fixed in zip(given, option.needs, kinds, carries, pinned, strict=True)
            )
            priced.append((cost, -order, option))
    cost, _, best = min(priced, key=lambda item: item[:2])
    outputs = tuple(resting(p, flag) for p, flag in zip(best.outputs, flags[node], strict=True))
    return _Choice(best.needs, outputs, cost, best.why)


def _whole(node: fx.Node, n: int, given: Sequence[Placement], carries: Sequence[bool]) -> _Choice:
    """All operands whole: replicated where one of them is inside a split region, else invariant."""
    inside = any(p == R and c for p, c in zip(given, carries, strict=True))
    wanted = tuple((R if inside else I) if c else R for c in carries)
    result = infer(rule_of(node.target), call_of(node, n), wanted, carries)
    outputs = (R,) * len(output_types(node)) if isinstance(result, Refusal) else result
    return _Choice(wanted, outputs, 0.0, "")


def _sharded(node: fx.Node, n: int, given: Sequence[Placement]) -> list[_Choice]:
    """For each operand that is a shard the signature that keeps it one."""
    rule = rule_of(node.target)
    if rule is None:
        return []
    found, call = [], call_of(node, n)
    for index, placement in enumerate(given):
        if placement.is_shard:
            signature = seed_signature(rule, call, index, placement)
            if not isinstance(signature, Refusal):
                why = f"follows operand {call.names[index]}"
                found.append(_Choice(signature.operands, signature.outputs, 0.0, why))
    return found


def _conversion(source: Placement, target: Placement, kind: TensorType, carries: bool, pinned: bool) -> float:
    """Bytes moved, forward and backward, at reference sizes; pinned shards are never converted."""
    if source == target or (not carries and {source.kind, target.kind} <= {"I", "R"}):
        return 0.0
    if pinned:
        return float("inf")
    row = COERCIONS.get((source.kind, target.kind))
    if row is None:
        return float("inf")
    size = 1
    values = dict.fromkeys(names(kind.shape), _REFERENCE_SIZE)
    for extent in kind.shape:
        size *= evaluate(extent, values)
    volume = _VOLUME[row.forward] + (_VOLUME[row.backward] if carries else 0.0)
    return volume * size * kind.dtype.itemsize


def _write(
    program: Program,
    chosen: Mapping[fx.Node, Mapping[str, tuple[Placement, ...]]],
    needs: Mapping[fx.Node, Mapping[str, tuple[Placement, ...]]],
    why: Mapping[fx.Node, str],
) -> None:
    axes = list(program.axes)
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds:
            continue
        layouts = tuple(Layout.of({axis: chosen[node][axis][i] for axis in axes}) for i in range(len(kinds)))
        wanted: tuple[Layout, ...] = ()
        if node.op == "call_function" and node.target is not operator.getitem and axes:
            count = len(operands(node))
            wanted = tuple(Layout.of({axis: needs[node][axis][i] for axis in axes}) for i in range(count))
        update(node, layout=layouts if isinstance(note(node).type, tuple) else layouts[0], needs=wanted)
        if why.get(node) and not note(node).origin:
            update(node, origin=why[node])
