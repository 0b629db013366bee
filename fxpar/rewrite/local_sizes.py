"""Sizes that a call has as literals, as one rank has them: the call over the whole becomes the call of a part."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.errors import PassError
from fxpar.ir.program import Note, Program, ScalarType, insert_call, note, operands, output_layouts, output_types
from fxpar.layout.layout import Layout
from fxpar.layout.nesting import listed, local_shape
from fxpar.layout.symbolic_sizes import Size, divide
from fxpar.rules import bind_arguments, call_of
from fxpar.rules.inference import peeled_call
from fxpar.signatures.op_call import SIZED

aten = torch.ops.aten

_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes})


def localize_node(program: Program, node: fx.Node) -> None:
    """Rewrites the literals of one call, whose arguments are those of the whole."""
    if node.target in SIZED:
        _sizes(program, node)
    elif node.target in _SPLITS:
        _split(program, node)
    elif node.target is aten.slice.Tensor:
        _slice(program, node)


def _local(program: Program, node: fx.Node, output: int = 0) -> tuple[Any, ...]:
    return local_shape(output_types(node)[output].shape, output_layouts(node)[output], program.axes)


def _cut(layout: Layout, program: Program, dim: int) -> int:
    """Returns blocks into which a dimension is cut; of one in several segments, ranks."""
    blocks = 1
    for axis, placement in layout:
        if placement.is_shard and placement.dim == dim:
            blocks *= program.axes[axis] // (placement.piece.copies if placement.piece else 1)
    return blocks


def _sizes(program: Program, node: fx.Node) -> None:
    layout, sizes = output_layouts(node)[0], []
    local, at = _local(program, node), SIZED[node.target]  # type: ignore[index]
    whole_sizes: Sequence[Any] = node.args[at]  # type: ignore[assignment]
    for dim, size in enumerate(whole_sizes):
        ranks = _cut(layout, program, dim)
        if ranks == 1 or (isinstance(size, int) and size == -1):
            sizes.append(size)
        elif isinstance(size, fx.Node):
            sizes.append(_divided(node, size, ranks))
        else:
            sizes.append(local[dim])
    node.args = (*node.args[:at], sizes, *node.args[at + 1 :])


def _divided(before: fx.Node, size: fx.Node, ranks: int) -> fx.Node:
    kind = note(size).type
    share = divide(kind.value, ranks) if isinstance(kind, ScalarType) else None
    if share is None:
        raise PassError(f"a size of {kind} is not divisible by {ranks}", where=f"%{before.name}")
    for user in size.users:
        if user.target is operator.floordiv and user.args == (size, ranks) and user < before:
            return user
    noted = Note(type=ScalarType(share), fqn=note(before).fqn, phase=note(before).phase)
    return insert_call(before, operator.floordiv, (size, ranks), noted, f"{size.name}_local")


def _share(before: fx.Node, size: Any, share: Size) -> fx.Node:
    """Returns a rank's share of a size that a node is.

    Raises:
        PassError: it is no part of it.
    """
    kind = note(size).type if isinstance(size, fx.Node) else None
    ranks = divide(kind.value, share) if isinstance(kind, ScalarType) else None
    if not isinstance(ranks, int):
        raise PassError(f"a part of {share} elements is not a share of {kind}", where=f"%{before.name}")
    return size if ranks == 1 else _divided(before, size, ranks)


def _split(program: Program, node: fx.Node) -> None:
    source = operands(node)[0]
    rank = len(output_types(source)[0].shape)
    dim = int(bind_arguments(node).get("dim", 0)) % rank
    if _cut(output_layouts(source)[0], program, dim) > 1:
        parts: Any = node.args[1]
        sizes = []
        for i in range(len(output_types(node))):
            share, size = _local(program, node, i)[dim], parts[i] if isinstance(parts, (list, tuple)) else parts
            sizes.append(share if isinstance(share, int) else _share(node, size, share))
        node.target, node.args, node.kwargs = aten.split_with_sizes.default, (source, sizes, dim), {}


def _slice(program: Program, node: fx.Node) -> None:
    """Replaces bounds of a dimension that is cut by those of what each axis leaves, from the outermost."""
    source = operands(node)[0]
    before, after = output_layouts(source)[0], output_layouts(node)[0]
    call, dim = call_of(node, 1), int(bind_arguments(node).get("dim", 0)) % len(output_types(node)[0].shape)
    if not any(placement.is_shard and placement.dim == dim for _, placement in before):
        return
    order = [axis for axis, _ in before]
    ordered = listed(after, program.axes, order)
    if ordered is None:
        raise PassError(
            f"the slice nests axes otherwise than {before}", where=f"%{node.name}", remedy="split it before"
        )
    for axis in order:
        call = peeled_call(replace(call, n=program.axes[axis]), [before.on(axis)], [ordered.on(axis)])
    start, end, step = (call.get(name) for name in ("start", "end", "step"))
    if call.outputs[0].shape[dim] != call.operands[0].shape[dim]:
        node.args, node.kwargs = (source, dim, start, end, *([step] if step != 1 else [])), {}
