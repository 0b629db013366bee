"""The backward of small programs, written out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpar.compile import compile_model, compile_step
from fxpar.errors import FxparError
from fxpar.manager import PassManager, has_same_dataflow
from fxpar.passes.differentiate import differentiate, forward_of
from fxpar.plan.plan import Plan
from fxpar.rewrite.forms import DerivativeCache
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC

HEADER = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 like 3
loss loss
"""
PAIR = (
    HEADER
    + """%up = parameter["up"] : f32[16, 8] tp:S(0)
%down = parameter["down"] : f32[8, 16] tp:S(1)
%bias = parameter["bias"] : f32[8] tp:I
%x = input["x"] : f32[b, 8] tp:R
%h = aten.linear.default(%x, %up) : f32[b, 16] tp:S(1)
%t = aten.tanh.default(%h) : f32[b, 16] tp:S(1)
%y = aten.linear.default(%t, %down) : f32[b, 8] tp:P
%y_sum = fxpar.reduce_from[tp](%y) : f32[b, 8] tp:P→I
%z = aten.add.Tensor(%y_sum, %bias) : f32[b, 8] tp:I
%loss = aten.sum.default(%z) : f32[] tp:I
return loss=%loss
"""
)
NORM = (
    HEADER
    + """%w = parameter["w"] : f32[8] tp:I
%up = parameter["up"] : f32[16, 8] tp:S(0)
%x = input["x"] : f32[b, 8] tp:R
%n = aten.layer_norm.default(%x, [8], %w) : f32[b, 8] tp:I
%n_copy = fxpar.copy_to[tp](%n) : f32[b, 8] tp:I→R
%h = aten.linear.default(%n_copy, %up) : f32[b, 16] tp:S(1)
%loss_part = aten.sum.default(%h) : f32[] tp:P
%loss = fxpar.reduce_from[tp](%loss_part) : f32[] tp:P→I
return loss=%loss
"""
)


GOLDEN_PAIR = """\
%loss_tangent = input["fxpar.tangent.loss"] : f32[] tp:R {phase=backward}
%sym_size_int = aten.sym_size.int(%x, 0) : b {phase=backward}
%expand = aten.expand.default(%loss_tangent, [%sym_size_int, 8]) : f32[b, 8] tp:R {phase=backward}
%sum_1 = aten.sum.dim_IntList(%expand, [0], True) : f32[1, 8] tp:R {phase=backward}
%view = aten.view.default(%sum_1, [8]) : f32[8] tp:R {phase=backward}
%t_1 = aten.t.default(%expand) : f32[8, b] tp:R {phase=backward}
%mm = aten.mm.default(%t_1, %t) : f32[8, 16] tp:S(1) {phase=backward}
%mm_1 = aten.mm.default(%expand, %down) : f32[b, 16] tp:S(1) {phase=backward}
%tanh_backward = aten.tanh_backward.default(%mm_1, %t) : f32[b, 16] tp:S(1) {phase=backward}
%t_4 = aten.t.default(%tanh_backward) : f32[16, b] tp:S(0) {phase=backward}
%mm_2 = aten.mm.default(%t_4, %x) : f32[16, 8] tp:S(0) {phase=backward}
return loss=%loss, fxpar.gradient.up=%mm_2, fxpar.gradient.down=%mm, fxpar.gradient.bias=%view
"""
GOLDEN_NORM = """\
%loss_tangent = input["fxpar.tangent.loss"] : f32[] tp:R {phase=backward}
%native_layer_norm = aten.native_layer_norm.default(%x, [8], %w, None, 1e-05) : (f32[b, 8] tp:I; f32[b, 1] tp:I; f32[b, 1] tp:I)
%n = operator.getitem(%native_layer_norm, 0) : f32[b, 8] tp:I
%getitem_1 = operator.getitem(%native_layer_norm, 1) : f32[b, 1] tp:I
%getitem_2 = operator.getitem(%native_layer_norm, 2) : f32[b, 1] tp:I
%sym_size_int = aten.sym_size.int(%x, 0) : b {phase=backward}
%expand = aten.expand.default(%loss_tangent, [%sym_size_int, 16]) : f32[b, 16] tp:R {phase=backward}
%r_to_s = fxpar.r_to_s[tp](%expand) : f32[b, 16] tp:R→S(1) {phase=backward}
%t = aten.t.default(%r_to_s) : f32[16, b] tp:S(0) {phase=backward}
%mm = aten.mm.default(%t, %n_copy) : f32[16, 8] tp:S(0) {phase=backward}
%mm_1 = aten.mm.default(%r_to_s, %up) : f32[b, 8] tp:P {phase=backward}
%mm_1_all_reduce = fxpar.all_reduce[tp](%mm_1) : f32[b, 8] tp:P→R {phase=backward}
%native_layer_norm_backward = aten.native_layer_norm_backward.default(%mm_1_all_reduce, %x, [8], %getitem_1, %getitem_2, %w, None, [False, True, False]) : (f32[0] tp:R; f32[8] tp:R; f32[0] tp:R) {phase=backward}
%getitem_3 = operator.getitem(%native_layer_norm_backward, 1) : f32[8] tp:R {phase=backward}
return loss=%loss, fxpar.gradient.w=%getitem_3, fxpar.gradient.up=%mm
"""  # noqa: E501


