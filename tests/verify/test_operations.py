"""What an operation is given besides tensors: sizes, memory, numbers, words. Faults have node, reason and remedy."""

from __future__ import annotations

import re

import pytest
import torch

from fxpar.errors import FxparError
from fxpar.text.parsing import parse_program
from fxpar.verify.static import verify_static
from tests.verify.cases import sequence_text


def refused(*changes: tuple[str, str]) -> str:
    """What is said of the sequence-parallel program with lines changed; none of it may take long."""
    text = sequence_text(2)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    with pytest.raises(FxparError) as error:
        verify_static(parse_program(text))
    assert error.value.remedy
    return str(error.value)


def behind(line: str, *new: str) -> tuple[str, str]:
    """Lines behind the one that starts so."""
    found = next(full for full in sequence_text(2).splitlines() if full.startswith(line))
    return found, "\n".join([found, *new])


GELU = "%gelu = aten.gelu.default(%up_sum)"

# A number read off %up_sum (40 features over two ranks) or %norm (16 positions over two ranks), and its claim.
SIZES = (
    ("%n = aten.sym_size.int(%up_sum, 2) : 20", "aten.mul.Tensor(%up_sum, %n)"),
    ("%n = aten.sym_size.int(%up_sum, 2) : 40", "aten.mul.Tensor(%up_sum, %n)"),
    ("%n = aten.sym_size.int(%up_sum, -1) : 20", "aten.div.Tensor(%up_sum, %n)"),
    ("%n = aten.sym_size.int(%up_sum, 2) : 20", "aten.view.default(%up_sum, [%b, 16, %n])"),
    ("%n = aten.sym_size.int(%norm, 1) : 8", "aten.mul.Tensor(%up_sum, %n)"),
    ("%n = aten.sym_numel.default(%up_sum) : 320*b", "aten.mul.Tensor(%up_sum, %n)"),
    ("%n = aten.sym_stride.int(%up_sum, 1) : 20", "aten.mul.Tensor(%up_sum, %n)"),
    ("%n = aten.sym_size.int(%down, 3) : 24", "aten.mul.Tensor(%up_sum, %n)"),
)


@pytest.mark.parametrize(("read", "used"), SIZES)
def test_a_number_that_ranks_read_otherwise_than_one_device_is_refused(read: str, used: str) -> None:
    source = "%down" if "%down," in read else "%norm" if "%norm," in read else "%up_sum"
    size = "%b = aten.sym_size.int(%x, 0) : b"
    place = "%drop = " if source != "%down" else "%down_part = "
    text = sequence_text(2).replace("%drop = ", f"{size}\n%drop = ") if source != "%down" else sequence_text(2)
    line = next(full for full in text.splitlines() if full.startswith(place))
    text = text.replace(line, f"{read}\n%m = {used} : f32[b, 16, 40] tp:S(2)\n{line}")
    with pytest.raises(FxparError, match=r"%n: (on axis tp: reads a number|reads the size)"):
        verify_static(parse_program(text))


def test_a_size_that_no_axis_cuts_is_a_number_as_any() -> None:
    read = ("%b = aten.sym_size.int(%up_sum, 0) : b", "%n = operator.floordiv(%b, 1) : b")
    line = behind("%up_sum", *read, "%m = aten.mul.Tensor(%up_sum, %n) : f32[b, 16, 40] tp:S(2)")
    verify_static(parse_program(sequence_text(2).replace(*line).replace("default(%up_sum)", "default(%m)")))


IN_PLACE = (
    "aten.zero_.default(%up_sum)",
    "aten.mul_.Tensor(%up_sum, 2.0)",
    "aten.copy_.default(%up_sum, %up)",
    "aten.add.out(%up_sum, %up, out=%up_sum)",
    "aten.relu_.default(%up_sum)",
    "aten.masked_fill_.Scalar(%up_sum, %up_sum, 0)",
    "aten.set_.default(%up_sum)",
    "aten.native_batch_norm.default(%up_sum, None, None, %norm_weight, %norm_bias, True, 0.1, 1e-05)",
)


