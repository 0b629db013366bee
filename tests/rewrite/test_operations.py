"""The step of each operation is autograd's of the whole, on every rank, under what its rule allows."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from fxpar.errors import FxparError
from fxpar.ops.registry import OPERATORS
from fxpar.testing import sampled_operations
from fxpar.testing.ranks import Sample
from fxpar.testing.samples import Draw


def _trials() -> ModuleType:
    """The module beside this one: tests are no package."""
    name = "fxpar_derivative_trials"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("trials.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


t = _trials()

# Programs do not hold them when they are differentiated: `canonicalize` or `assign_rng` writes others.
ELSEWHERE = {"aten.to.device", "aten.rrelu.default", "aten._unsafe_view.default", "aten.unflatten.int"}
# Of these the backward flattens dimensions, or sums what it contracts: with padding in them it is refused. Padding is
# that of vocabularies, which stand last, or first in a table.
FLATTENED = {f"aten.{name}.default" for name in ("linear", "matmul", "einsum", "tensordot", "inner")}


def why_refused(name: str, signed: object) -> str:
    """The known reason why a step has no layouts; empty where it must have them."""
    placements = (*signed.operands, *signed.outputs)  # type: ignore[attr-defined]
    if name in FLATTENED and any(p.is_padded for p in placements):
        return "the padding would stand among other elements"
    if name == "aten.xlogy.Tensor" and signed.operands[0].kind == "P":  # type: ignore[attr-defined]
        return "where the value is zero the other's logarithm does not count: a summand does not show it"
    if name == "aten.prod.dim_int" and any(p.is_shared for p in placements):
        return "ones stand in front of the running product, and nothing makes shared blocks of them"
    if name == "aten.angle.default" and any(p.is_shared for p in placements):
        return "nothing makes shared blocks of the zero that is chosen where the value is zero"
    if name == "fxpar.take_weighed.default" and signed.operands[2].is_shard:  # type: ignore[attr-defined]
        return "a token's rows are summed in the order of its experts: no rank can sum some of them"
    value = signed.operands[2] if "attention" in name else None  # type: ignore[attr-defined]
    if value is not None and value.is_shared and all(p.kind == "R" for p in signed.operands[:2]):  # type: ignore[attr-defined]
        return "columns of values that several ranks share"
    return ""


@cache
def samples(n: int) -> dict[str, tuple[Sample, ...]]:
    draw: Draw = t.Fours(1, False) if n == 4 else Draw(0, True)
    found: dict[str, list[Sample]] = {}
    for build in sampled_operations._BUILDERS:
        for name, made in build(draw).items():
            if name.removeprefix("fxpar.") not in OPERATORS:
                found.setdefault(sampled_operations.full_name(name), []).extend(made)
    return {name: tuple(made) for name, made in found.items()}


def form(signed: object) -> tuple[object, ...]:
    """What signatures are alike in."""
    return tuple(
        (p.kind, p.dim, p.is_shared, p.is_padded, len(p.pieces), all(piece.outer == 1 for piece in p.pieces))
        for p in signed.operands  # type: ignore[attr-defined]
    )


def tried(name: str, n: int, few: bool) -> Iterator[tuple[object, object]]:
    """Calls with signatures; of few those that are unlike, some of each call."""
    for trial in t.trials(sampled_operations.operator_of(name), samples(n)[name], n):
        found = t.signatures(trial, n)
        if few:
            unlike = {form(signed): signed for signed in reversed(found)}
            found = list(unlike.values())[-2:]
        yield from ((trial, signed) for signed in found)


def check(name: str, n: int, few: bool) -> None:
    made = 0
    for trial, signed in tried(name, n, few):
        try:
            fault = t.fault(trial, signed, n)
        except t.Unmade:
            continue
        except FxparError as error:
            if not why_refused(name, signed):
                pytest.fail(f"{signed}: {error}")
            continue
        assert not fault, f"{signed}: {fault}"
        made += 1
    assert made or few or name in ELSEWHERE or not any(True for _ in tried(name, n, True))


NAMES = sorted(samples(2))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_ranks_are_those_of_the_whole(name: str) -> None:
    check(name, 2, few=True)


@pytest.mark.matrix
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_under_every_signature(name: str, n: int) -> None:
    check(name, n, few=False)


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sum that is taken once a rank, and of a gradient that is nobody's."""
    trial = next(t.trials(sampled_operations.operator_of("aten.mul.Tensor"), samples(2)["aten.mul.Tensor"], 2))
    signed = next(s for s in t.signatures(trial, 2) if s.operands[0].is_shard)
    step = t.step_of(t.program_of(trial, signed, 2))
    assert t.deviation(trial, step) == ""
    node = next(n for n in step.graph.nodes if str(n.target) == "aten.mul.Tensor" and t.note(n).phase)
    node.target = sampled_operations.operator_of("aten.add.Tensor")
    step.graph_module.recompile()
    assert "gradient of x" in t.deviation(trial, step)
