"""Atoms: the finest axes of a mesh, of which all its other axes are made.

Enters: parts of a mesh, each the same ranks as a product of axes. Leaves: their common refinement, and groups of ranks.
Needs no torch.

Each part turns the ranks as the wheels of a counter: its boundaries are the strides 1, n1, n1·n2, …. The common
refinement has the boundaries of all parts. It is one where of any two boundaries one divides the other; every axis is
then a run of atoms, whichever part it is of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxpar.errors import PlanError

# Groups in ascending order, each with its ranks in ascending order.
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Atom:
    """Ranks `stride` apart, `size` of them."""

    size: int
    stride: int

    @property
    def end(self) -> int:
        """The stride of what is next."""
        return self.size * self.stride

    def index(self, place: int) -> int:
        """Where a rank stands on it.

        Args:
            place: the rank, less the number of the first one.
        """
        return place // self.stride % self.size


def refined(parts: Mapping[str, Sequence[tuple[str, int]]]) -> tuple[Atom, ...]:
    """The common refinement of several products of axes over the same ranks, from the fastest atom.

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
    """Ranks that are at 0 on all other atoms, ascending, less the number of the first one."""
    ranks = [0]
    for atom in sorted(atoms, key=lambda atom: atom.stride):
        ranks = [low + atom.stride * index for index in range(atom.size) for low in ranks]
    return ranks


def groups_over(atoms: Iterable[Atom], others: Iterable[Atom], offset: int = 0) -> Groups:
    """The groups over some atoms: the ranks of a group agree on every other one (SPEC section 1).

    Ascending ranks count the atoms up, the fastest first, whatever their order here.

    Args:
        atoms: those over which the ranks of a group differ.
        others: all others of the mesh.
        offset: number of the first rank.
    """
    firsts, steps = ranks_over(others), ranks_over(atoms)
    return tuple(tuple(offset + first + step for step in steps) for first in firsts)


def index_on(atoms: Sequence[Atom], place: int) -> int:
    """Where a rank stands among all ranks of some atoms.

    Args:
        atoms: in nesting order, the outermost first.
        place: the rank, less the number of the first one.
    """
    index = 0
    for atom in atoms:
        index = index * atom.size + atom.index(place)
    return index


def ranks_of(atoms: Iterable[Atom]) -> int:
    """How many ranks some atoms have."""
    return math.prod(atom.size for atom in atoms)
