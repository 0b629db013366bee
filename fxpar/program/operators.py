"""Graph-level operators of fxpar: what a pass inserts and the text form names.

Enters: nothing. Leaves: functions that stand in a graph as targets. They have no rank, group or address, therefore
they cannot run; `fxpar.ops.lower` replaces each by an implementation bound to a process group.

`COERCIONS` is the whole table of SPEC section 2.1: every conversion between two placements on one axis with the
collective it costs forward and backward. `FACTORED` has the rows of a factored axis, whose ranks share blocks: f and
the slice on its inner factor. The placement a coercion converts *to* is the one in the node's note; which row converts
one placement to another is said by `fxpar.program.coercions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn


def _unbound(name: str) -> NoReturn:
    raise RuntimeError(f"fxpar.{name} is a graph operator without a process group: lower the program first")


def copy_to(x: Any, *, axis: str) -> Any:
    """I → R (Megatron's f): identity; all-reduce of the gradient."""
    _unbound("copy_to")


def reduce_from(x: Any, *, axis: str) -> Any:
    """P → I (Megatron's g): all-reduce; identity on the gradient."""
    _unbound("reduce_from")


def all_gather(x: Any, *, axis: str) -> Any:
    """S → R (sequence-parallel gather): all-gather; reduce-scatter of the gradient."""
    _unbound("all_gather")


def reduce_scatter(x: Any, *, axis: str) -> Any:
    """P → S (sequence-parallel scatter-reduce): reduce-scatter; all-gather of the gradient."""
    _unbound("reduce_scatter")


def split(x: Any, *, axis: str) -> Any:
    """I → S: each rank keeps its block; all-gather of the gradient."""
    _unbound("split")


def gather(x: Any, *, axis: str) -> Any:
    """S → I: all-gather; each rank keeps its block of the gradient."""
    _unbound("gather")


def take(x: Any, *, axis: str) -> Any:
    """R → S: each rank keeps its block; the gradient is padded with zeros, a summand."""
    _unbound("take")


def all_reduce(x: Any, *, axis: str) -> Any:
    """P → R: all-reduce, forward and backward."""
    _unbound("all_reduce")


def settle(x: Any, *, axis: str) -> Any:
    """R → I: identity; the gradient is kept on rank 0 and zero elsewhere."""
    _unbound("settle")


def keep_first(x: Any, *, axis: str) -> Any:
    """I → P: kept on rank 0, zero elsewhere; identity on the gradient."""
    _unbound("keep_first")


def mask_first(x: Any, *, axis: str) -> Any:
    """R → P: kept on rank 0, zero elsewhere, forward and backward."""
    _unbound("mask_first")


def all_to_all(x: Any, *, axis: str) -> Any:
    """S(i) → S(j): all-to-all, forward and backward."""
    _unbound("all_to_all")


def share(x: Any, *, axis: str) -> Any:
    """S; I → S (f among the ranks that share a block): identity; all-reduce of the gradients of what is shared."""
    _unbound("share")


def take_part(x: Any, *, axis: str) -> Any:
    """S / c → S: each of the ranks that share a block keeps a part of it; the gradient is padded with zeros."""
    _unbound("take_part")


def axis_index(*, axis: str) -> Any:
    """The rank's coordinate on the axis, an i64 scalar of placement V."""
    _unbound("axis_index")


def dropout(x: Any, rng: Any, p: float, indices: Any = ()) -> Any:
    """Dropout with the mask of a stateless counter generator (SPEC section 2.4).

    Args:
        x: the values, any shape.
        rng: i64[3], (seed, step, microbatch).
        p: probability of a zero.
        indices: one `axis_index` for every axis over which `x` is sharded; none on the others, so that the ranks of
            an axis draw the same bits where `x` is the same and the bits of their own elements where it is a shard.
    """
    _unbound("dropout")


def uniform(size: Any, rng: Any, dtype: Any) -> Any:
    """Uniform numbers in (0, 1), the same on every rank, from the counter generator (SPEC section 2.4).

    Args:
        size: the shape.
        rng: i64[3], (seed, step, microbatch).
        dtype: floating type of the numbers.
    """
    _unbound("uniform")


def uniform_like(x: Any, rng: Any, dtype: Any, indices: Any = ()) -> Any:
    """Uniform numbers in (0, 1), one for each element of `x`, whose values do not matter.

    Arguments as in `uniform`; `indices` as in `dropout`.
    """
    _unbound("uniform_like")


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
    """Scaled dot-product attention with the counter generator's dropout on the probabilities.

    Arguments as `torch.nn.functional.scaled_dot_product_attention`; `rng`, `p` and `indices` as in `dropout`.
    """
    _unbound("attention")


def sum_gradients(*weights: Any, axis: str) -> Any:
    """Several parameters, each coerced as `copy_to` or `share` would: identity; one all-reduce of all gradients."""
    _unbound("sum_gradients")


def embedding(weight: Any, indices: Any, padding_idx: int = -1, *, axis: str) -> Any:
    """`aten.embedding` of a table whose rows are cut over the axis: a partial sum (SPEC section 2.3)."""
    _unbound("embedding")


def cross_entropy(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    axis: str,
) -> Any:
    """`aten.cross_entropy_loss` of logits whose classes are cut over the axis; the loss is invariant."""
    _unbound("cross_entropy")


def nll_loss(
    self: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, *, axis: str
) -> Any:
    """`aten.nll_loss_nd` of log-probabilities whose classes are cut over the axis: a partial sum."""
    _unbound("nll_loss")


def log_softmax(self: Any, dim: int, dtype: Any = None, *, axis: str) -> Any:
    """`aten.log_softmax` over a dimension that is cut over the axis; cut alike."""
    _unbound("log_softmax")


def logsumexp(self: Any, dim: Any, keepdim: bool = False, *, axis: str) -> Any:
    """`aten.logsumexp` over a dimension that is cut over the axis; invariant."""
    _unbound("logsumexp")


def argmax(self: Any, dim: int, keepdim: bool = False, *, axis: str) -> Any:
    """`aten.argmax` over a dimension that is cut over the axis; the same on every rank."""
    _unbound("argmax")


def topk(self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, axis: str) -> Any:
    """`aten.topk` over a dimension that is cut over the axis; values are invariant."""
    _unbound("topk")


def function(*args: Any, path: str) -> Any:
    """A call of the user's `torch.autograd.Function` at `path`, kept whole so that its backward is the author's."""
    _unbound("function")


# What draws bits of the counter generator.
DRAWS: tuple[Callable[..., Any], ...] = (dropout, uniform, uniform_like, attention)

OPERATORS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        copy_to,
        reduce_from,
        all_gather,
        reduce_scatter,
        split,
        gather,
        take,
        all_reduce,
        settle,
        keep_first,
        mask_first,
        all_to_all,
        share,
        take_part,
        axis_index,
        dropout,
        uniform,
        uniform_like,
        attention,
        sum_gradients,
        embedding,
        cross_entropy,
        nll_loss,
        log_softmax,
        logsumexp,
        argmax,
        topk,
        function,
    )
}


