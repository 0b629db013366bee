"""A trace on disk is taken where everything that it was made of is the same, and never otherwise."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fxpar.cli import files, models
from fxpar.compile import capture_differentiable
from fxpar.text.parsing import parse_program
from fxpar.text.stored_traces import MOST_ENTRIES, find_trace, state_of, store_trace, traces_folder
from tests.captures import captured_each_time
from tests.cli.tool import TINY, Result, fxpar

MODEL = """
import json
import os
import pathlib

import torch
from torch import nn

from cached_helper import FACTOR

class Small(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc, self.proj = nn.Linear(12, width), nn.Linear(width, 12)

    def forward(self, x):
        extra = json.loads(HERE.joinpath("forward.json").read_text())
        return self.proj(self.fc(x) * FACTOR * extra * float(os.environ.get("CACHED_SCALE", "1")))

HERE = pathlib.Path(__file__).parent

def build():
    width = json.loads(HERE.joinpath("width.json").read_text())
    return Small(width), {"x": torch.randn(4, 5, 12)}, lambda outputs, batch: outputs.square().mean()
"""
CONTENTS = {"cached_model.py": MODEL, "cached_helper.py": "FACTOR = 0.5", "width.json": "20", "forward.json": "0.25"}
OLD = 1_700_000_000  # seconds of 2023, long before this process


@pytest.fixture(autouse=True)
def no_capture_is_shared() -> Iterator[None]:
    with captured_each_time():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a model that were there before this process, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_STARTED", time.time_ns())  # after the files of other tests
    for name, text in CONTENTS.items():
        put(tmp_path / name, text)
    return tmp_path


def put(path: Path, text: str, age: int = 0) -> None:
    path.write_text(text)
    os.utime(path, (OLD - age, OLD - age))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each capture."""
    calls: list[int] = []
    whole: Callable[..., object] = capture_differentiable

    def counted(*args: object) -> object:
        calls.append(1)
        return whole(*args)

    monkeypatch.setattr(files, "capture_differentiable", counted)
    return calls


def call(folder: Path, *words: str, command: str = "trace") -> Result:
    """The outcome of a command as in a process of its own: nothing of the model is imported yet."""
    for name in ("cached_model", "cached_helper"):
        sys.modules.pop(name, None)
    result = fxpar(command, f"{folder}/cached_model.py:build", *words)
    assert result.status == 0, result.err
    return result


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "fxpar" / "traces").glob("*"))


def test_commands_share_a_trace_and_say_the_same_as_without_it(folder: Path, traced: list[int]) -> None:
    for command in ("comm", "memory", "trace"):
        words = ("--tp", "2", "--json")
        cold = call(folder, *words, "--no-cache", command=command)
        for _ in range(2):
            assert call(folder, *words, command=command).out == cold.out
    assert len(traced) == 3 + 1
    assert len(entries(folder)) == 1


def test_a_model_on_meta_is_reported_from_disk(folder: Path, traced: list[int]) -> None:
    model = ("hf:llama,num_hidden_layers=1,hidden_size=4096,vocab_size=60000", "--tp", "2", "--json")
    documents = [fxpar("report", *model, *more).document for more in (["--no-cache"], [], [])]
    for document in documents:
        for one in document.get("passes", ()):
            one.pop("seconds")
    assert documents[0] == documents[1] == documents[2]
    assert len(traced) == 2


