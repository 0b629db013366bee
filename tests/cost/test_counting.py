"""What is counted: saved tensors by hand, peaks and collectives of a step, formulas by sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fxpar.capture.capture import capture
from fxpar.compile import compile_step
from fxpar.cost import Report, make_report
from fxpar.cost.measure import Measured, measure, stand_in
from fxpar.errors import CheckFailed, InputError
from fxpar.ir.program import Program
from fxpar.layout.symbolic_sizes import evaluate, parse_size
from fxpar.manager import PassManager
from fxpar.ops.lower import Lowered, lower
from fxpar.ops.process_group import Group
from fxpar.passes import DEFAULT_PASSES, counted_steps
from fxpar.plan.plan import SHARDS, Plan

CPU = torch.device("cpu")
ROWS, COLUMNS, WIDTH = 3, 5, 12


class Two(nn.Module):
    """Two matrices around an activation."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = functional.gelu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x))).square().sum()  # type: ignore[no-any-return]


class Aside(Two):
    """A second output, through matrices of its own, which the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return {"loss": super().forward(x), "aside": self.right(self.left(self.norm(x)))}


class Residual(Two):
    """With a norm and a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(functional.gelu(self.up(self.norm(x))))).square().sum()  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of four heads of 16, without a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * self.scale).unflatten(-1, (4, 16)).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).float().sum()


def compiled(model: nn.Module, plan: Plan, columns: int = COLUMNS) -> Program:
    captured = capture(model, {"x": torch.randn(ROWS, columns, WIDTH)}, plan, None)
    return PassManager(DEFAULT_PASSES).run(captured.program)


def lowering(program: Program, device: torch.device = CPU) -> Lowered:
    return lower(program, {axis: Group(axis, n) for axis, n in program.axes.items()}, stand_in(device))


def counted(model: nn.Module, plan: Plan | None = None, device: torch.device = CPU) -> Measured:
    return step_of(compiled(model, plan or Plan()), device)


def step_of(program: Program, device: torch.device) -> Measured:
    step = compile_step(program, program.outputs, program.outputs, [p.fqn for p in program.parameters])
    return measure(step, lowering(step, device), {s.name: s.example for s in program.symbols}, device)


def reported(model: nn.Module, plan: Plan, columns: int = COLUMNS, **options: Any) -> Report:
    program = compiled(model, plan, columns)
    return make_report(program, counted_steps(program, lowering), name="two", device=CPU, **options)


# ---------------------------------------------------------------------- activations


def test_saved_tensors_are_those_that_each_derivative_needs() -> None:
    rows = ROWS * COLUMNS
    # gelu and the second matrix keep their operands, the square keeps its own; the batch is no activation.
    assert [kept.bytes for kept in counted(Two()).saved] == [rows * 20 * 4, rows * 20 * 4, rows * WIDTH * 4]
    # relu keeps its result, which the second matrix keeps too: once.
    assert [kept.bytes for kept in counted(Two(functional.relu)).saved] == [rows * 20 * 4, rows * WIDTH * 4]


def test_a_view_counts_with_what_it_is_a_view_of() -> None:
    rows = ROWS * COLUMNS
    half = counted(Two(lambda x: functional.pad(functional.gelu(x[..., :10]), (0, 10))))
    # gelu sees half of each row, and the whole result of the matrix stays alive for it.
    assert next(kept.bytes for kept in half.saved) == rows * 20 * 4


def test_dropout_keeps_nothing() -> None:
    """Its bits are drawn again, from the random state; the second matrix keeps its operand."""
    rows = ROWS * COLUMNS
    found = counted(Two(lambda x: functional.dropout(x, 0.5)))
    assert [kept.bytes for kept in found.saved] == [24, rows * 20 * 4, rows * WIDTH * 4]


def test_a_checkpointed_region_keeps_its_inputs() -> None:
    def region(x: Tensor) -> Any:
        return checkpoint(lambda y: functional.gelu(functional.gelu(y)), x, use_reentrant=False)

    rows = ROWS * COLUMNS
    found = counted(Two(region))
    assert [kept.bytes for kept in found.saved] == [rows * 20 * 4, rows * 20 * 4, rows * WIDTH * 4]


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = Two()
    model.up.requires_grad_(False)
    (rank,) = reported(model, Plan()).ranks
    held = (20 * WIDTH + WIDTH) * 4
    assert (rank.gradients, rank.optimizer) == (held, 2 * held + 2 * 4)
    assert rank.parameters == held + (20 * WIDTH + 20) * 4


# ---------------------------------------------------------------------- peaks


def test_each_phase_has_its_peak() -> None:
    rows = ROWS * COLUMNS
    found = counted(Two(functional.relu))
    forward, backward = found.peaks
    # What the backward reads, relu's result and the second matrix's; beside them the square, its sum and the tangent.
    assert (forward.phase, forward.bytes) == ("forward", 4 + rows * (20 + 2 * WIDTH) * 4 + 4)
    assert backward.phase == "backward"
    assert found.peak == max(found.peaks, key=lambda peak: peak.bytes)


