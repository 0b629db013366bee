"""Computes with tensors of which each rank holds a part.

What treats each element by itself runs on the parts, where all operands are cut alike. Norms, sums, extremes and
comparisons count each element once, over all ranks. All else would differ between ranks and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxpar.errors import InputError
from fxpar.runtime.shard_spec import ShardSpec, check_agreed, exchanged

Wrap = Callable[[Tensor, ShardSpec], Tensor]

# Treat each element by itself, and torch does not say so of them; and what makes tensors of the same shape.
_ELEMENTWISE = frozenset(
    "zero_ fill_ fill copy_ copy masked_fill masked_fill_ copysign_ detach alias _to_copy lift_fresh clone conj _conj "
    "empty_like zeros_like ones_like full_like where".split()
)
# Of lists: the operation of the name on each tensor of the lists.
_FOREACH = frozenset(
    "add sub mul div addcdiv addcmul lerp sqrt rsqrt neg abs sign exp expm1 log log10 log1p log2 pow clamp_min "
    "clamp_max maximum minimum reciprocal round floor ceil trunc frac sin cos tan asin acos atan sinh cosh tanh erf "
    "erfc lgamma sigmoid zero copy clone".split()
)
_FUSED = frozenset("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_".split())
# Give a new tensor of any shape, of the operand's type and device.
_MAKERS = frozenset("new_zeros new_ones new_empty new_full".split())
_VIEWS = frozenset("view _unsafe_view expand".split())
_NORMS = frozenset(("linalg_vector_norm", "norm", "_foreach_norm"))
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_OVER_ALL_ELEMENTS = _NORMS | {_UNSCALE, *"sum mean amax amin max min any all count_nonzero".split()}
_WORKS = "optimizers that treat each element by itself (SGD, Adam, AdamW, Adagrad, Lion) and fxpar.optim.Muon work"
_JOINING = frozenset((torch.stack, torch.cat, torch.hstack, torch.vstack, torch.concat, torch._foreach_norm))


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wrap: Wrap) -> Any:
    """Returns what the operator gives on the full tensors, as parts.

    Args:
        wrap: makes a tensor of a part and its place.

    Raises:
        InputError: the operator needs elements of other ranks, or its operands are cut in different ways.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "detach":  # of the same part: what is written to it is counted
        return wrap(args[0]._local_tensor, args[0].place)
    if name == "equal":
        return _over_all_elements(func, name, args, kwargs)
    if _is_elementwise(func, name):
        _check_written(func, args, kwargs)
        return _on_parts(func, args, kwargs, wrap)
    if name in ("index_put_", "_index_put_impl_") and _is_fill(args):
        _check_written(func, [args[0]], {})
        return _on_parts(torch.ops.aten.masked_fill_.Tensor, [args[0], args[1][0], args[2]], {}, wrap)
    if name in _OVER_ALL_ELEMENTS:
        return _over_all_elements(func, name, args, kwargs)
    if name in _MAKERS:
        return _created(func, args, kwargs, wrap)
    if name in _VIEWS and _keeps_shape(args):
        return wrap(args[0]._local_tensor, args[0].place)
    raise _refusal(func, args, kwargs)


def _is_elementwise(func: Any, name: str) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.data_dependent_output in func.tags:
        return False
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_").removesuffix("_") in _FOREACH
    return name in _ELEMENTWISE or name in _FUSED or torch.Tag.pointwise in func.tags


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)


def _on_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wrap: Wrap) -> Any:
    """Runs an operator on the parts. At one index of its lists all tensors are cut alike, or none is cut."""
    values = [*args, *kwargs.values()]
    lists = [value for value in values if _is_list(value)]
    if lists and (any(map(is_sharded, values)) or any(len(tensors) != len(lists[0]) for tensors in lists)):
        raise _refusal(func, args, kwargs)
    rows = zip(*lists, strict=True) if lists else [values]
    places: list[Any] = [_place_of(func, row) for row in rows]

    def local(value: Any) -> Any:
        if _is_list(value):
            return [v if place is None else part_of(v, place, func) for v, place in zip(value, places, strict=True)]
        is_operand = isinstance(value, Tensor) and not lists
        return part_of(value, places[0], func) if is_operand else value

    local_args, named = [local(value) for value in args], {key: local(value) for key, value in kwargs.items()}
    output = func(*local_args, **named)
    if not func._schema.is_mutable:
        outputs = [
            _wrapped(v, place, func, wrap) for v, place in zip(output if lists else [output], places, strict=True)
        ]
        return outputs if lists else outputs[0]
    for is_target, value in _bound(func, local_args, named):
        if is_target and _is_list(value) == bool(lists):
            written = value if lists else [value]
            for target, place in zip(written, places, strict=True):
                # Padding is to stay zero, and operations such as cos make other numbers of zeros.
                if place is not None and place.is_padded and target.shape == place.part_shape:
                    place.clear_padding(target)
            # Below __torch_dispatch__ a write in place does not count by itself,
            # and copies of main values go by the count.
            torch.autograd.graph.increment_version(written)
    return None if lists else next(value for is_target, value in _bound(func, args, kwargs) if is_target)


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[bool, Any]]:
    """Returns tensors and lists of them among the arguments, and whether the operator writes to each."""
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    pairs = [(argument, arguments.get(argument.name)) for argument in func._schema.arguments]
    return [
        (argument.alias_info is not None and argument.alias_info.is_write, value)
        for argument, value in pairs
        if isinstance(value, Tensor) or _is_list(value)
    ]


