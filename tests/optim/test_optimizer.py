"""`fxpar.Optimizer` on one process and on several: steps are those of torch's optimizers, written by hand."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpar
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import FxparError
from fxpar.runtime import chunked_step
from fxpar.runtime.sharded import local_of
from tests.optim import optimizer_jobs as jobs
from tests.products import few
from tests.runtime import models
from tests.runtime.shard_jobs import Found, batches, build, module
from tests.runtime.test_training import assert_same
from tests.runtime.world import World

ONE = ("none", 1, 1)
MESHES = [("none", 2, 1), ("optimizer", 1, 2), ("parameters", 1, 2), ("parameters", 2, 2), ("gradients", 1, 4)]
Fixture = pytest.FixtureRequest


def ran(request: Fixture, mesh: tuple[str, int, int], job: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
    ranks = mesh[1] * mesh[2] * more.get("pp", 1)
    call = partial(job, **more)
    results = [call(*args)] if ranks == 1 else request.getfixturevalue(f"world{ranks}").run(call, *args)
    return list(results)


@cache
def expected(algorithm: str, norm_type: float, count: int) -> Found:
    return jobs.expected(algorithm, norm_type, count)


def assert_alike(found: Found, wanted: Found, tolerance: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], abs=tolerance)
    if "norms" in wanted:
        assert found["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
    assert_same(found["state"], wanted["state"], tolerance)


CASES = [
    (mesh, algorithm, norm_type, inside)
    for mesh in (ONE, *MESHES)
    for algorithm in jobs.OPTIONS
    for norm_type in (2.0, math.inf, 1.0, 3)
    for inside in (False, True)
]
EVERY_TIME = [
    (ONE, "sgd", 3, False),
    (("none", 2, 1), "adamw", math.inf, True),
    (("parameters", 1, 2), "adam", 1.0, False),
    (("parameters", 2, 2), "adamw", 2.0, True),
]


@pytest.mark.parametrize(("mesh", "algorithm", "norm_type", "inside"), few(CASES, EVERY_TIME))
def test_groups_clipping_and_rates_are_those_of_a_script(
    request: Fixture, mesh: tuple[str, int, int], algorithm: str, norm_type: float, inside: bool
) -> None:
    wanted = expected(algorithm, float(norm_type), 3)
    for found in ran(request, mesh, jobs.trained, mesh, algorithm, norm_type, 3, inside):
        assert_alike(found, wanted)


@pytest.mark.parametrize(
    ("mesh", "inside"), few([(mesh, True) for mesh in (ONE, *MESHES)], [(ONE, True), (("parameters", 2, 2), True)])
)
def test_rules_give_matrices_to_muon(request: Fixture, mesh: tuple[str, int, int], inside: bool) -> None:
    wanted = jobs.matrices_by_hand()
    for found in ran(request, mesh, jobs.matrices, mesh, inside):
        assert_alike(found, wanted)


CHUNKED = [
    (mesh, algorithm, inside) for mesh in (ONE, *MESHES) for algorithm in jobs.OPTIONS for inside in (False, True)
]
CHUNKED_NOW = [
    *((ONE, algorithm, False) for algorithm in jobs.OPTIONS),
    (("parameters", 1, 2), "adamw", True),
    (("none", 2, 1), "sgd", False),
]


@pytest.mark.parametrize(("mesh", "algorithm", "inside"), few(CHUNKED, CHUNKED_NOW))
def test_chunks_of_parameters_step_as_the_whole(
    request: Fixture, mesh: tuple[str, int, int], algorithm: str, inside: bool
) -> None:
    """Chunks of 37 elements, which cut parameters and hold parts of several, of three groups."""
    wanted = expected(algorithm, 2.0, 1)
    for found in ran(request, mesh, jobs.trained, mesh, algorithm, 2.0, 1, inside, {"offload": True}):
        assert_alike(found, wanted)


@pytest.mark.parametrize("norm_type", few([2.0, math.inf, 1.0], [math.inf]))
def test_stages_of_a_pipeline_clip_together(world4: World, norm_type: float) -> None:
    """Tied words on the first and the last stage count once; some groups are empty on a stage."""
    wanted = jobs.expected("adamw", norm_type, 2, kind=models.Deep)
    more: dict[str, Any] = {"kind": models.Deep, "pp": 2, "microbatches": 2}
    for found in world4.run(partial(jobs.trained, **more), ("optimizer", 1, 2), "adamw", norm_type, 2, True):
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert_same(found["state"], wanted["state"], 1e-5)


MAIN = [(mesh, offload) for mesh in (ONE, *MESHES) for offload in (False, True)]


@pytest.mark.parametrize(
    ("mesh", "offload"), few(MAIN, [(ONE, False), (("parameters", 1, 2), True), (("none", 2, 1), False)])
)
def test_main_weights_are_what_a_script_keeps(request: Fixture, mesh: tuple[str, int, int], offload: bool) -> None:
    """Bfloat16 weights follow float32 ones, which small steps would not change otherwise."""
    wanted = jobs.half_by_hand(2)
    for found in ran(request, mesh, jobs.half, mesh, 2, offload=offload):
        # A sum of ranks in bfloat16 rounds otherwise than that of one process.
        assert_same(found["state"], wanted["state"], 0 if mesh == ONE else 2e-2)
        assert found["dtypes"] == {"torch.float32"}
        assert found["rounded"]


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, id="-".join(map(str, mesh))) for mesh in (ONE, ("parameters", 1, 2))]
)
def test_norms_of_gradients_in_half_precision_are_not_rounded(request: Fixture, mesh: tuple[str, int, int]) -> None:
    """Bfloat16 has eight bits, with which a norm would be off by up to 0.4 %."""
    for norm, precise in ran(request, mesh, jobs.half_norm, mesh):
        assert norm == pytest.approx(precise, rel=1e-5)
        assert abs(float(torch.tensor(precise).bfloat16()) / precise - 1) > 1e-4


@pytest.mark.parametrize("through_data", [False, True])
def test_main_weights_follow_weights_that_were_written(through_data: bool) -> None:
    assert jobs.loaded_weights(through_data) == (True, True)


def test_a_save_without_main_weights_goes_on_with_them(tmp_path: Path) -> None:
    """They are the weights then, and at the next step what AdamW makes of them in float32."""
    model = build("none", 1, 1, precision="bf16_weights")
    part = batches(1)[0]
    before = fxpar.Optimizer(model, lr=1e-2)
    model.train_step(part, optimizer=before)
    model.save_training(tmp_path, before)
    after = fxpar.Optimizer(model, lr=1e-2, main_weights=True)
    model.resume_training(tmp_path, after)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.train_step(part, optimizer=after)
    for name, p in model.named_parameters():
        if p in after.state:
            main = after.state[p]["main"]
            assert torch.equal(main.bfloat16(), p)
            assert 0 < float((main - weights[name]).abs().max()) < 0.02
            assert after.state[p]["step"] == 2


@pytest.mark.parametrize(("options", "mesh"), [({"main_weights": True, "offload": True}, ONE), ({}, ONE)])
def test_a_save_goes_on_on_other_ranks(
    world2: World, tmp_path: Path, options: dict[str, Any], mesh: tuple[str, int, int]
) -> None:
    """Steps after a save, of chunks of other sizes; also where the optimizer had a state before it was loaded."""
    wanted = jobs.saved(tmp_path, mesh, **options)
    again = jobs.resumed(tmp_path, mesh, **options)
    assert again["losses"] == wanted["losses"]
    assert_same(again["state"], wanted["state"], 0)
    for found in world2.run(partial(jobs.resumed, **options), tmp_path, ("parameters", 1, 2)):
        assert_same(found["state"], wanted["state"], 2e-2)


def test_a_state_is_loaded_over_another(tmp_path: Path) -> None:
    """Of a training that went on: numbers of pieces, and values in the memory that is stepped."""
    options = {"main_weights": True, "offload": True}
    wanted = jobs.saved(tmp_path, ONE, **options)
    again = jobs.resumed(tmp_path, ONE, steps=3, **options)
    assert again["losses"] == wanted["losses"]
    assert_same(again["state"], wanted["state"], 0)


POISONED = [(mesh, nonfinite) for mesh in (ONE, *MESHES) for nonfinite in ("raise", "skip")]


@pytest.mark.parametrize(
    ("mesh", "nonfinite"), few(POISONED, [(ONE, "raise"), (("none", 2, 1), "raise"), (("parameters", 1, 2), "skip")])
)
def test_a_step_with_nan_names_the_gradient(request: Fixture, mesh: tuple[str, int, int], nonfinite: str) -> None:
    """All ranks name it, whichever has the NaN, and nothing changes; the step after it is as if there was none."""
    results = ran(request, mesh, jobs.poisoned, mesh, nonfinite)
    for found in results:
        assert found["unchanged"]
        assert math.isnan(found["norm"])
        assert (found["named"], found["named then"]) == ("up.weight", None)
        assert ("gradient of up.weight: is not finite" in found["error"]) == (nonfinite == "raise")
        assert_same(found["state"], results[0]["state"], 0)


@pytest.mark.matrix
def test_a_stage_names_a_gradient_of_another(world4: World) -> None:
    more: dict[str, Any] = {"kind": models.Deep, "pp": 2, "microbatches": 2}
    for found in world4.run(partial(jobs.poisoned, **more), ("none", 1, 2), "raise"):
        assert found["unchanged"]
        assert found["named"] == "down.2.weight"
        assert "gradient of down.2.weight: is not finite" in found["error"]


@pytest.mark.parametrize(("shard", "nonfinite"), [("none", "skip"), ("optimizer", "ignore")])
def test_graphs_change_no_bit(request: Fixture, shard: str, nonfinite: str) -> None:
    """With the step in the graph, of two shapes in turn; a step of weights that are infinite is left out."""
    mesh = (shard, 1, 1 if shard == "none" else 2)
    for found in ran(request, mesh, jobs.replayed, shard, mesh[2], nonfinite):
        assert found["same"]
        assert all(norm == flag or norm != norm for _, norm, flag, *_ in found["seen"])
        if nonfinite == "skip":
            assert [bool(name) for *_, name in found["seen"]] == [step == 5 for step in range(8)]
            assert all(math.isfinite(norm) for step, (_, norm, *_) in enumerate(found["seen"]) if step != 5)


def test_rates_of_a_loaded_state_reach_a_replayed_step() -> None:
    first, loaded, none = jobs.rates()
    assert first == pytest.approx(1e-2, rel=1e-2)
    assert 0 < loaded < 2e-4
    assert none == 0


@pytest.mark.parametrize("nonfinite", ["ignore", "raise"])
@pytest.mark.parametrize("how", ["plain", "unscaled", "inside"])
def test_a_scaler_skips_steps_that_overflow(how: str, nonfinite: str) -> None:
    found = jobs.scaled(ONE, how, nonfinite)
    skipped = sum(after < before for before, after in zip([2.0**24, *found["scales"]], found["scales"], strict=False))
    assert skipped > 2
    assert found["steps"] == {16.0 - skipped}
    other = jobs.scaled(ONE, "unscaled", "ignore")
    assert_same(found["state"], other["state"], 1e-6)


@pytest.mark.parametrize("first", [0.0, 0.9])
def test_groups_of_chunks_may_have_other_states(first: float) -> None:
    """Momentum in one group and none in another, whichever comes first."""
    states = []
    for offload in (False, True):
        model = module("none", 1, 1)
        rules: dict[Any, dict[str, Any]] = {"*.weight": {"momentum": 0.9 - first}}
        optimizer = fxpar.Optimizer(model, "sgd", lr=0.1, momentum=first, groups=rules, offload=offload)
        for _ in range(3):
            model.train_step(batches(1)[0], optimizer=optimizer)
        states.append(model.full_state_dict())
    assert_same(states[1], states[0], 1e-6)


def test_a_save_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    model = module("none", 1, 1)
    model.save_training(tmp_path, fxpar.Optimizer(model, "sgd"))
    with pytest.raises(FxparError, match="parameter group 0 was stepped by SGD, and is by AdamW"):
        model.resume_training(tmp_path, fxpar.Optimizer(model, "adamw"))


@pytest.mark.parametrize("more", ["", "+main", "+main+offload"])
def test_reports_count_the_state_that_is_there(more: str) -> None:
    model = build("none", 1, 1, precision="bf16_weights")
    chunked_step.CHUNK = 2**25
    optimizer = fxpar.Optimizer(model, main_weights="+main" in more, offload="+offload" in more)
    model.train_step(batches(1)[0], optimizer=optimizer)
    (rank,) = model.report(optimizer=f"adamw{more}").ranks
    states = list(optimizer.state.values())
    there = sum(value.nbytes for state in states for key, value in state.items() if key != "step")
    trained = sum(p.numel() for p in model.parameters() if p in optimizer.state)
    casts = trained * 4 if more else 0
    staged = there if "+offload" in more else 0
    assert rank.optimizer + rank.host == there + 4 * len(states) + casts + staged
    assert rank.host == staged


def test_the_page_shows_what_works() -> None:
    page = Path(__file__).parents[2].joinpath("docs/optimizers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    model = build("none", 1, 1)
    names: dict[str, Any] = {"fxpar": fxpar, "torch": torch, "nn": nn, "model": model, "batches": batches(2)}
    before = model.full_state_dict()
    rates = []
    for block in blocks:
        exec(block.replace('"lm_head*": adamw, ', ""), names)  # which this model has not
        rates.append([group["lr"] for group in names["optimizer"].param_groups])
    assert rates[0] == pytest.approx([3e-4] * 3, rel=1e-3)
    assert rates[1] == [0.02, 3e-4, 3e-4]
    assert not torch.equal(before["up.weight"], model.full_state_dict()["up.weight"])


# What is no argument.


def made(*args: Any, **options: Any) -> Callable[[ParallelModule], object]:
    return lambda module: fxpar.Optimizer(module, *args, **options)


class Lars(torch.optim.SGD):
    """Makes steps of a length that follows a parameter's norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=float(group["lr"]) * float(parameter.norm()))


