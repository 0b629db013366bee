"""Shapes: every operation, run on shapes alone, gives the type that its note claims.

Enters: a program, global or localised. Leaves: nothing, or `CheckFailed` that names the node and both shapes.

The program runs on meta tensors at the example's sizes, which must work, and at others, so that a size baked into a
literal shows. A localised program runs twice, as a rank and as the one device whose program its text is
(`fxpar.verify.global_reading`): shapes must be those of the notes, a rank's with the layout applied, and numbers must
be the notes' in both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.errors import CheckFailed
from fxpar.layout.layout import Layout
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.operator import OnShapes, Operator
from fxpar.program.program import (
    Program,
    ScalarType,
    TensorType,
    describe,
    note,
    operands,
    output_layouts,
    output_types,
)
from fxpar.program.properties import Property
from fxpar.program.structural_key import plain
from fxpar.rules import bind_arguments
from fxpar.signatures.check_cache import Facts, facts_of
from fxpar.verify.check_budget import check_cost
from fxpar.verify.global_reading import whole_arguments

aten = torch.ops.aten

# What an operation on shapes raises where they do not fit; some of torch's shape functions use assertions, and ask
# attributes of an argument that a text made None.
_FAILURES = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError)


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
    """Of the symbols of inputs; of counted rows numbers that differ from each other, so that rows are not mixed."""
    counted = {symbol.name: symbol.example + place for place, symbol in enumerate(program.counted)}
    return {s.name: s.example for s in program.symbols} | counted


def _others(program: Program) -> Iterator[dict[str, int]]:
    """All symbols doubled, one smaller, halved, one larger; then the same for each symbol alone."""
    example = _examples(program)
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
    calls: dict[Any, Any] = facts.known(*reading, "calls")
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
            if key is None or key not in calls:
                calls[key] = _call(node, args, kwargs, expected, program.axes if local else {})
            values[node] = calls[key]
        except _FAILURES as error:
            if note(node).type is None:
                continue
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            place = "a rank's shapes" if local else "the shapes of the whole"
            raise CheckFailed(f"cannot run on {place}: {reason}", where=describe(node)) from None
        _compare(node, values[node], expected, sizes, "on a rank" if local else "")
        identities[node] = _held(values[node])
        known[question] = values[node], identities[node]


def _held(value: Any) -> Hashable:
    """What a value is to a question: numbers are themselves."""
    return (type(value), value) if isinstance(value, (int, float, bool)) else id(value)


def _identity(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the result of a torch operator on shapes depends on; None for calls that are to be made each time."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    if node.target is aten.where.default:  # finds other numbers of places with each mask
        return None

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.shape, value.stride(), value.storage_offset(), value.device
        if isinstance(value, (list, tuple)):
            return tuple(plain(item) for item in value)
        return type(value), value  # 1, 1.0 and True are equal and give different types

    return node.target, plain(args), plain([*kwargs.items()])


def _call(
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: Sequence[Tensor],
    axes: Mapping[str, int],
) -> Any:
    """The operation on meta tensors; for fxpar's own operators what their records say."""
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
    """Places in each dimension of a mask, as many as values decide: what a note says of them it says of all alike."""
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
