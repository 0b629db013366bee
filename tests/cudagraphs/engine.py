"""What stands in for Transformer Engine's `make_graphed_callables` where there is no GPU: the same, on tapes.

It follows version 2.16: how often a module is run before it is recorded, what an order must have, which samples share
their memory, and until when what a graph has computed may be read. What may not be read any more is NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.cudagraphs import transformer_engine
from fxpar.cudagraphs.pool import StandInPool, Tape
from fxpar.runtime.graph_modes import recorder

_WARM_UPS = 3
Sample = tuple[Tensor, ...]


class Calls:
    """The arguments of all calls: of each its order and its samples, which it has made some share."""

    def __init__(self) -> None:
        self.orders: list[list[int] | None] = []
        self.samples: list[list[Sample]] = []


SEEN = Calls()


def passes_of(order: Sequence[int], layers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns for each forward and backward of an order the numbers of its samples, and 1 or -1.

    Raises:
        ValueError: an order has other numbers of forwards and backwards.
    """
    chunks = max(order)
    count = len(order) // chunks // 2
    if chunks * count * 2 != len(order) or len(layers) != chunks:
        raise ValueError(f"an order of {len(order)} for {len(layers)} chunks, the last of which is {chunks}")
    seen: dict[int, int] = defaultdict(int)
    passes: list[tuple[int, int]] = []
    for number in order:
        if type(number) is not int or not number:
            raise TypeError(f"{number} is no whole chunk")
        chunk = abs(number) - 1
        start = sum(layers[:chunk]) * count + seen[number] * layers[chunk]
        seen[number] += 1
        if seen[-abs(number)] > seen[abs(number)] or seen[number] > count:
            raise ValueError(f"{number} at {len(passes)} is one too many")
        indices = range(start, start + layers[chunk])
        passes += [(i, 1) for i in indices] if number > 0 else [(i, -1) for i in reversed(indices)]
    return passes


def share(samples: list[Sample], order: Sequence[int], layers: Sequence[int]) -> None:
    """Gives samples the memory of others of their shapes whose backward has run by then."""
    free: dict[Any, list[int]] = defaultdict(list)
    kinds = [tuple((value.shape, value.dtype) for value in sample) for sample in samples]
    count = len(order) // max(order) // 2
    seen: dict[int, int] = defaultdict(int)
    for number in order:
        chunk = abs(number) - 1
        start = sum(layers[:chunk]) * count + seen[number] * layers[chunk]
        seen[number] += 1
        for i in range(start, start + layers[chunk]):
            if number < 0:
                free[kinds[i]].append(i)
            elif free[kinds[i]]:
                samples[i] = samples[free[kinds[i]].pop(0)]


_WEAK = (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.int8, torch.bool)


def _weak(value: Tensor) -> Tensor:
    """Returns what is left where Transformer Engine keeps an address, a shape and a type of a tensor alone."""
    if value.dtype not in _WEAK:
        raise TypeError(f"Unsupported dtype: {value.dtype}")
    strides = torch.empty(value.shape, device="meta").stride()
    return value.detach().as_strided(value.shape, strides, value.storage_offset())


class _Recorded:
    """Graphs of all forwards and backwards, in the order in which they are replayed."""

    def __init__(
        self, modules: Sequence[nn.Module], samples: list[Sample], passes: list[tuple[int, int]], reuses: bool
    ) -> None:
        self.pool, self.samples, self.passes, self.reuses = StandInPool(), samples, passes, reuses
        self.outputs: dict[int, tuple[Tensor, ...]] = {}
        self.tangents: dict[int, list[Tensor | None]] = {}
        self.gradients: dict[int, list[Tensor]] = {}
        self.graphs: dict[tuple[int, int], Tape] = {}
        self.position, self.flying, self.last = 0, set[int](), -1
        shared: dict[Any, list[Tensor | None]] = {}
        for i, sign in passes:
            if sign > 0:
                self.graphs[i, 1], self.outputs[i] = self.pool.record(partial(modules[i], *samples[i]))
                continue
            kinds = tuple((o.shape, o.dtype) for o in self.outputs[i] if o.requires_grad)
            empty = [torch.empty_like(o) if o.requires_grad else None for o in self.outputs[i]]
            self.tangents[i] = shared.setdefault(kinds, empty)
            self.graphs[i, -1], self.gradients[i] = self.pool.record(partial(self.backward, i))
        if reuses:
            self.outputs = {i: tuple(map(_weak, outputs)) for i, outputs in self.outputs.items()}
            last = passes[-1][0]
            self.gradients |= {i: [*map(_weak, gradients)] for i, gradients in self.gradients.items() if i != last}
        self._spoil()

    def backward(self, i: int) -> list[Tensor]:
        """Runs a backward; returns gradients of those of its sample that require one."""
        inputs = [value for value in self.samples[i] if value.requires_grad]
        ends = [o for o in self.outputs[i] if o.requires_grad]
        torch.autograd.backward(ends, [t for t in self.tangents[i] if t is not None])
        gradients = [value.grad for value in inputs if value.grad is not None]
        for value in inputs:
            value.grad = None
        return gradients

    def replay(self, i: int, sign: int) -> None:
        """Replays a graph, which must be the next one, and spoils what Transformer Engine no longer keeps."""
        while (of_next := self.passes[self.position % len(self.passes)])[1] < 0 and not self.gradients[of_next[0]]:
            self.flying.remove(of_next[0])  # of what has no gradient the backward does nothing
            self.position += 1
        assert (i, sign) == of_next, "graphs are replayed in another order"
        self.position += 1
        self.graphs[i, sign].replay()
        (self.flying.add if sign > 0 else self.flying.remove)(i)
        self.last = self.last if sign > 0 else i
        self._spoil()

    def _spoil(self) -> None:
        if not self.reuses:
            return
        static = [v for sample in self.samples for v in sample if not v.requires_grad]
        static += [t for tangents in self.tangents.values() for t in tangents if t is not None]
        # Gradients are there until the backward after theirs, and outputs until their backward.
        live = [o for i in self.flying for o in self.outputs[i]]
        live += self.gradients.get(self.last, [])
        self.pool.scramble(static, [self.graphs[i, -1] for i in self.flying], live)


