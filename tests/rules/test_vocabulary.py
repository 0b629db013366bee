"""Operators over a cut vocabulary are torch's own, in value and gradient (SPEC section 2.3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.errors import LayoutError
from fxpar.ir.program import Program, TensorType, output_layouts
from fxpar.ir.properties import Property
from fxpar.layout.layout import I, P, Placement, R, padded_shard, shard
from fxpar.layout.shards import local_block
from fxpar.layout.symbolic_sizes import shape_text
from fxpar.mesh.axes import coordinates
from fxpar.ops.collectives import dual_layout
from fxpar.ops.registry import COMPOSITE_OF
from fxpar.ops.vocabulary import cross_entropy, embedding, nll_loss, topk
from fxpar.passes.differentiate import differentiate
from fxpar.plan.plan import Plan
from fxpar.rules import OpCall, Refusal, infer, rule_of
from fxpar.text.parsing import parse_program
from fxpar.text.printing import placement_text, print_program
from fxpar.verification import expect, verify
from fxpar.verify.simulate_ranks import SimulationResult, cotangents, run_ranks, step_of
from fxpar.verify.static import verify_static
from tests.products import product


def cut(dim: int, size: int, n: int) -> Placement:
    return padded_shard(dim, size, n)


def program(
    n: int, x: Tensor, dim: int, call: str, result: str, inputs: dict[str, Tensor], before: str = ""
) -> Program:
    """A composite operator on a parameter `x` that is cut along `dim`, its result reduced where it is partial.

    Args:
        before: a line in front of the operator; `{x}` in it is the layout of the parameter.
    """
    lines = ["fxpar 2", f'plan {{"tp": {n}}}', "properties canonical collectives layouts local rng vocabulary"]
    lines += ["loss out"] if result.startswith("f64[]") else []
    placement = placement_text(cut(dim, x.shape[dim], n), x.shape)
    lines.append(f'%x = parameter["x"] : f64{shape_text(x.shape)} tp:{placement}')
    for name, value in inputs.items():
        kind = "i64" if value.dtype == torch.int64 else "f64"
        lines.append(f'%{name} = input["{name}"] : {kind}{shape_text(value.shape)} tp:R')
        if name == "weight":
            block = placement_text(cut(0, len(value), n), value.shape)
            lines.append(f"%weight_cut = fxpar.r_to_s[tp](%weight) : f64[{len(value)}] tp:R→{block}")
    lines += [before.format(x=placement)] if before else []
    kind, layout = result.split(" tp:")
    lines.append(f"%found = {call} : {result}")
    if layout == "P":
        lines.append(f"%out = fxpar.reduce_from[tp](%found) : {kind} tp:P→I")
    lines.append(f"return out=%{'out' if layout == 'P' else 'found'}")
    return parse_program("\n".join(lines) + "\n")


def ranks_of(program: Program, x: Tensor, inputs: dict[str, Tensor]) -> list[SimulationResult]:
    verify_static(program)
    return run_ranks(step_of(program), {"x": x}, inputs, {})


def same(program: Program, x: Tensor, inputs: dict[str, Tensor], wanted: Tensor) -> None:
    """Compares what every rank gives, and its block of the gradient, with torch's own.

    The gradient is that of autograd and that of the step which `differentiate` makes. Padding has zeros.
    """
    (gradient,) = torch.autograd.grad(wanted, [x], cotangents(program, {})["out"])
    (layout,) = output_layouts(program.node("x"))
    step = differentiate(program.copy())
    step = step.with_(properties=step.properties | {Property.STEP})
    verify_static(step)
    assert parse_program(print_program(step)).outputs == step.outputs
    pairs = zip(ranks_of(program, x, inputs), run_ranks(step, {"x": x}, inputs, {}), strict=True)
    for rank, (run, stepped) in enumerate(pairs):
        torch.testing.assert_close(run.outputs["out"], wanted.detach(), rtol=1e-12, atol=1e-13, equal_nan=True)
        place = coordinates(program.axes, rank)
        own = local_block(gradient, layout, program.axes, place)
        torch.testing.assert_close(run.gradients["x"], own, rtol=1e-12, atol=1e-13, equal_nan=True)
        own = local_block(gradient, dual_layout(layout), program.axes, place)
        torch.testing.assert_close(stepped.gradients["x"], own, rtol=1e-11, atol=1e-12, equal_nan=True)


def logits(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()


def targets(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(8))


def check_loss(
    n: int,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    options = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    wanted = functional.cross_entropy(x, target, weight, **options)  # type: ignore[arg-type]
    inputs = {"target": target} | ({} if weight is None else {"weight": weight})
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    passed = "None" if weight is None else "%weight_cut"
    call = f"fxpar.cross_entropy[tp](%x, %target, {passed}, {number}, {ignore_index}, {label_smoothing})"
    built = program(n, x, 1 if x.dim() > 1 else 0, call, f"f64{shape_text(wanted.shape)} tp:I", inputs)
    same(built, x, inputs, wanted)


@product(n=[2, 4, 8], reduction=["mean", "sum", "none"], smoothing=[0.0, 0.1], weighted=[False, True])
def test_cross_entropy_is_torch_s(n: int, reduction: str, smoothing: float, weighted: bool) -> None:
    size = 37  # divided by none of them
    target = targets(size, 11)
    target[2], target[5:7] = -100, 3
    weight = torch.rand(size, dtype=torch.float64) + 0.1 if weighted else None
    check_loss(n, logits(11, size), target, weight, reduction, -100, smoothing)
    check_loss(n, logits(11, size), target.abs() % size, weight, reduction, 3, smoothing)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_vocabulary_of_gpt2(n: int) -> None:
    target = targets(50257, 5)
    target[0], target[1] = 50256, 0
    check_loss(n, logits(5, 50257), target, label_smoothing=0.1)


@pytest.mark.parametrize("shape", [(3, 10, 4), (2, 10, 3, 2), (10,)])
def test_classes_that_are_not_the_last_dimension(shape: tuple[int, ...]) -> None:
    check_loss(2, logits(*shape), targets(10, *shape[:1], *shape[2:]) if len(shape) > 1 else torch.tensor(4))


@pytest.mark.parametrize("n", [2, 4])
def test_all_labels_of_a_rank_are_ignored(n: int) -> None:
    """Every target that counts is a word of the first rank; then none counts at all."""
    target = torch.tensor([0, 1, -100, 2, -100])
    check_loss(n, logits(5, 16), target)
    check_loss(n, logits(5, 16), torch.full((5,), -100), reduction="sum")
    check_loss(n, logits(5, 16), torch.full((5,), -100))  # 0 / 0, as torch


def test_vectors_of_the_specification() -> None:
    one = torch.arange(8.0, dtype=torch.float64).view(1, 8)
    many = torch.arange(8.0, dtype=torch.float64).repeat(16, 16)
    words = torch.arange(0, 32, 2)
    for n, x, target, smoothing, wanted in [
        (2, one, torch.tensor([2]), 0.0, [5.458340]),
        (4, one, torch.tensor([2]), 0.1, [5.308340]),
        (4, many, words, 0.0, [10.2309, 8.2309, 6.2309, 4.2309] * 4),
    ]:
        call = f"fxpar.cross_entropy[tp](%x, %target, None, 0, -100, {smoothing})"
        built = program(n, x, 1, call, f"f64[{len(target)}] tp:I", {"target": target})
        for run in ranks_of(built, x, {"target": target}):
            torch.testing.assert_close(run.outputs["out"], torch.tensor(wanted).double(), rtol=0, atol=1e-4)


@product(n=[2, 4], reduction=["mean", "sum", "none"], weighted=[False, True])
def test_negative_likelihood_of_log_softmax(n: int, reduction: str, weighted: bool) -> None:
    """The loss as models write it in two steps."""
    x, target = logits(7, 21), targets(21, 7)
    target[3] = -100
    weight = torch.rand(21, dtype=torch.float64) if weighted else None
    wanted = functional.nll_loss(functional.log_softmax(x, -1), target, weight, reduction=reduction)
    inputs = {"target": target} | ({} if weight is None else {"weight": weight})
    passed, number = "None" if weight is None else "%weight_cut", {"none": 0, "mean": 1, "sum": 2}[reduction]
    before = "%log = fxpar.log_softmax[tp](%x, -1) : f64[7, 21] tp:{x}"
    call = f"fxpar.nll_loss[tp](%log, %target, {passed}, {number})"
    built = program(n, x, 1, call, f"f64{shape_text(wanted.shape)} tp:P", inputs, before)
    same(built, x, inputs, wanted)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("padding_idx", [-1, 5])
def test_embedding_is_torch_s(n: int, padding_idx: int) -> None:
    table, ids = logits(37, 6), targets(37, 3, 5)
    ids[0, 0], ids[1, 1] = 36, 5
    wanted = functional.embedding(ids, table, None if padding_idx < 0 else padding_idx)
    built = program(n, table, 0, f"fxpar.embedding[tp](%x, %ids, {padding_idx})", "f64[3, 5, 6] tp:P", {"ids": ids})
    same(built, table, {"ids": ids}, wanted)


@pytest.mark.parametrize("word", [-1, 37, 38])
def test_a_word_outside_of_the_vocabulary_is_an_error(word: int) -> None:
    ids = torch.tensor([word])
    built = program(2, logits(37, 6), 0, "fxpar.embedding[tp](%x, %ids)", "f64[1, 6] tp:P", {"ids": ids})
    with pytest.raises(RuntimeError, match="outside of"):
        ranks_of(built, logits(37, 6), {"ids": ids})
    loss = program(2, logits(1, 37), 1, "fxpar.cross_entropy[tp](%x, %target)", "f64[] tp:I", {"target": ids})
    with pytest.raises(RuntimeError, match="neither -100"):
        ranks_of(loss, logits(1, 37), {"target": ids})


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("keepdim", "kind"), [(False, "f64[3, 2] tp:I"), (True, "f64[3, 1, 2] tp:I")])
def test_logsumexp_is_torch_s(n: int, keepdim: bool, kind: str) -> None:
    x = logits(3, 10, 2)
    built = program(n, x, 1, f"fxpar.logsumexp[tp](%x, [1], {keepdim})", kind, {})
    same(built, x, {}, x.logsumexp(1, keepdim=keepdim))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("keepdim", [False, True])
def test_argmax_is_torch_s(n: int, keepdim: bool) -> None:
    x = logits(4, 21).detach()
    x[0, 3], x[0, 17] = 9.0, 9.0  # of equal values the first
    x[1] = -5.0  # all below the padding
    built = program(n, x, 1, f"fxpar.argmax[tp](%x, 1, {keepdim})", f"i64[4{', 1' if keepdim else ''}] tp:R", {})
    for run in ranks_of(built, x, {}):
        assert torch.equal(run.outputs["out"], x.argmax(1, keepdim=keepdim))


@pytest.mark.parametrize(("n", "k", "largest"), [(2, 3, True), (4, 8, True), (4, 3, False)])
def test_topk_is_torch_s(n: int, k: int, largest: bool) -> None:
    """Also of more words than a rank has."""
    x = logits(4, 21)
    values, indices = x.topk(k, 1, largest)
    before = f"%both = fxpar.topk[tp](%x, {k}, 1, {largest}) : (f64[4, {k}] tp:I; i64[4, {k}] tp:R)"
    first = program(n, x, 1, "operator.getitem(%both, 0)", f"f64[4, {k}] tp:I", {}, before)
    same(first, x, {}, values)
    second = program(n, x, 1, "operator.getitem(%both, 1)", f"i64[4, {k}] tp:R", {}, before)
    assert all(torch.equal(run.outputs["out"], indices) for run in ranks_of(second, x, {}))


class Banned(nn.Module):
    """Logits of which words, or whole rows, are infinite; an odd vocabulary."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.words, self.head = kind, nn.Embedding(37, 12), nn.Linear(12, 37)
        banned = torch.ones(37, dtype=torch.bool)
        banned[[10, 35]] = False
        self.register_buffer("banned", banned)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """[b, s] twice."""
        logits = self.head(self.words(ids).tanh())
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.kind == "rows":
            sums = logits.masked_fill((ids % 3 == 0).unsqueeze(-1), float("-inf")).logsumexp(-1)
            return {"loss": loss + sums.exp().mean() * 0.01, "sums": sums}
        if self.kind == "integers":
            return {"loss": loss, "best": (logits * 4).long().argmax(-1)}
        few: Tensor = logits.masked_fill(self.banned, float("-inf"))
        values = few.topk(37 if self.kind == "all words" else 14, -1).values
        return {"loss": loss, "values": values, "best": few.argmax(-1)}


