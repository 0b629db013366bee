"""Captured models with what a comparison by value needs, and a sequence-parallel program written by hand.

Enters: names of cases, or of types of transformers. Leaves: programs after each pass, weights, inputs and the single
device's results, made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import Captured, capture
from fxpar.cli.models import load_model
from fxpar.ir.program import Program, note
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.verify.simulate_ranks import SimulationResult
from fxpar.verify.static import STATIC
from fxpar.verify.values import ValueReport, call_inputs, program_state, reference_run, verify_values
from tests.zoo import CASES, Case


@dataclass(frozen=True)
class Known:
    """A captured model with weights, a batch and the results of one device."""

    captured: Program
    state: dict[str, Tensor]
    inputs: dict[str, Tensor]
    reference: SimulationResult

    def compare(self, program: Program) -> ValueReport:
        """A localised program of this model against the single device."""
        return verify_values(self.captured, program, self.state, self.inputs, reference=self.reference)


@dataclass(frozen=True)
class Prepared(Known):
    """A case of the zoo, with the plan that its author would write."""

    case: Case


class Tail(nn.Module):
    """A residual block whose loss is a sum that ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(16, 24))
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """[b, 16, 24] twice."""
        h = x + self.position
        y = h + self.down(self.drop(functional.gelu(self.up(self.norm(h)))))
        return {"loss": ((y - target) ** 2 * 0.001).sum(), "y": 2.0 * y}


class Grouped(nn.Module):
    """Attention of 8 heads with 2 kv heads, of which four ranks share each by two, and a fused one of 1 kv head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(24, 32), nn.Linear(24, 8), nn.Linear(24, 8), nn.Linear(32, 24)
        self.qkv, self.out = nn.Linear(24, 40), nn.Linear(32, 24)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """[b, 16, 24] twice."""
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, None, 0.1, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, 32))
        q, k, v = self.qkv(x).split([32, 4, 4], -1)
        q, k, v = q.view(b, s, 8, 4).transpose(1, 2), k.unsqueeze(1), v.unsqueeze(1)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        y = x + self.out(mixed.transpose(1, 2).reshape(b, s, 32))
        return {"loss": ((y - target) ** 2).mean(), "y": y}


def _tail_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 16, 24), "target": torch.randn(3, 16, 24)}


_OWN = {
    "tail": Case("tail", Tail, _tail_batch, {"up": "column", "down": "row"}),
    # Columns without rows behind them: their shards are gathered.
    "columns": Case("columns", Tail, _tail_batch, {"up": "column", "down": "column"}),
    "grouped": Case("grouped", Grouped, _tail_batch, {}),
}


@cache
def prepared(name: str) -> Prepared:
    """A case of the zoo, or `tail`, `columns` or `grouped`."""
    case = CASES.get(name) or _OWN[name]
    model, batch = case.model(), case.example()
    captured = capture(model, batch, case.plan(2), case.loss)
    return Prepared(*_run(captured, model, batch), case)


def _run(
    captured: Captured, model: nn.Module, batch: Any
) -> tuple[Program, dict[str, Tensor], dict[str, Tensor], SimulationResult]:
    state, inputs = program_state(captured.program, model), call_inputs(captured, model, batch)
    return captured.program, state, inputs, reference_run(captured.program, state, inputs)


@cache
def program(name: str, tp: int, until: str = "localize") -> Program:
    """A case's program after the pass `until`, statically checked after each."""
    captured = prepared(name).captured.with_(plan=prepared(name).case.plan(tp))
    return PassManager(DEFAULT_PASSES, STATIC).run(captured, until=until)


@cache
def known(kind: str) -> Known:
    """A tiny model of a type of transformers, which no plan line splits."""
    loaded = load_model(f"hf:{kind}", 3, 16, 0, True)
    return Known(*_run(capture(loaded.model, loaded.batch, None, loaded.loss), loaded.model, loaded.batch))


@cache
def chosen(kind: str, sequence_parallel: bool, until: str = "localize") -> Program:
    """Such a model's program for 4 ranks after the pass `until`, of layouts that the passes chose."""
    captured = known(kind).captured.with_(plan=Plan(tp=4, sequence_parallel=sequence_parallel))
    return PassManager(DEFAULT_PASSES).run(captured, until=until)