class Eager(torch.optim.Adagrad):
    """Makes its state at once."""


def _frozen(module: ParallelModule) -> object:
    module.get_parameter("up.weight").requires_grad_(False)
    optimizer = fxpar.Optimizer(module, offload=True)
    module.get_parameter("up.weight").requires_grad_(True)
    module.train_step(batches(1)[0])
    return optimizer.step()


def _with_momentum(module: ParallelModule) -> object:
    optimizer = fxpar.Optimizer(module, "sgd", lr=0.1, offload=True)
    optimizer.param_groups[0]["momentum"] = 0.9
    return module.train_step(batches(1)[0], optimizer=optimizer)


def _added(module: ParallelModule) -> object:
    optimizer = fxpar.Optimizer(module)
    optimizer.add_param_group({"params": [torch.zeros(1)]})
    return optimizer


REFUSED: dict[str, tuple[Callable[[ParallelModule], object], str]] = {
    "parameters": (
        lambda m: fxpar.Optimizer(m.parameters()),  # type: ignore[arg-type]
        "module: must be a parallel module, got a generator",
    ),
    "a name": (made("lion"), "algorithm: no optimizer has the name 'lion'"),
    "no class": (made(torch.optim), "algorithm: must be a class of optimizers"),
    "an option": (made(learning_rate=1.0), "learning_rate: AdamW has no option of this name; choose from lr"),
    "an option of a rule": (made(groups={"*": {"wd": 0.0}}), "wd: AdamW has no option of this name"),
    "a value": (made(lr=-1.0), "options of AdamW: Invalid learning rate: -1.0"),
    "a value of a rule": (made(groups={"up*": {"lr": -1.0}}), "options of AdamW: Invalid learning rate: -1.0"),
    "a kind of value": (made(lr="fast"), "options of AdamW: "),
    "no options": (made(groups={"up*": 0.0}), "groups['up*']: must be options, got 0.0"),
    "nothing selected": (made(groups={"upp*": {}}), "groups['upp*']: selects no parameter; names look like"),
    "no class selected": (made(groups={nn.Conv2d: {}}), "groups[Conv2d]: selects no parameter"),
    "no selector": (made(groups={3: {}}), "groups[3]: selects no parameters: a int"),
    "norm": (made(max_norm=-1.0), "max_norm: must be a number of at least 0, got -1.0"),
    "order": (made(norm_type=0), "norm_type: must be a number above 0, got 0"),
    "nonfinite": (made(nonfinite="warn"), "nonfinite: must be one of them, got 'warn'"),
    "skip": (made(torch.optim.NAdam, nonfinite="skip"), "nonfinite='skip': cannot skip a step on the device"),
    "LBFGS": (made(torch.optim.LBFGS), "algorithm LBFGS: computes the loss several times in a step"),
    "Muon of a vector": (made("muon"), "has 1 dimensions, and Muon orthogonalises matrices; give it to AdamW"),
    "Muon in chunks": (
        made("muon", groups={lambda name, parameter: parameter.ndim < 2: {"algorithm": "adamw"}}, offload=True),
        "algorithm Muon: steps whole matrices, and not chunks of elements",
    ),
    "parts of a norm": (made(Lars, lr=0.0, offload=True), "Lars: makes other steps of a parameter than of its parts"),
    "early state": (made(Eager, offload=True), "Eager: makes its state before its first step"),
    "main weights of float32": (made(main_weights=True), "main_weights: no parameter is in half precision"),
    "state that is new": (_with_momentum, "an option of a parameter group: needs a state momentum_buffer now"),
    "twice": (
        lambda m: m.train_step(batches(1)[0], optimizer=fxpar.Optimizer(m, max_norm=1.0), max_norm=2.0),
        "max_norm: the optimizer itself clips to 1.0",
    ),
    "not looked at": (lambda m: fxpar.Optimizer(m).nonfinite_gradient(), "nonfinite='ignore': looks at no gradients"),
    "torch's state": (
        lambda m: fxpar.Optimizer(m, offload=True).load_state_dict({}),
        "load_state_dict: torch would load main weights in half precision",
    ),
    "frozen": (_frozen, "was frozen when the optimizer was made, and has a gradient now"),
    "a group": (_added, "a parameter group: cannot be added"),
    "a list of groups": (made(groups=[{"lr": 0.1}]), "groups: must be a dict of rules, got [{'lr': 0.1}]"),
    "two ways": (made(fused=True, foreach=True), "options of AdamW: `fused` and `foreach`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_argument_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(FxparError) as error:
        call(module("none", 1, 1))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"nonfinite": "raise"}, "Optimizer: waits for the host"), ({"offload": True}, "Optimizer: waits for the host")],
)
def test_a_graph_refuses_what_waits_for_the_host(options: dict[str, Any], text: str) -> None:
    model = build("none", 1, 1, cuda_graphs=fxpar.CudaGraphs("full_iteration"))
    optimizer = fxpar.Optimizer(model, **options)
    part = batches(1)[0]
    with pytest.raises(FxparError, match=text):
        model.train_step(part, optimizer=optimizer)
    model.train_step(part)  # as the error says
    optimizer.step()
    model.close()


