"""Blocks that several ranks hold, and padded blocks, against counting."""

from __future__ import annotations

import pytest
import torch

from fxpar.layout.layout import Piece, Placement, fits, padded_shard, parse_placement
from fxpar.layout.nesting import local_size, through_view
from fxpar.layout.shards import block, counted, slice_pieces, whole
from fxpar.ops.process_group import put_together, spread
from fxpar.testing.ranks import local_positions, padding

SHARED = [
    Placement("S", 0, (Piece(1, 12, copies=2),)),
    Placement("S", 1, (Piece(3, 8, copies=2),), reduced=True),
    Placement("S", 0, (Piece(1, 16), Piece(1, 4, copies=2), Piece(1, 3, sharded=False)), reduced=True),
    Placement("S", 0, (Piece(2, 6, copies=2), Piece(1, 4, copies=2))),
]


def length(placement: Placement) -> int:
    return sum(int(piece.length) for piece in placement.pieces)


@pytest.mark.parametrize("placement", SHARED, ids=str)
def test_shared_blocks_hold_what_is_counted_and_come_back(placement: Placement) -> None:
    size, n = length(placement), 4
    shape = (size, 2) if placement.dim == 0 else (2, size)
    x = torch.arange(2 * size).view(shape)
    assert fits(placement, shape, n)
    parts = [block(x, placement, n, rank) for rank in range(n)]
    for rank, part in enumerate(parts):
        assert part.shape[placement.dim] == local_size(placement, n)
        assert torch.equal(part, x.index_select(placement.dim, torch.tensor(local_positions(placement, n, rank))))
    assert torch.equal(whole(parts, placement), x)
    assert parse_placement(str(placement), shape) == placement


@pytest.mark.parametrize("placement", SHARED, ids=str)
def test_of_what_ranks_share_one_of_them_counts(placement: Placement) -> None:
    size, n = length(placement), 4
    x = torch.arange(2 * size).view((size, 2) if placement.dim == 0 else (2, size))
    parts = [part for rank in range(n) for part in counted(block(x, placement, n, rank), placement, n, rank)]
    assert sorted(value for part in parts for value in part.flatten().tolist()) == list(range(2 * size))


@pytest.mark.parametrize(("size", "n", "padded"), [(50257, 4, 50688), (50257, 8, 51200), (259, 2, 512), (5, 4, 8)])
def test_a_vocabulary_is_padded_to_equal_blocks(size: int, n: int, padded: int) -> None:
    placement = padded_shard(0, size, n)
    assert placement.pieces == (Piece(1, size, padded=padded),)
    assert fits(placement, (size,), n)
    x = torch.arange(1, size + 1)
    parts = [block(x, placement, n, rank) for rank in range(n)]
    for rank, part in enumerate(parts):
        mine = local_positions(placement, n, rank)
        assert len(part) == padded // n == local_size(placement, n) == len(mine) + padding(placement, n, rank)
        assert part.tolist() == [i + 1 for i in mine] + [0] * padding(placement, n, rank)
    assert torch.equal(whole(parts, placement), x)
    assert parse_placement(str(placement), (size,)) == placement


@pytest.mark.parametrize(("size", "n"), [(50304, 1), (50432, 2), (6, 2), (51200, 8)])
def test_a_vocabulary_that_fits_is_not_padded(size: int, n: int) -> None:
    assert padded_shard(0, size, n).pieces == (Piece(1, size),)


@pytest.mark.parametrize(("size", "n"), [(259, 2), (259, 4), (5, 4)])
def test_padded_blocks_are_gathered_and_scattered(size: int, n: int) -> None:
    x, piece = torch.randn(2, size, 3), padded_shard(1, size, n).pieces[0]
    cut = (1, [(1, (size, piece.padded))])
    stacked = spread(x, cut, n)
    for rank in range(n):
        assert torch.equal(stacked[rank], block(x, padded_shard(1, size, n), n, rank))
    assert torch.equal(put_together(stacked, cut), x)


def test_a_padded_run_ends_with_its_dimension() -> None:
    placement = padded_shard(2, 259, 2)
    assert through_view(placement, (3, 16, 259), (48, 259), 2) == placement.at(1)
    assert through_view(placement, (3, 16, 259), (3, 16 * 259), 2) is None
    assert through_view(placement, (3, 16, 259), (3, 16, 7, 37), 2) is None
    assert slice_pieces(placement.pieces, 0, 259) == placement.pieces
    assert slice_pieces(placement.pieces, 0, 258) is None


def test_heads_that_ranks_share_survive_views() -> None:
    placement = Placement("S", 2, (Piece(1, 24, copies=2),))
    assert through_view(placement, (3, 16, 24), (3, 16, 2, 12), 4) == Placement("S", 2, (Piece(1, 2, copies=2),))
    assert through_view(placement, (3, 16, 24), (3, 16, 3, 8), 4) is None


@pytest.mark.parametrize(
    "piece",
    [
        Piece(1, 12, copies=3),  # does not divide the ranks
        Piece(1, 12, copies=4),  # that is a whole segment
        Piece(1, 13, copies=2),
        Piece(2, 5, padded=8),  # only one run can be padded
        Piece(1, 5, padded=6),  # not by 4 ranks
        Piece(1, 5, padded=4),  # less than there is
        Piece(1, 12, sharded=False, copies=2),
    ],
    ids=str,
)
def test_pieces_that_fit_no_four_ranks(piece: Piece) -> None:
    assert not fits(Placement("S", 0, (piece,)), (int(piece.length),), 4)


def test_only_shared_blocks_can_be_reduced() -> None:
    assert not fits(Placement("S", 0, (Piece(1, 12),), reduced=True), (12,), 4)
