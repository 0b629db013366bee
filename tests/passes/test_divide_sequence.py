"""divide_sequence: what sequence parallelism makes of the lengths of a lookup and a loss."""

from __future__ import annotations

import pytest
import torch

from fxpar.capture.capture import capture
from fxpar.compile import compile_program
from fxpar.errors import PassError, PlanError
from fxpar.passes import annotate, canonicalize
from fxpar.passes.divide_sequence import divide_sequence
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.passes.modules import shown
from tests.passes.words import Words, batch, captured, until

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
%mul = operator.mul(%b, %s) : 2*b*s
%view = aten.view.default(%linear, [%mul, 15]) : f32[2*b*s, 15]
%mul_1 = operator.mul(%b, %s) : 2*b*s
%view_1 = aten.view.default(%labels, [%mul_1]) : i64[2*b*s]
%cross_entropy_loss = aten.cross_entropy_loss.default(%view, %view_1) : f32[]
return output=%cross_entropy_loss
"""


def test_golden() -> None:
    assert shown(until("divide_sequence")) == DIVIDE_SEQUENCE


def test_the_header_says_that_a_size_is_shared_out() -> None:
    assert "symbol s = ids.1 / 2 like 2" in print_program(until("divide_sequence"))


def test_values_are_those_of_one_device() -> None:
    torch.manual_seed(1)
    expect(verify(Words().train(), batch(), Plan(tp=2, sequence_parallel=True)))


def test_without_sequence_parallelism_lengths_stay() -> None:
    program = captured(sequence=False)
    assert shown(divide_sequence(canonicalize(program.copy()))) == shown(canonicalize(program.copy()))


def test_lengths_that_the_ranks_cannot_share_out_are_refused() -> None:
    program = capture(Words().train(), batch(5), Plan(tp=2, sequence_parallel=True)).program
    with pytest.raises(PlanError, match=r"sequence_parallel: ids has 5 in dimension 1, which 2 ranks cannot share out"):
        compile_program(program)


def test_a_choice_over_lengths_that_nothing_divided_is_refused() -> None:
    with pytest.raises(PassError, match="no pass has divided the sequence"):
        compile_program(captured(), [canonicalize, annotate])
