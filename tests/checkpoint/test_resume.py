"""A training that stops and goes on is the one that never stopped."""

import json
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fxpar.checkpoint.training_saves import _sealed
from fxpar.errors import CheckpointError, InputError
from tests.checkpoint import training_jobs as jobs
from tests.checkpoint.training_jobs import Training
from tests.runtime.jobs import Found
from tests.runtime.world import JOBS, RankFailed, World


def assert_equal(found: Found, wanted: Found) -> None:
    assert found["losses"] == wanted["losses"]
    assert found["step"] == wanted["step"]
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        assert torch.equal(found["weights"][name], value), name


@pytest.mark.parametrize("precision", [pytest.param("as_is", marks=pytest.mark.matrix), "bf16"])
def test_six_steps_and_six_more_are_twelve(world2: World, tmp_path: Path, precision: str) -> None:
    wanted = world2.run(jobs.through, 12, precision)
    first = world2.run(jobs.first_half, tmp_path, 6, precision)
    second = world2.run(jobs.second_half, tmp_path, 6, precision)
    for whole, before, after in zip(wanted, first, second, strict=True):
        assert_equal({**after, "losses": before["losses"] + after["losses"]}, whole)
        assert whole["losses"][-1] < whole["losses"][0] - 0.5
    # One process reads what two ranks wrote.
    alone = jobs.second_half(tmp_path, 6, precision)
    tolerance = 1e-5 if precision == "as_is" else 2e-2
    assert alone["losses"] == pytest.approx(second[0]["losses"], rel=tolerance)


@pytest.mark.parametrize(
    "moves",
    [[(1, 4), (4, 1)], pytest.param([(1, 4), (2, 4), (2, 1), (4, 2)], marks=pytest.mark.matrix)],
    ids=["1 and 4", "all"],
)
def test_shared_heads_and_padded_words_resume_on_other_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, moves: list[tuple[int, int]]
) -> None:
    """Saved by so many ranks, taken up by so many others."""

    def run(ranks: int, saved_by: int, save: bool) -> list[list[float]]:
        given = (tmp_path / str(saved_by), 3, save)
        if ranks == 1:
            return [jobs.resumed_llama(*given)]
        found: list[list[float]] = request.getfixturevalue(f"world{ranks}").run(jobs.resumed_llama, *given)
        return found

    for ranks in {1, *(before for before, _ in moves)}:
        run(ranks, ranks, True)
    (wanted,) = run(1, 1, False)
    assert wanted[-1] < wanted[0] - 0.01
    for before, behind in moves:
        for losses in run(behind, before, False):
            assert losses == pytest.approx(wanted, abs=1e-5)


def assert_survives(folder: Path, count: int, rank: int, ranks: int) -> None:
    """Kills a save at a call and resumes from what is there."""
    world = World(ranks, JOBS, group_seconds=5.0)
    try:
        with pytest.raises(RankFailed, match="died"):
            world.run(jobs.killed, folder, count, rank)
        for found in world.run(jobs.after_kill, folder):
            # The save before, or the one that was made: at the latest moments it is complete.
            assert found["position"] in (2 * Training.MICRO, 4 * Training.MICRO)
            assert len(found["folders"]) <= 2
            assert all(name.startswith("training-") for name in found["folders"])
    finally:
        world.stop(kill=True)


def test_a_killed_save_leaves_the_last_one(tmp_path: Path) -> None:
    calls = jobs.calls_of_a_save(tmp_path / "counted")
    moment = random.Random(str(tmp_path)).randrange(1, calls)
    print(f"killed at call {moment} of {calls}")
    assert_survives(tmp_path / "killed", moment, -1, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(10))
def test_a_save_killed_on_two_ranks_leaves_the_last_one(tmp_path: Path, part: int) -> None:
    calls = jobs.calls_of_a_save(tmp_path / "counted")
    chance = random.Random(str(tmp_path))
    moment, rank = int(calls * (part + chance.random()) / 10) + 1, chance.choice((-1, 0, 1))
    print(f"rank {rank} killed at call {moment} of some {calls}")
    assert_survives(tmp_path / "killed", moment, rank, 2)


@pytest.mark.parametrize("precision", ["as_is", pytest.param("bf16", marks=pytest.mark.matrix)])
def test_steps_beside_a_save_are_not_in_it(world2: World, tmp_path: Path, precision: str) -> None:
    for rank in world2.run(jobs.beside_steps, tmp_path, precision):
        assert not rank["early"]
        path, waited = rank["paths"]
        assert path == waited
        assert path.name == "training-00000001-step-2"
        assert rank["beside"].keys() == rank["at once"].keys()
        assert all(torch.equal(value, rank["at once"][name]) for name, value in rank["beside"].items())


