"""What draws bits of the counter generator (SPEC section 2.4), and the rank's coordinate by which ranks draw their own.

Enters: nothing. Leaves: a record for each operator that `assign_rng` puts in place of torch's random ones. Numbers are
made in `fxpar.ops.counter`; on GPUs dropout is an operator of torch, whose kernel draws the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.ir.program import note, operands, output_types
from fxpar.ir.properties import Property
from fxpar.layout.layout import I, Placement, R, V
from fxpar.ops import counter, sdpa
from fxpar.ops.counter import IndexCut
from fxpar.ops.dropped_attention import require_triton
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import Autograd, Gradients, LoweredCall, OnShapes, Operator, Reverse, torch_operator
from fxpar.signatures.engine import Check, Labelling, Refusal, Rule, Signature, seed_signature
from fxpar.signatures.matmul import attention_labels
from fxpar.signatures.op_call import OpCall, bind_arguments
from fxpar.signatures.pointwise import broadcast, same_values

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# ---------------------------------------------------------------------- rules


def dropout_labels(call: OpCall) -> Labelling | Refusal:
    """Labels values as element-wise; the generator's state and the indices are not sharded."""
    out = call.outputs[0].shape
    ins = [broadcast(call.operands[0].shape, out)]
    ins += [(None,) * len(kind.shape) for kind in call.operands[1:]]
    return Labelling(tuple(ins), (tuple(f"d{i}" for i in range(len(out))),))


