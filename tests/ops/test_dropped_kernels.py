"""On a GPU: attention with dropout in kernels is the plain form in double precision, to the rounding of half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.ops import sdpa
from fxpar.ops.counter import IndexCut, random_words
from fxpar.ops.dropped_attention import drawn_probabilities, places

pytestmark = pytest.mark.gpu

IDENTITY = 0xFFFFFFF1


@dataclass(frozen=True)
class Case:
    """Rows, heads of queries and of keys, queries, keys, columns of these and of values, and how they are cut."""

    sizes: tuple[int, int, int, int, int, int, int]
    is_causal: bool = True
    mask: str = ""
    p: float = 0.1
    cuts: tuple[tuple[int, int, int, int, int], ...] = ()
    is_operand: bool = False
    scale: float | None = None


CASES = (
    Case((2, 3, 3, 40, 40, 24, 24), p=0.3),
    Case((2, 3, 3, 37, 37, 24, 20), p=0.3, cuts=((1, 1, 1, 2, 1),), is_operand=True),
    Case((1, 2, 2, 70, 33, 16, 16), False, "added", cuts=((0, 1, 1, 4, 2), (1, 1, 1, 2, 1)), scale=0.3),
    Case((3, 2, 2, 300, 300, 64, 64), cuts=((0, 1, 3, 8, 5),)),
    Case((2, 2, 2, 130, 130, 80, 80), False, "padding", p=0.5),
    Case((2, 2, 2, 66, 66, 32, 32), False, "nothing"),
    Case((2, 8, 2, 256, 256, 128, 128)),
    Case((2, 4, 4, 200, 264, 192, 128), False),
    Case((1, 2, 2, 128, 128, 256, 256)),
    Case((1, 2, 1, 70, 90, 80, 48), False, p=0.5),
    Case((1, 2, 2, 100, 70, 96, 40)),
    Case((1, 2, 2, 70, 130, 24, 112)),
    Case((2, 8, 8, 1024, 1024, 96, 96), cuts=((1, 1, 1, 2, 1),)),
    Case((70000, 1, 1, 4, 4, 16, 16)),
    Case((2, 3, 3, 1, 1, 8, 8), p=0.5),
)


def masked(kind: str, rows: int, queries: int, keys: int) -> Tensor | None:
    """Keys that are padding, a row of the batch that sees nothing, or numbers."""
    if kind == "added":
        return torch.randn(1, 1, 1, keys, device="cuda", dtype=torch.bfloat16)
    if not kind:
        return None
    found = torch.ones(rows, 1, queries, keys, dtype=torch.bool, device="cuda")
    found[-1, ..., keys - 30 :] = False
    if kind == "nothing":
        found[0, :, : queries // 2] = False
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_word_has_the_bits_of_its_probabilities(case: Case) -> None:
    rows, count, _, queries, keys, *_ = case.sizes
    cuts = [IndexCut(*cut[:4], torch.tensor(cut[4], device="cuda")) for cut in case.cuts]
    rng = torch.tensor([(1 << 40) + 5, 3, 1], device="cuda")
    query, key = (torch.empty(rows, count, length, 16, dtype=torch.half, device="cuda") for length in (queries, keys))
    found = places(query, key, key, case.p, cuts)
    assert found is not None
    sizes = (rows, count, queries, keys)
    held = (found.rows_before, found.heads_before, (*sizes, found.heads), IDENTITY, case.p, case.is_causal)
    words = drawn_probabilities(rng, None, *held)
    bits = (words.unsqueeze(-1) >> torch.arange(32, device="cuda")) & 1
    stays = bits.transpose(2, 3).flatten(3)[..., :keys] == 1
    wanted = random_words(sizes, rng, IDENTITY, cuts) >= int(case.p * 2**32)
    if case.is_causal:
        stays, wanted = stays.tril(), wanted.tril()
    assert torch.equal(stays, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_compute_the_plain_form(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, count, shared, queries, keys, columns, of_values = case.sizes

    def made(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(rows, length, heads, width, device="cuda", dtype=dtype).transpose(1, 2)

    q, k, v = made(count, queries, columns), made(shared, keys, columns), made(shared, keys, of_values)
    gradient, mask = made(count, queries, of_values), masked(case.mask, rows, queries, keys)
    identity: Any = torch.tensor(IDENTITY, device="cuda") if case.is_operand else IDENTITY
    cuts = [IndexCut(*cut[:4], torch.tensor(cut[4], device="cuda")) for cut in case.cuts]
    drops = sdpa.Drops(torch.tensor([(1 << 40) + 5, 3, 1], device="cuda"), case.p, identity, cuts)

    def run(*tensors: Tensor) -> list[Tensor]:
        query, key, value, of_out = tensors
        own = mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
        call = sdpa.SdpaCall(query, key, value, own, case.is_causal, case.scale, count != shared)
        out, log_sum = sdpa.forward(call, drops)
        return [out, *sdpa.backward(call, of_out, out, log_sum, drops)]

    wanted = run(*(x.double() for x in (q, k, v, gradient)))
    found, again = run(q, k, v, gradient), run(q, k, v, gradient)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
    # Of one key alone the gradients of scores are zero, but for rounding.
    least = 1e-3 * max(float(true.norm()) for true in wanted)
    for mine, same, true in zip(found, again, wanted, strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, same)
        assert float((mine.double() - true).norm()) <= tolerance * max(float(true.norm()), least)
