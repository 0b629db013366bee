import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist and of the wheel built from it.

    They are built from a copy, because setuptools writes into the tree it builds and packs what an earlier build left.
    """
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    leave_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=leave_out)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"
