"""The sum over GPUs in one kernel, of ranks that are streams of one GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fxpar.peer_memory.compiler.row_programs import Extent, RowProgram, RowStep

pytestmark = pytest.mark.gpu

# Of a rank: its tensor, the other's memory and its own, the flags of both, and the words that end waits.
Sum = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]], list[Tensor]]


def words() -> tuple[Tensor, Tensor]:
    """The words that end waits: the device's, and the host's."""
    word = torch.zeros(1, dtype=torch.int32)
    return word.cuda(), word.pin_memory()


def summed(values: list[Tensor], run: Sum) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """What both ranks have, of some sums of the same values one after the other."""
    from fxpar.peer_memory.runtime.push_kernels import FLAGS

    device, size = values[0].device, values[0].numel()
    areas = [[torch.full((size,), -7, device=device, dtype=values[0].dtype) for _ in range(2)] for _ in range(2)]
    flags = [[torch.zeros(FLAGS, device=device, dtype=torch.int32) for _ in range(2)] for _ in range(2)]
    stop = words()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[list[Tensor]]] = [[], []]
    for _ in range(3):  # two buffers in turn, as a chain of sums has them
        for turn in range(2):
            for rank, stream in enumerate(streams):
                here, there = areas[turn][rank], areas[turn][1 - rank]
                with torch.cuda.stream(stream):
                    found[rank].append(run(values[rank], there, here, flags[turn][1 - rank], flags[turn][rank], stop))
    torch.cuda.synchronize()
    assert not any(bool(flag.any()) for both in flags for flag in both)
    yield from zip(*found, strict=True)


@pytest.mark.parametrize("size", [1, 8191, 8192, 8193, 1_000_003, 12_582_912])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str)
def test_both_ranks_have_the_same_sum(size: int, dtype: torch.dtype) -> None:
    from fxpar.peer_memory.runtime.push_kernels import push_sum

    values = [(torch.randn(size, device="cuda") * 9).to(dtype) for _ in range(2)]
    for own, other in summed(values, lambda *ends: [push_sum(*ends)]):
        assert torch.equal(own[0], other[0])
        assert torch.equal(own[0], values[0] + values[1])


def test_the_host_ends_waits_for_a_rank_that_never_comes() -> None:
    from fxpar.peer_memory.runtime.push_kernels import FLAGS, push_sum

    value = torch.randn(12_582_912, device="cuda").bfloat16()
    there, here = torch.zeros_like(value), torch.zeros_like(value)
    up, down = (torch.zeros(FLAGS, device="cuda", dtype=torch.int32) for _ in range(2))
    stop = words()
    push_sum(value, there, here, up, torch.ones_like(down), stop)  # loads the kernel
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for _ in range(200):
        push_sum(value, there, here, up, down, stop)
    done.record()
    time.sleep(1.0)
    assert not done.query()
    stop[1].fill_(1)
    begun = time.monotonic()
    done.synchronize()
    assert time.monotonic() - begun < 5.0
    assert stop[0].item() == 1


def norm(width: int, kind: torch.dtype, wide: torch.dtype) -> RowProgram:
    """A bias and a residual, the norm of their sum with weight and bias, and what a backward takes."""
    full, row = Extent.FULL, Extent.ROW
    steps = [
        RowStep("add", (0, 1), kind, full),
        RowStep("add", (6, 2), kind, full),
        RowStep("to", (7,), wide, full),
        RowStep("var", (8, 0.0), wide, row),
        RowStep("mean", (8,), wide, row),
        RowStep("add", (9, 1e-5), wide, row),
        RowStep("rsqrt", (11,), wide, row),
        RowStep("sub", (8, 10), wide, full),
        RowStep("mul", (13, 12), wide, full),
        RowStep("mul", (14, 3), wide, full),
        RowStep("add", (15, 4), wide, full),
        RowStep("to", (16,), kind, full),
        RowStep("sum", (17,), kind, row),
        RowStep("mul", (17, 5), kind, full),
    ]
    operands = (Extent.COLUMN, full, Extent.COLUMN, Extent.COLUMN, row)
    return RowProgram(width, operands, tuple(steps), (7, 10, 12, 17, 18, 19))


ROWS = [(1, 2), (7, 24), (1000, 1536), (8192, 1536), (513, 4096), (8500, 4096), (770, 8191), (5000, 3)]


@pytest.mark.parametrize(("rows", "width"), ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_rows_of_sums(rows: int, width: int, dtype: torch.dtype) -> None:
    from fxpar.peer_memory.runtime.push_kernels import push_rows

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    program = norm(width, dtype, wide)
    values = [torch.randn(rows, width, device="cuda").to(dtype) for _ in range(2)]
    shapes = {Extent.FULL: (rows, width), Extent.ROW: (rows, 1), Extent.COLUMN: (width,)}
    operands = [torch.randn(shapes[extent], device="cuda").to(dtype) for extent in program.operands]
    reference = program.run(values[0] + values[1], operands)

    def run(x: Tensor, there: Tensor, here: Tensor, up: Tensor, down: Tensor, stop: Sequence[Tensor]) -> list[Tensor]:
        return push_rows(program.text, x, there, here, up, down, stop, operands)

    for own, other in summed(values, run):
        for one, two, known in zip(own, other, reference, strict=True):
            assert torch.equal(one, two)
            assert one.dtype == known.dtype
            near = {torch.bfloat16: 3e-2, torch.float32: 1e-3, torch.float64: 1e-9}[dtype]
            torch.testing.assert_close(one, known, rtol=near, atol=near * max(width**0.5, 1))


MORE: list[tuple[int, int, int, torch.dtype]] = [  # ranks, rows, width
    (4, 8190, 1536, torch.bfloat16),
    (4, 513, 4096, torch.float32),
    (4, 1, 2, torch.float64),
    (4, 770, 8191, torch.float16),
    (3, 1000, 1537, torch.bfloat16),
    (8, 7, 24, torch.float64),
    (8, 1000, 2304, torch.bfloat16),
]


@pytest.mark.parametrize(("ranks", "rows", "width", "dtype"), MORE, ids=str)
@pytest.mark.parametrize("is_sent", [False, True], ids=["alone", "copies"])
def test_rows_of_sums_over_more_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, rows: int, width: int, dtype: torch.dtype, is_sent: bool
) -> None:
    from fxpar.peer_memory.compiler.symmetric_buffer import added, row_blocks
    from fxpar.peer_memory.runtime import push_kernels
    from fxpar.peer_memory.runtime.push_kernels import FLAGS

    for name in ("_SENDING", "_ADDING", "_COMPUTING"):  # one GPU has room for the programs of all of them
        monkeypatch.setattr(push_kernels, name, 1024 // ranks)
    program = norm(width, dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    values = [torch.randn(rows, width, device="cuda").to(dtype) for _ in range(ranks)]
    shapes = {Extent.FULL: (rows, width), Extent.ROW: (rows, 1), Extent.COLUMN: (width,)}
    operands = [torch.randn(shapes[extent], device="cuda").to(dtype) for extent in program.operands]
    reference = program.run(added(values), operands)
    blocks = row_blocks(values[0], ranks)
    size = -(-blocks.bytes // 4096) * 4096
    areas = [[torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(ranks)] for _ in range(2)]
    flags = [[torch.zeros(FLAGS, dtype=torch.int32, device="cuda") for _ in range(ranks)] for _ in range(2)]
    stop = words()
    for rank in range(ranks):  # a rank's kernel cannot be loaded while another's waits for it: here all flags are up
        up = [torch.ones(FLAGS, dtype=torch.int32, device="cuda") for _ in range(ranks)]
        scratch = [torch.zeros_like(area) for area in areas[0]]
        push_kernels.push_blocks(program.text, values[rank], rank, scratch, up, stop, operands, is_sent)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    for turn in (0, 1, 0, 1):  # two buffers in turn, as a chain of sums has them
        for owner, sender in itertools.product(range(ranks), repeat=2):
            if is_sent and owner != sender:
                part = values[sender][blocks.owned(owner)].contiguous().view(torch.uint8).view(-1)
                areas[turn][owner][blocks.stride * sender :][: part.numel()].copy_(part)
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                given = (values[rank], rank, areas[turn], flags[turn], stop, operands, is_sent)
                found.append(push_kernels.push_blocks(program.text, *given))
        torch.cuda.synchronize()
        assert not any(bool(flag.any()) for flag in flags[turn])
        for own in found:
            for one, two, known in zip(found[0], own, reference, strict=True):
                assert torch.equal(one, two)
                assert one.dtype == known.dtype
                near = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-3, torch.float64: 1e-9}[dtype]
                torch.testing.assert_close(one, known, rtol=near, atol=near * max(width**0.5, 1))
