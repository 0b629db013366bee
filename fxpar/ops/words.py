"""Operators over a vocabulary that the ranks of an axis share out (SPEC section 2.3), on local tensors.

Enters: a rank's block of a table or of logits, and which block it is. Leaves: lookups (partial sums), losses and
statistics that are the same on every rank, and the gradients of the rank's block. What travels is one value for each
row (token), never a row. Signature, traffic and lowering, which all of these operators share, follow.

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpar.ir.program import operands
from fxpar.layout.layout import Placement, R
from fxpar.layout.symbolic_sizes import Size, product, simplify
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import CollectiveSite, LoweredCall, Sent
from fxpar.ops.process_group import Group, gather_whole, max_over, sum_over
from fxpar.signatures.engine import Refusal, Rule, Signature
from fxpar.signatures.op_call import OpCall, bind_arguments

_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class Block:
    """Which part of a vocabulary of `size` words a rank holds.

    Attributes:
        size: words of the whole vocabulary.
        group: the ranks that share it.
        index: the rank's number among them, i64 scalar.
    """

    size: int
    group: Group
    index: Tensor

    @property
    def share(self) -> int:
        """Returns how many words a rank has; the last ranks may have less, and then padding."""
        return -(-self.size // self.group.size)

    @property
    def first(self) -> Tensor:
        """Returns the rank's first word."""
        return self.index * self.share

    def local(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Returns positions of words in the rank's block, 0 for those of other ranks, and which are its own."""
        position = words - self.first
        is_local = (position >= 0) & (position < self.share) & (words < self.size)
        return torch.where(is_local, position, 0), is_local

    def hide_padding(self, x: Tensor, dim: int, value: float) -> Tensor:
        """Returns `x` with a value in place of padding along `dim`."""
        width = x.shape[dim]
        if width * self.group.size == self.size:
            return x
        column = torch.arange(width, device=x.device)
        padding = (column >= self.share) | (column + self.first >= self.size)
        return x.masked_fill(padding.view(-1, *[1] * (x.dim() - 1 - dim % x.dim())), value)


def embedding(weight: Tensor, words: Tensor, padding_idx: int, block: Block) -> Tensor:
    """Looks up rows of the rank's block of a table, zeros for words of other ranks: a summand of the lookup.

    Shapes: weight [words a rank, h], words [...]; result [..., h]. `padding_idx` matters to the gradient alone.

    Raises:
        RuntimeError: a word is not in [0, vocabulary); on a GPU a device-side assertion.
    """
    # On the device: a comparison on the host would wait for it, and no CUDA graph could hold it.
    torch._assert_async(((words >= 0) & (words < block.size)).all(), f"an id is outside of [0, {block.size})")
    position, is_local = block.local(words)
    return functional.embedding(position, weight).masked_fill(~is_local.unsqueeze(-1), 0.0)


def _log_sum_exp(x: Tensor, block: Block, finite: bool = False) -> tuple[Tensor, Tensor]:
    """Returns largest value and sum of exponentials (of the rank's block) of each row of `x` [N, words a rank].

    Args:
        finite: an infinite largest value counts as 0, so that a row of nothing but infinities has its sum.
    """
    hidden = block.hide_padding(x, -1, float("-inf"))
    # The maximum of all ranks, since sums of exponentials of different maxima cannot be added.
    largest = max_over(hidden.amax(-1), block.group)
    if finite:
        largest = largest.masked_fill(largest.isinf(), 0.0)
    return largest, (hidden - largest.unsqueeze(-1)).exp().sum(-1)


def _wide(x: Tensor) -> Tensor:
    """Converts half precision to float32: sums of exponentials need it, as in PyTorch's own kernels."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _rows(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Moves words last: logits [N, C, …] or [C] → one row for each target."""
    last = x.movedim(1 if x.dim() > 1 else 0, -1)
    return last.reshape(-1, last.shape[-1]), target.reshape(-1)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    block: Block,
) -> Tensor:
    """Computes `torch.nn.functional.cross_entropy` of logits of which the rank has a block; targets are indices.

    Shapes as there: logits [N, C], [N, C, …] or [C]; class weights [words a rank].

    Raises:
        RuntimeError: a target is neither `ignore_index` nor in [0, vocabulary).
    """
    return cross_entropy_forward(x, target, weight, reduction, ignore_index, label_smoothing, block)[0]


def _counted(words: Tensor, ignore_index: int, block: Block) -> Tensor:
    counted = words != ignore_index
    legal = ~counted | ((words >= 0) & (words < block.size))
    torch._assert_async(legal.all(), f"a target is neither {ignore_index} nor in [0, {block.size})")
    return counted


