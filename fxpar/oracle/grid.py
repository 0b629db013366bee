"""Brute force over several axes: what the ranks of a mesh hold of a value and of its gradient under a layout.

Enters: layouts that list their axes outermost first, tensors. Leaves: each rank's part by the rank's coordinates, and
whether given parts are the right ones. As a layout is defined: the outermost axis places the value
(`fxpar.oracle.ranks`), the next one what that leaves, and so on. Nothing of `fxpar.layout.nesting` is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from fxpar.layout.layout import Layout, Placement
from fxpar.oracle.ranks import close, divides, gradient_of, local_positions, padding, place, place_gradient, value_of

# A rank's coordinates, in the order of the mesh; a part for each rank.
Coordinates = tuple[int, ...]
Parts = Mapping[Coordinates, torch.Tensor]
_Entries = Sequence[tuple[str, Placement]]
_Place = Callable[[torch.Tensor, Placement, int, torch.Generator], list[torch.Tensor]]
_Join = Callable[[Sequence[torch.Tensor], Placement], torch.Tensor | None]

# Kinds of placement under which all ranks of an axis hold the same: of values, and of their gradients.
_SAME, _SAME_GRADIENT = "IR", "IP"
# Kinds under which their values, or their gradients, are summands.
_SUMS = "PR"


def coordinates(axes: Mapping[str, int]) -> list[Coordinates]:
    """Those of all ranks."""
    return list(itertools.product(*(range(n) for n in axes.values())))


def positions(layout: Layout, dim: int, size: int, axes: Mapping[str, int], rank: Coordinates) -> list[int]:
    """The positions of a dimension that a rank holds, in the order in which it holds them."""
    place_of, local = dict(zip(axes, rank, strict=True)), list(range(size))
    for axis, placement in layout:
        if placement.is_shard and placement.dim == dim:
            local = [local[position] for position in local_positions(placement, axes[axis], place_of[axis])]
    return local


def local_shape(layout: Layout, shape: Sequence[int], axes: Mapping[str, int]) -> list[int]:
    """Shape of a rank's part, padding included."""
    seen = list(shape)
    for axis, placement in layout:
        if placement.is_shard:
            n = axes[axis]
            seen[placement.dim] = len(local_positions(placement, n, 0)) + padding(placement, n, 0)
    return seen


def fits(layout: Layout, shape: Sequence[int], axes: Mapping[str, int]) -> bool:
    """Whether each axis cuts what those outside it leave into equal blocks; a padded dimension is one axis' alone."""
    cuts, seen = [placement for _, placement in layout if placement.is_shard], list(shape)
    for index, (axis, placement) in enumerate(layout):
        if not divides(placement, seen, axes[axis]):
            return False
        seen = local_shape(Layout(tuple(layout)[: index + 1]), shape, axes)
    return all(not cut.is_padded or sum(other.dim == cut.dim for other in cuts) == 1 for cut in cuts)


def spread(x: torch.Tensor, layout: Layout, axes: Mapping[str, int], generator: torch.Generator) -> Parts:
    """What each rank holds of the value x."""
    return _spread(x, layout, axes, generator, place, _SAME)


def spread_gradient(g: torch.Tensor, layout: Layout, axes: Mapping[str, int], generator: torch.Generator) -> Parts:
    """What each rank holds of the gradient of a value so laid out."""
    return _spread(g, layout, axes, generator, place_gradient, _SAME_GRADIENT)


def holds(parts: Parts, layout: Layout, axes: Mapping[str, int], x: torch.Tensor) -> bool:
    """Whether the ranks' parts are the value x so laid out."""
    whole = _joined(_listed(parts, axes, layout), list(layout), axes, value_of, _SAME)
    return whole is not None and close(whole, x)


def holds_gradient(parts: Parts, layout: Layout, axes: Mapping[str, int], g: torch.Tensor) -> bool:
    """Whether the ranks' parts are the gradient g of a value so laid out."""
    whole = _joined(_listed(parts, axes, layout), list(layout), axes, gradient_of, _SAME_GRADIENT)
    return whole is not None and close(whole, g)


def _spread(
    x: torch.Tensor, layout: Layout, axes: Mapping[str, int], generator: torch.Generator, put: _Place, same: str
) -> Parts:
    # Summands are of the whole, so that ranks that share a block hold the same; so is what a value is padded with. Of
    # a gradient every summand has zeros there.
    entries = sorted(layout, key=lambda entry: (entry[1].kind not in _SUMS, entry[1].is_padded != (put is place)))
    order = [axis for axis, _ in entries]

    def parts(value: torch.Tensor, entries: _Entries) -> dict[Coordinates, torch.Tensor]:
        if not entries:
            return {(): value}
        (axis, placement), rest = entries[0], entries[1:]
        if placement.kind in same:  # on every rank the same summands
            inner = parts(value, rest)
            inside = [inner] * axes[axis]
        else:
            inside = [parts(part, rest) for part in put(value, placement, axes[axis], generator)]
        return {(rank, *behind): part for rank, group in enumerate(inside) for behind, part in group.items()}

    ordered_parts = parts(x, entries)
    return {rank: ordered_parts[tuple(rank[list(axes).index(axis)] for axis in order)] for rank in coordinates(axes)}


def _listed(parts: Parts, axes: Mapping[str, int], layout: Layout) -> Parts:
    """The parts by coordinates in the order of the layout."""
    places = [list(axes).index(axis) for axis, _ in layout]
    return {tuple(rank[place] for place in places): part for rank, part in parts.items()}


def _joined(parts: Parts, entries: _Entries, axes: Mapping[str, int], join: _Join, same: str) -> torch.Tensor | None:
    """What the parts are of, from the innermost axis outwards; None where they are of nothing."""
    if not entries:
        return parts[()]
    (axis, placement), rest = entries[0], entries[1:]
    groups = [{key[1:]: part for key, part in parts.items() if key[0] == rank} for rank in range(axes[axis])]
    if placement.kind in same and rest:
        if any(not close(group[key], part) for group in groups[1:] for key, part in groups[0].items()):
            return None
        groups = groups[:1]
        return _joined(groups[0], rest, axes, join, same)
    wholes = [_joined(group, rest, axes, join, same) for group in groups]
    return None if any(whole is None for whole in wholes) else join([w for w in wholes if w is not None], placement)
