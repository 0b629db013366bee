"""Lists all graph operators by name, and those that stand for operations of torch.

Those of the core are here. A feature adds its own with `register` when it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fxpar.ops.attention import attention_backward, attention_forward
from fxpar.ops.collectives import COERCION_OF, all_reduce_coalesced, sum_gradients
from fxpar.ops.operator import Operator
from fxpar.ops.random import attention, axis_index, dropout, uniform, uniform_like
from fxpar.ops.rank_dim import expand_over, replicate_over, shard_over, sum_over
from fxpar.ops.small_operators import function, item, size, transfer, zeros
from fxpar.ops.token_chunks import add_chunks, chunk_size, join_chunks, take_chunk
from fxpar.ops.vocabulary import (
    argmax,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_forward,
    embedding,
    embedding_backward,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    logsumexp_backward,
    nll_loss,
    nll_loss_backward,
    topk,
    topk_backward,
)

# Only `register` fills these: readers see them grow through the views below.
_OPERATORS: dict[str, Operator] = {}
_COMPOSITE_OF: dict[Any, Operator] = {}

# What the text form may name after `fxpar.`.
OPERATORS: Mapping[str, Operator] = MappingProxyType(_OPERATORS)
# The composite operator of each operation of torch that has one.
COMPOSITE_OF: Mapping[Any, Operator] = MappingProxyType(_COMPOSITE_OF)


def register(*records: Operator) -> None:
    """Adds graph operators to `OPERATORS` and `COMPOSITE_OF`.

    Args:
        records: with names of their own; one that stands for operations of torch is their only one.
    """
    for record in records:
        _OPERATORS[record.__name__] = record
        _COMPOSITE_OF.update(dict.fromkeys(record.stands_for, record))


register(
    *COERCION_OF,
    *(axis_index, dropout, uniform, uniform_like, attention, attention_forward, attention_backward),
    *(embedding, cross_entropy, nll_loss, log_softmax, logsumexp, argmax, topk),
    *(cross_entropy_forward, cross_entropy_backward, embedding_backward, nll_loss_backward),
    *(log_softmax_backward, logsumexp_backward, topk_backward),
    *(sum_gradients, all_reduce_coalesced, shard_over, replicate_over, expand_over, sum_over),
    *(function, size, zeros, item, transfer),
    *(take_chunk, join_chunks, add_chunks, chunk_size),
)
