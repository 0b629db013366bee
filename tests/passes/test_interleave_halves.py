"""interleave_halves: what it writes, whose bits halves draw, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.compile import compile_model, compile_step
from fxpar.errors import CheckFailed, LayoutError, PlanError
from fxpar.manager import PassManager
from fxpar.ops.coercions import reduce_from
from fxpar.ops.random import part_index
from fxpar.passes.interleave_halves import interleave_halves
from fxpar.plan.plan import Plan
from fxpar.program.program import Program, note
from fxpar.program.regions import inlined
from fxpar.runtime.uneven import has_halves
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import verify
from fxpar.verify.parts import drawn_part
from fxpar.verify.static import STATIC
from tests.verify.steps import Trial

_BEFORE = """\
fxpar 1
plan {"tp": 2, "interleave_halves": true, "half": 2}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 / 2 like 3
loss n
%w = parameter["w"] : f32[8, 4] half:I tp:S(1)
%v = parameter["v"] : f32[4, 8] half:I tp:S(0)
%x = input["x"] : f32[2*b, 8] half:S(0) tp:R
%half_gradients = fxpar.sum_gradients[half](%w, %v) : (f32[8, 4] half:R tp:S(1); f32[4, 8] half:R tp:S(0))
%a = operator.getitem(%half_gradients, 0) : f32[8, 4] half:R tp:S(1)
%c = operator.getitem(%half_gradients, 1) : f32[4, 8] half:R tp:S(0)
%h = aten.mm.default(%x, %a) : f32[2*b, 4] half:S(0) tp:S(1)
%y = aten.mm.default(%h, %c) : f32[2*b, 8] half:S(0) tp:P
%y_sum = fxpar.reduce_from[tp](%y) : f32[2*b, 8] half:S(0) tp:P→I
%m = aten.sum.default(%y_sum) : f32[] half:P tp:I
%n = fxpar.reduce_from[half](%m) : f32[] half:P→I tp:I
return n=%n, y=%y_sum
"""

_AFTER = """\
fxpar 1
plan {"tp": 2, "interleave_halves": true}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 / 2 like 3
loss n
%w = parameter["w"] : f32[8, 4] tp:S(1)
%v = parameter["v"] : f32[4, 8] tp:S(0)
%x = input["x"] : f32[2*b, 8] tp:R
%x_parts = aten.unflatten.int(%x, 0, [2, -1]) : f32[2, b, 8] tp:R
%x_first = aten.select.int(%x_parts, 0, 0) : f32[b, 8] tp:R {origin="first half"}
%x_second = aten.select.int(%x_parts, 0, 1) : f32[b, 8] tp:R {origin="second half"}
%h_first = aten.mm.default(%x_first, %w) : f32[b, 4] tp:S(1)
%h_second = aten.mm.default(%x_second, %w) : f32[b, 4] tp:S(1)
%y_first = aten.mm.default(%h_first, %v) : f32[b, 8] tp:P
%y_second = aten.mm.default(%h_second, %v) : f32[b, 8] tp:P
%y_sum_first = fxpar.reduce_from[tp](%y_first) : f32[b, 8] tp:P→I
%y_sum_second = fxpar.reduce_from[tp](%y_second) : f32[b, 8] tp:P→I
%m_first = aten.sum.default(%y_sum_first) : f32[] tp:I
%m_second = aten.sum.default(%y_sum_second) : f32[] tp:I
%n = aten.add.Tensor(%m_first, %m_second) : f32[] tp:I
%y_sum_first_parts = aten.stack.default([%y_sum_first, %y_sum_second], 0) : f32[2, b, 8] tp:I
%y_sum = aten.flatten.using_ints(%y_sum_first_parts, 0, 1) : f32[2*b, 8] tp:I
return n=%n, y=%y_sum
"""


def test_the_axis_is_unrolled() -> None:
    found = PassManager([interleave_halves], STATIC).run(parse_program(_BEFORE))
    assert print_program(found).splitlines() == _AFTER.splitlines()


def test_with_data_ranks_each_has_both_halves_of_its_rows() -> None:
    """A sum over halves and data ranks is an addition, and then that over data ranks."""
    text = print_program(compile_model(Net(), batch(8), Plan(dp=2, tp=2, interleave_halves=True)).program)
    lines = [line.split("  #")[0] for line in text.splitlines()]
    rows = [line for line in lines if line.startswith("%x_")]
    assert rows == [
        "%x_rows = fxpar.size(%x, 0) : 4*b",
        "%x_each = operator.floordiv(%x_rows, 4) : b",
        "%x_parts = aten.unflatten.int(%x, 0, [-1, 2, %x_each]) : f64[2, 2, b, 8] dp:S(0) tp:R",
        '%x_first = aten.select.int(%x_parts, 1, 0) : f64[2, b, 8] dp:S(0) tp:R {origin="first half"}',
        "%x_first_1 = aten.flatten.using_ints(%x_first, 0, 1) : f64[2*b, 8] dp:S(0) tp:R",
        '%x_second = aten.select.int(%x_parts, 1, 1) : f64[2, b, 8] dp:S(0) tp:R {origin="second half"}',
        "%x_second_1 = aten.flatten.using_ints(%x_second, 0, 1) : f64[2*b, 8] dp:S(0) tp:R",
    ]
    sums = [line.partition(" = ")[2].partition("(")[0] for line in lines if "_halves = " in line or "[dp](" in line]
    assert sums.count("aten.add.Tensor") == sums.count("fxpar.reduce_from[dp]") + sums.count("fxpar.all_reduce[dp]")


class Net(nn.Module):
    """Two matrices with dropout behind each, of values, of their transpose, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, 8]."""
        y = functional.dropout(self.up(x), 0.3)
        y = self.down(functional.dropout(y.t(), 0.3).t())
        heads = y.view(-1, 2, 4, 1)
        heads = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4)
        found: Tensor = (heads.flatten(1) + y).square().mean()
        return found


def batch(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))}


@pytest.mark.parametrize("plan", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_halves_draw_the_bits_of_the_whole(plan: dict[str, Any]) -> None:
    found = verify(Net(), batch(12), Plan(**plan, interleave_halves=True))
    assert found.ok, found.values
    draws = [node for node in found.program.graph.nodes if node.op == "call_function" and note(node).random]
    assert [drawn_part(node) for node in draws] == [(i, 2, dim) for dim in (0, 1, 0) for i in (0, 1)]


def test_odd_rows_are_computed_whole() -> None:
    for plan in (Plan(tp=2), Plan(dp=2)):
        found = verify(Net(), batch(6 * plan.dp // 2 * 2 - plan.dp), plan.replace(interleave_halves=True))
        assert found.ok
        assert not found.program.plan.interleave_halves
        assert not [node for node in found.program.graph.nodes if node.target is part_index]


class Outputs(nn.Module):
    """Returns an input, one value under two names, and something of no rows; drops a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Linear(8, 6).double()

    def forward(self, x: Tensor, places: Tensor) -> dict[str, Tensor]:
        """x: [b, 8], places: [1, 6]."""
        y = self.up(x) + places
        loss = functional.dropout(y.sum(0), 0.5).square().mean() + y.square().mean()
        return {"loss": loss, "x": x, "a": y, "b": y, "places": places}


