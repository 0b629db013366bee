"""vocab_parallel: operations over a vocabulary that is cut become their composites."""

from __future__ import annotations

from tests.passes.modules import shown
from tests.passes.words import until

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
%mul = operator.mul(%b, %s) : 2*b*s
%view = aten.view.default(%linear, [%mul, 15]) : f32[2*b*s, 15] tp:S(1: 15 ~ 16)
%mul_1 = operator.mul(%b, %s) : 2*b*s
%view_1 = aten.view.default(%labels, [%mul_1]) : i64[2*b*s] tp:R
%cross_entropy_loss = fxpar.cross_entropy[tp](%view, %view_1) : f32[] tp:I {role="vocab"}
return output=%cross_entropy_loss
"""  # noqa: E501


def test_golden() -> None:
    assert shown(until("vocab_parallel")) == VOCAB_PARALLEL
