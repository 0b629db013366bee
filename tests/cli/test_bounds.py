"""Numbers beyond all bounds, and outputs that nobody takes: one line and an exit status, at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tool import TINY, fxpar

ROOT = Path(__file__).parents[2]
MANY = "9" * 20_000

NUMBERS = {
    "tp": (
        "verify {small}:build --tp 99999999999999999999",
        "tp must be an integer from 1 to 4096",
    ),
    "tp of many digits": (f"verify {{small}}:build --tp {MANY}", "must be a whole number of at most 20 digits"),
    "tp with zeros before": (
        f"trace {{small}}:build --tp {'0' * 5000}2",
        "must be a whole number of at most 20 digits",
    ),
    "tp in other digits": ("trace {small}:build --tp \N{FULLWIDTH DIGIT TWO}", "must be a whole number"),
    "tp with a sign between": (
        "trace {small}:build --tp 1_0",
        "of at most 20 digits, got '1_0'",
    ),
    "tp to be simulated": ("verify {small}:build --tp 1024", "1024 ranks are more than the 512 that one process"),
    "tp to be bisected": ("bisect {small}:build --tp 4096", "4096 ranks are more than the 512"),
    "tp of a plan": (
        "trace {small}:build --plan {tmp}/float.yaml",
        "from 1 to 4096, got 1000000000.0",
    ),
    "tp of a plan, huge": ("trace {small}:build --plan {tmp}/digits.yaml", "digits.yaml: not YAML: Exceeds the limit"),
    "size": ("comm {dump}/12-localize.txt --size b=1e30", "b=1e30: must be a positive integer"),
    "size of many digits": (f"memory {{dump}}/12-localize.txt --size b={MANY}", "must be a positive integer"),
    "size with zeros before": (f"comm {{dump}}/12-localize.txt --size s={'0' * 5000}1", "must be a positive integer"),
    "size beyond memory": ("memory {dump}/12-localize.txt --size b=99999999999999999999", "must be a tensor's size"),
    "sizes beyond memory": ("comm {dump}/12-localize.txt --size b=99999999999999", "bytes with b=99999999999999"),
    "size twice": ("comm {dump}/12-localize.txt --size b=2 --size b=3", "b=3: the size is given twice"),
    "field": ("trace hf:llama,hidden_size=1000000000000", "hidden_size=1000000000000 is more than 16777216"),
    "field of many digits": (f"trace hf:llama,hidden_size={MANY}", "must be a value of YAML"),
    "field of brackets": (f"trace hf:gpt2,n_layer={'[' * 400}", "must be a value of YAML"),
    "field as a product": ("trace hf:llama,hidden_size=10**12", "'hidden_size' expected int, got str"),
    "field twice": ("trace hf:gpt2,n_layer=1,n_layer=2", "has the key 'n_layer' twice"),
    "layers": ("trace hf:llama,num_hidden_layers=1000000", "num_hidden_layers=1000000 is more than 1000"),
    "labels": ("trace hf:vit,num_labels=10000000000", "num_labels=10000000000 is more than 16777216"),
    "no label": ("trace hf:vit,num_labels=0", "hf:vit,num_labels=0: random_ expects"),
    "samples": (f"trace {TINY} --batch 2147483648", "elements, more than 268435456"),
    "samples of sound": (f"trace hf:wav2vec2 --batch {10**6}", "elements, more than 268435456"),
    "pixels": ("trace hf:vit,image_size=1000000", "elements, more than 268435456"),
    "world": ("groups --world-size 99999999999999999999", "world_size must be at most"),
    "stages": ("groups --pp 2 --virtual 99999999999999999999", "virtual must be at most 131072, got"),
    "levels": (f"groups --cp 4 --hierarchical-cp 2,{MANY}", "must be a whole number of at most 20 digits"),
    "first rank": ("groups --rank-offset 99999999999999999999", "must be the number of a rank"),
    "a long name": (f"trace {'x' * 5000}", "names no model and no existing file"),
    "a name with a zero": ("diff {dump}/12-localize.txt \0", "must be text in UTF-8"),
    "a function that asks": ("trace builtins:input", "EOFError"),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of plans with odd numbers."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "float.yaml").write_text("tp: 1.0e+9\n")
    (folder / "digits.yaml").write_text(f"tp: {MANY}\n")
    return folder


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beyond_bounds_are_one_short_line(
    name: str, small: str, dump: Path, odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, message = NUMBERS[name]
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - pytest's own raises OSError
    result = fxpar(*[word.format(small=small, dump=dump, tmp=odd) for word in line.split(" ")])
    assert result.status == 2, result.err
    assert message in result.err
    assert len(result.err) < 1500
    assert len(result.err.splitlines()) == 1


def _shell(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["bash", "-c", f"set -o pipefail; {line}", "bash", sys.executable]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("$1 -m fxpar groups --tp 4 > /dev/full", "No space left on device"),
        ("$1 -m fxpar groups --tp 4 --json > /dev/full", "No space left on device"),
        ("$1 -m fxpar groups --world-size 4096 --tp 2 --json | :", "Broken pipe"),
        ("$1 -m fxpar groups --world-size 4096 --tp 2 | :", "Broken pipe"),
        ("$1 -m fxpar --help > /dev/full", "No space left on device"),
        ("$1 -m fxpar --help | :", "Broken pipe"),
        ("$1 -m fxpar groups --tp 4 >&-", "Bad file descriptor"),
    ],
)
def test_an_output_that_nobody_takes_is_one_error(line: str, reason: str, tmp_path: Path) -> None:
    done = _shell(line, tmp_path)
    assert done.returncode == 2
    remedy = "print to a terminal, or to a file with room"
    assert done.stderr == f"error: stdout: cannot be written: {reason}; {remedy}\n"


def test_errors_that_nobody_takes_leave_their_status(tmp_path: Path) -> None:
    done = _shell("$1 -m fxpar groups --tp 0 2> /dev/full", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
