"""What a rank that has part of the rows would read otherwise, said in a way that it reads as one device does.

Enters: a program whose batch is divided. Leaves: the same values. `x[arange(b), i]` takes of each row its own part by a
`gather` along the row: the numbers of rows say nothing of a rank's. `x[:n]` of rows that were joined is a part of a
split. `x.squeeze()` names the dimensions of size 1: the
one row of a rank is none of them. Called by `divide_batch`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.elements.aten_elements import broadcast, elements
from fxpar.elements.numbers import Numbers, index
from fxpar.ir.program import (
    Program,
    ScalarType,
    TensorType,
    insert_call,
    note,
    operands,
    output_types,
    replace_node,
    tensor_type,
)
from fxpar.layout.symbolic_sizes import Size, divide, names, product, sign, simplify
from fxpar.rewrite.means import Counting, wide
from fxpar.rules import call_of
from fxpar.signatures.views import slice_bounds

# Norms of a batch that ranks share out, as sums and counts.

aten = torch.ops.aten
_NORM = aten._native_batch_norm_legit.no_stats


def divide_norms(graph: fx.Graph, batch: str) -> None:
    """Writes each norm of the batch by sums and counts; those of what has no rows stay.

    Args:
        batch: the symbol that is the number of rows.
    """
    for node in list(graph.nodes):
        if node.target is not _NORM:
            continue
        counting, shape = Counting(graph, node, batch), tensor_type(operands(node)[0]).shape
        if any(counting.varies(size) for dim, size in enumerate(shape) if dim != 1):
            _replace_norm(node, _Norm(counting).values())


def _replace_norm(node: fx.Node, values: Mapping[int, fx.Node]) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem, "a norm gives three values"
        value, name = values[int(user.args[1])], user.name  # type: ignore[arg-type]
        user.replace_all_uses_with(value)
        node.graph.erase_node(user)
        value.name = name
    node.graph.erase_node(node)


class _Norm:
    """One norm, `[_, C, …]`."""

    def __init__(self, counting: Counting) -> None:
        self._c = counting
        self._x: fx.Node = counting.given["input"]
        self._weight, self._bias = counting.given["weight"], counting.given["bias"]
        self._result, self._kind, _ = output_types(counting.node)
        self._rank = len(self._result.shape)

    def values(self) -> dict[int, fx.Node]:
        """Returns the result, the means, and one over the standard deviations."""
        c, kind = self._c, self._kind
        x = c.cast("wide", self._x, wide(self._result.dtype))
        full = tensor_type(x)
        count = self._count(x)
        mean = c.call("mean", aten.div.Tensor, (self._sum("sum", x), count), kind)
        centered = c.call("centered", aten.sub.Tensor, (x, self._along("means", mean)), full)
        squares = self._sum("squares", c.call("square", aten.mul.Tensor, (centered, centered), full))
        variance = c.call("variance", aten.div.Tensor, (squares, count), kind)
        positive = c.call("positive", aten.add.Tensor, (variance, c.given["eps"]), kind)
        inverse = c.call("inverse", aten.rsqrt.default, (positive,), kind)
        scale = inverse
        if self._weight is not None:
            scale = c.call("scale", aten.mul.Tensor, (inverse, c.cast("weight", self._weight, kind.dtype)), kind)
        result = c.call("scaled", aten.mul.Tensor, (centered, self._along("scales", scale)), full)
        if self._bias is not None:
            bias = self._along("biases", c.cast("bias", self._bias, kind.dtype))
            result = c.call("moved", aten.add.Tensor, (result, bias), full)
        return {0: c.cast("result", result, self._result.dtype), 1: mean, 2: inverse}

    def _sum(self, suffix: str, x: fx.Node) -> fx.Node:
        dims = [dim for dim in range(len(tensor_type(x).shape)) if dim != 1]
        return self._c.call(suffix, aten.sum.dim_IntList, (x, dims), self._kind)

    def _count(self, x: fx.Node) -> fx.Node:
        """Returns how many elements a channel has, for each: of dimensions of known sizes one element is looked at."""
        factor = 1
        # From the last dimension on: removing one does not shift those in front of it.
        for dim in reversed(range(2, self._rank)):
            kind = tensor_type(x)
            if isinstance(kind.shape[dim], int):
                factor *= kind.shape[dim]
                shape = (*kind.shape[:dim], *kind.shape[dim + 1 :])
                x = self._c.call("row", aten.select.int, (x, dim, 0), TensorType(kind.dtype, shape))
        kind = TensorType(self._kind.dtype, tensor_type(x).shape)
        ones = self._c.call("ones", aten.ones_like.default, (x,), kind, dtype=kind.dtype)
        total = self._sum("count", ones)
        return total if factor == 1 else self._c.call("elements", aten.mul.Tensor, (total, factor), self._kind)

    def _along(self, suffix: str, value: fx.Node) -> fx.Node:
        """Returns what is of channels, next to a value with dimensions after these."""
        if self._rank <= 2:
            return value
        kind = tensor_type(value)
        shape = [-1, *[1] * (self._rank - 2)]
        return self._c.call(
            suffix, aten.view.default, (value, shape), TensorType(kind.dtype, (*kind.shape, *shape[1:]))
        )


_MASKS = (torch.bool, torch.uint8)
_NEVER_NEGATIVE = frozenset({aten.argmax.default, aten.argmin.default})


def keep_rows(program: Program, batch: str) -> None:
    """Rewrites squeezes and indexings of values with rows.

    Args:
        program: is changed.
        batch: name of the symbol that is the batch.
    """
    for node in program.graph.nodes:
        if node.target is aten.squeeze.default and batch in names(tensor_type(node).shape):
            source = node.args[0]
            dims = [dim for dim, size in enumerate(tensor_type(source).shape) if size == 1]
            node.target, node.args = aten.squeeze.dims, (source, dims)
    _take_from_own_rows(program, batch)
    for node in list(program.graph.nodes):
        if node.target is aten.slice.Tensor and batch in names(tensor_type(node).shape):
            _take_apart(program, node)


def _take_apart(program: Program, node: fx.Node) -> None:
    """Writes a slice between bounds that are numbers of rows as a part of a split into parts of their own sizes.

    Before::

        %both = aten.cat.default([%chosen, %rejected]) : f32[4*b]
        %y = aten.slice.Tensor(%both, 0, %n) : f32[2*b]

    After::

        %y_parts = aten.split_with_sizes.default(%both, [%n, %n]) : (f32[2*b], f32[2*b])
        %y = getitem(%y_parts, 0) : f32[2*b]

    A rank's bounds would be others, and its parts are those of the whole divided by the ranks.
    """
    call = call_of(node, 1)
    shape = call.operands[0].shape
    dim = int(call.get("dim", 0)) % len(shape)
    start, end = slice_bounds(call, shape[dim])
    cuts = [start, simplify(end - start), simplify(shape[dim] - end)]
    sizes = [size for size in cuts if size != 0]
    if call.get("step", 1) != 1 or len(sizes) < 2 or any(isinstance(size, int) or sign(size) != 1 for size in sizes):
        return
    source = node.args[0]
    assert isinstance(source, fx.Node)
    numbers = [_number(program, node, size) for size in sizes]
    if None in numbers:
        return
    dtype, (before, after) = tensor_type(source).dtype, (shape[:dim], shape[dim + 1 :])
    kinds = tuple(TensorType(dtype, (*before, size, *after)) for size in sizes)
    split, noted = aten.split_with_sizes.default, replace(note(node), type=kinds)
    parts = insert_call(node, split, (source, numbers, dim), noted, f"{node.name}_parts")
    replace_node(node, insert_call(node, operator.getitem, (parts, int(start != 0)), note(node)))


def _number(program: Program, at: fx.Node, size: Size) -> Any:
    """Returns a size as an argument of a call: sums of products of sizes of inputs; None of others."""
    if isinstance(size, int):
        return size
    if size.is_Add:
        parts = [_number(program, at, term) for term in size.args]
        if None in parts:
            return None
        total, known = parts[0], size.args[0]
        for part, term in zip(parts[1:], size.args[1:], strict=True):
            known = simplify(known + term)
            total = _arithmetic(at, operator.add, (total, part), known)
        return total
    for symbol in program.symbols:
        rest = divide(size, symbol.size)
        if rest is None:
            continue
        entry = next(entry for entry in program.inputs if entry.path == symbol.path)
        whole = _arithmetic(at, aten.sym_size.int, (program.node(entry.node), symbol.dim), symbol.size)
        if rest == 1:
            return whole
        times = _number(program, at, rest)
        return None if times is None else _arithmetic(at, operator.mul, (whole, times), size)
    return None


def _arithmetic(at: fx.Node, target: Any, args: tuple[Any, ...], size: Size) -> fx.Node:
    return insert_call(at, target, args, replace(note(at), type=ScalarType(size)))


def _take_from_own_rows(program: Program, batch: str) -> None:
    """Rewrites each indexing in which one index is the number of the row, proved for every size.

    Before::

        %rows = aten.arange.default(%b) : i64[2*b]
        %y = aten.index.Tensor(%x, [%rows, %i]) : f32[2*b, 5]

    After::

        %y_at = aten.unsqueeze.default(%i, 1) : i64[2*b, 1]
        %y_of = aten.unsqueeze.default(%y_at, 2) : i64[2*b, 1, 1]
        %y_all = aten.expand.default(%y_of, [-1, -1, 5]) : i64[2*b, 1, 5]
        %y_own = aten.gather.default(%x, 1, %y_all) : f32[2*b, 1, 5]
        %y = aten.squeeze.dim(%y_own, 1) : f32[2*b, 5]

    The indices stand at the leading dimensions. Broadcast, they have the rows in front and at most one dimension more
    whose size is not 1. Several other indices become one, along their dimensions flattened; where an index may be
    negative the size is added. Where each index is the position in a dimension of its own, as in the masks of
    transformers (`mask[arange(b)[:, None], arange(s)]`), the result is a view.
    """
    indexings = [node for node in program.graph.nodes if node.target is aten.index.Tensor]
    indexings = [node for node in indexings if batch in names(tensor_type(node).shape[:1])]
    known = elements(program, program.graph.nodes) if indexings else {}
    for node in indexings:
        entries: Any = node.args[1]
        indices = [entry for entry in entries if entry is not None]
        kinds = [tensor_type(entry) for entry in indices]
        if indices == [*entries[: len(indices)]] and not any(kind.dtype in _MASKS for kind in kinds):
            new = _rewritten(_Indexing(program, node, indices), known)
            if new is not None:
                _replace(program, node, new)


def _replace(program: Program, node: fx.Node, new: fx.Node) -> None:
    """Puts `new` in the place of a node, with its name; what only the node used goes."""
    pending = [node]
    node.replace_all_uses_with(new)
    while pending:
        last = pending.pop()
        if last.op == "call_function" and not last.users and not note(last).random and last not in pending:
            pending += last.all_input_nodes
            program.graph.erase_node(last)
    if new.name.startswith(f"{node.name}_"):
        new.name = node.name


class _Indexing:
    """An indexing, and operations in front of it, with its place in the author's code."""

    def __init__(self, program: Program, node: fx.Node, indices: Sequence[fx.Node]) -> None:
        self.program, self.node, self.indices = program, node, indices
        source = node.args[0]
        assert isinstance(source, fx.Node)
        self.x = source
        shape = tensor_type(node).shape
        self.common = shape[: len(shape) - len(tensor_type(source).shape) + len(indices)]

    def position_of(self, place: int, element: Any) -> int | None:
        """Returns the dimension of the broadcast indices whose position an index is, if it is as long as its own."""
        if element is None:
            return None
        spread = broadcast(element, tensor_type(self.indices[place]).shape, self.common)
        leaves = [leaf for _, leaf in spread.cases] if isinstance(spread, Numbers) else []
        size = tensor_type(self.x).shape[place]
        return next((d for d, length in enumerate(self.common) if length == size and leaves == [index(d)]), None)

    def call(
        self, suffix: str, target: Any, args: tuple[Any, ...], kind: TensorType | ScalarType, **more: Any
    ) -> fx.Node:
        """Adds an operation with a type."""
        noted = replace(note(self.node), type=kind)
        return insert_call(self.node, target, args, noted, f"{self.node.name}_{suffix}", **more)

    def view(self, suffix: str, target: Any, x: fx.Node, argument: Any, shape: Sequence[Size]) -> fx.Node:
        """Returns a view of `x` by an operator of one more argument."""
        return self.call(suffix, target, (x, argument), TensorType(tensor_type(x).dtype, tuple(shape)))

    def size(self, x: fx.Node, dim: int) -> int | fx.Node:
        """Returns the size of a dimension as an argument; off an input where one has it, for inputs are whole."""
        size = tensor_type(x).shape[dim]
        if isinstance(size, int):
            return size
        for symbol in self.program.symbols:
            if symbol.size == size:
                entry = next(entry for entry in self.program.inputs if entry.path == symbol.path)
                x, dim = self.program.node(entry.node), symbol.dim
        return self.call("size", aten.sym_size.int, (x, dim), ScalarType(size))


