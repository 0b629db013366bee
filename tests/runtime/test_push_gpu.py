"""The sum over two GPUs in one kernel, of two ranks that are streams of one GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [1, 8191, 8192, 8193, 1_000_003, 12_582_912])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str)
def test_both_ranks_have_the_same_sum(size: int, dtype: torch.dtype) -> None:
    from fxpar.exchange.push_kernels import FLAGS, push_sum

    device = torch.device("cuda")
    values = [(torch.randn(size, device=device) * 9).to(dtype) for _ in range(2)]
    areas = [[torch.full((size,), -7, device=device, dtype=dtype) for _ in range(2)] for _ in range(2)]
    flags = [[torch.zeros(FLAGS, device=device, dtype=torch.int32) for _ in range(2)] for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(3):  # two buffers in turn, as a chain of sums has them
        for turn in range(2):
            for rank, stream in enumerate(streams):
                here, there = areas[turn][rank], areas[turn][1 - rank]
                with torch.cuda.stream(stream):
                    made = push_sum(values[rank], there, here, flags[turn][1 - rank], flags[turn][rank])
                    found[rank].append(made)
    torch.cuda.synchronize()
    for own, other in zip(*found, strict=True):
        assert torch.equal(own, other)
        assert torch.equal(own, values[0] + values[1])
    assert not any(bool(flag.any()) for both in flags for flag in both)
