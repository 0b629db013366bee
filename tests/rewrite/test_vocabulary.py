"""Steps of the operators over a cut vocabulary, whose ranks communicate inside, are autograd's of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fxpar.ir.program import output_layouts
from fxpar.ir.properties import Property
from fxpar.layout.layout import padded_shard
from fxpar.layout.shards import local_block
from fxpar.layout.symbolic_sizes import shape_text
from fxpar.ops.collectives import dual_layout
from fxpar.passes.differentiate import differentiate
from fxpar.text.parsing import parse_program
from fxpar.text.printing import placement_text, print_program
from fxpar.verify.simulate_ranks import cotangents, run_ranks
from fxpar.verify.static import verify_static

ROWS, WORDS = 6, 37  # divided by none of the numbers of ranks


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()


def targets(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(8))


def check(n: int, x: Tensor, dim: int, call: str, result: str, wanted: Tensor, inputs: dict[str, Tensor]) -> None:
    """One step of an operator on a parameter `x` cut along `dim`, against autograd.

    Args:
        call: the operator's, or several lines of which the last is it.
        result: type and layout of what it gives.
        wanted: the same of the whole.
    """
    scalar = result.startswith("f64[]")
    placement = placement_text(padded_shard(dim, x.shape[dim], n), x.shape)
    lines = ["fxpar 2", f'plan {{"tp": {n}}}', "properties canonical collectives layouts local rng vocabulary"]
    lines += ["loss out"] if scalar else []
    lines.append(f'%x = parameter["x"] : f64{shape_text(x.shape)} tp:{placement}')
    for name, value in inputs.items():
        kind = "i64" if value.dtype == torch.int64 else "f64"
        lines.append(f'%{name} = input["{name}"] : {kind}{shape_text(value.shape)} tp:R')
    cut = padded_shard(0, WORDS, n)
    if "weight" in inputs:
        lines.append(f"%weight_cut = fxpar.r_to_s[tp](%weight) : f64[{WORDS}] tp:R→{placement_text(cut, (WORDS,))}")
    *before, last = call.split("\n")
    end, (kind, layout) = "found", result.split(" tp:")
    lines += [*before, f"%found = {last} : {result.replace('CUT', placement)}"]
    if layout == "P":
        end = "out"
        lines.append(f"%out = fxpar.reduce_from[tp](%found) : {kind} tp:P→I")
    program = parse_program("\n".join([*lines, f"return out=%{end}"]) + "\n")
    verify_static(program)
    step = differentiate(program.copy())
    step = step.with_(properties=step.properties | {Property.STEP})
    verify_static(step)
    assert parse_program(print_program(step)).outputs == step.outputs
    upstream = cotangents(program, {})["out"]
    (gradient,) = torch.autograd.grad(wanted, [x], upstream)
    layout_of = dual_layout(output_layouts(step.node("x"))[0])
    for rank, run in enumerate(run_ranks(step, {"x": x}, inputs, {})):
        own = local_block(gradient, layout_of, step.axes, {"tp": rank})
        torch.testing.assert_close(run.gradients["x"], own, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(n: int, reduction: str, smoothing: float, weighted: bool) -> None:
    x, target = drawn(ROWS, WORDS), targets(WORDS, ROWS)
    target[2] = -100
    inputs = {"target": target}
    weight = torch.rand(WORDS, dtype=torch.float64) + 0.1 if weighted else None
    if weight is not None:
        inputs["weight"] = weight
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    wanted = functional.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing)
    passed = "%weight_cut" if weighted else "None"
    call = f"fxpar.cross_entropy[tp](%x, %target, {passed}, {number}, -100, {smoothing})"
    check(n, x, 1, call, f"f64{shape_text(wanted.shape)} tp:I", wanted, inputs)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nll_loss(n: int, reduction: str) -> None:
    x, target = drawn(ROWS, WORDS), targets(WORDS, ROWS)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    wanted = functional.nll_loss(x, target, reduction=reduction)
    call = f"fxpar.nll_loss[tp](%x, %target, None, {number}, -100)"
    check(n, x, 1, call, f"f64{shape_text(wanted.shape)} tp:P", wanted, {"target": target})


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("padding_idx", [-1, 3])
def test_embedding(n: int, padding_idx: int) -> None:
    x, indices = drawn(WORDS, 4), targets(WORDS, ROWS, 2)
    indices[0, 0] = 3
    wanted = functional.embedding(indices, x, None if padding_idx < 0 else padding_idx)
    call = f"fxpar.embedding[tp](%x, %indices, {padding_idx})"
    check(n, x, 0, call, f"f64[{ROWS}, 2, 4] tp:P", wanted, {"indices": indices})


@pytest.mark.parametrize("n", [2, 4])
def test_softmax_and_its_sum(n: int) -> None:
    x = drawn(ROWS, WORDS)
    check(n, x, 1, "fxpar.log_softmax[tp](%x, -1)", f"f64[{ROWS}, {WORDS}] tp:CUT", x.log_softmax(-1), {})
    for keep in (False, True):
        wanted = x.logsumexp(-1, keepdim=keep)
        call = f"fxpar.logsumexp[tp](%x, [-1], {keep})"
        check(n, x, 1, call, f"f64{shape_text(wanted.shape)} tp:I", wanted, {})


@pytest.mark.parametrize("n", [2, 4])
def test_topk(n: int) -> None:
    x = drawn(ROWS, WORDS)
    program = f"%both = fxpar.topk[tp](%x, 3, -1) : (f64[{ROWS}, 3] tp:I; i64[{ROWS}, 3] tp:R)"
    check(n, x, 1, f"{program}\noperator.getitem(%both, 0)", f"f64[{ROWS}, 3] tp:I", x.topk(3, -1).values, {})
