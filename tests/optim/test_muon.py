"""Muon on ranks: every matrix is orthogonalised whole, once, and its parts get what one process computes."""

from __future__ import annotations

import inspect
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import InputError
from fxpar.layout.layout import Layout, shard
from fxpar.layout.shards import boxes
from fxpar.optim.muon import Muon
from fxpar.runtime import matrix_exchange
from fxpar.runtime.matrix_exchange import MatrixParts, share_out
from tests.optim import muon_jobs
from tests.optim.muon_jobs import Plan
from tests.products import few
from tests.runtime.jobs import Found, refusal
from tests.runtime.test_training import assert_same
from tests.runtime.world import World

Fixture = pytest.FixtureRequest
TP2: Plan = {"tp": 2}
DP2: Plan = {"dp": 2}
OPTIMIZER: Plan = {"dp": 2, "shard": "optimizer"}
PARAMETERS: Plan = {"dp": 2, "shard": "parameters"}
BOTH: Plan = {"tp": 2, "dp": 2, "shard": "parameters"}
HYBRID: Plan = {"dp": 4, "shard": "parameters", "dp_shard": 2}
STAGES: Plan = {"pp": 2, "dp": 2, "shard": "parameters", "microbatches": 2}
EXPERTS: Plan = {"dp": 2, "ep": 2}
SHARED_EXPERTS: Plan = {"dp": 4, "ep": 2, "shard": "parameters"}
PLANS: list[tuple[str, Plan]] = [
    *((name, plan) for name in ("gpt2", "llama") for plan in (TP2, DP2, OPTIMIZER, PARAMETERS, BOTH, HYBRID)),
    *(("shared heads", plan) for plan in ({"tp": 4}, BOTH)),
    *(("mixtral", plan) for plan in (EXPERTS, SHARED_EXPERTS, BOTH)),
    ("gpt2", STAGES),
]
EVERY_TIME: list[tuple[str, Plan]] = [
    *(("gpt2", TP2), ("gpt2", DP2), ("gpt2", PARAMETERS), ("llama", BOTH), ("llama", HYBRID)),
    *(("shared heads", {"tp": 4}), ("mixtral", EXPERTS), ("mixtral", BOTH)),
    ("gpt2", STAGES),
]
OPTIONS: list[dict[str, Any]] = [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}]


def world(request: Fixture, plan: Plan) -> World:
    size = prod(plan.get(axis, 1) for axis in ("tp", "dp", "pp"))
    found: World = request.getfixturevalue(f"world{size}")
    return found


@cache
def expected_steps(name: str) -> list[dict[str, Tensor]]:
    """What the plain loop gives."""
    return muon_jobs.stepped(name, {}, OPTIONS)


@pytest.mark.parametrize(("name", "plan"), few(PLANS, EVERY_TIME))
def test_steps_are_those_of_whole_matrices(request: Fixture, name: str, plan: Plan) -> None:
    """Of packed weights, padded ones, shared heads and experts."""
    for found in world(request, plan).run(muon_jobs.stepped, name, plan, OPTIONS):
        for state, expected in zip(found, expected_steps(name), strict=True):
            assert_same(state, expected, 1e-6 if name == "mixtral" else 1e-9)


@pytest.mark.parametrize(("name", "plan"), few(PLANS, [("gpt2", TP2), ("llama", BOTH), ("mixtral", EXPERTS)]))
def test_trainings_are_those_of_one_process(request: Fixture, name: str, plan: Plan) -> None:
    """With dropout, two microbatches, and a rate that becomes a tensor. Losses are in float32."""
    expected = muon_jobs.train(name, {})
    for found in world(request, plan).run(muon_jobs.train, name, plan):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert_same(found["state"], expected["state"], 1e-3 if name == "mixtral" else 1e-6)


def test_parameters_without_gradients_stay(world2: World) -> None:
    """A rank may have no matrix to orthogonalise."""
    name = "transformer.h.0.mlp.c_fc.weight"
    expected = muon_jobs.one_at_first("gpt2", {}, name)
    for found in world2.run(muon_jobs.one_at_first, "gpt2", PARAMETERS, name):
        assert_same(found, expected, 1e-9)


@pytest.mark.parametrize("plan", [DP2, PARAMETERS])
def test_graphs_change_no_bit(world2: World, plan: Plan) -> None:
    """Also as the rate changes between replays."""
    for found in world2.run(muon_jobs.replayed, "gpt2", plan):
        (losses, state, _), (other, graphed, graphs) = found["none"], found["full_iteration"]
        assert graphs == 1
        assert losses == other
        assert_same(graphed, state, 0.0)


