"""Blocks out of the ranks' order: what rules hand on is right, by brute force; what depends on positions is refused."""

from __future__ import annotations

import pytest
import torch

from fxpar.layout.layout import I, Layout, Piece, Placement, R
from fxpar.ops.collectives import coercion
from fxpar.rules import Refusal, call_of, infer, rule_of, seed_signature
from fxpar.testing.check import make_node
from fxpar.testing.sampled_operations import operations
from fxpar.testing.trial import Trial

aten = torch.ops.aten


AXES = {"tp": 2}


def on_one_axis(placement: Placement) -> Layout:
    """The layout of a value on the only axis."""
    return Layout.of({"tp": placement})


def turned(size: int, dim: int, n: int) -> list[Placement]:
    """Cuts of a dimension in reverse, as a zigzag, and as several zigzags."""
    half = Piece(1, size // 2)
    runs: list[tuple[Piece, ...]] = [(Piece(1, size, reversed=True),)] if size % n == 0 else []
    if size % (2 * n) == 0:
        runs.append((half, Piece(1, size // 2, reversed=True)))
    if size % (4 * n) == 0:
        quarter = Piece(1, size // 4)
        runs.append((Piece(2, size // 2, segments=(quarter, Piece(1, size // 4, reversed=True))),))
    return [Placement("S", dim, pieces) for pieces in runs]


def test_what_any_rule_hands_on_is_right_in_values_and_gradients() -> None:
    right: set[str] = set()
    for name, operation in operations(0, True).items():
        rule = rule_of(operation.target)
        for sample in operation.samples:
            trial = Trial(operation.target, sample, AXES, torch.Generator().manual_seed(0))
            call = call_of(make_node(trial), 2)
            for index, operand in enumerate(trial.operands):
                cuts = [cut for dim, size in enumerate(operand.shape) for cut in turned(size, dim, 2)]
                for cut in cuts if rule is not None else ():
                    assert rule is not None
                    signature = seed_signature(rule, call, index, cut)
                    if isinstance(signature, Refusal):
                        continue
                    assert infer(rule, call, signature.operands, trial.carries) == signature.outputs
                    ins = [on_one_axis(placement) for placement in signature.operands]
                    faults = [trial.fault(ins, i, on_one_axis(out)) for i, out in enumerate(signature.outputs)]
                    assert not any(faults), f"{name} {[str(p) for p in signature.operands]}: {faults}"
                    right.add(name)
    assert {"aten.add.Tensor", "aten.relu.default", "aten.linear.default", "aten.mul.Tensor"} <= right


@pytest.mark.parametrize("name", ["aten.view.default", "aten.slice.Tensor", "aten.cumsum.default", "aten.cat.default"])
def test_what_depends_on_positions_is_refused(name: str) -> None:
    operation = operations(0, True)[name]
    seen = 0
    for sample in operation.samples:
        trial = Trial(operation.target, sample, AXES, torch.Generator().manual_seed(0))
        call = call_of(make_node(trial), 2)
        dims = [sample.args[1]] if name == "aten.cumsum.default" else range(trial.operands[0].dim())
        for cut in [cut for dim in dims for cut in turned(trial.operands[0].shape[dim], dim, 2)]:
            rest = [R] * (len(trial.operands) - 1)
            assert isinstance(infer(rule_of(operation.target), call, [cut, *rest], trial.carries), Refusal)
            seen += 1
    assert seen


def test_nothing_converts_them() -> None:
    zigzag = Placement("S", 0, (Piece(1, 8), Piece(1, 8, reversed=True)))
    assert coercion(zigzag, I) is coercion(zigzag, R) is coercion(I, zigzag) is coercion(R, zigzag) is None
    assert coercion(Placement("S", 0, (Piece(1, 16),)), zigzag) is None
