"""divide_batch: the batch as a multiple of the ranks that share it out, and means over it as sums over counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.choice.batch import batch_symbol
from fxpar.errors import PlanError
from fxpar.layout.symbols import Size, names, product
from fxpar.manager import register_pass
from fxpar.ops.sizes import size
from fxpar.passes.divide_sequence import divide as divide_sizes
from fxpar.program.program import (
    Program,
    ScalarType,
    TensorType,
    describe,
    note,
    operands,
    set_note,
    tensor_type,
)
from fxpar.program.properties import Property
from fxpar.rules import bind_arguments

aten = torch.ops.aten

MEAN, SUM = 1, 2
_NARROW = (torch.float16, torch.bfloat16)


@register_pass("divide_batch", requires={Property.CANONICAL}, invalidates={Property.LAYOUTS})
def divide_batch(program: Program) -> Program:
    """Writes the batch as n times a symbol, n being the ranks that share it out, and means over it as sums over counts.

    Before (dp 2)::

        symbol b = input_ids.0 like 4
        %b = aten.sym_size.int(%input_ids, 0) : b
        %loss = aten.mean.default(%rows) : f32[]

    After::

        symbol b = input_ids.0 / 2 like 2
        %b = fxpar.size(%input_ids, 0) : 2*b
        %loss_sum = aten.sum.default(%rows) : f32[]
        %loss_ones = aten.ones_like.default(%rows) : f32[2*b]
        %loss_count = aten.sum.default(%loss_ones) : f32[]
        %loss = aten.div.Tensor(%loss_sum, %loss_count) : f32[]

    Terms: the *batch* is the symbolic size of the inputs' rows (`batch_symbol`). A mean over it divides by a number
    that no rank knows alone; as sum and count both are summed over the ranks, each of which counts what it has. The
    mean of a loss counts the targets that are not ignored, or their weights. Values and gradients stay equal. Without
    data parallel ranks nothing changes.

    Refuses models whose batch is no symbolic size, and examples whose rows the ranks do not divide.
    """
    n = program.plan.data_ranks
    if n == 1:
        return program
    name = batch_symbol(program)
    remedy = f"pass rows that {n} ranks can share out"
    program = divide_sizes(program, n, {name}, where="dp", remedy=remedy)
    for node in list(program.graph.nodes):
        if node.target is aten.sym_size.int and name in names((_value(node),)):
            (source,), dim = operands(node), int(bind_arguments(node)["dim"])
            node.target, node.args, node.kwargs = size, (source, dim % len(tensor_type(source).shape)), {}
        elif node.op == "call_function" and node.target in _MEANS:
            _MEANS[node.target](_Counting(program.graph, node, name))
    return program


def of_all_ranks(program: Program) -> Program:
    """The program for the batches of all data ranks together, where its example is one rank's."""
    n = program.plan.data_ranks
    if n == 1:
        return program
    name = batch_symbol(program)
    grown = (replace(s, example=s.example * n) if s.name == name else s for s in program.symbols)
    return program.with_(symbols=tuple(grown))


def _value(node: fx.Node) -> Size:
    kind = note(node).type
    return kind.value if isinstance(kind, ScalarType) else 1


