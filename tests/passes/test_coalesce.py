"""coalesce: gradients of many parameters are summed at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.ir.program import operands
from fxpar.manager import PassManager
from fxpar.ops.collectives import sum_gradients
from fxpar.passes.coalesce import coalesce
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import verify
from fxpar.verify.static import STATIC
from tests.passes.modules import shown
from tests.passes.words import until

COALESCE = """\
%words_weight = parameter["words.weight"] : f32[15, 6] tp:S(0: 15 ~ 16)
%norm_weight = parameter["norm.weight"] : f32[6] tp:I
%norm_bias = parameter["norm.bias"] : f32[6] tp:I
%head_weight = parameter["head.weight"] : f32[15, 6] tp:S(0: 15 ~ 16) {role="column"}
%ids = input["ids"] : i64[b, 2*s] tp:R
%labels = input["labels"] : i64[b, 2*s] tp:R
%tp_gradients = fxpar.sum_gradients[tp](%norm_bias, %norm_weight) : (f32[6] tp:R; f32[6] tp:R)
%b = aten.sym_size.int(%ids, 0) : b
%s = aten.sym_size.int(%ids, 1) : 2*s
%embedding = aten.embedding.default(%words_weight, %ids) : f32[b, 2*s, 6] tp:P
%embedding_reduce_scatter = fxpar.reduce_scatter[tp](%embedding) : f32[b, 2*s, 6] tp:P→S(1)
%dropout = aten.dropout.default(%embedding_reduce_scatter, 0.1, True) : f32[b, 2*s, 6] tp:S(1) {random=325815778}
%norm_weight_copy_to = operator.getitem(%tp_gradients, 1) : f32[6] tp:R
%norm_bias_copy_to = operator.getitem(%tp_gradients, 0) : f32[6] tp:R
%layer_norm = aten.layer_norm.default(%dropout, [6], %norm_weight_copy_to, %norm_bias_copy_to, 1e-05, False) : f32[b, 2*s, 6] tp:S(1)
%layer_norm_all_gather = fxpar.all_gather[tp](%layer_norm) : f32[b, 2*s, 6] tp:S(1)→R
%linear = aten.linear.default(%layer_norm_all_gather, %head_weight) : f32[b, 2*s, 15] tp:S(2: 15 ~ 16) {role="column"}
%mul = operator.mul(%b, %s) : 2*b*s
%view = aten.view.default(%linear, [%mul, 15]) : f32[2*b*s, 15] tp:S(1: 15 ~ 16)
%mul_1 = operator.mul(%b, %s) : 2*b*s
%view_1 = aten.view.default(%labels, [%mul_1]) : i64[2*b*s] tp:R
%cross_entropy_loss = aten.cross_entropy_loss.default(%view, %view_1) : f32[] tp:I
return output=%cross_entropy_loss
"""  # noqa: E501


def test_golden() -> None:
    assert shown(until("coalesce")) == COALESCE


def test_a_full_bucket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 24 bytes each; a single one needs no bucket."""
    before = until("insert_collectives")
    monkeypatch.setitem(coalesce.run.__globals__, "BUCKET", 24)
    assert not [node for node in coalesce(before.copy()).graph.nodes if node.target is sum_gradients]
    monkeypatch.setitem(coalesce.run.__globals__, "BUCKET", 48)
    (bucket,) = (node for node in coalesce(before.copy()).graph.nodes if node.target is sum_gradients)
    assert [node.name for node in operands(bucket)] == ["norm_bias", "norm_weight"]


