"""coalesce: gradients of many parameters are summed at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.ops.coercions import sum_gradients
from fxpar.passes.coalesce import coalesce
from fxpar.plan.plan import Plan
from fxpar.program.program import operands
from fxpar.verification import verify
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
%mul_16 = operator.mul(%b, %s) : 2*b*s
%view = aten.view.default(%linear, [%mul_16, 15]) : f32[2*b*s, 15] tp:S(1: 15 ~ 16)
%mul_25 = operator.mul(%b, %s) : 2*b*s
%view_1 = aten.view.default(%labels, [%mul_25]) : i64[2*b*s] tp:R
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