class _Counting:
    """Operations in front of a mean."""

    def __init__(self, graph: fx.Graph, node: fx.Node, batch: str) -> None:
        self.graph, self.node, self.batch = graph, node, batch
        self.given = bind_arguments(node)

    def varies(self, size: Size) -> bool:
        """Whether a size depends on the batch."""
        return self.batch in names((size,))

    def call(self, suffix: str, target: Any, args: tuple[Any, ...], kind: TensorType, **kwargs: Any) -> fx.Node:
        """An operation with the place of the mean."""
        with self.graph.inserting_before(self.node):
            new = self.graph.create_node("call_function", target, args, kwargs, name=f"{self.node.name}_{suffix}")
        return set_note(new, replace(note(self.node), type=kind, random=0))

    def cast(self, suffix: str, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` in a type."""
        kind = tensor_type(x)
        if kind.dtype == dtype:
            return x
        return self.call(suffix, aten._to_copy.default, (x,), TensorType(dtype, kind.shape), dtype=dtype)

    def count(self, x: fx.Node, dims: Sequence[int], keep: bool, dtype: torch.dtype) -> fx.Node:
        """How many elements a sum over dimensions of `x` takes in, counted where their sizes depend on inputs."""
        shape = list(tensor_type(x).shape)
        factor = product(shape[dim] for dim in dims if isinstance(shape[dim], int))
        kept = [dim for dim in range(len(shape)) if dim in dims and not isinstance(shape[dim], int)]
        for dim in reversed(range(len(shape))):
            if dim not in kept:
                rest = tuple(size for other, size in enumerate(shape) if other != dim)
                x = self.call("row", aten.select.int, (x, dim, 0), TensorType(tensor_type(x).dtype, rest))
                shape = list(rest)
        kind = TensorType(dtype, tuple(shape))
        ones = self.call("ones", aten.ones_like.default, (x,), kind, dtype=dtype)
        total = self.call("count", aten.sum.default, (ones,), TensorType(dtype, ()))
        if factor != 1:
            total = self.call("elements", aten.mul.Tensor, (total, factor), TensorType(dtype, ()))
        return total

    def finish(self, total: fx.Node, count: fx.Node) -> None:
        """The quotient takes the place of the mean, in its type."""
        kind = tensor_type(self.node)
        wide = tensor_type(total).dtype
        quotient = self.call("quotient", aten.div.Tensor, (total, count), TensorType(wide, kind.shape))
        value = self.cast("mean", quotient, kind.dtype)
        name = self.node.name
        self.node.replace_all_uses_with(value)
        self.graph.erase_node(self.node)
        value.name = name


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which a sum is taken: half precision ends at 65,504, or has eight bits."""
    return torch.float32 if dtype in _NARROW else dtype


def _mean(c: _Counting) -> None:
    x = operands(c.node)[0]
    shape, out = tensor_type(x).shape, tensor_type(c.node)
    dims = c.given.get("dim")
    dims = [d % len(shape) for d in dims] if dims else list(range(len(shape)))
    if not any(c.varies(shape[d]) for d in dims):
        return
    keep, wide = bool(c.given.get("keepdim")), _wide(out.dtype)
    kind = TensorType(wide, out.shape)
    if c.node.target is aten.mean.default:
        total = c.call("sum", aten.sum.default, (x,), kind, dtype=wide)
    else:
        total = c.call("sum", aten.sum.dim_IntList, (x, dims, keep), kind, dtype=wide)
    c.finish(total, c.count(x, dims, keep, wide))


def _class_loss(c: _Counting) -> None:
    """The mean over the targets that are not ignored, by their weights where there are some."""
    x, target = operands(c.node)[:2]
    if c.given.get("reduction", MEAN) != MEAN or not any(c.varies(size) for size in tensor_type(x).shape):
        return
    wide = _wide(tensor_type(x).dtype)
    if tensor_type(target).is_float:
        raise PlanError(
            "the mean of a loss with probabilities as targets is not known by part of the batch",
            where=describe(c.node),
            remedy='use reduction="sum" and divide by the number of rows, or set dp=1',
        )
    if len(tensor_type(x).shape) < 2:
        return
    ignored = c.given.get("ignore_index", -100)
    counted = c.call("counted", aten.ne.Scalar, (target, ignored), TensorType(torch.bool, tensor_type(target).shape))
    ones = c.cast("ones", counted, wide)
    weight = c.given.get("weight")
    if isinstance(weight, fx.Node):
        zero = c.call("zero", aten.zeros_like.default, (target,), tensor_type(target))
        known = c.call("known", aten.where.self, (counted, target, zero), tensor_type(target))
        kind = TensorType(tensor_type(weight).dtype, tensor_type(target).shape)
        own = c.call("weights", aten.index.Tensor, (weight, [known]), kind)
        ones = c.call("weighed", aten.mul.Tensor, (c.cast("wide_weights", own, wide), ones), tensor_type(ones))
    count = c.call("count", aten.sum.default, (ones,), TensorType(wide, ()))
    total = _summed(c, {"self": c.cast("wide", x, wide)}, wide)
    c.finish(total, count)


def _element_loss(c: _Counting) -> None:
    x = operands(c.node)[0]
    shape = tensor_type(x).shape
    if c.given.get("reduction", MEAN) != MEAN or not any(c.varies(size) for size in shape):
        return
    wide = _wide(tensor_type(c.node).dtype)
    total = _summed(c, {}, tensor_type(c.node).dtype)
    c.finish(c.cast("wide", total, wide), c.count(x, range(len(shape)), False, wide))


def _summed(c: _Counting, changed: Mapping[str, Any], dtype: torch.dtype) -> fx.Node:
    """The loss with the sum as reduction."""
    values = {**c.given, **changed, "reduction": SUM}
    order = [a.name for a in c.node.target._schema.arguments]  # type: ignore[union-attr]
    return c.call("sum", c.node.target, tuple(values[name] for name in order), TensorType(dtype, ()))


_MEANS: Mapping[Any, Callable[[_Counting], None]] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    **dict.fromkeys((aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default), _class_loss),
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.kl_div.default,
        ),
        _element_loss,
    ),
}