class Detached(nn.Module):
    """A weight on the residual stream that the loss does not differentiate, among norms that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(40, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale, self.norms = nn.Parameter(torch.ones(16)), nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """[b, s]."""
        x = self.words(ids)
        for norm in self.norms:
            x = x * (x * self.scale).detach() + self.down(self.up(norm(x)))
        return {"loss": x.square().mean()}


def test_a_weight_in_a_bucket_that_the_loss_does_not_reach_gets_no_gradient() -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, 40, (3, 8))
    proof = verify(Detached(), {"ids": ids}, Plan(tp=4, sequence_parallel=True))
    (bucket,) = (node for node in proof.program.graph.nodes if node.target is sum_gradients)
    assert "scale" in {node.name for node in operands(bucket)}
    assert proof.ok, proof.values


# k goes over tp, then over dp; v the other way round, as no compiled program has it beside k.
CHAINS = """fxpar 2
plan {"tp": 4, "dp": 2}
properties canonical collectives layouts
symbol b = x.0 / 2 like 3
%k = parameter["k"] : f32[8, 12] dp:I tp:S(0: 8 / 2; I)
%v = parameter["v"] : f32[8, 12] dp:I tp:S(0: 8 / 2; I)
%q = parameter["q"] : f32[8, 12] dp:I tp:S(0)
%x = input["x"] : f32[2*b, 12] dp:S(0) tp:R
%q_sum = fxpar.copy_to[dp](%q) : f32[8, 12] dp:I→R tp:S(0)
%y = aten.linear.default(%x, %q_sum) : f32[2*b, 8] dp:S(0) tp:S(1)
%k_copy_to_shared = fxpar.copy_to_shared[tp](%k) : f32[8, 12] dp:I tp:S(0: 8 / 2; I)→S(0: 8 / 2)
%k_sum = fxpar.copy_to[dp](%k_copy_to_shared) : f32[8, 12] dp:I→R tp:S(0: 8 / 2)
%keys = aten.linear.default(%x, %k_sum) : f32[2*b, 8] dp:S(0) tp:S(1: 8 / 2)
%own_keys = fxpar.split_shared[tp](%keys) : f32[2*b, 8] dp:S(0) tp:S(1: 8 / 2)→S(1)
FIRST
SECOND
%values = aten.linear.default(%x, %v_sum) : f32[2*b, 8] dp:S(0) tp:S(1: 8 / 2)
%own_values = fxpar.split_shared[tp](%values) : f32[2*b, 8] dp:S(0) tp:S(1: 8 / 2)→S(1)
return y=%y, k=%own_keys, v=%own_values
"""
ALIKE = (
    "%v_copy_to_shared = fxpar.copy_to_shared[tp](%v) : f32[8, 12] dp:I tp:S(0: 8 / 2; I)→S(0: 8 / 2)",
    "%v_sum = fxpar.copy_to[dp](%v_copy_to_shared) : f32[8, 12] dp:I→R tp:S(0: 8 / 2)",
)
OTHERWISE = (
    "%v_copy = fxpar.copy_to[dp](%v) : f32[8, 12] dp:I→R tp:S(0: 8 / 2; I)",
    "%v_sum = fxpar.copy_to_shared[tp](%v_copy) : f32[8, 12] dp:R tp:S(0: 8 / 2; I)→S(0: 8 / 2)",
)


def sums_of(lines: tuple[str, str]) -> list[str]:
    """What sums gradients, of a program whose v takes the axes as the lines say."""
    text = CHAINS.replace("FIRST", lines[0]).replace("SECOND", lines[1])
    program = PassManager([coalesce], STATIC).run(parse_program(text))
    found = [line.partition(" : ")[0] for line in print_program(program).splitlines()]
    return [line for line in found if "sum_gradients" in line or "copy_to_shared[" in line or "copy_to[" in line]


def test_buckets_of_one_axis_follow_those_of_another() -> None:
    """What follows no other sum waits for none: q is not in the bucket of k and v."""
    assert sums_of(ALIKE) == [
        "%tp_gradients = fxpar.sum_gradients[tp](%v, %k)",
        "%dp_gradients = fxpar.sum_gradients[dp](%v_copy_to_shared, %k_copy_to_shared)",
        "%q_sum = fxpar.copy_to[dp](%q)",
    ]


def test_of_parameters_that_take_the_axes_in_opposite_orders_the_first_sums_are_gathered() -> None:
    assert sums_of(OTHERWISE) == [
        "%dp_gradients = fxpar.sum_gradients[dp](%v, %q)",
        "%k_copy_to_shared = fxpar.copy_to_shared[tp](%k)",
        "%k_sum = fxpar.copy_to[dp](%k_copy_to_shared)",
        "%v_sum = fxpar.copy_to_shared[tp](%v_copy)",
    ]


def test_single_sums_stand_in_front_of_the_bucket_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """k and v fill a bucket of data ranks. Of tensor parallel ranks each has one alone, since a bias is between."""
    monkeypatch.setitem(coalesce.run.__globals__, "BUCKET", 2 * 8 * 12 * 4)
    between = "%n_sum = fxpar.copy_to[tp](%n) : f32[144] dp:I tp:I→R\n"
    text = CHAINS.replace("FIRST", between + ALIKE[0]).replace("SECOND", ALIKE[1])
    text = text.replace("%x = input", '%n = parameter["n"] : f32[144] dp:I tp:I\n%x = input')
    single = coalesce(parse_program(text))
    names = [node.name for node in single.graph.nodes if node.op != "placeholder"]
    assert names[:3] == ["k_copy_to_shared", "v_copy_to_shared", "dp_gradients"]