def _rewritten(indexing: _Indexing, known: Mapping[fx.Node, Any]) -> fx.Node | None:
    """Returns the value without indices of rows; None where none is proved to be one, or shapes differ."""
    positions = [indexing.position_of(place, known.get(entry)) for place, entry in enumerate(indexing.indices)]
    if 0 not in positions:
        return None
    wide = [dim for dim, size in enumerate(indexing.common) if dim and size != 1]
    if None not in positions and len(set(positions)) == len(positions) and {*wide} <= {*positions}:
        return _viewed(indexing, [dim for dim in positions if dim is not None])
    place = positions.index(0)
    others = [entry for other, entry in enumerate(indexing.indices) if other != place]
    spread: tuple[Size, ...] = (1,) * len(indexing.common)
    for entry in others:
        spread = _broadcast(spread, tensor_type(entry).shape)
    if len(wide) > 1 or not others or spread[1:] != tuple(indexing.common[1:]):
        return None
    return _gathered(
        indexing, _in_order(indexing, [place, *(p for p in range(len(positions)) if p != place)]), others, wide
    )


def _in_order(indexing: _Indexing, order: Sequence[int]) -> fx.Node:
    """Returns what is indexed, its leading dimensions in an order."""
    shape = tensor_type(indexing.x).shape
    dims = [*order, *range(len(order), len(shape))]
    if dims == sorted(dims):
        return indexing.x
    return indexing.view("rows", aten.permute.default, indexing.x, dims, [shape[dim] for dim in dims])


