"""canonicalize: one spelling for what the later passes look at."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import CaptureError, PassError
from fxpar.experts.compiler.choices import argument, plain
from fxpar.experts.compiler.emitter import Emitter
from fxpar.ir.program import (
    Program,
    ScalarType,
    TensorType,
    insert_call,
    is_tensor,
    name_sizes,
    note,
    output_types,
    remove_dead,
    tensor_type,
    update,
)
from fxpar.ir.properties import Property
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.manager import register_pass
from fxpar.rewrite.loss_reduction import add_losses
from fxpar.rules import bind_arguments

# Values that are written where a mask is true, as a choice between two values.

aten = torch.ops.aten


def choose_by_masks(program: Program) -> None:
    """Rewrites the writes, in place.

    Before::

        %put = aten.index_put.default(%x, [%mask], %v) : f32[b, s, 96]

    After::

        %at = aten.unsqueeze.default(%mask, 2) : bool[b, s, 1]
        %put = aten.where.self(%at, %v, %x) : f32[b, s, 96]
    """
    writes = list(program.graph.find_nodes(op="call_function", target=aten.index_put.default))
    for node in writes:
        arguments = bind_arguments(node)
        x, values, mask = arguments["self"], arguments["values"], _mask(node)
        if mask is None:
            continue
        before = next(dim for dim, entry in enumerate(arguments["indices"]) if entry is not None)
        behind = len(tensor_type(x).shape) - before - len(tensor_type(mask).shape)
        # The number of true places is no size of a program, and so a value for each of them has no type here.
        if len(tensor_type(values).shape) > behind and tensor_type(values).shape[-behind - 1] != 1:
            continue  # a value for each true place
        for _ in range(behind):
            mask = _with_dimension(node, mask, len(tensor_type(mask).shape))
        for _ in range(len(tensor_type(mask).shape) - behind - 1 if len(tensor_type(values).shape) > behind else 0):
            values = _with_dimension(node, values, len(tensor_type(values).shape) - behind)
        if arguments.get("accumulate", False):
            values = insert_call(node, aten.add.Tensor, (x, values), note(node))
        node.target, node.args, node.kwargs = aten.where.self, (mask, values, x), {}


def _mask(node: fx.Node) -> fx.Node | None:
    """Returns the mask of a write whose only index it is, with dimensions of `x` before and after it or without."""
    entries = [entry for entry in bind_arguments(node)["indices"] if entry is not None]
    if len(entries) != 1 or not isinstance(entries[0], fx.Node) or tensor_type(entries[0]).dtype != torch.bool:
        return None
    return entries[0]


def _with_dimension(node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    kind = tensor_type(x)
    noted = replace(note(node), type=TensorType(kind.dtype, (*kind.shape[:dim], 1, *kind.shape[dim:])), random=0)
    return insert_call(node, aten.unsqueeze.default, (x, dim), noted)


_DROPPED = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_async.msg,
        aten._assert_async.default,
        aten._assert_scalar.default,
        aten.sym_constrain_range_for_size.default,
        aten.sym_constrain_range.default,
    }
)
_CONVOLUTIONS = frozenset(
    overload for packet in (aten.conv1d, aten.conv2d, aten.conv3d) for overload in (packet.default, packet.padding)
)
_SAME = frozenset({aten.alias.default, aten.lift_fresh_copy.default, aten.lift.default})
# What nothing has written holds any values: zeros are such, and the same on every rank.
_EMPTY: Mapping[Any, Any] = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_strided.default: aten.zeros.default,
    aten.empty_permuted.default: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
    aten.new_empty_strided.default: aten.new_zeros.default,
}
_VIEWS = {aten._unsafe_view.default: aten.view.default}
# Which give a value and its place along a dimension.
_PLACES = (aten.topk.default, aten.max.dim, aten.min.dim)
# Which give the place alone, without a dimension that among all elements.
_ARGUMENTS = (aten.argmax.default, aten.argmin.default)
_WHERE_IT_RUNS = ("device", "pin_memory", "layout", "non_blocking")


@register_pass("canonicalize", provides={Property.CANONICAL}, invalidates={Property.LAYOUTS})
def canonicalize(program: Program) -> Program:
    """Gives the graph one spelling for each thing.

    Before::

        %y = aten.linear.default(%x, %w, %bias) : f32[b, s, 96]
        %d = aten.native_dropout.default(%y, 0.1, True) : (f32[b, s, 96]; bool[b, s, 96])
        %o = operator.getitem(%d, 0) : f32[b, s, 96]

    After::

        %y = aten.linear.default(%x, %w) : f32[b, s, 96]
        %y_bias = aten.add.Tensor(%y, %bias) : f32[b, s, 96]
        %o = aten.dropout.default(%y_bias, 0.1, True) : f32[b, s, 96]

    Asserts, operations that return their operand, devices and dead code go; memory that nothing has written is zeros;
    sizes `-1` become numbers where they are numbers, and numbers of elements products of sizes; indexing by positions
    that are neighbours and that the author wrote down becomes a slice; a value that is written at a mask is a choice
    (`choose_by_masks`); counts are comparisons and sums; biases, those of convolutions too, are separate additions, so
    that a row-split product can be reduced before its bias is added; losses that functions add by the plan's word are
    terms of the loss (`add_losses`). Values, gradients and the order of random nodes stay. Refuses sub-graphs: what
    is in them has no layout.
    """
    for module, node in _walk(program.graph_module):
        if module is not program.graph_module or node.op == "get_attr":
            raise PassError("the graph has a sub-graph", where=f"%{node.name}", remedy="inline it before")
    add_losses(program)
    for node in list(program.graph.nodes):
        if node.op == "call_function":
            _rewrite(program.graph, node)
    _slice_by_constants(program)
    choose_by_masks(program)
    name_sizes(program)
    remove_dead(list(program.graph.nodes))
    return program


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    target: Any = node.target
    if target in _DROPPED:
        graph.erase_node(node)
        return
    # One text serves every rank and device, and lowering says where a rank's tensors lie.
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in _WHERE_IT_RUNS}
    if target in _VIEWS:
        node.target = _VIEWS[target]
    if target is aten.type_as.default:
        node.target, node.args = aten._to_copy.default, node.args[:1]
        node.kwargs = {"dtype": tensor_type(node).dtype}
    if target in _EMPTY:
        _fill_with_zeros(node)
    if target in _SAME or _is_identity(node):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    elif target is aten.native_dropout.default:
        _single_dropout(graph, node)
    elif target is aten.linear.default and len(node.args) > 2 and node.args[2] is not None:
        _separate_bias(graph, node, node.args[2], (node.args[0], node.args[1]), aten.linear.default)
    elif target is aten.addmm.default and not node.kwargs:
        _separate_bias(graph, node, node.args[0], node.args[1:3], aten.mm.default)
    elif target is torch.ops.fxpar.bin_counts.default:
        _count_by_comparison(graph, node)
    elif target is aten.sym_numel.default:
        _multiply_sizes(graph, node)
    elif target is aten.bilinear.default and len(node.args) > 3 and node.args[3] is not None:
        _separate_bias(graph, node, node.args[3], (*node.args[:3], None), target)
    elif target in _CONVOLUTIONS and len(node.args) > 2 and isinstance(node.args[2], fx.Node):
        bias = _along_channels(node, node.args[2])
        _separate_bias(graph, node, bias, (*node.args[:2], None, *node.args[3:]), target)
    elif node.target in (aten.view.default, aten.expand.default, aten.reshape.default):
        sizes = [_literal(written, size) for written, size in zip(node.args[1], tensor_type(node).shape, strict=True)]  # type: ignore[arg-type]
        node.args = (node.args[0], sizes)


def _multiply_sizes(graph: fx.Graph, node: fx.Node) -> None:
    """Writes the number of elements as the product of the sizes, which later passes read off the whole."""
    source: Any = node.args[0]
    shape, known = tensor_type(source).shape, note(node)
    total: Any = None
    value: Size = 1
    for dim, size in enumerate(shape):
        if isinstance(size, int):
            continue
        factor = insert_call(node, aten.sym_size.int, (source, dim), replace(known, type=ScalarType(size)))
        value = simplify(value * size)
        noted = replace(known, type=ScalarType(value))
        total = factor if total is None else insert_call(node, operator.mul, (total, factor), noted)
    written = math.prod(size for size in shape if isinstance(size, int))
    if total is not None and written != 1:
        total = insert_call(node, operator.mul, (total, written), known)
    assert total is not None, "the trace writes numbers of elements that it knows as numbers"
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _fill_with_zeros(node: fx.Node) -> None:
    """Fills with zeros, without strides and memory formats: a program says nothing of how tensors lie in memory."""
    filled = _EMPTY[node.target]
    accepted = [a.name for a in filled._schema.arguments]
    node.target, node.args = filled, node.args[: 2 if filled is aten.new_zeros.default else 1]
    node.kwargs = {k: v for k, v in node.kwargs.items() if k in accepted}


def _literal(written: Any, size: Any) -> Any:
    return size if isinstance(size, int) else written


def _is_identity(node: fx.Node) -> bool:
    """Slices of everything, casts to the own type, dropout of nothing."""
    if not is_tensor(node) or not node.args or not isinstance(node.args[0], fx.Node) or not is_tensor(node.args[0]):
        return False
    if tensor_type(node) != tensor_type(node.args[0]):
        return False
    if node.target is aten.slice.Tensor:
        start = node.args[2] if len(node.args) > 2 else None
        step = node.args[4] if len(node.args) > 4 else 1
        return bool(start in (None, 0) and step == 1)
    if node.target is aten._to_copy.default:
        return True
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return type(node.args[1]) is int and node.args[1] == 0
    return bool(node.target is aten.dropout.default and (node.args[1] == 0 or node.args[2] is False))


def _single_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Leaves the values of a dropout alone; of one that drops nothing the operand."""
    for user in list(node.users):
        if user.target is not operator.getitem or user.args[1] != 0:
            raise PassError("the mask of a dropout is used", where=f"%{node.name}", remedy="use functional.dropout")
    new: Any = node.args[0]
    if node.args[1] != 0 and node.args[2] is not False:
        args, noted = (node.args[0], node.args[1], True), replace(note(node), type=output_types(node)[0])
        new = insert_call(node, aten.dropout.default, args, noted, "dropout")
    for user in list(node.users):
        user.replace_all_uses_with(new)
        graph.erase_node(user)
    graph.erase_node(node)


