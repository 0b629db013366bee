"""From the axes of the dense part to those of the expert part, and back: the same blocks on the same ranks.

Enters: a layout that names the axes of one part, and the mesh. Leaves: the layout that says the same in the axes of the
other part, or a refusal.

A layout speaks of one part. Both have the same atoms (`fxpar.mesh.atoms`), so that a layout is one of atoms first: an
axis of several atoms that cuts a value plainly is as many nested cuts, the outermost the slowest. Where the atoms of
each axis of the other part hold alike, or nest as one run of blocks, they are a placement on that axis. Nothing is sent
and no rank holds anything else than before. What cannot be said so has to be converted before, on the axes that it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxpar.errors import LayoutError
from fxpar.layout.layout import Layout, Placement
from fxpar.layout.nesting import joined_cut, listed, spelled
from fxpar.layout.symbols import divide
from fxpar.mesh.atoms import Atom
from fxpar.mesh.mesh import Mesh
from fxpar.mesh.purpose import DENSE, EXPERT

_OTHER = {DENSE: EXPERT, EXPERT: DENSE}


def in_part(layout: Layout, mesh: Mesh, part: str) -> Layout:
    """The same layout in the axes of a part, spelled in its order.

    Args:
        layout: names the axes of more than one rank of the other part.
        mesh: of the ranks.
        part: `dense` or `expert`.

    Raises:
        LayoutError: the layout names other axes; an axis of several atoms has blocks that are not plain, or is V; or
            the atoms of an axis of the part are not one placement.
        PlanError: the parts have no common refinement.
    """
    source, target = mesh.nested(_OTHER[part]), mesh.nested(part)
    where = f"'{layout}' in the {part} part"
    if {axis for axis, _ in layout} != set(source):
        known = " ".join(source) or "none"
        raise LayoutError(
            "it does not name the axes of the other part", where=where, remedy=f"give a layout on the axes {known}"
        )
    entries = [(_name(atom), item) for axis, p in layout for atom, item in _divided(axis, p, mesh, where)]
    fine = Layout(tuple(entries))
    sizes = {_name(atom): atom.size for axis in source for atom in mesh.atoms_of(axis)}
    runs = {axis: tuple(_name(atom) for atom in mesh.atoms_of(axis)) for axis in target}
    for order in itertools.permutations(target):
        found = _joined(fine, sizes, {axis: runs[axis] for axis in order})
        if found is not None:
            return spelled(found, target)
    wrong = next((axis for axis in target if not _is_alike(fine, runs[axis])), "")
    axis = wrong or next(axis for axis in target if len(runs[axis]) > 1)
    held = ", ".join(f"{name} is {p}" for name, p in layout if set(mesh.atoms_of(name)) & set(mesh.atoms_of(axis)))
    reason = "hold differently" if wrong else "are not one run of blocks"
    raise LayoutError(
        f"on axis {axis}: its ranks {reason} ({held})",
        where=where,
        remedy=f"convert the value on {' and '.join(source)} first, so that {axis} cuts it once or not at all",
    )


def _name(atom: Atom) -> str:
    return f"atom{atom.stride}"


def _divided(axis: str, placement: Placement, mesh: Mesh, where: str) -> list[tuple[Atom, Placement]]:
    """A placement on an axis as one on each of its atoms, outermost first: the inverse of `nesting.joined`."""
    atoms, found = mesh.atoms_of(axis), []
    for atom in atoms:
        found.append((atom, placement))
        pieces = []
        for piece in placement.pieces:
            size = divide(piece.size, atom.size)
            if len(atoms) > 1 and (size is None or not piece.is_plain):
                raise LayoutError(
                    f"on axis {axis}: {placement} is no plain cut over its atoms of "
                    f"{' and '.join(str(atom.size) for atom in atoms)} ranks",
                    where=where,
                    remedy=f"convert the value on {axis} first",
                )
            pieces.append(piece if size is None else replace(piece, size=size))
        placement = replace(placement, pieces=tuple(pieces))
    return found


def _is_alike(fine: Layout, run: Sequence[str]) -> bool:
    """Whether some atoms all cut plainly, or all hold the same without a cut."""
    held = [fine.on(name) for name in run]
    if len(held) > 1 and held[0].is_shard:
        return all(p.is_shard and p.dim == held[0].dim and all(q.is_plain for q in p.pieces) for p in held)
    return len(set(held)) <= 1


def _joined(fine: Layout, sizes: Mapping[str, int], runs: Mapping[str, Sequence[str]]) -> Layout | None:
    """The layout with the atoms of each axis as one, in this order; None where they are not one placement."""
    together = listed(fine, sizes, [name for run in runs.values() for name in run])
    if together is None:
        return None
    found = {}
    for axis, run in runs.items():
        first = together.on(run[0])
        cut = joined_cut(together, sizes, run) if first.is_shard and len(run) > 1 else first
        if cut is None or not _is_alike(together, run):
            return None
        found[axis] = cut
    return Layout.of(found)
