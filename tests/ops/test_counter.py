"""Random bits: the published vectors, rates, and masks that do not depend on how a tensor is cut."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpar.cost.figures import Moment
from fxpar.cost.measure import Ledger
from fxpar.layout.layout import Layout, Piece, Placement
from fxpar.layout.shards import local_block
from fxpar.ops.counter import IndexCut, dropout, global_index, philox, random_words, uniform_like, without_bits
from fxpar.ops.sdpa import attention_with_dropout as attention

ORIGIN = 0xC0FFEE


def state(seed: int = 7, step: int = 0, microbatch: int = 0) -> Tensor:
    """The generator's input."""
    return torch.tensor([seed, step, microbatch], dtype=torch.int64)


def words(*values: int) -> list[Tensor]:
    """32-bit words as the generator takes them."""
    return [torch.tensor(value, dtype=torch.int64) for value in values]


# Known answers of the Random123 library for philox4x32-10: counter, key, result.
VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox(words(*counter), words(*key))) == result


def test_philox_gives_the_known_answers_element_by_element() -> None:
    counters = [torch.tensor(column) for column in zip(*(counter for counter, _, _ in VECTORS), strict=True)]
    keys = [torch.tensor(column) for column in zip(*(key for _, key, _ in VECTORS), strict=True)]
    found = torch.stack(philox(counters, keys), 1)
    assert found.tolist() == [list(result) for _, _, result in VECTORS]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_dropout_zeroes_at_its_rate_and_keeps_the_mean(p: float) -> None:
    count = 1 << 18
    x = torch.ones(count, dtype=torch.float64)
    y = dropout(x, state(), p, ORIGIN, [])
    spread = (p * (1 - p) / count) ** 0.5
    assert abs(float((y == 0).double().mean()) - p) <= 5 * spread
    assert torch.unique(y[y != 0]).tolist() == [pytest.approx(1 / (1 - p))]


def test_dropout_of_everything_is_zero_and_has_a_zero_gradient() -> None:
    x = torch.ones(5, requires_grad=True)
    dropout(x, state(), 1.0, ORIGIN, []).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(5))


def test_neighbouring_elements_are_independent() -> None:
    bits = (random_words((1 << 17,), state(), ORIGIN, []) >> 31).double() - 0.5
    assert abs(float((bits[1:] * bits[:-1]).mean())) < 0.005
    assert abs(float(bits.mean())) < 0.005


BASE = {"seed": 7, "origin": ORIGIN, "step": 3, "microbatch": 2}


CHANGES = ({"seed": 8}, {"seed": 7 + 2**32}, {"origin": ORIGIN + 1}, {"step": 4}, {"microbatch": 3})


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_masks_differ_by_seed_node_step_and_microbatch(change: dict[str, int]) -> None:
    def drawn(seed: int, origin: int, step: int, microbatch: int) -> Tensor:
        return random_words((4096,), state(seed, step, microbatch), origin, [])

    same = drawn(**BASE) == drawn(**{**BASE, **change})
    assert int(same.sum()) < 3


def test_the_same_key_gives_the_same_mask() -> None:
    assert torch.equal(random_words((64,), state(), ORIGIN, []), random_words((64,), state(), ORIGIN, []))


def cut_of(placement: Placement, n: int, rank: int) -> IndexCut:
    """The cut as a lowered graph passes it."""
    assert placement.piece is not None
    return IndexCut(placement.dim, int(placement.piece.outer), 1, n, torch.tensor(rank))


# One axis: every dimension, plain and in several runs.
CUTS = (
    Placement("S", 0, (Piece(1, 8),)),
    Placement("S", 1, (Piece(1, 24),)),
    Placement("S", 1, (Piece(3, 8),)),
    Placement("S", 2, (Piece(1, 12),)),
    Placement("S", 2, (Piece(3, 4),)),
)
SHAPE = (8, 24, 12)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("placement", CUTS, ids=str)
def test_a_shard_draws_the_bits_of_its_own_elements(placement: Placement, n: int) -> None:
    whole = random_words(SHAPE, state(), ORIGIN, [])
    for rank in range(n):
        own = local_block(whole, Layout.of({"tp": placement}), {"tp": n}, {"tp": rank})
        assert torch.equal(random_words(own.shape, state(), ORIGIN, [cut_of(placement, n, rank)]), own)


@pytest.mark.parametrize("second", CUTS[1:], ids=str)
@pytest.mark.parametrize("first", [CUTS[0], Placement("S", 0, (Piece(2, 4),))], ids=str)
def test_a_shard_over_two_axes_draws_the_bits_of_its_own_elements(first: Placement, second: Placement) -> None:
    whole = random_words(SHAPE, state(), ORIGIN, [])
    axes = {"dp": 2, "tp": 4}
    for dp in range(2):
        for tp in range(4):
            own = local_block(whole, Layout.of({"dp": first, "tp": second}), axes, {"dp": dp, "tp": tp})
            cuts = [cut_of(first, 2, dp), cut_of(second, 4, tp)]
            assert torch.equal(random_words(own.shape, state(), ORIGIN, cuts), own)


def test_a_shard_that_two_axes_cut_in_one_dimension_draws_the_bits_of_its_own_elements() -> None:
    """Rows over dp, the words of each over tp."""
    whole = random_words((8 * 24, 12), state(), ORIGIN, [])
    rows, words = Placement("S", 0, (Piece(1, 8 * 24),)), Placement("S", 0, (Piece(4, 24),))
    for dp in range(2):
        for tp in range(4):
            layout, cuts = Layout((("dp", rows), ("tp", words))), [cut_of(rows, 2, dp), cut_of(words, 4, tp)]
            own = local_block(whole, layout, {"dp": 2, "tp": 4}, {"dp": dp, "tp": tp})
            assert torch.equal(random_words(own.shape, state(), ORIGIN, cuts), own)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 2**10), (torch.bfloat16, 2**7)], ids=str)