def _along_channels(node: fx.Node, bias: fx.Node) -> fx.Node:
    """Returns a convolution's bias as `[C, 1, …]`, one dimension for each of space."""
    kind, weight = tensor_type(bias), tensor_type(node.args[1])  # type: ignore[arg-type]
    shape = (*kind.shape, *[1] * (len(weight.shape) - 2))
    noted = replace(note(node), type=TensorType(kind.dtype, shape))
    return insert_call(node, aten.view.default, (bias, list(shape)), noted)


def _count_by_comparison(graph: fx.Graph, node: fx.Node) -> None:
    """Writes how often each number occurs as comparisons.

    Before::

        %n = fxpar.bin_counts.default(%chosen, 8) : i64[8]

    After::

        %column = aten.view.default(%chosen, [-1, 1]) : i64[2*b*s, 1]
        %numbers = aten.arange.default(8) : i64[8]
        %marks = aten.eq.Tensor(%column, %numbers) : bool[2*b*s, 8]
        %n = aten.sum.dim_IntList(%marks, [0]) : i64[8]

    A larger number would make more counts, and sizes of a program do not depend on values. What a top-k or an argmax
    gives is smaller than the size of what it chooses of.

    Raises:
        CaptureError: a number may be larger than those that are counted.
    """
    source, count = argument(node, 0), argument(node, 1)
    if _beyond(source) > count:
        raise CaptureError(
            f"how many counts it gives depends on values of tensors: they may be {count} or more",
            where=note(node).source or f"%{node.name}",
            remedy=f"count what a top-k or an argmax chooses of at most {count}, or write "
            f"torch.nn.functional.one_hot(x, {count}).sum(0)",
        )
    emit, kind = Emitter(graph, node), tensor_type(source)
    column = emit.view(source, [-1, 1], (*kind.shape, 1))
    numbers = emit.call(aten.arange.default, (count,), TensorType(torch.int64, (count,)))
    marks = emit.call(aten.eq.Tensor, (column, numbers), TensorType(torch.bool, (*kind.shape, count)))
    counts = emit.call(aten.sum.dim_IntList, (marks, [0]), TensorType(torch.int64, (count,)))
    node.replace_all_uses_with(counts)
    graph.erase_node(node)


