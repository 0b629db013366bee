"""The wheel in environments of its own, as `pip install` makes them: nothing of the checkout is in sight.

Each downloads PyTorch and what belongs to it, some gigabytes where the registry has CUDA builds alone.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.test_readme import _blocks

# The oldest, the one of the suite, and the newest that pyproject.toml admits.
VERSIONS = ("==2.11.*", "==2.13.*", "")


@dataclass(frozen=True)
class Environment:
    """A virtual environment and an empty folder to work in."""

    bin: Path
    work: Path

    def run(self, *command: str, seconds: float = 600) -> subprocess.CompletedProcess[str]:
        """What a command says there, without the variables of this process that name places."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "COV", "PYTEST"))}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.work,
            env={**kept, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def install(self, *what: str) -> None:
        """Installs with pip; skips the test where the registry has no such version."""
        done = self.run("python", "-m", "pip", "install", "-q", "--no-cache-dir", *what, seconds=3600)
        if done.returncode and "No matching distribution found for torch" in done.stderr:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr


@pytest.fixture(params=VERSIONS, ids=lambda version: f"torch{version or '-newest'}")
def installed(request: pytest.FixtureRequest, dist: Path) -> Iterator[Environment]:
    """The wheel, without extras; gone afterwards, for it is large."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True, timeout=300)
        environment = Environment(Path(folder, "venv", "bin"), Path(folder, "work"))
        environment.work.mkdir()
        (wheel,) = dist.glob("*.whl")
        if request.param:
            environment.install(f"torch{request.param}")
        environment.install(str(wheel))
        yield environment


@pytest.mark.matrix
def test_the_wheel_works_by_itself(installed: Environment, dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert installed.run("fxpar", "--help").returncode == 0
    assert installed.run("fxpar", "groups", "--tp", "2").returncode == 0
    refused = installed.run("fxpar", "verify", "hf:gpt2")
    assert refused.returncode == 2
    assert refused.stderr.endswith("transformers is not installed; pip install 'fxpar[hf]'\n")
    installed.install(f"{wheel}[hf]")
    found = installed.run("python", "-c", "import fxpar, torch; print(fxpar.__file__, torch.__version__)")
    assert found.stdout.startswith(str(installed.bin.parent)), found.stderr
    proved = installed.run("fxpar", "verify", "hf:gpt2", "--tp", "2")
    assert proved.returncode == 0, proved.stderr
    assert "ok at level values" in proved.stdout
    (program,) = _blocks("README.md", "python")
    compiled = program.replace("fxpar.Plan(tp=2)", "fxpar.Plan(tp=2, compile=True)")
    assert compiled != program
    eager_loss, compiled_loss = _trained(installed, program), _trained(installed, compiled)
    # The three steps draw the same masks: dropout is keyed by seed, node and step.
    assert compiled_loss == pytest.approx(eager_loss, abs=2e-4)


def _trained(environment: Environment, program: str) -> float:
    """The loss on which both ranks agree."""
    (environment.work / "train.py").write_text(program)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    done = environment.run("python", *words, "--rdzv-endpoint", "localhost:0", "train.py", seconds=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = set(re.findall(r"rank [01]: loss (\d+\.\d{4}), 29 tensors", done.stdout))
    assert len(losses) == 1, done.stdout
    return float(losses.pop())
