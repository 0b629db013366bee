"""What may be imported, by whom, and at what cost."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in the project root."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_imports_point_one_way() -> None:
    done = python("import importlinter.cli as cli; raise SystemExit(cli.lint_imports(no_cache=True, no_logo=True))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


def test_passes_refuse_their_top_level_name() -> None:
    done = python("import passes")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ")
    assert "fxpar.passes" in message


def test_import_fxpar_does_not_import_torch() -> None:
    done = python("import sys, fxpar; print('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_help_does_not_import_torch() -> None:
    done = python(
        "import runpy, sys\n"
        "sys.argv = ['fxpar', '--help']\n"
        "try:\n"
        "    runpy.run_module('fxpar', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as stop:\n"
        "    status = stop.code\n"
        "print('status', status or 0, 'torch', 'torch' in sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1] == "status 0 torch False"
