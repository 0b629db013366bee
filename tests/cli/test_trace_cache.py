"""A trace on disk is taken where everything that it was made of is the same, and never otherwise."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fxpar.cli import files, models
from fxpar.compile import capture_differentiable
from fxpar.text.parsing import parse_program
from fxpar.text.stored_traces import MOST_ENTRIES, find_trace, state_of, store_trace, traces_folder
from tests.captures import captured_each_time
from tests.cli.tool import TINY, Result, fxpar

OLD = 1_700_000_000  # seconds of 2023, long before this process


@pytest.fixture(autouse=True)
def no_capture_is_shared() -> Iterator[None]:
    with captured_each_time():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


def call(*words: str, command: str = "trace") -> Result:
    """The outcome of a command on the smallest model."""
    result = fxpar(command, TINY, *words)
    assert result.status == 0, result.err
    return result


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "fxpar" / "traces").glob("*"))


def test_commands_share_a_trace_and_say_the_same_as_without_it(folder: Path, traced: list[int]) -> None:
    for command in ("comm", "memory", "trace"):
        words = ("--tp", "2", "--json")
        cold = call(*words, "--no-cache", command=command)
        for _ in range(2):
            assert call(*words, command=command).out == cold.out
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


MODEL = """
import torch

def build():
    return torch.nn.Linear(12, 12), torch.randn(4, 5, 12), lambda outputs, batch: outputs.square().mean()
"""


def test_nothing_of_the_users_own_code_is_kept(folder: Path, traced: list[int]) -> None:
    """What it reads nobody can list: files by native code, modules that are not there yet."""
    put(folder / "own_model.py", MODEL)
    for _ in range(2):
        assert fxpar("trace", f"{folder}/own_model.py:build").status == 0
    assert len(traced) == 2
    assert entries(folder) == []


@pytest.mark.parametrize("words", [("--eval",), ("--tp", "2"), ("--seq", "8")])
def test_another_mode_or_plan_is_another_trace(folder: Path, traced: list[int], words: tuple[str, ...]) -> None:
    call()
    assert call(*words).out == call(*words, "--no-cache").out
    assert len(traced) == 3


@pytest.mark.parametrize("change", ["environment", "installed", "fxpar"])
def test_what_a_trace_depends_on_counts(
    folder: Path, traced: list[int], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    call()
    if change == "environment":
        monkeypatch.setenv("CACHED_SCALE", "3")
    elif change == "installed":  # transformers takes other kernels where it finds them
        monkeypatch.setattr("importlib.metadata.distributions", lambda: [])
    else:
        monkeypatch.setattr(models, "state_of", lambda name, *, is_installed: "another")
    call()
    assert len(traced) == 2


def test_a_file_of_fxpar_that_changes_while_the_process_runs_ends_the_cache(
    folder: Path, traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_STARTED", 0)
    for _ in range(2):
        call()
    assert len(traced) == 2
    assert entries(folder) == []


FORGED = ["[]", "{}", "no JSON", '{"text": 1, "how": "", "unwalked": "", "files": {}}']
FORGED += [
    '{"text": "fxpar", "how": "", "unwalked": "", "files": []}',
    '{"text": "", "how": "", "unwalked": "", "files": {}}',
]
FORGED += ['{"text": "", "how": "", "unwalked": "", "files": {"a": 1}, "more": 2}']


@pytest.mark.parametrize("body", FORGED)
def test_an_entry_of_another_hand_is_none(tmp_path: Path, body: str) -> None:
    digest = hashlib.sha256(body.encode()).hexdigest()
    (tmp_path / "key.trace").write_text(f"{digest}\n{body}")
    assert find_trace(tmp_path, "key") is None


def test_an_entry_that_says_something_else_since_is_none(tmp_path: Path) -> None:
    """It is sound by itself: only the digest tells."""
    store_trace(tmp_path, "key", parse_program(fxpar("trace", TINY).out), "export")
    path = tmp_path / "key.trace"
    changed = path.read_bytes().replace(b'"how": "export"', b'"how": "other"')
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert find_trace(tmp_path, "key") is None


def test_no_cache_reads_and_leaves_nothing(folder: Path, traced: list[int]) -> None:
    call("--no-cache")
    assert entries(folder) == []
    call()
    call("--no-cache")
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
    before = call().out
    (entry,) = entries(folder)
    sound = entry.read_bytes()
    entry.write_bytes(damaged(sound)[how])
    assert call().out == before
    assert entry.read_bytes() == sound
    assert len(traced) == 2


def test_a_folder_that_cannot_be_written_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cache").write_text("a file")
    warned = call().err
    assert "the trace cannot be left here: " in warned
    assert "--no-cache" in warned
    assert call("--no-cache").err == ""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "other"))
    assert call().err == ""


def test_a_user_without_a_home_has_no_traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert traces_folder() is None
    assert call().err == ""
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
    call()
    (entry,) = entries(folder)
    assert set(json.loads(entry.read_bytes().partition(b"\n")[2])) == {"text", "how", "unwalked", "files"}
