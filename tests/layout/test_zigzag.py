"""Blocks that go to the ranks in reverse, and segments within a run: context parallelism's zigzag as a layout."""

from __future__ import annotations

import pytest
import torch

from fxpar.errors import TextError
from fxpar.layout.layout import Layout, Piece, Placement, fits, parse_placement, shard
from fxpar.layout.nesting import innermost, local_shape, local_size, pieces_of, spelled, through_view
from fxpar.layout.shards import block, boxes, whole
from fxpar.layout.symbolic_sizes import parse_size


def cut(text: str, *shape: str) -> Placement:
    return parse_placement(text, [parse_size(size) for size in shape])


def test_the_zigzag_of_two_ranks_is_that_of_the_specification() -> None:
    """SPEC section 6: s 16, cp 2: rank 0 [0-3, 12-15], rank 1 [4-11]."""
    zigzag = cut("S(0: 8 | 8 reversed)", "16")
    parts = [block(torch.arange(16), zigzag, 2, rank).tolist() for rank in range(2)]
    assert parts == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    layout, axes = Layout.of({"cp": zigzag}), {"cp": 2}
    found = [[(box.offsets, box.sizes) for box in boxes((16,), layout, axes, {"cp": rank})] for rank in range(2)]
    assert found == [[((0,), (4,)), ((12,), (4,))], [((4,), (8,))]]


def test_the_zigzag_of_a_flattened_batch_keeps_its_rows() -> None:
    flat = cut("S(0: 3 x (8 | 8 reversed))", "48")
    rows = cut("S(1: 8 | 8 reversed)", "3", "16")
    numbers = torch.arange(48)
    parts = [block(numbers, flat, 2, rank) for rank in range(2)]
    for rank in range(2):
        assert torch.equal(parts[rank], block(numbers.view(3, 16), rows, 2, rank).flatten())
    assert torch.equal(whole(parts, flat), numbers)


def test_rows_and_the_zigzag_of_tokens_commute() -> None:
    """dp cuts the b and cp the s of a flattened b·s: either may be listed first."""
    axes, size = {"dp": 2, "cp": 2}, parse_size("8*b*s")
    layout = Layout.of({"dp": cut("S(0)", "8*b*s"), "cp": cut("S(0: b x (2*s | 2*s reversed))", "4*b*s")})
    other = Layout.of({"cp": cut("S(0: 2*b x (2*s | 2*s reversed))", "8*b*s"), "dp": cut("S(0)", "4*b*s")})
    assert innermost(layout, axes, ["dp"]) == other
    assert spelled(other, axes) == layout
    assert local_shape((size,), layout, axes) == local_shape((size,), other, axes) == (parse_size("2*b*s"),)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("S(0: 2*s | 2*s reversed)", "4*s"),
        ("S(0: s reversed)", "s"),
        ("S(0: 2 x 6 reversed)", "12"),
        ("S(0: b x (s | s reversed))", "2*b*s"),
        ("S(0: b x (s | 2 x 4 reversed))", "b*s+8*b"),
        ("S(0: 3 x (4 reversed | 8))", "36"),
        ("S(0: b x (s | 4 reversed) | !3)", "b*s+4*b+3"),
        ("S(0: 4 | floor(s/2))", "4+floor(s/2)"),
    ],
)
def test_text_comes_back(text: str, size: str) -> None:
    assert str(cut(text, size)) == text


@pytest.mark.parametrize(
    "text", ["S(0: (4 | 4) reversed)", "S(0: b x (4 | 4)", "S(0: b x (4 | 4) / 2)", "S(0: b x (4 |))"]
)
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(TextError):
        cut(text, "8")


def test_segments_stand_only_where_they_are_needed() -> None:
    turned = Piece(1, 8, reversed=True)
    assert pieces_of([Piece(3, 8, segments=(turned,))]) == (Piece(3, 8, reversed=True),)
    assert pieces_of([Piece(1, 16, segments=(Piece(1, 8), turned))]) == (Piece(1, 8), turned)
    assert pieces_of([Piece(2, 16, segments=(Piece(1, 8), Piece(1, 8)))]) == (Piece(4, 8),)
    assert pieces_of([turned, turned]) == (Piece(2, 8, reversed=True),)


def test_a_repeated_list_is_written_as_its_repetitions() -> None:
    zigzag = (Piece(1, 8), Piece(1, 8, reversed=True))
    twice = (Piece(2, 16, segments=zigzag),)
    assert pieces_of([*zigzag, *zigzag]) == pieces_of([Piece(1, 32, segments=zigzag * 2)]) == twice
    assert pieces_of([*zigzag, Piece(4, 16, segments=zigzag)]) == (Piece(5, 16, segments=zigzag),)
    b = parse_size("b")
    assert pieces_of([Piece(b, 32, segments=zigzag * 2)]) == (Piece(parse_size("2*b"), 16, segments=zigzag),)


@pytest.mark.parametrize(
    "text", ["S(0: 8 reversed | !8)", "S(0: b x (4 | 4 reversed) | 8)", "S(0: 8 reversed | 8 / 2)"]
)
def test_such_blocks_stand_alone(text: str) -> None:
    size = "8*b+8" if "b x" in text else "16"
    assert not fits(cut(text, size), (parse_size(size),), 4)


@pytest.mark.parametrize(
    "piece",
    [
        Piece(1, 9, reversed=True),
        Piece(1, 8, False, reversed=True),
        Piece(1, 8, copies=2, reversed=True),
        Piece(1, 7, padded=8, reversed=True),
        Piece(2, 8, segments=(Piece(1, 5), Piece(1, 3, reversed=True))),
        Piece(2, 8, segments=(Piece(1, 4), Piece(1, 2, reversed=True))),
        Piece(2, 8, segments=(Piece(1, 2, reversed=True), Piece(1, 2), Piece(1, 4, False))),
        Piece(2, 8, segments=(Piece(1, 4), Piece(1, 4, reversed=True)), reversed=True),
        Piece(2, 8, segments=(Piece(1, 4), Piece(1, 4, reversed=True)), copies=2),
        Piece(2, 12, segments=(Piece(1, 4), Piece(1, 8))),
    ],
    ids=str,
)
def test_pieces_that_are_none_do_not_fit(piece: Piece) -> None:
    assert not fits(Placement("S", 0, (piece,)), (piece.length,), 4 if piece.copies > 1 else 2)


def test_what_is_not_in_the_order_of_the_ranks_says_so() -> None:
    zigzag = cut("S(0: 8 | 8 reversed)", "16")
    assert not zigzag.in_rank_order
    assert not cut("S(0: 3 x (4 | 8 reversed))", "36").in_rank_order
    assert shard(0, 16).in_rank_order
    assert not cut("S(0: 8 reversed)", "8").pieces[0].is_plain
    assert local_size(zigzag, 2) == 8
    assert through_view(cut("S(0: 8 reversed)", "8"), (8,), (2, 4), 2) is None
