"""Rows routed to experts as a layout (DESIGN section 3): from the ranks that have them to those of their experts."""

from __future__ import annotations

import pytest
import torch

from fxpar.layout.layout import Layout, R, shard
from fxpar.layout.nesting import local_shape, misfit, spelled
from fxpar.layout.shards import block, whole
from fxpar.layout.symbolic_sizes import Size, parse_size
from fxpar.ops.collectives import all_to_all, coercion

# [source rank, expert, slot, h]; slots are as many as a bound says, or a symbol of which no input is as long.
SOURCES, EXPERTS, WIDTH = 4, 8, 3


@pytest.mark.parametrize("slots", [5, parse_size("slots"), parse_size("2*slots + 1")], ids=str)
def test_dispatch_takes_rows_from_their_sources_to_their_experts(slots: Size) -> None:
    axes = {"ep": SOURCES, "etp": 2}
    shape = (SOURCES, EXPERTS, slots, WIDTH)
    sent, received = (Layout.of({"ep": shard(dim, shape[dim]), "etp": R}) for dim in (0, 1))
    assert misfit(sent, shape, axes) == misfit(received, shape, axes) == ""
    assert local_shape(shape, sent, axes) == (1, EXPERTS, slots, WIDTH)
    assert local_shape(shape, received, axes) == (SOURCES, EXPERTS // SOURCES, slots, WIDTH)
    assert spelled(received, axes) == received
    for source, target in ((sent, received), (received, sent)):  # dispatch and combine
        row = coercion(source.on("ep"), target.on("ep"))
        assert row is not None
        assert row.operator is all_to_all


def test_dispatch_in_numbers() -> None:
    """Every rank sends each other one the rows of its experts, and has the experts' rows by source."""
    rows = torch.arange(SOURCES * EXPERTS * 5 * WIDTH).view(SOURCES, EXPERTS, 5, WIDTH)
    sent = [block(rows, shard(0, SOURCES), SOURCES, rank) for rank in range(SOURCES)]
    exchanged = [torch.cat([part.chunk(SOURCES, 1)[rank] for part in sent]) for rank in range(SOURCES)]
    for rank, own in enumerate(exchanged):
        assert torch.equal(own, block(rows, shard(1, EXPERTS), SOURCES, rank))
    assert torch.equal(whole(exchanged, shard(1, EXPERTS)), rows)
