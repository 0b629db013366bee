"""Tokens for those GPUs that need them in one kernel, of ranks that are streams of one GPU."""

from __future__ import annotations

import functools

import pytest
import torch

from fxpar.peer_memory.compiler.symmetric_buffer import added, needs, slot_stride

pytestmark = pytest.mark.gpu

CASES: list[tuple[int, int, int, int, int, torch.dtype]] = [  # ranks, tokens, width, choices, experts of a rank, type
    (2, 4096, 1536, 2, 4, torch.bfloat16),
    (2, 1, 1, 1, 1, torch.float64),
    (4, 4096, 4096, 2, 2, torch.bfloat16),
    (4, 1003, 2304, 8, 16, torch.float16),
    (4, 4097, 24, 1, 2, torch.float32),
    (3, 5, 1030, 3, 1, torch.float32),
    (8, 1000, 1537, 2, 1, torch.bfloat16),
    (8, 7, 24, 8, 8, torch.float64),
]


@pytest.mark.parametrize(("ranks", "tokens", "width", "choices", "own", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("way", ["expand", "sum"])
def test_each_rank_has_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    tokens: int,
    width: int,
    choices: int,
    own: int,
    dtype: torch.dtype,
    way: str,
) -> None:
    """Behind the last rank's experts are some that nobody holds, and what is not sent is no number."""
    from fxpar.peer_memory.runtime import push_needed
    from fxpar.peer_memory.runtime.push_kernels import FLAGS

    # A GPU has room for the programs of all: one on each multiprocessor, since they may take most of its registers.
    for name in ("_SENDING", "_TAKING"):
        monkeypatch.setattr(push_needed, name, 64 // ranks)
    shape = (tokens, width) if way == "expand" else (ranks, tokens, width)
    values = [torch.randn(shape, device="cuda").to(dtype) for _ in range(ranks)]
    chosen = torch.randint(0, ranks * own + 2, (ranks, tokens, choices), device="cuda")
    run = functools.partial(push_needed.push_needed, way)
    stride = slot_stride(values[0] if way == "expand" else values[0][0])
    size = -(-ranks * stride // 4096) * 4096
    areas = [[torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(ranks)] for _ in range(2)]
    flags = [[torch.zeros(FLAGS, dtype=torch.int32, device="cuda") for _ in range(ranks)] for _ in range(2)]
    word = torch.zeros(1, dtype=torch.int32)
    stop = word.cuda(), word.pin_memory()
    for rank in range(ranks):  # a rank's kernel cannot be loaded while another's waits for it: here all flags are up
        up = [torch.ones(FLAGS, dtype=torch.int32, device="cuda") for _ in range(ranks)]
        run(values[rank], chosen, own, rank, [torch.zeros_like(area) for area in areas[0]], up, stop)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    for turn in (0, 1, 0, 1):  # two buffers in turn, as a chain of them has
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append(run(values[rank], chosen, own, rank, areas[turn], flags[turn], stop))
        torch.cuda.synchronize()
        assert not any(bool(flag.any()) for flag in flags[turn])
        for rank, made in enumerate(found):
            zero = torch.zeros((), dtype=dtype, device="cuda")
            if way == "expand":
                parts = [torch.where(needs(chosen[r], own, rank)[:, None], values[r], zero) for r in range(ranks)]
                assert torch.equal(made, torch.stack(parts))
            else:
                parts = [torch.where(needs(chosen[rank], own, r)[:, None], values[r][rank], zero) for r in range(ranks)]
                assert torch.equal(made, added(parts))
        for rank, area in enumerate(areas[turn]):  # what was not sent is as it was
            row_bytes = width * values[0].itemsize
            for r in (r for r in range(ranks) if r != rank):
                rows = area[stride * r :][: tokens * row_bytes].view(tokens, row_bytes)
                sent = needs(chosen[r], own, rank) if way == "expand" else needs(chosen[rank], own, r)
                assert bool((rows[~sent] == 0xFF).all())