def _beyond(value: fx.Node) -> Any:
    """Returns a number that none of the values reaches, all of which are 0 or more; infinite where none is known."""
    value = plain(value)
    while value.target is aten._to_copy.default and not tensor_type(value).is_float:
        value = plain(argument(value, 0))
    if value.target in _ARGUMENTS:
        return _size_along(value)
    if value.target is operator.getitem and argument(value, 1) == 1 and argument(value, 0).target in _PLACES:
        return _size_along(argument(value, 0))
    return float("inf")


def _size_along(node: fx.Node) -> Any:
    """Returns the size of the dimension along which places are given; infinite where it is a size of the batch."""
    arguments, shape = bind_arguments(node), tensor_type(argument(node, 0)).shape
    dim = arguments.get("dim", None if node.target in _ARGUMENTS else -1)
    size = shape[int(dim)] if dim is not None and shape else None
    return size if isinstance(size, int) else float("inf")


def _separate_bias(graph: fx.Graph, node: fx.Node, bias: Any, args: Any, target: Any) -> None:
    product = insert_call(node, target, args, note(node))
    node.target, node.args, node.kwargs = aten.add.Tensor, (product, bias), {}
    name = node.name
    node.name = graph._graph_namespace.create_name(f"{name}_bias", None)
    product.name = name
    update(node, role="bias")


