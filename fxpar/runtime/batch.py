"""Calls: from what a user passes to a program's inputs.

Enters: positional and keyword arguments, or a batch. Leaves: a batch in one canonical form, the sizes of its symbols,
and an example of it to trace; or an error that names the entry.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture.capture import CallSpec, with_step_count
from fxpar.capture.trace import signature_of
from fxpar.errors import InputError
from fxpar.ir.program import Input, Program, output_layouts
from fxpar.ir.step import RNG_PATH, batch_rows, batch_size
from fxpar.layout.layout import Layout, Placement
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate

# What transformers calls a cache, and the flag that asks for one.
_CACHES = ("past_key_values", "past_key_value", "cache_params", "use_cache")
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def called_with(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the batch of a plain call: arguments by keyword, or all by position.

    Raises:
        InputError: positional and keyword arguments that the model's forward does not take together.
    """
    if not kwargs:
        return args
    if not args:
        return canonical(kwargs)
    try:
        bound = signature_of(model).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"cannot be made: {error}", where="call", remedy="call it as the model's forward") from None
    variadic = [
        p for p in bound.signature.parameters.values() if p.kind is p.VAR_POSITIONAL and p.name in bound.arguments
    ]
    if variadic:
        raise InputError("mixes *args and keyword arguments", where="call", remedy="use one of them")
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return canonical(named)


def canonical(batch: Any) -> Any:
    """Returns mappings of any kind as a dict in the order of names, so that the order of entries means nothing."""
    if isinstance(batch, Mapping):
        return with_step_count({str(key): batch[key] for key in sorted(batch, key=str)})
    return tuple(batch) if type(batch) is list else batch


def microbatches(batch: Any, takes_lists: bool) -> list[Any]:
    """Returns the parts of a step: the items of a list, or the batch alone; in canonical form.

    Args:
        takes_lists: whether a batch itself is a list; one of lists, tuples or mappings has microbatches still.

    Raises:
        InputError: the list is empty.
    """
    if type(batch) is not list or (takes_lists and not all(isinstance(item, (list, tuple, Mapping)) for item in batch)):
        return [canonical(batch)]
    if not batch:
        raise InputError("holds no microbatch", where="batch", remedy="pass at least one")
    return [canonical(item) for item in batch]


def check(model: nn.Module, batch: Any, has_loss: bool) -> None:
    """Refuses a batch that the model's forward does not take, or that holds what no program can.

    Args:
        has_loss: entries that forward does not take are for the loss callable.

    Raises:
        InputError: names the entry.
    """
    signature = signature_of(model)
    if isinstance(batch, Mapping):
        _check_caches(batch)
        _check_names(signature, batch, has_loss)
    elif not has_loss:
        values = batch if isinstance(batch, tuple) else (batch,)
        try:
            signature.bind(*values)
        except TypeError as error:
            raise InputError(
                f"does not fit forward: {error}", where="batch", remedy="pass what forward takes"
            ) from None
    for path, value in leaves(batch):
        if isinstance(value, Tensor):
            _check_tensor(path, value)
        elif not isinstance(value, _CONSTANTS):
            raise InputError(
                f"a {type(value).__name__} cannot be part of a program",
                where=f"batch entry {path}",
                remedy="pass tensors, numbers, strings or None",
            )


def _check_caches(batch: Mapping[str, Any]) -> None:
    for name in _CACHES:
        if batch.get(name) is not None and batch[name] is not False:
            raise InputError(
                "caches are for generation, which is not supported",
                where=f"batch entry {name}",
                remedy="leave it out; generate with the plain model, loaded from full_state_dict()",
            )


def _check_names(signature: inspect.Signature, batch: Mapping[str, Any], has_loss: bool) -> None:
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = has_loss or any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = sorted(batch.keys() - named)
    missing = sorted(p.name for p in parameters if p.name in named and p.default is p.empty and p.name not in batch)
    if unknown and not takes_all:
        raise InputError(
            "the model's forward has no such argument",
            where=f"batch entry {', '.join(unknown)}",
            remedy=f"choose from {', '.join(p.name for p in parameters if p.name in named)}",
        )
    if missing:
        raise InputError("lacks what forward needs", where="batch", remedy=f"add {', '.join(missing)}")


def _check_tensor(path: str, value: Tensor) -> None:
    where = f"batch entry {path}"
    if value.requires_grad:
        raise InputError("requires a gradient; only parameters do", where=where, remedy="detach it")
    if value.layout is not torch.strided:
        raise InputError(f"has the layout {value.layout}", where=where, remedy="pass a dense tensor")
    if value.is_meta:
        raise InputError("is on the meta device and has no values", where=where, remedy="pass a tensor with values")
    if 0 in value.shape:
        raise InputError(f"has the empty shape {list(value.shape)}", where=where, remedy="pass at least one sample")


