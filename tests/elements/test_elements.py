"""Elements known from sizes alone: each formula against what the operators compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx

from fxpar.elements.aten_elements import elements
from fxpar.elements.numbers import (
    FALSE,
    TRUE,
    Element,
    Predicate,
    at_least_zero,
    both,
    either,
    index,
    negated,
    never_negative,
)
from fxpar.ir.program import Program, ScalarType, note, tensor_type
from fxpar.layout.symbolic_sizes import Size, evaluate, symbol
from fxpar.text.parsing import parse_program
from tests.passes.masks import GROUPS, program

S, T = symbol("s"), symbol("t")
ROW, COL = index(0), index(1)


def run(found: Program, node: fx.Node, sizes: Mapping[str, int], known: dict[fx.Node, Any]) -> Any:
    """What a node computes; operands whose values must not matter are random."""
    if node not in known:
        kind = note(node).type
        if isinstance(kind, ScalarType):
            known[node] = evaluate(kind.value, sizes)
        elif node.op == "placeholder":
            owned = found.parameter(node)
            known[node] = found.constants[owned.fqn] if owned else torch.randn(shape_of(node, sizes))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: run(found, n, sizes, known))
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def shape_of(node: fx.Node, sizes: Mapping[str, int]) -> list[int]:
    return [evaluate(size, sizes) for size in tensor_type(node).shape]


def computed(element: Element, shape: list[int], sizes: Mapping[str, int]) -> Tensor:
    """The formula's value at every element."""
    result = torch.zeros(shape, dtype=torch.float64)
    for place in itertools.product(*map(range, shape)):
        values: dict[Any, int] = {index(dim): at for dim, at in enumerate(place)}
        values |= {symbol(name): size for name, size in sizes.items()}
        result[place] = at_point(element, values)
    return result


def at_point(element: Element, values: Mapping[Any, int]) -> float:
    def number(size: Any) -> float:
        return float(size if isinstance(size, (int, float)) else size.subs(values))

    def holds(predicate: Predicate) -> bool:
        return any(all(number(size) >= 0 for size in clause) for clause in predicate.clauses)

    if isinstance(element, Predicate):
        return float(holds(element))
    (found,) = [number(leaf) for condition, leaf in element.cases if holds(condition)]  # exactly one case
    return found


def check(found: Program, sizes: Mapping[str, int]) -> int:
    """Compares all known nodes of a program with what they compute; returns how many."""
    known = elements(found, found.graph.nodes)
    values: dict[fx.Node, Any] = {}
    for node, element in known.items():
        wanted = run(found, node, sizes, values)
        shape = shape_of(node, sizes)
        assert list(wanted.shape) == shape, node.name
        if math.prod(shape) <= 400:
            torch.testing.assert_close(computed(element, shape, sizes), wanted.double(), atol=0, rtol=0, msg=node.name)
    return len(known)


@pytest.mark.parametrize("group", GROUPS)
def test_elements_of_masks_are_what_the_operators_compute(group: str) -> None:
    for sizes in ({"b": 1, "s": 1}, {"b": 2, "s": 7}):
        assert check(program(group), sizes) >= 3 * len(GROUPS[group])


# Operators and arguments that the masks above do not have.
CALLS = [
    "aten.arange.start(2, %n) : i64[s - 2]",
    "aten.arange.start_step(1, 8, 3) : i64[3]",
    "aten.slice.Tensor(%i, 0, 1, 9223372036854775807, 2) : i64[floor(s/2)]",
    "aten.slice.Tensor(%f, 0, -2) : i64[2]",
    "aten.select.int(%m, 0, -1) : bool[s]",
    "aten.select.int(%m, 1, 0) : bool[s]",
    "aten.select.int(%g, -1, 1) : i64[s, 6]",
    "aten.permute.default(%g, [2, 0, 1]) : i64[4, s, 6]",
    "aten.t.default(%m) : bool[s, s]",
    "aten.tril.default(%j, -1) : i64[s, s]",
    "aten.triu.default(%j, 2) : i64[s, s]",
    "aten.rsub.Scalar(%i, 3) : i64[s]",
    "aten.neg.default(%i) : i64[s]",
    "aten.mul.Tensor(%i, -2) : i64[s]",
    "aten.eq.Scalar(%i, 2) : bool[s]",
    "aten.ne.Tensor(%j, %i) : bool[s, s]",
    "aten.gt.Scalar(%m, 0) : bool[s, s]",
    "aten.bitwise_xor.Tensor(%m, %p) : bool[s, s]",
    "aten.logical_not.default(%m) : bool[s, s]",
    "aten.bitwise_or.Tensor(%m, %p) : bool[s, s]",
    "aten.where.self(%m, %i, %j) : i64[s, s]",
    "aten.where.ScalarOther(%m, %i, 7) : i64[s, s]",
    "aten.where.self(%m, %p, %m) : bool[s, s]",
    "aten.masked_fill.Scalar(%j, %m, -1) : i64[s, s]",
    "aten._to_copy.default(%i, dtype=dtype.bool) : bool[s]",
    "aten._to_copy.default(%m, dtype=dtype.i64) : i64[s, s]",
    "aten._to_copy.default(%low, dtype=dtype.bf16) : bf16[s]",
    "aten.mul.Tensor(%h, -3.4028234663852886e+38) : bf16[s, s]",
    "aten.add.Tensor(%h, 0.1) : bf16[s, s]",
    "aten.add.Tensor(%h, %low) : f32[s, s]",
    "aten.full_like.default(%i, 5) : i64[s]",
    "aten.cumsum.default(%p, 1) : i64[s, 1]",
    "aten.diff.default(%i) : i64[s - 1]",
    "aten.index.Tensor(%m, [%i]) : bool[s, s]",
    "aten.squeeze.dim(%p, 1) : bool[s]",
    "aten.view.default(%z, [%n2]) : i64[6*s]",
    "aten.add.Tensor(%f, %c) : i64[4]",
]
# What must not be known: it depends on values, or is not certain for every size and type.
UNKNOWN = [
    "aten.view.default(%g, [%n, 24]) : i64[s, 24]",
    "aten.slice.Tensor(%i, 0, -2) : i64[Min(2, s)]",
    "aten.cumsum.default(%i, 0) : i64[s]",
    "aten._to_copy.default(%i, dtype=dtype.f32) : f32[s]",
    "aten._to_copy.default(%i, dtype=dtype.i32) : i32[s]",
    "aten.mul.Tensor(%i, %i) : i64[s]",
    "aten.mul.Tensor(%i, 4294967296) : i64[s]",
    "aten.add.Tensor(%i, %i, alpha=2) : i64[s]",
    "aten.lt.Scalar(%i, 2.5) : bool[s]",
    "aten.index.Tensor(%i, [%up]) : i64[s]",
    "aten.index.Tensor(%i, [%down]) : i64[s]",
    "aten.index.Tensor(%m, [%p]) : bool[s, s]",
    "aten.le.Tensor(%h, %low) : bool[s, s]",
    "aten.gt.Scalar(%x, 0) : bool[s]",
    "aten.add.Tensor(%f, %d) : i64[4]",
    "aten.bitwise_not.default(%i) : i64[s]",
    "aten.__and__.Scalar(%i, 1) : i64[s]",
    "aten.rand_like.default(%p, dtype=dtype.f32) : f32[s, 1]",
    "aten.view.dtype(%low, dtype.i32) : i32[s]",
]


