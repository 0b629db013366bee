"""interleave_halves: two half batches on one rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import fx

from fxpar.errors import PlanError
from fxpar.layout.layout import Layout, Placement
from fxpar.layout.nesting import listed, peel, spelled
from fxpar.manager import register_pass
from fxpar.mesh.purpose import HALF, Cuts
from fxpar.ops.coercions import (
    all_gather,
    all_reduce,
    copy_to,
    gather,
    reduce_from,
    settle,
    share,
    split,
    sum_gradients,
    take,
)
from fxpar.ops.random import axis_index, dropout, part_index
from fxpar.ops.sizes import size
from fxpar.passes.half_parts import joined, taken_apart
from fxpar.plan.halves import AUTO
from fxpar.program.coercions import axes_of
from fxpar.program.copying import copy_node
from fxpar.program.halves import OF_SIZES, SIZES_ALONE
from fxpar.program.program import (
    Note,
    Program,
    ScalarType,
    TensorType,
    describe,
    module_of,
    note,
    operands,
    output_layouts,
    output_types,
    set_note,
    tensor_type,
    update,
)
from fxpar.program.properties import Property
from fxpar.program.rows import batch_symbol

aten = torch.ops.aten

HALVES = 2
_NAMES = ("first", "second")
_REMEDY = "leave interleave_halves out"


def in_halves(program: Program) -> Program:
    """The program for as many ranks as there are half batches, where the plan asks for them.

    Where the ranks' rows are odd it is the plan without: they are computed whole.

    Raises:
        PlanError: the number of rows is fixed, and even; or the plan leaves open whether there are halves.
    """
    plan = program.plan
    if plan.interleave_halves == AUTO:
        remedy = "run the pass choose_halves before, or say True or False"
        raise PlanError("whether there are halves is open", where="interleave_halves", remedy=remedy)
    if not plan.interleave_halves:
        return program
    shapes = [entry.type.shape for entry in program.inputs if entry.type.shape]
    whole = program.with_(plan=plan.replace(interleave_halves=False, half=1))
    if not program.symbols and all(shape[0] in (1, plan.data_ranks) for shape in shapes):
        return whole
    try:
        name = batch_symbol(program)
    except PlanError as error:
        remedy = f"say which dimensions are the rows (batch_dims={{path: dim}}), or {_REMEDY}"
        raise PlanError(error.reason, where="interleave_halves", remedy=remedy) from None
    rows = next(s.example for s in program.symbols if s.name == name)
    if rows % (plan.data_ranks // plan.half * HALVES):
        return whole
    return program.with_(plan=plan.replace(half=HALVES))


def _has_halves(program: Program) -> bool:
    """the plan computes half batches, and the rows are even"""
    return program.plan.half > 1


@register_pass("interleave_halves", requires={Property.LOCAL}, when=_has_halves)
def interleave_halves(program: Program) -> Program:
    """One rank computes both halves of its batch, which stood for two ranks so far.

    Before (tp 2)::

        %x = input["x"] : f32[2*b, 8] half:S(0) tp:R
        %y = aten.mm.default(%x, %w) : f32[2*b, 8] half:S(0) tp:P
        %y_sum = fxpar.reduce_from[tp](%y) : f32[2*b, 8] half:S(0) tp:P→I
        %n = aten.sum.default(%y_sum) : f32[] half:P tp:I
        %n_sum = fxpar.reduce_from[half](%n) : f32[] half:P→I tp:I

    After::

        %x = input["x"] : f32[2*b, 8] tp:R
        %x_parts = aten.unflatten.int(%x, 0, [2, -1]) : f32[2, b, 8] tp:R
        %x_first = aten.select.int(%x_parts, 0, 0) : f32[b, 8] tp:R {origin="first half"}
        %x_second = aten.select.int(%x_parts, 0, 1) : f32[b, 8] tp:R {origin="second half"}
        %y_first = aten.mm.default(%x_first, %w) : f32[b, 8] tp:P
        %y_second = aten.mm.default(%x_second, %w) : f32[b, 8] tp:P
        %y_sum_first = fxpar.reduce_from[tp](%y_first) : f32[b, 8] tp:P→I
        %y_sum_second = fxpar.reduce_from[tp](%y_second) : f32[b, 8] tp:P→I
        %n_first = aten.sum.default(%y_sum_first) : f32[] tp:I
        %n_second = aten.sum.default(%y_sum_second) : f32[] tp:I
        %n_sum = aten.add.Tensor(%n_first, %n_second) : f32[] tp:I

    While one half's collective travels the other half computes; see the pass `overlap`, which orders a step so. The
    axis `half` cuts the batch as data ranks do, inside of these, so that means, counts, layouts and draws are those of
    the whole.

    Terms: a value is *in halves* where the axis cuts it, holds summands of it, or differs on it; it has two nodes then.
    What is I or R on the axis has one, which both halves read; of operands in halves such a value takes sizes alone.

    Algorithm: nodes in order. A coercion over `half` is what stands in its table; one over more axes is that, and then
    the collective over the others. A draw is told which part of the batch it draws for (`fxpar.part_index`). The
    program is the plan's own then, whose mesh has no such axis.

    Values stay equal. Refuses operators that communicate over the batch in other ways, and halves that are no two runs
    of rows.
    """
    return _Unrolled(program).program()


class _Unrolled:
    """The program that is being written."""

    def __init__(self, before: Program) -> None:
        self.before, self.axes = before, before.axes
        self.others = {axis: n for axis, n in before.axes.items() if axis != HALF}
        self.names = {node.name for node in before.graph.nodes}
        self.graph = fx.Graph()
        self.made: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.wholes: dict[fx.Node, fx.Node] = {}
        self.part_indices: dict[tuple[int, int], fx.Node] = {}

    def program(self) -> Program:
        placeholders = self.before.placeholders().values()
        for node in placeholders:
            self.made[node] = (self._copied(node, 0, node.name),)
            update(self.made[node][0], layout=self._without(output_layouts(node)[0]))
        for node in placeholders:
            (self.wholes[node],) = self.made[node]
            if self._on_half(node).is_shard:
                self.made[node] = taken_apart(self.graph, self.made[node][0], self._cut(node), _NAMES, self.others)
        for node in self.before.graph.nodes:
            if node.op == "call_function" and node not in self.made:
                self.made[node] = self._of(node)
            elif node.op == "output":
                self.graph.output(tuple(self._whole(each) for each in node.args[0]))
        plan = self.before.plan.replace(half=1)
        return self.before.with_(graph_module=module_of(self.graph), plan=plan)

    # ------------------------------------------------------------------ one node

    def _of(self, node: fx.Node) -> tuple[fx.Node, ...]:
        axes = axes_of(node)
        if HALF in axes:
            return self._crossing(node, "-".join(axis for axis in axes if axis != HALF))
        if node.target is size:
            return (self._size(node),)
        if isinstance(note(node).type, ScalarType):
            return (self._copied(node, 0, node.name),)
        if not any(layout.on(HALF).kind in "SPV" for layout in output_layouts(node)):
            return (self._kept_whole(node),)
        if note(node).random and any(layout.on(HALF).kind == "P" for layout in output_layouts(node)):
            return self._drawn_of_sum(node)
        return tuple(self._kept(node, i, self._name(node, i)) for i in range(HALVES))

    def _kept_whole(self, node: fx.Node) -> fx.Node:
        """What both halves read; of what is in halves it takes sizes alone."""
        new = self._kept(node, 0, node.name)
        if any(len(self.made[read]) > 1 for read in operands(node)):
            if node.target not in OF_SIZES:
                self._refuse(node, "makes something whole of the two halves")
            update(new, origin=SIZES_ALONE)
        return new

    def _drawn_of_sum(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What draws the same bits for the summands of both halves: of their sum, and zeros."""
        source = operands(node)[0]
        if node.target is not dropout or len(self.made[source]) == 1:
            self._refuse(node, "draws for summands of both halves")
        total = self._added(source, f"{node.name}_halves", note(source), output_layouts(source)[0])
        before = self.made[source]
        self.made[source] = (total,)
        drawn = self._kept(node, 0, self._name(node, 0))
        self.made[source] = before
        # What adds nothing, in the same layout; it carries a gradient, which zeros would not.
        zero = self.graph.create_node("call_function", aten.mul.Tensor, (drawn, 0), name=self._name(node, 1))
        return drawn, set_note(zero, replace(note(drawn), random=0))

    def _name(self, node: fx.Node, half: int) -> str:
        """Of one half of a value; no other node's."""
        name = f"{node.name}_{_NAMES[half]}"
        while name in self.names:
            name += "_half"
        return name

    def _copied(self, node: fx.Node, half: int, name: str) -> fx.Node:
        made = {read: self.made[read][half if len(self.made[read]) > 1 else 0] for read in node.all_input_nodes}
        return copy_node(self.graph, node, made, name)

    def _kept(self, node: fx.Node, half: int, name: str) -> fx.Node:
        """The operation on one half, or on what both have."""
        indices = [read for read in operands(node) if read.target is axis_index and HALF in axes_of(read)]
        if indices:
            part = self._part_index(self._cut(operands(node)[0], of_draw=True).dim, half)
            self.made |= dict.fromkeys(indices, (part,))
        new = self._copied(node, half, name)
        kinds, layouts = zip(*(self._half(node, i) for i in range(len(output_types(node)))), strict=True)
        several = isinstance(note(node).type, tuple)
        return update(new, type=kinds if several else kinds[0], layout=layouts if several else layouts[0])

    def _part_index(self, dim: int, half: int) -> fx.Node:
        """The index of a half for draws that it cuts in a dimension."""
        if (dim, half) not in self.part_indices:
            new = self.graph.create_node(
                "call_function", part_index, (half, HALVES, dim), name=f"part_{_NAMES[half]}_of_{dim}"
            )
            layout = self._without(Layout.of(dict.fromkeys(self.axes, Placement("R"))))
            self.part_indices[dim, half] = set_note(new, Note(type=TensorType(torch.int64, ()), layout=layout))
        return self.part_indices[dim, half]

    def _size(self, node: fx.Node) -> fx.Node:
        """The size of the whole, off one of its halves."""
        (source,), dim = operands(node), int(node.args[1])  # type: ignore[arg-type]
        if len(self.made[source]) == 1:
            return self._copied(node, 0, node.name)
        if source in self.wholes:
            return copy_node(self.graph, node, self.wholes, node.name)
        cut = self._on_half(source)
        if not cut.is_shard or cut.dim != dim:
            return self._copied(node, 0, node.name)
        part = self._copied(node, 0, f"{node.name}_half")
        kind = note(node).type
        assert isinstance(kind, ScalarType)
        update(part, type=ScalarType(self._half(source, 0)[0].shape[dim]))
        new = self.graph.create_node("call_function", operator.mul, (part, HALVES), name=node.name)
        return set_note(new, note(node))

    # ------------------------------------------------------------------ coercions

    def _crossing(self, node: fx.Node, rest: str) -> tuple[fx.Node, ...]:
        """What communicates over halves; `rest` are the other axes over which it does."""
        if node.target is axis_index:
            return ()  # draws have their own
        if node.target is sum_gradients:
            return self._bucket(node, rest)
        made = _COERCIONS.get(node.target)
        if made is None or (rest and made in _OF_SHARDS):
            self._refuse(node, "communicates over the batch in a way that halves have not")
        found = made(self, node)
        if not rest:
            return found
        kwargs = {**node.kwargs, "axis": rest}
        return tuple(self._over_others(node, each, kwargs, i, len(found)) for i, each in enumerate(found))

    def _over_others(self, node: fx.Node, value: fx.Node, kwargs: Mapping[str, Any], half: int, count: int) -> fx.Node:
        name = node.name if count == 1 else self._name(node, half)
        new = self.graph.create_node("call_function", node.target, (value,), dict(kwargs), name=name)
        kind, layout = self._half(node, 0) if count > 1 else (tensor_type(node), self._without(output_layouts(node)[0]))
        return set_note(new, replace(note(node), type=kind, layout=layout))

    def _bucket(self, node: fx.Node, rest: str) -> tuple[fx.Node, ...]:
        if rest:
            new = self._copied(node, 0, node.name.replace(f"{HALF}_", "").replace(f"-{HALF}", ""))
            new.kwargs = {**node.kwargs, "axis": rest}
            update(new, layout=tuple(self._without(layout) for layout in output_layouts(node)))
            return (new,)
        for item in node.users:
            index = int(item.args[1])  # type: ignore[arg-type]
            self.made[item] = self.made[operands(node)[index]]
        return ()

    def same(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Both halves read what is there."""
        return self.made[operands(node)[0]]

    def summed(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The summands of the halves, added."""
        source = operands(node)[0]
        is_all = axes_of(node) == (HALF,)
        name = node.name if is_all else f"{node.name}_halves"
        return (self._added(source, name, note(node), output_layouts(node if is_all else source)[0]),)

    def _added(self, source: fx.Node, name: str, like: Note, layout: Layout) -> fx.Node:
        """The sum of the halves' summands."""
        new = self.graph.create_node("call_function", aten.add.Tensor, self.made[source], name=name)
        return set_note(new, replace(like, type=tensor_type(source), layout=self._without(layout), random=0))

    def parts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Each half's rows of what is whole."""
        (whole,) = self.made[operands(node)[0]]
        return taken_apart(self.graph, whole, self._cut(node), _NAMES, self.others)

    def gathered(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The rows of both halves."""
        source = operands(node)[0]
        return (self._joined(source, node.name),)

    # ------------------------------------------------------------------ layouts

    def _on_half(self, node: fx.Node, output: int = 0) -> Placement:
        return output_layouts(node)[output].on(HALF)

    def _outermost(self, node: fx.Node, layout: Layout) -> Layout:
        """The layout with halves listed first."""
        found = listed(layout, self.axes, [HALF, *(axis for axis, _ in layout if axis != HALF)])
        if found is None:
            self._refuse(node, f"is {layout}, whose halves are no parts of the whole")
        return found

    def _without(self, layout: Layout) -> Layout:
        """The layout of a value that no half cuts."""
        return Layout(tuple((axis, placement) for axis, placement in layout if axis != HALF))

    def _half(self, node: fx.Node, output: int) -> tuple[TensorType, Layout]:
        """Type and layout of one half of a value."""
        kind, layout = output_types(node)[output], output_layouts(node)[output]
        if not layout.on(HALF).is_shard:
            return kind, self._without(layout)
        first = self._outermost(node, layout)
        shape = peel(kind.shape, first.on(HALF), HALVES)
        return TensorType(kind.dtype, shape), spelled(self._without(first), self.others)

    def _cut(self, node: fx.Node, *, of_draw: bool = False) -> Placement:
        """How halves cut what data ranks leave of a value: one run."""
        layout = output_layouts(node)[0]
        data = [axis for axis in self.before.plan.axes_for(Cuts.BATCH) if axis != HALF]
        rest = [axis for axis, _ in layout if axis not in (*data, HALF)]
        found = listed(layout, self.axes, [*data, HALF, *rest])
        cut = None if found is None else found.on(HALF)
        if cut is None or cut.piece is None or cut.piece.outer != 1 or not cut.piece.is_plain:
            what = "draws for" if of_draw else "is"
            self._refuse(node, f"{what} {layout}, of which a half is no run of rows")
        return cut

    def _whole(self, node: fx.Node) -> fx.Node:
        """An output, put together where it is in halves; of an input that is the input."""
        if node not in self.wholes:
            (first, *others) = self.made[node]
            self.wholes[node] = self._joined(node, node.name) if others else first
        return self.wholes[node]

    def _joined(self, node: fx.Node, name: str) -> fx.Node:
        if not self._on_half(node).is_shard:
            self._refuse(node, f"is {output_layouts(node)[0]}, of which the halves are no parts")
        whole = TensorType(tensor_type(node).dtype, tensor_type(node).shape), self._without(output_layouts(node)[0])
        return joined(self.graph, self.made[node], self._cut(node), whole, name, self.others)

    def _refuse(self, node: fx.Node, reason: str) -> NoReturn:
        raise PlanError(f"interleave_halves: {reason}", where=describe(node), remedy=_REMEDY)


_COERCIONS: Mapping[Any, Callable[[_Unrolled, fx.Node], tuple[fx.Node, ...]]] = {
    **dict.fromkeys((copy_to, settle, share), _Unrolled.same),
    **dict.fromkeys((reduce_from, all_reduce), _Unrolled.summed),
    **dict.fromkeys((split, take), _Unrolled.parts),
    **dict.fromkeys((gather, all_gather), _Unrolled.gathered),
}
_OF_SHARDS = (_Unrolled.parts, _Unrolled.gathered)