@pytest.mark.parametrize("call", IN_PLACE)
@pytest.mark.parametrize("how", ["typed", "untyped", "used"])
def test_operations_in_place_are_refused(call: str, how: str) -> None:
    kind = "" if how == "untyped" else " : f32[b, 16, 40] tp:S(2)"
    lines = [behind("%up_sum", f"%w = {call}{kind}")]
    if how == "used" and "batch_norm" not in call:
        lines.append((GELU, "%gelu = aten.gelu.default(%w)"))
    message = refused(*lines)
    assert "%w: aten." in message
    assert "writes to its" in message


MEMORY = (
    "aten.empty_like.default(%up_sum)",
    "aten.new_empty.default(%up_sum, [3, 16, 40])",
    "aten.empty.memory_format([3, 16, 40])",
    "aten.empty_strided.default([3, 16, 40], [640, 40, 1])",
    "aten.new_empty_strided.default(%up_sum, [3, 16, 40], [640, 40, 1])",
    "aten.empty_permuted.default([3, 16, 40], [0, 1, 2])",
)


@pytest.mark.parametrize("call", MEMORY)
def test_memory_that_nothing_has_written_is_no_value(call: str) -> None:
    message = refused(behind("%up_sum", f"%w = {call} : f32[3, 16, 40] tp:R"))
    assert re.search(r"%w: aten\..* holds what is in memory by chance; make it of zeros", message)


NOT_DENSE = (
    "aten._nested_tensor_from_tensor_list.default([%up_sum, %up_sum], None)",
    "aten._to_sparse.default(%up_sum)",
    "aten.to_mkldnn.default(%up_sum)",
    "aten._nested_from_padded.default(%up_sum, %up_sum)",
)


@pytest.mark.parametrize("call", NOT_DENSE)
def test_tensors_that_are_not_dense_are_refused_before_pytorch_sees_them(call: str) -> None:
    message = refused(behind("%up_sum", f"%w = {call} : f32[b, 16, 40] tp:S(2)", "%v = aten.relu.default(%w)"))
    assert re.search(r"%w: aten\..* makes or takes tensors that are not dense; write it with dense tensors", message)


OTHERS = (
    (("%rng, 0.1", "%rng, 1.5"), "%drop (drop, cases.py:5): p=1.5 is not within [0, 1]"),
    (("%rng, 0.1", "%rng, -0.1"), "p=-0.1 is not within [0, 1]"),
    (("%rng, 0.1", "%rng, nan"), "p=nan is not within [0, 1]"),
    (("%rng, 0.1", "%rng, None"), "p=None is not within [0, 1]"),
    (("1e-05, False", "-1e-05, False"), "eps=-1e-05 is not finite and not negative"),
    (("1e-05, False", "nan, False"), "eps=nan is not finite"),
    (("default(%up_sum)", 'default(%up_sum, approximate="erf")'), "approximate=erf is not one of none, tanh"),
    (("(%gap, 2)", "(%gap, inf)"), "exponent=inf is not a finite number"),
    (("%down_part, %row)", "%down_part, %row, alpha=nan)"), "alpha=nan is not a finite number"),
    (("(%square, 0.001)", "(%square, nan)"), "other=nan is not a number"),
    (behind("%up_sum", "%w = aten.relu.default(%up_sum)"), "%w: has no type"),
    (
        behind("%up_sum", '%w = _c10d_functional.all_reduce.default(%up_sum, "sum", "0") : f32[b, 16, 40] tp:S(2)'),
        "itself",
    ),
    (behind("%up_sum", "%w = aten.full.default([2], 1.0, device=device.meta) : f32[2] tp:R"), "names the device meta"),
    (
        (
            "%drop = fxpar.dropout(%gelu,",
            "%w = aten.isnan.default(%gelu) : bool[b, 16, 40] tp:S(2)\n%drop = fxpar.dropout(%w,",
        ),
        "dropout",
    ),
)


