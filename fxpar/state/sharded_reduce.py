"""Values of all elements of tensors of which each rank holds a part: norms, sums, extremes, comparisons.

Enters: an operator over whole tensors and its arguments. Leaves: its value, the same on every rank. Each element counts
once: of what several ranks hold, the first of them counts, and padding never. All ranks must make the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.state import stage_norm
from fxpar.state.operand import is_sharded, part_of, place_of, refusal
from fxpar.state.place import ShardSpec, check_agreed, exchanged

_NORMS = frozenset(("linalg_vector_norm", "norm", "_foreach_norm"))
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_OVER_ALL = frozenset(("sum", "mean", "amax", "amin", "max", "min", "any", "all", "count_nonzero"))


def takes(name: str) -> bool:
    """Whether an operator of this name is here."""
    return name in _NORMS or name in _OVER_ALL or name in (_UNSCALE, "equal")


def run(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value of the operator on the whole tensors. A collective call.

    Raises:
        InputError: it is asked for by rows, or its operands are cut in different ways.
    """
    arguments = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    arguments |= dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if name == _UNSCALE:
        return _unscale(func, arguments)
    if name == "_foreach_norm":
        if any(_is_of_stage(value) for value in arguments["self"]):
            raise stage_norm.refusal()
        return norms(arguments["self"], arguments["ord"], arguments["dtype"])
    if name == "equal":
        return _equal(func, arguments)
    source = arguments["self"]
    dims = arguments.get("dim")
    dims = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    whole = not dims or {dim % source.dim() for dim in dims} == set(range(source.dim()))
    if (
        "out" in arguments
        or "other" in arguments
        or not is_sharded(source)
        or not whole
        or (name in ("max", "min") and dims)
    ):
        raise refusal(func, args, dict(kwargs))
    if name in _NORMS:
        (reduced,) = norms([source], arguments.get("ord", arguments.get("p", 2)), arguments.get("dtype"))
        reduced = reduced.as_subclass(stage_norm.StageNorm) if _is_of_stage(source) else reduced
    else:
        reduced = _over_all(name, source._local_tensor, source.place, arguments.get("dtype"))
    return reduced.reshape([1] * source.dim()) if arguments.get("keepdim") else reduced


def gathered_rows(local: Tensor, axis: str, place: ShardSpec, what: str) -> Tensor:
    """The values of all ranks of an axis, one row a rank.

    A gather and no reduction: with it NaN stays NaN in an extreme, and the sum's order is that of the ranks. With the
    values travels what they are of: ranks that ask in another order (over a set of names, which each process orders in
    its own way) would mix up numbers of different tensors.

    Args:
        what: the operator and the tensors.

    Raises:
        InputError: the ranks ask for different things. Where to know it would stop a GPU the numbers are NaN instead.
    """
    group = place.ranks.groups[axis]
    rows, agree = exchanged(local.reshape(-1).view(torch.uint8), group, what)
    values = rows.contiguous().view(local.dtype).reshape(group.size, *local.shape)
    if local.device.type != "cpu" and local.is_floating_point():
        return values.where(agree, math.nan)
    check_agreed(bool(agree), what)
    return values


# ---------------------------------------------------------------------- norms


def _is_of_stage(value: Any) -> bool:
    """Whether other ranks of a pipeline hold what belongs to it."""
    return is_sharded(value) and value.place.ranks.mesh.pp > 1