@pytest.mark.parametrize("plan", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_outputs_of_all_kinds_and_draws_for_sums(plan: dict[str, Any]) -> None:
    inputs = {**batch(8), "places": torch.arange(6, dtype=torch.float64)[None]}
    found = verify(Outputs(), inputs, Plan(**plan, interleave_halves=True))
    assert found.ok, found.values
    outputs = found.program.output_nodes()
    assert outputs["x"].op == outputs["places"].op == "placeholder"
    assert outputs["a"] is outputs["b"]


def test_inputs_of_one_row_that_are_no_batch_leave_halves_alone() -> None:
    inputs = {**batch(8), "places": torch.zeros(1, 6, dtype=torch.float64)}
    program = compile_model(Outputs(), inputs, Plan(tp=2, interleave_halves=True)).program
    assert has_halves(program, inputs, None)
    assert not has_halves(program, {**inputs, "x": inputs["x"][:3]}, None)
    assert has_halves(program, {**inputs, "more": torch.zeros(3)}, None)
    assert not has_halves(program, inputs, [[(4, 8), (1, 6)], [(2, 8), (1, 6)]])


def test_shards_over_halves_and_data_ranks_at_once_are_refused() -> None:
    """A half is inside of what a data rank has: the pass would cut the whole first."""
    text = """\
fxpar 1
plan {"dp": 2, "interleave_halves": true, "half": 2}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 / 4 like 3
%t = input["t"] : f64[4*b, 8] dp:R half:R
%x = input["x"] : f64[4*b, 8] dp:S(0) half:S(0)
%u = fxpar.take[dp-half](%t) : f64[4*b, 8] dp:R→S(0) half:R→S(0)
%y = aten.add.Tensor(%x, %u) : f64[4*b, 8] dp:S(0) half:S(0)
return y=%y
"""
    with pytest.raises(PlanError, match="communicates over the batch in a way"):
        PassManager([interleave_halves], STATIC).run(parse_program(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fxpar.part_index(1, 2, 0)", "fxpar.part_index(0, 2, 0)"),
        ("fxpar.part_index(1, 2, 0)", "fxpar.part_index(1, 3, 0)"),
        ("fxpar.part_index(1, 2, 0)", "fxpar.part_index(1, 2, 1)"),
    ],
)
def test_halves_that_do_not_draw_the_whole_are_rejected(old: str, new: str) -> None:
    text = print_program(compile_model(Net(), batch(8), Plan(tp=2, interleave_halves=True)).program)
    assert old in text
    with pytest.raises(CheckFailed, match=r"draws the same random bits|which are not the whole"):
        PassManager([], STATIC).run(parse_program(text.replace(old, new)))


def _crossed() -> list[str]:
    """Texts in which one operation reads one operand of the other half, or takes it out of an input."""
    text = print_program(Trial(tp=2, interleave_halves=True).program)
    lines, found = text.splitlines(), list[str]()
    for i, line in enumerate(lines):
        name, _, call = line.partition(" = ")
        for place in re.finditer(r"%\w+_(first|second)\b", call.partition(" : ")[0]):
            other = place[0].removesuffix(place[1]) + {"first": "second", "second": "first"}[place[1]]
            defined = next((j for j, each in enumerate(lines) if each.startswith(f"{other} = ")), i)
            if defined < i and "sym_size" not in call:  # their sizes are the same
                changed = f"{name} = {call[: place.start()]}{other}{call[place.end() :]}"
                found.append("\n".join([*lines[:i], changed, *lines[i + 1 :]]) + "\n")
        if "aten.select.int(%" in line and "half" in line:
            turned = re.sub(r", ([01])\) :", lambda index: f", {1 - int(index[1])}) :", line)
            found.append("\n".join([*lines[:i], turned, *lines[i + 1 :]]) + "\n")
    return found


def test_what_reads_the_other_half_is_rejected() -> None:
    texts = _crossed()
    assert len(texts) > 60
    for text in texts:
        with pytest.raises((CheckFailed, LayoutError)):
            PassManager([], STATIC).run(parse_program(text))


@pytest.mark.parametrize("half", [0, 1])
def test_rows_of_one_half_or_in_the_other_order_are_rejected(half: int) -> None:
    program = Trial(tp=2, interleave_halves=True).program
    stack = next(node for node in program.graph.nodes if node.target is torch.ops.aten.stack.default)
    parts: Any = stack.args[0]
    stack.args = ([parts[1], parts[0]] if half else [parts[0], parts[0]], *stack.args[1:])
    with pytest.raises(CheckFailed, match="half"):
        PassManager([], STATIC).run(program)


def test_a_half_that_draws_for_the_whole_is_rejected() -> None:
    lines = print_program(compile_model(Net(), batch(8), Plan(tp=2, interleave_halves=True)).program).splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith("%dropout_second = "))
    lines[index] = lines[index].replace("%part_second_of_0, ", "").replace(", [%part_second_of_0]", "")
    with pytest.raises(CheckFailed, match="which are not the whole"):
        PassManager([], STATIC).run(parse_program("\n".join(lines) + "\n"))