def test_a_save_counts_by_itself_and_the_next_waits_for_it(world2: World, tmp_path: Path) -> None:
    for names in world2.run(jobs.by_itself, tmp_path):
        assert names == ["training-00000001-step-1", "training-00000002-step-1"]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_full_disk_leaves_the_last_save(world2: World, tmp_path: Path, rank: int) -> None:
    for number, errors in enumerate(world2.run(jobs.on_full_disk, tmp_path, rank)):
        assert len(errors) == 2
        assert all("No space left" in error for error in errors), number
    assert [path.name for path in tmp_path.glob("training-*")] == ["training-00000001-step-1"]


def test_a_training_begins_anew_where_nothing_is_saved(tmp_path: Path) -> None:
    training = Training()
    training.steps(1)
    before = training.model.full_state_dict()
    objects = (training.optimizer, training.scheduler)
    assert training.model.resume_training(tmp_path / "none", *objects, missing="start") is None
    (tmp_path / "training-00000001").mkdir()  # not a save: it has no document
    refused(lambda: training.model.resume_training(tmp_path, *objects, missing="start"), "training.json")
    assert all(torch.equal(value, before[n]) for n, value in training.model.full_state_dict().items())
    with pytest.raises(InputError, match="missing"):
        training.model.resume_training(tmp_path, *objects, missing="begin")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="async_save"):
        training.model.save_training(tmp_path, *objects, async_save="yes")  # type: ignore[arg-type]


def test_every_kind_of_optimizer_goes_on(world2: World, tmp_path: Path) -> None:
    for found in (jobs.with_optimizers(tmp_path / "1"), *world2.run(jobs.with_optimizers, tmp_path / "2")):
        assert found.keys() >= jobs.OPTIMIZERS.keys() - {"Rprop"}
        assert set(found.values()) == {(True, True)}, found


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Training, Path]:
    training = Training()
    training.steps(1)
    return training, training.save(tmp_path)


def refused(action: Callable[[], Any], *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        action()
    for word in words:
        assert word in str(caught.value)
    assert caught.value.remedy


def test_the_files_are_those_of_other_libraries(saved: tuple[Training, Path]) -> None:
    training, path = saved
    weights = load_file(path / "model.safetensors")
    wanted = training.model.full_state_dict()
    assert weights.keys() == wanted.keys() - {"head.weight"}
    assert all(torch.equal(value, wanted[name]) for name, value in weights.items())
    moments = load_file(path / "optimizer.exp_avg.safetensors")
    named = dict(training.model.named_parameters())
    assert moments.keys() == named.keys() - {"unused"}
    assert all(torch.equal(value, training.optimizer.state[named[n]]["exp_avg"]) for n, value in moments.items())
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}
    training.model.load_checkpoint(path)


def test_large_trainings_are_in_several_files(tmp_path: Path) -> None:
    training = Training()
    training.steps(1)
    path = training.model.save_training(tmp_path, training.optimizer, training.scheduler, shard_size=200)
    assert len(list(path.glob("model-*-of-*.safetensors"))) > 3
    assert (path / "optimizer.max_exp_avg_sq.safetensors.index.json").is_file()
    before = training.model.full_state_dict()
    training.steps(1)
    training.model.resume_training(tmp_path, training.optimizer, training.scheduler)
    assert all(torch.equal(value, before[n]) for n, value in training.model.full_state_dict().items())


def test_saves_are_kept_and_a_certain_one_is_resumed(tmp_path: Path) -> None:
    training = Training()
    paths = []
    for _ in range(4):
        training.steps(1)
        paths.append(training.save(tmp_path))
        (tmp_path / "saving-00000009").mkdir()  # of a save that was killed
        if len(paths) == 1:  # moved elsewhere, with a link in its place
            (tmp_path / "saving-00000008").symlink_to(paths[0].rename(tmp_path / "elsewhere"))
            paths[0].symlink_to(tmp_path / "elsewhere")
    assert sorted(tmp_path.glob("training-*")) == paths[2:]
    assert (tmp_path / "elsewhere" / "training.json").is_file()
    position = training.model.resume_training(paths[2], training.optimizer, training.scheduler)
    assert position["microbatch"] == 9
    assert training.model.resume_training(tmp_path, training.optimizer, training.scheduler)["microbatch"] == 12
    with pytest.raises(InputError, match="keep"):
        training.model.save_training(tmp_path, training.optimizer, keep=0)