def _reduced(losses: Tensor, scale: Tensor, reduction: int) -> Tensor:
    """Returns one number for each row, their sum, or their weighted mean."""
    if reduction == _MEAN:
        return losses.sum() / scale.sum()
    return losses.sum() if reduction == _SUM else losses


def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, block: Block
) -> Tensor:
    """Computes a summand of `torch.nn.functional.nll_loss`: a rank adds the rows whose target is in its block."""
    rows, words = _rows(x, target)
    counted = _counted(words, ignore_index, block)
    position, is_local = block.local(torch.where(counted, words, 0))
    picked = _wide(rows.gather(-1, position.unsqueeze(-1)).squeeze(-1).masked_fill(~(is_local & counted), 0.0))
    scale = counted.to(picked.dtype)
    if weight is not None:
        scale = scale * sum_over(_wide(weight)[position].masked_fill(~is_local, 0.0), block.group)
    return _reduced(-picked * scale, scale, reduction).reshape(target.shape if reduction == 0 else ()).to(x.dtype)


def logsumexp(x: Tensor, dims: int | Sequence[int], keepdim: bool, block: Block) -> Tensor:
    """Computes `torch.logsumexp` over the cut dimension, which stands alone."""
    dim = dims if isinstance(dims, int) else dims[0]
    largest, total = _log_sum_exp(_wide(x.movedim(dim, -1)), block, finite=True)
    log_sum = (largest + sum_over(total, block.group).log()).to(x.dtype)
    return log_sum.unsqueeze(dim) if keepdim else log_sum


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None, block: Block) -> Tensor:
    """Computes `torch.log_softmax` over the cut dimension."""
    cast = (x if dtype is None else x.to(dtype)).movedim(dim, -1)
    largest, total = _log_sum_exp(_wide(cast), block)
    log_sum = largest + sum_over(total, block.group).log()
    return (_wide(cast) - log_sum.unsqueeze(-1)).to(cast.dtype).movedim(-1, dim)


def cross_entropy_forward(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    block: Block,
) -> tuple[Tensor, Tensor]:
    """Computes `cross_entropy`, and log Σ exp of each row, [N, …], in float32 or wider."""
    rows, words = _rows(x, target)
    counted = _counted(words, ignore_index, block)
    position, is_local = block.local(torch.where(counted, words, 0))
    wide = _wide(rows)
    largest, total = _log_sum_exp(wide, block)
    picked = wide.gather(-1, position.unsqueeze(-1)).squeeze(-1) - largest
    parts = [total, picked.masked_fill(~(is_local & counted), 0.0)]
    smooth = _smoothed(x, weight, label_smoothing)
    if smooth is not None:
        parts.append(block.hide_padding((wide - largest.unsqueeze(-1)) * smooth, -1, 0.0).sum(-1))
    # One message for all sums: with the maximum two collectives of a value for each row, and never a row.
    log_sum, picked, *weighted = sum_over(torch.stack(parts), block.group).unbind(0)
    log_sum = log_sum.log()
    scale = _scale_of_rows(counted, position, is_local, weight, log_sum.dtype, block)
    losses = scale * (log_sum - picked) * (1 - label_smoothing)
    if smooth is not None:
        share = label_smoothing / block.size
        losses = losses + (_total_weight(weight, block) * log_sum - weighted[0]) * share
    losses = losses.masked_fill(~counted, 0.0)
    loss = _reduced(losses, scale, reduction).reshape(target.shape if reduction == 0 else ()).to(x.dtype)
    return loss, (log_sum + largest).reshape(target.shape)


def cross_entropy_backward(
    x: Tensor,
    target: Tensor,
    gradient: Tensor,
    log_sum: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    block: Block,
) -> Tensor:
    """Returns the gradient of the rank's block of logits; padding gets none."""
    rows, words = _rows(x, target)
    counted = words != ignore_index
    position, is_local = block.local(torch.where(counted, words, 0))
    scale = _scale_of_rows(counted, position, is_local, weight, log_sum.dtype, block)
    upstream = _wide(gradient).reshape(-1) if reduction == 0 else _wide(gradient)
    if reduction == _MEAN:
        upstream = upstream / scale.sum()
    upstream = upstream.expand(scale.shape).masked_fill(~counted, 0.0)
    of_picked = scale * (1 - label_smoothing) * upstream
    of_log_sum = of_picked
    smooth = _smoothed(x, weight, label_smoothing)
    if smooth is not None:
        share = label_smoothing / block.size
        of_log_sum = of_log_sum + _total_weight(weight, block) * share * upstream
    of_logits = (_wide(rows) - log_sum.reshape(-1, 1)).exp() * of_log_sum.unsqueeze(-1)
    if smooth is not None:
        of_logits = of_logits - smooth * (share * upstream).unsqueeze(-1)
    of_logits = block.hide_padding(of_logits, -1, 0.0)
    picked = -of_picked.masked_fill(~(is_local & counted), 0.0).unsqueeze(-1)
    # Added, not written: rows whose target is on another rank add 0 at position 0.
    return _like_logits(of_logits.scatter_add(-1, position.unsqueeze(-1), picked), x)


