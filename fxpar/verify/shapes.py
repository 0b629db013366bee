"""Shapes: every operation, run on shapes alone, gives the type that its note claims.

Enters: a program, global or localised. Leaves: nothing, or `CheckFailed` that names the node and both shapes.

The program runs on meta tensors at the example's sizes, which must work, and at others, so that a size baked into a
literal shows. A localised program runs twice, as a rank and as the one device whose program its text is:
shapes must be those of the notes, a rank's with the layout applied, and numbers must be the notes' in both.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.errors import CheckFailed
from fxpar.ir.grad_flow import plain
from fxpar.ir.program import Program, ScalarType, TensorType, describe, note, operands, output_layouts, output_types
from fxpar.ir.properties import Property
from fxpar.layout.layout import Layout, Placement
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.operator import OnShapes, Operator
from fxpar.rules import Refusal, bind_arguments, call_of
from fxpar.rules.inference import whole_call
from fxpar.signatures.check_cache import Facts, facts_of
from fxpar.signatures.op_call import SIZED, name_of_sizes

# What a check may spend on one operation: a text must not be able to exhaust time or memory.

# Numbers of a program are sizes and what is computed from them: they fit 64 bits.
_BITS = 63
_POWERS = (operator.pow, operator.lshift, math.pow, math.ldexp)
_FEW = 1024


def check_cost(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses numbers beyond 64 bits, and operations that give many more tensors than the note says.

    Raises:
        ValueError: says which.
    """
    for number in _numbers((args, kwargs)):
        if number.bit_length() > _BITS + 1:
            raise ValueError(f"a number of {number.bit_length()} bits is no size")
    if node.target in _POWERS and any(abs(number) > _BITS for number in _numbers(args[1:])):
        raise ValueError("the power is no size")
    if isinstance(node.target, torch._ops.OpOverload) and _gives_list(node.target):
        noted = len(output_types(node))
        if _parts(node.target, args, kwargs) > noted + _FEW:
            raise ValueError(f"gives many more tensors than the {noted} of the note")


def _gives_list(target: torch._ops.OpOverload) -> bool:
    return any("List[Tensor]" in str(item.type) for item in target._schema.returns)