def leaves(batch: Any) -> list[tuple[str, Any]]:
    """Returns paths and values: `input_ids`, `batch.0`; the only tensor of a batch is `0`."""
    entries = []
    for keys, value in pytree.tree_flatten_with_path(batch)[0]:
        path = ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys)
        entries.append((path or "0", value))
    return entries


def structure(batch: Any) -> tuple[Any, ...]:
    """Returns what two calls of one program have in common: nest, constants, element types and numbers of
    dimensions."""
    values, spec = pytree.tree_flatten(batch)
    kinds = [(v.dtype, v.dim()) if isinstance(v, Tensor) else (type(v), v) for v in values]
    return str(spec), *kinds


def example(batch: Any) -> Any:
    """Returns a batch of the same shapes on the meta device, to trace."""
    return pytree.tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), batch)


def batch_facts(batch: Any, values: bool, sizes: bool = True) -> dict[str, str]:
    """Returns a batch by entries, for ranks to compare.

    Args:
        values: whether a digest of the elements is part of it.
        sizes: whether shapes are, and not only the numbers of dimensions.
    """
    facts = {"the batch": f"{type(batch).__name__} of {', '.join(path for path, _ in leaves(batch))}"}
    for path, value in leaves(batch):
        text = repr(value) if isinstance(value, _CONSTANTS) else type(value).__name__
        if isinstance(value, Tensor):
            shape = list(value.shape) if sizes else [value.dim()]
            text = f"{str(value.dtype).removeprefix('torch.')}{shape}"
            if values and not value.is_meta:
                data = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
                text += f" of values {hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]}"
        facts[f"batch entry {path}"] = text
    return facts


