"""Models and passes of a user's own, from the first command to the last."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tool import fxpar

ROOT = Path(__file__).resolve().parents[2]
SPLIT = ("--tp", "2", "--split", "fc=column", "--split", "proj=row")


def test_a_users_model_is_verified(small: str) -> None:
    found = fxpar("verify", f"{small}:build", *SPLIT, "--json").document
    assert found["ok"] is True
    assert found["split_flops"] == 1
    assert found["gradients"] == 4


def test_a_model_without_a_loss_is_traced(small: str) -> None:
    assert fxpar("trace", f"{small}:without_loss", "--json").document["loss"] == ""


def test_what_a_model_prints_stays_out_of_the_document(small: str) -> None:
    result = fxpar("trace", f"{small}:noisy", "--json")
    assert result.document["loss"] == "loss"
    assert "a word on stdout" in result.err


def test_a_users_pass_is_listed_and_run(small: str) -> None:
    names = [entry["name"] for entry in fxpar("passes", "--passes", f"{small}:GOOD", "--json").document]
    assert names[:2] == ["canonicalize", "nothing"]
    found = fxpar("run", f"{small}:build", *SPLIT, "--passes", f"{small}:GOOD", "--step", "--json").document
    left_out = ("partition_stages", "chunk_tokens")
    assert [record["name"] for record in found["passes"]] == [name for name in names if name not in left_out]
    assert fxpar("verify", f"{small}:build", *SPLIT, "--passes", f"{small}:GOOD").status == 0


def test_a_wrong_pass_is_found_by_value(small: str) -> None:
    result = fxpar("bisect", f"{small}:build", *SPLIT, "--passes", f"{small}:WRONG", "--json")
    assert result.document["first"]["node"].startswith("mul")
    assert result.document["first"]["phase"] == "forward"
    assert result.status == 1
    assert result.document["culprit"] == "halve"
    assert "deviates by" in result.document["reason"]
    verified = fxpar("verify", f"{small}:build", *SPLIT, "--passes", f"{small}:WRONG", "--json")
    assert verified.status == 1
    assert verified.document["ok"] is False
    assert verified.document["error"]["where"].startswith("gradient of ")


def test_a_wrong_pass_is_found_in_a_dump(small: str, tmp_path: Path) -> None:
    passes = ("--passes", f"{small}:WRONG")
    assert fxpar("run", f"{small}:build", *SPLIT, *passes, "--dump", str(tmp_path / "d")).status == 0
    result = fxpar("bisect", str(tmp_path / "d"), *passes, "--json")
    assert result.status == 1
    assert result.document["culprit"] == "halve"


@pytest.mark.parametrize("name", ["faulty", "forgetful"])
def test_a_pass_that_fails_is_the_culprit(small: str, name: str) -> None:
    result = fxpar("bisect", f"{small}:build", *SPLIT, "--passes", f"{small}:{name.upper()}", "--json")
    assert result.status == 1
    assert result.document["culprit"] == name
    assert name in result.document["reason"]


BOTH = """
import torch
from torch import nn

import fxpar
from fxpar.passes import DEFAULT_PASSES

library = torch.library.Library("fxpar_both", "DEF")
library.define("twice(Tensor x) -> Tensor")
fxpar.register_rule(torch.ops.fxpar_both.twice.default)
PASSES = list(DEFAULT_PASSES)


def build():
    return nn.Linear(4, 4), (torch.randn(2, 4),)
"""


def test_one_file_for_model_rules_and_passes_is_run_once(tmp_path: Path) -> None:
    """Run twice, it would register its rule twice."""
    path = tmp_path / "fxpar_both.py"
    path.write_text(BOTH)
    result = fxpar("run", f"{path}:build", "--passes", f"{path}:PASSES")
    assert result.status == 0, result.err


def test_a_file_that_failed_is_not_taken_for_loaded(tmp_path: Path) -> None:
    path = tmp_path / "fxpar_broken.py"
    path.write_text("def build():\n    return None\n\nraise ValueError('half way')\n")
    for _ in range(2):
        result = fxpar("trace", f"{path}:build")
        assert result.status == 2
        assert "half way" in result.err


@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)\n", "def build():\n    raise SystemExit(3)\n"])
def test_a_user_s_exit_is_no_success(tmp_path: Path, code: str) -> None:
    path = tmp_path / f"fxpar_exits_{len(code)}.py"
    path.write_text(code)
    result = fxpar("verify", f"{path}:build", "--json")
    assert result.status == 2
    assert result.document["ok"] is False
    assert "the code called sys.exit" in result.err


def test_one_sample_is_no_example(small: str) -> None:
    result = fxpar("trace", f"{small}:one_sample")
    assert result.status == 2
    assert "holds one sample" in result.err


GADGET = """
import torch
from torch import nn


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return self.proj(Doubled.apply(self.fc(x))).square().mean()


def build():
    return Model(), {"x": torch.randn(3, 12)}
"""


def test_a_dump_with_a_function_is_verified_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "gadget.py").write_text(GADGET)
    command = [sys.executable, "-m", "fxpar"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )

    dumped = fxpar("run", f"{tmp_path / 'gadget.py'}:build", *SPLIT, "--dump", str(tmp_path / "dump"))
    assert dumped.status == 0, dumped.err
    proved = run(tmp_path / "dump", "verify", "12-localize.txt")
    assert proved.returncode == 0, proved.stderr
    (tmp_path / "gadget.py").unlink()
    gone = run(tmp_path / "dump", "verify", "12-localize.txt")
    assert gone.returncode == 2
    assert re.search(r"gadget.py of the module gadget\w* is gone; put it back", gone.stderr.replace("\n", " "))


ROW_WISE = """
import torch
from torch import nn


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flip(1).cumsum(1).flip(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 24)

    def forward(self, x):
        return Scan.apply(self.fc(x)).square().mean()


def build():
    return Model(), (torch.randn(4, 5, 12),)
"""


def test_a_function_is_declared_row_wise_by_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "fxpar_row_wise.py"
    path.write_text(ROW_WISE)
    refused = fxpar("verify", f"{path}:build", "--dp", "2")
    assert refused.status == 1
    assert 'Operators(batchwise_ops=("fxpar_row_wise.Scan",))' in refused.err.replace("\n", " ")
    result = fxpar("verify", f"{path}:build", "--dp", "2", "--batchwise-ops", "fxpar_row_wise.*")
    assert result.status == 0, result.err
    assert "on the plan's word" in result.out
