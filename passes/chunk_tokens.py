"""chunk_tokens: sums of one chunk of tokens travel while another is computed."""

from __future__ import annotations

import operator
from typing import Any

import sympy
from torch import fx

from fxpar.errors import PlanError
from fxpar.ir.operators import in_backward
from fxpar.ir.program import (
    Input,
    Note,
    Program,
    ScalarType,
    changed,
    copy_node,
    has_note,
    insert_call,
    note,
    operands,
    output_layouts,
    output_types,
    update,
    with_operands,
)
from fxpar.ir.properties import Property
from fxpar.ir.step import batch_dims, batch_symbol
from fxpar.layout.layout import Layout
from fxpar.layout.symbolic_sizes import divide, symbol
from fxpar.manager import register_pass
from fxpar.ops.operator import is_view
from fxpar.ops.small_operators import size
from fxpar.ops.token_chunks import SUMMED, Chunk, add_chunks, chunk_size, join_chunks, resized, take_chunk
from fxpar.rewrite.chunk_choice import Chosen, ChunkChoice, cheapest, chunk_prices, depends, stages, step_of
from fxpar.rewrite.row_cuts import RowCut
from fxpar.signatures.op_call import SIZED


def _is_asked_for(program: Program) -> bool:
    """communication.token_chunks is not 1"""
    return program.plan.communication.token_chunks != 1


@register_pass("chunk_tokens", requires={Property.STEP, Property.LOCAL}, preserves="dataflow", when=_is_asked_for)
def chunk_tokens(program: Program) -> Program:
    """Computes what stands between operations that mix rows of the batch in chunks of these, one after the other.

    Before::

        %h = aten.mm.default(%x, %w) : f32[b, 8] tp:P
        %h_sum = fxpar.all_reduce[tp](%h) : f32[b, 8] tp:P→R
        %y = aten.mm.default(%h_sum, %v) : f32[b, 4] tp:S(1)

    After (2 chunks)::

        %x_chunk0 = fxpar.take_chunk(%x, 0, %b, 0, 2) : f32[floor(b/2), 6] tp:S(1)
        %h_chunk0 = aten.mm.default(%x_chunk0, %w) : f32[floor(b/2), 8] tp:P
        %h_sum_chunk0 = fxpar.all_reduce[tp](%h_chunk0) : f32[floor(b/2), 8] tp:P→R
        %x_chunk1 = fxpar.take_chunk(%x, 0, %b, 1, 2) : f32[b - floor(b/2), 6] tp:S(1)
        %h_chunk1 = aten.mm.default(%x_chunk1, %w) : f32[b - floor(b/2), 8] tp:P
        %h_sum_chunk1 = fxpar.all_reduce[tp](%h_chunk1) : f32[b - floor(b/2), 8] tp:P→R
        %y_chunk0 = aten.mm.default(%h_sum_chunk0, %v) : f32[floor(b/2), 4] tp:S(1)
        %y_chunk1 = aten.mm.default(%h_sum_chunk1, %v) : f32[b - floor(b/2), 4] tp:S(1)
        %y = fxpar.join_chunks([%y_chunk0, %y_chunk1], 0) : f32[b, 4] tp:S(1)

    A sum is waited for in front of its first reader. So the products of one chunk run while another chunk's sum is on
    its way, where a whole layer would wait.

    Terms: an operation *treats rows apart* if its rule says so of the rows of the batch (`fxpar.rewrite.row_cuts`), as
    that of attention does, and if it draws nothing. In a backward, where gradients of weights hide what is sent, those
    of attention stay whole all the same, as other products of two activations do. A *chain* is what stands between
    others in one phase and is connected. A *stage* of it ends with collectives over axes that do not cut the batch;
    it is *heavy* if it has products. A *sum over rows* adds up what it computes of them: a weight's gradient, say.

    Algorithm: chosen is what stands between two collectives, and in front of and after each one what leads up to its
    products; and in backwards the sums over rows of what is chosen, which would else have to be put together for them.
    The heavy stages of a chain are computed one after the other, each chunk by chunk. What stands between
    them, a norm say, follows the next chunk's heavy stage: its sum has had that much time to arrive. Whatever else
    there is keeps its order, and follows as soon as what it needs is there: sums over rows when the last chunk is.

    With `auto`, numbers of chunks are priced for each phase (`fxpar.rewrite.chunk_choice`), and phases where none pays
    stay whole; so does attention where its chunks do not pay. One row is computed as it is. Values stay equal: put
    together, the chunks are what was there.

    Raises:
        PlanError: the number of rows may not vary, or inputs differ in it.
    """
    if all(entry.type.shape[dim] == 1 for entry, dim in _rows(program)):
        return program
    rows = _rows_of(program)
    count, choice = program.plan.communication.token_chunks, ChunkChoice(program, rows)
    chosen = choice.chosen()
    if not isinstance(count, int):
        count, phases, attention = cheapest(chunk_prices(program, rows, choice))
        chosen = choice.chosen(phases, attention=attention)
    return _Chunked(program, rows, count, chosen).written() if chosen.cuts else program


