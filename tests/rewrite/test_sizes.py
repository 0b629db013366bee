"""What PyTorch differentiates for some sizes alone: a condition on them, or a program for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.compile import capture_differentiable, compile_model
from fxpar.errors import FxparError, InputError, TextError
from fxpar.ir.program import Program, TensorType
from fxpar.ir.symbols import Symbol
from fxpar.layout.symbolic_sizes import symbol
from fxpar.manager import PassManager
from fxpar.passes import STEP_PASSES
from fxpar.plan.plan import Plan
from fxpar.plan.plan_options import Operators
from fxpar.rewrite.symints import SymbolicSizes
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from fxpar.verify.static import STATIC, verify_static
from tests.products import few

ROWS, LENGTH, WIDTH = 4, 24, 12


class Mixed(nn.Module):
    """A function of [b, s, 8] between two matrices, and a loss."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return (self.second(self.mix(torch.tanh(self.first(x)))) - y).square().mean()


class Recurrent(nn.Module):
    """The LSTM's first result."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)[0]


def best(x: Tensor) -> Tensor:
    """Tokens are as many as are picked or more."""
    return x * torch.topk(x, 5, dim=1).values.sum(1, keepdim=True)


def cut(x: Tensor, most: int = 32) -> Tensor:
    """No tokens beyond the most."""
    return x[:, : min(most, x.shape[1])]


def fourier(x: Tensor) -> Any:
    return torch.fft.fftn(x, dim=(1, 2)).real


def filtered(x: Tensor) -> Any:
    """Its derivative writes through a slice."""
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=x.shape[1], dim=1)


def unfolded(x: Tensor) -> Tensor:
    windows: Tensor = functional.unfold(x.unsqueeze(1), (3, 3), padding=1).unflatten(1, (3, 3)).sum((1, 2))
    return windows.reshape(x.shape)


def solved(x: Tensor) -> Tensor:
    """Lower triangles of the channels."""
    left = torch.eye(8) + torch.tril(x.transpose(1, 2) @ x / 8, -1)
    solution: Tensor = torch.linalg.solve_triangular(left, x.transpose(1, 2), upper=False)
    return solution.transpose(1, 2)


def chunked(x: Tensor) -> Tensor:
    return torch.cat([chunk * i for i, chunk in enumerate(x.chunk(4, 1))], 1)


def grouped(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1] // 8, 8, 8).cumsum(2).reshape(x.shape)


def sliced(x: Tensor) -> Tensor:
    """Whole chunks of 8, and what is left of them; none, of the example."""
    end = x.shape[1] // 8 * 8
    chunks = x[:, :end].contiguous().unflatten(1, (x.shape[1] // 8, 8)).cumsum(2).flatten(1, 2)
    return torch.cat([chunks, x[:, end:]], 1) if end < x.shape[1] else chunks.reshape(x.shape[0], x.shape[1], -1)


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "best": best,
    "cut": cut,
    "fourier": fourier,
    "filtered": filtered,
    "unfolded": unfolded,
    "solved": solved,
    "chunked": chunked,
    "grouped": grouped,
    "sliced": sliced,
}


def batch(length: int = LENGTH, rows: int = ROWS) -> dict[str, Tensor]:
    """x and y of so many rows and tokens."""
    x, y = torch.randn(2, rows, length, WIDTH, generator=torch.Generator().manual_seed(length))
    return {"x": x, "y": y}


def model(name: str) -> nn.Module:
    """The model of a mix, or of an LSTM."""
    torch.manual_seed(0)
    return Mixed(Recurrent() if name == "lstm" else MIXES[name])


def shapes(program: Program) -> str:
    """Sizes of the first input, and conditions."""
    return "; ".join([str(program.inputs[0].type), *map(str, program.conditions)])


SPLIT = {
    "best": "f32[b, s, 12]; s >= 5",
    "cut": "f32[b, s, 12]; Min(32, s) <= s; 8*s == 8*Min(32, s)",
    "fourier": "f32[b, s, 12]",
    "filtered": "f32[4, 24, 12]",
    "unfolded": "f32[b, s, 12]",
    "solved": "f32[b, s, 12]",
    "chunked": "f32[b, 24, 12]",
    "grouped": "f32[b, 24, 12]",
    "sliced": "f32[b, 24, 12]",
    "lstm": "f32[b, 6, 12]",
}
# The same sizes as others, by another mix.
ALIKE = ("grouped", "sliced")


@pytest.mark.parametrize(
    ("name", "wanted"), few(SPLIT.items(), [item for item in SPLIT.items() if item[0] not in ALIKE])
)
def test_a_split_step_is_that_of_one_device(name: str, wanted: str) -> None:
    found = expect(verify(model(name), batch(6 if name == "lstm" else LENGTH), Plan(tp=2)))
    assert shapes(found.program) == wanted
    assert found.values is not None
    assert found.values.max_grad_error < 1e-12


@pytest.mark.parametrize("name", ["best", "cut"])
@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(tp=2, sequence_parallel=True)], ids=["dp", "sequence"])
def test_conditions_are_of_what_ranks_share_out(name: str, plan: Plan) -> None:
    expect(verify(model(name), batch(), plan))


@cache
def _step() -> Program:
    compiled = compile_model(model("best"), batch(), Plan(tp=2))
    return PassManager(STEP_PASSES, STATIC).run(compiled.program)


def test_conditions_are_part_of_the_text() -> None:
    step = _step()
    text = print_program(step)
    assert "\ncondition s >= 5\n" in text
    read = parse_program(text)
    assert read.conditions == step.conditions
    assert print_program(read) == text
    verify_static(read)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "PyTorch does not differentiate it on symbolic shapes: it is traced for some sizes alone"),
        (
            "condition s >= 2\n",
            "PyTorch does not differentiate it on symbolic shapes: it is traced for some sizes alone",
        ),
        ("condition s >= 99\n", "does not hold of the example (s=24)"),
        ("condition t >= 5\n", "names t, which is no size of an input"),
    ],
)
def test_a_text_with_another_condition_is_rejected(line: str, reason: str) -> None:
    text = print_program(_step())
    with pytest.raises(FxparError) as caught:
        verify_static(parse_program(text.replace("condition s >= 5\n", line)))
    assert reason in str(caught.value)


@pytest.mark.parametrize("line", ["s", "s >> 5", "s >= ", "s >= 5 >= 2", "s ≥ 5", "s >= x y"])
def test_what_is_no_condition_is_rejected(line: str) -> None:
    text = print_program(_step())
    with pytest.raises(TextError):
        parse_program(text.replace("condition s >= 5", f"condition {line}"))


def test_a_stronger_condition_is_enough() -> None:
    text = print_program(_step())
    verify_static(parse_program(text.replace("condition s >= 5", "condition s >= 9")))


def test_rows_that_are_to_be_a_number_are_not_shared_out() -> None:
    """PyTorch takes the rows of a transform whose length is given for a number."""
    plan = Plan(dp=2, operators=Operators(batchwise_ops=("aten._fft_r2c.default", "aten._fft_c2r.default")))
    with pytest.raises(InputError, match="one number of rows alone") as caught:
        verify(model("filtered"), batch(), plan)
    assert "dp=1" in str(caught.value)


def test_sizes_are_fixed_for_one_capture_alone() -> None:
    for length in (16, 24):
        captured = capture_differentiable(model("chunked"), batch(length), Plan(tp=2))
        assert captured.fixed == {(1, length)}
        assert [each.name for each in captured.program.symbols] == ["b"]


# What a trace may assume of sizes: that its tensors have two elements or more along a dimension, and nothing else.


def _traced(of: Callable[[Any, Any], bool]) -> None:
    """Asks a question of the sizes of [s - 2, t // 2 + 1]; both symbols are 8 where it is answered."""
    sizes = SymbolicSizes([Symbol("s", "x", 0, 8), Symbol("t", "x", 1, 8)])
    s, t = symbol("s"), symbol("t")
    made = sizes.tensor(TensorType(torch.float32, (s - 2, t // 2 + 1)), False)
    of(*made.shape)
    sizes.check([made])


@pytest.mark.parametrize(
    "of",
    [
        lambda a, b: bool(a != 1),
        lambda a, b: bool(b > 1),
        lambda a, b: bool(a * b >= 4),
        lambda a, b: bool(torch.sym_max(1, a) == a),
        lambda a, b: bool(3 * a * b + a != 1),
    ],
)
def test_a_trace_may_assume_two_elements(of: Callable[[Any, Any], bool]) -> None:
    _traced(of)


@pytest.mark.parametrize(
    ("of", "named"),
    [
        (lambda a, b: bool(a > 2), "s"),
        (lambda a, b: bool(a != 3), "s"),
        (lambda a, b: bool(a > b), "t"),
        (lambda a, b: bool(a % 2 == 0), "s"),
        (lambda a, b: bool(b == 5), "t"),
        (lambda a, b: bool(a + 3 != b), "s"),
    ],
)
def test_a_trace_that_assumes_more_is_refused(of: Callable[[Any, Any], bool], named: str) -> None:
    with pytest.raises(ValueError, match=rf"some sizes alone \(.*\b{named}\b|one size alone \(.*\b{named}\b"):
        _traced(of)
