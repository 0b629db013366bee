"""The simulator computes what ranks would: it changes values, and every coercion is the row of its table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor

from fxpar.errors import CheckFailed
from fxpar.ir.operators import as_parameter, dual
from fxpar.ir.program import Program, operands
from fxpar.ir.step import RNG_PATH
from fxpar.layout.layout import Piece, Placement, fits
from fxpar.layout.nesting import pieces_of
from fxpar.layout.shards import block, whole
from fxpar.layout.symbolic_sizes import shape_text
from fxpar.ops.collectives import CONJUGATE, all_reduce, coercion, reduce_from
from fxpar.ops.lower import Lowered, lower
from fxpar.ops.process_group import Group
from fxpar.testing.ranks import agree_gradient, place_gradient
from fxpar.text.parsing import parse_program
from fxpar.text.printing import placement_text
from fxpar.verify.reference_program import promote, wide
from fxpar.verify.simulate_ranks import RanksMode, run_ranks, simulated_world, step_of, symbol_values
from fxpar.verify.values import compare, rng_state
from tests.verify.cases import prepared, program

SHAPE = (12, 24)
WHOLE = tuple(Placement(kind) for kind in "IRP")
CUTS = (
    Placement("S", 0, (Piece(1, 12),)),
    Placement("S", 1, (Piece(1, 24),)),
    Placement("S", 1, (Piece(2, 12),)),
    Placement("S", 1, (Piece(1, 12), Piece(3, 4))),
    Placement("S", 0, (Piece(1, 4), Piece(1, 8))),
)


def _without(replaced: Any) -> Callable[[Program, Mapping[str, Group]], Lowered]:
    """Lowers a program and lets one of its operators do nothing."""

    def lowering(program_: Program, groups: Mapping[str, Group]) -> Lowered:
        made = program_.copy()
        nodes = [node for node in made.graph.nodes if node.target is replaced]
        assert nodes
        for node in nodes:
            node.replace_all_uses_with(operands(node)[0])
            made.graph.erase_node(node)
        return lower(made, groups)

    return lowering


@pytest.mark.parametrize(("operator", "loss_changes"), [(reduce_from, True), (all_reduce, False)])
def test_ranks_without_a_collective_compute_something_else(operator: Any, loss_changes: bool) -> None:
    case, split = prepared("gpt2"), program("gpt2", 2)
    sizes = symbol_values(split, case.inputs)
    state = {name: wide(value) for name, value in case.state.items()}
    inputs = {**{name: wide(value) for name, value in case.inputs.items()}, RNG_PATH: rng_state(split.plan.seed)}
    right = compare(case.reference, split, run_ranks(promote(step_of(split)), state, inputs, sizes), sizes)
    wrong = compare(
        case.reference, split, run_ranks(promote(step_of(split)), state, inputs, sizes, _without(operator)), sizes
    )
    assert right.ok
    assert not wrong.ok
    assert wrong.max_grad_error > 1e-3
    assert (wrong.loss_error > 1e-6) == loss_changes


def test_a_process_that_belongs_to_a_group_is_refused() -> None:
    with simulated_world({"tp": 2}), pytest.raises(CheckFailed, match="belongs to a process group already"):
        run_ranks(program("tail", 2), {}, {}, {})


def test_the_simulated_world_ends_with_the_run() -> None:
    with simulated_world({"tp": 3}):
        assert torch.distributed.get_world_size() == 3
    assert not torch.distributed.is_initialized()


def _ran(operator: Any, source: Placement, target: Placement, x: LocalTensor, groups: Mapping[str, Group]) -> Any:
    """What the ranks make of a value by a coercion, or of its gradient by a conjugate."""
    n = groups["tp"].size
    kind = f"f64{shape_text(SHAPE)}"
    before, after = (placement_text(placement, SHAPE) for placement in (source, target))
    program = parse_program(
        f"""fxpar 2
plan {{"tp": {n}}}
properties canonical collectives layouts local
%x = input["x"] : {kind} tp:{before}
%y = {operator}[tp](%x) : {kind} tp:{before}→{after}
return y=%y
"""
    )
    index = LocalTensor({rank: torch.tensor(rank) for rank in range(n)})
    return lower(program, groups).module(x, index)[0]


def _there_and_back(
    source: Placement,
    target: Placement,
    given: Sequence[Tensor],
    upstream: Sequence[Tensor],
    groups: Mapping[str, Group],
) -> tuple[list[Tensor], list[Tensor]]:
    """The ranks' results of the row that converts one placement to another, and the gradient by its conjugate."""
    row = coercion(source, target)
    assert row is not None
    x, g = (LocalTensor({rank: part.clone() for rank, part in enumerate(parts)}) for parts in (given, upstream))
    result = _ran(row.operator, source, target, x, groups)
    conjugate = CONJUGATE[row.operator]
    gradient = g if conjugate is None else _ran(conjugate, dual(target), dual(source), g, groups)
    return [[value._local_tensors[rank] for rank in range(len(given))] for value in (result, gradient)]  # type: ignore[return-value]


