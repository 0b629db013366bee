"""Operands of operators on tensors of which each rank holds a part.

Enters: values of which some are parts with a place. Leaves: this rank's part of each, or an error that names the
tensors that do not go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar.errors import InputError
from fxpar.state.place import ShardSpec

WORKS = "optimizers that treat each element by itself (SGD, Adam, AdamW, Adagrad, Lion) work"


def refusal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputError:
    """The error for an operator that parts cannot be put through."""
    where = next(value.place.name for value in flat([*args, *kwargs.values()]) if is_sharded(value))
    if torch.Tag.nondeterministic_seeded in func.tags:
        return InputError(
            f"{func} would draw numbers of each rank's own",
            where=where,
            remedy="draw a whole tensor, the same on every rank, and copy_ it",
        )
    return InputError(
        f"{func} does not treat each element by itself, and this rank holds a part of them",
        where=where,
        remedy=f"{WORKS}; full_tensor() has all elements",
    )


def is_sharded(value: Any) -> bool:
    """Whether it is a part with a place."""
    return isinstance(value, DTensor) and hasattr(value, "place")


def is_held(value: Any) -> bool:
    """Whether a rank has the memory of a part of it; so too for what torch's state dicts have distributed."""
    return isinstance(value, DTensor)


def place_of(func: Any, values: Sequence[Any]) -> ShardSpec:
    """The place of operands that are cut alike.

    Raises:
        InputError: they are not.
    """
    place = place_or_none(func, values)
    assert place is not None, f"{func} has no part among its operands"
    return place


def place_or_none(func: Any, values: Sequence[Any]) -> ShardSpec | None:
    """The place of operands that are cut alike; None where none is cut.

    Raises:
        InputError: they are cut in different ways.
    """
    places: list[ShardSpec] = [value.place for value in values if is_sharded(value)]
    for place in places[1:]:
        if not places[0].is_like(place):
            raise InputError(
                f"{func} takes it together with {place.name}, of which the ranks hold other elements",
                where=places[0].name,
                remedy=f"{WORKS}; full_tensor() has all elements",
            )
    return places[0] if places else None


def part_of(value: Tensor, place: ShardSpec, func: Any = None) -> Tensor:
    """This rank's part of an operand: of a part itself, of a whole tensor what is cut out of it, of a number all.

    Raises:
        InputError: it is another part, or has another shape.
    """
    if is_sharded(value):
        sharded: Any = value
        if not sharded.place.is_like(place):
            raise InputError(
                f"holds other elements than {place.name} does on this rank",
                where=sharded.place.name,
                remedy="use its own",
            )
        return sharded._local_tensor  # type: ignore[no-any-return]
    if isinstance(value, DTensor):
        if value.shape == place.shape and tuple(value.placements) == place.placements:
            return value._local_tensor
        if all(placement.is_replicate() for placement in value.placements):  # whole on every rank
            return part_of(value._local_tensor, place, func)
        raise InputError(
            f"a DTensor placed {value.placements} does not fit", where=place.name, remedy="pass a whole tensor"
        )
    if value.numel() == 1 and func is not None and value.dim() <= len(place.shape):
        return value
    if value.shape != place.shape:
        fits = func is not None and value.dim() <= len(place.shape)
        fits = fits and all(n in (1, m) for n, m in zip(reversed(value.shape), reversed(place.shape), strict=False))
        if not fits:
            raise InputError(
                f"a tensor of shape {list(value.shape)} does not fit the whole, {list(place.shape)}",
                where=place.name,
                remedy="pass a tensor of the whole shape; each rank takes its part",
            )
        value = value.expand(place.shape)
    return place.cut(value)


def flat(values: Sequence[Any]) -> list[Any]:
    """Values and those of lists among them."""
    leaves: list[Any] = []
    for value in values:
        leaves += flat(value) if isinstance(value, (list, tuple)) else [value]
    return leaves