def written(line: str) -> Program:
    """A program that ends in this call."""
    lines = [
        *("fxpar 2", "plan {}", "properties canonical", "symbol s = x.0 like 5"),
        '%c = constant["c"]([3, 3, 3, 3]) : i64[4]',
        '%d = constant["d"]([3, 4, 3, 4]) : i64[4]',
        '%x = input["x"] : f32[s]',
        "%n = aten.sym_size.int(%x, 0) : s",
        "%n2 = operator.mul(%n, 6) : 6*s",
        "%i = aten.arange.default(%n) : i64[s]",
        "%f = aten.arange.default(4) : i64[4]",
        "%up = aten.add.Tensor(%i, 1) : i64[s]",
        "%down = aten.sub.Tensor(%i, 1) : i64[s]",
        "%r = aten.unsqueeze.default(%i, 1) : i64[s, 1]",
        "%p = aten.gt.Scalar(%r, 1) : bool[s, 1]",
        "%j = aten.sub.Tensor(%r, %i) : i64[s, s]",
        "%m = aten.ge.Scalar(%j, -1) : bool[s, s]",
        "%h = aten._to_copy.default(%m, dtype=dtype.bf16) : bf16[s, s]",
        "%low = aten.full.default([%n], -3.4028234663852886e+38, dtype=dtype.f32) : f32[s]",
        "%z = aten.zeros.default([%n, 6], dtype=dtype.i64) : i64[s, 6]",
        "%r2 = aten.unsqueeze.default(%r, 2) : i64[s, 1, 1]",
        "%g = aten.expand.default(%r2, [%n, 6, 4]) : i64[s, 6, 4]",
        f"%out = {line}",
        "return out=%out",
    ]
    return parse_program("\n".join([*lines, ""]))


@pytest.mark.parametrize("line", CALLS)
def test_a_call_is_known_and_what_it_computes(line: str) -> None:
    found = written(line)
    assert found.node("out") in elements(found, found.graph.nodes)
    for size in (3, 8):
        check(found, {"s": size})


@pytest.mark.parametrize("line", UNKNOWN)
def test_a_call_that_is_not_certain_is_not_known(line: str) -> None:
    found = written(line)
    assert found.node("out") not in elements(found, found.graph.nodes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (S - 1, True),
        (S - 2, False),
        (S - 1 - ROW, True),
        (S - 2 - ROW, False),
        (ROW, True),
        (ROW - 1, False),
        (T - COL + ROW - 1, True),
        (ROW - COL, False),
        (S * ROW, True),
        (S * T - S, True),
        (S * T - S - T, False),
        (ROW * COL, False),  # true, but not affine
        (sympy.Max(S, 3) - 3, False),  # true, but no polynomial
        (0, True),
        (-1, False),
    ],
)
def test_proofs(size: Size, expected: bool) -> None:
    assert never_negative(size, (S, T)) is expected


def test_predicates_are_short() -> None:
    shape = (S, S)
    past, near, far = (at_least_zero(e, shape) for e in (ROW - COL, COL - ROW + 4, COL - ROW + 8))
    window = both(past, near, shape)
    assert either(past, negated(past, shape), shape) == TRUE
    assert both(past, negated(past, shape), shape) == FALSE
    assert both(window, far, shape) == window
    assert either(window, past, shape) == past
    assert negated(negated(window, shape), shape) == window
    assert either(both(near, past, shape), negated(near, shape), shape) == either(past, negated(near, shape), shape)
    assert both(near, at_least_zero(S - ROW - 1, shape), (3, 3)) == TRUE