def test_what_a_conjugate_has_for_its_parts_is_asked_anew() -> None:
    head = "fxpar 2\nplan {}\nproperties canonical\n"
    text = head + '%x = input["x"] : c64[3]\n%y = aten.view_as_real.default(%x) : f32[3, 2]\nreturn y=%y\n'
    verify_static(parse_program(text))
    turned = text.replace("%y =", "%c = aten._conj.default(%x) : c64[3]\n%y =").replace(
        "real.default(%x", "real.default(%c"
    )
    with pytest.raises(FxparError, match=r"%y.*conjugated"):
        verify_static(parse_program(turned))


def test_a_type_that_torch_takes_by_default_is_asked_anew() -> None:
    head = "fxpar 2\nplan {}\nproperties canonical\n"
    text = head + '%x = input["x"] : i64[3]\n%y = aten.div.Tensor(%x, %x) : f32[3]\nreturn y=%y\n'
    verify_static(parse_program(text))
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(FxparError, match=r"%y"):
            verify_static(parse_program(text))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("change", "message"), OTHERS, ids=[str(i) for i in range(len(OTHERS))])
def test_numbers_and_words_that_mean_nothing_are_refused(change: tuple[str, str], message: str) -> None:
    assert message in refused(change)


def without_derivative(call: str) -> tuple[str, str]:
    """A text with an operation beside the way of the gradients, and one with it on the way."""
    gathered = "%u = fxpar.all_gather[tp](%gelu) : f32[b, 16, 40] tp:R"
    line = f"{gathered}\n%w = aten.{call} : f32[b, 16, 40] tp:R"
    beside = sequence_text(2).replace("%drop = ", f"{line}\n%drop = ")
    used = beside.replace("fxpar.dropout(%gelu,", "fxpar.dropout(%w,").replace(", [%tp_index])", ")")
    used = used.replace(
        "%drop = fxpar.dropout(%w, %rng, 0.1) : f32[b, 16, 40] tp:S(2)",
        "%drop_w = fxpar.dropout(%w, %rng, 0.1) : f32[b, 16, 40] tp:R",
    )
    used = used.replace("%down = ", "%drop = fxpar.r_to_s[tp](%drop_w) : f32[b, 16, 40] tp:S(2)\n%down = ")
    return beside, used


@pytest.mark.parametrize("call", ["special_zeta.default(%u, %u)", "floor_divide.Scalar(%u, 2)"])
def test_what_has_no_derivative_is_refused_where_a_gradient_comes(call: str) -> None:
    beside, used = without_derivative(call)
    verify_static(parse_program(beside))
    with pytest.raises(FxparError, match=r"%w: .*derivative for \S+ is not implemented; detach its operand"):
        verify_static(parse_program(used))


def test_a_derivative_that_was_not_reached_is_not_known() -> None:
    """Operands that do not fit end the first check before PyTorch says that there is none."""
    _, used = without_derivative("special_zeta.default(%u, %u)")
    turned = "%t = aten.transpose.int(%u, 1, 2) : f32[b, 40, 16] tp:R\n%w = "
    with pytest.raises(FxparError):
        verify_static(
            parse_program(used.replace("%w = ", turned, 1).replace("zeta.default(%u, %u)", "zeta.default(%u, %t)"))
        )
    with pytest.raises(FxparError, match=r"derivative for \S+ is not implemented"):
        verify_static(parse_program(used))


BOUNDS = ("0.0", "1.0", "1", "0")


@pytest.mark.parametrize("p", BOUNDS)
def test_probabilities_may_be_at_their_bounds(p: str) -> None:
    verify_static(parse_program(sequence_text(2).replace("%rng, 0.1", f"%rng, {p}")))