def _check_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that what is written to is a part where an operand is, and no parameter in a graph.

    Raises:
        InputError: it is not.
    """
    if not func._schema.is_mutable:
        return
    tensors = _bound(func, args, kwargs)
    columns = [is_target for is_target, _ in tensors]
    rows = [list(value) if _is_list(value) else [value] for _, value in tensors]
    cut: Any = next((value for row in rows for value in row if is_sharded(value)), None)
    for row, is_target in zip(rows, columns, strict=True):
        for index, value in enumerate(row if is_target else ()):
            if getattr(value, "is_in_graph", False):
                raise InputError(
                    f"{func} would change a parameter that requires a gradient",
                    where=value.place.name,
                    remedy="change it under torch.no_grad()",
                )
            beside = [other[index] for other in rows if index < len(other)]
            if value.dim() and not has_part(value) and any(is_sharded(v) for v in beside):
                raise InputError(
                    f"{func} would write a part into a whole tensor",
                    where=cut.place.name,
                    remedy="make it with torch.zeros_like(parameter), or write full_tensor() into it",
                )


def _wrapped(output: Any, place: ShardSpec | None, func: Any, wrap: Wrap) -> Any:
    if place is None:
        return output
    if isinstance(output, (list, tuple)):
        return type(output)(_wrapped(part, place, func, wrap) for part in output)
    is_elementwise = isinstance(output, Tensor) and output.shape == place.part_shape
    assert is_elementwise, f"{func} does not treat each element by itself"
    return wrap(output, place)


def _created(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wrap: Wrap) -> Any:
    source, size, *rest = args
    if torch.Size(size) != source.place.shape:
        return func(source._local_tensor, size, *rest, **kwargs)
    return wrap(func(source._local_tensor, source.place.part_shape, *rest, **kwargs), source.place)


def _is_fill(args: Sequence[Any]) -> bool:
    """Tells whether `x[mask] = number` is meant, the mask of x's shape."""
    target, indices, value, *rest = args
    is_one = len(indices) == 1 and indices[0] is not None and value.dim() == 0 and not any(rest[:1])
    return is_one and is_sharded(target) and indices[0].dtype == torch.bool and indices[0].shape == target.shape


def _keeps_shape(args: Sequence[Any]) -> bool:
    source, sizes = args[0], list(args[1])
    return is_sharded(source) and sizes in (list(source.shape), [-1, *source.shape[1:]])


