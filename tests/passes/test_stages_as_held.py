"""A further program is cut so that parameters stay where they are, by stages that read none too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxpar
from fxpar.compile import compile_model
from fxpar.ir.stages import holders, stage_of
from fxpar.passes import DEFAULT_PASSES
from fxpar.passes.partition_stages import holding, partition_stages


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_stages_without_parameters_are_left_an_operation() -> None:
    held = {"layers.0.weight": (0,), "layers.0.bias": (0,), "layers.1.weight": (2,), "layers.1.bias": (2,)}
    passes = [holding(held) if item is partition_stages else item for item in DEFAULT_PASSES]
    program = compile_model(_Layers(), {"x": torch.randn(4, 8)}, fxpar.Plan(pp=3), passes=passes).program
    assert holders(program) == held
    made = [node for node in program.graph.nodes if node.op == "call_function"]
    assert {stage_of(node) for node in made} == {0, 1, 2}