def test_a_text_says_what_its_loss_is_or_that_it_has_none() -> None:
    assert "the loss line is missing, and an output is a scalar; write 'loss name', or 'loss -'" in refused(
        ("loss loss\n", "")
    )
    assert parse_program(sequence_text(2).replace("loss loss\n", "loss -\n")).loss == ""


CUTS = (
    "288 / 0",
    "40 / 00",
    "40 ~ 0",
    "0 x 3",
    "40 / -1",
    "40 /",
    "/ 2",
    "-1 x -40",
    "1e3",
    "b / 0",
    "40 | 0",
    "",
    "~ 8",
    "! / 2",
)


@pytest.mark.parametrize("cut", CUTS)
def test_cuts_into_no_parts_are_refused(cut: str) -> None:
    refused((f"{GELU} : f32[b, 16, 40] tp:S(2)", f"{GELU} : f32[b, 16, 40] tp:S(2: {cut})"))


# What would take for ever, or all memory, if it were worked out.
LONG = (
    (GELU, "%gelu = aten.slice.Tensor(%up_sum, 2, 0, 20, 999999999999999)"),
    (GELU, "%gelu = aten.slice.Tensor(%up_sum, 2, 0, 20, 0)"),
    behind("%up_sum", "%n = operator.pow(999999999999, 999999999999) : 1"),
    behind("%up_sum", "%n = operator.lshift(1, 999999999999999) : 1"),
    behind("%up_sum", "%n = math.factorial(99999999999) : 1"),
    behind("%up_sum", "%w = aten.full.default([999999999999], 1.0) : f32[999999999999] tp:R",
           "%u = aten.split.Tensor(%w, 1) : (f32[1] tp:R; f32[1] tp:R)"),
    behind("%up_sum", "%w = aten.full.default([999999999999], 1.0) : f32[999999999999] tp:R",
           "%u = aten.unbind.int(%w) : (f32[] tp:R; f32[] tp:R)"),
    (f"{GELU} : f32[b, 16, 40] tp:S(2)", f"{GELU} : f32[b, 16, {'9' * 4000}] tp:S(2)"),
    (f"{GELU} : f32[b, 16, 40] tp:S(2)", f"{GELU} : f32[b, 16, 40] tp:S(2: {'9' * 4000})"),
    (f"{GELU} : f32[b, 16, 40] tp:S(2)", f"{GELU} : f32[b, 16, 9**9**9**9] tp:S(2)"),
    (f"{GELU} : f32[b, 16, 40] tp:S(2)", f"{GELU} : f32[b, 16, 40] tp:S({'9' * 4000})"),
    ("symbol b = x.0 like 3", f"symbol b = x.0 like {'9' * 4000}"),
    ("symbol b = x.0 like 3", f"symbol b = x.{'9' * 4000} like 3"),
    ("symbol b = x.0 like 3", "symbol b = x.0 / 0 like 3"),
    ("(%gap, 2)", f"(%gap, {'9' * 5000})"),
    ("(%gap, 2)", f"(%gap, {'9' * 400})"),
)  # fmt: skip


@pytest.mark.parametrize("change", LONG, ids=[str(i) for i in range(len(LONG))])
def test_what_would_take_for_ever_is_refused_at_once(change: tuple[str, str]) -> None:
    refused(change)


NAMES = (
    (('parameter["up.bias"]', 'parameter["up.bias"](tied="up.weight")'), "up.weight: two tensors"),
    (('parameter["up.bias"]', 'parameter["up.bias"](tied="a", tied="a")'), "a: two tensors, or one twice"),
    (('%up_bias = parameter["up.bias"] : f32', '%up_bias = parameter["up.bias"] : i64'), "has no gradient"),
)


@pytest.mark.parametrize(("change", "message"), NAMES)
def test_a_name_stands_for_one_tensor(change: tuple[str, str], message: str) -> None:
    assert message in refused(change)