def _slice_by_constants(program: Program) -> None:
    """Turns `x[..., [-2], :]` of a fused dimension into a slice: what an index tensor picks no rule knows."""
    values = {p.node: program.constants[p.fqn] for p in program.parameters if p.kind == "constant"}
    for node in program.graph.nodes:
        entries: Any = node.args[1] if node.target is aten.index.Tensor else ()
        places = [dim for dim, entry in enumerate(entries) if entry is not None]
        if len(places) != 1:
            continue
        source, whole = entries[places[0]], node.args[0]
        while source.target is aten.clone.default:
            source = source.args[0]
        value, size = values.get(source.name), tensor_type(whole).shape[places[0]]
        if value is None or value.dim() != 1 or value.dtype == torch.bool or not isinstance(size, int):
            continue
        positions = [int(position) % size for position in value.tolist()]
        if positions and positions == list(range(positions[0], positions[0] + len(positions))):
            node.target = aten.slice.Tensor
            node.args = (whole, places[0], positions[0], positions[-1] + 1)


def _walk(graph_module: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """Yields every node of the graph and of every sub-graph (higher-order operators), with the module that owns it."""
    for node in graph_module.graph.nodes:
        yield graph_module, node
        if node.op == "get_attr":
            child = getattr(graph_module, str(node.target), None)
            if isinstance(child, fx.GraphModule):
                yield from _walk(child)
