"""The graph operators of fxpar: one record each, with what a rank runs in their place.

Enters: the families' records. Leaves: all of them by name, and those that stand for operations of torch; for models,
`experts`, which consists of operators of torch that fxpar registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fxpar.ops import capacity, capacity_indices, combine, gates, grouped, permute  # noqa: F401 - operators of torch
from fxpar.ops.attention import attention_backward, attention_forward
from fxpar.ops.coercion_table import COERCION_OF
from fxpar.ops.coercions import all_reduce_coalesced, sum_gradients
from fxpar.ops.expert_layer import experts
from fxpar.ops.functions import function
from fxpar.ops.global_size import size
from fxpar.ops.host import item
from fxpar.ops.operator import Operator, alike
from fxpar.ops.random import attention, axis_index, dropout, uniform, uniform_like
from fxpar.ops.rank_dim import expand_over, sum_over
from fxpar.ops.selective_dispatch import expand_needed, sum_needed
from fxpar.ops.sent_rows import return_rows, send_rows, split_sizes
from fxpar.ops.shard_over import shard_over
from fxpar.ops.transfers import transfer
from fxpar.ops.vocabulary import argmax, cross_entropy, embedding, log_softmax, logsumexp, nll_loss, topk
from fxpar.ops.vocabulary_gradients import (
    cross_entropy_backward,
    cross_entropy_forward,
    embedding_backward,
    log_softmax_backward,
    logsumexp_backward,
    nll_loss_backward,
    topk_backward,
)
from fxpar.ops.zeros import zeros

__all__ = ["COMPOSITE_OF", "OPERATORS", "Operator", "alike", "experts"]

_DRAWN = (axis_index, dropout, uniform, uniform_like, attention)
_WORDS = (embedding, cross_entropy, nll_loss, log_softmax, logsumexp, argmax, topk)

_OTHERS = (
    *(sum_gradients, function, size, zeros, item, transfer, shard_over, split_sizes, send_rows, return_rows),
    *(expand_over, sum_over, expand_needed, sum_needed),
)

_GRADIENTS = (
    *(all_reduce_coalesced, attention_forward, attention_backward, cross_entropy_forward, cross_entropy_backward),
    *(embedding_backward, nll_loss_backward, log_softmax_backward, logsumexp_backward, topk_backward),
)

# What the text form may name behind `fxpar.`.
OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        record.__name__: record
        for record in (
            *COERCION_OF,
            *_DRAWN,
            *_WORDS,
            *_GRADIENTS,
            *_OTHERS,
        )
    }
)

# The composite operator of each operation of torch that has one.
COMPOSITE_OF: Mapping[Any, Operator] = MappingProxyType(
    {target: record for record in OPERATORS.values() for target in record.stands_for}
)
