"""What operations do on tensors of which each rank holds a part.

Enters: an operator and its arguments, some of them `Sharded`. Leaves: what the operator gives on the whole tensors, as
parts; or an error that names it.

By proof: what treats each element by itself runs on the parts, where all operands are cut alike. What sums or compares
all elements runs on those for which a rank stands, and then over the ranks. All else would compute something else on
each rank and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.state import sharded_reduce
from fxpar.state.operand import is_held, is_sharded, part_of, place_of, place_or_none, refusal
from fxpar.state.place import ShardSpec

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


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wrap: Wrap) -> Any:
    """What the operator gives.

    Args:
        wrap: makes a tensor of a part and its place.

    Raises:
        InputError: the operator needs elements of other ranks, or its operands are cut in different ways.
    """
    name = func._schema.name.removeprefix("aten::")
    if name == "detach":  # of the same part: what is written to it is counted
        return wrap(args[0]._local_tensor, args[0].place)
    if name == "equal":
        return sharded_reduce.run(func, name, args, kwargs)
    if _is_elementwise(func, name):
        _check_written(func, args, kwargs)
        run_on = _on_lists if any(_is_list(arg) for arg in args) else _on_parts
        return run_on(func, args, kwargs, wrap)
    if name in ("index_put_", "_index_put_impl_") and _is_fill(args):
        _check_written(func, [args[0]], {})
        return _on_parts(torch.ops.aten.masked_fill_.Tensor, [args[0], args[1][0], args[2]], {}, wrap)
    if sharded_reduce.takes(name):
        return sharded_reduce.run(func, name, args, kwargs)
    if name in _MAKERS:
        return _made(func, args, kwargs, wrap)
    if name in _VIEWS and _keeps_shape(args):
        return wrap(args[0]._local_tensor, args[0].place)
    raise refusal(func, args, kwargs)


def _is_elementwise(func: Any, name: str) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.data_dependent_output in func.tags:
        return False
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_").removesuffix("_") in _FOREACH
    return name in _ELEMENTWISE or name in _FUSED or torch.Tag.pointwise in func.tags


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)


def _on_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wrap: Wrap) -> Any:
    place = place_of(func, [*args, *kwargs.values()])

    def part(value: Any) -> Any:
        return part_of(value, place, func) if isinstance(value, Tensor) else value

    local_args, named = [part(value) for value in args], {key: part(value) for key, value in kwargs.items()}
    output = func(*local_args, **named)
    if not func._schema.is_mutable:
        return _wrapped(output, place, func, wrap)
    written = [value for is_target, value in _bound(func, local_args, named) if is_target]
    for value in written:
        if place.is_padded and value.shape == place.part_shape:
            place.clear_padding(value)
    torch.autograd.graph.increment_version(written)
    return next(value for is_target, value in _bound(func, args, kwargs) if is_target)


def _on_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wrap: Wrap) -> Any:
    """Lists are aligned: the tensors at one index are cut alike, and there may be none cut among them."""
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value)]
    single = [value for value in (*args, *kwargs.values()) if is_sharded(value)]
    if single or any(len(items) != len(lists[0]) for items in lists):
        raise refusal(func, args, kwargs)
    places = [place_or_none(func, items) for items in zip(*lists, strict=True)]

    def parts(value: Any) -> Any:
        if not _is_list(value):
            return value
        return [v if place is None else part_of(v, place, func) for v, place in zip(value, places, strict=True)]

    local_args, named = [parts(value) for value in args], {key: parts(value) for key, value in kwargs.items()}
    outputs = func(*local_args, **named)
    if not func._schema.is_mutable:
        return [
            v if place is None else _wrapped(v, place, func, wrap) for v, place in zip(outputs, places, strict=True)
        ]
    for values in (value for is_target, value in _bound(func, local_args, named) if is_target and _is_list(value)):
        for value, place in zip(values, places, strict=True):
            if place is not None and place.is_padded and value.shape == place.part_shape:
                place.clear_padding(value)
        torch.autograd.graph.increment_version(values)
    return None


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[bool, Any]]:
    """Tensors and lists of them among the arguments, and whether the operator writes to each."""
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    pairs = [(argument, arguments.get(argument.name)) for argument in func._schema.arguments]
    return [
        (argument.alias_info is not None and argument.alias_info.is_write, value)
        for argument, value in pairs
        if isinstance(value, Tensor) or _is_list(value)
    ]


def _check_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """What is written to is a part where an operand is, and no parameter in a graph.

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
            if value.dim() and not is_held(value) and any(is_sharded(v) for v in beside):
                raise InputError(
                    f"{func} would write a part into a whole tensor",
                    where=cut.place.name,
                    remedy="make it with torch.zeros_like(parameter), or write full_tensor() into it",
                )


def _wrapped(output: Any, place: ShardSpec, func: Any, wrap: Wrap) -> Any:
    if isinstance(output, (list, tuple)):
        return type(output)(_wrapped(item, place, func, wrap) for item in output)
    assert isinstance(output, Tensor), f"{func} does not treat each element by itself"
    assert output.shape == place.part_shape, f"{func} does not treat each element by itself"
    return wrap(output, place)


def _made(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wrap: Wrap) -> Any:
    source, size, *rest = args
    if torch.Size(size) != source.place.shape:
        return func(source._local_tensor, size, *rest, **kwargs)
    return wrap(func(source._local_tensor, source.place.part_shape, *rest, **kwargs), source.place)


def _is_fill(args: Sequence[Any]) -> bool:
    """Whether `x[mask] = number` is meant, the mask of x's shape."""
    target, indices, value, *rest = args
    is_one = len(indices) == 1 and indices[0] is not None and value.dim() == 0 and not any(rest[:1])
    return is_one and is_sharded(target) and indices[0].dtype == torch.bool and indices[0].shape == target.shape


def _keeps_shape(args: Sequence[Any]) -> bool:
    source, sizes = args[0], list(args[1])
    return is_sharded(source) and sizes in (list(source.shape), [-1, *source.shape[1:]])