def _smoothed(x: Tensor, weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    """Returns what weighs the logits of a smoothed loss; None for one that is not smoothed."""
    if not label_smoothing:
        return None
    return _wide(weight) if weight is not None else torch.ones((), dtype=_wide(x).dtype, device=x.device)


def _scale_of_rows(
    counted: Tensor, position: Tensor, is_local: Tensor, weight: Tensor | None, dtype: torch.dtype, block: Block
) -> Tensor:
    """Returns what each row counts: the weight of its class, zero where it is ignored."""
    scale = counted.to(dtype)
    if weight is None:
        return scale
    return scale * sum_over(_wide(weight)[position].masked_fill(~is_local, 0.0), block.group)


def _total_weight(weight: Tensor | None, block: Block) -> Any:
    if weight is None:
        return block.size
    return sum_over(block.hide_padding(_wide(weight), 0, 0.0).sum(), block.group)


def _like_logits(rows: Tensor, x: Tensor) -> Tensor:
    """Inverts `_rows`."""
    dim = 1 if x.dim() > 1 else 0
    return rows.reshape(x.movedim(dim, -1).shape).movedim(-1, dim).to(x.dtype)


def embedding_backward(gradient: Tensor, words: Tensor, padding_idx: int, padded: int, block: Block) -> Tensor:
    """Returns the gradient of the rank's block of a table, [words a rank, h].

    Args:
        gradient: of the lookup, [..., h].
        padded: words that all ranks hold, padding included; 0 where there is none.
    """
    position, is_local = block.local(words)
    is_local = is_local & (words != padding_idx)
    rows = gradient.masked_fill(~is_local.unsqueeze(-1), 0.0)
    count = (padded or block.size) // block.group.size
    return torch.ops.aten.embedding_dense_backward(rows, position, count, -1, False)  # type: ignore[no-any-return]


def nll_loss_backward(
    x: Tensor, target: Tensor, gradient: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, block: Block
) -> Tensor:
    """Returns the gradient of the rank's block of log-probabilities."""
    rows, words = _rows(x, target)
    counted = words != ignore_index
    position, is_local = block.local(torch.where(counted, words, 0))
    scale = _scale_of_rows(counted, position, is_local, weight, _wide(x).dtype, block)
    upstream = _wide(gradient).reshape(-1) if reduction == 0 else _wide(gradient)
    if reduction == _MEAN:
        upstream = upstream / scale.sum()
    picked = -(scale * upstream).masked_fill(~(is_local & counted), 0.0).unsqueeze(-1)
    return _like_logits(_wide(torch.zeros_like(rows)).scatter(-1, position.unsqueeze(-1), picked), x)


def logsumexp_backward(
    x: Tensor, gradient: Tensor, out: Tensor, dims: int | Sequence[int], keepdim: bool, block: Block
) -> Tensor:
    """Returns the gradient of the rank's block."""
    dim = dims if isinstance(dims, int) else dims[0]
    if not keepdim:
        gradient, out = gradient.unsqueeze(dim), out.unsqueeze(dim)
    # A row that is -inf throughout has no gradient. Without this its exponent would be -inf less -inf, which is NaN.
    out = _wide(out).masked_fill(out == float("-inf"), 0.0)
    return block.hide_padding((_wide(x) - out).exp() * gradient, dim % x.dim(), 0.0).to(x.dtype)


def log_softmax_backward(out: Tensor, gradient: Tensor, dim: int, dtype: torch.dtype, block: Block) -> Tensor:
    """Returns the gradient of the rank's block: the sum over all words is needed."""
    upstream = _wide(block.hide_padding(gradient, dim % out.dim(), 0.0))
    total = sum_over(upstream.sum(dim, keepdim=True), block.group)
    return block.hide_padding(upstream - _wide(out).exp() * total, dim % out.dim(), 0.0).to(dtype)


def topk_backward(x: Tensor, indices: Tensor, gradient: Tensor, dim: int, block: Block) -> Tensor:
    """Returns the gradient of the rank's block: that of what was found in it."""
    position, is_local = block.local(indices)
    return torch.zeros_like(x).scatter_add(dim, position, gradient.masked_fill(~is_local, 0.0))


def argmax(x: Tensor, dim: int, keepdim: bool, block: Block) -> Tensor:
    """Computes `torch.argmax` over the cut dimension; of equal values the first."""
    value, position = _searched(x, dim, True, block).max(-1, keepdim=True)
    # Padding may tie with the least value that there is.
    count = (block.size - block.first).clamp(min=1, max=block.share)
    best = _all(value, block).argmax(-1, keepdim=True)
    words = (torch.minimum(position, count - 1) + block.first).clamp(max=block.size - 1)
    best_words = _all(words, block).gather(-1, best).squeeze(-1)
    return best_words.unsqueeze(dim) if keepdim else best_words


def topk(x: Tensor, k: int, dim: int, largest: bool, ordered: bool, block: Block) -> tuple[Tensor, Tensor]:
    """Computes `torch.topk` over the cut dimension: of each rank's best the best; of equal values the first.

    Padding stands after the words, and stable sorts keep it after words of the same value.
    """
    values, position = torch.sort(_searched(x, dim, largest, block), dim=-1, descending=largest, stable=True)
    count = min(k, values.shape[-1])
    words = position[..., :count] + block.first
    is_padding = (position[..., :count] >= block.share) | (words >= block.size)
    all_words = _all(words.masked_fill(is_padding, block.size), block)
    front = torch.sort(all_words == block.size, dim=-1, stable=True)[1]
    candidates = _all(values[..., :count], block).gather(-1, front)
    best, which = torch.sort(candidates, dim=-1, descending=largest, stable=True)
    best_words = all_words.gather(-1, front).gather(-1, which[..., :k])
    return best[..., :k].movedim(-1, dim), best_words.movedim(-1, dim)


def _searched(x: Tensor, dim: int, largest: bool, block: Block) -> Tensor:
    """Moves the searched dimension last, and makes padding the last of all values."""
    if x.is_floating_point():
        worst = float("-inf") if largest else float("inf")
    else:
        worst = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
    return block.hide_padding(x.movedim(dim, -1), -1, worst)


def with_block(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as a lowered graph calls it: vocabulary, group's name and size, index instead of a block."""

    def call(*args: Any) -> Any:
        *rest, size, name, ranks, index = args
        return function(*rest, Block(size, Group(name, ranks), index))

    # FX writes calls by name.
    call.__name__ = call.__qualname__ = f"vocabulary_{function.__name__}"
    return call


def _all(x: Tensor, block: Block) -> Tensor:
    """Concatenates the ranks' values in the last dimension."""
    return gather_whole(x, (x.dim() - 1, [(1, None)]), block.group)


# For each operand that has the vocabulary the dimension that is it; a reason where the call has none.
Dims = Callable[[OpCall], Mapping[str, int] | Refusal]


def table(call: OpCall) -> Mapping[str, int] | Refusal:
    """Returns the dimension that a lookup has cut: the rows of the table."""
    if call.get("scale_grad_by_freq") or call.get("sparse"):
        return Refusal("gradients that are sparse, or divided by counts, need the whole table")
    return {"weight": 0}


def classes(call: OpCall) -> Mapping[str, int] | Refusal:
    """Returns the dimensions that a loss has cut: the classes of its logits, and of the weights of classes."""
    if call.operands[1].is_float:
        return Refusal("a loss with probabilities as target needs whole operands")
    return {"self": 1 if len(call.operands[0].shape) > 1 else 0, "weight": 0}


def searched(call: OpCall) -> Mapping[str, int] | Refusal:
    """Returns the one dimension that an operation searches or normalises."""
    dims = call.get("dim", -1)
    if isinstance(dims, (list, tuple)):
        dims = dims[0] if len(dims) == 1 else None
    rank = len(call.operands[0].shape)
    if dims is None or not rank:
        return Refusal("the operation runs over several dimensions")
    return {"self": int(dims) % rank}


def searched_of_gradient(call: OpCall) -> Mapping[str, int] | Refusal:
    """Returns the dimension as `searched` does, of the result and the gradient, which are cut alike."""
    cut_dims = searched(call)
    return cut_dims if isinstance(cut_dims, Refusal) else {**cut_dims, "gradient": cut_dims["self"]}


def best(call: OpCall) -> Mapping[str, int] | Refusal:
    """Returns the dimension of a search for several. Which of equal values it takes is torch's own choice. A model that
    computes with it (a router, say, whose weights begin at zero) must go on with those of one device."""
    if call.decides:
        return Refusal("what topk finds decides what is computed, and of equal values it takes those of the whole")
    return searched(call)


def rule(dims: Dims, output: Callable[[Placement], Placement]) -> Rule:
    """Returns the one signature: the vocabulary is cut wherever it occurs, everything else is whole."""

    def signature(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
        cut_dims = dims(call)
        if isinstance(cut_dims, Refusal):
            return cut_dims
        piece = placement.piece
        if cut_dims.get(call.names[index]) != placement.dim:
            return Refusal("the operation cuts its vocabulary alone")
        if piece is None or piece.outer != 1 or piece.copies > 1 or not isinstance(piece.size, int):
            return Refusal("the vocabulary must be cut into one block for each rank")
        if not piece.padded and piece.size % call.n:
            return Refusal(f"{piece.size} words are not divisible by {call.n}", structural=True)
        ins = [placement.at(cut_dims[name]) if name in cut_dims else R for name in call.names]
        return Signature(tuple(ins), (output(ins[0]),) * len(call.outputs))

    def check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
        first = next((i for i, placement in enumerate(placements) if placement.is_shard), None)
        if first is None:
            return Refusal("no operand has a vocabulary that is cut: use the operation of aten")
        expected = signature(call, first, placements[first])
        if isinstance(expected, Refusal):
            return expected
        for name, actual, target in zip(call.names, placements, expected.operands, strict=True):
            if actual != target:
                return Refusal(f"operand {name} is {actual} where {target} fits the vocabulary")
        return expected.outputs

    return Rule(seed=signature, check=check, padding=("weight", "self"))


# Collective, phase and number of rows, which are what an operator communicates one value of.
Rows = Iterator[tuple[str, str, Size]]


def by_rows(dims: Dims, sent: Callable[[OpCall, Size], Rows]) -> Callable[[CollectiveSite], Iterator[Sent]]:
    """Returns the traffic of one value or several for each row; halves are summed in float32."""

    def traffic(crossing: CollectiveSite) -> Iterator[Sent]:
        call = crossing.call
        cut_dims = dims(call)
        if isinstance(cut_dims, Refusal):
            return
        kind = call.operands[0]
        rows = product(size for dim, size in enumerate(kind.shape) if dim != cut_dims["self"])
        for collective, phase, elements in sent(call, rows):
            if phase == "forward" or any(crossing.reached):
                yield Sent(collective, phase, simplify(elements * max(kind.dtype.itemsize, 4)))

    return traffic


def cross_entropy_rows(call: OpCall, rows: Size) -> Rows:
    """Yields the traffic: each row's largest logit, then its sums; with weights, those of targets and all classes."""
    weighted, smooth = "weight" in call.names, bool(call.get("label_smoothing"))
    yield "all_reduce", "forward", rows
    yield "all_reduce", "forward", simplify(rows * (3 if smooth else 2))
    if weighted:
        yield "all_reduce", "forward", rows
    if weighted and smooth:
        yield "all_reduce", "forward", 1


def nll_loss_rows(call: OpCall, rows: Size) -> Rows:
    """Yields the traffic of the weights of the targets' classes, where there are any."""
    if "weight" in call.names:
        yield "all_reduce", "forward", rows


def logsumexp_rows(call: OpCall, rows: Size) -> Rows:
    """Yields the traffic: the largest value of each row, then the sum of exponentials."""
    yield "all_reduce", "forward", rows
    yield "all_reduce", "forward", rows


def log_softmax_rows(call: OpCall, rows: Size) -> Rows:
    """Yields the traffic of `logsumexp_rows`, and of the sum of gradients of each row."""
    yield from logsumexp_rows(call, rows)
    yield "all_reduce", "backward", rows


def best_rows(call: OpCall, rows: Size) -> Rows:
    """Yields the traffic of each rank's best values, and of which words they are."""
    count = simplify(rows * (call.n * call.get("k", 1)))
    yield "all_gather", "forward", count
    yield "all_gather", "forward", count


# ---------------------------------------------------------------------- lowering


def lowered(function: Callable[..., Any]) -> Callable[[fx.Node, OnRank], LoweredCall]:
    """Returns the lowering to a function of arguments as in the graph with defaults, then of the vocabulary's block."""
    blocked = with_block(function)

    def lower(node: fx.Node, rank: OnRank) -> LoweredCall:
        bound = {name: value for name, value in bind_arguments(node).items() if name != "axis"}
        cut = next(p for operand in operands(node) if (p := rank.placed(operand, node)).is_shard)
        ranks = rank.ranks(node)
        return LoweredCall(blocked, (*bound.values(), int(cut.pieces[0].size), ranks.group, ranks.size, ranks.index))

    return lower