@dataclass(frozen=True)
class Coercion:
    """One row of the table: from and to (kinds), and the collective of each direction ("" where it is local)."""

    source: str
    target: str
    operator: Callable[..., Any]
    forward: str
    backward: str


COERCIONS: Mapping[tuple[str, str], Coercion] = {
    (row.source, row.target): row
    for row in (
        Coercion("I", "R", copy_to, "", "all_reduce"),
        Coercion("P", "I", reduce_from, "all_reduce", ""),
        Coercion("S", "R", all_gather, "all_gather", "reduce_scatter"),
        Coercion("P", "S", reduce_scatter, "reduce_scatter", "all_gather"),
        Coercion("I", "S", split, "", "all_gather"),
        Coercion("S", "I", gather, "all_gather", ""),
        Coercion("R", "S", take, "", ""),
        Coercion("P", "R", all_reduce, "all_reduce", "all_reduce"),
        Coercion("R", "I", settle, "", ""),
        Coercion("I", "P", keep_first, "", ""),
        Coercion("R", "P", mask_first, "", ""),
        Coercion("S", "S", all_to_all, "all_to_all", "all_to_all"),
    )
}

# Of shards whose blocks several ranks hold (SPEC section 2.2): I → R and R → S on the inner factor of the axis.
FACTORED = (Coercion("S", "S", share, "", "all_reduce"), Coercion("S", "S", take_part, "", ""))

COERCION_OF: Mapping[Callable[..., Any], Coercion] = {row.operator: row for row in (*COERCIONS.values(), *FACTORED)}
