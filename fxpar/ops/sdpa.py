"""Attention and its gradient on local tensors: fused kernels where the device has one, else the plain form.

Enters: a rank's heads of query, key and value. Leaves: the result with the logarithms of the sums of exponentials, of
which the backward makes the probabilities again; and the gradients.

Source: Dao et al., "FlashAttention" (arXiv 2205.14135), section 3.1 and appendix B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional

from fxpar.ops.counter import IndexCut, dropout
from fxpar.ops.dropped_attention import drawn_probabilities, dropped_attention, dropped_attention_gradient, places


@dataclass(frozen=True)
class SdpaCall:
    """A call of attention.

    Attributes:
        query: [..., heads, s, e].
        key: [..., heads, t, e].
        value: [..., heads, t, v].
        mask: what a query sees (bool), or what is added to its scores; None where it sees all.
        is_causal: whether a query sees keys up to its own position.
        scale: of the scores; None for one over the root of the head size.
        enable_gqa: whether neighbouring heads share those of key and value.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """Returns the scale as a number."""
        return float(self.query.shape[-1] ** -0.5 if self.scale is None else self.scale)

    @property
    def bias(self) -> Tensor | None:
        """Returns the mask as it is added to scores."""
        if self.mask is None or self.mask.dtype != torch.bool:
            return self.mask
        zero = torch.zeros((), dtype=self.query.dtype, device=self.query.device)
        return zero.masked_fill(~self.mask, float("-inf"))

    def with_all_heads(self) -> SdpaCall:
        """Returns the call with a head of key and value for each of the query's."""
        return replace(self, key=self._repeated(self.key), value=self._repeated(self.value))

    def _repeated(self, x: Tensor) -> Tensor:
        if not self.enable_gqa or self.query.shape[-3] == x.shape[-3]:
            return x
        return x.repeat_interleave(self.query.shape[-3] // x.shape[-3], -3)

    def summed(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of a key or value x, of those of its repetitions."""
        if self.enable_gqa and gradient.shape[-3] != x.shape[-3]:
            gradient = gradient.unflatten(-3, (x.shape[-3], -1)).sum(-3)
        return gradient.sum_to_size(x.shape)


@dataclass(frozen=True)
class Drops:
    """Which probabilities are dropped (`fxpar.ops.counter.dropout`)."""

    rng: Tensor
    p: float
    origin: int | Tensor
    cuts: Sequence[IndexCut]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the values with their dropped elements, the others scaled."""
        return dropout(x, self.rng, self.p, self.origin, self.cuts)

    def fused(self, call: SdpaCall) -> tuple[Any, ...] | None:
        """Returns what operators of `fxpar.ops.dropped_attention` take after their tensors, if there is a kernel."""
        placed = places(call.query, call.key, call.value, self.p, self.cuts)
        if placed is None:
            return None
        identity, origin = (self.origin, 0) if isinstance(self.origin, Tensor) else (None, self.origin)
        sizes = (*call.query.shape[:3], call.key.shape[2], placed.heads)
        draw = (self.rng, identity, placed.rows_before, placed.heads_before, sizes, origin)
        words = drawn_probabilities(*draw, self.p, call.is_causal)
        return call.bias, words, self.p, call.is_causal, call.factor


def forward(call: SdpaCall, drops: Drops | None = None) -> tuple[Tensor, Tensor]:
    """Computes the result [..., s, v], and for each row of scores the logarithm of its sum of exponentials [..., s].

    A row whose mask allows nothing gives zeros, as PyTorch's operator does.
    """
    if drops is None:
        added = replace(call, mask=call.bias)
        fused = kernel(added)
        if fused is not None:
            return fused.forward(added)
    call = call.with_all_heads()
    dropping = None if drops is None else drops.fused(call)
    if dropping is not None:
        outputs: tuple[Tensor, Tensor] = dropped_attention(call.query, call.key, call.value, *dropping)
        return outputs
    scores, nothing = _scores(call)
    log_sum = _wide(scores).logsumexp(-1)
    probabilities = scores.softmax(-1)
    if nothing is not None:
        probabilities = probabilities.masked_fill(nothing, 0.0)
    dropped = probabilities if drops is None else drops(probabilities)
    return dropped @ call.value, log_sum


def backward(
    call: SdpaCall, gradient: Tensor, out: Tensor, log_sum: Tensor, drops: Drops | None = None, of_mask: bool = False
) -> tuple[Tensor, ...]:
    """Computes the gradients of query, key and value, and of a mask that is added.

    Args:
        gradient: of the result.
        out: the result.
        log_sum: the second result of `forward`.
        of_mask: whether the mask's gradient is wanted.
    """
    if drops is None and not of_mask:
        added = replace(call, mask=call.bias)
        fused = kernel(added)
        if fused is not None:
            return fused.backward(added, gradient, out, log_sum)
    query, full = call.query, call.with_all_heads()
    dropping = None if drops is None or of_mask else drops.fused(full)
    if dropping is not None:
        tensors = (query, full.key, full.value, gradient, out, log_sum)
        of_query, of_keys, of_values = dropped_attention_gradient(*tensors, *dropping)
        return of_query, call.summed(of_keys, call.key), call.summed(of_values, call.value)
    scores, nothing = _scores(full)
    # One number a row restores the probabilities, so the forward keeps no matrix of them.
    probabilities = (_wide(scores) - log_sum.unsqueeze(-1)).exp().to(scores.dtype)
    if nothing is not None:
        probabilities = probabilities.masked_fill(nothing, 0.0)
    dropped = probabilities if drops is None else drops(probabilities)
    of_dropped = gradient @ full.value.transpose(-2, -1)
    of_probabilities = of_dropped if drops is None else drops(of_dropped)
    # The sum over keys of probabilities times their gradients equals this product,
    # with dropout too (FlashAttention, arXiv 2205.14135).
    total = (gradient * out).sum(-1, keepdim=True)
    of_scores = probabilities * (of_probabilities - total)
    of_query = (of_scores @ full.key).sum_to_size(query.shape) * call.factor
    of_key = call.summed(of_scores.transpose(-2, -1) @ query, call.key) * call.factor
    of_value = call.summed(dropped.transpose(-2, -1) @ gradient, call.value)
    gradients = (of_query, of_key, of_value)
    return (*gradients, of_scores.sum_to_size(call.mask.shape)) if of_mask and call.mask is not None else gradients


def attention_with_dropout(call: Sequence[Any], drops: Sequence[Any]) -> Tensor:
    """Computes only the result of attention with dropout in a lowered graph; takes fields of `SdpaCall` and `Drops`."""
    return forward(SdpaCall(*call), Drops(*drops))[0]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _scores(call: SdpaCall) -> tuple[Tensor, Tensor | None]:
    """Returns the scores, and the rows of them that see nothing, whose scores are zero."""
    scores, mask = call.query @ call.key.transpose(-2, -1) * call.factor, call.mask
    if call.is_causal:
        rows = torch.arange(scores.shape[-2], device=scores.device)
        mask = rows.unsqueeze(1) >= torch.arange(scores.shape[-1], device=scores.device)
    if mask is None:
        return scores, None
    infinity = torch.full((), float("-inf"), dtype=scores.dtype, device=scores.device)
    scores = torch.where(mask, scores, infinity) if mask.dtype == torch.bool else scores + mask
    nothing = (scores == infinity).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0), nothing


aten = torch.ops.aten

# Of torch.nn.attention.SDPBackend.
_FLASH, _EFFICIENT, _CUDNN = 1, 2, 3
_CUDNN_FIRST = (9, 10)  # compute capabilities on which PyTorch prefers it
_FLASH_HEAD = 256  # the largest size of a head
_UNITS = 16  # rows of an added mask begin at multiples of so many elements
_ROWS = 32  # the efficient kernel has room for so many rows of sums at a time


# On the meta device tensors are shapes alone, and stand for those of a GPU that this machine has not. Which kernel it
# is follows from shapes, types and the device alone, so that the backward takes the one that the forward took.


@dataclass(frozen=True)
class Kernel:
    """A fused kernel, of calls whose mask is added to the scores.

    Attributes:
        forward: gives the result and the logarithms of the sums of exponentials, [b, h, s].
        backward: of a call, the gradient of the result, the result and these logarithms: gradients of query, key and
            value.
    """

    forward: Callable[[SdpaCall], tuple[Tensor, Tensor]]
    backward: Callable[[SdpaCall, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def kernel(call: SdpaCall) -> Kernel | None:
    """Returns the kernel for a call whose mask is added to the scores; None where the plain form is to be computed."""
    query, key, value = call.query, call.key, call.value
    if any(x.dim() != 4 for x in (query, key, value)) or query.shape[0] != key.shape[0]:
        return None
    if not query.shape[0]:  # a chunk of tokens without rows, which kernels of GPUs refuse
        return None
    if query.device.type == "cpu":
        args = (query, key, value, call.mask, 0.0, call.is_causal)
        choice = torch._fused_sdp_choice(*args, scale=call.scale, enable_gqa=call.enable_gqa)
        return _CPU if choice == _FLASH else None
    if query.device.type not in ("cuda", "meta") or query.shape[-1] % 8 or value.shape[-1] % 8:
        return None
    if query.device.type == "meta":
        return _of_any_gpu(call)
    # Asked of a tensor without values, PyTorch's own choice would be that of another device.
    parameters = cuda.SDPAParams(query, key, value, call.mask, 0.0, call.is_causal, call.enable_gqa)
    order = [int(choice) for choice in torch._C._get_sdp_priority_order()]
    if torch.cuda.get_device_capability(query.device)[0] in _CUDNN_FIRST:
        # A stable sort: cuDNN comes first, the others stay in PyTorch's order.
        order = sorted(order, key=lambda choice: choice != _CUDNN)
    for choice in order:
        candidate = _KERNELS.get(choice)
        if candidate is not None and candidate[0]() and candidate[1](parameters):
            return candidate[2]
    return None


def _of_any_gpu(call: SdpaCall) -> Kernel | None:
    """Returns the kernel that recent NVIDIA GPUs have, for a call on shapes alone: nothing can be asked of a device.

    On the newest PyTorch prefers cuDNN's, which gives the same results: tensors of the same sizes.
    """
    query, value, dtype = call.query, call.value, call.query.dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    if is_half and call.mask is None and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD:
        return _KERNELS[_FLASH][2]
    return _KERNELS[_EFFICIENT][2] if is_half or dtype == torch.float32 else None


# ---------------------------------------------------------------------- CPU


def _cpu(call: SdpaCall) -> tuple[Tensor, Tensor]:
    args = (call.query, call.key, call.value, 0.0, call.is_causal)
    output, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(*args, attn_mask=call.mask, scale=call.scale)
    return output, log_sum


def _cpu_backward(call: SdpaCall, gradient: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, ...]:
    args = (gradient, call.query, call.key, call.value, out, log_sum, 0.0, call.is_causal)
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, attn_mask=call.mask, scale=call.scale)
    return tuple(gradients)


# ---------------------------------------------------------------------- CUDA


def _no_bits(call: SdpaCall, dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns what stands in place of the state of a generator, of which nothing is drawn."""
    return torch.zeros(shape, dtype=dtype, device=call.query.device)


def _flash(call: SdpaCall) -> tuple[Tensor, Tensor]:
    args = (call.query, call.key, call.value, 0.0, call.is_causal, False)
    outputs: Any = aten._scaled_dot_product_flash_attention(*args, scale=call.scale)
    return outputs[0], outputs[1]


def _flash_backward(call: SdpaCall, gradient: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, ...]:
    lengths = (None, None, call.query.shape[-2], call.key.shape[-2])
    args = (gradient, call.query, call.key, call.value, out, log_sum, *lengths, 0.0, call.is_causal)
    state = _no_bits(call, torch.uint64, 2), _no_bits(call, torch.uint64)
    return tuple(aten._scaled_dot_product_flash_attention_backward(*args, *state, scale=call.scale))


def _bias(call: SdpaCall) -> Tensor | None:
    """Returns a mask in memory of which each row begins where the kernels want it."""
    if call.mask is None:
        return None
    shape = (*call.query.shape[:-1], call.key.shape[-2])
    spare = -shape[-1] % _UNITS
    whole = call.mask.expand(shape)
    return functional.pad(whole, [0, spare])[..., : shape[-1]] if spare else whole


def _efficient(call: SdpaCall) -> tuple[Tensor, Tensor]:
    # This kernel knows no heads that share keys and values.
    key, value = (_with_all_heads(x, call) for x in (call.key, call.value))
    args = (call.query, key, value, _bias(call), True, 0.0, call.is_causal)
    outputs: Any = aten._scaled_dot_product_efficient_attention(*args, scale=call.scale)
    # The kernel gives sums for whole tiles of rows. What goes beyond the
    # query's rows would be kept for the backward too.
    return outputs[0], outputs[1][..., : call.query.shape[-2]].contiguous()


def _efficient_backward(call: SdpaCall, gradient: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, ...]:
    key, value = (_with_all_heads(x, call) for x in (call.key, call.value))
    sums = functional.pad(log_sum, [0, -log_sum.shape[-1] % _ROWS])
    state = _no_bits(call, torch.int64), _no_bits(call, torch.int64)
    args = (gradient, call.query, key, value, _bias(call), out, sums, *state, 0.0, [True, True, True, False])
    kernel: Any = aten._scaled_dot_product_efficient_attention_backward
    of_query, of_key, of_value, _ = kernel(*args, call.is_causal, scale=call.scale)
    return of_query, _sum_of_heads(of_key, call.key), _sum_of_heads(of_value, call.value)


def _cudnn(call: SdpaCall) -> tuple[Tensor, Tensor]:
    args = (call.query, call.key, call.value, _bias(call), True, 0.0, call.is_causal, False)
    outputs: Any = aten._scaled_dot_product_cudnn_attention(*args, scale=call.scale)
    return outputs[0], outputs[1].reshape(call.query.shape[:-1])


def _cudnn_backward(call: SdpaCall, gradient: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, ...]:
    state = _no_bits(call, torch.int64), _no_bits(call, torch.int64)
    lengths = (None, None, call.query.shape[-2], call.key.shape[-2])
    args = (gradient, call.query, call.key, call.value, out, log_sum.unsqueeze(-1), *state, _bias(call), *lengths)
    kernel: Any = aten._scaled_dot_product_cudnn_attention_backward
    return tuple(kernel(*args, 0.0, call.is_causal, scale=call.scale))


def _with_all_heads(x: Tensor, call: SdpaCall) -> Tensor:
    """Returns a key or value with a head for each of the query's."""
    heads = call.query.shape[-3]
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def _sum_of_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of a key or value, from those of its repetitions."""
    return gradient if gradient.shape == x.shape else gradient.unflatten(-3, (x.shape[-3], -1)).sum(-3)


_CPU = Kernel(_cpu, _cpu_backward)
_KERNELS: dict[int, tuple[Callable[[], bool], Callable[[Any], bool], Kernel]] = {
    _FLASH: (cuda.flash_sdp_enabled, cuda.can_use_flash_attention, Kernel(_flash, _flash_backward)),
    _EFFICIENT: (
        cuda.mem_efficient_sdp_enabled,
        cuda.can_use_efficient_attention,
        Kernel(_efficient, _efficient_backward),
    ),
    _CUDNN: (cuda.cudnn_sdp_enabled, cuda.can_use_cudnn_attention, Kernel(_cudnn, _cudnn_backward)),
}