_SEQUENCE = """fxpar 2
plan {{"tp": {tp}}}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 like 3
loss loss
%position = parameter["position"] : f32[16, 24] tp:I
%norm_weight = parameter["norm.weight"] : f32[24] tp:I  # norm
%norm_bias = parameter["norm.bias"] : f32[24] tp:I  # norm
%up_weight = parameter["up.weight"] : f32[40, 24] tp:S(0)  # up
%up_bias = parameter["up.bias"] : f32[40] tp:S(0)  # up
%down_weight = parameter["down.weight"] : f32[24, 40] tp:S(1)  # down
%down_bias = parameter["down.bias"] : f32[24] tp:I  # down
%x = input["x"] : f32[b, 16, 24] tp:R
%target = input["target"] : f32[b, 16, 24] tp:R
%rng = input["fxpar.rng"] : i64[3] tp:R
%tp_index = fxpar.axis_index[tp]() : i64[] tp:V
%h = aten.add.Tensor(%x, %position) : f32[b, 16, 24] tp:I  # - cases.py:1
%h_i_to_s = fxpar.i_to_s[tp](%h) : f32[b, 16, 24] tp:S(1)  # - cases.py:1
%weight = fxpar.copy_to[tp](%norm_weight) : f32[24] tp:R  # norm cases.py:2
%bias = fxpar.copy_to[tp](%norm_bias) : f32[24] tp:R  # norm cases.py:2
%norm = aten.layer_norm.default(%h_i_to_s, [24], %weight, %bias, 1e-05, False) : f32[b, 16, 24] tp:S(1)  # norm
%norm_whole = fxpar.all_gather[tp](%norm) : f32[b, 16, 24] tp:R  # up cases.py:3
%up = aten.linear.default(%norm_whole, %up_weight) : f32[b, 16, 40] tp:S(2)  # up cases.py:3
%up_sum = aten.add.Tensor(%up, %up_bias) : f32[b, 16, 40] tp:S(2)  # up cases.py:3
%gelu = aten.gelu.default(%up_sum) : f32[b, 16, 40] tp:S(2)  # - cases.py:4
%drop = fxpar.dropout(%gelu, %rng, 0.1, [%tp_index]) : f32[b, 16, 40] tp:S(2) {{random={random}}}  # drop cases.py:5
%down = aten.linear.default(%drop, %down_weight) : f32[b, 16, 24] tp:P  # down cases.py:6
%down_part = fxpar.reduce_scatter[tp](%down) : f32[b, 16, 24] tp:S(1)  # down cases.py:6
%row = fxpar.copy_to[tp](%down_bias) : f32[24] tp:R  # down cases.py:6
%down_sum = aten.add.Tensor(%down_part, %row) : f32[b, 16, 24] tp:S(1)  # down cases.py:6
%y = aten.add.Tensor(%h_i_to_s, %down_sum) : f32[b, 16, 24] tp:S(1)  # - cases.py:7
%target_part = fxpar.r_to_s[tp](%target) : f32[b, 16, 24] tp:S(1)  # - cases.py:8
%gap = aten.sub.Tensor(%y, %target_part) : f32[b, 16, 24] tp:S(1)  # - cases.py:8
%square = aten.pow.Tensor_Scalar(%gap, 2) : f32[b, 16, 24] tp:S(1)  # - cases.py:8
%small = aten.mul.Tensor(%square, 0.001) : f32[b, 16, 24] tp:S(1)  # - cases.py:8
%sum = aten.sum.default(%small) : f32[] tp:P  # - cases.py:8
%loss = fxpar.reduce_from[tp](%sum) : f32[] tp:I  # - cases.py:8
%y_whole = fxpar.s_to_i[tp](%y) : f32[b, 16, 24] tp:I  # - cases.py:9
%double = aten.mul.Tensor(%y_whole, 2.0) : f32[b, 16, 24] tp:I  # - cases.py:9
return loss=%loss, y=%double
"""


def sequence_text(tp: int) -> str:
    """`Tail` split over the sequence too: seven of the twelve coercions, three parameters inside the split region."""
    random = next(note(n).random for n in prepared("tail").captured.graph.nodes if n.op != "output" and note(n).random)
    return _SEQUENCE.format(tp=tp, random=random)


def sequence(tp: int) -> Program:
    """The program of `sequence_text`."""
    return parse_program(sequence_text(tp))
