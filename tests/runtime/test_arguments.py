"""What is no argument is refused by name, before anything happens; one process needs no group."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fxpar
from fxpar.errors import FxparError
from tests.runtime.jobs import compile_and_call

X = torch.randn(4, 6)
HUGE = 10**5000  # more digits than Python prints


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(6, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.up(x))
        return y.square().mean()


@pytest.fixture(scope="module")
def module() -> fxpar.ParallelModule:
    return fxpar.parallelize(Small(), fxpar.Plan(), example=(X,))


def _parallelize(**options: Any) -> Callable[[Any], object]:
    return lambda module: fxpar.parallelize(Small(), fxpar.Plan(), (X,), **options)


def _step(value: Any) -> Callable[[fxpar.ParallelModule], object]:
    def run(module: fxpar.ParallelModule) -> object:
        module.step = value
        try:
            return module.train_step((X,))
        finally:
            module.step = 0

    return run


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "checkpoint: an int": (_parallelize(checkpoint=3), "checkpoint: must be a path or a Checkpoint, got a int"),
    "checkpoint: weights": (
        _parallelize(checkpoint={"a": X}),
        "checkpoint: must be a path or a Checkpoint, got a dict",
    ),
    "checkpoint: bytes": (_parallelize(checkpoint=b"a"), "checkpoint: must be a path or a Checkpoint, got a bytes"),
    "checkpoint: a long name": (_parallelize(checkpoint="x" * 5000), "File name too long"),
    "checkpoint: a zero byte": (_parallelize(checkpoint="a\0b"), "there is no such file"),
    "passes: none": (_parallelize(passes=None), "passes: must be a list of passes, got None"),
    "passes: empty": (_parallelize(passes=[]), "passes: must be a list of passes, got []"),
    "check_inputs": (_parallelize(check_inputs="no"), "check_inputs: must be True or False, got 'no'"),
    "timeout: too long": (_parallelize(timeout=1e300), "timeout: must be a number of seconds, got 1e+300"),
    "timeout: no float": (
        _parallelize(timeout=HUGE),
        "timeout: must be a number of seconds, got an integer",
    ),
    "plan: tp": (lambda m: fxpar.Plan(tp=HUGE), "tp must be an integer from 1 to 4096, got an integer"),
    "plan: dp": (lambda m: fxpar.Plan(dp=HUGE), "dp must be an integer from 1 to 4096, got an integer"),
    "plan: seed": (lambda m: fxpar.Plan(seed=HUGE), "seed must be an integer in"),
    "plan: cost": (lambda m: fxpar.Plan(cost=fxpar.Cost(flops=HUGE)), "got an integer of 16610 bits"),
    "plan: another option": (lambda m: fxpar.Plan().replace(moon=3), "unknown option moon"),
    "plan: a list": (lambda m: fxpar.Plan.from_dict([("tp", 2)]), "must be a mapping"),  # type: ignore[arg-type]
    "plan: no text": (lambda m: fxpar.Plan.from_yaml(3), "must be a text, got 3"),  # type: ignore[arg-type]
    "plan: digits": (lambda m: fxpar.Plan.from_yaml(f"tp: {'9' * 5000}"), "not YAML"),
    "plan: brackets": (lambda m: fxpar.Plan.from_yaml(f"tp: {'[' * 400}"), "not YAML"),
    "plan: no file": (lambda m: fxpar.Plan.load(None), "os.PathLike object"),  # type: ignore[arg-type]
    "plan: a full disk": (lambda m: fxpar.Plan(seed=3).save("/dev/full"), "/dev/full: No space left on device"),
    "a pass's properties": (
        lambda m: fxpar.register_pass("x", requires="layouts"),
        "x: needs sets of properties",
    ),
    "a pass without a name": (fxpar.register_pass, "needs a name, got"),
    "a rule of no operator": (lambda m: fxpar.register_rule(torch.ops.aten.neg), "is no overload of an operator"),  # type: ignore[arg-type]
    "materialize: no module": (lambda m: fxpar.materialize(3), "model must be an nn.Module, got a int"),  # type: ignore[arg-type]
    "materialize: a seed": (lambda m: fxpar.materialize(Small(), -1), "seed: must be an integer in [0, 2^63), got -1"),
    "materialize: a device": (lambda m: fxpar.materialize(Small(), 0, "moon"), "device 'moon': "),
    "load_state_dict": (lambda m: m.load_state_dict(3), "must be a mapping from names to tensors, got a int"),
    "load_full_state_dict": (
        lambda m: m.load_full_state_dict(None),
        "must be a mapping from names to tensors, got a NoneType",
    ),
    "load_checkpoint": (
        lambda m: m.load_checkpoint(None),
        "checkpoint: must be a path or a Checkpoint, got a NoneType",
    ),
    "save_checkpoint": (lambda m: m.save_checkpoint(3), "must be a path, got 3"),
    "save_checkpoint: a zero byte": (lambda m: m.save_checkpoint("a\0b"), "folder: must be a path, got 'a\\x00b'"),
    "save_training": (lambda m: m.save_training(None, _adamw(m)), "folder: must be a path, got None"),
    "save_training: no optimizer": (lambda m: m.save_training("out", 3), "must be a torch.optim.Optimizer, got a int"),
    "save_training: how many": (
        lambda m: m.save_training("out", _adamw(m), keep=-HUGE),
        "must be a positive integer, got an integer of 16610 bits",
    ),
    "resume_training": (lambda m: m.resume_training(3, _adamw(m)), "folder: must be a path, got 3"),
    "resume_training: a zero byte": (lambda m: m.resume_training("a\0b", _adamw(m)), "must be a path"),
    "resume_training: a long name": (lambda m: m.resume_training("x" * 5000, _adamw(m)), "File name too long"),
    "clip_grad_norm_: no number": (
        lambda m: m.clip_grad_norm_("1"),
        "max_norm: must be a number of at least 0, got '1'",
    ),
    "clip_grad_norm_: nan": (
        lambda m: m.clip_grad_norm_(math.nan),
        "max_norm: must be a number of at least 0, got nan",
    ),
    "report: sizes": (lambda m: m.report(sizes=3), "sizes: must be a mapping, got 3"),
    "report: too large": (
        lambda m: m.report(sizes={"b": HUGE}),
        "must be a tensor's size, got an integer of 16610 bits",
    ),
    "report: bytes": (lambda m: m.report(sizes={"b": 2**50}), "bytes with b=1125899906842624"),
    "report: an optimizer": (lambda m: m.report(optimizer=[]), "is unknown"),
    "shape_of": (lambda m: m.shape_of("moon"), "'moon': names no parameter or buffer"),
    "step: a text": (_step("3"), "step: must be an integer from 0 on, got '3'"),
    "step: huge": (_step(HUGE), "step: must be an integer from 0 on, got an integer of 16610 bits"),
    "a sparse batch": (lambda m: m.train_step((X.to_sparse(),)), "has the layout torch.sparse_coo"),
    "torch.export": (lambda m: torch.export.export(m, (X,)), "the programs are compiled"),
    "half": (lambda m: m.half(), "take fxpar.Trainer (that of transformers), fxpar.train"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_argument_is_refused(name: str, module: fxpar.ParallelModule) -> None:
    call, text = REFUSED[name]
    with pytest.raises(FxparError) as caught:
        call(module)
    assert text in str(caught.value)
    assert caught.value.remedy
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("size", [10**4000, "9" * 5000, "1XB", 0, True, None])
def test_what_is_no_size_of_a_file_is_refused(size: Any, module: fxpar.ParallelModule, tmp_path: Path) -> None:
    with pytest.raises(fxpar.FxparError, match=r"shard_size: must be a size"):
        module.save_checkpoint(tmp_path / "out", shard_size=size)


@pytest.mark.parametrize(
    ("rename", "text"), [(3, "must be a function, got 3"), (lambda name: 3, "rename must return a name or None, got 3")]
)
def test_what_renames_no_tensor_is_refused(rename: Any, text: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(fxpar.FxparError, match=text):
        fxpar.Checkpoint(tmp_path, rename=rename)


def test_a_checkpoint_that_finds_no_room_is_one_error(module: fxpar.ParallelModule, tmp_path: Path) -> None:
    """The limit on the size of files stands for a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(fxpar.FxparError, match=r"cannot be written: .*; check the folder and the space left"):
            module.save_checkpoint(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    module.save_checkpoint(tmp_path / "out")  # what was there of it is no obstacle


def test_a_training_that_finds_no_room_is_one_error(module: fxpar.ParallelModule, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(fxpar.FxparError, match="cannot be written: File too large; check the folder and the space"):
            module.save_training(tmp_path, _adamw(module))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    module.save_training(tmp_path, _adamw(module))


def test_torch_compile_says_what_to_do(module: fxpar.ParallelModule) -> None:
    with pytest.raises(fxpar.FxparError, match=r"torch.compile: .*Plan\(compile=True\)"):
        compile_and_call(module, {"x": X})
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match=r"Plan\(compile=True\) compiles its programs"):
        torch.compile(module.train_step)((X,))
    torch.compiler.reset()
