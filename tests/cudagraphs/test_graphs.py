"""Steps that are replayed are the steps: bit for bit, by the stand-in for CUDA graphs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.cudagraphs.pool import StandInPool
from fxpar.errors import FxparError, InputError
from fxpar.runtime.prefetch import poison
from tests.cudagraphs import graphed
from tests.cudagraphs.graphed import Bag, Reading, Trained, as_it_is, gpt2, llama, train, two_layers, words
from tests.runtime.compiled import Seen, watched
from tests.runtime.world import World

IMPLS = ("partial", "full_iteration")
MOSTLY_FULL = (pytest.param("partial", marks=pytest.mark.matrix), "full_iteration")


# Evaluations are replayed in the test of scopes.
TRAININGS: list[tuple[int, dict[str, Any]]] = [
    (2, {"every": 2, "set_to_none": False, "precision": "bf16_weights", "evaluate": 0}),
]
MORE_TRAININGS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"set_to_none": False}),
    (1, {"every": 2, "recompute": fxpar.Recompute("selective")}),
    (3, {"precision": "bf16"}),
]


def _in_turn(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Each case by one way of replaying, the next case by the other; the rest in the matrix."""
    rows = ((i, case, impl) for i, case in enumerate(cases) for impl in IMPLS)
    return [
        pytest.param(impl, *case, marks=() if IMPLS[i % 2] == impl else pytest.mark.matrix) for i, case, impl in rows
    ]


def _more(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(impl, *case, marks=pytest.mark.matrix) for case in cases for impl in IMPLS]


@pytest.mark.parametrize(("impl", "micro", "more"), [*_in_turn(TRAININGS), *_more(MORE_TRAININGS)])
def test_a_training_is_the_same_to_the_bit(impl: str, micro: int, more: dict[str, Any]) -> None:
    found = train(gpt2, words(6, micro), impl, **more)
    assert found == as_it_is(gpt2, 6, micro, **more)
    # Where all gradients are there in all steps and nothing is evaluated, an iteration is one graph.
    assert found.figures.graphs >= (1 if impl == "full_iteration" and not more.get("evaluate", True) else 2)
    assert len(set(found.losses)) == len(found.losses)  # masks differ from step to step


@pytest.mark.parametrize(
    ("build", "impl", "evaluate"),
    [(Bag, "full_iteration", 0), *(pytest.param(llama, impl, 3, marks=pytest.mark.matrix) for impl in IMPLS)],
)
def test_compiled_steps_are_replayed(build: Callable[[], nn.Module], impl: str, evaluate: int) -> None:
    options: dict[str, Any] = {"compile": True, "evaluate": evaluate}
    with watched(Seen(), vectorized=False):
        assert train(build, words(5, 2), impl, **options) == as_it_is(build, 5, 2, **options)


def test_plain_calls_are_replayed() -> None:
    found = train(Bag, words(6), "partial", plain=True)
    assert found == as_it_is(Bag, 6, plain=True)
    assert found.figures.graphs == 3


@pytest.mark.parametrize("impl", MOSTLY_FULL)
def test_the_optimizer_may_step_inside_and_follows_its_schedule(impl: str) -> None:
    outside = as_it_is(Bag, 6)
    inside = train(Bag, words(6), impl, inside=True)
    assert inside.losses == pytest.approx(outside.losses, rel=1e-5)  # AdamW is fused inside
    assert inside == as_it_is(Bag, 6, inside=True)


def test_gradients_that_an_optimizer_inside_has_used_are_freed() -> None:
    options: dict[str, Any] = {"inside": True, "every": 2, "evaluate": 0}
    graphed = train(Bag, words(10), "full_iteration", **options)
    assert graphed == as_it_is(Bag, 10, **options)
    assert graphed.figures.graphs == 2


def test_gradients_that_an_optimizer_inside_does_not_use_stay() -> None:
    seen: list[list[Tensor | None]] = []
    for impl in ("none", "full_iteration"):
        torch.manual_seed(0)
        model = fxpar.parallelize(Bag().train(), fxpar.Plan(cuda_graphs=fxpar.CudaGraphs(impl)), words(1)[0])
        optimizer = torch.optim.AdamW(model.head.parameters(), fused=True)
        for batch in words(4):
            model.zero_grad()
            model.train_step(batch, optimizer=optimizer, max_norm=1.0)
        seen.append([parameter.grad for parameter in model.parameters()])
    (first, *used), graphed = seen
    assert used == graphed[1:] == [None, None]
    assert first is not None
    assert graphed[0] is not None
    assert torch.equal(first, graphed[0])


