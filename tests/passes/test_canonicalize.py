"""canonicalize: one spelling for each thing, the same values, and refusals."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import PassError
from fxpar.ir.program import Program, note
from fxpar.passes import canonicalize
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.verify.values import check_capture
from tests.passes.modules import MLP, build, changed, only, shown

aten = torch.ops.aten

CAPTURED = """\
%norm_weight = parameter["norm.weight"] : f32[96]
%norm_bias = parameter["norm.bias"] : f32[96]
%up_weight = parameter["up.weight"] : f32[160, 96]
%up_bias = parameter["up.bias"] : f32[160]
%down_weight = parameter["down.weight"] : f32[96, 160]
%down_bias = parameter["down.bias"] : f32[96]
%x = input["x"] : f32[b, s, 96]
%layer_norm = aten.layer_norm.default(%x, [96], %norm_weight, %norm_bias, 1e-05, False) : f32[b, s, 96]
%linear = aten.linear.default(%layer_norm, %up_weight, %up_bias) : f32[b, s, 160]
%gelu = aten.gelu.default(%linear) : f32[b, s, 160]
%linear_1 = aten.linear.default(%gelu, %down_weight, %down_bias) : f32[b, s, 96]
%native_dropout = aten.native_dropout.default(%linear_1, 0.1, True) : (f32[b, s, 96]; bool[b, s, 96]) {random=325815778}
%getitem = operator.getitem(%native_dropout, 0) : f32[b, s, 96]
%square = aten.square.default(%getitem) : f32[b, s, 96]
%sum_1 = aten.sum.default(%square) : f32[]
return output=%sum_1
"""

CANONICAL = """\
… 8
- %native_dropout = aten.native_dropout.default(%linear_1, 0.1, True) : (f32[b, s, 96]; bool[b, s, 96]) {random=325815778}
- %getitem = operator.getitem(%native_dropout, 0) : f32[b, s, 96]
%linear = aten.linear.default(%layer_norm, %up_weight) : f32[b, s, 160]
%linear_bias = aten.add.Tensor(%linear, %up_bias) : f32[b, s, 160] {role="bias"}
%gelu = aten.gelu.default(%linear_bias) : f32[b, s, 160]
%linear_1 = aten.linear.default(%gelu, %down_weight) : f32[b, s, 96]
%linear_1_bias = aten.add.Tensor(%linear_1, %down_bias) : f32[b, s, 96] {role="bias"}
%dropout = aten.dropout.default(%linear_1_bias, 0.1, True) : f32[b, s, 96] {random=325815778}
%square = aten.square.default(%dropout) : f32[b, s, 96]
… 2
"""  # noqa: E501


def test_golden_mlp() -> None:
    _, captured = build(MLP)
    assert shown(captured.program) == CAPTURED
    assert changed(captured.program, only(captured.program, canonicalize)) == CANONICAL


def test_twice_is_once() -> None:
    once = only(build(MLP)[1].program, canonicalize)
    assert shown(only(once, canonicalize)) == shown(once)


def program(*lines: str, result: str = "out") -> Program:
    """A program over `x: f32[b, 6]` and `w: f32[4, 6]`."""
    head = ["fxpar 2", "plan {}", "properties", "symbol b = x.0 like 3"]
    given = ['%w = parameter["w"] : f32[4, 6]', '%v = parameter["v"] : f32[4]', '%x = input["x"] : f32[b, 6]']
    return parse_program("\n".join([*head, *given, *lines, f"return out=%{result}", ""]))


def operations(result: Program) -> list[str]:
    """The lines of the operations, without types."""
    return [line.split(" : ")[0] for line in shown(result).splitlines() if "(" in line and '["' not in line]


def test_linear_with_a_bias_becomes_a_product_and_an_addition() -> None:
    result = only(program("%out = aten.linear.default(%x, %w, %v) : f32[b, 4]"), canonicalize)
    assert operations(result) == ["%out = aten.linear.default(%x, %w)", "%out_bias = aten.add.Tensor(%out, %v)"]
    assert note(result.node("out_bias")).role == "bias"


def test_addmm_becomes_a_product_and_an_addition() -> None:
    lines = ["%t = aten.permute.default(%w, [1, 0]) : f32[6, 4]", "%out = aten.addmm.default(%v, %x, %t) : f32[b, 4]"]
    assert operations(only(program(*lines), canonicalize))[1:] == [
        "%out = aten.mm.default(%x, %t)",
        "%out_bias = aten.add.Tensor(%out, %v)",
    ]


def test_a_convolution_with_a_bias_becomes_a_product_and_an_addition() -> None:
    lines = [
        "%t = aten.unsqueeze.default(%x, 2) : f32[b, 6, 1]",
        "%k = aten.unsqueeze.default(%w, 2) : f32[4, 6, 1]",
        "%out = aten.conv1d.default(%t, %k, %v, [1], [0]) : f32[b, 4, 1]",
    ]
    result = only(program(*lines), canonicalize)
    assert operations(result)[2:] == [
        "%view_default = aten.view.default(%v, [4, 1])",
        "%out = aten.conv1d.default(%t, %k, None, [1], [0])",
        "%out_bias = aten.add.Tensor(%out, %view_default)",
    ]
    assert shown(only(result, canonicalize)) == shown(result)


def test_addmm_with_factors_stays() -> None:
    """The rules know it; separating it would need two products more."""
    lines = [
        "%t = aten.permute.default(%w, [1, 0]) : f32[6, 4]",
        "%out = aten.addmm.default(%v, %x, %t, beta=0.5, alpha=2) : f32[b, 4]",
    ]
    assert "aten.addmm.default(%v, %x, %t, beta=0.5, alpha=2)" in shown(only(program(*lines), canonicalize))


def test_a_bias_of_none_is_no_bias() -> None:
    result = only(program("%out = aten.linear.default(%x, %w, None) : f32[b, 4]"), canonicalize)
    assert len(operations(result)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "aten.alias.default(%x)",
        "aten.lift_fresh_copy.default(%x)",
        "aten.slice.Tensor(%x, 1, 0, 9223372036854775807)",
        "aten.slice.Tensor(%x, 1)",
        "aten._to_copy.default(%x, dtype=dtype.f32)",
        "aten._to_copy.default(%x, device=device.cpu)",
        "aten.type_as.default(%x, %w)",
        "aten.add.Tensor(%x, 0)",
        "aten.sub.Tensor(%x, 0)",
        "aten.dropout.default(%x, 0.0, True)",
        "aten.dropout.default(%x, 0.5, False)",
    ],
)
def test_operations_that_return_their_operand_go(line: str) -> None:
    result = only(program(f"%same = {line} : f32[b, 6]", "%out = aten.neg.default(%same) : f32[b, 6]"), canonicalize)
    assert operations(result) == ["%out = aten.neg.default(%x)"]


@pytest.mark.parametrize(
    "line",
    [
        "aten.slice.Tensor(%x, 1, 0, 4) : f32[b, 4]",
        "aten.slice.Tensor(%x, 1, 0, 9223372036854775807, 2) : f32[b, 3]",
        "aten._to_copy.default(%x, dtype=dtype.f64) : f64[b, 6]",
        "aten.add.Tensor(%x, 1) : f32[b, 6]",
        "aten.dropout.default(%x, 0.5, True) : f32[b, 6] {random=17}",
    ],
)
def test_operations_that_change_something_stay(line: str) -> None:
    result = only(program(f"%out = {line}"), canonicalize)
    assert shown(result).splitlines()[-2] == f"%out = {line}"


def test_a_cast_to_the_type_of_another_value_names_the_type() -> None:
    lines = [
        "%d = aten._to_copy.default(%x, dtype=dtype.f64) : f64[b, 6]",
        "%out = aten.type_as.default(%x, %d) : f64[b, 6]",
    ]
    assert operations(only(program(*lines), canonicalize)) == ["%out = aten._to_copy.default(%x, dtype=dtype.f64)"]


def test_dead_code_goes_and_so_does_what_only_it_used() -> None:
    lines = ["%a = aten.neg.default(%x) : f32[b, 6]", "%b = aten.exp.default(%a) : f32[b, 6]"]
    lines += ["%out = aten.relu.default(%x) : f32[b, 6]"]
    assert operations(only(program(*lines), canonicalize)) == ["%out = aten.relu.default(%x)"]


def test_unsafe_views_are_views_and_known_sizes_are_numbers() -> None:
    lines = [
        "%n = aten.sym_size.int(%x, 0) : b",
        "%flat = aten._unsafe_view.default(%x, [-1]) : f32[6*b]",
        "%out = aten.view.default(%flat, [%n, -1]) : f32[b, 6]",
    ]
    assert operations(only(program(*lines), canonicalize)) == [
        "%b = aten.sym_size.int(%x, 0)",
        "%flat = aten.view.default(%x, [-1])",
        "%out = aten.view.default(%flat, [%b, 6])",
    ]


def test_a_number_of_elements_is_a_product_of_sizes() -> None:
    lines = ["%n = aten.sym_numel.default(%x) : 6*b", "%out = aten.div.Tensor(%x, %n) : f32[b, 6]"]
    assert operations(only(program(*lines), canonicalize)) == [
        "%b = aten.sym_size.int(%x, 0)",
        "%mul = operator.mul(%b, 6)",
        "%out = aten.div.Tensor(%x, %mul)",
    ]


def test_one_node_for_each_symbol_named_like_it() -> None:
    lines = [
        "%n = aten.sym_size.int(%x, 0) : b",
        "%m = aten.sym_size.int(%x, 0) : b",
        "%out = aten.expand.default(%v, [%n, %m, 4]) : f32[b, b, 4]",
    ]
    assert operations(only(program(*lines), canonicalize)) == [
        "%b = aten.sym_size.int(%x, 0)",
        "%out = aten.expand.default(%v, [%b, %b, 4])",
    ]


def test_devices_go() -> None:
    result = only(program("%out = aten.arange.default(4, device=device.cpu, pin_memory=False) : i64[4]"), canonicalize)
    assert operations(result) == ["%out = aten.arange.default(4)"]


def test_asserts_go() -> None:
    lines = [
        "%check = aten._assert_tensor_metadata.default(%x, None, None, dtype.f32)",
        "%out = aten.neg.default(%x) : f32[b, 6]",
    ]
    assert operations(only(program(*lines), canonicalize)) == ["%out = aten.neg.default(%x)"]


def test_native_dropout_becomes_dropout_and_keeps_its_identity() -> None:
    lines = [
        "%pair = aten.native_dropout.default(%x, 0.25, True) : (f32[b, 6]; bool[b, 6]) {random=17}",
        "%out = operator.getitem(%pair, 0) : f32[b, 6]",
    ]
    result = only(program(*lines, result="out"), canonicalize)
    assert shown(result).splitlines()[-2] == "%dropout = aten.dropout.default(%x, 0.25, True) : f32[b, 6] {random=17}"


@pytest.mark.parametrize("options", ["0.0, True", "0.25, False"])
def test_native_dropout_that_drops_nothing_goes(options: str) -> None:
    lines = [
        f"%pair = aten.native_dropout.default(%x, {options}) : (f32[b, 6]; bool[b, 6])",
        "%same = operator.getitem(%pair, 0) : f32[b, 6]",
        "%out = aten.neg.default(%same) : f32[b, 6]",
    ]
    assert operations(only(program(*lines), canonicalize)) == ["%out = aten.neg.default(%x)"]


def test_a_dropout_whose_mask_is_used_is_refused() -> None:
    lines = [
        "%pair = aten.native_dropout.default(%x, 0.25, True) : (f32[b, 6]; bool[b, 6]) {random=17}",
        "%out = operator.getitem(%pair, 1) : bool[b, 6]",
    ]
    with pytest.raises(PassError, match=r"%pair: the mask of a dropout is used; use functional\.dropout"):
        only(program(*lines), canonicalize)


def test_a_sub_graph_is_refused() -> None:
    found = program("%out = aten.neg.default(%x) : f32[b, 6]")
    inner = fx.Graph()
    inner.output(inner.placeholder("a"))
    found.graph_module.register_module("inner", fx.GraphModule(nn.Module(), inner))
    with found.graph.inserting_before(found.node("out")):
        found.graph.create_node("get_attr", "inner", name="inner")
    with pytest.raises(PassError, match="%inner: the graph has a sub-graph; inline it before"):
        canonicalize(found)


class Mixed(nn.Module):
    """Two dropouts, a cast and a slice of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(self.fc(x), 0.5)
        return (functional.dropout(y.to(torch.float64), 0.5) + y[:, :])[:, :3].sum()


@pytest.mark.parametrize("make", [Mixed, MLP])
def test_values_gradients_and_random_nodes_stay(make: Callable[[], nn.Module]) -> None:
    """`check_capture` compares the module with its canonical graph too, under one seed."""
    torch.manual_seed(1)
    module = make().train()
    batch = {"x": torch.randn(3, 5, 96) if make is MLP else torch.randn(3, 6)}
    captured = capture(module, batch, Plan())
    check_capture(captured, module, batch)
    before = [note(n).random for n in captured.program.graph.nodes if n.op != "output" and note(n).random]
    after = only(captured.program, canonicalize)
    assert [note(n).random for n in after.graph.nodes if n.op != "output" and note(n).random] == before
    assert len(set(before)) == len(before) > 0