def own_bits(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    """Checks that an axis index is passed exactly where the values are a shard (SPEC 2.4)."""
    varying = [i for i, name in enumerate(call.names) if name == "indices" and placements[i].kind == "V"]
    is_shard = placements[0].is_shard
    if is_shard and len(varying) != 1:
        return Refusal("the ranks hold different elements but would draw the same bits: pass fxpar.axis_index")
    if is_shard and len(placements[0].pieces) > 1:
        return Refusal("random bits for a dimension of several segments: split the segments first")
    if varying and not is_shard:
        return Refusal("the ranks hold the same elements but would draw different bits: drop the axis index")
    return None


def own_bits_of_probabilities(call: OpCall, placements: Sequence[Placement]) -> Refusal | None:
    """Checks as `own_bits` does; the query's cut must be the probabilities', from which attention drops."""
    query, out = call.operands[0].shape, call.outputs[0].shape
    lead = any(p.is_shard and p.dim < len(k.shape) - 2 for p, k in zip(placements, call.operands, strict=True))
    is_shard = placements[0].is_shard
    if (lead and not is_shard) or (is_shard and len(query) != len(out)):
        return Refusal("random bits for probabilities that are cut in another way than the query: expand the query")
    return own_bits(call, placements)


def bits_alone(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal | None:
    """Checks as `own_bits` does; the operand's values do not matter: for those of a sum all ranks draw the same."""
    is_plain = all(placement in (I, R) for placement in placements[1:])
    return own_bits(call, placements) or (same_values(call, placements) if is_plain else None)


def indexed(
    labels: Callable[[OpCall], Labelling | Refusal],
    check: Check,
    linear: tuple[tuple[str, ...], ...] = (),
    signature: Callable[[Rule, OpCall, int, Placement], Signature | Refusal] = seed_signature,
) -> Rule:
    """Returns the rule of an operator that draws bits for its first operand, and takes an index where that is a shard.

    Args:
        signature: reads labels: `seed_signature`, or of gradients `signature_of_summands`.
    """
    plain = Rule(labels)

    def seed(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
        seeded = signature(plain, call, index, placement)
        if isinstance(seeded, Refusal):
            return seeded
        # The index of this axis varies, and those of others do not: any may stand for it here.
        position = call.position("indices") if seeded.operands[0].is_shard else None
        ins = tuple(V if i == position else p for i, p in enumerate(seeded.operands))
        refused = check(call, ins)
        return refused if isinstance(refused, Refusal) else Signature(ins, seeded.outputs)

    return Rule(labels, linear, seed=seed, check=check, varying=("indices",))


# ---------------------------------------------------------------------- shapes


def _dropout_shape(call: OnShapes) -> Tensor:
    x: Tensor = call.args[0]
    if not x.is_floating_point():
        raise ValueError(f"dropout of {x.dtype}")
    return x


def _uniform_shape(call: OnShapes) -> Tensor:
    return _numbers(call, call.args[0])


def _uniform_like_shape(call: OnShapes) -> Tensor:
    return _numbers(call, call.args[0].shape)


def _numbers(call: OnShapes, shape: Sequence[int]) -> Tensor:
    dtype = bind_arguments(call.node)["dtype"]
    if dtype not in _FLOATS:
        raise TypeError(f"draws uniform numbers of {dtype}")
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_shape(call: OnShapes) -> Tensor:
    """Returns the result of an attention on shapes alone, without dropout."""
    args = call.by_name
    options = {name: args[name] for name in ("is_causal", "scale", "enable_gqa")}
    tensors = (args[name] for name in ("query", "key", "value", "mask"))
    output: Tensor = torch.ops.aten.scaled_dot_product_attention.default(*tensors, 0.0, **options)
    return output


# ---------------------------------------------------------------------- lowering


def _lower_index(node: fx.Node, rank: OnRank) -> fx.Node:
    return rank.ranks(node).index


def _lower_dropout(node: fx.Node, rank: OnRank) -> LoweredCall:
    x, rng, p, *_ = node.args
    return LoweredCall(_dropout_form(rank.device), (x, rng, p, rank.identity(node), _cuts(node, rank)))


def _dropout_form(device: torch.device) -> Callable[..., Tensor]:
    """Returns one kernel on NVIDIA GPUs; elsewhere PyTorch's operators, which give the same bits."""
    if device.type == "meta":
        return _dropout_on_shapes
    if device.type != "cuda":
        return counter.dropout
    require_triton("dropout")
    return fused_dropout


def _dropout_on_shapes(x: Tensor, rng: Tensor, p: float, origin: int | Tensor, cuts: Sequence[Any]) -> Tensor:
    """Returns the tensors that dropout makes on a GPU, where this machine has none."""
    if counter.cuts_of_kernel(x, p, cuts) is None:
        return counter.dropout(x, rng, p, origin, cuts)
    return torch.empty_like(x.contiguous())


def _lower_uniform(node: fx.Node, rank: OnRank) -> LoweredCall:
    return LoweredCall(counter.uniform, (*node.args, rank.identity(node)))


def _lower_uniform_like(node: fx.Node, rank: OnRank) -> LoweredCall:
    x, rng, dtype, *_ = node.args
    return LoweredCall(counter.uniform_like, (x, rng, dtype, rank.identity(node), _cuts(node, rank)))


def _lower_attention(node: fx.Node, rank: OnRank) -> LoweredCall:
    query, key, value, mask, rng, p, *options = node.args
    call, drops = (query, key, value, mask, *options[:3]), (rng, p, rank.identity(node), _cuts(node, rank))
    return LoweredCall(sdpa.attention_with_dropout, (call, drops))


def _cuts(node: fx.Node, rank: OnRank) -> list[Any]:
    """Returns the cuts of the values for whose elements bits are drawn; the node has an index for each."""
    cuts = rank.element_cuts(node)
    assert len(cuts) == len(bind_arguments(node)["indices"])
    return cuts


# ---------------------------------------------------------------------- records


@partial(
    Operator,
    shape=lambda call: torch.empty((), dtype=torch.int64, device="meta"),
    lower=_lower_index,
    stage=Property.RNG,
)
def axis_index(*, axis: str) -> Any:
    """Returns the rank's coordinate on the axis, an i64 scalar of placement V."""


_record = partial(Operator, stage=Property.RNG, draws=True)


def _dropout_gradient(reverse: Reverse) -> Gradients:
    """Drops the same elements of the gradient, and scales the others alike."""
    node, (gradient,) = reverse.node, reverse.tangents
    args, kind = (gradient, *node.args[1:]), output_types(node)[0]
    input_gradient = reverse.call(node.target, *args, kind=kind, random=note(node).random)
    return [input_gradient if operand is node.args[0] else None for operand in operands(node)]


# With the same bits on all ranks a dropped sum is the sum of what is dropped of the summands.
@partial(
    _record,
    rule=indexed(dropout_labels, own_bits, (("x",),)),
    shape=_dropout_shape,
    lower=_lower_dropout,
    derivative=_dropout_gradient,
)
def dropout(x: Any, rng: Any, p: float, indices: Any = ()) -> Any:
    """Drops elements by the mask of a stateless counter generator (SPEC section 2.4).

    Args:
        x: the values, any shape.
        rng: i64[3], (seed, step, microbatch).
        p: probability of a zero.
        indices: one `axis_index` for every axis over which `x` is sharded; none on the others, so that the ranks of
            an axis draw the same bits where `x` is the same and the bits of their own elements where it is a shard.
    """


@partial(_record, rule=Rule(), shape=_uniform_shape, lower=_lower_uniform, stops_gradient=True)
def uniform(size: Any, rng: Any, dtype: Any) -> Any:
    """Draws uniform numbers in (0, 1), the same on every rank, from the counter generator (SPEC section 2.4).

    Args:
        size: the shape.
        rng: i64[3], (seed, step, microbatch).
        dtype: floating type of the numbers.
    """


@partial(
    _record,
    rule=indexed(dropout_labels, bits_alone),
    shape=_uniform_like_shape,
    lower=_lower_uniform_like,
    stops_gradient=True,
)
def uniform_like(x: Any, rng: Any, dtype: Any, indices: Any = ()) -> Any:
    """Draws uniform numbers in (0, 1), one for each element of `x`, whose values do not matter.

    Arguments as in `uniform`; `indices` as in `dropout`.
    """


@partial(
    _record,
    rule=indexed(attention_labels, own_bits_of_probabilities, (("value",),)),
    shape=attention_shape,
    lower=_lower_attention,
    like=torch.ops.aten.scaled_dot_product_attention.default,
)
def attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    rng: Any,
    p: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    indices: Any = (),
) -> Any:
    """Computes scaled dot-product attention with the counter generator's dropout on the probabilities.

    Arguments as `torch.nn.functional.scaled_dot_product_attention`; `rng`, `p` and `indices` as in `dropout`.
    """


# By itself dropout is one kernel. Inductor, which fuses nothing with that, reads another form (`DECOMPOSITIONS`): words
# of 32 bits, drawn in a kernel that reads no tensor, and plain operators that read one bit for an element, which end up
# in the kernels before and after. A backward that is compiled with its forward reads the same words: a sixteenth of the
# bytes of half precision is saved for it, and nothing is drawn twice.


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rng, rank, offset, identity, *ctx.options = inputs
    ctx.save_for_backward(rng, rank, offset, identity)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _dropout(grad.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * 6


@torch_operator("dropout", fake=_like, autograd=Autograd(_keep, _backward))
def _dropout(
    x: Tensor, rng: Tensor, rank: Tensor, offset: Tensor, identity: Tensor, p: float, place: Sequence[int]
) -> Tensor:
    """Drops elements of a contiguous tensor.

    Args:
        x: the tensor.
        rng: as of `fxpar.ops.dropout_kernels.DropoutShard`, and so `rank`, `offset`, `identity` and `p`.
        place: its origin, run, ranks and unit.
    """
    from fxpar.ops import dropout_kernels

    return dropout_kernels.dropout(x, dropout_kernels.DropoutShard(rng, rank, offset, identity, p, *place))


def _words_shape(rng: Tensor, *args: Any) -> Tensor:
    return rng.new_empty((args[-1] + 31) // 32, dtype=torch.int32)


@torch_operator("drawn_words", fake=_words_shape, direct=True)
def drawn_words(
    rng: Tensor, rank: Tensor, offset: Tensor, identity: Tensor, p: float, place: Sequence[int], count: int
) -> Tensor:
    """Draws which of the `count` elements of a tensor stay, a bit each: i32[ceil(count / 32)]; others as of dropout."""
    from fxpar.ops import dropout_kernels

    return dropout_kernels.draw(dropout_kernels.DropoutShard(rng, rank, offset, identity, p, *place), count)


def dropped(x: Tensor, words: Tensor, p: float) -> Tensor:
    """Returns a contiguous tensor with its dropped elements, of whose words the bits say which stay."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    stays = bits.flatten()[: x.numel()].view(x.shape) != 0
    return torch.where(stays, x * (1.0 / (1.0 - p)), x.new_zeros(()))


def _decomposed(
    x: Tensor, rng: Tensor, rank: Tensor, offset: Tensor, identity: Tensor, p: float, place: Sequence[int]
) -> Tensor:
    return dropped(x, drawn_words(rng, rank, offset, identity, p, place, x.numel()), p)


DECOMPOSITIONS = {torch.ops.fxpar.dropout.default: _decomposed}


def fused_dropout(x: Tensor, rng: Tensor, p: float, origin: int | Tensor, cuts: list[IndexCut]) -> Tensor:
    """Computes `fxpar.ops.counter.dropout`, with the same bits."""
    kernel_cuts = counter.cuts_of_kernel(x, p, cuts)
    if kernel_cuts is None:
        return counter.dropout(x, rng, p, origin, cuts)
    outer, inner = kernel_cuts
    run, ranks, rank, unit, offset = 1, 1, rng, 0, rng
    if inner:
        run, rank = x.shape[inner[0].dim :].numel() // inner[0].outer, inner[0].before
        ranks = int(inner[0].total)
    if outer:
        unit = x.numel() * ranks // outer[0].own
        offset = outer[0].before * unit
    identity, number = (origin, 0) if isinstance(origin, Tensor) else (rng, origin)
    output: Tensor = _dropout(x.contiguous(), rng, rank, offset, identity, p, [number, run, ranks, unit])
    return output
