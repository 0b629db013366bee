"""Chunks of tokens: a value in parts that a rank computes one after the other, and the value of which these are.

Enters: nothing. Leaves: the records of `fxpar.take_chunk`, `join_chunks`, `add_chunks` and `chunk_size`; and `merged`,
a program without chunks.

Rows of the batch are cut: of b rows, chunk c of C has those from floor(c b / C) to floor((c + 1) b / C), none where
there are fewer rows than chunks. Where data ranks share the batch out, each of them cuts the rows that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxpar.errors import CheckFailed
from fxpar.ir.grad_flow import plain
from fxpar.ir.program import (
    Program,
    ScalarType,
    TensorType,
    copy_node,
    describe,
    module_of,
    note,
    operands,
    output_layouts,
    output_types,
    tensor_type,
    update,
)
from fxpar.ir.step import batch_symbol
from fxpar.layout.layout import Layout, Placement
from fxpar.layout.symbolic_sizes import Size, divide, simplify, symbol
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import LoweredCall, OnShapes, Operator, torch_operator
from fxpar.ops.small_operators import chunks_added
from fxpar.signatures.engine import Refusal, Rule, Signature
from fxpar.signatures.op_call import OpCall

# ---------------------------------------------------------------------- what a rank runs


def part_of(rows: int, index: int, count: int) -> tuple[int, int]:
    """Returns the first row of a chunk, and the first after it."""
    return rows * index // count, rows * (index + 1) // count


def chunk_taken(x: Tensor, dim: int, rows: int, index: int, count: int) -> Tensor:
    """Returns a view of the rows of one chunk."""
    begin, end = part_of(rows, index, count)
    unit = x.shape[dim] // rows
    return x.narrow(dim, unit * begin, unit * (end - begin))


def hint(size: int | torch.SymInt) -> int:
    """Returns a size of the example; nothing is asked of a symbolic one, which would be a guard."""
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size


def order_in_memory(x: Tensor) -> list[int]:
    """Returns the dimensions from the outermost on."""
    strides = [hint(stride) for stride in x.stride()]
    return sorted(range(x.dim()), key=lambda dim: -strides[dim])


def _put_together(chunks: Sequence[Tensor], dim: int) -> Tensor:
    # Attention gives the heads of a token beside each other, and its gradient reads them so.
    order = order_in_memory(chunks[0])
    if order == sorted(order) or order[0] != dim:
        return torch.cat(list(chunks), dim)
    whole = torch.cat([chunk.permute(order) for chunk in chunks])
    return whole.permute([order.index(dim) for dim in range(len(order))])


# A name of its own, so that what is compiled can let chunks be written where the whole has them.
joined_chunks = torch_operator("joined_chunks", fake=_put_together, direct=True)(_put_together)


def chunks_joined(chunks: Sequence[Tensor], dim: int) -> Tensor:
    """Returns the value of all chunks."""
    return joined_chunks(chunks, dim)


def chunk_sized(rows: int, multiple: int, index: int, count: int) -> int:
    """Returns how many of the rows a chunk has, of several groups as many each."""
    begin, end = part_of(rows // multiple, index, count)
    return multiple * (end - begin)


# ---------------------------------------------------------------------- rules and shapes


def _seed(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    dim = int(call.get("dim"))
    if placement.dim != dim:
        return Signature((placement,) * len(call.operands), (placement,) * len(call.outputs))
    piece, size = placement.piece, call.operands[index].shape[dim]
    if piece is None or not piece.is_plain:
        return Refusal(f"the chunks of {placement} are not as the ranks hold rows")

    def cut(kind: TensorType) -> Placement | Refusal:
        """Returns the blocks of each run as long in proportion; where there are several runs, as many in proportion."""
        part = divide(simplify((piece.size if piece.outer == 1 else piece.outer) * kind.shape[dim]), size)
        if part is None:
            return Refusal(f"a dimension of {kind.shape[dim]} is no chunk of {placement}", structural=True)
        new = replace(piece, size=part) if piece.outer == 1 else replace(piece, outer=part)
        return replace(placement, pieces=(new,))

    cuts = [cut(kind) for kind in (*call.operands, *call.outputs)]
    for one in cuts:
        if isinstance(one, Refusal):
            return one
    return Signature(tuple(cuts[: len(call.operands)]), tuple(cuts[len(call.operands) :]))  # type: ignore[arg-type]


def _seed_sum(call: OpCall, index: int, placement: Placement) -> Signature:
    return Signature((placement,) * len(call.operands), (placement,))


def _on_shapes(call: OnShapes) -> Tensor:
    (out,) = call.outputs
    tensors = call.args[0] if isinstance(call.args[0], (list, tuple)) else [call.args[0]]
    dim = call.by_name.get("dim")
    for x in tensors:
        others = [(a, b) for d, (a, b) in enumerate(zip(x.shape, out.shape, strict=False)) if d != dim]
        if x.dim() != out.dim() or x.dtype != out.dtype or any(a != b for a, b in others):
            raise ValueError(
                f"{list(x.shape)} of {x.dtype} and {list(out.shape)} of {out.dtype} are no chunk and whole"
            )
    return out


def _size_on_shapes(call: OnShapes) -> int:
    rows, multiple, index, count = call.args
    return chunk_sized(int(rows), multiple, index, count)


def _lowered(function: Callable[..., Any]) -> Callable[[fx.Node, OnRank], LoweredCall]:
    def lower(node: fx.Node, rank: OnRank) -> LoweredCall:
        return LoweredCall(function, node.args)

    return lower


@partial(
    Operator,
    rule=Rule(seed=_seed, partial=(("self",),), padding=("self",)),
    shape=_on_shapes,
    like=torch.ops.aten.slice.Tensor,
    lower=_lowered(chunk_taken),
)
def take_chunk(self: Any, dim: int, rows: Any, index: int, count: int) -> Any:
    """Takes the rows of one chunk.

    Args:
        self: the values of all rows.
        dim: the dimension of the rows, of each as many elements.
        rows: how many a rank has.
        index: number of the chunk.
        count: how many there are.
    """


@partial(
    Operator,
    rule=Rule(seed=_seed, partial=(("chunks",),), padding=("chunks",)),
    shape=_on_shapes,
    lower=_lowered(chunks_joined),
)
def join_chunks(chunks: Any, dim: int) -> Any:
    """Puts the rows of all chunks together.

    Args:
        chunks: in order.
        dim: the dimension of the rows.
    """


@partial(
    Operator,
    rule=Rule(seed=_seed_sum, partial=(("chunks",),), padding=("chunks",)),
    shape=_on_shapes,
    lower=_lowered(chunks_added),
)
def add_chunks(chunks: Any) -> Any:
    """Adds what was computed of each chunk.

    Args:
        chunks: in order.
    """


@partial(Operator, shape=_size_on_shapes, lower=_lowered(chunk_sized))
def chunk_size(rows: Any, multiple: int, index: int, count: int) -> Any:
    """Returns how many rows one chunk has.

    Args:
        rows: how many there are.
        multiple: groups of rows, each of which is cut.
        index: number of the chunk.
        count: how many there are.
    """


# ---------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Chunk:
    """One of the chunks of all rows.

    Attributes:
        rows: the symbol of their number.
        index: of the chunk.
        count: of all chunks.
    """

    rows: sympy.Symbol
    index: int
    count: int

    def size(self, whole: Size) -> Size:
        """Returns a size that is proportional to the number of rows, as the chunk has it."""
        return _size_of_chunk(self, whole)

    def whole(self, size: Size) -> Size:
        """Returns the size of which `size` gives this one."""
        return _size_of_whole(self, size)

    @property
    def bounds(self) -> tuple[sympy.Expr, sympy.Expr]:
        """Returns the first row, and the first after the chunk."""
        first, last = (sympy.floor(self.rows * i / self.count) for i in (self.index, self.index + 1))
        return first, last


@lru_cache(maxsize=65536)
def _size_of_chunk(chunk: Chunk, whole: Size) -> Size:
    begin, end = chunk.bounds
    return simplify(sympy.sympify(whole).subs(chunk.rows, end - begin))


@lru_cache(maxsize=65536)
def _size_of_whole(chunk: Chunk, size: Size) -> Size:
    begin, end = chunk.bounds
    values = ({begin: sympy.Integer(0)} if chunk.index else {}) | ({end: chunk.rows} if end != chunk.rows else {})
    return simplify(sympy.sympify(size).subs(values, simultaneous=True))


def resized(kind: TensorType, layout: Layout, dim: int, resize: Callable[[Size], Size]) -> tuple[TensorType, Layout]:
    """Returns type and layout of a value with another number of rows.

    Args:
        dim: the dimension of the rows, which axes cut in equal runs if they do.
        resize: the size of that dimension, and the number or size of the runs.
    """
    shape = (*kind.shape[:dim], resize(kind.shape[dim]), *kind.shape[dim + 1 :])
    placements = {}
    for axis, placement in layout:
        if placement.is_shard and placement.dim == dim:
            pieces = (replace(p, outer=resize(p.outer), size=resize(p.size)) for p in placement.pieces)
            placement = replace(placement, pieces=tuple(pieces))
        placements[axis] = placement
    return TensorType(kind.dtype, shape), Layout.of(placements)


# ---------------------------------------------------------------------- a program without chunks

CHUNKED = frozenset({take_chunk, join_chunks, add_chunks, chunk_size})

# In place of a dimension, of an output that is summed over the rows.
SUMMED = -1

# Of a node that is computed in chunks: of each tensor among its operands the dimension of the rows, None of what each
# chunk reads whole; and that of each output.
RowDims = tuple[tuple[int | None, ...], tuple[int, ...]]


def merged(program: Program) -> tuple[Program, dict[fx.Node, RowDims]]:
    """Returns the program that computes all rows at once, and the nodes of it that are computed in chunks.

    That an operation treats rows apart is not seen here: its rule says so (`fxpar.rewrite.row_cuts`).

    Raises:
        CheckFailed: what is put together is not the same of each chunk; names the node.
    """
    if not any(node.target in CHUNKED for node in program.graph.nodes):
        return program, {}
    graph = fx.Graph()
    merging = _Merging(graph, symbol(batch_symbol(program)))
    for node in program.graph.nodes:
        merging.add(node)
    return program.with_(graph_module=module_of(graph)), merging.chunked


@dataclass(frozen=True)
class _ChunkOf:
    """What a node is one chunk of.

    Attributes:
        whole: the node of all rows.
        chunk: which one.
        dims: of each output the dimension of the rows, or `SUMMED`.
    """

    whole: fx.Node
    chunk: Chunk
    dims: tuple[int, ...]


@dataclass
class _Merging:
    """The values of the program so far.

    Attributes:
        graph: of the program without chunks.
        rows: the symbol of the rows.
        chunked: its nodes of which there are chunks.
    """

    graph: fx.Graph
    rows: sympy.Symbol
    chunked: dict[fx.Node, RowDims] = field(default_factory=dict)
    _copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _parts: dict[fx.Node, _ChunkOf] = field(default_factory=dict)
    # What computes the same: nodes of the whole, the first of each, and how many of them each chunk has so far.
    _alike: dict[Hashable, list[fx.Node]] = field(default_factory=dict)
    _firsts: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _counts: Counter[tuple[Hashable, int]] = field(default_factory=Counter)

    def add(self, node: fx.Node) -> None:
        if node.target in (take_chunk, chunk_size):
            self._parts[node] = self._taken(node)
        elif node.target in (join_chunks, add_chunks):
            self._copies[node] = self._put_together(node)
        else:
            chunks = {self._parts[read].chunk for read in node.all_input_nodes if read in self._parts}
            if chunks and node.op == "output":
                part = next(read for read in node.all_input_nodes if read in self._parts)
                raise CheckFailed("is returned, one chunk alone", where=describe(part), remedy="join_chunks of all")
            if len(chunks) > 1:
                raise CheckFailed("reads two chunks", where=describe(node), remedy="read one, or join_chunks of all")
            if chunks:
                self._parts[node] = self._part_of(node, *chunks)
            else:
                self._copies[node] = copy_node(self.graph, node, self._copies, node.name)

    def _taken(self, node: fx.Node) -> _ChunkOf:
        source: Any = node.args[0]
        index, count = (int(a) for a in node.args[-2:])  # type: ignore[arg-type]
        if source not in self._copies:
            raise CheckFailed("takes a chunk of a chunk", where=describe(node))
        if not 0 <= index < count:
            raise CheckFailed(f"there is no chunk {index} of {count}", where=describe(node))
        chunk = Chunk(self.rows, index, count)
        if node.target is chunk_size:
            kind, of, multiple = note(node).type, note(source).type, node.args[1]
            if not isinstance(of, ScalarType) or divide(of.value, self.rows) != multiple:
                raise CheckFailed(f"{of} is not {multiple} times the rows {self.rows}", where=describe(node))
            if kind != ScalarType(chunk.size(of.value)):
                raise CheckFailed(f"is {kind}, and not chunk {index} of {of}", where=describe(node))
            return _ChunkOf(self._copies[source], chunk, ())
        dim, rows = int(node.args[1]), node.args[2]  # type: ignore[arg-type]
        if not isinstance(rows, fx.Node) or note(rows).type != ScalarType(self.rows):
            raise CheckFailed(f"%{rows} is not the number of rows {self.rows}", where=describe(node))
        kind, layout = tensor_type(source), output_layouts(source)[0]
        if (
            tensor_type(node) != resized(kind, layout, dim, chunk.size)[0]
            or chunk.size(kind.shape[dim]) == kind.shape[dim]
        ):
            reason = f"{tensor_type(node)} is not chunk {index} of {count} of the rows in dimension {dim} of {kind}"
            raise CheckFailed(reason, where=describe(node))
        return _ChunkOf(self._copies[source], chunk, (dim,))

    def _put_together(self, node: fx.Node) -> fx.Node:
        items: Any = node.args[0]
        if not items:
            raise CheckFailed("puts no chunks together", where=describe(node), remedy="name all chunks")
        first = self._parts.get(items[0])
        for index, item in enumerate(items):
            part = self._parts.get(item)
            if part is None or first is None or (part.chunk.index, part.chunk.count) != (index, len(items)):
                raise CheckFailed(f"%{item.name} is not chunk {index} of {len(items)}", where=describe(node))
            if self._first(part.whole) is not self._first(first.whole):
                raise CheckFailed(
                    f"%{item.name} is computed in another way than %{items[0].name}",
                    where=describe(node),
                    remedy="compute the same of each chunk",
                )
        assert first is not None
        dim = node.args[1] if node.target is join_chunks else SUMMED
        if first.dims != (dim,):
            raise CheckFailed(f"the rows of %{items[0].name} are in dimension {first.dims[0]}", where=describe(node))
        return first.whole

    def _part_of(self, node: fx.Node, chunk: Chunk) -> _ChunkOf:
        """Returns of which node this one computes one chunk."""
        reads = {
            read: self._parts[read].whole if read in self._parts else self._copies[read]
            for read in node.all_input_nodes
        }
        types, dims = self._whole_types(node, chunk)
        arguments = plain((node.args, node.kwargs), lambda read: self._first(reads[read]))
        key = node.target, arguments, note(node).random, note(node).phase, dims
        # What a forward computes twice stays two nodes: each has a derivative.
        place, alike = self._counts[key, chunk.index], self._alike.setdefault(key, [])
        self._counts[key, chunk.index] += 1
        if place == len(alike):
            alike.append(update(copy_node(self.graph, node, reads, node.name), **types))
            self._firsts[alike[-1]] = alike[0]
            if dims:
                needs = [
                    dim
                    for read in operands(node)
                    for dim in (self._parts[read].dims if read in self._parts else [None] * len(output_types(read)))
                ]
                self.chunked[alike[-1]] = tuple(needs), dims
        return _ChunkOf(alike[place], chunk, dims)

    def _first(self, node: fx.Node) -> fx.Node:
        """Returns the first node that computes the same of each chunk as this one."""
        return self._firsts.get(node, node)

    def _whole_types(self, node: fx.Node, chunk: Chunk) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Returns type and layout of the whole, and the dimension of the rows of each output."""
        kind = note(node).type
        if isinstance(kind, ScalarType):
            return {"type": ScalarType(chunk.whole(kind.value))}, ()
        kinds, layouts, dims = list(output_types(node)), list(output_layouts(node)), list[int]()
        for i, (one, layout) in enumerate(zip(kinds, layouts, strict=True)):
            cut = [dim for dim, size in enumerate(one.shape) if chunk.whole(size) != size]
            if len(cut) > 1:
                raise CheckFailed(f"{one} has rows in several dimensions", where=describe(node))
            dims.append(cut[0] if cut else SUMMED)
            if cut:
                kinds[i], layouts[i] = resized(one, layout, cut[0], chunk.whole)
        several = isinstance(kind, tuple)
        types = (
            {"type": tuple(kinds), "layout": tuple(layouts)} if several else {"type": kinds[0], "layout": layouts[0]}
        )
        return types, tuple(dims)