def bind(spec: CallSpec, call: Any, device: torch.device) -> dict[str, Tensor]:
    """Returns a program's inputs by path for a call `(args, kwargs)` of its structure, on the device."""
    flat, _ = pytree.tree_flatten(call)
    pairs = zip(spec.in_leaves, flat, strict=True)
    # A compiled program is one for each memory layout too: there is to be one.
    return {str(what): value.to(device).contiguous() for (kind, what), value in pairs if kind == "input"}


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a call.

    Attributes:
        shares: values of the program's symbols: what each rank has of a size that ranks share out.
        totals: of the inputs, by symbol; rows are those of all data ranks, where they bring as many.
    """

    shares: dict[str, int]
    totals: dict[str, int]


def sizes_of(program: Program, inputs: Mapping[str, Tensor]) -> BatchSizes | None:
    """Returns the symbols' values; None where the program was traced for other fixed sizes.

    Raises:
        InputError: sizes differ that were equal in the example.
    """
    sizes = BatchSizes({}, {})
    first: dict[str, str] = {}
    symbols = {symbol.size: symbol for symbol in program.symbols}
    entries = user_inputs(program)
    for entry in entries:
        cut = _cut_dims(program, entry)
        for dim, expected in enumerate(entry.type.shape):
            if expected in symbols:
                size, known = inputs[entry.path].shape[dim], symbols[expected]
                ranks = known.multiple // cut.get(dim, 1)
                share, rest = divmod(size, ranks)
                if rest and known.group > 1 and dim not in cut:
                    return None  # the author's code may do something else with so many rows
                if rest and known.group > 1:
                    raise InputError(
                        f"has {size} rows, and the model takes them in groups of {known.group}, which one rank has",
                        where=f"batch entry {entry.path}",
                        remedy=f"pass a multiple of {ranks} rows on each data rank and in each microbatch",
                    )
                if rest:
                    raise InputError(
                        f"has size {size} in dimension {dim}, which {ranks} ranks cannot share out",
                        where=f"batch entry {entry.path}",
                        remedy=f"pad it to a multiple of {ranks}, or set sequence_parallel=False",
                    )
                place = first.setdefault(known.name, f"{entry.path} dimension {dim}")
                known_size = sizes.totals.setdefault(known.name, size * cut.get(dim, 1))
                if sizes.shares.setdefault(known.name, share) != share:
                    _unequal(entry.path, dim, size, place, known_size // cut.get(dim, 1))
    for entry in entries:
        part = [local_shape(entry.type.shape, layout, program.axes) for layout in _layouts(program, entry)]
        shape = part[0] if part else entry.type.shape
        if tuple(evaluate(size, sizes.shares) for size in shape) != tuple(inputs[entry.path].shape):
            return None
    return sizes


def own_rows(program: Program, batch: Any, coordinates: Mapping[str, int]) -> Any:
    """Returns a rank's part of a batch of all data ranks; the first ranks have a row more where these are no divisor.

    Args:
        coordinates: the rank's index on each axis.

    Raises:
        InputError: fewer rows than ranks.
    """
    entries = {entry.path: entry for entry in user_inputs(program)}
    cut = {dim for entry in entries.values() for dim in _cut_dims(program, entry)}
    if not cut:
        return batch
    parts = []
    for path, part in leaves(batch):
        has_rows = isinstance(part, Tensor) and part.dim() > 0
        for axis, placement, n in _row_cuts(program, entries.get(path)) if has_rows else ():
            rows = part.shape[placement.dim]
            if rows < n:
                raise InputError(
                    f"has {rows} rows in dimension {placement.dim}, fewer than the {n} ranks of {axis}",
                    where=f"batch entry {path}",
                    remedy=f"pass at least {n}",
                )
            # Not chunk, which would make three parts of five rows for four ranks.
            part = part.tensor_split(n, placement.dim)[coordinates[axis]]
        parts.append(part)
    return pytree.tree_unflatten(parts, pytree.tree_structure(batch))


def cut_rows(program: Program, batch: Any, count: int) -> list[Any]:
    """Returns a batch as microbatches of equally many rows.

    Args:
        batch: what one data rank brings.
        count: of the microbatches.

    Raises:
        InputError: rows that are no multiple of them.
    """
    if count == 1:
        return [batch]
    dims = batch_rows(program, batch_size(program))
    spec = pytree.tree_structure(batch)
    batches: list[list[Any]] = [[] for _ in range(count)]
    for path, value in leaves(batch):
        dim = dims.get(path)
        if not isinstance(value, Tensor) or dim is None:
            parts: Sequence[Any] = [value] * count
        elif value.shape[dim] % count:
            raise InputError(
                f"has {value.shape[dim]} rows in dimension {dim}, which {count} microbatches cannot share out",
                where=f"batch entry {path}",
                remedy=f"pass a multiple of {count}, a list of microbatches, or another Plan(microbatches=…)",
            )
        else:
            parts = value.chunk(count, dim)
        for part, piece in zip(batches, parts, strict=True):
            part.append(piece)
    return [pytree.tree_unflatten(part, spec) for part in batches]


def _row_cuts(program: Program, entry: Input | None) -> list[tuple[str, Placement, int]]:
    """Returns the axes that share out an entry, from the outermost. One that the program does not take is cut as others
    are."""
    known = user_inputs(program) if entry is None else [entry]
    for other in known:
        cuts = [(a, p, program.axes[a]) for layout in _layouts(program, other) for a, p in layout if p.is_shard]
        if cuts or entry is not None:
            return cuts
    return []


def _layouts(program: Program, entry: Input) -> tuple[Layout, ...]:
    return output_layouts(program.node(entry.node))


def _cut_dims(program: Program, entry: Input) -> dict[int, int]:
    """Returns how many ranks share out each dimension of an input; each brings its part of it."""
    ranks: dict[int, int] = {}
    for layout in _layouts(program, entry):
        for axis, placement in layout:
            if placement.is_shard:
                ranks[placement.dim] = ranks.get(placement.dim, 1) * program.axes[axis]
    return ranks


def _unequal(path: str, dim: int, size: int, place: str, known: int) -> NoReturn:
    raise InputError(
        f"has size {size} in dimension {dim}, but {place} has {known}; the example had equal sizes",
        where=f"batch entry {path}",
        remedy="pass equal sizes, or parallelize with an example in which they differ",
    )


def check_use(model: nn.Module, program: Program) -> None:
    """Refuses tensors that forward takes as `**kwargs` and the captured graph ignores.

    Raises:
        InputError: names the entry.
    """
    parameters = signature_of(model).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    for entry in user_inputs(program):
        if entry.path.split(".")[0] not in named and not entry.path[0].isdigit() and not program.node(entry.node).users:
            raise InputError(
                "the model takes it as **kwargs and does nothing with it",
                where=f"batch entry {entry.path}",
                remedy=f"leave it out, or use one of {', '.join(sorted(named))}",
            )


def user_inputs(program: Program) -> list[Input]:
    """Returns the inputs that a call passes: all but the random generator's state."""
    return [entry for entry in program.inputs if entry.path != RNG_PATH]
