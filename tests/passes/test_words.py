"""divide_sequence, coalesce, vocab_parallel: what vocabulary and sequence parallelism make of a lookup and a loss."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture import capture
from fxpar.errors import PassError, PlanError
from fxpar.manager import PassManager
from fxpar.ops.coercions import sum_gradients
from fxpar.passes import DEFAULT_PASSES, annotate, canonicalize
from fxpar.passes.coalesce import coalesce
from fxpar.passes.divide_sequence import divide_sequence
from fxpar.plan.plan import Plan
from fxpar.program.program import Program, operands
from fxpar.text.printing import print_program
from fxpar.verify.check import verify
from fxpar.verify.static import STATIC
from tests.passes.modules import shown


class Words(nn.Module):
    """A vocabulary of 15 words, looked up and predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(15, 6), nn.LayerNorm(6)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(6, 15, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """[b, s] twice."""
        logits: Tensor = self.head(self.norm(self.drop(self.words(ids))))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


DIVIDE_SEQUENCE = """\
%words_weight = parameter["words.weight"] : f32[15, 6]
%norm_weight = parameter["norm.weight"] : f32[6]
%norm_bias = parameter["norm.bias"] : f32[6]
%head_weight = parameter["head.weight"] : f32[15, 6]
%ids = input["ids"] : i64[b, 2*s]
%labels = input["labels"] : i64[b, 2*s]
%b = aten.sym_size.int(%ids, 0) : b
%s = aten.sym_size.int(%ids, 1) : 2*s
%embedding = aten.embedding.default(%words_weight, %ids) : f32[b, 2*s, 6]
%dropout = aten.dropout.default(%embedding, 0.1, True) : f32[b, 2*s, 6] {random=325815778}
%layer_norm = aten.layer_norm.default(%dropout, [6], %norm_weight, %norm_bias, 1e-05, False) : f32[b, 2*s, 6]
%linear = aten.linear.default(%layer_norm, %head_weight) : f32[b, 2*s, 15]
%mul_16 = operator.mul(%b, %s) : 2*b*s
%view = aten.view.default(%linear, [%mul_16, 15]) : f32[2*b*s, 15]
%mul_25 = operator.mul(%b, %s) : 2*b*s
%view_1 = aten.view.default(%labels, [%mul_25]) : i64[2*b*s]
%cross_entropy_loss = aten.cross_entropy_loss.default(%view, %view_1) : f32[]
return output=%cross_entropy_loss
"""

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

VOCAB_PARALLEL = """\
%words_weight = parameter["words.weight"] : f32[15, 6] tp:S(0: 15 ~ 16)
%norm_weight = parameter["norm.weight"] : f32[6] tp:I
%norm_bias = parameter["norm.bias"] : f32[6] tp:I
%head_weight = parameter["head.weight"] : f32[15, 6] tp:S(0: 15 ~ 16) {role="column"}
%ids = input["ids"] : i64[b, 2*s] tp:R
%labels = input["labels"] : i64[b, 2*s] tp:R
%tp_gradients = fxpar.sum_gradients[tp](%norm_bias, %norm_weight) : (f32[6] tp:R; f32[6] tp:R)
%b = aten.sym_size.int(%ids, 0) : b
%s = aten.sym_size.int(%ids, 1) : 2*s
%embedding = fxpar.embedding[tp](%words_weight, %ids) : f32[b, 2*s, 6] tp:P {role="vocab"}
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
%cross_entropy_loss = fxpar.cross_entropy[tp](%view, %view_1) : f32[] tp:I {role="vocab"}
return output=%cross_entropy_loss
"""  # noqa: E501


def batch(length: int = 4) -> dict[str, Tensor]:
    """Three samples."""
    ids = torch.randint(0, 15, (3, length), generator=torch.Generator().manual_seed(2))
    return {"ids": ids, "labels": ids.clone()}


@cache
def captured(tp: int = 2, sequence: bool = True) -> Program:
    return capture(Words().train(), batch(), Plan(tp=tp, sequence_parallel=sequence)).program


def until(name: str) -> Program:
    return PassManager(DEFAULT_PASSES, STATIC).run(captured(), until=name)


@pytest.mark.parametrize(
    ("name", "golden"),
    [("divide_sequence", DIVIDE_SEQUENCE), ("coalesce", COALESCE), ("vocab_parallel", VOCAB_PARALLEL)],
)
def test_golden(name: str, golden: str) -> None:
    assert shown(until(name)) == golden


def test_the_header_says_that_a_size_is_shared_out() -> None:
    assert "symbol s = ids.1 / 2 like 2" in print_program(until("divide_sequence"))


def test_values_are_those_of_one_device() -> None:
    torch.manual_seed(1)
    proof = verify(Words().train(), batch(), Plan(tp=2, sequence_parallel=True))
    assert proof.ok, proof.values


def test_without_sequence_parallelism_lengths_stay() -> None:
    program = captured(sequence=False)
    assert shown(divide_sequence(canonicalize(program.copy()))) == shown(canonicalize(program.copy()))


def test_lengths_that_the_ranks_cannot_share_out_are_refused() -> None:
    program = capture(Words().train(), batch(5), Plan(tp=2, sequence_parallel=True)).program
    with pytest.raises(PlanError, match=r"sequence_parallel: ids has 5 in dimension 1, which 2 ranks cannot share out"):
        PassManager(DEFAULT_PASSES, STATIC).run(program)


def test_a_choice_over_lengths_that_nothing_divided_is_refused() -> None:
    with pytest.raises(PassError, match="no pass has divided the sequence"):
        PassManager([canonicalize, annotate], STATIC).run(captured())


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
