"""Operators of fxpar as graphs name them: the targets of nodes.

Enters: nothing. Leaves: what a graph knows of its own operators. They have no rank, group or address, therefore they
cannot run; their records (`fxpar.ops`) say what they do to layouts and shapes, and what a rank runs in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Any, NoReturn

from torch import fx

from fxpar.ir.program import TensorType, output_layouts, output_types
from fxpar.layout.layout import I, Layout, P, Piece, Placement, R
from fxpar.layout.nesting import innermost, joined_cut, seen_by

# What a coercion is about: its axes, and what of a value ranks hold together.

# Reasons for a layout: it makes the shortest step of several legal ones; no other is legal.
CHEAPEST, ONLY = "cheapest", "nothing else is legal"


def axes_of(node: fx.Node) -> tuple[str, ...]:
    """Returns the axes over which an operator communicates, outermost first: of `fxpar.reduce_from[dp-tp]` dp, tp."""
    axis = node.kwargs.get("axis")
    return tuple(axis.split("-")) if isinstance(axis, str) else ()


def misnamed(node: fx.Node, axes: Iterable[str]) -> str:
    """Returns how to name the axes of an operator: once, in the order of the mesh; empty where they are."""
    names = axes_of(node)
    spelled_out = tuple(axis for axis in axes if axis in names)
    return "" if names == spelled_out else "-".join(spelled_out)


def pending(placement: Placement) -> Placement:
    """Returns the same shard as operations hold it: the gradients of shared blocks are summands."""
    return replace(placement, reduced=False) if placement.reduced else placement


def as_parameter(placement: Placement) -> Placement:
    """Returns the shard as a parameter holds it: gradients of shared blocks are equal on the ranks that share."""
    return replace(placement, reduced=True) if placement.is_shared else placement


def in_backward(placement: Placement) -> Placement:
    """Returns a value of the forward as the backward reads it: nothing carries a gradient there, so I and R are one."""
    return R if placement == I else pending(placement)


def dual(placement: Placement) -> Placement:
    """Returns how the gradient of a value is held: summands of R, the sum of I or P, the blocks of a shard.

    Of blocks that several ranks hold each has a summand, unless they are reduced. Padding gets none.
    """
    if not placement.is_shard:
        return P if placement == R else R
    shared = placement.is_shared and not placement.reduced
    return replace(placement, reduced=False, partial=shared, zeros=placement.is_padded)


def canonical_placement(placement: Placement, carries: bool) -> Placement:
    """Returns R for I where a value has no gradient; shared blocks of such a value are not reduced."""
    if carries:
        return placement
    return R if placement == I else pending(placement)


def is_finer(source: Placement, target: Placement) -> bool:
    """Returns whether every rank holds in `source` all that it holds in `target`, piece by piece."""
    if source.dim != target.dim or len(source.pieces) != len(target.pieces):
        return False
    return all(_is_part(a, b) for a, b in zip(source.pieces, target.pieces, strict=True))


def _is_part(piece: Piece, part: Piece) -> bool:
    if piece == part:
        return True
    if piece.padded or part.padded or not part.sharded:
        return False
    if not piece.sharded:
        return piece.length == part.length
    alike = replace(piece, copies=part.copies) == part
    return alike and piece.copies > part.copies and piece.copies % part.copies == 0


def shared_fraction(placement: Placement) -> tuple[int, int]:
    """Returns what part of a dimension several ranks hold, as a fraction of whole numbers."""
    shared = sum(int(p.length) for p in placement.pieces if not p.sharded or p.copies > 1)
    return shared, sum(int(p.length) for p in placement.pieces)


def computed_fraction(operands: Iterable[Placement], n: int) -> float:
    """Returns what part of a product a rank computes: that of the operand of which it holds least."""
    return min((held_fraction(placement, n) for placement in operands), default=1.0)


def held_fraction(placement: Placement, n: int) -> float:
    """Returns what part of a value a rank holds: 1/n of a shard, c/n where c ranks share blocks, else 1."""
    if not placement.is_shard:
        return 1.0
    parts = [(p.length, p.copies / n if p.sharded else 1.0) for p in placement.pieces]
    total = sum(int(length) for length, _ in parts if isinstance(length, int))
    if len({part for _, part in parts}) == 1 or any(not isinstance(length, int) for length, _ in parts):
        return max(part for _, part in parts)
    return sum(int(length) * part for length, part in parts) / total


def inner_view(
    value: fx.Node, axes: Mapping[str, int], names: Sequence[str], output: int = 0
) -> tuple[TensorType, Placement]:
    """Returns what the other axes leave of a value, and how some axes hold that: as one placement over all their ranks.

    Args:
        value: a node with layouts.
        axes: sizes of the mesh axes.
        names: the axes, outermost first.
        output: which of the node's tensors it is.

    Raises:
        ValueError: the axes hold it in different ways, or others cut across their blocks.
    """
    kind, last = _listed(value, axes, names, output)
    layout, placement = output_layouts(value)[output], last.on(names[0])
    if placement.is_shard:
        cut = joined_cut(last, axes, names)
        if cut is None:
            raise ValueError(f"{layout} of %{value.name} is not one run of blocks over {'-'.join(names)}")
        placement = cut
    elif any(last.on(axis) != placement for axis in names):
        raise ValueError(f"{layout} of %{value.name} is not alike on {'-'.join(names)}")
    return kind, placement


def apart_view(
    value: fx.Node, axes: Mapping[str, int], names: Sequence[str], output: int = 0
) -> tuple[TensorType, Placement]:
    """Does as `inner_view`, where each of the axes cuts a dimension of its own; the placement is that on the first.

    Raises:
        ValueError: others cut across their blocks.
    """
    kind, last = _listed(value, axes, names, output)
    return kind, last.on(names[0])


def _listed(value: fx.Node, axes: Mapping[str, int], names: Sequence[str], output: int) -> tuple[TensorType, Layout]:
    """Returns what the other axes leave of a value, and its layout with these axes last."""
    kind, layout = output_types(value)[output], output_layouts(value)[output]
    last = innermost(layout, axes, names)
    if last is None:
        raise ValueError(f"{layout} of %{value.name} cannot be listed with {'-'.join(names)} innermost")
    return TensorType(kind.dtype, seen_by(last, kind.shape, axes)[names[0]]), last


@cache
def _signature(stub: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(stub)


@dataclass(frozen=True, eq=False)
class GraphOperator:
    """An operator of fxpar as the target of a node; each is equal to itself alone.

    Attributes:
        stub: a function whose name, signature and docstring are the operator's; it is never called.
        stops_gradient: whether the results ignore the operands' values, so that no gradient flows through them.
        sums_gradients: whether values stay as they are and the ranks' gradients are summed: of parameters, in the main
            type, once a step.
    """

    stub: Callable[..., Any]
    _: KW_ONLY
    stops_gradient: bool = False
    sums_gradients: bool = False

    @property
    def __name__(self) -> str:
        return self.stub.__name__

    @property
    def signature(self) -> inspect.Signature:
        """Returns names and defaults of the arguments; the mesh axis, where it takes one, by name alone."""
        return _signature(self.stub)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Makes it callable, since FX takes callables alone for targets.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{self} is a graph operator without a process group: lower the program first")

    def __repr__(self) -> str:
        return f"fxpar.{self.__name__}"
