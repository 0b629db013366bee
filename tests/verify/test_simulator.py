"""The simulator computes what ranks would: it changes values, and every coercion is the row of its table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from fxpar.errors import CheckFailed
from fxpar.layout.layout import Piece, Placement, fits, pieces_of
from fxpar.layout.shards import block, whole
from fxpar.ops import bound, factored
from fxpar.ops.coercions import coercion
from fxpar.ops.collectives import Group
from fxpar.ops.lower import Lowered, lower
from fxpar.oracle.ranks import agree_gradient, place_gradient
from fxpar.passes.assign_rng import RNG_PATH
from fxpar.program.coercions import at_rest
from fxpar.program.program import Program
from fxpar.verify.promote import promote, wide
from fxpar.verify.simulate import run_ranks, simulated_world, step_of, symbol_values
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


def _identity(x: Tensor, *rest: object) -> Tensor:
    return x


def _without(replaced: Callable[..., Tensor]) -> Callable[[Program, Mapping[str, Group]], Lowered]:
    """Lowers a program and lets one of its operators do nothing."""

    def lowering(program_: Program, groups: Mapping[str, Group]) -> Lowered:
        lowered = lower(program_, groups)
        nodes = [node for node in lowered.module.graph.nodes if node.target is replaced]
        assert nodes
        for node in nodes:
            node.target = _identity
        lowered.module.recompile()
        return lowered

    return lowering


@pytest.mark.parametrize(("operator", "loss_changes"), [(bound.reduce_from, True), (bound.all_reduce, False)])
def test_ranks_without_a_collective_compute_something_else(operator: Callable[..., Tensor], loss_changes: bool) -> None:
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


def _cut(placement: Placement) -> tuple[int, list[tuple[int, int]]]:
    return placement.dim, [(int(piece.outer), int(piece.size)) for piece in placement.pieces]


def _call(source: Placement, target: Placement, group: tuple[str, int], index: Tensor) -> Callable[[Tensor], Tensor]:
    """The implementation of a row of SPEC section 2.1's table."""
    rows: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
        ("I", "R"): lambda x: bound.copy_to(x, *group),
        ("P", "I"): lambda x: bound.reduce_from(x, *group),
        ("P", "R"): lambda x: bound.all_reduce(x, *group),
        ("S", "R"): lambda x: bound.all_gather(x, *_cut(source), *group),
        ("P", "S"): lambda x: bound.reduce_scatter(x, *_cut(target), *group),
        ("I", "S"): lambda x: bound.split(x, *_cut(target), *group, index),
        ("S", "I"): lambda x: bound.gather(x, *_cut(source), *group, index),
        ("R", "S"): lambda x: bound.take(x, *_cut(target), *group, index),
        ("R", "I"): lambda x: bound.settle(x, index),
        ("I", "P"): lambda x: bound.keep_first(x, index),
        ("R", "P"): lambda x: bound.mask_first(x, index),
        ("S", "S"): lambda x: bound.all_to_all(x, *_cut(source), *_cut(target), *group, index),
    }
    return rows[source.kind, target.kind]


def _factored(source: Placement, target: Placement, n: int) -> list[tuple[int, int, int, int]]:
    """Length of each piece in a rank's tensor, repetitions, ranks that share a block, and its parts."""
    found = []
    for piece, wanted in zip(source.pieces, target.pieces, strict=True):
        copies, kept = (p.copies if p.sharded else n for p in (piece, wanted))
        found.append((int(piece.length) * copies // n, int(wanted.outer), copies, copies // kept))
    return found


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
    rows = [(at_rest(source), source) for source in SHARED]
    for source in SHARED:
        plain = tuple(replace(p, sharded=True, copies=1) for p in source.pieces)
        finer = {pieces_of(plain), tuple(p if p.sharded else replace(p, sharded=True, copies=2) for p in source.pieces)}
        rows += [(source, Placement("S", source.dim, pieces)) for pieces in finer]
    return [(source, target) for source, target in rows if coercion(source, target) is not None]


def _shares(placement: Placement, n: int) -> tuple[list[Tensor], Tensor]:
    """What the ranks hold of the gradient of a value with this placement, and the whole gradient."""
    gradient = torch.randn(SHAPE, dtype=torch.float64)
    return place_gradient(gradient, placement, n, torch.Generator().manual_seed(1)), gradient


@pytest.mark.parametrize("n", [4, 8])
def test_coercions_of_shared_blocks_keep_the_value_and_its_gradient(n: int) -> None:
    torch.manual_seed(n)
    checked = []
    with simulated_world({"tp": n}) as groups, LocalTensorMode(n):
        index = LocalTensor({rank: torch.tensor(rank) for rank in range(n)})
        for source, target in _shared_rows():
            if not fits(source, SHAPE, n) or not fits(target, SHAPE, n):
                continue
            value = torch.randn(SHAPE, dtype=torch.float64)
            upstream, gradient = _shares(target, n)
            x = LocalTensor({rank: block(value, source, n, rank).clone() for rank in range(n)}).requires_grad_()
            pieces = _factored(source, target, n)
            if source.settled:
                y = factored.share(x, source.dim, pieces, groups["tp"].name, n, index)
            else:
                y = factored.take_part(x, source.dim, pieces, index)
            y.backward(LocalTensor(dict(enumerate(upstream))))
            where = f"{source} to {target} on {n} ranks"
            for rank in range(n):
                mine = y._local_tensors[rank]  # type: ignore[attr-defined]
                torch.testing.assert_close(mine.detach(), block(value, target, n, rank), msg=where)
            grads = [x.grad._local_tensors[rank] for rank in range(n)]  # type: ignore[union-attr]
            assert agree_gradient(grads, source, gradient), where
            checked.append(source.settled)
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


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_coercion_keeps_the_value_and_its_gradient(n: int) -> None:
    """The identity on the whole: forward the value, backward the gradient, as the placements say it is held."""
    torch.manual_seed(n)
    checked = set()
    with simulated_world({"tp": n}) as groups, LocalTensorMode(n):
        group = (groups["tp"].name, n)
        index = LocalTensor({rank: torch.tensor(rank) for rank in range(n)})
        for source, target in _rows():
            if any(int(piece.size) % n for piece in (*source.pieces, *target.pieces)):
                continue
            given, value = _values(source, n)
            upstream, gradient = _gradients(target, n)
            x = LocalTensor({rank: part.clone() for rank, part in enumerate(given)}).requires_grad_()
            y = _call(source, target, group, index)(x)
            y.backward(LocalTensor({rank: part.clone() for rank, part in enumerate(upstream)}))
            results = [y._local_tensors[rank].detach() for rank in range(n)]  # type: ignore[attr-defined]
            grads = [x.grad._local_tensors[rank] for rank in range(n)]  # type: ignore[union-attr]
            where = f"{source} to {target} on {n} ranks"
            torch.testing.assert_close(_assembled(results, target, False), value, msg=where)
            torch.testing.assert_close(_assembled(grads, source, True), gradient, msg=where)
            checked.add(source.kind + target.kind)
    assert len(checked) == 12


def test_an_all_reduce_in_place_of_g_multiplies_gradients() -> None:
    n = 3
    with simulated_world({"tp": n}) as groups, LocalTensorMode(n):
        x = LocalTensor({rank: torch.ones(2, dtype=torch.float64) for rank in range(n)}).requires_grad_()
        bound.all_reduce(x, groups["tp"].name, n).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad._local_tensors[0], torch.full((2,), 3.0, dtype=torch.float64))  # type: ignore[attr-defined]