def test_operators_of_all_ranks_change_draw_and_split_as_those_of_each() -> None:
    parts = {0: torch.arange(5.0), 1: torch.arange(3.0)}
    with simulated_world({"tp": 2}), RanksMode(2):
        x: Any = LocalTensor({rank: part.clone() for rank, part in parts.items()})
        view = x[1:]
        assert len(view.add_(1.0).unsqueeze_(0)._size) == 2
        halves, drawn = x.split(2), x[:3].repeat(20).bernoulli(0.5)
    for rank, part in parts.items():
        part[1:] += 1.0
        assert torch.equal(x._local_tensors[rank], part)
        assert torch.equal(torch.cat([half._local_tensors[rank] for half in halves]), part)
    assert torch.equal(*drawn._local_tensors.values())


SHARED = (
    Placement("S", 1, (Piece(1, 24, copies=2),)),
    Placement("S", 1, (Piece(2, 12, copies=2),)),
    Placement("S", 1, (Piece(1, 16), Piece(1, 8, copies=2))),
    Placement("S", 1, (Piece(1, 16), Piece(1, 8, False))),
    Placement("S", 1, (Piece(1, 8, False), Piece(4, 4, copies=2))),
    Placement("S", 0, (Piece(1, 8), Piece(1, 4, False))),
)


def _shared_rows() -> list[tuple[Placement, Placement]]:
    """Shared blocks as they rest and as operations hold them, and each with finer ones of the same pieces."""
    rows = [(as_parameter(source), source) for source in SHARED]
    for source in SHARED:
        plain = tuple(replace(p, sharded=True, copies=1) for p in source.pieces)
        finer = {pieces_of(plain), tuple(p if p.sharded else replace(p, sharded=True, copies=2) for p in source.pieces)}
        rows += [(source, Placement("S", source.dim, pieces)) for pieces in finer]
    return [(source, target) for source, target in rows if coercion(source, target) is not None]


def _shares(placement: Placement, n: int) -> tuple[list[Tensor], Tensor]:
    """What the ranks hold of the gradient of a value with this placement, and the whole gradient."""
    gradient = torch.randn(SHAPE, dtype=torch.float64)
    return place_gradient(gradient, placement, n, torch.Generator().manual_seed(1)), gradient


@pytest.mark.parametrize("n", [4, pytest.param(8, marks=pytest.mark.matrix)])
def test_coercions_of_shared_blocks_keep_the_value_and_its_gradient(n: int) -> None:
    torch.manual_seed(n)
    checked = []
    with simulated_world({"tp": n}) as groups, RanksMode(n):
        for source, target in _shared_rows():
            if not fits(source, SHAPE, n) or not fits(target, SHAPE, n):
                continue
            value = torch.randn(SHAPE, dtype=torch.float64)
            upstream, gradient = _shares(target, n)
            given = [block(value, source, n, rank) for rank in range(n)]
            results, grads = _there_and_back(source, target, given, upstream, groups)
            where = f"{source} to {target} on {n} ranks"
            for rank in range(n):
                torch.testing.assert_close(results[rank], block(value, target, n, rank), msg=where)
            assert agree_gradient(grads, source, gradient), where
            checked.append(source.reduced)
    assert checked.count(True) >= 4
    assert checked.count(False) >= 4


def _rows() -> list[tuple[Placement, Placement]]:
    rows = []
    for source, target in itertools.product((*WHOLE, *CUTS), repeat=2):
        kinds = source.kind + target.kind
        if kinds in ("IR", "PI", "PR", "SR", "PS", "IS", "SI", "RS", "RI", "IP", "RP") or (
            kinds == "SS" and source != target
        ):
            rows.append((source, target))
    return rows


def _values(placement: Placement, n: int) -> tuple[list[Tensor], Tensor]:
    """What the ranks hold of a random value, and the value."""
    if placement.kind == "P":
        parts = list(torch.randn(n, *SHAPE, dtype=torch.float64))
        return parts, torch.stack(parts).sum(0)
    value = torch.randn(SHAPE, dtype=torch.float64)
    return [block(value, placement, n, rank) for rank in range(n)], value


def _gradients(placement: Placement, n: int) -> tuple[list[Tensor], Tensor]:
    """What the ranks hold of the gradient of a value with this placement, and the whole gradient."""
    dual = {"I": "R", "R": "P", "P": "R"}
    return _values(placement if placement.is_shard else Placement(dual[placement.kind]), n)


def _assembled(parts: Sequence[Tensor], placement: Placement, is_gradient: bool) -> Tensor:
    """The value that the ranks' parts stand for; where it must be the same on all of them, it is."""
    summed = placement.kind == ("R" if is_gradient else "P")
    if summed:
        return torch.stack(list(parts)).sum(0)
    if not placement.is_shard:
        assert all(torch.equal(part, parts[0]) for part in parts)
    return whole(parts, placement)


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.matrix)])
def test_every_coercion_keeps_the_value_and_its_gradient(n: int) -> None:
    """The identity on the whole: forward the value, backward the gradient, as the placements say it is held."""
    torch.manual_seed(n)
    checked = set()
    with simulated_world({"tp": n}) as groups, RanksMode(n):
        for source, target in _rows():
            if any(int(piece.size) % n for piece in (*source.pieces, *target.pieces)):
                continue
            given, value = _values(source, n)
            upstream, gradient = _gradients(target, n)
            results, grads = _there_and_back(source, target, given, upstream, groups)
            where = f"{source} to {target} on {n} ranks"
            torch.testing.assert_close(_assembled(results, target, False), value, msg=where)
            torch.testing.assert_close(_assembled(grads, source, True), gradient, msg=where)
            checked.add(source.kind + target.kind)
    assert len(checked) == 12