def differentiated(text: str) -> list[str]:
    """The lines of the step that the forward's text does not have."""
    step = print_program(PassManager([differentiate], STATIC).run(parse_program(text)))
    return [line for line in step.splitlines() if line not in text.splitlines()]


def test_each_rank_has_its_blocks_of_the_gradients() -> None:
    """No collective: the sum's conjugate is the identity, and the input needs no gradient."""
    assert differentiated(PAIR) == [
        "properties canonical collectives layouts local rng step vocabulary",
        *GOLDEN_PAIR.splitlines(),
    ]


def test_what_the_backward_reads_is_saved_and_a_sum_meets_its_conjugate() -> None:
    """The norm gives its statistics too; the gradient behind f is summed over the ranks."""
    assert differentiated(NORM) == [
        "properties canonical collectives layouts local rng step vocabulary",
        *GOLDEN_NORM.splitlines(),
    ]


def test_the_forward_of_a_step_differentiates_to_that_step() -> None:
    for text in (PAIR, NORM):
        step = PassManager([differentiate], STATIC).run(parse_program(text))
        again = PassManager([differentiate], STATIC).run(forward_of(step))
        assert has_same_dataflow(again, step)


def test_an_input_may_carry_a_gradient() -> None:
    text = PAIR.replace('input["x"] : f32[b, 8] tp:R', 'input["x"](gradient) : f32[b, 8] tp:R').replace(
        "f32[b, 8] tp:I", "f32[b, 8] tp:I"
    )
    step = PassManager([differentiate]).run(parse_program(text))
    assert "fxpar.input_gradient.x" in step.outputs
    assert 'input["x"](gradient)' in print_program(parse_program(print_program(step)))


def test_what_cannot_be_differentiated_is_named() -> None:
    text = PAIR.replace("aten.tanh.default(%h)", "aten.igamma.default(%h, %h)")
    with pytest.raises(FxparError, match="%t"):
        differentiated(text)


class NormOfInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).square().mean()  # type: ignore[no-any-return]


def test_a_norm_of_an_input_has_a_step_over_data_ranks() -> None:
    """The gradient of the input, which nobody asks for, has no elements, and so no rows to share out."""
    torch.manual_seed(0)
    program = compile_model(NormOfInput(), (torch.randn(4, 6),), Plan(dp=2)).program
    step = compile_step(program, program.outputs, (program.loss,), [p.fqn for p in program.parameters])
    assert "f32[0] dp:P" in print_program(step)


# Derivatives that are emitted as those of equal calls are what the rules give for each.


