"""What ranks run for tests of chunks of tokens: trainings with and without them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import fxpar
from tests.cudagraphs.graphed import llama, train, words


@dataclass(frozen=True)
class Apart:
    """How far a training in chunks is from one without.

    Attributes:
        losses: the largest relative difference of a loss.
        weights: that of a weight.
        collectives: how many a step has, without chunks and with them.
        graphs: how many the training in chunks has.
    """

    losses: float
    weights: float
    collectives: tuple[int, int]
    graphs: int


def apart(
    chunks: int,
    transport: str = "nccl",
    impl: str = "none",
    rows: int = 3,
    micro: int = 1,
    layers: int = 2,
    **plan: Any,
) -> Apart:
    """Trains a Llama as it is, and in chunks.

    Args:
        layers: of the model.
        rows: of a batch; each other batch has two more.
    """
    counts: list[int] = []

    def count(model: fxpar.ParallelModule, index: int) -> None:
        """Counts the collectives of a step once."""
        if index == 0:
            counts.append(sum(line.count for line in model.report().collectives))

    build = partial(llama, layers=layers)
    whole = train(build, batches(rows, micro), touch=count, **plan)
    chunked = train(
        build,
        batches(rows, micro),
        impl,
        touch=count,
        communication=fxpar.Communication(transport, token_chunks=chunks),
        **plan,
    )
    losses = max(abs(a - b) / abs(a) for a, b in zip(whole.losses, chunked.losses, strict=True))
    weights = max(
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(whole.weights, chunked.weights, strict=True)
    )
    first, second = counts
    return Apart(losses, weights, (first, second), chunked.figures.graphs if impl != "none" else 0)


def batches(rows: int, micro: int) -> list[Any]:
    """Six batches of two lengths in turn."""
    first, second = words(3, micro, rows), words(3, micro, rows + 2, seed=2)
    return [batch for pair in zip(first, second, strict=True) for batch in pair]
