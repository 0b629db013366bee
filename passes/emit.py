"""Adds typed nodes of the backward to a program: layouts by the rules, sizes as numbers, literals as a rank's."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.choice.batch import declared
from fxpar.errors import PassError
from fxpar.layout.layout import Layout
from fxpar.layout.symbols import Size, divide, simplify
from fxpar.ops.coercions import dual_layout, mask_first
from fxpar.ops.sizes import size as size_of_whole
from fxpar.passes.localize import localize_node
from fxpar.program.coercions import dual
from fxpar.program.program import (
    Note,
    Program,
    ScalarType,
    has_note,
    note,
    operands,
    output_layouts,
    output_node,
    output_types,
    set_note,
    update,
)
from fxpar.program.properties import Property
from fxpar.program.step import BACKWARD, PARAMETER
from fxpar.rules.conversion import conversions
from fxpar.rules.inference import context_of, infer_node

aten = torch.ops.aten


class Emitter:
    """Creates nodes in the graph of a program.

    Backward nodes stand behind those of the forward, and nodes of the parameter phase behind these.
    """

    def __init__(self, program: Program, flags: dict[fx.Node, tuple[bool, ...]]) -> None:
        """`flags` are as of `carried`; forward nodes that are made are added."""
        self.program, self.graph, self.flags = program, program.graph, flags
        self.is_local = Property.LOCAL in program.properties
        self._row_wise = declared(program)
        self._end = output_node(self.graph)
        self._parameter: fx.Node = self._end
        self._numbers: dict[Size, fx.Node] = {}
        self._zeros: set[fx.Node] = set()
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
        phase: str = BACKWARD,
        name: str = "",
        random: int = 0,
    ) -> fx.Node:
        """A call with its note; its arguments are those of the whole.

        Args:
            kind: type of the result, a tuple of several.
            like: note of the forward node that it comes from.
            layouts: of the results, where they do not follow by rules.
            random: identity of what draws.
        """
        with self.graph.inserting_before(self._end if phase == PARAMETER else self._parameter):
            node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=name or None)
        if phase == PARAMETER and self._parameter is self._end:
            self._parameter = node
        self._note(node, kind, like, layouts, phase, random)
        return node

    def forward(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: Any, at: fx.Node, random: int = 0
    ) -> fx.Node:
        """A call in front of a node of the forward, from which it comes."""
        with self.graph.inserting_before(at):
            node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs))
        kinds = kind if isinstance(kind, tuple) else (kind,)
        flows = any(any(self.flags[o]) for o in operands(node))
        self.flags[node] = tuple(flows and each.is_float for each in kinds)
        if target is operator.getitem:
            self.flags[node] = (self.flags[args[0]][args[1]],)
        self._note(node, kind, note(at), None, "", random)
        return node

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
            known = {operand: output_layouts(operand) for operand in operands(node)}
            layouts = infer_node(node, context_of(self.program, node, known, self.flags, self._row_wise))
        update(node, layout=layouts[0] if single else tuple(layouts))
        if self.is_local:
            localize_node(self.program, node)

    def _with_summands(self, node: fx.Node) -> None:
        """Zeros beside summands are those of one rank: what is added to a sum is added once."""
        inputs = operands(node)
        if not self._zeros.intersection(inputs) or node.target in (operator.getitem, mask_first):
            return
        joins = node.target is aten.cat.default
        for axis in self.program.axes:
            held = [layout.on(axis) for o in inputs for layout in output_layouts(o)]
            if any(p.kind == "P" or (joins and p.is_shard) for p in held):
                for zeros in self._zeros.intersection(inputs):
                    (layout,) = output_layouts(zeros)
                    if layout.on(axis).kind == "R":
                        (kind,) = output_types(zeros)
                        with self.graph.inserting_before(node):
                            new = self.graph.create_node("call_function", mask_first, (zeros,), {"axis": axis})
                        wanted = [layout.with_(axis, dual(layout.on(axis)))]
                        self._note(new, kind, note(node), wanted, note(node).phase, 0)
                        node.replace_input_with(zeros, new)

    def zeros_like(self, value: fx.Node, like: Note) -> fx.Node:
        """Zeros of the shape of a value of the forward."""
        found = self.call(aten.zeros_like.default, (value,), {}, output_types(value)[0], like)
        self._zeros.add(found)
        return found

    def is_cut(self, value: fx.Node, dim: int) -> bool:
        """Whether an axis cuts a dimension of a value."""
        return any(p.is_shard and p.dim == dim for layout in output_layouts(value) for _, p in layout)

    def added(self, first: fx.Node, second: fx.Node, like: Note, phase: str = BACKWARD) -> fx.Node:
        """The sum of two gradients of one value."""
        return self.call(aten.add.Tensor, (first, second), {}, output_types(first)[0], like, phase=phase)

    # ------------------------------------------------------------------ layouts

    def as_gradient(self, gradient: fx.Node, layout: Layout, like: Note) -> fx.Node:
        """A gradient of a value of that layout, held as the dual of it.

        Raises:
            PassError: nothing converts it to that.
        """
        if not self.program.axes or Property.LAYOUTS not in self.program.properties:
            return gradient
        wanted, (found,) = dual_layout(layout), output_layouts(gradient)
        if found == wanted:
            return gradient
        way = conversions(found, wanted, self.program.axes, False, self.program.plan.cost)
        if way is None:
            raise PassError(
                f"the gradient of what is {layout} is {found} and must be {wanted}",
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
        """A size of the whole: an int, or the node of a number.

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
        if isinstance(size, sympy.floor):
            numerator, denominator = sympy.fraction(sympy.together(size.args[0]))
            return self._arithmetic(operator.floordiv, (self.number(numerator), self.number(denominator)), size)
        if isinstance(size, sympy.Mul):
            for known in sorted(self._numbers, key=lambda each: -len(str(each))):
                rest = divide(size, known)
                if rest is not None and rest != size and str(rest) != str(size):
                    return self._arithmetic(operator.mul, (self._numbers[known], self.number(rest)), size)
        function = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(size.func)
        if function is None:
            raise PassError(f"the size {size} is no sum or product of sizes of inputs", where="differentiate")
        first, *rest = size.args
        return self._arithmetic(function, (self.number(size.func(*rest)), self.number(first)), size)

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
        with self.graph.inserting_before(self._parameter):
            node = self.graph.create_node("call_function", function, args)
        return set_note(node, Note(type=ScalarType(size), phase=BACKWARD))
