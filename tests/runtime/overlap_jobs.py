"""What the ranks of a test world do with gradients and parameters that travel while layers are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from fxpar.ops import lower, process_group
from fxpar.ops.layer_prefetch import move_between_layers
from fxpar.passes.coalesce import coalesce
from fxpar.passes.overlap import overlap
from tests.captures import passes_changed
from tests.cudagraphs import graphed
from tests.cudagraphs.graphed import Trained

# Of gpt2's layers one fills a bucket.
BUCKET = 2**14


@contextlib.contextmanager
def in_buckets(size: int = BUCKET) -> Iterator[None]:
    """While active, gradients of so many bytes are sent at once."""
    with (
        passes_changed("bucket", size),
        mock.patch.dict(coalesce.run.__globals__, {"BUCKET": size}),
        mock.patch.object(lower, "BUCKET", size),
    ):
        yield


def train(shard: str, micro: int, impl: str = "none", *, early: bool = True, **plan: Any) -> Trained:
    """Steps with dropout, of which this rank has rows of its own.

    Args:
        early: whether what is sent travels beside layers, gradients in buckets; else where it is read, or at the end.
    """
    batches = graphed.words(4, micro, seed=dist.get_rank())
    start = overlap.run.__globals__["_send_gradients"] if early else lambda *_: None
    move = move_between_layers if early else lambda _: {}
    with (
        in_buckets(BUCKET if early else process_group.BUCKET),
        passes_changed("early", early),
        mock.patch.dict(overlap.run.__globals__, {"_send_gradients": start}),
        mock.patch.object(lower, "move_between_layers", move),
    ):
        return graphed.train(lambda: graphed.gpt2(layers=3), batches, impl, dp=2, shard=shard, evaluate=1, **plan)


late = cache(partial(train, early=False))


def equal(shard: str, micro: int, impl: str, compile: bool) -> bool:
    """Whether a training is the one in which nothing travels beside layers, to the bit."""
    return train(shard, micro, impl, compile=compile) == late(shard, micro, compile=compile)