def norms(values: Sequence[Tensor], order: Any, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each tensor, of plain ones too; one collective for all that are cut by the same axes."""
    p = 2.0 if order is None else float(order)
    all_norms: list[Tensor] = [torch.empty(0)] * len(values)
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for index, value in enumerate(values):
        if is_sharded(value):
            sharded: Any = value
            by_axes.setdefault(tuple(axis for axis, _ in sharded.place.cuts), []).append(index)
        else:
            all_norms[index] = torch.linalg.vector_norm(value, p, dtype=dtype)
    for axes, indices in by_axes.items():
        parts: list[Any] = [values[index] for index in indices]
        what = f"a norm of {', '.join(part.place.name for part in parts)}"
        powers = torch.stack([_power(part.place.counted(part._local_tensor), p, part.device) for part in parts])
        for axis in axes:
            powers = _together(gathered_rows(powers, axis, parts[0].place, what), p)
        norms = powers if p in (0.0, math.inf, -math.inf) else powers.pow(1 / p)
        for index, part, norm in zip(indices, parts, norms.unbind(), strict=True):
            all_norms[index] = norm.to(dtype or (part.dtype.to_real() if part.dtype.is_complex else part.dtype))
    return all_norms


def _power(pieces: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """What is summed over pieces and ranks: the norm to its own power; extremes and counts as they are.

    In float64: the square of a norm that float32 holds may be beyond it.
    """
    piece_norms = [
        torch.linalg.vector_norm(piece, p, dtype=_wide(piece.dtype)).double() for piece in pieces if piece.numel()
    ]
    if not piece_norms:
        return torch.full((), math.inf if p == -math.inf else 0.0, dtype=torch.float64, device=device)
    norms = torch.stack(piece_norms)
    return _together(norms if p in (0.0, math.inf, -math.inf) else norms.pow(p), p)


def _together(rows: Tensor, p: float) -> Tensor:
    if math.isinf(p):
        return rows.amax(0) if p > 0 else rows.amin(0)
    return rows.sum(0)


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


# ---------------------------------------------------------------------- the others


def _over_all(name: str, part: Tensor, place: ShardSpec, dtype: torch.dtype | None) -> Tensor:
    pieces = [piece.reshape(-1) for piece in place.counted(part)]
    flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else part.new_empty(0)
    if name in ("sum", "mean", "count_nonzero"):
        kind = dtype or (part.dtype if part.dtype.is_floating_point or part.dtype.is_complex else torch.int64)
        local = flat.count_nonzero() if name == "count_nonzero" else flat.sum(dtype=_wide(kind) or kind)
        kind = torch.int64 if name == "count_nonzero" else kind
        local = local.double() if local.dtype.is_floating_point else local
        total = _reduced(name, local, place, lambda rows: rows.sum(0))
        return (total / place.shape.numel() if name == "mean" else total).to(kind)
    if name in ("any", "all"):
        local = flat.any() if name == "any" else flat.all()
        combine: Callable[[Tensor], Tensor] = lambda rows: rows.amax(0) if name == "any" else rows.amin(0)  # noqa: E731
        return _reduced(name, local.to(torch.uint8), place, combine).bool()
    is_max = name in ("amax", "max")
    lowest: Any = torch.finfo(part.dtype) if part.dtype.is_floating_point else torch.iinfo(part.dtype)
    none = flat.new_full((), (-math.inf if is_max else math.inf) if part.dtype.is_floating_point else 0)
    if not part.dtype.is_floating_point:
        none = flat.new_full((), lowest.min if is_max else lowest.max)
    local = none if not flat.numel() else flat.amax() if is_max else flat.amin()
    return _reduced(name, local, place, lambda rows: rows.amax(0) if is_max else rows.amin(0))


def _reduced(name: str, partial: Tensor, place: ShardSpec, combine: Callable[[Tensor], Tensor]) -> Tensor:
    for axis, _ in place.cuts:
        partial = combine(gathered_rows(partial, axis, place, f"{name} of {place.name}"))
    return partial


def _equal(func: Any, arguments: Mapping[str, Any]) -> bool:
    one, other = arguments["self"], arguments["other"]
    if one.shape != other.shape:
        return False
    place = place_of(func, [one, other])
    pairs = zip(place.counted(part_of(one, place)), place.counted(part_of(other, place)), strict=True)
    is_equal = torch.tensor(all(torch.equal(a, b) for a, b in pairs), dtype=torch.uint8, device=one.device)
    return bool(_reduced("equal", is_equal, place, lambda rows: rows.amin(0)))


def _unscale(func: Any, arguments: Mapping[str, Any]) -> None:
    """Gradients by a loss scale; what one rank finds infinite is so for all."""
    found_inf = arguments["found_inf"]
    parts = [value._local_tensor if is_sharded(value) else value for value in arguments["self"]]
    func(parts, found_inf, arguments["inv_scale"])
    axes = {axis: value.place for value in arguments["self"] if is_sharded(value) for axis, _ in value.place.cuts}
    for axis, place in axes.items():
        found_inf.copy_(gathered_rows(found_inf, axis, place, "infinities found in gradients").amax(0))
