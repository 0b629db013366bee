"""Tracing models that have no memory.

Enters: a model with tensors on the meta device, and its example. Leaves, for as long as it is traced: a model whose
tensors are fakes on the CPU. On the meta device a constant made in `forward` (`torch.tensor([…], device=x.device)`)
would lose its values; on a fake CPU it has them, and the trace is the one of the model with memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextlib.contextmanager
def with_memory(model: nn.Module, batch: Any) -> Iterator[tuple[Any, Mapping[int, Tensor]]]:
    """Swaps the model's meta tensors for fakes, and back at the end.

    Yields:
        The batch, fakes in place of meta tensors (of all tensors where the model has no memory), and for the id of
        each fake of the model the tensor that it stands for.
    """
    stores: list[dict[str, Any]] = []
    for module in model.modules():
        stores += [module._parameters, module._buffers]
    places = [(store, name) for store in stores for name in store]
    kept = [(store, name, store[name]) for store, name in places]
    meta = [value for _, _, value in kept if value is not None and value.is_meta]
    if not meta and not any(isinstance(v, Tensor) and v.is_meta for v in pytree.tree_leaves(batch)):
        yield batch, {}
        return
    mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
    with mode:
        fakes = {id(value): _fake(value) for value in meta}
        batch = pytree.tree_map_only(Tensor, _fake, batch)
    try:
        for store, name, value in kept:
            if id(value) in fakes:
                store[name] = fakes[id(value)]
        yield batch, {id(fakes[id(value)]): value for value in meta}
    finally:
        for store, name, value in kept:
            store[name] = value


def _fake(value: Tensor) -> Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made