def _over_all_elements(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the value of the operator on the full tensors. A collective call.

    Raises:
        InputError: it is asked for by rows, or its operands are cut in different ways.
    """
    arguments = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    arguments |= dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if name == _UNSCALE:
        return _unscale(func, arguments)
    if name == "_foreach_norm":
        if any(_is_of_stage(value) for value in arguments["self"]):
            raise stage_norm_refusal()
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
        raise _refusal(func, args, dict(kwargs))
    if name in _NORMS:
        (reduced,) = norms([source], arguments.get("ord", arguments.get("p", 2)), arguments.get("dtype"))
        reduced = reduced.as_subclass(StageNorm) if _is_of_stage(source) else reduced
    else:
        reduced = _reduce_elements(name, source._local_tensor, source.place, arguments.get("dtype"))
    return reduced.reshape([1] * source.dim()) if arguments.get("keepdim") else reduced


def _gathered_rows(local: Tensor, axis: str, place: ShardSpec, what: str) -> Tensor:
    """Gathers the values of all ranks of an axis, one row a rank.

    A gather and no reduction: with it NaN stays NaN in an extreme, and the sum's order is that of the ranks. With the
    values travels what they are of: ranks that ask in another order (over a set of names, which each process orders in
    its own way) would mix up numbers of different tensors.

    Args:
        what: the operator and the tensors.

    Raises:
        InputError: the ranks ask for different things. Where to know it would stop a GPU the numbers are NaN instead.
    """
    group = place.world.groups[axis]
    rows, agree = exchanged(local.reshape(-1).view(torch.uint8), group, what)
    values = rows.contiguous().view(local.dtype).reshape(group.size, *local.shape)
    if local.device.type == "cpu":  # the exchange has refused what differs
        return values
    if local.is_floating_point():
        return values.where(agree, math.nan)
    check_agreed(bool(agree), what)
    return values


# ---------------------------------------------------------------------- norms


def _is_of_stage(value: Any) -> bool:
    """Tells whether other ranks of a pipeline hold what belongs to it."""
    return is_sharded(value) and value.place.world.mesh.pp > 1


def norms(values: Sequence[Tensor], order: Any, dtype: torch.dtype | None) -> list[Tensor]:
    """Returns the norm of each tensor, of plain ones too, by one collective for all that are cut by the same axes."""
    p = 2.0 if order is None else float(order)
    all_norms: list[Tensor] = [torch.empty(0)] * len(values)
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for index, value in enumerate(values):
        axes = tuple(axis for axis, _ in value.place.cuts) if is_sharded(value) else ()  # type: ignore[attr-defined]
        by_axes.setdefault(axes, []).append(index)
    for axes, indices in by_axes.items():
        parts: list[Any] = [values[index] for index in indices]
        if not axes:
            plain = torch._foreach_norm(parts, p, dtype)
            for index, norm in zip(indices, plain, strict=True):
                all_norms[index] = norm
            continue
        what = f"a norm of {', '.join(part.place.name for part in parts)}"
        powers = _powers([part.place.counted(part._local_tensor) for part in parts], p, parts[0].device)
        for axis in axes:
            powers = _together(_gathered_rows(powers, axis, parts[0].place, what), p)
        norms = powers if p in (0.0, math.inf, -math.inf) else powers.pow(1 / p)
        for index, part, norm in zip(indices, parts, norms.unbind(), strict=True):
            all_norms[index] = norm.to(dtype or (part.dtype.to_real() if part.dtype.is_complex else part.dtype))
    return all_norms


def _powers(tensors: Sequence[Sequence[Tensor]], order: float, device: torch.device) -> Tensor:
    """Returns of the pieces of each tensor what is summed over pieces and ranks, f64[tensors]: the norm to its power p;
    extremes and counts as they are.

    In float64: the square of a norm that float32 holds may be beyond it. Kernels are launched for all pieces of a type
    together: a model has hundreds of tensors.
    """
    none = torch.full((1,), math.inf if order == -math.inf else 0.0, dtype=torch.float64, device=device)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    numbers: dict[torch.dtype, list[int]] = {}
    for index, pieces in enumerate(tensors):
        for piece in pieces:
            if piece.numel():
                by_type.setdefault(piece.dtype, []).append(piece)
                numbers.setdefault(piece.dtype, []).append(index)
    if not by_type:
        return none.expand(len(tensors))
    norms = torch.cat(
        [torch.stack(torch._foreach_norm(some, order, _wide(kind))).double() for kind, some in by_type.items()]
    )
    powers = norms if order in (0.0, math.inf, -math.inf) else norms.pow(order)
    table = _pieces_of(tuple(index for some in numbers.values() for index in some), len(tensors), device)
    return _together(torch.cat([powers, none]).index_select(0, table.view(-1)).view_as(table), order)


@cache
def _pieces_of(tensors: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    """Returns the positions of each tensor's pieces, i64[most pieces, count]; where it has fewer, the position behind.

    Kept: a graph that is recorded copies nothing from the host.

    Args:
        tensors: of each piece, the number of its tensor.
    """
    positions: list[list[int]] = [[] for _ in range(count)]
    for position, tensor in enumerate(tensors):
        positions[tensor].append(position)
    most = max(map(len, positions))
    rows = [row + [len(tensors)] * (most - len(row)) for row in positions]
    with torch.inference_mode(False):
        return torch.tensor(rows, device=device).T.contiguous()


def _together(rows: Tensor, p: float) -> Tensor:
    if math.isinf(p):
        return rows.amax(0) if p > 0 else rows.amin(0)
    return rows.sum(0)


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


# ---------------------------------------------------------------------- the others


def _reduce_elements(name: str, part: Tensor, place: ShardSpec, dtype: torch.dtype | None) -> Tensor:
    pieces = [piece.reshape(-1) for piece in place.counted(part)]
    flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else part.new_empty(0)
    if name in ("sum", "mean", "count_nonzero"):
        kind = dtype or (part.dtype if part.dtype.is_floating_point or part.dtype.is_complex else torch.int64)
        local = flat.count_nonzero() if name == "count_nonzero" else flat.sum(dtype=_wide(kind) or kind)
        kind = torch.int64 if name == "count_nonzero" else kind
        local = local.double() if local.dtype.is_floating_point else local
        total = _over_ranks(name, local, place, lambda rows: rows.sum(0))
        return (total / place.shape.numel() if name == "mean" else total).to(kind)
    if name in ("any", "all"):
        local = flat.any() if name == "any" else flat.all()
        return _over_ranks(name, local.to(torch.uint8), place, _largest if name == "any" else _smallest).bool()
    is_max = name in ("amax", "max")
    extreme = _largest if is_max else _smallest
    if flat.numel():
        return _over_ranks(name, extreme(flat), place, extreme)
    if part.dtype.is_floating_point:
        none = -math.inf if is_max else math.inf
    else:
        none = torch.iinfo(part.dtype).min if is_max else torch.iinfo(part.dtype).max
    return _over_ranks(name, flat.new_full((), none), place, extreme)


def _largest(rows: Tensor) -> Tensor:
    return rows.amax(0)


def _smallest(rows: Tensor) -> Tensor:
    return rows.amin(0)


def _over_ranks(name: str, partial: Tensor, place: ShardSpec, combine: Callable[[Tensor], Tensor]) -> Tensor:
    for axis, _ in place.cuts:
        partial = combine(_gathered_rows(partial, axis, place, f"{name} of {place.name}"))
    return partial


def _equal(func: Any, arguments: Mapping[str, Any]) -> bool:
    one, other = arguments["self"], arguments["other"]
    if one.shape != other.shape:
        return False
    place: Any = _place_of(func, [one, other])
    pairs = zip(place.counted(part_of(one, place)), place.counted(part_of(other, place)), strict=True)
    is_equal = torch.tensor(all(torch.equal(a, b) for a, b in pairs), dtype=torch.uint8, device=one.device)
    return bool(_over_ranks("equal", is_equal, place, _smallest))


def _unscale(func: Any, arguments: Mapping[str, Any]) -> None:
    """Divides gradients by a loss scale; what is infinite on one rank is so for all."""
    found_inf = arguments["found_inf"]
    parts = [value._local_tensor if is_sharded(value) else value for value in arguments["self"]]
    func(parts, found_inf, arguments["inv_scale"])
    axes = {axis: value.place for value in arguments["self"] if is_sharded(value) for axis, _ in value.place.cuts}
    for axis, place in axes.items():
        found_inf.copy_(_gathered_rows(found_inf, axis, place, "infinities found in gradients").amax(0))


def _refusal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputError:
    """Returns the error for an operator that parts cannot be put through."""
    where = next(value.place.name for value in pytree.tree_leaves((args, kwargs)) if is_sharded(value))
    if torch.Tag.nondeterministic_seeded in func.tags:
        return InputError(
            f"{func} would draw numbers of each rank's own",
            where=where,
            remedy="draw a whole tensor, the same on every rank, and copy_ it",
        )
    return InputError(
        f"{func} does not treat each element by itself, and this rank holds a part of them",
        where=where,
        remedy=f"{_WORKS}; full_tensor() has all elements",
    )


def is_sharded(value: Any) -> bool:
    """Tells whether it is a part with a place."""
    return isinstance(value, DTensor) and hasattr(value, "place")


def has_part(value: Any) -> bool:
    """Tells whether a rank has a part of it; so too for what torch's state dicts have distributed."""
    return isinstance(value, DTensor)


def _place_of(func: Any, values: Sequence[Any]) -> ShardSpec | None:
    """Returns the place of operands that are cut alike; None where none is cut.

    Raises:
        InputError: they are cut in different ways.
    """
    places: list[ShardSpec] = [value.place for value in values if is_sharded(value)]
    for place in places[1:]:
        if not places[0].is_like(place):
            raise InputError(
                f"{func} takes it together with {place.name}, of which the ranks hold other elements",
                where=places[0].name,
                remedy=f"{_WORKS}; full_tensor() has all elements",
            )
    return places[0] if places else None


def part_of(value: Tensor, place: ShardSpec, func: Any = None) -> Tensor:
    """Returns this rank's part of an operand: a part itself, what is cut out of a full tensor, all of a number.

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


def stage_norm_refusal() -> InputError:
    """Returns the error for norms that are joined, as `torch.nn.utils.clip_grad_norm_` joins them."""
    return InputError(
        "would be of this stage of the pipeline alone, and differ between ranks: torch.nn.utils.clip_grad_norm_ and "
        "its like see no other stages",
        where="norm of several gradients",
        remedy="call model.clip_grad_norm_(max_norm), which gives the norm too",
    )


class StageNorm(Tensor):
    """The norm of one tensor on one stage. It stays one in what is computed of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _JOINING:
            raise stage_norm_refusal()
        inherited: Any = super().__torch_function__
        return inherited(func, types, args, kwargs or {})