def _unsqueezed(indexing: _Indexing, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    """Adds dimensions of size 1 at places of the result, in ascending order."""
    for dim in dims:
        shape = tensor_type(x).shape
        x = indexing.view("of", aten.unsqueeze.default, x, dim, (*shape[:dim], 1, *shape[dim:]))
    return x


def _viewed(indexing: _Indexing, positions: Sequence[int]) -> fx.Node:
    x = _in_order(indexing, sorted(range(len(positions)), key=positions.__getitem__))
    return _unsqueezed(indexing, x, [dim for dim in range(len(indexing.common)) if dim not in positions])


def _gathered(indexing: _Indexing, x: fx.Node, others: Sequence[fx.Node], wide: Sequence[int]) -> fx.Node:
    """Gathers from `x`, the rows in front; `wide` is the dimension of the indices after the rows that has a size."""
    shape, rank = tensor_type(x).shape, len(indexing.common)
    rest = shape[1 + len(others) :]
    at = _position(indexing, x, others)
    at = _unsqueezed(indexing, at, range(rank - len(tensor_type(at).shape)))
    kept_dim = wide[0] if wide else 1
    units = [dim for dim in range(1, rank) if dim != kept_dim]
    if units:
        sizes = [size for dim, size in enumerate(tensor_type(at).shape) if dim not in units]
        at = indexing.view("flat", aten.squeeze.dims, at, units, sizes)
    elif rank == 1:
        at = _unsqueezed(indexing, at, [1])
    at = _unsqueezed(indexing, at, [2 + dim for dim in range(len(rest))])
    before = tensor_type(at).shape
    after = (shape[0], before[1], *rest)
    if before != after:
        sizes = [
            -1 if a == b else indexing.size(x, dim + (dim > 1) * (len(others) - 1))
            for dim, (a, b) in enumerate(zip(before, after, strict=True))
        ]
        at = indexing.view("all", aten.expand.default, at, sizes, after)
    if len(others) > 1:
        flat = (shape[0], product(shape[1 : 1 + len(others)]), *rest)
        kind = TensorType(tensor_type(x).dtype, flat)
        x = indexing.call("joined", aten.flatten.using_ints, (x, 1, len(others)), kind)
    taken = indexing.call("own", aten.gather.default, (x, 1, at), TensorType(tensor_type(x).dtype, after))
    if rank == 1:
        return indexing.view("row", aten.squeeze.dim, taken, 1, (after[0], *rest))
    return _unsqueezed(indexing, taken, units)


def _position(indexing: _Indexing, x: fx.Node, others: Sequence[fx.Node]) -> fx.Node:
    """Returns where in its row, the dimensions of the others flattened, each result stands: i64."""
    at, *more = (_from_start(indexing, x, dim, entry) for dim, entry in enumerate(others, 1))
    for dim, entry in enumerate(more, 2):
        kind = tensor_type(at)
        scaled = indexing.call("scaled", aten.mul.Tensor, (at, indexing.size(x, dim)), kind)
        both = TensorType(torch.int64, _broadcast(kind.shape, tensor_type(entry).shape))
        at = indexing.call("flat_at", aten.add.Tensor, (scaled, entry), both)
    return at


def _broadcast(one: Sequence[Size], other: Sequence[Size]) -> tuple[Size, ...]:
    rank = max(len(one), len(other))
    pairs = zip((*(1,) * (rank - len(one)), *one), (*(1,) * (rank - len(other)), *other), strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


def _from_start(indexing: _Indexing, x: fx.Node, dim: int, entry: fx.Node) -> fx.Node:
    """Returns an index that counts from the start: `gather` knows no others."""
    shape = tensor_type(entry).shape
    kind = TensorType(torch.int64, shape)
    if tensor_type(entry).dtype != torch.int64:
        entry = indexing.call("long", aten._to_copy.default, (entry,), kind, dtype=torch.int64)
    if entry.target in _NEVER_NEGATIVE:
        return entry
    is_back = indexing.call("is_back", aten.lt.Scalar, (entry, 0), TensorType(torch.bool, shape))
    later = indexing.call("later", aten.add.Tensor, (entry, indexing.size(x, dim)), kind)
    return indexing.call("from_start", aten.where.self, (is_back, later, entry), kind)