def test_a_half_whose_gradient_is_lost_is_rejected() -> None:
    step = _step(Plan(tp=2, interleave_halves=True))
    text = print_program(step)
    added = next(
        line
        for line in text.splitlines()
        if "aten.add.Tensor(" in line and "phase=backward" in line and "12, 8]" in line.partition(" : ")[2]
    )
    name, _, call = added.partition(" = ")
    first = call.partition("(")[2].partition(",")[0]
    lost = "\n".join(line for line in text.splitlines() if line != added).replace(f"{name},", f"{first},")
    with pytest.raises(CheckFailed):
        PassManager([], STATIC).run(parse_program(lost.replace(f"={name}", f"={first}") + "\n"))


def _step(plan: Plan) -> Program:
    program = compile_model(Net(), batch(8), plan).program
    trained = [p.fqn for p in program.parameters if p.trainable]
    return inlined(compile_step(program, program.outputs, (program.loss,), trained))


def test_each_half_computes_behind_the_start_of_the_others_sum() -> None:
    """What a sum needs stands behind the start of the other half's, and the reader of that behind this one."""
    step = Trial(tp=2, interleave_halves=True).step
    place = {node: i for i, node in enumerate(step.graph.nodes)}
    products = [place[node] for node in place if node.target is torch.ops.aten.linear.default]
    sums = [node for node in place if node.target is reduce_from and "down" in note(node).fqn]
    assert len(sums) == 4
    for first, second in (sums[:2], sums[2:]):
        assert sum(place[first] < product < place[second] for product in products) == 2
        assert all(place[reader] > place[second] for reader in first.users)


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "dp": 2}], ids=str)
def test_a_step_of_halves_gives_the_gradients_of_one_device(plan: dict[str, Any]) -> None:
    trial = Trial(**plan, interleave_halves=True)
    assert trial.is_right(trial.step)


class Across(nn.Module):
    """Sorts the rows of the batch among each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, 8]."""
        found: Tensor = self.up(x).sort(0).values.square().mean()
        return found


def test_what_mixes_rows_is_refused_with_the_option_to_leave_out() -> None:
    with pytest.raises(LayoutError, match="leave interleave_halves out"):
        compile_model(Across(), {"x": torch.randn(4, 8)}, Plan(tp=2, interleave_halves=True))


@pytest.mark.parametrize("options", [{"half": 2}, {"half": 3}, {"pp": 2}, {"ep": 2}, {"capacity_factor": 1.0}], ids=str)
def test_plans_that_are_refused(options: dict[str, Any]) -> None:
    given = {"interleave_halves": True, "tp": 2, "dp": 2, **options}
    if options == {"half": 2}:
        del given["interleave_halves"]
    with pytest.raises(PlanError, match=r"interleave_halves"):
        Plan(**given)
