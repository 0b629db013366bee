"""On a GPU: the kernels of dropout draw the bits of the plain form, forward and backward, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.ops import counter, random
from fxpar.ops.counter import IndexCut

pytestmark = pytest.mark.gpu

ORIGIN = 0xFFFFFFF1
# Shapes with cuts (dim, outer, own, total, before): whole, plain, several runs, runs that are no multiple of counters'
# four elements, and what data ranks leave of the first dimension, of equal numbers of rows and others.
CASES: tuple[tuple[tuple[int, ...], tuple[tuple[int, int, int, int, int], ...]], ...] = (
    ((5, 7, 9), ()),
    ((2, 3000), ()),
    ((4, 6, 8), ((1, 1, 1, 2, 1),)),
    ((4, 6, 8), ((1, 3, 1, 4, 2),)),
    ((3, 5, 6), ((2, 3, 1, 2, 1),)),
    ((3, 5, 7), ((2, 1, 1, 2, 1),)),
    ((4, 6, 8), ((0, 1, 1, 2, 1),)),
    ((4, 6, 8), ((0, 1, 1, 2, 1), (1, 1, 1, 2, 1))),
    ((3, 5, 7), ((0, 1, 3, 8, 5), (2, 1, 1, 2, 1))),
    ((5, 8, 64), ((1, 2, 1, 2, 1),)),
    ((3, 10, 32), ((0, 1, 3, 8, 5), (2, 1, 1, 2, 1))),
    ((6, 5), ((0, 1, 3, 8, 5),)),
    ((4, 6, 8), ((0, 1, 2, 5, 3), (0, 2, 1, 2, 1))),
)


def state(seed: int = (1 << 40) + 5) -> Tensor:
    return torch.tensor([seed, 3, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "cuts"), CASES, ids=str)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_kernel_draws_the_bits_of_the_plain_form(
    shape: tuple[int, ...], cuts: tuple[tuple[int, int, int, int, int], ...], dtype: torch.dtype, is_compiled: bool
) -> None:
    torch.compiler.reset()  # the cases share one code, whose variants are counted
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_host = [IndexCut(*cut[:4], torch.tensor(cut[4])) for cut in cuts]
    wanted = counter.dropout(x, state(), 0.3, ORIGIN, on_host)
    ours = x.cuda().requires_grad_()
    on_device = [cut._replace(before=cut.before.cuda()) for cut in on_host]

    def call(value: Tensor, rng: Tensor) -> Tensor:
        return random.fused_dropout(value, rng, 0.3, ORIGIN, on_device)

    found = (torch.compile(call, fullgraph=True) if is_compiled else call)(ours, state().cuda())
    assert torch.equal(found.cpu(), wanted)
    found.sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad.cpu() == 0, wanted == 0)


@pytest.mark.parametrize(("shape", "cuts"), CASES, ids=str)
@pytest.mark.parametrize("is_operand", [False, True])
def test_words_say_of_each_element_what_the_plain_form_does(
    shape: tuple[int, ...], cuts: tuple[tuple[int, int, int, int, int], ...], is_operand: bool
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    on_host = [IndexCut(*cut[:4], torch.tensor(cut[4])) for cut in cuts]
    wanted = counter.dropout(x, state(), 0.3, ORIGIN, on_host)
    on_device = [cut._replace(before=cut.before.cuda()) for cut in on_host]
    origin = torch.tensor(ORIGIN, device="cuda") if is_operand else ORIGIN

    def call(value: Tensor, rng: Tensor) -> Tensor:
        return random.fused_dropout(value, rng, 0.3, origin, on_device)

    graph = make_fx(call, decomposition_table=random.DECOMPOSITIONS)(x.cuda(), state().cuda())
    assert "drawn_words" in graph.code
    assert torch.equal(graph(x.cuda(), state().cuda()).cpu(), wanted)


def test_a_large_tensor_is_dropped_at_its_rate() -> None:
    x = torch.ones(1 << 24, device="cuda")
    found = random.fused_dropout(x, state().cuda(), 0.1, ORIGIN, [])
    assert abs(float((found == 0).double().mean()) - 0.1) < 5 * (0.09 / x.numel()) ** 0.5