def test_what_becomes_of_a_step_is_told_on_the_device() -> None:
    torch.manual_seed(0)
    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    batches = words(4)
    model = fxpar.parallelize(Bag().train(), plan, batches[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    norms = []
    for batch in batches:
        model.train_step(batch, optimizer=optimizer, max_norm=0.5)
        norms.append(model.step_flags.norm)
        assert model.step_flags.is_finite
    assert len({float(norm) for norm in norms if norm is not None}) == 4
    with torch.no_grad():
        list(model.parameters())[-1][0] = torch.inf
    model.train_step(
        {"input_ids": torch.zeros_like(batch["input_ids"]), "labels": batch["labels"]}, optimizer=optimizer
    )
    assert model.step_flags.is_finite is not None
    assert not model.step_flags.is_finite


def test_only_what_reads_the_host_stands_between_graphs() -> None:
    batches = [{"x": torch.randn(4, 8, 16)} for _ in range(5)]
    found = train(Reading, batches, "partial", evaluate=0)
    assert found == train(Reading, batches, evaluate=0)
    assert found.figures.graphs == 3
    with pytest.raises(InputError, match=r"%item \(layers\.1\.1|%item .*reads a value on the host"):
        train(Reading, batches, "full_iteration", evaluate=0)


@pytest.mark.parametrize(
    ("build", "layers"), [(gpt2, 1), pytest.param(two_layers, 2, marks=pytest.mark.matrix)], ids=["1", "2"]
)
def test_scopes_narrow_what_is_captured(build: Callable[[], nn.Module], layers: int) -> None:
    found = train(build, words(6), "partial", scope=("attn",))
    assert found == as_it_is(build, 6)
    assert found.figures.graphs == 3 * layers  # forward and backward, and forwards of the evaluation


def test_shapes_and_modes_are_variants_up_to_the_plans_number() -> None:
    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("full_iteration", variants=2))
    model = fxpar.parallelize(Bag().train(), plan, words(1)[0])
    for length in (8, 8, 10, 10, 8):
        model.zero_grad()
        model.train_step(words(1, length=length)[0])
    figures = model.graph_figures
    assert figures is not None
    assert figures.variants == 2
    model.zero_grad()
    with pytest.raises(InputError, match="2 variants of graphs"):
        model.train_step(words(1, length=12)[0])


def _exchange(model: fxpar.ParallelModule, step: int) -> None:
    if step == 3:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def _own_gradients(model: fxpar.ParallelModule, step: int) -> None:
    if step in (3, 4):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)


def _freeze(model: fxpar.ParallelModule, step: int) -> None:
    first = next(model.parameters())
    first.requires_grad = step < 3
    if step >= 3:
        first.grad = None


def _one_after_the_other(model: fxpar.ParallelModule, step: int) -> None:
    _exchange(model, step)
    _own_gradients(model, step - 1)
    _freeze(model, step - 3)


@functools.cache
def touched(touch: Callable[[fxpar.ParallelModule, int], None]) -> Trained:
    return train(Bag, words(9), touch=touch)


@pytest.mark.parametrize(
    ("impl", "touch"),
    [*_in_turn([(_one_after_the_other,)]), *_more([(_exchange,), (_own_gradients,), (_freeze,)])],
)
def test_other_addresses_and_gradients_are_seen(impl: str, touch: Callable[[fxpar.ParallelModule, int], None]) -> None:
    assert train(Bag, words(9), impl, touch=touch) == touched(touch)