@pytest.mark.parametrize("kind", ["rows", "integers", "all words", "some words"])
def test_padding_is_behind_infinite_and_least_values(kind: str) -> None:
    torch.manual_seed(3)
    ids = torch.randint(0, 37, (3, 8))
    expect(verify(Banned(kind), {"ids": ids, "labels": ids.roll(1, 1)}, Plan(tp=4)))


class Routed(nn.Module):
    """Experts for each token, by a router that begins at zero: every expert is as good as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(37, 12), nn.Linear(12, 37)
        self.router = nn.Parameter(torch.zeros(16, 12))
        self.correction = nn.Parameter(torch.zeros(1, 16))
        self.experts = nn.Parameter(torch.randn(16, 12, 12) * 0.3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """[b, s] twice."""
        x = self.words(ids)
        scores = functional.linear(x, self.router).softmax(-1)
        chosen = (scores + self.correction.squeeze()).topk(3, -1).indices
        chances = scores.gather(-1, chosen)
        mixed = (torch.einsum("bsi,bskio->bsko", x, self.experts[chosen]) * chances.unsqueeze(-1)).sum(2)
        return functional.cross_entropy(self.head(mixed).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("tp", [2, 4])
def test_of_equal_experts_a_router_takes_those_of_one_device(tp: int) -> None:
    torch.manual_seed(3)
    ids = torch.randint(0, 37, (3, 8))
    proof = expect(verify(Routed(), {"ids": ids, "labels": ids.roll(1, 1)}, Plan(tp=tp)))
    assert not [node for node in proof.program.graph.nodes if node.target is topk]


@pytest.mark.parametrize("composite", dict.fromkeys(COMPOSITE_OF.values()), ids=str)
def test_a_composite_takes_a_cut_vocabulary_and_nothing_else(composite: Any) -> None:
    f64, i64 = torch.float64, torch.int64
    names = ("weight", "indices") if composite is embedding else ("self", "target")
    types = (TensorType(f64, (8, 6)), TensorType(i64, (8,)))
    single = composite not in (embedding, cross_entropy, nll_loss)
    dim = 0 if composite is embedding else 1
    call = OpCall(composite, {"dim": 1, "k": 2, "reduction": 1}, types[: 2 - single], names[: 2 - single], types[:1], 2)
    rule = rule_of(composite)
    assert rule is not None
    legal = []
    for first in (I, R, P, shard(0, 8), shard(1, 6)):
        for second in (R,) if single else (R, shard(0, 8), P):
            found = infer(rule, call, [first, second][: 2 - single], [True, False][: 2 - single])
            if not isinstance(found, Refusal):
                legal.append((first, second))
    assert legal == [(shard(dim, call.operands[0].shape[dim]), R)]


def test_a_composite_of_a_whole_vocabulary_is_refused() -> None:
    text = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local rng vocabulary
%x = parameter["x"] : f32[8, 6] tp:I
%ids = input["ids"] : i64[3] tp:R
%found = fxpar.embedding[tp](%x, %ids) : f32[3, 6] tp:I
return out=%found
"""
    with pytest.raises(LayoutError, match="use the operation of aten"):
        verify_static(parse_program(text))
