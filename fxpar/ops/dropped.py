"""Dropout of values on GPUs as an operator, and as what compiles well: bits drawn once, and arithmetic that fuses.

Enters: a rank's tensor, the generator's input, and how the tensor is cut. Leaves: what `fxpar.ops.counter.dropout`
computes, the same bits. By itself it is one kernel. Inductor, which fuses nothing with that, is told another form
(`DECOMPOSITIONS`): words of 32 bits, drawn in a kernel that reads no tensor, and plain operators that read one bit for
an element, which end up in the kernels of what stands before and behind. A backward that is compiled with its forward
has the same words: a sixteenth of the bytes of half precision is kept for it, and nothing is drawn twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.ops import counter
from fxpar.ops.counter import IndexCut
from fxpar.ops.torch_operators import torch_operator


@torch.library.custom_op("fxpar::dropout", mutates_args=())
def _dropout(
    x: Tensor,
    rng: Tensor,
    rank: Tensor,
    offset: Tensor,
    identity: Tensor,
    p: float,
    origin: int,
    run: int,
    ranks: int,
    unit: int,
) -> Tensor:
    """Dropout of a contiguous tensor; for the others see `fxpar.ops.kernels.DropoutShard`."""
    from fxpar.ops import kernels

    return kernels.dropout(x, kernels.DropoutShard(rng, rank, offset, identity, p, origin, run, ranks, unit))


@_dropout.register_fake
def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rng, rank, offset, identity, *ctx.options = inputs
    ctx.save_for_backward(rng, rank, offset, identity)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _dropout(grad.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * 9


_dropout.register_autograd(_backward, setup_context=_keep)


@torch_operator("drawn_words")
def drawn_words(
    rng: Tensor,
    rank: Tensor,
    offset: Tensor,
    identity: Tensor,
    p: float,
    origin: int,
    run: int,
    ranks: int,
    unit: int,
    count: int,
) -> Tensor:
    """Which of the `count` elements of a tensor stay, a bit each: i32[ceil(count / 32)]; others as of dropout."""
    from fxpar.ops import kernels

    return kernels.draw(kernels.DropoutShard(rng, rank, offset, identity, p, origin, run, ranks, unit), count)


@drawn_words.register_fake
def _words_shape(rng: Tensor, *args: Any) -> Tensor:
    return rng.new_empty((args[-1] + 31) // 32, dtype=torch.int32)


def dropped(x: Tensor, words: Tensor, p: float) -> Tensor:
    """A contiguous tensor with its dropped elements, of whose words the bits say which stay."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    stays = bits.flatten()[: x.numel()].view(x.shape) != 0
    return torch.where(stays, x * (1.0 / (1.0 - p)), x.new_zeros(()))


def _decomposed(x: Tensor, *draw: Any) -> Tensor:
    *tensors, p, origin, run, ranks, unit = draw
    rng, rank, offset, identity = tensors
    return dropped(x, drawn_words(rng, rank, offset, identity, p, origin, run, ranks, unit, x.numel()), p)


DECOMPOSITIONS = {torch.ops.fxpar.dropout.default: _decomposed}


def dropout(x: Tensor, rng: Tensor, p: float, origin: int | Tensor, cuts: list[IndexCut]) -> Tensor:
    """`fxpar.ops.counter.dropout`, the same bits."""
    kernel_cuts = counter.cuts_of_kernel(x, p, cuts)
    if kernel_cuts is None:
        return counter.dropout(x, rng, p, origin, cuts)
    outer, inner = kernel_cuts
    run, ranks, rank, unit, offset = 1, 1, rng, 0, rng
    if inner:
        run, rank = x.shape[inner[0].dim :].numel() // inner[0].outer, inner[0].before
        ranks = int(inner[0].total)
    if outer:
        unit = x.numel() * ranks // outer[0].own
        offset = outer[0].before * unit
    identity, number = (origin, 0) if isinstance(origin, Tensor) else (rng, origin)
    output: Tensor = _dropout(x.contiguous(), rng, rank, offset, identity, p, number, run, ranks, unit)
    return output
