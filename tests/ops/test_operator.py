"""An operator is its record: nothing but a record makes a new one known to text, checks, lowering and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxpar.cost import make_report
from fxpar.cost.communication import Collective, collectives
from fxpar.cost.flops import matmul_flops, split_flops, uncounted
from fxpar.cost.reasons import without_rule
from fxpar.errors import CheckFailed, LayoutError, TextError
from fxpar.ir.program import Program, TensorType, note, operands, tensor_type
from fxpar.ir.properties import Property
from fxpar.layout.layout import I, Placement
from fxpar.layout.symbolic_sizes import product
from fxpar.manager import PassManager
from fxpar.ops.lower import lower
from fxpar.ops.lowering_context import OnRank
from fxpar.ops.operator import CollectiveSite, Gradients, LoweredCall, Operator, Reverse, Sent
from fxpar.ops.process_group import Group, sum_over
from fxpar.ops.registry import OPERATORS
from fxpar.passes import counted_steps
from fxpar.passes.differentiate import differentiate
from fxpar.rules import key_of, rule_of
from fxpar.signatures.engine import Refusal, Rule, Signature
from fxpar.signatures.op_call import OpCall
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.simulate_ranks import run_ranks
from fxpar.verify.static import STATIC, verify_static


def _signature(call: OpCall, index: int, placement: Placement) -> Signature | Refusal:
    if placement.dim != len(call.operands[index].shape) - 1:
        return Refusal("what is summed is cut, and nothing else")
    cuts = [placement.at(len(kind.shape) - 1) for kind in call.operands]
    return Signature(tuple(cuts), (I,))


def _check(call: OpCall, placements: Sequence[Placement]) -> tuple[Placement, ...] | Refusal:
    if not placements[0].is_shard:
        return Refusal("what is summed must be cut")
    found = _signature(call, 0, placements[0])
    if isinstance(found, Refusal) or found.operands != tuple(placements):
        return Refusal("the operands are cut in different ways")
    return found.outputs


def _sum_of_products(x: Tensor, weight: Tensor, group: str, size: int) -> Tensor:
    return sum_over(torch.nn.functional.linear(x, weight), Group(group, size))


def _lower(node: fx.Node, rank: OnRank) -> LoweredCall:
    ranks = rank.ranks(node)
    return LoweredCall(_sum_of_products, (*node.args, ranks.group, ranks.size))


def _traffic(crossing: CollectiveSite) -> Iterator[Sent]:
    (kind,) = crossing.call.outputs
    yield Sent("all_reduce", "forward", product(kind.shape) * kind.dtype.itemsize)


def _derivative(reverse: Reverse) -> Gradients:
    """Of the weight: the gradient of the result, which all ranks have whole, times the rank's part of the input."""
    (gradient,), (x, weight) = reverse.tangents, operands(reverse.node)
    assert gradient is not None
    kind, like = tensor_type(gradient), note(reverse.node)
    turned = TensorType(kind.dtype, kind.shape[::-1])
    t = reverse.emit.call(torch.ops.aten.t.default, (gradient,), {}, turned, like)
    return None, reverse.emit.call(torch.ops.aten.mm.default, (t, x), {}, tensor_type(weight), like)


@partial(
    Operator,
    rule=Rule(seed=_signature, check=_check),
    lower=_lower,
    traffic=_traffic,
    derivative=_derivative,
    like=torch.ops.aten.linear.default,
    stage=Property.COLLECTIVES,
)
def row_linear(input: Any, weight: Any, *, axis: str) -> Any:
    """A product whose summed dimension is cut, reduced at once."""


TEXT = """\
fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 like 3
loss loss
%w = parameter["w"] : f32[6, 8] tp:S(1)
%x = input["x"] : f32[b, 8] tp:R
%part = fxpar.r_to_s[tp](%x) : f32[b, 8] tp:R→S(1)
%y = fxpar.row_linear[tp](%part, %w) : f32[b, 6] tp:I
%square = aten.square.default(%y) : f32[b, 6] tp:I
%loss = aten.sum.default(%square) : f32[] tp:I
return loss=%loss
"""


def parsed(text: str = TEXT) -> Program:
    return parse_program(text, operators={**OPERATORS, row_linear.__name__: row_linear})


def test_its_name_is_known_to_the_text_that_is_given_it() -> None:
    program = parsed()
    assert program.node("y").target is row_linear
    assert print_program(program) == TEXT
    assert print_program(program.copy()) == TEXT
    with pytest.raises(TextError, match=r"row_linear is unknown"):
        parse_program(TEXT)
    with pytest.raises(TextError, match="does not take these arguments"):
        parsed(TEXT.replace("(%part, %w)", "(%part)"))


def test_its_layouts_and_shapes_are_checked() -> None:
    assert key_of(row_linear) == "fxpar.row_linear"
    assert rule_of(row_linear) is row_linear.rule
    verify_static(parsed())
    with pytest.raises(LayoutError, match="what is summed must be cut"):
        verify_static(parsed(TEXT.replace("(%part, %w)", "(%x, %w)")))
    with pytest.raises(CheckFailed, match="the note says P, its operands give I"):
        verify_static(parsed(TEXT.replace("(%part, %w) : f32[b, 6] tp:I", "(%part, %w) : f32[b, 6] tp:P")))
    with pytest.raises(CheckFailed, match=r"gives \[3, 6\] of torch.float32 where the note"):
        verify_static(parsed(TEXT.replace("f32[b, 6]", "f32[b, 7]")))


def test_it_is_lowered_and_counted() -> None:
    program = parsed()
    weight, x = torch.randn(6, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    found = run_ranks(PassManager([differentiate], STATIC).run(program), {"w": weight}, {"x": x}, {"b": 3})
    leaf = weight.clone().requires_grad_()
    loss = torch.nn.functional.linear(x, leaf).square().sum()
    loss.backward()
    assert leaf.grad is not None
    for rank, own in enumerate(found):
        assert torch.allclose(own.outputs["loss"], loss)
        assert torch.allclose(own.gradients["w"], leaf.grad[:, 4 * rank : 4 * rank + 4])

    ((node, flops),) = matmul_flops(program)
    assert node.target is row_linear
    assert str(flops) == "96*b"
    assert split_flops(program) == 1.0
    assert uncounted(program) == {}
    assert without_rule(program) == []
    assert collectives(program) == [Collective("all_reduce", "tp", "forward", "y", 72, "24*b")]
    # The report compares what the records say with what a step sends.
    lowering = partial(lower, groups={"tp": Group("tp", 2)})
    report = make_report(program, counted_steps(program, lowering), name="by hand", device=torch.device("cpu"))
    assert [(sent.op, sent.bytes) for sent in report.collectives] == [("all_reduce", 72)]


def test_a_record_says_what_shapes_it_gives() -> None:
    with pytest.raises(ValueError, match=r"fxpar\.row_linear has neither"):
        Operator(row_linear.stub, lower=_lower)
    with pytest.raises(RuntimeError, match=r"fxpar\.row_linear is a graph operator without a process group"):
        row_linear(1, 2, axis="tp")