def _parts(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns how many tensors an operation makes of one at most; 0 for those of lists."""
    schema = target._schema.arguments
    arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
    arguments |= {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
    source, dim = arguments.get("self"), arguments.get("dim", 0)
    if not isinstance(source, Tensor) or not source.dim() or not isinstance(dim, int):
        return 0
    size = source.shape[dim % source.dim()]
    for name in ("chunks", "sections"):
        count = arguments.get(name)
        if isinstance(count, int):
            return min(count, size)
    if any(isinstance(value, (list, tuple)) for value in arguments.values()):
        return 0  # as many as the list has
    step = arguments.get("split_size", 1)
    return -(-size // step) if isinstance(step, int) and step > 0 else size


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)


# The whole reading of a localised program: the program of one device that its text is.

aten = torch.ops.aten

SPLITS = frozenset({aten.split_with_sizes.default, aten.split.sizes})

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def whole_arguments(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Mapping[str, int], outputs: Sequence[Tensor]
) -> Arguments:
    """Returns the arguments of the operation on one device.

    Args:
        node: of a localised program.
        args: its arguments, values in place of nodes.
        kwargs: the same by name.
        axes: sizes of the mesh axes.
        outputs: of the global shapes that the notes say.

    Raises:
        ValueError: the bounds of a slice are those of no slice of the whole.
    """
    if node.target in SIZED:
        return _sized(node, args, kwargs, outputs)
    if node.target in SPLITS:
        return _split(node, args, kwargs, outputs)
    if node.target is aten.slice.Tensor:
        return _slice(node, args, kwargs, axes)
    return args, kwargs


def _cuts(node: fx.Node) -> list[tuple[str, Placement]]:
    return [(axis, placement) for axis, placement in output_layouts(node)[0] if placement.is_shard]


def _sized(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> Arguments:
    """Returns arguments whose sizes are the note's where dimensions are cut; others, -1 too, stand as they are."""
    target: Any = node.target
    name, at = name_of_sizes(target), SIZED[target]
    cut = {placement.dim for _, placement in _cuts(node)}
    passed = kwargs[name] if name in kwargs else args[at]
    if len(passed) != outputs[0].dim():
        raise ValueError(f"{len(passed)} sizes are given for {outputs[0].dim()} dimensions")
    sizes = [outputs[0].shape[dim] if dim in cut and size != -1 else size for dim, size in enumerate(passed)]
    if name in kwargs:
        return args, {**kwargs, name: sizes}
    return (*args[:at], sizes, *args[at + 1 :]), kwargs


def _split(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> Arguments:
    source, arguments = operands(node)[0], bind_arguments(node)
    rank = outputs[0].dim() if outputs else 1
    dim = int(arguments.get("dim", 0)) % max(rank, 1)
    if all(placement.dim != dim for _, placement in _cuts(source)):
        return args, kwargs
    return (args[0], [output.shape[dim] for output in outputs], dim), {}


def _slice(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Mapping[str, int]) -> Arguments:
    if not _cuts(operands(node)[0]):
        return args, kwargs
    call = call_of(node, 1)
    whole = whole_call(call, output_layouts(operands(node)[0])[0], axes)
    if isinstance(whole, Refusal):
        raise ValueError(whole.reason)
    if whole is call:
        return args, kwargs
    bounds = {name: whole.get(name) for name in ("dim", "start", "end", "step")}
    return args[:1], {**{k: v for k, v in kwargs.items() if k == "self"}, **bounds}


# What an operation on shapes raises where they do not fit; some of torch's shape functions use assertions, and ask
# attributes of an argument that a text made None.
_FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError)
# What operators of torch gave on shapes, by `_identity`, in all programs of the process.
_calls: dict[Any, Any] = {}
_MOST_CALLS = 65536


def check_shapes(program: Program, facts: Facts | None = None) -> None:
    """Runs the program on shapes and compares with the notes.

    A model may be limited in its sizes (positions up to 64) or bind two of them together, hence of the other sizes
    only some must work: for each symbol there must be one that does.

    Args:
        facts: of the program, where they are known.

    Raises:
        CheckFailed: an operation cannot run, or gives another element type or shape than its note.
    """
    facts = facts or facts_of(program)
    _check_arguments(program, facts)
    readings = (True, False) if Property.LOCAL in program.properties and program.axes else (False,)
    for local in readings:
        _check(facts, local)


def _check_arguments(program: Program, facts: Facts) -> None:
    sound = facts.known("arguments")
    for node in program.graph.nodes:
        if node.op == "output" or facts.numbers[node] in sound:
            continue
        try:
            hash(plain((node.args, node.kwargs), lambda operand: None))
        except TypeError as error:
            raise CheckFailed(f"takes what is no argument of an operation: {error}", where=describe(node)) from None
        sound[facts.numbers[node]] = True


def _check(facts: Facts, local: bool) -> None:
    program = facts.program
    example = _examples(program)
    _run(facts, example, local)
    pending, first = set(example), None
    for sizes in _others(program):
        changed = {name for name in pending if sizes[name] != example[name]}
        if not changed:
            continue
        try:
            _run(facts, sizes, local)
            pending -= changed
        except CheckFailed as error:
            first = first or error
    if pending and first is not None:
        raise first


def _examples(program: Program) -> dict[str, int]:
    """Returns examples of symbols; those of counted rows differ from each other, so that rows are not mixed."""
    counted = {symbol.name: symbol.example + place for place, symbol in enumerate(program.counted)}
    return {s.name: s.example for s in program.symbols} | counted


def _others(program: Program) -> Iterator[dict[str, int]]:
    """Yields all symbols doubled, one smaller, halved, one larger; then the same for each symbol alone."""
    example = _examples(program)
    # A literal that happens to fit twice the example's size does not fit one less.
    other = {name: (2 * size, max(size - 1, 2), max(size // 2, 2), size + 1) for name, size in example.items()}
    for choice in range(4):
        yield {name: sizes[choice] for name, sizes in other.items()}
    for name, sizes in other.items():
        for size in sizes:
            yield {**example, name: size}


def _run(facts: Facts, sizes: Mapping[str, int], local: bool) -> None:
    """Runs the program, as a rank where `local`, else as one device."""
    program = facts.program
    whole = Property.LOCAL in program.properties and not local
    values: dict[fx.Node, Any] = {}
    identities: dict[fx.Node, Hashable] = {}  # what values are to a question
    # Equal layers repeat types and calls, and passes leave most of them as they are: what these give is worked out
    # once. A question has all of a call on which its result and the comparison depend; values are kept, so that one
    # stays itself.
    reading = "shapes", local, whole, tuple(sizes.items())
    types: dict[tuple[TensorType, Layout], Tensor] = facts.known(*reading, "types")
    known: dict[Any, Any] = facts.known(*reading)
    for node, number in facts.numbers.items():
        try:
            question = (number, *[identities[read] for read in facts.reads[node]])
            if question in known:
                values[node], identities[node] = known[question]
                continue
            if note(node).type is None:  # asserts
                continue
            expected = _expected(program, node, sizes, types, local)
            if node.op == "placeholder":
                values[node], identities[node] = known[question] = expected[0], id(expected[0])
                continue
            arguments = map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = whole_arguments(node, *arguments, program.axes, expected) if whole else arguments
            check_cost(node, args, kwargs)
            key = _identity(node, args, kwargs)
            value = _calls.get(key)
            if value is None:
                value = _call(node, args, kwargs, expected, program.axes if local else {})
                _remember(key, value)
            values[node] = value
        except _FAILURES as error:
            if note(node).type is None:
                continue
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            place = "a rank's shapes" if local else "the shapes of the whole"
            raise CheckFailed(f"cannot run on {place}: {reason}", where=describe(node)) from None
        _compare(node, values[node], expected, sizes, "on a rank" if local else "")
        identities[node] = _held(values[node])
        known[question] = values[node], identities[node]


def _remember(key: Any, value: Any) -> None:
    if key is not None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = value


def _held(value: Any) -> Hashable:
    """Returns what a value is to a question: numbers are themselves."""
    return (type(value), value) if isinstance(value, (int, float, bool)) else id(value)


def _identity(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what the result of a torch operator on shapes depends on; None for calls to make each time."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    if node.target is aten.where.default:  # finds other numbers of places with each mask
        return None

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            bits = value.is_conj(), value.is_neg()
            return value.dtype, value.shape, value.stride(), value.storage_offset(), value.device, bits
        if isinstance(value, (list, tuple)):
            return tuple(plain(item) for item in value)
        return type(value), value  # 1, 1.0 and True are equal and give different types

    return node.target, plain(args), plain([*kwargs.items()]), torch.get_default_dtype()


def _call(
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: Sequence[Tensor],
    axes: Mapping[str, int],
) -> Any:
    """Returns the operation on meta tensors; for fxpar's own operators what their records say."""
    target: Any = node.target
    if isinstance(target, Operator):
        return target.on_shapes(OnShapes(node, args, kwargs, tuple(expected), axes))
    if target is aten.where.default:
        return _places(args[0], expected)
    if _makes_tensors(node) or "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    if target is aten.view.default:  # as it is lowered: strides are those of a kernel
        target = aten.reshape.default
    return target(*args, **kwargs)


def _places(mask: Tensor, expected: Sequence[Tensor]) -> list[Tensor]:
    """Returns places in each dimension of a mask, as many as values decide, of which notes say the same."""
    shapes = {tuple(tensor.shape) for tensor in expected}
    if len(expected) != mask.dim() or len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(f"gives as many places for each of {mask.dim()} dimensions")
    return [torch.empty_like(tensor, dtype=torch.int64) for tensor in expected]


def _makes_tensors(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or operands(node):
        return False
    return any(a.name == "device" for a in target._schema.arguments)


def _expected(
    program: Program,
    node: fx.Node,
    sizes: Mapping[str, int],
    known: dict[tuple[TensorType, Layout], Tensor],
    local: bool,
) -> list[Tensor]:
    layouts = output_layouts(node) if local else ()
    tensors = []
    for i, kind in enumerate(output_types(node)):
        layout = layouts[i] if layouts else Layout()
        try:
            if (kind, layout) not in known:
                shape = [evaluate(size, sizes) for size in local_shape(kind.shape, layout, program.axes)]
                known[kind, layout] = torch.empty(shape, dtype=kind.dtype, device="meta")
            tensors.append(known[kind, layout])
        except (ValueError, IndexError, RuntimeError, OverflowError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise CheckFailed(f"{layout} does not fit {kind}: {reason}", where=describe(node)) from None
    return tensors


def _compare(node: fx.Node, value: Any, noted: list[Tensor], sizes: Mapping[str, int], where: str) -> None:
    kind = note(node).type
    if isinstance(kind, ScalarType):
        expected = evaluate(kind.value, sizes)
        if not isinstance(value, (int, float)) or value != expected:
            raise CheckFailed(
                f"is {value}{f' {where}' * bool(where)} where the note's {kind.value} is {expected}",
                where=describe(node),
                remedy="a number is the same on every rank and on one device: read sizes that no axis cuts",
            )
        return
    tensors = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(tensors) != len(noted) or (isinstance(kind, TensorType) and isinstance(value, (tuple, list))):
        raise CheckFailed(f"gives {len(tensors)} tensors where the note has {len(noted)}", where=describe(node))
    for mine, other in zip(tensors, noted, strict=True):
        if mine is None and other.shape == (0,) and bind_arguments(node).get("output_mask") is not None:
            continue  # a gradient that the operation was told not to compute
        if not isinstance(mine, Tensor):
            raise CheckFailed(f"gives {mine} where the note has a tensor", where=describe(node))
        if mine.dtype != other.dtype or mine.shape != other.shape:
            raise CheckFailed(
                f"gives {list(mine.shape)} of {mine.dtype} where the note and its layout give "
                f"{list(other.shape)} of {other.dtype}",
                where=describe(node),
            )