@pytest.mark.parametrize(("first", "second"), [(TP2, PARAMETERS), (PARAMETERS, BOTH), (BOTH, DP2)])
def test_trainings_go_on_under_another_plan(request: Fixture, tmp_path: Path, first: Plan, second: Plan) -> None:
    expected = expected_steps("gpt2")[0]
    for found in world(request, first).run(muon_jobs.saved, tmp_path, "gpt2", first):
        assert_same(found, expected, 1e-9)
    for found in world(request, second).run(muon_jobs.resumed, tmp_path, "gpt2", second):
        assert_same(found, expected, 1e-9)


# What ranks compute and send.


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equal_layers_are_shared_out_evenly(ranks: int) -> None:
    """Of twelve layers of GPT-2."""
    shapes = [shape for _ in range(12) for shape in ((768, 2304), (768, 768), (768, 3072), (3072, 768))]
    works = [MatrixParts(shape, ()).flops for shape in shapes]
    assert works[2] == works[3] == 2 * (2 * 768 * 768 * 3072 + 768**3)
    for holders in ([()] * 48, [range(ranks)] * 48, [(i % ranks,) for i in range(48)]):
        owners = share_out(works, holders, ranks)
        loads = [sum(work for work, owner in zip(works, owners, strict=True) if owner == r) for r in range(ranks)]
        assert max(loads) <= 1.1 * sum(works) / ranks


def test_a_rank_that_has_a_matrix_takes_it_while_there_is_room() -> None:
    assert share_out([3, 3, 3, 3], [(1,), (0,), (1,), (1,)], 2) == [1, 0, 1, 0]
    assert share_out([1, 1, 1, 1, 4], [()] * 5, 2) == [1, 1, 1, 1, 0]


def test_ranks_that_hold_the_same_send_alike() -> None:
    """Of eight ranks in four pairs that hold the same half: what is sent to the owners is shared out."""
    axes, places = {"dp": 4, "tp": 2}, [{"dp": i // 2, "tp": i % 2} for i in range(8)]
    local_boxes = [tuple(boxes((8, 6), Layout.of({"tp": shard(0, 8)}), axes, place)) for place in places]
    parts = MatrixParts((8, 6), tuple(local_boxes))
    assert [sorted(region) for region in parts.regions] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    all_matrices = [matrix_exchange.Matrix(i, parts) for i in range(8)]
    transfers = list(matrix_exchange._collected(all_matrices, list(range(8)), 8))
    sent = [sum(1 for t in transfers if t.source == rank and t.target != rank) for rank in range(8)]
    assert sent == [1] * 8
    assert sum(t.source == t.target for t in transfers) == 8


def test_each_rank_has_its_part_of_momenta_and_work(world4: World) -> None:
    found = world4.run(muon_jobs.counted, "llama", BOTH)
    total = sum(rank["work"] for rank in found)
    assert max(rank["work"] for rank in found) <= 1.1 * total / 4
    assert len({rank["owners"] for rank in found}) == 1
    for rank in found:
        assert rank["momenta"] == rank["parts"] <= 0.3 * rank["elements"] + 259 * 96
        for sent in rank["sent"]:
            assert sent < rank["elements"]


def test_what_ranks_have_whole_is_sent_once_and_not_collected(world2: World) -> None:
    (first, second) = world2.run(muon_jobs.counted, "gpt2", DP2)
    assert first["sent"][0] == second["sent"][0] == 0
    assert first["sent"][1] + second["sent"][1] == first["elements"]


def test_experts_stay_where_they_are(world2: World) -> None:
    """Weights of experts are the work of the rank that has them, where that is even."""
    for found in world2.run(muon_jobs.counted, "mixtral", EXPERTS):
        assert found["sent"][0] == 0


# One process.


def _parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, count: int = 3) -> list[nn.Parameter]:
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return parameters


SHAPES: list[tuple[int, ...]] = [(32, 48), (48, 32), (16, 16), (32, 48), (7, 5)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.5, "ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0)},
        {"lr": torch.tensor(0.1), "eps": 100.0, "adjust_lr_fn": "original"},
    ],
)
@pytest.mark.parametrize("limit", [2**28, 2 * 32 * 48 * 2])
def test_one_process_gets_what_torch_computes(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], limit: int
) -> None:
    """In bf16, with equal shapes in one stack, and in stacks of two matrices."""
    monkeypatch.setattr(matrix_exchange, "STACK_BYTES", limit)
    ours, theirs = _parameters(SHAPES), _parameters(SHAPES)
    optimizer = Muon(ours, **options)
    _step(ours, optimizer)
    _step(theirs, torch.optim.Muon(theirs, **options))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-3 * float(options.get("lr", 1e-3)))
    sizes = [len(stack.matrices) for stack in optimizer._exchange[1].stacks]  # type: ignore[index]
    assert sorted(sizes) == ([1, 1, 3] if limit == 2**28 else [1, 1, 1, 2])


