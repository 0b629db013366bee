"""annotate: a layout for every value, from the plan's overrides."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from torch import fx

from fxpar.errors import PlanError
from fxpar.gradients import carried
from fxpar.layout import I, Layout, Placement, R
from fxpar.manager import Pass, register_pass
from fxpar.operators import COERCIONS
from fxpar.program import Program, operands, output_types, tensor_type, update
from fxpar.rules import Refusal, Signature, call_of, infer, rule_of, seed_signature
from fxpar.rules.follow import weights_of
from fxpar.rules.inference import describe, resting
from fxpar.rules.overrides import Pin, match_lines, resolve_overrides
from fxpar.symbols import evaluate, names

# Relative cost of a collective in units of the value's bytes (ring algorithms, (n - 1)/n left out).
_VOLUME = {"": 0.0, "all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
# Symbols are compared at one size: tiny examples must not decide how a model is split.
_REFERENCE_SIZE = 1024


@register_pass("annotate", requires={"canonical"}, provides={"layouts"})
def annotate(program: Program) -> Program:
    """Gives every value a layout on every mesh axis.

    Before::

        %w = parameter["c_fc.weight"] : f32[96, 384]
        %y = aten.mm.default(%x, %w) : f32[b*s, 384]

    After (`split={"c_fc": "column"}`)::

        %w = parameter["c_fc.weight"] : f32[96, 384] tp:S(1)
        %y = aten.mm.default(%x, %w) : f32[b*s, 384] tp:S(1) {needs=tp:R ; tp:S(1)}

    Terms: a *pin* is the placement an override gives a parameter; a *weight* is a value made from parameters alone;
    *needs* are the layouts in which an operation wants its operands. Values stay equal: the pass changes notes only. It
    refuses plan lines that match nothing, contradict each other or ask for a cut that the model cannot carry.

    Algorithm: overrides become pins (a fused dimension is cut in the way that nothing downstream tears). Then, in
    graph order, each operation takes the signature whose conversions move the fewest bytes, forward and backward;
    the shards of weights are never converted, and partial sums are reduced as soon as they are made. Last, in reverse
    order, a whole value that all users want cut alike is computed cut, where that moves fewer bytes.
    """
    return _annotate(program, {})


def keeping(layouts: Mapping[str, Layout]) -> Pass:
    """`annotate` for a further program of a module that exists already.

    Args:
        layouts: the layouts in which the module holds its parameters, by name. They are taken, whatever this program
            does with the parameters; those that have none stay whole.
    """
    return replace(annotate, run=partial(_annotate, layouts=layouts))


def _annotate(program: Program, layouts: Mapping[str, Layout]) -> Program:
    flags = carried(program)
    lines = match_lines(program)
    weights = weights_of(program.graph, [program.node(p.node) for p in program.parameters])
    solved = {}
    for axis, n in program.axes.items():
        known = {name: layout.on(axis) for name, layout in layouts.items()}
        pins = resolve_overrides(program, lines, n, known) if axis == "tp" else {}
        solved[axis] = _Axis(n, flags, pins, weights)
        solved[axis].run(program.graph)
        for node, pin in pins.items():
            update(node, role=pin.role, origin=pin.origin)
            if pin.product is not None and pin.role:
                update(pin.product, role=pin.role)
    _write(program, solved)
    return program


@dataclass(frozen=True)
class _Choice:
    """What an operation wants of its operands and what it gives."""

    needs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    why: str = ""


@dataclass
class _Axis:
    """Choices on one axis of n ranks; `flags` say which outputs carry a gradient, `weights` are as in `annotate`."""

    n: int
    flags: Mapping[fx.Node, tuple[bool, ...]]
    pins: Mapping[fx.Node, Pin]
    weights: Set[fx.Node]
    chosen: dict[fx.Node, _Choice] = field(default_factory=dict)
    prices: dict[tuple[fx.Node, Placement], float] = field(default_factory=dict)

    def run(self, graph: fx.Graph) -> None:
        """Chooses for all nodes.

        Raises:
            PlanError: an operation needs the whole of a parameter that the plan cuts.
        """
        for node in graph.nodes:
            if node.op == "placeholder":
                placement = self.pins[node].placement if node in self.pins else I
                self.chosen[node] = _Choice((), tuple(resting(placement, flag) for flag in self.flags[node]))
            elif node.op == "call_function" and output_types(node):
                self.chosen[node] = self._choose(node)
        for node in reversed(graph.nodes):
            if node.op == "call_function" and self._is_whole(node):
                self._cut_earlier(node)

    def _given(self, node: fx.Node) -> Placement:
        """A partial value is reduced where it is made: its users see it invariant."""
        placement = self.chosen[node].outputs[0]
        return I if placement.kind == "P" else placement

    def _choose(self, node: fx.Node) -> _Choice:
        inputs = operands(node)
        if node.target is operator.getitem:
            outputs = self.chosen[inputs[0]].outputs
            return _Choice(outputs, (outputs[int(node.args[1])],))  # type: ignore[arg-type]
        options = [self._whole(node), *self._sharded(node)]
        priced = [(sum(map(self._price, inputs, o.needs)), order, o) for order, o in enumerate(options)]
        cost, _, best = min(priced, key=lambda item: item[:2])
        if cost == inf:
            self._refuse(node)
        outputs = tuple(resting(p, flag) for p, flag in zip(best.outputs, self.flags[node], strict=True))
        return _Choice(best.needs, outputs, best.why)

    def _whole(self, node: fx.Node) -> _Choice:
        """All operands whole: replicated where one of them is inside a split region, else invariant."""
        inputs = operands(node)
        carries = [self.flags[o][0] for o in inputs]
        inside = any(self._given(o) == R and c for o, c in zip(inputs, carries, strict=True))
        wanted = tuple((R if inside else I) if c else R for c in carries)
        result = infer(rule_of(node.target), call_of(node, self.n), wanted, carries)
        return _Choice(wanted, (R,) * len(output_types(node)) if isinstance(result, Refusal) else result)

    def _sharded(self, node: fx.Node) -> Iterator[_Choice]:
        """For each operand that is a shard the signature that keeps it one."""
        rule, call = rule_of(node.target), call_of(node, self.n)
        for index, operand in enumerate(operands(node)):
            if rule is not None and self._given(operand).is_shard:
                signature = seed_signature(rule, call, index, self._given(operand))
                if not isinstance(signature, Refusal):
                    yield _Choice(signature.operands, signature.outputs, f"follows operand {call.names[index]}")

    def _conversion(self, node: fx.Node, target: Placement) -> float:
        """Bytes that a conversion moves, forward and backward, at reference sizes; shards of weights have none."""
        source, carries = self._given(node), self.flags[node][0]
        if source == target or (not carries and {source.kind, target.kind} <= {"I", "R"}):
            return 0.0
        row = COERCIONS.get((source.kind, target.kind))
        if row is None or (source.is_shard and node in self.weights):
            return inf
        kind = tensor_type(node)
        size = 1
        values = dict.fromkeys(names(kind.shape), _REFERENCE_SIZE)
        for extent in kind.shape:
            size *= evaluate(extent, values)
        volume = _VOLUME[row.forward] + (_VOLUME[row.backward] if carries else 0.0)
        return volume * size * kind.dtype.itemsize

    def _price(self, node: fx.Node, target: Placement) -> float:
        """Bytes that it takes to have a value as `target`: by a conversion, or computed so from cheaper ones."""
        key = (node, target)
        if key not in self.prices:
            price = self._conversion(node, target)
            if 0.0 < price < inf and target.is_shard and self._is_whole(node):
                signature = self._signature_to(node, target)
                if signature is not None:
                    price = min(price, sum(map(self._price, operands(node), signature.operands)))
            self.prices[key] = price
        return self.prices[key]

    def _is_whole(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node in self.chosen and self.chosen[node].outputs in ((I,), (R,))

    def _signature_to(self, node: fx.Node, target: Placement) -> Signature | None:
        """The signature of an operation that gives `target`, None where it has none."""
        rule, call = rule_of(node.target), call_of(node, self.n)
        if rule is None:
            return None
        for index, kind in enumerate(call.operands):
            for dim, size in enumerate(kind.shape):
                if size == call.outputs[0].shape[target.dim]:
                    found = seed_signature(rule, call, index, target.at(dim))
                    if not isinstance(found, Refusal) and found.outputs == (target,):
                        return found
        return None

    def _cut_earlier(self, node: fx.Node) -> None:
        wanted = {p for user in node.users for o, p in zip(operands(user), self._needs(user), strict=True) if o is node}
        if len(wanted) != 1 or not all(p.is_shard for p in wanted):
            return
        target = wanted.pop()
        signature = self._signature_to(node, target)
        if signature is not None:
            price = sum(map(self._price, operands(node), signature.operands))
            if price < self._conversion(node, target):
                self.chosen[node] = _Choice(signature.operands, (target,), "all users want this cut")

    def _needs(self, user: fx.Node) -> tuple[Placement, ...]:
        """Of a return: every value as it is."""
        if user in self.chosen and user.target is not operator.getitem:
            return self.chosen[user].needs
        return tuple(self.chosen[o].outputs[0] for o in operands(user))

    def _refuse(self, node: fx.Node) -> None:
        """Names the plan line that cuts what the operation needs whole."""
        pending = [o for o in operands(node) if o in self.weights and self._given(o).is_shard]
        while pending[0] not in self.pins:
            pending = [*operands(pending[0]), *pending[1:]]
        pin = self.pins[pending[0]]
        raise PlanError(
            f"{describe(node)} cannot work with a part of %{pending[0].name}, which the plan cuts",
            where=pin.origin,
            remedy="replicate that parameter",
        )


def _write(program: Program, solved: Mapping[str, _Axis]) -> None:
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds:
            continue
        chosen = {axis: found.chosen[node] for axis, found in solved.items()}
        layouts = [Layout.of({axis: c.outputs[i] for axis, c in chosen.items()}) for i in range(len(kinds))]
        wanted: Sequence[Layout] = ()
        if node.op == "call_function" and node.target is not operator.getitem and chosen:
            count = len(operands(node))
            wanted = [Layout.of({axis: c.needs[i] for axis, c in chosen.items()}) for i in range(count)]
        update(node, layout=tuple(layouts) if len(layouts) > 1 else layouts[0], needs=tuple(wanted))
        why = [c.why for c in chosen.values() if c.why]
        if why and not node.meta["custom"]["fxpar"].origin:
            update(node, origin=why[-1])
