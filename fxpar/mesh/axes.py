"""Ranks as a product of axes: strides, coordinates and the groups of a set of axes.

Enters: names and sizes of axes, from the fastest. Leaves: groups of ranks. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, pairwise

from fxpar.errors import PlanError

# Atoms: the finest axes of a mesh, of which all its other axes are made.

# Groups in ascending order, each with its ranks in ascending order.
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Atom:
    """Ranks `stride` apart, `size` of them."""

    size: int
    stride: int

    @property
    def end(self) -> int:
        """Returns the stride of what is next."""
        return self.size * self.stride


def refined(parts: Mapping[str, Sequence[tuple[str, int]]]) -> tuple[Atom, ...]:
    """Returns the common refinement of several products of axes over the same ranks, from the fastest atom.

    Args:
        parts: by the part's name, names and sizes of its axes from the fastest.

    Raises:
        PlanError: there is none: two boundaries of which neither divides the other.
    """
    bounds: dict[int, tuple[str, list[str]]] = {}
    for part, axes in parts.items():
        stride, names = 1, list[str]()
        for name, size in axes:
            if size > 1:
                stride, names = stride * size, [*names, name]
                bounds.setdefault(stride, (part, names))
    atoms = []
    for low, high in pairwise([1, *sorted(bounds)]):
        if high % low:
            texts = [f"{'·'.join(bounds[n][1])} = {n} ranks of the {bounds[n][0]} part" for n in (low, high)]
            raise PlanError(
                f"the parts have no common refinement: {' and '.join(texts)}, and {low} does not divide {high}",
                where=", ".join(bounds[n][1][-1] for n in (low, high)),
                remedy="choose sizes so that of these two numbers one divides the other",
            )
        atoms.append(Atom(high // low, low))
    return tuple(atoms)


def ranks_over(atoms: Iterable[Atom]) -> list[int]:
    """Returns ranks that are at 0 on all other atoms, ascending, less the number of the first one."""
    ranks = [0]
    for atom in sorted(atoms, key=lambda atom: atom.stride):
        ranks = [low + atom.stride * index for index in range(atom.size) for low in ranks]
    return ranks


def groups_over(atoms: Iterable[Atom], others: Iterable[Atom], offset: int = 0) -> Groups:
    """Returns the groups over some atoms: the ranks of a group agree on every other one (SPEC section 1).

    Ascending ranks count the atoms up, the fastest first, whatever their order here.

    Args:
        atoms: those over which the ranks of a group differ.
        others: all others of the mesh.
        offset: number of the first rank.
    """
    firsts, steps = ranks_over(others), ranks_over(atoms)
    return tuple(tuple(offset + first + step for step in steps) for first in firsts)


# What the axes of a mesh are for.

DENSE, EXPERT = "dense", "expert"


class Cuts(StrEnum):
    """What of a model an axis shares out among its ranks."""

    LAYERS = "layers"
    BATCH = "batch"
    SEQUENCE = "sequence"
    FEATURES = "features"
    EXPERTS = "experts"


@dataclass(frozen=True)
class Purpose:
    """What an axis is for.

    Attributes:
        cuts: what its ranks share out.
        meaning: in a few words, for messages.
    """

    cuts: Cuts
    meaning: str


# Those of a part stand in the order in which they nest, the outermost first.
PURPOSES: Mapping[str, Purpose] = {
    "pp": Purpose(Cuts.LAYERS, "pipeline parallel"),
    "dp": Purpose(Cuts.BATCH, "data parallel"),
    "dp_out": Purpose(Cuts.BATCH, "data parallel, of the same experts or shards"),
    "dp_in": Purpose(Cuts.BATCH, "data parallel, of different experts or shards"),
    "cp": Purpose(Cuts.SEQUENCE, "context parallel"),
    "tp": Purpose(Cuts.FEATURES, "tensor parallel"),
    "edp": Purpose(Cuts.BATCH, "data parallel for experts"),
    "ep": Purpose(Cuts.EXPERTS, "expert parallel"),
    "etp": Purpose(Cuts.FEATURES, "tensor parallel within an expert"),
}

# The axes that may stand in a layout of each part. Activations nest in this order, the outermost axis first, whatever
# ranks are neighbours (DESIGN section 3). Layers are no dimension of a value: pp stands in no layout.
NESTING: Mapping[str, tuple[str, ...]] = {DENSE: ("dp", "cp", "tp"), EXPERT: ("edp", "ep", "etp")}


def axis_that(cuts: Cuts) -> str:
    """Names the dense part's axis whose ranks share that out, as the plan's option and messages call it."""
    return next(axis for axis in NESTING[DENSE] if PURPOSES[axis].cuts is cuts)


def joined_names(axes: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of all sets of axes that may communicate: `dp`, `tp`, `dp-tp`.

    Args:
        axes: in nesting order.
    """
    names = tuple(axes)
    sets = (combinations(names, count) for count in range(1, len(names) + 1))
    return tuple("-".join(some) for subsets in sets for some in subsets)


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
        """Returns the axes, from the fastest."""
        return tuple(name for name, _ in self.sizes)

    @property
    def ranks(self) -> range:
        """Returns all ranks."""
        return range(self.offset, self.offset + math.prod(size for _, size in self.sizes))

    def stride(self, axis: str) -> int:
        """Returns the distance between neighbours on an axis.

        Raises:
            PlanError: there is no such axis.
        """
        self._check([axis])
        before = self.sizes[: self.names.index(axis)]
        return math.prod(size for _, size in before)

    def stride_text(self, axis: str) -> str:
        """Returns how far apart neighbours on an axis are, and why: `tp·cp = 4`."""
        before = self.names[: self.names.index(axis)]
        return f"{'·'.join(before)} = {self.stride(axis)}" if before else "1"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the rank's index on each axis.

        Raises:
            PlanError: there is no such rank.
        """
        if rank not in self.ranks:
            raise PlanError(
                f"rank must be one of {self.ranks.start}–{self.ranks.stop - 1}, got {rank}",
                where="rank",
                remedy="choose another",
            )
        rest, coordinates = rank - self.offset, {}
        for name, size in self.sizes:
            rest, coordinates[name] = divmod(rest, size)
        return coordinates

    def groups(self, axes: Collection[str]) -> Groups:
        """Returns the groups over a set of axes: the ranks of a group agree on every other axis (SPEC section 1).

        The order within `axes` says nothing.

        Raises:
            PlanError: there is no such axis.
        """
        self._check(axes)
        atoms = [self._atom(name) for name in self.names if name in axes]
        others = [self._atom(name) for name in self.names if name not in axes]
        return groups_over(atoms, others, self.offset)

    def factored(self, axis: str, factors: Sequence[tuple[str, int]]) -> Axes:
        """Returns the same ranks with an axis written as a product of axes, the fastest first.

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
        """Returns the first groups over a set of axes, in brackets."""
        groups = self.groups(axes)
        some = ", ".join(f"[{', '.join(map(str, group))}]" for group in groups[:2])
        return some + (", …" if len(groups) > 2 else "")

    def _atom(self, axis: str) -> Atom:
        return Atom(dict(self.sizes)[axis], self.stride(axis))

    def _check(self, axes: Iterable[str]) -> None:
        unknown = next((axis for axis in axes if axis not in self.names), None)
        if unknown is not None:
            raise PlanError("there is no such axis", where=str(unknown), remedy=f"choose from {', '.join(self.names)}")


def coordinates(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Returns a rank's index on each axis.

    Args:
        axes: names and sizes, the outermost first.
    """
    indices = {}
    for axis, n in reversed(list(axes.items())):
        indices[axis], rank = rank % n, rank // n
    return {axis: indices[axis] for axis in axes}