def test_a_host_with_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_step, "_free_bytes", lambda: 2000)
    chunked_step.check_host(1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(FxparError, match=r"offload: needs 0\.0 GiB of the host's memory for 4 ranks"):
        chunked_step.check_host(1000)
    with pytest.raises(FxparError, match="offload: needs"):
        fxpar.Optimizer(module("none", 1, 1), offload=True)


def test_a_rule_may_have_another_algorithm() -> None:
    """It has none of the others' options, and one state and one list of groups hold both."""
    model = module("none", 1, 1)
    rules: dict[Any, Any] = {
        nn.Embedding: {"algorithm": "sgd", "lr": 0.5},
        lambda name, parameter: parameter.ndim < 2: {"weight_decay": 0.0},
    }
    optimizer = fxpar.Optimizer(model, lr=1e-2, weight_decay=0.3, groups=rules)
    part = batches(1)[0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.train_step(part)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    named = dict(model.named_parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0, 0.0]
    assert torch.equal(named["embed.weight"], before["embed.weight"] - 0.5 * gradients["embed.weight"])
    assert "exp_avg" not in optimizer.state[named["embed.weight"]]
    for name in ("up.weight", "up.bias"):
        decay = 1 - 1e-2 * 0.3 if name == "up.weight" else 1.0
        moved = before[name] * decay - 1e-2 * gradients[name].sign()
        assert torch.allclose(named[name], moved, atol=1e-4), name
        assert optimizer.state[named[name]]["step"] == 1
    state = optimizer.state_dict()
    other = fxpar.Optimizer(model, lr=1e-2, weight_decay=0.3, groups=rules)
    other.load_state_dict(state)
    other.param_groups[0]["lr"] = 0.0
    before = {name: p.detach().clone() for name, p in named.items()}
    other.step()  # the groups that were loaded are those that step
    assert torch.equal(named["up.weight"], before["up.weight"])
    assert not torch.equal(named["up.bias"], before["up.bias"])
    assert other.state[named["up.bias"]]["step"] == 2


def test_parameters_of_other_memory_formats_are_stepped_in_their_order() -> None:
    """A weight that is a transposed view, with a gradient that is not."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).square().mean()

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    results = []
    for options in ({}, {"offload": True}):
        model = fxpar.parallelize(Turned(), fxpar.Plan(), (x,))
        optimizer = fxpar.Optimizer(model, lr=0.1, **options)  # type: ignore[arg-type]
        chunked_step.CHUNK = 4
        model.train_step((x,))
        weight = model.get_parameter("weight")
        assert weight.grad is not None
        weight.grad = weight.grad.clone(memory_format=torch.contiguous_format)
        optimizer.step()
        results.append(local_of(weight).clone())
        if options:
            assert torch.equal(optimizer.state[weight]["exp_avg"].sign(), weight.grad.sign())
    assert torch.equal(*results)


def _stepped(model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    for part in batches(3):
        model.train_step(part, optimizer=optimizer)


class Handing(torch.optim.AdamW):
    """Hands over what it does not name."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def test_a_class_takes_the_options_of_its_base() -> None:
    states = []
    for kind in (Handing, torch.optim.AdamW):
        for offload in (False, True):
            model = module("none", 1, 1)
            optimizer = fxpar.Optimizer(model, kind, lr=1e-2, weight_decay=0.3, offload=offload)
            _stepped(model, optimizer)
            states.append(model.full_state_dict())
    for state in states[1:]:
        assert_same(state, states[0], 1e-6)


def test_a_scheduler_moves_momenta() -> None:
    """Of the first algorithm; groups of others get none of its options."""
    optimizer = fxpar.Optimizer(module("none", 1, 1), groups={nn.Embedding: {"algorithm": "sgd", "lr": 0.1}})
    assert "betas" not in optimizer.param_groups[1]
    optimizer = fxpar.Optimizer(module("none", 1, 1), groups=jobs.RULES)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=4)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.95, 0.999)] * 3
    optimizer.step()
    scheduler.step()
    assert all(group["betas"][0] < 0.95 for group in optimizer.param_groups)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_empty_parameters_and_float64_are_clipped_as_by_torch(norm_type: float) -> None:
    """Fused kernels divide by a float32 alone, and torch has no largest element of none."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6, dtype=torch.float64).view(2, 3))
            self.none = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).square().mean() + self.none.sum()

    x = torch.ones(4, 2, dtype=torch.float64)
    model, weight = fxpar.parallelize(Wide(), fxpar.Plan(), x), Wide().weight
    optimizer = fxpar.Optimizer(model, lr=1e-2, eps=1e-2, max_norm=0.01, norm_type=norm_type)
    by_hand = torch.optim.AdamW([weight], lr=1e-2, eps=1e-2)
    for _ in range(2):
        model.train_step(x, optimizer=optimizer)
        by_hand.zero_grad()
        (x @ weight).square().mean().backward()
        norm = nn.utils.clip_grad_norm_([weight], 0.01, norm_type)
        by_hand.step()
        assert optimizer.norm is not None
        assert float(optimizer.norm) == pytest.approx(float(norm), abs=1e-14)
    assert torch.allclose(model.get_parameter("weight"), weight, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("first", "other"), [(0.0, 0.9), (0.9, 0.0)])
def test_chunks_keep_what_their_groups_keep(tmp_path: Path, first: float, other: float) -> None:
    """One group has a momentum, and one has none."""
    chunked_step.CHUNK = 37
    results: list[list[Any]] = []
    groups: dict[Any, Any] = {"*.bias": {"momentum": other}}
    for offload in (False, True):
        states: list[Any] = []
        for _ in range(2):  # the second one goes on from the save of the first one
            model = module("none", 1, 1)
            optimizer = fxpar.Optimizer(model, "sgd", groups=groups, lr=0.1, momentum=first, offload=offload)
            if states:
                model.resume_training(tmp_path, optimizer)
            _stepped(model, optimizer)
            model.save_training(tmp_path, optimizer, position=len(states))
            states.append(model.full_state_dict())
        results.append(states)
    for plain, chunked in zip(*results, strict=True):
        assert_same(chunked, plain, 1e-6)


@pytest.mark.parametrize("more", [{}, {"offload": True}])
@pytest.mark.parametrize("clears", [True, False])
def test_a_state_that_is_cleared_or_exchanged_is_gone(more: dict[str, Any], clears: bool) -> None:
    model = build("none", 1, 1)
    optimizer = fxpar.Optimizer(model, lr=1e-2, **more)
    _stepped(model, optimizer)
    fresh = build("none", 1, 1)
    _stepped(fresh, torch.optim.SGD(fresh.parameters(), lr=0.0))  # as many draws
    fresh.load_state_dict(model.state_dict())
    if clears:
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)
    _stepped(fresh, fxpar.Optimizer(fresh, lr=1e-2, **more))
    _stepped(model, optimizer)
    assert_same(model.full_state_dict(), fresh.full_state_dict(), 0)


@pytest.mark.parametrize("offload", [True, False])
def test_main_weights_are_not_lost_in_an_optimizer_without(tmp_path: Path, offload: bool) -> None:
    jobs.saved(tmp_path, ONE, main_weights=True)
    with pytest.raises(FxparError, match="would lose; make the optimizer with main_weights=True"):
        jobs.resumed(tmp_path, ONE, offload=offload)
