"""Small operators: reads on the host, sizes of the whole, zeros, transfers between stages, autograd functions.

Enters: nothing. Leaves: the records of `fxpar.item`, `size`, `zeros`, `transfer` and `function`; and products that are
written where the gradients of weights are to stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.program import operands, output_layouts, output_node
from fxpar.layout.layout import Placement
from fxpar.ops import process_group
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import Autograd, LoweredCall, OnShapes, Operator, torch_operator
from fxpar.signatures.autograd_functions import impurity, resolve_function
from fxpar.signatures.engine import Labelling, Refusal, Rule, Signature
from fxpar.signatures.op_call import OpCall, bind_arguments
from fxpar.signatures.pointwise import pointwise_labels, pointwise_rules, same_values


def _item_on_shapes(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=x.device)


def _ends_gradients(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


def _gradient(ctx: Any, gradient: Any) -> None:
    """Returns no gradient: to the author what was read is a number."""


@torch_operator("item", torch.Tag.cudagraph_unsafe, fake=_item_on_shapes, autograd=Autograd(_ends_gradients, _gradient))
def _item(x: Tensor) -> Tensor:
    return torch.full((), x.item(), dtype=torch.float64, device=x.device)


# Without it autograd, by which a capture is compared with the model, refuses values that require gradients.


def _labels(call: OpCall) -> Labelling:
    return Labelling((tuple(None for _ in call.operands[0].shape),), ((),))


def _shape(call: OnShapes) -> Tensor:
    (x,) = call.args
    if not isinstance(x, Tensor) or x.numel() != 1:
        raise ValueError("reads a value of more than one element")
    return torch.empty((), dtype=torch.float64, device="meta")


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(torch.ops.fxpar.item.default, node.args)


@partial(
    Operator,
    rule=Rule(_labels, partial=(("self",),)),
    shape=_shape,
    lower=_lower,
    stops_gradient=True,
    uncaptured="reads a value on the host; keep it a tensor: leave item() out",
)
def item(self: Any) -> Any:
    """Reads a value on the host, f64[].

    Args:
        self: the value, of one element.
    """


def _ranks(node: fx.Node, axes: Mapping[str, int]) -> int:
    """Returns how many ranks cut the dimension.

    Raises:
        ValueError: they do not hold equal parts of it.
    """
    (source,), dim = operands(node), bind_arguments(node)["dim"]
    cuts = [(axis, p) for layout in output_layouts(source) for axis, p in layout if p.is_shard and p.dim == dim]
    if any(not piece.is_plain for axis, placement in cuts if axis in axes for piece in placement.pieces):
        raise ValueError(f"the ranks hold other parts of dimension {dim} than equal ones")
    return prod(axes[axis] for axis, _ in cuts if axis in axes)


def _size_shape(call: OnShapes) -> int:
    x, dim = call.args
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not 0 <= dim < x.dim():
        raise IndexError(f"there is no dimension {dim}")
    return int(x.shape[dim]) * _ranks(call.node, call.axes)


def _own(x: Tensor, dim: int, ranks: int) -> Any:
    return torch.ops.aten.sym_size.int(x, dim) * ranks


def _lower_size(node: fx.Node, rank: OnRank) -> LoweredCall:
    x, dim = node.args
    return LoweredCall(_own, (x, dim, _ranks(node, rank.program.axes)))


@partial(Operator, shape=_size_shape, lower=_lower_size)
def size(x: Any, dim: int) -> Any:
    """Returns the size of a dimension of the whole: what a rank has of it, times the ranks that share it out.

    Args:
        x: the values, any shape.
        dim: the dimension, counted from the first.
    """


def _in_summands(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | None:
    if placements[0].is_shared:
        return (replace(placements[0], partial=True),)
    return same_values(call, placements)


def _alike(call: OpCall, index: int, placement: Placement) -> Signature:
    return Signature((placement,), (replace(placement, partial=placement.is_shared),))


def zeros_of(x: Tensor) -> Tensor:
    """Computes `fxpar.zeros` in a lowered graph."""
    return torch.zeros_like(x)


def _lower_zeros(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(zeros_of, node.args)


@partial(
    Operator,
    rule=Rule(pointwise_labels, seed=_alike, check=_in_summands, padding=("self",), zeros=True),
    like=torch.ops.aten.zeros_like.default,
    lower=_lower_zeros,
    stops_gradient=True,
)
def zeros(self: Any) -> Any:
    """Returns zeros cut as a value is; of blocks that several ranks hold, summands.

    Args:
        self: the value, any shape.
    """


def why_whole(call: OpCall) -> str:
    """Returns why a function takes whole operands; empty if a trace of forward and backward shows it element-wise."""
    path = call.get("path")
    in_lists = set(call.names) & set(call.arguments)
    if in_lists or any(kind.shape != call.outputs[0].shape for kind in (*call.operands, *call.outputs)):
        return f"{path} has differently shaped operands, or lists, so that no rule says how it treats shards"
    other = impurity(call, pointwise_rules().keys())
    return f"{path} {other}, so it is not known to be element-wise" if other else ""


def _function_labels(call: OpCall) -> Labelling | Refusal:
    """Returns the labels of an element-wise function, where it is proved to be one."""
    reason = why_whole(call)
    return Refusal(reason) if reason else pointwise_labels(call)


def _check(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    if any(p.kind == "P" for p in placements):
        return Refusal("the author's function is not known to be linear: reduce the partial (P) value first")
    return None


def _uncounted(call: OpCall) -> str:
    """Returns the path of a function that may multiply matrices, which no element-wise one does; empty otherwise."""
    return str(call.get("path")) if isinstance(_function_labels(call), Refusal) else ""


def _function_shape(call: OnShapes) -> Any:
    return resolve_function(str(call.kwargs["path"])).apply(*call.args)


def _lower_function(node: fx.Node, rank: OnRank) -> LoweredCall:
    path = str(node.kwargs["path"])
    apply = resolve_function(path).apply

    def call(*args: Any) -> Any:
        return apply(*args)

    # FX writes calls by name: each function needs one of its own.
    call.__name__ = call.__qualname__ = path.replace(".", "_")
    return LoweredCall(call, node.args)


@partial(
    Operator,
    rule=Rule(_function_labels, check=_check),
    shape=_function_shape,
    lower=_lower_function,
    uncounted=_uncounted,
    whole=why_whole,
)
def function(*args: Any, path: str) -> Any:
    """Calls the user's `torch.autograd.Function` at `path`, kept whole so that its backward is the author's."""


def _as_held(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return (placements[0],)


def _transfer_labels(call: OpCall, index: int, placement: Placement) -> Signature:
    return Signature((placement,), (placement,))


def _lower_transfer(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(process_group.same, node.args)


@partial(
    Operator,
    rule=Rule(pointwise_labels, seed=_transfer_labels, check=_as_held, padding=("self",)),
    shape=lambda call: call.args[0],
    lower=_lower_transfer,
    derivative=lambda call: call.tangents,
)
def transfer(self: Any) -> Any:
    """Passes a value to the next stage: each rank's part goes to the rank of the same place there, its gradient back.

    Args:
        self: the value, any shape, in the layout that it keeps.
    """


# Places are no operands: units that compute the same are compiled once, and whether a step adds to gradients is known
# when it runs.

# Bytes on whose multiples compiled code takes results to begin: it asserts that of them.
_ALIGNED = 16


@dataclass(eq=False)
class Destination:
    """Where a gradient is to stay.

    Attributes:
        tensor: the memory; None where the first product that is written here makes it.
        adds: whether the gradient is added to what is there.
        make: makes the memory; None where it is like the product, of zeros.
    """

    tensor: Tensor | None
    adds: bool
    make: Callable[[], Tensor] | None = None

    def has(self, value: Tensor) -> bool:
        """Returns whether a value was written there; what is empty lies anywhere."""
        return self.tensor is not None and self.tensor.data_ptr() == value.data_ptr()


_given: ContextVar[Sequence[Destination | None]] = ContextVar("where a call's results are to stay", default=())


@contextmanager
def into(destinations: Sequence[Destination | None]) -> Iterator[None]:
    """Has products that are results of a call written to these places while it lasts, by number of the result."""
    token = _given.set(destinations)
    try:
        yield
    finally:
        _given.reset(token)


def destinations() -> Sequence[Destination | None]:
    """Returns where the results of the call go that is under way."""
    return _given.get()


def _placed(a: Sequence[Tensor], b: Sequence[Tensor], result: int) -> Tensor:
    return a[0].new_empty((a[0].shape[0], b[0].shape[1]))


@torch_operator("placed_product", torch.Tag.flexible_layout, fake=_placed, direct=True)
def placed_product(a: Sequence[Tensor], b: Sequence[Tensor], result: int) -> Tensor:
    """Computes `product_in_place` in compiled code."""
    return product_in_place(a, b, result)


def product_in_place(a: Sequence[Tensor], b: Sequence[Tensor], result: int) -> Tensor:
    """Multiplies matrices [m, k] and [k, n] in pairs; the sum of the products is a result of the call under way.

    Products add to what is there: no kernel adds two of them, and parts of a product's rows need not lie together.

    Args:
        a: the first of each pair; the pairs differ in k.
        b: the second of each.
        result: its number, or -1.

    Returns:
        [m, n]: where that result is to stay, if a product of this type and shape can be written there; else new.
    """
    places = _given.get()
    place = places[result] if 0 <= result < len(places) else None
    if place is not None and place.tensor is None and place.make is not None:
        place.tensor = place.make()
    elif place is not None and place.tensor is None:
        # Zeros to add to, and no plain product: all microbatches go through one kernel, with graphs and without.
        place.tensor = a[0].new_zeros((a[0].shape[0], b[0].shape[1]))
    if place is None or place.tensor is None or not _fits(place.tensor, a[0], b[0]):
        total = torch.mm(a[0], b[0])
    elif place.adds:
        total = place.tensor.addmm_(a[0], b[0])
    else:
        total = torch.mm(a[0], b[0], out=place.tensor)
    for one, other in zip(a[1:], b[1:], strict=True):
        total.addmm_(one, other)
    return total


def place_products(graph: fx.Graph, target: Callable[[Sequence[Tensor], Sequence[Tensor], int], Tensor]) -> int:
    """Lets sums of products be computed by these alone, and products be written where a call's results are to stay.

    Args:
        target: computes them: `product_in_place`, or the operator.

    Returns:
        How many nodes it changed.
    """
    end = output_node(graph)
    results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    products: dict[fx.Node, tuple[list[Any], list[Any]]] = {}
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is _MM:
            products[node] = [node.args[0]], [node.args[1]]
            continue
        summands = _summands(node)
        if summands and all(read in products and len(read.users) == 1 for read in summands):
            products[node] = tuple([x for read in summands for x in products[read][i]] for i in (0, 1))  # type: ignore[assignment]
            changed.add(node)
    for index, value in enumerate(results):
        # Another reader needs the product alone, while its place may hold the sum with earlier gradients.
        if value in products and list(value.users) == [end] and results.count(value) == 1:
            changed.add(value)
            _rewrite(value, target, products[value], index)
    for node in changed:
        if node.target is not target:
            _rewrite(node, target, products[node], -1)
    for node in [node for node in reversed(graph.nodes) if node in products and not node.users]:
        graph.erase_node(node)
    return len(changed)


def _rewrite(node: fx.Node, target: Callable[..., Tensor], product: tuple[list[Any], list[Any]], index: int) -> None:
    node.target, node.args, node.kwargs = target, (*product, index), {}


def _summands(node: fx.Node) -> list[fx.Node]:
    """Returns the values of one shape and type of which a node is the sum; none of anything else."""
    if node.target is chunks_added:
        return list(node.args[0])  # type: ignore[arg-type]
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(set(node.args)) != 2:
        return []
    reads = [read for read in node.args if isinstance(read, fx.Node)]
    kinds = {(*map(str, v.shape), v.dtype) for read in (node, *reads) if (v := read.meta.get("val")) is not None}
    return reads if len(reads) == 2 and len(kinds) == 1 else []


def chunks_added(chunks: Sequence[Tensor]) -> Tensor:
    """Returns the sum of what was computed of each chunk of rows."""
    first, *others = chunks
    for other in others:
        first = first + other
    return first


_MM = torch.ops.aten.mm.default


def _fits(place: Tensor, a: Tensor, b: Tensor) -> bool:
    is_alike = place.dtype == a.dtype and place.device == a.device and type(place) is Tensor
    is_laid_out = place.is_contiguous() and place.data_ptr() % _ALIGNED == 0
    return is_alike and is_laid_out and place.shape == (a.shape[0], b.shape[1])
