"""Optimizers, clipping, state dicts and averages of torch are those of one process; the rest is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.runtime.sharded import IS_DISPATCHED
from tests.runtime import ecosystem, refused
from tests.runtime.jobs import Found
from tests.runtime.test_training import assert_same
from tests.runtime.world import World

STEPS = 20


def assert_ranks_equal(first: Any, other: Any) -> None:
    assert type(first) is type(other)
    if isinstance(first, dict):
        assert first.keys() == other.keys()
        for key, value in first.items():
            assert_ranks_equal(value, other[key])
    elif isinstance(first, Tensor):
        assert torch.equal(first, other)
    else:
        assert _listed(first) == _listed(other)


def _listed(value: object) -> object:
    """With lists for tuples, which torch's state dicts do not keep."""
    if isinstance(value, (list, tuple)):
        return [_listed(item) for item in value]
    return {key: _listed(item) for key, item in value.items()} if isinstance(value, dict) else value


def tensors(nest: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors of a nest by path."""
    if isinstance(nest, dict):
        return {n: v for key, value in nest.items() for n, v in tensors(value, f"{path}{key} ").items()}
    return {path: nest} if isinstance(nest, Tensor) else {}


# Fused q, k and v and a padded vocabulary; four ranks that share heads, tied words and sequence parallelism.
@pytest.mark.parametrize(
    ("ranks", "name", "kind"),
    [
        (2, "gpt2", "foreach"),
        *(
            pytest.param(*row, marks=pytest.mark.matrix)
            for row in [(2, "gpt2", "fused"), (2, "gpt2", "loop"), (2, "bert", "foreach")]
        ),
        *(pytest.param(4, "llama", kind, marks=pytest.mark.matrix) for kind in ("loop", "foreach", "fused")),
    ],
)
def test_twenty_steps_of_a_training_script(request: pytest.FixtureRequest, ranks: int, name: str, kind: str) -> None:
    wanted = ecosystem.train(name, kind, STEPS)
    found = request.getfixturevalue(f"world{ranks}").run(ecosystem.train, name, kind, STEPS)
    for one in found:
        assert_ranks_equal(one, found[0])
    assert found[0]["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    assert_same(found[0]["state"], wanted["state"], 1e-6)
    assert_same(found[0]["moments"], wanted["moments"], 1e-5)


def test_every_optimizer_that_treats_elements_by_themselves(world2: World) -> None:
    wanted = ecosystem.optimizers()
    first, other = world2.run(ecosystem.optimizers)
    assert_ranks_equal(first, other)
    for name, state in wanted.items():
        # Signs of what is all rounding differ.
        assert_same(first[name], state, 2e-3 if name in ("Rprop", "Lion") else 2e-6)


def test_all_ranks_skip_the_step_in_which_one_finds_an_infinity(world2: World) -> None:
    wanted = ecosystem.scaled()
    first, other = world2.run(ecosystem.scaled)
    assert first["scales"] == other["scales"] == wanted["scales"] == [64.0, 32.0, 32.0, 64.0]
    assert_ranks_equal(first, other)
    assert_same(first["state"], wanted["state"])


def test_values_of_whole_tensors_and_gradients_of_them(world2: World) -> None:
    for job in (ecosystem.values, ecosystem.penalties):
        wanted = job()
        for found in world2.run(job):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-6, msg=f"{name} of {job.__name__}")


@pytest.mark.parametrize(("ranks", "name"), [(2, "gpt2"), pytest.param(4, "llama", marks=pytest.mark.matrix)])
def test_torch_s_state_dicts_resume(request: pytest.FixtureRequest, ranks: int, name: str, tmp_path: Path) -> None:
    wanted: Found = ecosystem.resumed(name, tmp_path / "one")
    found = request.getfixturevalue(f"world{ranks}").run(ecosystem.resumed, name, tmp_path / "many")
    for one in found:
        assert_ranks_equal(one, found[0])
        for way in ("dcp", "full", "rank 0", "own"):
            assert_ranks_equal(one[way], one["on"])
    for key in ("saved", "on"):
        groups = [repr(one[key]["optimizer"]["param_groups"]) for one in (found[0], wanted)]
        assert groups[0].replace("[", "(").replace("]", ")") == groups[1].replace("[", "(").replace("]", ")")
        assert_same(tensors(found[0][key]["model"]), tensors(wanted[key]["model"]), 1e-6)
        assert_same(tensors(found[0][key]["optimizer"]["state"]), tensors(wanted[key]["optimizer"]["state"]), 1e-6)


def test_optimizers_that_mix_elements_are_refused_in_their_first_step(world2: World) -> None:
    first, other = world2.run(refused.optimizers)
    assert first == other
    told = {name: what for name, what in first.items() if "unchanged" not in name}
    assert told.keys() == {"Adafactor", "Muon", "LBFGS", "Shampoo"} | ({"ZeRO"} if IS_DISPATCHED else set())
    for name, (kind, where, reason, remedy) in told.items():
        assert kind == "InputError", name
        assert where in ("embed.weight", "up.weight", "up.bias", "down.weight"), name
        assert "does not treat each element by itself" in reason, name
        assert "AdamW, Adagrad, Lion) and fxpar.optim.Muon work" in remedy, name


def test_calls_that_would_differ_between_ranks_are_refused(world2: World, tmp_path: Path) -> None:
    first, other = world2.run(refused.calls, tmp_path)
    assert first == other
    for name, (kind, where, reason, remedy) in first.items():
        assert kind == "InputError", name
        assert where, name
        assert reason, name
        assert remedy, name
    assert first["random"][2].endswith("would draw numbers of each rank's own")
    assert "under torch.no_grad()" in first["in a graph"][3]
    assert first["vector"][1] == "embed.weight"
    assert first["exchanged"][1] == "up.weight"
    assert first["old weights"][1] == "SGD"


def test_wrappers_and_hooks_are_refused_by_name(world2: World) -> None:
    first, other = world2.run(refused.wrappers)
    assert first == other
    assert first.pop("same")
    assert first.pop("trains") > 0
    places = {name: where for name, (_, where, _, _) in first.items()}
    named = ("DistributedDataParallel", "fully_shard", "FullyShardedDataParallel", "torch.compile", "DataParallel")
    for name in (*named, "compile()"):
        assert places[name] == name
    assert places["of a part"] == "DistributedDataParallel"
    assert places["fully_shard a part"] == "fully_shard"
    assert places["parallelize_module"] == "distribute_module"
    assert places["forward hook"] == places["own hook"] == places["output"] == "register_forward_hook"
    reasons = {name: reason for name, (_, _, reason, _) in first.items()}
    assert reasons["DDP before"] == "DistributedDataParallel communicates by itself"
    assert reasons["fully_shard before"] == "was sharded by fully_shard, and communicates by itself"
    assert reasons["DataParallel before"] == "DataParallel communicates by itself"
    assert reasons["compile before"] == reasons["compile() before"] == "is compiled already, by torch.compile"
    assert "keeps tensors" in reasons["logging hook before"]
    assert places["compile() before"] == places["backward hook before"] == "up"
    assert places["logging hook before"] == places["logging pre-hook before"] == "up"


def test_hooks_that_change_values_are_in_the_trace(world2: World) -> None:
    assert [round(gap, 6) for gap in world2.run(refused.hooked)] == [0, 0]
