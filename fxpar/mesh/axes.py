"""Ranks as a product of axes: strides, coordinates and the groups of a set of axes.

Enters: names and sizes of axes, from the fastest. Leaves: groups of ranks. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fxpar.errors import PlanError

# Groups in ascending order, each with its ranks in ascending order.
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Axes:
    """A product of axes: the first has stride 1, each further one the product of the sizes before it.

    Attributes:
        sizes: name and size of each axis, from the fastest.
        offset: number of the first rank.
    """

    sizes: tuple[tuple[str, int], ...]
    offset: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, from the fastest."""
        return tuple(name for name, _ in self.sizes)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.offset, self.offset + math.prod(size for _, size in self.sizes))

    def stride(self, axis: str) -> int:
        """Distance between neighbours on an axis.

        Raises:
            PlanError: there is no such axis.
        """
        self._check([axis])
        before = self.sizes[: self.names.index(axis)]
        return math.prod(size for _, size in before)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index on each axis.

        Raises:
            PlanError: there is no such rank.
        """
        if rank not in self.ranks:
            raise PlanError(
                f"rank {rank} is none of {self.ranks.start}–{self.ranks.stop - 1}",
                where="rank",
                remedy="choose another",
            )
        rest, found = rank - self.offset, {}
        for name, size in self.sizes:
            rest, found[name] = divmod(rest, size)
        return found

    def groups(self, axes: Collection[str]) -> Groups:
        """The groups over a set of axes: the ranks of a group agree on every other axis (SPEC section 1).

        Strides grow along `sizes`, so that ascending ranks are the order in which the axes are counted up, the fastest
        first; the order within `axes` says nothing.

        Raises:
            PlanError: there is no such axis.
        """
        self._check(axes)
        firsts = self._ranks_over([name for name in self.names if name not in axes])
        steps = self._ranks_over([name for name in self.names if name in axes])
        return tuple(tuple(self.offset + first + step for step in steps) for first in firsts)

    def factored(self, axis: str, factors: Sequence[tuple[str, int]]) -> Axes:
        """The same ranks with an axis written as a product of axes, the fastest first.

        Raises:
            PlanError: there is no such axis, or the product is not its size.
        """
        self._check([axis])
        place = self.names.index(axis)
        size, sizes = self.sizes[place][1], [size for _, size in factors]
        if math.prod(sizes) != size:
            raise PlanError(
                f"{axis}={size} and the product of its factors {'·'.join(map(str, sizes))} = {math.prod(sizes)} differ",
                where=axis,
                remedy="give factors whose product is the axis",
            )
        return Axes((*self.sizes[:place], *factors, *self.sizes[place + 1 :]), self.offset)

    def _ranks_over(self, axes: Iterable[str]) -> list[int]:
        """Ranks, less the offset, that are at 0 on all other axes, ascending."""
        found = [0]
        for axis in axes:
            stride, size = self.stride(axis), dict(self.sizes)[axis]
            found = [low + stride * index for index in range(size) for low in found]
        return found

    def _check(self, axes: Iterable[str]) -> None:
        unknown = next((axis for axis in axes if axis not in self.names), None)
        if unknown is not None:
            raise PlanError("there is no such axis", where=str(unknown), remedy=f"choose from {', '.join(self.names)}")
