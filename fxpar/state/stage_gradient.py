"""Gradients of whole parameters on one stage of a pipeline.

Enters: a gradient. Leaves: a tensor of the same memory that is like any other, but that norms of several are refused:
they would be another number on each stage. Parts of cut parameters (`Sharded`) know by their place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.state.routing import routed
from fxpar.state.sharded import Sharded
from fxpar.state.stage_norm import StageNorm, refusal

_NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm))


class StageGradient(Tensor):
    """A gradient of which the norms are `StageNorm`s. What else is computed of it is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._foreach_norm:
            raise refusal()
        if func is Tensor.__deepcopy__:
            return args[0].clone()
        with routed(Sharded):
            computed = func(*args, **(kwargs or {}))
        return computed.as_subclass(StageNorm) if func in _NORMS and computed.dim() == 0 else computed
