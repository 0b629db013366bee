"""How well a model predicts text: perplexity of sliding windows, and cloze accuracy.

Enters: a model on one device or a parallel one, and token ids. Leaves: a number, the same on every rank. It follows
from logits that stay cut: ranks exchange a few numbers for each token, and never a row of the vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import InputError, shown
from fxpar.ops.process_group import Group, max_over, sum_over
from fxpar.runtime.rank_batches import data_part
from fxpar.runtime.world import World

# From ids, i64[rows, length], to the keyword arguments of the model's forward.
BatchOf = Callable[[Tensor], Mapping[str, Any]]


def perplexity(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    *,
    window: int,
    overlap: int = 0,
    batch_size: int = 8,
    words: int | None = None,
    batch_of: BatchOf | None = None,
) -> float:
    """Returns a text's perplexity, exp(−Σ log p / words), of windows that slide over its tokens.

    The model reads `window` tokens at a time and predicts the one after each. The next window begins `window − overlap`
    tokens later. Of it count the tokens that no earlier window has predicted, so each has at least `overlap` tokens of
    context before it, and the first of them one more. The first token of the text is not predicted.

    Example:
        ```python
        value = fxpar.perplexity(language_model, list(range(40)), window=8, overlap=4)
        ```

    Args:
        model: what `parallelize` returned, under any plan, or a causal model on one device. It runs in evaluation mode,
            and has its modes back afterwards. All ranks must make the call, with the same arguments.
        tokens: ids of the text, [n], two at least; an array that a file is mapped to will do.
        window: tokens of a window, 1 at least.
        overlap: tokens of a window that the one before it has too, less than `window`.
        batch_size: windows of a call, of all data ranks together; two for each of several ranks at least.
        words: by how many words the sum is divided: those of the text before it was cut into tokens
            (`len(text.split())`), so that texts of other tokenizers compare. The predicted tokens by default.
        batch_of: the arguments of a call for ids, i64[rows, window]; {"input_ids": ids} by default.

    Raises:
        InputError: an argument is out of its range, or the model returns no logits.
    """
    ids = torch.as_tensor(tokens)
    if ids.dim() != 1 or len(ids) < 2 or ids.is_floating_point() or ids.is_complex():
        remedy = "pass a list or a tensor of at least two token ids"
        raise InputError(f"has {ids.dtype} of shape {list(ids.shape)}", where="tokens", remedy=remedy)
    _check_count("window", window, 1)
    _check_count("overlap", overlap, 0)
    if overlap >= window:
        remedy = f"pass less than {window}, such as half of it"
        raise InputError(f"must be less than the window, {window}, got {overlap}", where="overlap", remedy=remedy)
    words = len(ids) - 1 if words is None else words
    _check_count("words", words, 1)
    # The last window ends where the text does, or behind that.
    count = 1 + math.ceil(max(0, len(ids) - 1 - window) / (window - overlap))
    starts = [number * (window - overlap) for number in range(count)]
    rows = [_Row(ids[start : start + window + 1], overlap if start else 0) for start in starts]
    with _Predictions(model, batch_size, batch_of) as predictions:
        total = predictions.sum(rows, window, _log_likelihood)
    return float(torch.tensor(-total / words, dtype=torch.float64).exp())


def cloze_accuracy(
    model: nn.Module,
    examples: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 8,
    batch_of: BatchOf | None = None,
) -> float:
    """Returns the share of examples whose last word the model predicts, all tokens of it, from what is before it.

    Each token of the word must be the likeliest one after the context and the true tokens before it (LAMBADA).

    Example:
        ```python
        accuracy = fxpar.cloze_accuracy(language_model, [([1, 2, 3], [4]), ([5, 6], [7, 8])])
        ```

    Args:
        model: as of `perplexity`.
        examples: of each the ids of the context and those of the word, one at least of each. They may have other
            lengths: shorter ones are padded on the right, where a causal model does not look.
        batch_size: examples of a call, of all data ranks together.
        batch_of: as of `perplexity`.

    Raises:
        InputError: there are no examples, one has no context or no word, or the model returns no logits.
    """
    if not len(examples):
        raise InputError("are none", where="examples", remedy="pass at least one context and its last word")
    for number, (context, word) in enumerate(examples):
        if not len(context) or not len(word):
            remedy = "leave it out; a text of one word has no context"
            raise InputError("has no context or no last word", where=f"example {number}", remedy=remedy)
    rows = [
        _Row(torch.cat([torch.as_tensor(context), torch.as_tensor(word)]), len(context) - 1)
        for context, word in examples
    ]
    with _Predictions(model, batch_size, batch_of) as predictions:
        length = max(len(row.ids) - 1 for row in rows)
        return predictions.sum(rows, length + -length % predictions.multiple, _exact_rows) / len(rows)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        remedy = f"pass {least} or more"
        raise InputError(f"must be an integer of at least {least}, got {shown(value)}", where=name, remedy=remedy)


@dataclass(frozen=True)
class _Row:
    """A sequence to predict.

    Attributes:
        ids: i64[n]; all but the first are predicted, each from those before it.
        first: from which prediction on they count.
    """

    ids: Tensor
    first: int


class _Predictions:
    """Calls a model on rows, in evaluation mode and without gradients, and gives it its modes back at the end."""

    def __init__(self, model: nn.Module, batch_size: int, batch_of: BatchOf | None) -> None:
        if not isinstance(model, nn.Module):
            remedy = "pass what parallelize returned, or a module on one device"
            raise InputError(f"must be a module, got a {type(model).__name__}", where="model", remedy=remedy)
        _check_count("batch_size", batch_size, 1)
        self._model, self._batch_size = model, batch_size
        self._batch_of: BatchOf = batch_of or (lambda ids: {"input_ids": ids})
        self._world = model.world if isinstance(model, ParallelModule) else None
        # Lengths that the ranks can cut, where they cut sequences.
        self.multiple = model.plan.tp if isinstance(model, ParallelModule) and model.plan.sequence_parallel else 1
        first = next((tensor for tensor in (*model.parameters(), *model.buffers())), torch.empty(0))
        self._device = first.device if self._world is None else self._world.device
        self._scope = contextlib.ExitStack()

    def __enter__(self) -> _Predictions:
        for module in self._model.modules():
            self._scope.callback(setattr, module, "training", module.training)
        self._scope.enter_context(torch.no_grad())
        self._model.eval()
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()

    def sum(self, rows: Sequence[_Row], length: int, score: Callable[[_Logits, Tensor, Tensor], Tensor]) -> float:
        """Returns the sum of a score over all rows, of all ranks.

        Args:
            length: of what the model reads of a row; shorter ones are padded.
            score: of logits, targets i64[rows, length], and which of them count, bool[rows, length].
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for inputs, targets, counts in self._batches(rows, length):
            outputs = self._model(**self._batch_of(inputs))
            total += score(_logits(outputs, inputs, self._world), targets, counts).double()
        if self._world is not None and self._world.size > 1:
            # The ranks that are given the same rows have the same scores.
            everyone: Any = dist.group.WORLD
            copies = self._world.size // _data_ranks(self._world)
            total = sum_over(total, Group(everyone.group_name, self._world.size)) / copies
        return total.item()

    def _batches(self, rows: Sequence[_Row], length: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields inputs, targets and which of these count, of this data rank's rows; all of one shape.

        So one program serves all of them, and data ranks have as many rows as each other.
        """
        ranks = 1 if self._world is None else _data_ranks(self._world)
        part = 0 if self._world is None else data_part(self._world.mesh, self._world.rank)
        # A trace of one row holds for one row alone, and data ranks need a program for any number of them.
        size = max(math.ceil(min(self._batch_size, len(rows)) / ranks), min(2, ranks))
        for start in range(0, len(rows), size * ranks):
            # What is no row's is 0, an id that every model has, and does not count.
            ids = torch.zeros(size, length + 1, dtype=torch.int64)
            counts = torch.zeros(size, length, dtype=torch.bool)
            for place, row in enumerate(rows[start + part * size : start + (part + 1) * size]):
                ids[place, : len(row.ids)] = row.ids
                counts[place, row.first : len(row.ids) - 1] = True
            ids, counts = ids.to(self._device), counts.to(self._device)
            yield ids[:, :-1].contiguous(), ids[:, 1:], counts


def _data_ranks(world: World) -> int:
    return 1 + max(data_part(world.mesh, rank) for rank in range(world.size))


@dataclass(frozen=True)
class _Logits:
    """A rank's logits: of its rows, and of a block of the vocabulary.

    Attributes:
        block: [rows, length, words of the block].
        start: number of the block's first word.
        groups: of the ranks that have the other blocks.
    """

    block: Tensor
    start: int
    groups: tuple[Group, ...]


def _logits(outputs: Any, inputs: Tensor, world: World | None) -> _Logits:
    """Returns the logits among a model's outputs.

    Raises:
        InputError: there are none, or not one row of them for each token.
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        what = f"of shape {list(logits.shape)}" if isinstance(logits, Tensor) else "with no logits"
        remedy = "let forward return logits of shape [rows, length, words], alone or by the name logits"
        raise InputError(f"returns outputs {what}", where="model", remedy=remedy)
    start, groups = 0, list[Group]()
    if isinstance(logits, DTensor):
        assert world is not None
        # Rows stay with their data ranks and words with theirs. Ranks that have cut tokens get all of them.
        cuts = (Shard(0), Shard(2))
        logits = logits.redistribute(placements=[p if p in cuts else Replicate() for p in logits.placements])
        names = logits.device_mesh.mesh_dim_names
        assert names is not None
        groups = [world.groups[axis] for axis, p in zip(names, logits.placements, strict=True) if p == Shard(2)]
        chunks: Any = logits.__create_chunk_list__()
        start, logits = chunks[0].offsets[2], logits.to_local()
    if logits.shape[:2] != inputs.shape:
        raise InputError(
            f"returns logits of {list(logits.shape[:2])} tokens for {list(inputs.shape)}",
            where="model",
            remedy="let forward return a row of logits for each token",
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A rank past the end of a small vocabulary has no word.
    return _Logits(wide if wide.shape[2] else functional.pad(wide, (0, 1), value=-math.inf), start, tuple(groups))


def _over_blocks(value: Tensor, groups: Sequence[Group], reduce: Callable[[Tensor, Group], Tensor]) -> Tensor:
    for group in groups:
        value = reduce(value, group)
    return value


def _log_likelihood(logits: _Logits, targets: Tensor, counts: Tensor) -> Tensor:
    """Returns the sum of the log-probabilities of the targets that count."""
    block, groups = logits.block, logits.groups
    place = targets - logits.start
    is_here = (place >= 0) & (place < block.shape[2])
    chosen = block.gather(2, (place * is_here).unsqueeze(2)).squeeze(2)
    chosen = _over_blocks(torch.where(is_here, chosen, 0.0), groups, sum_over)
    local = block.logsumexp(2)
    largest = _over_blocks(local, groups, max_over)
    normaliser = largest + _over_blocks((local - largest).exp(), groups, sum_over).log()
    return (chosen - normaliser)[counts].double().sum()


def _exact_rows(logits: _Logits, targets: Tensor, counts: Tensor) -> Tensor:
    """Returns the number of rows of which the likeliest words are all targets that count."""
    values, places = logits.block.max(2)
    largest = _over_blocks(values, logits.groups, max_over)
    # Of equal words the first, as on one device.
    places = torch.where(values == largest, places + logits.start, torch.iinfo(torch.int64).max)
    likeliest = -_over_blocks(-places, logits.groups, max_over)
    return (counts.any(1) & ((likeliest == targets) | ~counts).all(1)).sum()
