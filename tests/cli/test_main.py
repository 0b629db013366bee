"""The entry point: help, usage, exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxpar.cli import models
from tests.cli.tool import fxpar

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("trace", "passes", "run", "diff", "verify", "bisect", "explain", "comm", "timeline", "groups", "schedule")


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_help_of_every_command_needs_no_torch() -> None:
    calls = "; ".join(f"assert main(['{name}', '--help']) == 0" for name in COMMANDS)
    done = python(
        "-c",
        f"import sys; from fxpar.cli.main import main; {calls}; "
        "heavy = {'torch', 'sympy', 'transformers', 'numpy'} & set(sys.modules); print('heavy', sorted(heavy))",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy []"
    assert all(f"Usage: fxpar {name}" in done.stdout for name in COMMANDS)


def test_a_process_ends_with_the_exit_status_and_one_line() -> None:
    done = python("-m", "fxpar", "trace", "nowhere:build")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: nowhere: ModuleNotFoundError")
    assert len(done.stderr.splitlines()) == 1


def test_help_lists_all_commands() -> None:
    result = fxpar("--help")
    assert result.status == 0
    assert all(f" {name} " in result.out for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fly"], "no such command 'fly'"),
        (["trace"], "missing argument 'MODEL'"),
        (["trace", "hf:gpt2", "--colour"], "no such option: --colour"),
        (["verify", "hf:gpt2", "--tp", "two"], "invalid value for '--tp'"),
    ],
)
def test_wrong_usage_is_bad_input_and_names_the_help(words: list[str], message: str) -> None:
    result = fxpar(*words)
    assert result.status == 2
    assert result.out == ""
    assert message in result.err
    assert "--help'" in result.err
    assert len(result.err.splitlines()) == 1


def test_no_command_prints_the_help_and_no_error() -> None:
    result = fxpar()
    assert result.status == 2
    assert "Usage: fxpar" in result.out
    assert result.err == ""


def test_wrong_usage_with_json_is_a_document() -> None:
    result = fxpar("trace", "--json")
    assert result.status == 2
    assert result.document["ok"] is False
    assert result.document["error"]["where"] == "fxpar trace"


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(spec: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "load_passes", interrupt)
    assert fxpar("passes").status == 130


def test_text_of_a_user_is_no_markup() -> None:
    result = fxpar("trace", "[red]nowhere[/red]")
    assert "[red]nowhere[/red]" in result.err


def test_the_working_folder_is_importable_only_while_a_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fxpar_local_module.py").write_text("def build():\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    result = fxpar("trace", "fxpar_local_module:build")
    assert "returns no (model, batch)" in result.err
    assert sys.path == before


def test_a_terminal_without_arrows_gets_them_escaped(dump: Path) -> None:
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "fxpar", "trace", str(dump / "12-localize.txt")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=ascii_only, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tp:P\\u2192I" in done.stdout