def test_uniform_numbers_are_off_both_ends_in_half_precision(dtype: torch.dtype, count: int) -> None:
    """Of 2^16 draws all numbers that there are."""
    found = torch.unique(uniform_like(torch.empty(1 << 16), state(), dtype, ORIGIN, []))
    assert len(found) == count
    assert bool(((found > 0) & (found < 1)).all())


@pytest.mark.parametrize("rows", [(5, 3), (1, 6, 1), (2, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("second", [None, *CUTS[1:]], ids=str)
def test_ranks_of_other_numbers_of_rows_draw_the_bits_of_their_own(rows: tuple[int, ...], second: Any) -> None:
    """Also where the batch is the outer factor of a dimension, or not the first one."""
    whole = random_words(SHAPE, state(), ORIGIN, [])
    for index, part in enumerate(whole.split(rows)):
        before = torch.tensor(sum(rows[:index]))
        for total in (sum(rows), torch.tensor(sum(rows))):
            cuts = [IndexCut(0, 1, rows[index], total, before)]
            for tp in range(2):
                own = part
                if second is not None:
                    own = local_block(part, Layout.of({"tp": second}), {"tp": 2}, {"tp": tp})
                    cuts = [cuts[0], cut_of(second, 2, tp)]
                assert torch.equal(random_words(own.shape, state(), ORIGIN, cuts), own)
            flat = random_words((part.shape[0] * 24, 12), state(), ORIGIN, cuts[:1])
            assert torch.equal(flat, part.flatten(0, 1))
            turned = random_words((24, part.shape[0], 12), state(), ORIGIN, [cuts[0]._replace(dim=1)])
            assert torch.equal(turned, random_words((24, 8, 12), state(), ORIGIN, []).split(rows, 1)[index])


def test_every_element_has_an_index_of_its_own() -> None:
    index = global_index(SHAPE, [], torch.device("cpu"))
    assert index.reshape(-1).tolist() == list(range(8 * 24 * 12))


def test_elements_beyond_34_bits_draw_bits_of_their_own() -> None:
    """The last of 2^23 ranks holds elements above 2^34; it draws other bits than those 2^34 below."""
    ranks, width = 1 << 23, 1 << 12
    far = random_words((1, width), state(), ORIGIN, [IndexCut(0, 1, 1, ranks, torch.tensor(ranks - 1))])
    low_word = (ranks - 1) % (1 << 22)
    near = random_words((1, width), state(), ORIGIN, [IndexCut(0, 1, 1, ranks, torch.tensor(low_word))])
    indices = [
        global_index((1, width), [IndexCut(0, 1, 1, ranks, torch.tensor(r))], torch.device("cpu"))
        for r in (ranks - 1, low_word)
    ]
    assert int(indices[0].min()) > 1 << 34
    assert torch.equal(indices[0] & ((1 << 34) - 1), indices[1])
    assert int((far == near).sum()) < 3


@pytest.mark.parametrize("heads", [Piece(1, 4), Piece(2, 2)], ids=str)
def test_attention_drops_the_same_probabilities_on_every_cut_of_its_heads(heads: Piece) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 5, 6, dtype=torch.float64) for _ in range(3))
    placement = Placement("S", 1, (heads,))
    whole = attention((query, key, value, None, True, None, False), (state(), 0.3, ORIGIN, []))
    for rank in range(2):
        layout = Layout.of({"tp": placement})
        q, k, v, wanted = (local_block(x, layout, {"tp": 2}, {"tp": rank}) for x in (query, key, value, whole))
        cuts = [cut_of(placement, 2, rank)]
        found = attention((q, k, v, None, True, None, False), (state(), 0.3, ORIGIN, cuts))
        torch.testing.assert_close(found, wanted)


def test_attention_without_dropout_is_pytorchs() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 5, 6, dtype=torch.float64) for _ in range(2))
    found = attention((query, key, value, None, True, 0.3, True), (state(), 0.0, ORIGIN, []))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("shape", [(3, 8), (3, 5)])
def test_words_without_bits_take_the_memory_of_random_ones(shape: tuple[int, int]) -> None:
    """Four neighbours of a counter, and rows that end within one."""

    def most(context: contextlib.AbstractContextManager[None]) -> dict[str, Moment]:
        with context, FakeTensorMode(), Ledger(set()) as ledger:
            random_words(shape, torch.zeros(3, dtype=torch.int64), 7, ())
        peaks: dict[str, Moment] = ledger.peaks
        return peaks

    assert most(without_bits(counts_memory=True)) == most(contextlib.nullcontext())


@pytest.mark.parametrize("shape", [(3, 8), (3, 5)])
def test_words_that_are_not_computed_lie_as_random_ones_do(shape: tuple[int, int]) -> None:
    rng = torch.zeros(3, dtype=torch.int64)
    with FakeTensorMode(), without_bits(counts_memory=False):
        words = random_words(shape, torch.zeros(3, dtype=torch.int64), 7, ())
    random = random_words(shape, rng, 7, ())
    assert (words.shape, words.stride(), words.dtype) == (random.shape, random.stride(), random.dtype)
    assert words.untyped_storage().nbytes() == random.untyped_storage().nbytes()
