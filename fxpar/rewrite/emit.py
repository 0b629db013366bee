"""Adds typed nodes of the backward to a program: layouts by the rules, sizes as numbers, literals as a rank's."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.errors import LayoutError, PassError
from fxpar.ir.grad_flow import carried_by
from fxpar.ir.operators import in_backward
from fxpar.ir.program import (
    Note,
    Program,
    ScalarType,
    TensorType,
    ancestors,
    describe,
    has_note,
    insert_call,
    note,
    operands,
    output_layouts,
    output_node,
    output_types,
    set_note,
    update,
    with_operands,
)
from fxpar.ir.properties import Property
from fxpar.ir.step import BACKWARD, PARAMETER, RECOMPUTE
from fxpar.ir.symbols import SIZE_FUNCTIONS
from fxpar.layout.layout import Layout, P, Placement, R, shard
from fxpar.layout.nesting import innermost, local_shape, spelled
from fxpar.layout.symbolic_sizes import Size, divide, last_operation, simplify
from fxpar.ops.collectives import COERCION_OF, IN_BACKWARD, dual_layout, r_to_p, r_to_s
from fxpar.ops.small_operators import size as size_of_whole
from fxpar.ops.small_operators import zeros
from fxpar.rewrite.local_sizes import localize_node
from fxpar.rewrite.symints import Number
from fxpar.rules import Refusal, bind_arguments, call_of, seed_signature
from fxpar.rules.conversion import conversions
from fxpar.rules.inference import AxisInference, Context, context_of, infer_node, judged, steps, whole_call
from fxpar.rules.table import Answers, rule_for
from fxpar.sharding.batch_sharding import declared
from fxpar.signatures.op_call import SIZED, name_of_sizes

# The arguments of a call over the whole, nodes in place of values: what `localize` rewrote is undone.

aten = torch.ops.aten

_SPLITS = frozenset({aten.split_with_sizes.default, aten.split.sizes})

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def whole_call_of(program: Program, node: fx.Node) -> Arguments:
    """Returns arguments of a call over the whole.

    Raises:
        PassError: the bounds of a slice are those of no slice of the whole.
    """
    if Property.LOCAL not in program.properties:
        return node.args, dict(node.kwargs)
    target: Any = node.target
    if target in SIZED:
        at = SIZED[target]
        sizes = [_number(size) for size in output_types(node)[0].shape]
        kwargs = {name: value for name, value in node.kwargs.items() if name != name_of_sizes(target)}
        return (*node.args[:at], sizes, *node.args[at + 1 :]), kwargs
    if node.target in _SPLITS:
        source, dim = operands(node)[0], int(bind_arguments(node).get("dim", 0))
        return (source, [_number(kind.shape[dim]) for kind in output_types(node)], dim), {}
    if node.target is aten.slice.Tensor and output_layouts(node):
        call = whole_call(call_of(node, 1), output_layouts(operands(node)[0])[0], program.axes)
        if isinstance(call, Refusal):
            raise PassError(call.reason, where=describe(node))
        bounds = [call.get(name) for name in ("dim", "start", "end", "step")]
        return (operands(node)[0], *(_number(bound) for bound in bounds)), {}
    return node.args, dict(node.kwargs)


def _number(size: Size | None) -> Any:
    return size if size is None or isinstance(size, int) else Number(size)


# Copies of forward nodes in the backward.


def compute_again(program: Program, chosen: Set[fx.Node], readers: Iterable[fx.Node]) -> None:
    """Copies what `readers` read of the chosen nodes, each right in front of the first that needs it.

    Args:
        chosen: nodes of the forward; what they read that is none of them is kept.
        readers: nodes of the backward, in order.
    """
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    for reader in readers:
        needed = ancestors(reader.all_input_nodes, lambda node: node in chosen and node not in copies)
        for node in sorted((needed & chosen) - copies.keys(), key=order.__getitem__):
            copies[node] = _copy(program, node, copies, reader)
        reader.args = fx.node.map_arg(reader.args, lambda read: copies.get(read, read))
        reader.kwargs = fx.node.map_arg(reader.kwargs, lambda read: copies.get(read, read))


def is_repeatable(node: fx.Node) -> bool:
    """Returns whether a node of the forward gives the same again: a tensor, and no bits of the device's generator."""
    is_drawn = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return node.op == "call_function" and bool(output_types(node)) and not is_drawn


