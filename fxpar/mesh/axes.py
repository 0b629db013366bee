"""Ranks as a product of axes: strides, coordinates and the groups of a set of axes.

Enters: names and sizes of axes, from the fastest. Leaves: groups of ranks. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fxpar.errors import PlanError
from fxpar.mesh.atoms import Atom, Groups, groups_over


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

    def stride_text(self, axis: str) -> str:
        """How far apart neighbours on an axis are, and why: `tp·cp = 4`."""
        before = self.names[: self.names.index(axis)]
        return f"{'·'.join(before)} = {self.stride(axis)}" if before else "1"

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
        rest, coordinates = rank - self.offset, {}
        for name, size in self.sizes:
            rest, coordinates[name] = divmod(rest, size)
        return coordinates

    def groups(self, axes: Collection[str]) -> Groups:
        """The groups over a set of axes: the ranks of a group agree on every other axis (SPEC section 1).

        The order within `axes` says nothing.

        Raises:
            PlanError: there is no such axis.
        """
        self._check(axes)
        atoms = [self._atom(name) for name in self.names if name in axes]
        others = [self._atom(name) for name in self.names if name not in axes]
        return groups_over(atoms, others, self.offset)

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

    def groups_text(self, axes: Collection[str]) -> str:
        """The first groups over a set of axes, in brackets."""
        groups = self.groups(axes)
        some = ", ".join(f"[{', '.join(map(str, group))}]" for group in groups[:2])
        return some + (", …" if len(groups) > 2 else "")

    def _atom(self, axis: str) -> Atom:
        return Atom(dict(self.sizes)[axis], self.stride(axis))

    def _check(self, axes: Iterable[str]) -> None:
        unknown = next((axis for axis in axes if axis not in self.names), None)
        if unknown is not None:
            raise PlanError("there is no such axis", where=str(unknown), remedy=f"choose from {', '.join(self.names)}")
