"""Where tensors lie in memory.

Enters: tensors. Leaves: what is equal where they lie alike, to tell whether what was recorded for them fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Placed:
    """Where tensors lie, and whether they are trained; equal for equal addresses and strides.

    Asked at each step of all parameters: lists are made and compared in one call each, and the hash is kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = [each.data_ptr() for each in tensors]
        self._strides = [each.stride() for each in tensors]
        self._trained = [each.requires_grad for each in tensors]
        self._hash = hash((tuple(self._places), tuple(self._strides), tuple(self._trained)))

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors lie there still."""
        return (
            [each.data_ptr() for each in tensors] == self._places
            and [each.stride() for each in tensors] == self._strides
            and [each.requires_grad for each in tensors] == self._trained
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, Placed) and self._hash == other._hash
        return same and vars(self) == vars(other)

    def __hash__(self) -> int:
        return self._hash