_LAYER = """%a{i} = aten.linear.default(%x{i}, %up{i}) : f32[b, 16] tp:S(1)
%t{i} = aten.tanh.default(%a{i}) : f32[b, 16] tp:S(1)
%v{i} = aten.view.default(%t{i}, [%b, 2, 4]) : f32[b, 4, 4] tp:S(1)
%e{i} = aten.exp.default(%v{i}) : f32[b, 4, 4] tp:S(1)
%w{i} = aten.view.default(%e{i}, [%b, 8]) : f32[b, 16] tp:S(1)
%y{i} = aten.linear.default(%w{i}, %down{i}) : f32[b, 8] tp:P
%r{i} = fxpar.reduce_from[tp](%y{i}) : f32[b, 8] tp:P→I
%z{i} = aten.add.Tensor(%x{i}, %r{i}) : f32[b, 8] tp:I
%x{j} = {end}
"""


def _stack(ends: Mapping[int, str], frozen: Collection[str] = ()) -> str:
    """Layers, the ends of which may be other ones, and some parameters of which are not trained."""
    lines = ["fxpar 2", 'plan {"tp": 2}', "properties canonical collectives layouts local rng vocabulary"]
    lines += ["symbol b = x.0 like 3", "loss loss"]
    for i in range(3):
        up, down = ("(frozen)" if f"{name}{i}" in frozen else "" for name in ("up", "down"))
        lines.append(f'%up{i} = parameter["up{i}"]{up} : f32[16, 8] tp:S(0)')
        lines.append(f'%down{i} = parameter["down{i}"]{down} : f32[8, 16] tp:S(1)')
    lines += ['%x = input["x"] : f32[b, 8] tp:I', "%b = aten.sym_size.int(%x, 0) : b"]
    lines.append("%x0 = aten.neg.default(%x) : f32[b, 8] tp:I")
    for i in range(3):
        layer = _LAYER.format(i=i, j=i + 1, end=ends.get(i, "aten.relu.default(%z{i}) : f32[b, 8] tp:I").format(i=i))
        copied = f"%c{i} = fxpar.copy_to[tp](%x{i}) : f32[b, 8] tp:I→R\n"
        lines += (copied + layer.replace(f"linear.default(%x{i}", f"linear.default(%c{i}")).splitlines()
    lines += ["%loss = aten.sum.default(%x3) : f32[] tp:I", "return loss=%loss", ""]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "ends",
    [
        {},
        {1: "aten.mul.Tensor(%z{i}, 2.0) : f32[b, 8] tp:I"},
        {1: "aten.mul.Tensor(%z{i}, %z{i}) : f32[b, 8] tp:I", 2: "aten.mul.Tensor(%z{i}, %r{i}) : f32[b, 8] tp:I"},
        {0: "aten.mul.Scalar(%z{i}, 2) : f32[b, 8] tp:I", 1: "aten.mul.Scalar(%z{i}, 3) : f32[b, 8] tp:I"},
    ],
)
def test_what_is_repeated_is_what_is_emitted(ends: Mapping[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(_stack(ends), monkeypatch)


# The last layer is differentiated first: others would repeat a gradient that is not wanted, or lack one that is.
@pytest.mark.parametrize("frozen", [["down2"], ["up2"], ["up1", "down1"], ["up0", "down0", "up2"], ["down0", "down1"]])
def test_layers_some_of_whose_parameters_are_frozen(frozen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = _stack({}, frozen)
    _compare(text, monkeypatch)
    outputs = set(differentiate(parse_program(text)).outputs)
    weights = {f"{name}{i}" for name in ("up", "down") for i in range(3)}
    assert outputs == {"loss", *(f"fxpar.gradient.{name}" for name in weights.difference(frozen))}


def _compare(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differentiates a program with repeated derivatives and without, and compares the texts."""
    again, repeated = DerivativeCache.again, list[bool]()

    def counted(self: DerivativeCache, *given: Any) -> dict[fx.Node, fx.Node] | None:
        found = again(self, *given)
        repeated.append(found is not None)
        return found

    monkeypatch.setattr(DerivativeCache, "again", counted)
    found = print_program(differentiate(parse_program(text)))
    monkeypatch.setattr(DerivativeCache, "again", lambda *given: None)
    assert found == print_program(differentiate(parse_program(text)))
    assert sum(repeated) >= len(repeated) // 3