CHANGES = {
    "source": ("cached_model.py", MODEL.replace("square()", "abs()")),
    "imported module": ("cached_helper.py", "FACTOR = 0.7"),
    "what the function reads": ("width.json", "24"),
    "what the forward reads": ("forward.json", "0.75"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_traced_anew(folder: Path, traced: list[int], change: str) -> None:
    before = call(folder).out
    name, text = CHANGES[change]
    put(folder / name, text, age=7)
    after = call(folder).out
    assert after != before
    assert after == call(folder, "--no-cache").out
    for name in CONTENTS:
        put(folder / name, CONTENTS[name])
    assert call(folder).out == before
    assert len(traced) <= 4


@pytest.mark.parametrize("words", [("--eval",), ("--tp", "2")])
def test_another_mode_or_plan_is_another_trace(folder: Path, traced: list[int], words: tuple[str, ...]) -> None:
    call(folder)
    assert call(folder, *words).out == call(folder, *words, "--no-cache").out
    assert len(traced) == 3


def test_the_environment_counts(folder: Path, traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = call(folder).out
    monkeypatch.setenv("CACHED_SCALE", "3")
    assert call(folder).out != before
    assert len(traced) == 2


def test_a_file_that_changes_while_the_process_runs_is_not_stored(folder: Path, traced: list[int]) -> None:
    put(folder / "cached_helper.py", "FACTOR = 0.9", age=-OLD)
    for _ in range(2):
        call(folder)
    assert len(traced) == 2
    assert entries(folder) == []


def test_no_cache_reads_and_leaves_nothing(folder: Path, traced: list[int]) -> None:
    call(folder, "--no-cache")
    assert entries(folder) == []
    call(folder)
    call(folder, "--no-cache")
    assert len(traced) == 3


def damaged(text: bytes) -> dict[str, bytes]:
    return {
        "cut": text[: len(text) // 2],
        "empty": b"",
        "changed": text.replace(b"aten.", b"aten,", 1),
        "odd": b"\xff\n{}",
    }


@pytest.mark.parametrize("how", damaged(b""))
def test_a_damaged_entry_is_replaced(folder: Path, traced: list[int], how: str) -> None:
    before = call(folder).out
    (entry,) = entries(folder)
    sound = entry.read_bytes()
    entry.write_bytes(damaged(sound)[how])
    assert call(folder).out == before
    assert entry.read_bytes() == sound
    assert len(traced) == 2


def test_a_folder_that_cannot_be_written_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cache").write_text("a file")
    warned = call(folder).err
    assert "the trace cannot be left here: " in warned
    assert "--no-cache" in warned
    assert call(folder, "--no-cache").err == ""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "other"))
    assert call(folder).err == ""


def test_a_user_without_a_home_has_no_traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert traces_folder() is None
    assert call(folder).err == ""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(folder))
    assert traces_folder() == folder / ".cache" / "fxpar" / "traces"


def test_two_writers_and_a_reader_see_whole_entries(tmp_path: Path) -> None:
    program = parse_program(fxpar("trace", TINY).out)
    found: list[bool] = []

    def write() -> None:
        for _ in range(6):
            assert store_trace(tmp_path, "key", program, "export") == ""

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if (tmp_path / "key.trace").exists():
            found.append(find_trace(tmp_path, "key") is not None)
    assert found
    assert all(found)
    assert [path.name for path in tmp_path.iterdir()] == ["key.trace"]


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    program = parse_program(fxpar("trace", TINY).out)
    for index in range(MOST_ENTRIES + 3):
        (tmp_path / f"{index}.trace").write_text("")
        os.utime(tmp_path / f"{index}.trace", (OLD + index, OLD + index))
    (tmp_path / "killed.part").write_text("")
    os.utime(tmp_path / "killed.part", (OLD, OLD))
    store_trace(tmp_path, "new", program, "export")
    left = {path.stem for path in tmp_path.iterdir()}
    assert left == {"new", *map(str, range(4, MOST_ENTRIES + 3))}


def test_a_changed_dependency_of_an_entry_is_seen(tmp_path: Path) -> None:
    program = parse_program(fxpar("trace", TINY).out)
    path = tmp_path / "package" / "site-packages" / "part.py"
    path.parent.mkdir(parents=True)
    put(path, "a = 1")
    state = state_of(str(path), is_installed=True)
    store_trace(tmp_path, "key", program, "export", files={str(path): state})
    assert find_trace(tmp_path, "key") is not None
    put(path, "a = 1", age=1)
    assert find_trace(tmp_path, "key") is None


def test_an_entry_is_text(folder: Path) -> None:
    call(folder)
    (entry,) = entries(folder)
    assert set(json.loads(entry.read_bytes().partition(b"\n")[2])) == {"text", "how", "unwalked", "files"}