def _graphed(recorded: _Recorded, i: int) -> Any:
    sample = recorded.samples[i]

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            with torch.no_grad():
                for static, value in zip(sample, inputs, strict=True):
                    if static.data_ptr() != value.data_ptr():
                        static.copy_(value)
            recorded.replay(i, 1)
            return tuple(value.detach() for value in recorded.outputs[i])

        @staticmethod
        def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
            for static, value in zip(recorded.tangents[i], tangents, strict=True):
                if static is not None:
                    static.copy_(value)
            recorded.replay(i, -1)
            gradients = iter(recorded.gradients[i])
            of_sample = [next(gradients) if value.requires_grad else None for value in sample]
            return tuple(None if gradient is None else gradient.detach() for gradient in of_sample)

    def call(*inputs: Tensor) -> Any:
        return Graphed.apply(*inputs)  # type: ignore[no-untyped-call]

    def reset() -> None:
        for sign in (1, -1):
            recorded.graphs[i, sign].reset()

    call.reset = reset  # type: ignore[attr-defined]
    return call


def _warm_up(module: nn.Module, sample: Sample) -> None:
    for _ in range(_WARM_UPS):
        outputs = [value for value in module(*sample) if value.requires_grad]
        torch.autograd.backward(outputs, [torch.full_like(value, torch.nan) for value in outputs])
        for value in sample:
            value.grad = None


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    allow_unused_input: bool,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    _reuse_graph_input_output_buffers: bool = False,
) -> Any:
    """Runs modules some times, then records their forwards and backwards; what is returned replays them.

    With an order there are microbatches: samples and results are in the order of chunks, microbatches and layers.
    """
    if _order is None:
        modules, samples, passes = [modules], [sample_args], [(0, 1), (0, -1)]
    else:
        layers = _num_layers_per_chunk or []
        samples, passes = sample_args if isinstance(sample_args, list) else list(sample_args), passes_of(_order, layers)
        if len(modules) != sum(layers) or len(samples) * 2 != len(passes):
            raise ValueError(f"{len(modules)} modules and {len(samples)} samples for {len(passes)} passes")
        if _reuse_graph_input_output_buffers:
            share(samples, _order, layers)
        count, starts = len(_order) // len(layers) // 2, [sum(layers[:chunk]) for chunk in range(len(layers))]
        modules = [
            modules[start + layer]
            for start, length in zip(starts, layers, strict=True)
            for _ in range(count)
            for layer in range(length)
        ]
    SEEN.orders.append(_order)
    SEEN.samples.append(samples)
    for i, sign in passes:
        if sign > 0:
            _warm_up(modules[i], samples[i])
    recorded = _Recorded(modules, samples, passes, _reuse_graph_input_output_buffers)
    graphed = tuple(_graphed(recorded, i) for i in range(len(samples)))
    return graphed[0] if _order is None else graphed


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has graphs take this for Transformer Engine."""
    engine = SimpleNamespace(make_graphed_callables=make_graphed_callables)
    monkeypatch.setattr(transformer_engine, "_engine", lambda: engine)
    monkeypatch.setattr(transformer_engine, "check_engine", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorder.get() is not None)