def _copy(program: Program, node: fx.Node, copies: Mapping[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    target: Any = IN_BACKWARD.get(node.target, node.target)
    if target is None:
        (source,) = operands(node)
        return copies.get(source, source)
    noted = note(node)
    layouts = tuple(Layout(tuple((axis, in_backward(p)) for axis, p in layout)) for layout in output_layouts(node))
    with program.graph.inserting_before(before):
        new = program.graph.node_copy(node, lambda read: copies.get(read, read))
    new.target, new.name = target, f"{node.name}_again"
    layout = layouts if isinstance(noted.type, tuple) else layouts[0] if layouts else None
    return set_note(new, replace(noted, layout=layout, phase=BACKWARD, origin=RECOMPUTE))


def _nodes(args: Sequence[Any]) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(tuple(args), nodes.append)
    return nodes


class BackwardEmitter:
    """Creates nodes in the graph of a program.

    Backward nodes stand after those of the forward, and nodes of the parameter phase after these.
    """

    def __init__(self, program: Program, flags: dict[fx.Node, tuple[bool, ...]]) -> None:
        """Takes `flags` as of `carried`, and adds forward nodes that are made."""
        self.program, self.graph, self.flags = program, program.graph, flags
        self.is_local = Property.LOCAL in program.properties
        self._row_wise, self._answers = declared(program), Answers()
        self._end = output_node(self.graph)
        self._parameter: fx.Node = self._end
        self._numbers: dict[Size, fx.Node] = {}
        self._zeros: set[fx.Node] = set()
        self._conversions: dict[Any, fx.Node] = {}
        # What `call` made, each with the name that it asked for, and None for what depends on more than its operands.
        self.made: list[tuple[fx.Node, str] | None] = []
        for node in self.graph.nodes:
            kind = note(node).type if has_note(node) else None
            if isinstance(kind, ScalarType) and not isinstance(kind.value, int):
                self._numbers.setdefault(simplify(kind.value), node)

    # ------------------------------------------------------------------ nodes

    def call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        kind: Any,
        like: Note,
        *,
        layouts: Sequence[Layout] | None = None,
        name: str = "",
        random: int = 0,
    ) -> fx.Node:
        """Implements `Emits.call`: adds a call with its note, whose arguments are those of the whole."""
        # What reads something of the parameter phase is of it too: in each microbatch it would not be there.
        read = [note(operand).phase for operand in _nodes(args) if has_note(operand)]
        phase = PARAMETER if PARAMETER in (like.phase, *read) else BACKWARD
        # One conversion of a gradient for all that read it, as in the forward:
        # a second one would be a second collective.
        key = (target, tuple(args), kwargs.get("axis"), tuple(layouts or ()), True)
        if target in COERCION_OF and key in self._conversions:
            return self._again(self._conversions[key], phase)
        with self.graph.inserting_before(self._end if phase == PARAMETER else self._parameter):
            short = name or getattr(target, "_opname", None)
            node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=short)
        if phase == PARAMETER and self._parameter is self._end:
            self._parameter = node
        self.made.append((node, short) if short and target not in COERCION_OF and not random else None)
        self._note(node, kind, like, layouts, phase, random)
        if target in COERCION_OF:
            self._conversions[key] = node
        return node

    def repeated(self, target: Any, args: Any, kwargs: Any, name: str, noted: Note, is_zero: bool) -> fx.Node:
        """Adds a node of the backward as another one that `call` made, with other operands.

        Args:
            name: the one that was asked for.
            noted: its note.
            is_zero: whether that was made of zeros.
        """
        node = insert_call(self._parameter, target, args, noted, name, **kwargs)
        self.flags[node] = (False,) * len(output_types(node))
        if is_zero:
            self._zeros.add(node)
        return node

    def is_zero(self, value: fx.Node) -> bool:
        """Returns whether a value was made of zeros."""
        return value in self._zeros

    def _again(self, node: fx.Node, phase: str) -> fx.Node:
        """Returns a conversion that is there already; it stands in the earliest phase that asks for it."""
        self.made.append(None)
        if note(node).phase == PARAMETER and phase == BACKWARD:
            if node is self._parameter:
                self._parameter = node.next
            self._parameter.prepend(node)
            update(node, phase=BACKWARD)
        return node

    def forward(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Any, at: fx.Node, random: int = 0
    ) -> fx.Node:
        """Adds a call in front of a node of the forward, from which it comes."""
        fx.node.map_arg((tuple(args), dict(kwargs)), lambda read: self._bring(read, at))
        with self.graph.inserting_before(at):
            short = getattr(target, "_opname", None)
            node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=short)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        self.flags[node] = carried_by(node, kinds, self.flags)
        self._note(node, kind, note(at), None, "", random)
        return node

    def _bring(self, number: fx.Node, at: fx.Node) -> fx.Node:
        """Puts a number in front of a node of the forward that reads it; it was made for the backward."""
        if isinstance(note(number).type, ScalarType) and (note(number).phase or at < number):
            for read in number.all_input_nodes:
                self._bring(read, at)
            at.prepend(number)
            update(number, phase="")
        return number

    def _note(
        self, node: fx.Node, kind: Any, like: Note, layouts: Sequence[Layout] | None, phase: str, random: int
    ) -> None:
        single = not isinstance(kind, tuple)
        place = {"fqn": like.fqn, "source": like.source, "recompute": like.recompute}
        set_note(node, Note(type=kind, phase=phase, random=random, **place))  # type: ignore[arg-type]
        if phase:
            self.flags[node] = (False,) * len(output_types(node))
        if Property.LAYOUTS not in self.program.properties:
            return
        if not self.program.axes:
            layouts = [Layout()] * len(output_types(node))
        if layouts is None:
            self._with_summands(node)
            layouts = self._inferred(node)
        update(node, layout=layouts[0] if single else tuple(layouts))
        if self.is_local:
            localize_node(self.program, node)

    def _inferred(self, node: fx.Node) -> Sequence[Layout]:
        """Returns the layouts by the rules; operands that the derivative made become what others ask for, at no cost.

        Raises:
            LayoutError: no rule knows the operation so laid out.
        """
        while True:
            known = {operand: output_layouts(operand) for operand in operands(node)}
            context = context_of(self.program, node, known, self.flags, self._row_wise, self._answers)
            try:
                return infer_node(node, context)
            except LayoutError:
                if not self._helped(node, context):
                    raise

    def _helped(self, node: fx.Node, context: Context) -> bool:
        """Converts an operand: zeros to summands, what all ranks hold to blocks that fit the others. Returns whether.

        Where nothing else is left, summands are added up.

        In the backward nothing carries a gradient: each rank may take its block of what all of them made.
        """
        inputs = operands(node)
        if node.target in COERCION_OF or any(len(output_types(operand)) != 1 for operand in inputs):
            return False
        step = next((step for step in steps(node, context) if isinstance(step.found, Refusal)), None)
        if step is None:
            return False
        rule = rule_for(step.call)
        if rule is None:
            return self._summed(node, step.axis)
        whole = [i for i, placement in enumerate(step.operands) if placement == R and not context.carries[i]]
        # Zeros first: as summands they stand for nothing on any rank, and no value changes.
        for i in whole:
            if inputs[i] in self._zeros and self._fits(step, context, {i: P}):
                self._convert(node, {i: P}, r_to_p, step.axis)
                return True
        for other, placement in enumerate(step.operands):
            signature = seed_signature(rule, step.call, other, placement.plain) if placement.is_shard else Refusal("")
            if isinstance(signature, Refusal):
                continue
            # Blocks next: each rank takes a part of what it has, which sends nothing.
            changed = {i: signature.operands[i] for i in whole if signature.operands[i].is_shard}
            if changed and self._fits(step, context, changed):
                self._convert(node, changed, r_to_s, step.axis)
                return True
        return self._summed(node, step.axis)

    def _summed(self, node: fx.Node, axis: str) -> bool:
        """Adds up summands for an operation of the backward that takes none. Returns whether there were any."""
        axes, before = self.program.axes, operands(node)
        inputs = list(before)
        for i, operand in enumerate(before):
            (layout,) = output_layouts(operand)
            if layout.on(axis) != P or not note(node).phase:
                continue
            way = conversions(layout, spelled(layout.with_(axis, R), axes), axes, False, self.program.plan.cost)
            for step in way or ():
                axis_name = "-".join(step.axes)
                key = (step.row.operator, (inputs[i],), axis_name, (step.layout,), True)
                if key in self._conversions:
                    inputs[i] = self._again(self._conversions[key], note(node).phase)
                    continue
                self.made.append(None)
                with self.graph.inserting_before(node):
                    new = self.graph.create_node("call_function", step.row.operator, (inputs[i],), {"axis": axis_name})
                self._note(new, output_types(operand)[0], note(node), [step.layout], note(node).phase, 0)
                self._conversions[key] = inputs[i] = new
        with_operands(node, inputs)
        return inputs != before

    @staticmethod
    def _fits(step: AxisInference, context: Context, changed: Mapping[int, Placement]) -> bool:
        placements = [changed.get(i, placement) for i, placement in enumerate(step.operands)]
        return not isinstance(judged(step.call, placements, context), Refusal)

    def _convert(self, node: fx.Node, changed: Mapping[int, Placement], operator_: Any, axis: str) -> None:
        inputs = operands(node)
        self.made.append(None)
        for i, placement in changed.items():
            (layout,), (kind,) = output_layouts(inputs[i]), output_types(inputs[i])
            target_layout = self._with(layout, axis, placement, kind)
            key = (operator_, (inputs[i],), axis, (target_layout,), bool(note(node).phase))
            new = self._conversions.get(key)
            if new is None:
                with self.graph.inserting_before(node):
                    new = self.graph.create_node("call_function", operator_, (inputs[i],), {"axis": axis})
                self._conversions[key] = new
                if not note(node).phase:
                    self.flags[new] = (False,)
                self._note(new, kind, note(node), [target_layout], note(node).phase, 0)
            if inputs[i] in self._zeros:  # they become summands of the next axis too
                self._zeros.add(new)
            inputs[i] = new
        with_operands(node, inputs)

    def _with(self, layout: Layout, axis: str, placement: Placement, kind: TensorType) -> Layout:
        """Returns the layout of what was whole on an axis: a rank takes one block, inside of all other cuts."""
        axes = self.program.axes
        inner = innermost(layout, axes, (axis,))
        if inner is not None and placement.piece is not None and str(placement) == f"S({placement.dim})":
            length = local_shape(kind.shape, inner, axes)[placement.dim]
            return spelled(inner.with_(axis, shard(placement.dim, length)), axes)
        return spelled(layout.with_(axis, placement), axes)

    def _with_summands(self, node: fx.Node) -> None:
        """Makes zeros next to summands those of one rank: what is added to a sum is added once."""
        inputs = operands(node)
        if not self._zeros.intersection(inputs) or node.target in (operator.getitem, r_to_p):
            return
        for axis in self.program.axes:
            placements = [layout.on(axis) for o in inputs for layout in output_layouts(o)]
            # Next to shards of the dimension along which parts are joined they are a segment that all ranks hold.
            joined = node.target is aten.cat.default and any(self._joins(node, p) for p in placements)
            if any(p.kind == "P" or p.partial for p in placements) or joined:
                changed = {i: P for i, o in enumerate(inputs) if o in self._zeros and placements[i] == R}
                self._convert(node, changed, r_to_p, axis)
                inputs = operands(node)

    @staticmethod
    def _joins(node: fx.Node, placement: Placement) -> bool:
        rank, dim = len(output_types(operands(node)[0])[0].shape), bind_arguments(node).get("dim", 0)
        return placement.is_shard and placement.dim == int(dim) % rank

    def zeros_like(self, value: fx.Node, like: Note) -> fx.Node:
        """Returns zeros of the shape of a value of the forward."""
        shared = any(p.is_shared for layout in output_layouts(value) for _, p in layout)
        target: Any = zeros if shared else aten.zeros_like.default
        return self.made_of_zeros(self.call(target, (value,), {}, output_types(value)[0], like))

    def made_of_zeros(self, value: fx.Node) -> fx.Node:
        """Remembers that a value is zero: all that ranks hold of it are summands of it as well."""
        self._zeros.add(value)
        return value

    def is_cut(self, value: fx.Node, dim: int) -> bool:
        """Returns whether an axis cuts a dimension of a value."""
        return any(p.is_shard and p.dim == dim for layout in output_layouts(value) for _, p in layout)

    def added(self, first: fx.Node, second: fx.Node, like: Note) -> fx.Node:
        """Returns the sum of two gradients of one value."""
        return self.call(aten.add.Tensor, (first, second), {}, output_types(first)[0], like)

    # ------------------------------------------------------------------ layouts

    def as_gradient(self, gradient: fx.Node, layout: Layout, like: Note) -> fx.Node:
        """Returns a gradient of a value of that layout, held as the dual of it.

        Raises:
            PassError: nothing converts it to that.
        """
        if not self.program.axes or Property.LAYOUTS not in self.program.properties:
            return gradient
        dual, (actual,) = dual_layout(layout), output_layouts(gradient)
        if actual == dual:
            return gradient
        way = conversions(actual, dual, self.program.axes, False, self.program.plan.cost)
        if way is None:
            raise PassError(
                f"the gradient of what is {layout} is {actual} and must be {dual}",
                where=f"%{gradient.name} ({like.fqn}, {like.source})",
                remedy="split the operation otherwise (option split), or write it with others",
            )
        for step in way:
            kind = output_types(gradient)[0]
            kwargs = {"axis": "-".join(step.axes)}
            gradient = self.call(step.row.operator, (gradient,), kwargs, kind, like, layouts=[step.layout])
        return gradient

    # ------------------------------------------------------------------ numbers

    def number(self, size: Size) -> Any:
        """Returns a size of the whole: an int, or the node of a number.

        Raises:
            PassError: nothing in the program gives its symbols.
        """
        size = simplify(size)
        if isinstance(size, int):
            return size
        if size not in self._numbers:
            self._numbers[size] = self._made(size)
        return self._numbers[size]

    def _made(self, size: sympy.Expr) -> fx.Node:
        if isinstance(size, sympy.Symbol):
            return self._symbol(str(size))
        if isinstance(size, (sympy.Mul, sympy.Pow)):
            # Longest first, so that a product that is there already is used before its factors.
            for known in sorted(self._numbers, key=lambda factor: -len(str(factor))):
                rest = divide(size, known)
                if rest is not None and rest != size and str(rest) != str(size):
                    return self._arithmetic(operator.mul, (self._numbers[known], self.number(rest)), size)
        operation = last_operation(size)
        if operation is None:
            raise PassError(f"the size {size} is not arithmetic in sizes of inputs", where="differentiate")
        name, *sizes = operation
        return self._arithmetic(SIZE_FUNCTIONS[name], tuple(map(self.number, sizes)), size)

    def _symbol(self, name: str) -> fx.Node:
        known = next(s for s in self.program.symbols if s.name == name)
        source = self.program.node(next(i.node for i in self.program.inputs if i.path == known.path))
        cut = any(p.is_shard and p.dim == known.dim for layout in output_layouts(source) for _, p in layout)
        target = size_of_whole if cut else aten.sym_size.int
        whole = self._numbers.get(known.size) or self._arithmetic(target, (source, known.dim), known.size)
        self._numbers[known.size] = whole
        if known.multiple == 1:
            return whole
        return self._arithmetic(operator.floordiv, (whole, known.multiple), simplify(known.size / known.multiple))

    def _arithmetic(self, function: Any, args: tuple[Any, ...], size: Size) -> fx.Node:
        return insert_call(self._parameter, function, args, Note(type=ScalarType(size), phase=BACKWARD))