def _rows(program: Program) -> list[tuple[Input, int]]:
    """Returns the inputs that have rows, with the dimension of these."""
    dims = batch_dims(program)
    return [(entry, dims[entry.path]) for entry in program.inputs if entry.path in dims]


def _rows_of(program: Program) -> sympy.Symbol:
    """Returns the symbol of the number of rows.

    Raises:
        PlanError: no input has a number of rows that may vary, or two have different ones.
    """
    try:
        return symbol(batch_symbol(program))
    except PlanError as error:
        remedy = error.remedy.rpartition(", or set ")[0]
        raise PlanError(
            error.reason, where="communication.token_chunks", remedy=f"{remedy}, or set token_chunks=1"
        ) from error


# ---------------------------------------------------------------------- the program in chunks


# When something runs: the chain's place in the program, the step within the chain, and the place of the node.
_Time = tuple[int, float, int]
_START: _Time = (-1, 0.0, 0)


class _Chunked:
    """The program with what is chosen in chunks."""

    def __init__(self, program: Program, rows: sympy.Symbol, count: int, chosen: Chosen) -> None:
        self._program, self._chosen = program, chosen
        self._all = [Chunk(rows, index, count) for index in range(count)]
        self._nodes: list[fx.Node] = list(program.graph.nodes)
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._stages = stages(self._nodes, chosen)
        self._times: dict[fx.Node, _Time] = {}
        # When what a chunk sends is there: the next heavy stage has taken it.
        self._arrivals: dict[fx.Node, _Time] = {}
        self._chunks: dict[fx.Node, list[fx.Node]] = {}
        self._wholes: dict[fx.Node, fx.Node] = {}
        # The last chunk of what is late, for each.
        self._late: dict[fx.Node, fx.Node] = {}
        # Chunks of values in some dimension, for readers of a phase; and of numbers.
        self._taken: dict[tuple[fx.Node, int, int, str], fx.Node] = {}
        self._rows = self._row_count(rows)

    def written(self) -> Program:
        """Returns it."""
        cuts = self._chosen.cuts
        again = self._again()
        for node in cuts:
            self._chunks[node] = [self._chunk(node, chunk) for chunk in self._all]
            if node in self._chosen.late:
                last = self._chunks[node][-1]
                self._late |= dict.fromkeys(self._chunks[node], last)
            if node not in again and any(user in again or not self._stays(node, user) for user in node.users):
                self._wholes[node] = self._joined(node)
        for node, whole in self._wholes.items():
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in cuts or user in again)
        for node in reversed([node for node in cuts if node not in again]):
            name = node.name
            node.graph.erase_node(node)
            if node in self._wholes:
                self._wholes[node].name = name
        self._order()
        return self._program

    def _again(self) -> set[fx.Node]:
        """Returns what is computed once more of all rows, as what it reads is put together anyway.

        That is little beside a product, and the backward needs it: what is compiled computes it there, where else
        chunks would be kept for it. What a product of a chunk reads is in memory as it is. Of a view, what it shows is
        put together: products write that where the whole has it.
        """
        cuts, again = self._chosen.cuts, set[fx.Node]()
        whole = {node for node in cuts if not all(self._stays(node, user) for user in node.users)}
        for node in reversed(list(cuts)):
            if node in whole and is_view(node) and self._is_light(node):
                whole.update(read for read in operands(node) if read in cuts)
        for node in cuts:
            reads = [read for read in operands(node) if read in cuts]
            if node not in whole or not reads or not whole.issuperset(reads) or not self._is_light(node):
                continue
            if is_view(node) or self._chosen.products.isdisjoint(node.users):
                again.add(node)
        return again

    def _is_light(self, node: fx.Node) -> bool:
        """Returns whether a node is neither a product, nor communicates, nor has a tuple or a part of one as result."""
        heavy = self._chosen.products | self._chosen.sends | self._chosen.late
        return node not in heavy and node.target is not operator.getitem and not isinstance(note(node).type, tuple)

    def _row_count(self, rows: sympy.Symbol) -> fx.Node:
        """Returns the node that is the number of a rank's rows."""
        early: dict[fx.Node, None] = dict.fromkeys(node for node in self._nodes if node.op == "placeholder")
        for node in self._nodes:
            kind = note(node).type if has_note(node) else None
            if isinstance(kind, ScalarType) and not note(node).phase and early.keys() >= set(node.all_input_nodes):
                early[node] = None
        for node in early:
            if node.op == "call_function" and note(node).type == ScalarType(rows):
                return node
        entry, dim = _rows(self._program)[0]
        source = self._program.node(entry.node)
        first = next(node for node in self._nodes if node.op == "call_function")
        whole = insert_call(first, size, (source, dim), Note(ScalarType(entry.type.shape[dim])), f"{rows}_whole")
        multiple = divide(entry.type.shape[dim], rows)
        if multiple == 1:
            return whole
        return insert_call(first, operator.floordiv, (whole, multiple), Note(ScalarType(rows)), str(rows))

    def _stays(self, node: fx.Node, user: fx.Node) -> bool:
        """Returns whether a chunk of the user reads the same chunk of a node."""
        cuts = self._chosen.cuts
        if user not in cuts:
            return False
        if user.target is operator.getitem:
            return True
        needs = [need for read, need in self._needs(user) if read is node]
        return all(need == cuts[node].outputs[0] for need in needs)

    def _needs(self, node: fx.Node) -> list[tuple[fx.Node, int | None]]:
        """Returns the tensor operands of what has no tuple among them, with the dimension of the rows of each."""
        return list(zip(operands(node), self._chosen.cuts[node].operands, strict=True))

    def _chunk(self, node: fx.Node, chunk: Chunk) -> fx.Node:
        """Adds what computes one chunk of a node in front of it."""
        cut, graph = self._chosen.cuts[node], node.graph
        if node.target is operator.getitem:
            reads = [self._chunks[node.args[0]][chunk.index]]  # type: ignore[index]
        else:
            reads = [self._read(node, read, need, chunk) for read, need in self._needs(node)]
        numbers = self._numbers(node, cut, chunk)
        with graph.inserting_before(node):
            new = copy_node(graph, node, {n: n for n in node.all_input_nodes}, f"{node.name}_chunk{chunk.index}")
        with_operands(new, reads)
        if numbers is not None:
            at = SIZED[node.target]  # type: ignore[index]
            new.args = (*new.args[:at], numbers, *new.args[at + 1 :])
        kinds, layouts = list(output_types(node)), list(output_layouts(node))
        for i, dim in enumerate(cut.outputs):
            if dim != SUMMED:
                kinds[i], layouts[i] = resized(kinds[i], layouts[i], dim, chunk.size)
        if isinstance(note(node).type, tuple):
            update(new, type=tuple(kinds), layout=tuple(layouts))
        else:
            update(new, type=kinds[0], layout=layouts[0])
        return self._timed(new, node, chunk.index)

    def _read(self, node: fx.Node, read: fx.Node, need: int | None, chunk: Chunk) -> fx.Node:
        """Returns what a chunk of a node reads of an operand: its chunk, or the whole."""
        if read in self._chunks and self._stays(read, node):
            return self._chunks[read][chunk.index]
        whole = self._wholes.get(read, read)
        if need is None:
            return whole
        key = whole, need, chunk.index, note(node).phase
        if key not in self._taken:
            kind, layout = resized(output_types(read)[0], output_layouts(read)[0], need, chunk.size)
            if note(node).phase:  # nothing carries a gradient there
                layout = Layout(tuple((axis, in_backward(placement)) for axis, placement in layout))
            noted = Note(kind, layout, fqn=note(node).fqn, source=note(node).source, phase=note(node).phase)
            arguments = (whole, need, self._rows, chunk.index, chunk.count)
            new = insert_call(node, take_chunk, arguments, noted, f"{read.name}_chunk{chunk.index}")
            self._taken[key] = self._timed(new, node, chunk.index)
        return self._taken[key]

    def _numbers(self, node: fx.Node, cut: RowCut, chunk: Chunk) -> list[Any] | None:
        """Returns the sizes that a view is given, with the chunk's number of rows; None of what is given none."""
        if node.target not in SIZED:
            return None
        sizes: Any = list(node.args[SIZED[node.target]])  # type: ignore[index, arg-type]
        (dim,) = cut.outputs
        if isinstance(sizes[dim], fx.Node):
            sizes[dim] = self._number(node, sizes[dim], chunk)
        return list(sizes)

    def _number(self, node: fx.Node, size: fx.Node, chunk: Chunk) -> fx.Node:
        """Returns a number that depends on the rows, as a chunk has it."""
        key = size, SUMMED, chunk.index, ""
        if key not in self._taken:
            kind: Any = note(size).type
            noted = Note(ScalarType(chunk.size(kind.value)), fqn=note(node).fqn, phase=note(node).phase)
            name = f"{size.name}_chunk{chunk.index}"
            parts = [read for read in size.all_input_nodes if depends(read, chunk.rows)]
            if parts:
                replaced = {read: self._number(node, read, chunk) for read in parts}
                arguments = tuple(replaced.get(a, a) if isinstance(a, fx.Node) else a for a in size.args)
                new = insert_call(node, size.target, arguments, noted, name)
            else:
                multiple = divide(kind.value, chunk.rows)
                new = insert_call(node, chunk_size, (size, multiple, chunk.index, chunk.count), noted, name)
            self._taken[key] = self._timed(new, node, chunk.index)
        return self._taken[key]

    def _joined(self, node: fx.Node) -> fx.Node:
        """Adds the whole of what is computed in chunks."""
        (dim,), parts = self._chosen.cuts[node].outputs, list(self._chunks[node])
        noted = changed(note(node), role="", recompute=0)
        if dim == SUMMED:
            new = insert_call(node, add_chunks, (parts,), noted, f"{node.name}_whole")
        else:
            new = insert_call(node, join_chunks, (parts, dim), noted, f"{node.name}_whole")
        if node in self._chosen.late:
            self._places[new] = self._places[node]
            return new
        self._times[new] = self._arrivals.get(parts[-1], self._times[parts[-1]])
        return new

    # ------------------------------------------------------------------ order

    def _timed(self, new: fx.Node, node: fx.Node, index: int) -> fx.Node:
        """Notes when something runs that is computed for a chunk of a node; what is late waits for what it reads."""
        if node in self._chosen.late:
            self._places[new] = self._places[node]
            return new
        start, heavy, is_heavy = self._stages[node]
        self._times[new] = start, step_of(heavy, index, is_heavy, len(self._all)), self._places[node]
        if node in self._chosen.sends:
            self._arrivals[new] = start, (heavy + is_heavy + 1) * len(self._all) - 0.75, self._places[node]
        return new

    def _order(self) -> None:
        """Orders what runs by time, each after what it reads.

        What is not in chunks, or late, runs when the last chunk that it reads is there: weight gradients wait for sums
        with those of the same layer (`fxpar.passes.overlap`), and not after them.
        """
        graph = self._program.graph
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        chunks: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            if node not in self._times:
                alike = (read for read in node.all_input_nodes if note(read).phase == note(node).phase)
                times = (self._arrivals.get(read, self._times.get(read, _START)) for read in alike)
                late = [time for time in times if time[1]]
                self._times[node] = max(late, default=(self._places.get(node, -1), 0.0, 0))
            if node in self._late:
                together = chunks.setdefault(self._late[node], [])
                together.append(node)
                time = max(map(self._times.__getitem__, together))
                self._times |= dict.fromkeys(together, time)
        behind = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
        placed: set[fx.Node] = set()
        for node in sorted(nodes, key=self._times.__getitem__):
            stack = [node]
            while stack:
                last = stack[-1]
                missing = [n for n in last.all_input_nodes if n.op == "call_function" and n not in placed]
                stack += missing
                if not missing:
                    stack.pop()
                    if last not in placed:
                        placed.add(last)
                        behind.append(last)
                        behind = last