def test_sums_of_parameters_gradients_are_a_phase() -> None:
    plan = Plan(tp=2, sequence_parallel=True, split={"up": "column", "down": "row"})
    report = reported(Residual(), plan, columns=4)
    assert [moment.phase for moment in report.phases] == ["forward", "backward", "parameter"]
    assert report.peak in report.phases
    assert "peak by phase" in str(report)


# ---------------------------------------------------------------------- a GPU that is not there


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU on a machine without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_a_gpu_makes_no_scores(absent: torch.device, dtype: torch.dtype) -> None:
    rows, tokens = 2, 200
    batch = {"x": torch.randn(rows, tokens, 64, dtype=dtype)}
    program = PassManager(DEFAULT_PASSES).run(capture(Attention().to(dtype), batch, Plan(), None).program)
    found = step_of(program, absent)
    values, sums = rows * tokens * 64, rows * 4 * tokens
    # Of the attention: its operand, three times one tensor, its result, and a sum for each row of each head.
    assert sorted(kept.bytes for kept in found.saved) == sorted([4 * sums, *[values * dtype.itemsize] * 2])
    assert found.largest.bytes == values * 4 < rows * 4 * tokens**2 * dtype.itemsize


def test_attention_on_a_gpu_has_scores_where_no_kernel_takes_it(absent: torch.device) -> None:
    batch = {"x": torch.randn(2, 200, 64, dtype=torch.float64)}
    program = PassManager(DEFAULT_PASSES).run(capture(Attention().double(), batch, Plan(), None).program)
    assert step_of(program, absent).largest.bytes == 2 * 4 * 200**2 * 8


def test_dropout_on_a_gpu_makes_its_result_alone(absent: torch.device) -> None:
    rows = ROWS * COLUMNS
    model = Two(lambda x: functional.dropout(x, 0.5))
    found, on_cpu = counted(model, device=absent), counted(model)
    assert found.saved == on_cpu.saved
    assert found.largest.bytes == rows * 20 * 4 < on_cpu.largest.bytes


# ---------------------------------------------------------------------- collectives


def test_what_the_loss_does_not_reach_sends_nothing_in_the_backward() -> None:
    split = {"up": "column", "down": "row", "left": "column", "right": "row"}
    report = reported(Aside(), Plan(tp=2, split=split))
    assert {(c.phase, c.op): c.count for c in report.collectives} == {("forward", "all_reduce"): 1}
    assert report.ranks[0].gradients < report.ranks[0].parameters


def test_a_step_that_sends_something_else_is_no_report() -> None:
    def silent(program: Program) -> Lowered:
        lowered = lowering(program)
        (sent,) = [node for node in lowered.module.graph.nodes if getattr(node.target, "__name__", "") == "start_sum"]
        (summed,) = sent.users
        summed.replace_all_uses_with(sent.args[0])
        lowered.module.graph.erase_node(summed)
        lowered.module.graph.erase_node(sent)
        lowered.module.recompile()
        return lowered

    program = compiled(Two(), Plan(tp=2, split={"up": "column", "down": "row"}))
    with pytest.raises(CheckFailed, match="the program lists 1 all_reduce of 720 bytes, and a step has 0"):
        make_report(program, counted_steps(program, silent), name="two", device=CPU)


def test_formulas_are_in_the_sizes_of_the_inputs() -> None:
    plan = Plan(tp=2, sequence_parallel=True, split={"up": "column", "down": "row"})
    report = reported(Residual(), plan, columns=4, sizes={"b": 6, "s": 8})
    assert {(c.phase, c.op, c.formula) for c in report.collectives} == {
        ("forward", "reduce_scatter", "48*b*s"),
        ("backward", "all_gather", "48*b*s"),
        ("forward", "all_reduce", "4"),
        ("parameter", "all_reduce", "96"),
    }
    assert report.sizes == {"b": 6, "s": 8}
    for c in report.collectives:
        assert evaluate(parse_size(c.formula), report.sizes) == c.bytes
    assert evaluate(parse_size(report.activations), report.sizes) == report.ranks[0].activations
    with pytest.raises(InputError, match="7 cannot be shared out by 2 ranks"):
        reported(Residual(), plan, columns=4, sizes={"s": 7})


def test_one_rank_splits_and_sends_nothing() -> None:
    report = reported(Two(), Plan(), optimizer="sgd")
    assert report.collectives == ()
    assert [rank.optimizer for rank in report.ranks] == [0]
    assert report.ranks[0].parameters == report.size.bytes
    assert "not split" not in str(report)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match="choose from adamw, sgd, sgd-momentum, muon, none"):
        reported(Two(), Plan(), optimizer="adafactor")


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_gathered_parameters_are_no_activations(shard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROWS", 4)
    plain, found = (reported(Two(), Plan(dp=2, shard=each)) for each in ("none", shard))
    assert [(m.module, m.activations, m.formula) for m in found.modules] == [
        (m.module, m.activations, m.formula) for m in plain.modules
    ]
    assert all(m.formula for m in found.modules if m.activations)
    assert bool(found.ranks[0].gathered) == (shard != "parameters")