def test_what_does_not_fit_is_refused(saved: tuple[Training, Path], tmp_path: Path) -> None:
    training, path = saved
    model, optimizer, scheduler = training.model, training.optimizer, training.scheduler
    before = model.full_state_dict()
    refused(lambda: model.resume_training(path, optimizer), "holds a scheduler", "CosineAnnealingLR")
    scaler = torch.amp.GradScaler("cpu")
    refused(lambda: model.resume_training(path, optimizer, scheduler, scaler), "holds no scaler")
    other = torch.optim.lr_scheduler.ConstantLR(optimizer)
    refused(lambda: model.resume_training(path, optimizer, other), "ConstantLR was passed")
    adam = torch.optim.Adam(model.parameters())
    refused(lambda: model.resume_training(path, adam, scheduler), "AdamW and not of torch.optim.adam.Adam")
    one = torch.optim.AdamW(model.parameters())
    refused(lambda: model.resume_training(path, one, scheduler), "2 parameter groups, and the optimizer 1")
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    moved = torch.optim.AdamW([{"params": rest[1:]}, {"params": norms}])
    refused(lambda: model.resume_training(path, moved, scheduler), "group 0 differs: unused is in the save alone")
    foreign = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(InputError, match="is not the module's"):
        model.resume_training(path, foreign, scheduler)
    half = Training("bf16_weights")
    refused(
        lambda: half.model.resume_training(path, half.optimizer, half.scheduler), "is F32[", "BF16[", "Plan(precision"
    )
    refused(lambda: model.resume_training(tmp_path / "nothing", optimizer), "no such folder")
    (tmp_path / "empty").mkdir()
    refused(lambda: model.resume_training(tmp_path / "empty", optimizer), "holds no completed save")
    assert all(torch.equal(value, before[n]) for n, value in model.full_state_dict().items())


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    training = Training()
    model = training.model
    training.steps(1)
    refused(lambda: model.save_training(tmp_path, training.optimizer, position={"at": {3, 4}}), "position['at']", "set")
    state = training.optimizer.state[model.get_parameter("up.weight")]
    state["rows"] = torch.zeros(12)
    refused(lambda: training.save(tmp_path), "optimizer state rows of up.weight", "[12]")
    state["rows"] = len
    refused(lambda: training.save(tmp_path), "optimizer state rows of up.weight", "builtin_function")
    (tmp_path / "file").touch()
    del state["rows"]
    refused(lambda: training.save(tmp_path / "file"), "cannot be written")
    assert not list(tmp_path.glob("training-*"))


def test_damage_is_found_before_anything_is_loaded(saved: tuple[Training, Path]) -> None:
    training, path = saved
    training.steps(1)
    before = training.model.full_state_dict()
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        if file.name == "config.json":
            continue
        for place in (3, len(whole) // 2, len(whole) - 3):
            for damaged in (whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :], whole[:place]):
                file.write_bytes(damaged)
                refused(lambda: training.model.resume_training(path, training.optimizer, training.scheduler), file.name)
        file.unlink()
        refused(lambda: training.model.resume_training(path, training.optimizer, training.scheduler))
        file.write_bytes(whole)
    assert all(torch.equal(value, before[n]) for n, value in training.model.full_state_dict().items())
    training.model.resume_training(path, training.optimizer, training.scheduler)


class Planted:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_byte_of_a_file_is_unpickled(saved: tuple[Training, Path], tmp_path: Path) -> None:
    training, path = saved
    training.model.save_checkpoint(tmp_path / "weights")
    trap = tmp_path / "trap"
    for folder in (tmp_path, path, tmp_path / "weights"):
        for name in (".metadata", "pytorch_model.bin", "optimizer.pt", "training.pkl", "__0_0.distcp"):
            (folder / name).write_bytes(pickle.dumps(Planted(trap)))
    seen: list[str] = []

    def watch(frame: FrameType, event: str, function: Any) -> None:
        name = f"{function.__module__}.{function.__qualname__}" if event == "c_call" else frame.f_code.co_qualname
        if name.startswith(("_pickle.", "_Unpickler.")):
            seen.append(name)

    sys.setprofile(watch)
    try:
        training.model.resume_training(tmp_path, training.optimizer, training.scheduler)
        training.model.load_checkpoint(path)
        training.model.load_checkpoint(tmp_path / "weights")
        assert not seen
        pickle.loads(pickle.dumps(3))
    finally:
        sys.setprofile(None)
    assert "_pickle.loads" in seen
    assert not trap.exists()


def test_forged_documents_are_refused_or_loaded(saved: tuple[Training, Path]) -> None:
    """With checksums that are right, and anything in any place."""
    training, path = saved
    training.steps(1)
    model, before = training.model, training.model.full_state_dict()
    chance, refusals = random.Random(5), 0
    for file in ("training.json", "checks-00000.json"):
        whole = (path / file).read_bytes()
        places = [place for place in _places(json.loads(whole)["content"]) if place]
        for _ in range(80):
            content, (*outer, last) = json.loads(whole)["content"], chance.choice(places)
            reduce(getitem, outer, content)[last] = chance.choice([None, -1, 10**30, "../x", [], {"float": "x"}])
            (path / file).write_bytes(_sealed(content))
            try:
                model.resume_training(path, training.optimizer, training.scheduler)
            except CheckpointError:
                refusals += 1
                assert all(torch.equal(value, before[n]) for n, value in model.full_state_dict().items())
            else:
                model.load_full_state_dict(before)
        (path / file).write_bytes(whole)
    assert refusals > 100


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(entry, (*place, key))
