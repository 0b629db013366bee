"""coalesce: one reduction for the gradients of many parameters."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

import torch
from torch import fx

from fxpar.ir.grad_flow import owner_of, summed, weights_of
from fxpar.ir.operators import axes_of
from fxpar.ir.program import Note, Program, insert_call, note, operands, tensor_type, update
from fxpar.ir.properties import Property
from fxpar.layout.symbolic_sizes import product
from fxpar.manager import register_pass
from fxpar.ops.collectives import all_gather, copy_to, copy_to_shared, sum_gradients
from fxpar.ops.process_group import BUCKET


@register_pass("coalesce", requires={Property.COLLECTIVES}, provides={Property.COALESCED})
def coalesce(program: Program) -> Program:
    """Puts parameters whose gradients are summed over the same ranks into buckets.

    Before::

        %w_copy_to = fxpar.copy_to[tp](%w) : f32[96] tp:I→R
        %v_copy_to = fxpar.copy_to[tp](%v) : f32[96] tp:I→R

    After::

        %tp_gradients = fxpar.sum_gradients[tp](%w, %v) : (f32[96] tp:R; f32[96] tp:R)
        %w_copy_to = operator.getitem(%tp_gradients, 0) : f32[96] tp:R
        %v_copy_to = operator.getitem(%tp_gradients, 1) : f32[96] tp:R

    Under sequence parallelism every norm weight and row bias is used on a part of the tokens, and its gradient is a
    summand on each rank; so are those of kv heads that ranks share. One flat reduction of a bucket takes the place of a
    hundred small ones. Values and gradients stay equal. Coercions of anything but parameters stay where they are.
    Those of one parameter over several axes follow one another, and so do their buckets::

        %tp_gradients = fxpar.sum_gradients[tp](%k, %v) : …
        %k_share = operator.getitem(%tp_gradients, 0) : …
        %v_share = operator.getitem(%tp_gradients, 1) : …
        %dp_gradients = fxpar.sum_gradients[dp](%k_share, %v_share) : …

    Those that follow no other have buckets of their own, which can be sent while earlier layers are differentiated.

    Algorithm: the coercions of one axis and element type, in the reverse order of use, which is that in which backward
    makes their gradients; a bucket is closed when it is full. Buckets stand in the order in which parameters take the
    axes; where two parameters take them in opposite orders, just the first coercion of each is put into one.
    """
    _gather_parameters(program)
    reductions = [node for node in program.graph.nodes if _is_reduction(program, node)]
    order = _order(reductions)
    if order is None:
        # Buckets in both orders would read each other's results: a cycle that no order of the graph has.
        reductions = [node for node in reductions if operands(node)[0].op == "placeholder"]
        order = list(dict.fromkeys(str(node.kwargs["axis"]) for node in reductions))
    # One gradient alone is reduced where it is: a bucket would only copy it into flat memory and out again.
    buckets = [bucket for bucket in _buckets(reductions) if len(bucket) > 1]
    for bucket in sorted(buckets, key=lambda bucket: order.index(str(bucket[0].kwargs["axis"])), reverse=True):
        _merge(program, bucket)
    return program


def _gather_parameters(program: Program) -> None:
    """Marks what gathers parameters that data ranks share out; what runs once a step goes in front of all else."""
    shard = program.plan.shard
    owned = [program.node(p.node) for p in program.sharded_parameters]
    weights = weights_of(program.graph, owned)
    for node in reversed(list(program.graph.nodes)):  # each goes in front of those that are read after it
        if node.target is all_gather and node in weights and set(axes_of(node)) <= set(program.plan.sharding_axes):
            update(node, shard=shard)
            if shard != "parameters":
                _to_front(program, node)


def _to_front(program: Program, node: fx.Node) -> None:
    """Puts a node and what it is made of in front of all others."""
    if node.op != "placeholder":
        _first(program).prepend(node)
        for source in operands(node):
            _to_front(program, source)


def _is_reduction(program: Program, node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in (copy_to, copy_to_shared):
        return False
    parameter = program.parameter(owner_of(node))
    return parameter is not None and parameter.trainable


def _order(nodes: Sequence[fx.Node]) -> list[str] | None:
    """Returns the axes, each after those that parameters take before it; None where there is no such order."""
    before: dict[str, set[str]] = {str(node.kwargs["axis"]): set() for node in nodes}
    for node in nodes:
        source = operands(node)[0]
        if source.op != "placeholder":
            before[str(node.kwargs["axis"])].add(str(source.kwargs["axis"]))
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError:
        return None


def _buckets(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yields nodes of one axis and element type, of `BUCKET` bytes at most where there are several."""
    groups: dict[tuple[str, torch.dtype, bool], list[list[fx.Node]]] = {}
    sizes: dict[int, int] = {}
    for node in reversed(nodes):
        kind = tensor_type(node)
        is_first = operands(node)[0].op == "placeholder"
        buckets = groups.setdefault((str(node.kwargs["axis"]), kind.dtype, is_first), [[]])
        size = int(product(kind.shape)) * kind.dtype.itemsize
        if buckets[-1] and sizes[id(buckets[-1])] + size > BUCKET:
            buckets.append([])
        buckets[-1].append(node)
        sizes[id(buckets[-1])] = sizes.get(id(buckets[-1]), 0) + size
    for buckets in groups.values():
        yield from buckets


def _merge(program: Program, bucket: Sequence[fx.Node]) -> None:
    """Puts one node in front of all others, and an item of it in place of each coercion."""
    axis = str(bucket[0].kwargs["axis"])
    layouts = [note(node).layout for node in bucket]
    noted = Note(type=tuple(tensor_type(node) for node in bucket), layout=tuple(layouts), origin="bucket")  # type: ignore[arg-type]
    summands = [operands(node)[0] for node in bucket]
    merged = insert_call(_first(program), sum_gradients, summands, noted, f"{axis}_gradients", axis=axis)
    for index, node in enumerate(bucket):
        node.target, node.args, node.kwargs = operator.getitem, (merged, index), {}
    for node in operands(merged):
        _move_to_front(program, node)


def _move_to_front(program: Program, node: fx.Node) -> None:
    """Puts what sums a parameter's gradients over other axes before in front of all others."""
    source = summed(node)
    if source is not None:
        _first(program).prepend(node)
        _move_to_front(program, source)


def _first(program: Program) -> fx.Node:
    first: fx.Node = next(node for node in program.graph.nodes if node.op != "placeholder")
    return first