@pytest.mark.gpu
def test_a_graph_of_a_gpu_holds_a_step() -> None:
    """With a rate on the device that changes between replays."""
    rate = torch.tensor(0.1, device="cuda")
    plain, graphed = ([nn.Parameter(p.detach().cuda()) for p in _parameters(SHAPES)] for _ in range(2))
    optimizers = [Muon(parameters, lr=rate) for parameters in (plain, graphed)]
    for parameters, optimizer in zip((plain, graphed), optimizers, strict=True):
        for p in parameters:
            p.grad = p.detach() + 1
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for number in (0.1, 0.05):
        rate.fill_(number)
        optimizers[0].step()
        graph.replay()
        assert all(torch.equal(p, q) for p, q in zip(plain, graphed, strict=True))


def test_three_dimensions_are_a_stack() -> None:
    (stack,), matrices = _parameters([(3, 8, 6)]), [nn.Parameter(m.clone()) for m in _parameters([(3, 8, 6)])[0]]
    _step([stack], Muon([stack]))
    optimizer = torch.optim.Muon(matrices)
    for step in range(3):
        gradients = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(step))
        for p, gradient in zip(matrices, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in matrices]), rtol=0, atol=1e-6)


def test_half_precision_rounds_once() -> None:
    """Weights are as small as updates, and the rate is no number of bf16."""
    (p,) = _parameters([(16, 24)])
    half, single = (nn.Parameter((p.detach() / 1000).bfloat16().to(kind)) for kind in (torch.bfloat16, torch.float32))
    for parameter in (half, single):
        parameter.grad = p.detach().bfloat16().to(parameter.dtype)
        Muon([parameter], lr=0.003, weight_decay=0.0, momentum=0.0).step()
    assert torch.equal(half, single.bfloat16())


def test_groups_have_options_and_a_closure_gives_the_loss() -> None:
    ours, theirs = _parameters([(8, 6), (8, 6)]), _parameters([(8, 6), (8, 6)])
    for kind, parameters in ((Muon, ours), (torch.optim.Muon, theirs)):
        options = [{"lr": 0.1, "ns_steps": 2}, {"lr": 0.2, "momentum": 0.3}]
        groups = [{"params": [p], **some} for p, some in zip(parameters, options, strict=True)]
        optimizer: Any = kind(groups)
        for p in parameters:
            p.grad = p.detach().clone()
        assert optimizer.step(lambda: 7.0) == 7.0
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_fxpar_names_it_with_the_arguments_of_torch() -> None:
    assert fxpar.optim.Muon is Muon
    assert inspect.signature(Muon) == inspect.signature(torch.optim.Muon)
    (group,) = Muon(_parameters([(4, 4)]), 0.1, 0.2, 0.3, False).param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"], group["nesterov"]) == (0.1, 0.2, 0.3, False)


# Errors.


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"lr": -0.1}, "lr"),
        ({"lr": torch.ones(2)}, "lr"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"momentum": -1}, "momentum"),
        ({"eps": -1e-7}, "eps"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"ns_steps": 2.0}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ({"adjust_lr_fn": "spectral"}, "adjust_lr_fn"),
        ({"betas": (0.9, 0.95)}, "Muon"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], where: str) -> None:
    kind, place, _, remedy = refusal(lambda: Muon(_parameters([(4, 4)]), **options))
    assert (kind, place) == ("InputError", where)
    assert remedy


def test_parameters_without_matrices_are_refused_by_name() -> None:
    vector, picture = _parameters([(4,), (2, 3, 4, 4)])
    _, where, reason, remedy = refusal(lambda: Muon([*_parameters([(4, 4)]), vector]))
    assert (where, reason) == ("parameter 1 of group 0", "has 1 dimensions, and Muon orthogonalises matrices")
    assert "AdamW" in remedy
    named: Any = [("conv.weight", picture)]
    assert refusal(lambda: Muon(named))[1] == "conv.weight"
    (turned,) = (nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)),)
    assert "torch.complex64" in refusal(lambda: Muon([turned]))[2]
    optimizer = Muon(_parameters([(4, 4)]))
    with pytest.raises(InputError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [vector]})
    assert len(optimizer.param_groups) == 1


def test_wrong_uses_on_ranks_are_refused(world2: World) -> None:
    found: list[Found] = world2.run(muon_jobs.refused, "gpt2", TP2)
    assert found[0].keys() == found[1].keys()
    for rank in found:
        assert rank["vector"][1] == "transformer.h.0.ln_1.weight"
        assert rank["several modules"][1] == "weight"
        assert "make one optimizer for each module" in rank["several modules"][3]
        assert "a step of Muon" in rank["order"][2]
        assert "fxpar.optim.Muon" in rank["torch's"][3]
