"""Where tensors lie in memory.

Enters: tensors. Leaves: what is equal where they lie alike, to tell whether what was recorded for them fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

_PLACE = Tensor.data_ptr


class TensorAddresses:
    """Where tensors lie, and whether they are trained; equal for equal addresses, sizes and strides.

    Asked at each step of all parameters: what Dynamo asks of a compiled function's tensors is asked in one call, and
    the hash is kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = list(map(_PLACE, tensors))
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        trained = [tensor.requires_grad for tensor in tensors]
        self._facts = (self._places, sizes, strides, trained)
        self._hash = hash(tuple(self._places))
        # Types and devices too, and all as the surrounding has it (inference mode).
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors lie there still; not, too, where the surrounding is another."""
        return bool(self._guards.check(*tensors)) and list(map(_PLACE, tensors)) == self._places

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TensorAddresses) and self._facts == other._facts)

    def __hash__(self) -> int:
        return self._hash