def test_several_forwards_may_wait_for_their_backwards() -> None:
    found = []
    for impl in ("none", "partial"):
        torch.manual_seed(0)
        plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs(impl))
        batches = words(6)
        model = fxpar.parallelize(Bag().train(), plan, batches[0])
        losses = []
        for first, second in zip(batches[:3], batches[3:], strict=True):
            a, b = model(**first)["loss"], model(**second)["loss"]
            model(**first)  # nobody differentiates it
            (b / 3).backward()
            a.backward()
            losses += [float(a), float(b)]
        found.append((losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        if model.graph_figures is not None:
            assert model.graph_figures.variants <= 3
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_results_are_the_callers_own() -> None:
    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("partial"))
    batches = words(5)
    model = fxpar.parallelize(Bag().eval(), plan, batches[0])
    with torch.no_grad():
        logits = [model(**batch)["logits"] for batch in batches]
        again = [model(**batch)["logits"] for batch in batches]
    assert all(torch.equal(a, b) for a, b in zip(logits, again, strict=True))
    assert not torch.equal(logits[0], logits[1])


def test_a_closed_module_makes_no_step() -> None:
    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    model = fxpar.parallelize(Bag().train(), plan, words(1)[0])
    for batch in words(3):
        model.train_step(batch)
    assert any(
        "1 for 1 variants, with 0.0 MiB of static inputs, recorded in" in remark for remark in model.report().remarks
    )
    model.close()
    assert model.graph_figures is not None
    assert model.graph_figures.graphs == 0
    with pytest.raises(InputError, match="closed"):
        model.train_step(words(1)[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": torch.optim.AdamW}, "counts its steps on the host"),
        ({"max_norm": 1.0}, "optimizer"),
    ],
)
def test_what_cannot_be_in_a_graph_is_refused(options: dict[str, Any], text: str) -> None:
    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    model = fxpar.parallelize(Bag().train(), plan, words(1)[0])
    given = {k: v(model.parameters()) if k == "optimizer" else v for k, v in options.items()}
    with pytest.raises(FxparError, match=text):
        model.train_step(words(1)[0], **given)


def test_hooks_that_change_gradients_are_refused_and_those_behind_them_run() -> None:
    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    model = fxpar.parallelize(Bag().train(), plan, words(1)[0])
    seen: list[int] = []
    first = next(model.parameters())
    first.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
    for batch in words(4):
        model.train_step(batch)
    assert len(seen) == 4
    handle = first.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(InputError, match="hook"):
        model.train_step(words(1)[0])
    handle.remove()
    model.train_step(words(1)[0])
    assert len(seen) == 5


def test_transformer_engine_is_for_gpus() -> None:
    plan = fxpar.Plan(cuda_graphs=fxpar.CudaGraphs("transformer_engine"))
    with pytest.raises(InputError, match="captures on GPUs"):
        fxpar.parallelize(Bag().train(), plan, words(1)[0])


@pytest.mark.parametrize(
    ("name", "plan", "impl", "micro"),
    [
        pytest.param("gpt2", {"tp": 2}, "partial", 2, marks=pytest.mark.matrix),
        ("bag", {"tp": 2, "sequence_parallel": True}, "full_iteration", 2),
        ("bag", {"tp": 2, "inside": True}, "full_iteration", 1),
        pytest.param("llama", {"tp": 2, "sequence_parallel": True}, "full_iteration", 2, marks=pytest.mark.matrix),
        pytest.param("gpt2", {"dp": 2}, "full_iteration", 1, marks=pytest.mark.matrix),
        pytest.param("llama", {"dp": 2, "precision": "bf16"}, "partial", 2, marks=pytest.mark.matrix),
        pytest.param("mixtral", {"dp": 2, "ep": 2}, "full_iteration", 1, marks=pytest.mark.matrix),
        pytest.param("mixtral", {"tp": 2, "ep": 2, "etp": 1}, "partial", 2, marks=pytest.mark.matrix),
        pytest.param("mixtral", {"dp": 2, "ep": 2, "compile": True}, "full_iteration", 1, marks=pytest.mark.matrix),
    ],
)
def test_ranks_replay_together(world2: World, name: str, plan: dict[str, Any], impl: str, micro: int) -> None:
    for same, figures in world2.run(graphed.equal_on_ranks, name, impl, plan, micro):
        assert same
        assert figures.graphs >= 2


# ---------------------------------------------------------------------- the stand-in


def test_the_stand_in_refuses_what_asks_the_device() -> None:
    x = torch.randn(3)
    reads: list[Callable[[], Any]] = [lambda: x.sum().item(), x.tolist, x.numpy]
    for work in (*reads, lambda: x.nonzero(), lambda: torch.tensor([1.0]) + x, lambda: x[x > 0]):
        with pytest.raises(InputError, match="needs the host"):
            StandInPool().record(work)


def test_the_stand_in_runs_no_python_and_changes_nothing_while_it_records() -> None:
    pool, total, x, calls = StandInPool(), torch.zeros(3), torch.ones(3), []

    def work() -> Tensor:
        calls.append(1)
        total.add_(x)
        return total * len(calls)

    recording, found = pool.record(work)
    assert total.tolist() == [0, 0, 0]
    for _ in range(2):
        x.mul_(2)
        recording.replay()
    assert len(calls) == 1
    assert total.tolist() == found.tolist() == [6, 6, 6]


def test_the_stand_in_sees_memory_that_nobody_keeps() -> None:
    pool, x = StandInPool(), torch.ones(3)

    def record() -> Any:
        number = torch.arange(3)
        return pool.record(lambda: x * number)[0]

    recording = record()
    gc.collect()
    with pytest.raises(AssertionError, match="nobody keeps"):
        recording.replay()


def test_poison_is_no_number() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        value = torch.zeros(4, dtype=dtype)
        poison(value[1:2])
        assert value.isnan().all()
