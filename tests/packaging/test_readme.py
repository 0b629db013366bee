"""What README and CONTRIBUTING show is run as it stands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fxpar.capture import capture
from fxpar.cli.main import main
from fxpar.manager import Pass, PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.verify.static import STATIC
from tests.zoo import CASES

_ROOT = Path(__file__).parents[2]


def _blocks(file: str, language: str) -> list[str]:
    text = (_ROOT / file).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_training_program_runs_on_two_processes_with_one_loss(tmp_path: Path) -> None:
    (program,) = _blocks("README.md", "python")
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = set(re.findall(r"rank [01]: (loss \d+\.\d{4}, 29 tensors)", done.stdout))
    assert len(losses) == 1, done.stdout


def test_the_commands_of_the_readme_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = _blocks("README.md", "sh")
    monkeypatch.chdir(tmp_path)
    for line in block.strip().splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "fxpar"
        # `diff` says by its status that the two programs differ.
        assert main(words[1:]) == (1 if words[1] == "diff" else 0), line


def test_the_pass_of_the_contributing_guide_keeps_its_contract() -> None:
    first, _ = _blocks("CONTRIBUTING.md", "python")
    scope: dict[str, object] = {}
    exec(first, scope)
    own = scope["drop_negations"]
    assert isinstance(own, Pass)
    case = CASES["llama"]
    program = capture(case.model(), case.example(), case.plan(2)).program
    result = PassManager([DEFAULT_PASSES[0], own, *DEFAULT_PASSES[1:]], STATIC).run(program)
    assert [record.name for record in result.history].index("drop_negations") == 1
