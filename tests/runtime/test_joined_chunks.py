"""What is computed in chunks is written where the whole is, and a backward finds it there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpar.ir.program import output_node
from fxpar.ops.token_chunks import chunks_joined
from fxpar.plan.plan import Plan
from fxpar.runtime.inductor import Inductor, _keep_joined, _name_inputs, _traced


def parts(x: Tensor, counts: Sequence[int], dim: int = 0) -> list[Tensor]:
    return list(x.split(list(counts), dim))


@pytest.mark.parametrize(("counts", "width"), [((2, 2), 24), ((1, 2, 2), 5), ((0, 3), 7)])
def test_chunks_lie_where_the_whole_is(counts: tuple[int, ...], width: int) -> None:
    """That of a kernel, which a product reads as rows; those of products; and what has memory of its own."""

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        norms = [chunk * torch.rsqrt(chunk.square().mean(-1, keepdim=True) + 1) for chunk in parts(x, counts)]
        rows = [norm.view(-1, width) for norm in norms]
        products = [row @ w for row in rows]
        own = parts(x, counts)
        return [chunks_joined(rows, 0), chunks_joined(products, 0), chunks_joined(own, 0), *rows, *products]

    values = [torch.randn(sum(counts), 3, width), torch.randn(width, 4)]
    with FakeTensorMode() as mode:
        fakes = [torch.empty(value.shape) for value in values]
    with fresh_cache():
        run = Inductor(Plan()).alone(step, fakes, mode, backward=False)
    results, reference = run([*values]), step(*values)
    for result, other in zip(results, reference, strict=True):
        torch.testing.assert_close(result, other)
    count = len(counts)
    for whole, chunks in ((results[0], results[3 : 3 + count]), (results[1], results[3 + count :])):
        memory = whole.untyped_storage().data_ptr()
        assert all(chunk.untyped_storage().data_ptr() == memory for chunk in chunks if chunk.numel())
    assert results[2].untyped_storage().data_ptr() != values[0].untyped_storage().data_ptr()


def test_rows_that_do_not_lie_together_are_copied() -> None:
    def step(x: Tensor) -> list[Tensor]:
        return [chunks_joined([chunk.sin() for chunk in parts(x, (1, 2), 1)], 1)]

    x = torch.randn(4, 3, 5)
    with FakeTensorMode() as mode:
        fakes = [torch.empty(x.shape)]
    with fresh_cache():
        run = Inductor(Plan()).alone(step, fakes, mode, backward=False)
    torch.testing.assert_close(run([x])[0], x.sin())


@torch.library.custom_op("fxpar_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Gives the columns of each matrix one after the other."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)


def test_what_an_operator_allocates_is_kept_as_it_lies() -> None:
    """As attention gives a token's heads beside each other."""

    def step(x: Tensor, dy: Tensor) -> list[Tensor]:
        chunks = [turned(chunk) for chunk in parts(x, (1, 2))]
        return [chunks[0] * 2, chunks_joined(chunks, 0) * dy]

    values = [torch.randn(3, 4, 5), torch.randn(3, 4, 5)]
    with FakeTensorMode() as mode:
        fakes = [torch.empty(value.shape) for value in values]
    with fresh_cache():
        pair = Inductor(Plan()).pair(step, fakes, mode, early=1, results=1)
    result, saved = pair.forward([values[0]])
    assert saved.stride() == (20, 1, 4)
    (gradient,) = pair.backward([saved, values[1]])
    for found, other in zip((result, gradient), step(*values), strict=True):
        torch.testing.assert_close(found, other)


def test_a_backward_finds_them_together() -> None:
    """Of chunks that are results anyway nothing more would be kept, and they would be copied there."""

    def step(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        chunks = [(chunk.sin() * 2) for chunk in parts(x, (2, 2))]
        return [*chunks, chunks[0] @ w, chunks_joined(chunks, 0).t() @ dy]

    values = [torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5)]
    with FakeTensorMode() as mode:
        fakes = [torch.empty(value.shape) for value in values]
    with fresh_cache():
        pair = Inductor(Plan()).pair(step, fakes, mode, early=2, results=3)
    *results, saved = pair.forward([*values[:2]])
    assert pair.saved == 1
    assert {*saved.shape} == {4, 6}  # it may be the other way round
    (gradient,) = pair.backward([saved, values[2]])
    for result, other in zip([*results, gradient], step(*values), strict=True):
        torch.testing.assert_close(result, other)
    assert results[0].untyped_storage().data_ptr() == saved.untyped_storage().data_ptr()


def test_what_the_forward_alone_reads_is_not_kept() -> None:
    def step(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        whole = chunks_joined([chunk.sin() for chunk in parts(x, (2, 2))], 0)
        return [(whole @ w).exp(), dy * 2]

    values = [torch.randn(4, 6), torch.randn(6, 5), torch.randn(4, 5)]
    with FakeTensorMode() as mode:
        fakes = [torch.empty(value.shape) for value in values]
    graph = _traced(step, fakes, mode)
    _name_inputs(graph.graph, 2)
    assert _keep_joined(graph.graph, "tangents_", 1) == 0
    assert len(output_node(graph.graph).args[0]) == 2  # type: ignore[arg-type]


def test_other_bits_of_a_chunk_are_copied() -> None:
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        return [chunks_joined([(chunk @ w).view(torch.int32) for chunk in parts(x, (1, 2))], 0)]

    values = [torch.randn(3, 4), torch.randn(4, 8)]
    with FakeTensorMode() as mode:
        fakes = [torch.empty(value.shape) for value in values]
    with fresh_cache():
        run = Inductor(Plan()).alone(step, fakes, mode, backward=False)
    (whole,) = run([*values])
    torch.testing.assert_close(whole.view(torch.float32), values[0] @ values[1])
