"""What ranks hold of parameters, against real shards and real optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.cost.build_report import places
from fxpar.cost.parameter_memory import OPTIMIZERS, held_by
from fxpar.ir.program import Parameter, TensorType, update
from fxpar.layout.layout import Layout, Piece, Placement, padded_shard, shard
from fxpar.layout.shards import local_block, without_padding
from fxpar.plan.plan import Plan
from tests.cost.test_counting import Two, compiled


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("sgd-momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_have_the_state_that_torch_gives_them(name: str, build: Any, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(7, 3, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    optimizer = build([weight])
    optimizer.step()
    held = sum(value.nbytes for value in optimizer.state[weight].values() if isinstance(value, Tensor))
    kind = OPTIMIZERS[name]
    assert kind.tensors(weight.numel(), dtype.itemsize) + kind.extra == held


@pytest.mark.parametrize(
    "placement",
    [
        Placement("I"),
        shard(0, 24),
        shard(1, 8),
        Placement("S", 0, (Piece(3, 8),)),
        Placement("S", 0, (Piece(1, 24, copies=2),), reduced=True),
        Placement("S", 0, (Piece(1, 16), Piece(1, 8, sharded=False)), reduced=True),
    ],
    ids=str,
)
def test_a_rank_holds_its_block(placement: Placement) -> None:
    check_held(placement, torch.randn(24, 8), 4)


@pytest.mark.parametrize(("size", "n"), [(259, 4), (259, 2), (1031, 8), (7, 4)])
def test_padding_is_counted_on_the_ranks_that_have_it(size: int, n: int) -> None:
    check_held(padded_shard(0, size, n), torch.randn(size, 8), n)


def check_held(placement: Placement, whole: Tensor, n: int) -> None:
    program = compiled(Two(), Plan(tp=n, split={"up": "replicate", "down": "replicate"}))
    kind = TensorType(whole.dtype, tuple(whole.shape))
    parameter = Parameter("weight", "up_weight", "parameter", kind, True)
    layout = Layout.of({"tp": placement})
    update(program.node("up_weight"), type=kind, layout=layout)
    for place in places(program):
        part = local_block(whole, layout, program.axes, place)
        found = held_by(program, parameter, place)
        assert found.bytes == part.nbytes
        assert found.padding == part.nbytes - without_padding(part, layout, program.axes, place).numel() * 4
        alike = [local_block(whole, layout, program.axes, other) for other in places(program) if other != place]
        rows = [(part.unsqueeze(1) == other.unsqueeze(0)).flatten(2).all(-1).any(1) for other in alike]
        shared = torch.stack(rows).any(0) if placement.is_shared or not placement.is_shard else torch.zeros(1)
        assert found.whole + found.shared == int(shared.sum()) * whole[0].nbytes
