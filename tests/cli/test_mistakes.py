"""Usual mistakes: one or two lines that say what to do, status 2, and what they say works when it is done."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpar as package
from fxpar.errors import FxparError
from tests.cli.tool import fxpar

TINY = "hf:gpt2,n_layer=1"
TWO = "hf:gpt2,n_layer=2"
# A line with a mistake, a part of what is said, and the line that follows it. `{small}` is the file of a model, `{tmp}`
# a folder of plans and texts.
LINES = {
    "misspelt command": (f"trac {TINY}", "trace", f"trace {TINY}"),
    "misspelt type": ("trace hf:gtp2,n_layer=1", "try gpt2", f"trace {TINY}"),
    "misspelt key": ("trace hf:gpt2,n_lear=1", "n_layer, ", f"trace {TINY}"),
    "word for a number of layers": ("trace hf:gpt2,n_layer=one", "expected int", f"trace {TINY}"),
    "type without hf:": ("trace gpt2", "write hf:TYPE", f"trace {TINY}"),
    "file without a function": ("trace {small}", "or file.py:function", "trace {small}:build"),
    "misspelt function": ("trace {small}:biuld", "did you mean build?", "trace {small}:build"),
    "misspelt file": ("trace {tmp}/smal.py:build", "there is no such file; check the path", "trace {small}:build"),
    "word for ranks": (f"trace {TINY} --tp two", "must be a whole number", f"trace {TINY} --tp 2"),
    "no ranks": (f"trace {TINY} --tp 0", "tp must be an integer from 1 to 4096", f"trace {TINY} --tp 1"),
    "misspelt flag": (f"trace {TINY} --tpp 2", "--tp", f"trace {TINY} --tp 2"),
    "option without a value": (f"trace {TINY} --tp", "requires an argument", f"trace {TINY} --tp 2"),
    "flag as in Python": (f"trace {TINY} --tp 2 --sequence_parallel", "--sequence-parallel", f"trace {TINY} --tp 2"),
    "one sample": (f"trace {TINY} --batch 1", "give at least 2", f"trace {TINY} --batch 2"),
    "length of a function's example": ("trace {small}:build --seq 4", "change the function", "trace {small}:build"),
    "rows that do not divide": (
        "comm {small}:build --dp 2",
        "has 3 rows, which 2 data ranks (dp=2) cannot share out; give --batch 2 ",
        "comm {small}:build --dp 2 --batch 2",
    ),
    "size by a long name": (f"memory {TINY} --size batch=8", "choose from b, s", f"memory {TINY} --size b=8"),
    "size without a number": (f"memory {TINY} --size b", "write, say, b=8", f"memory {TINY} --size b=8"),
    "device by another name": (f"memory {TINY} --device gpu", "one of cpu, cuda", f"memory {TINY} --device cuda"),
    "optimizer by another name": (f"memory {TINY} --optimizer adam", "adamw", f"memory {TINY} --optimizer adamw"),
    "memory without a unit": (f"memory {TINY} --memory 80", "such as 80GiB", f"memory {TINY} --memory 80GiB"),
    "stage without a pipeline": (f"comm {TWO} --of-stage 1", "give --pp N", f"comm {TWO} --of-stage 1 --pp 2"),
    "stage that is not there": (
        f"comm {TWO} --pp 2 --of-stage 2",
        "give one from 0 to 1",
        f"comm {TWO} --pp 2 --of-stage 1",
    ),
    "regions of all stages": (f"regions {TWO} --pp 2", "--of-stage 0 to 1", f"regions {TWO} --pp 2 --of-stage 0"),
    "misspelt pass": ("run {small}:build --until anotate", "annotate", "run {small}:build --until annotate"),
    "pass of pipelines": (
        f"run {TWO} --until partition_stages",
        "where the plan has a pipeline",
        f"run {TWO} --until partition_stages --pp 2",
    ),
    "part of a name": (f"explain {TINY} wte --tp 2", "transformer.wte", f"explain {TINY} transformer.wte --tp 2"),
    "explanation of one rank": (
        f"explain {TINY} transformer.wte",
        "give --tp N",
        f"explain {TINY} transformer.wte --tp 2",
    ),
    "level by another name": (f"verify {TINY} --level fast", "static, values", f"verify {TINY} --level static"),
    "context parallelism": (f"memory {TINY} --cp 2", "leave cp=1", f"memory {TINY} --cp 1"),
    "axis of no schedule": (
        "schedule --pp 2 --microbatches 4 --tp 2",
        "has no --tp, which says nothing of it; leave it out",
        "schedule --pp 2 --microbatches 4",
    ),
    "schedule without microbatches": ("schedule --pp 4", "--microbatches", "schedule --pp 4 --microbatches 8"),
    "misspelt schedule": (
        "schedule --pp 4 --microbatches 8 --schedule 1fb1",
        "1f1b",
        "schedule --pp 4 --microbatches 8 --schedule 1f1b",
    ),
    "ranks that do not fit": ("groups --world-size 6 --tp 4", "6", "groups --world-size 8 --tp 4"),
    "no plan file": (
        f"trace {TINY} --plan {{tmp}}/plam.yaml",
        "No such file",
        f"trace {TINY} --plan {{tmp}}/plan.yaml",
    ),
    "option of another library": (
        f"trace {TINY} --plan {{tmp}}/long.yaml",
        "unknown option tensor_parallel; choose from tp,",
        f"trace {TINY} --plan {{tmp}}/plan.yaml",
    ),
    "plan that is no YAML": (
        f"trace {TINY} --plan {{tmp}}/odd.yaml",
        "odd.yaml",
        f"trace {TINY} --plan {{tmp}}/plan.yaml",
    ),
    "shard of one rank": (
        f"trace {TINY} --shard optimizer",
        "dp of at least 2",
        f"trace {TINY} --shard optimizer --dp 2",
    ),
    "experts split by a third": (
        f"trace {TINY} --ep 2 --tp 4 --etp 3",
        "give 1 or 4",
        f"trace {TINY} --ep 2 --tp 4 --etp 4 --dp 2",
    ),
    "split without a way": (
        f"run {TINY} --tp 2 --split *.c_fc",
        "write NAME=VALUE",
        f"run {TINY} --tp 2 --split *.c_fc=column",
    ),
    "split by a short word": (
        f"run {TINY} --tp 2 --split *.c_fc=col",
        "choose one of column",
        f"run {TINY} --tp 2 --split *.c_fc=column",
    ),
    "split of nothing": (
        f"run {TINY} --tp 2 --split mlp.c_fc=column",
        "matches no module",
        f"run {TINY} --tp 2 --split *.mlp.c_fc=column",
    ),
    "no microbatches": (f"trace {TINY} --microbatches 0", "microbatches must be", f"trace {TINY} --microbatches 1"),
    "stages without a pipeline": (
        f"trace {TWO} --virtual-stages 2",
        "give pp of at least 2",
        f"trace {TWO} --virtual-stages 2 --pp 2",
    ),
    "precision that is not there": (f"trace {TINY} --precision fp8", "bf16", f"trace {TINY} --precision bf16"),
    "dispatch without ranks": (f"trace {TINY} --dispatch dropless", "give ep of at least 2", f"trace {TINY} --ep 1"),
    "flags on a text": ("run {tmp}/trace.txt --tp 2", "edit its plan line", "run {tmp}/trace.txt"),
    "text of a plan": (
        "verify {tmp}/plan.yaml",
        "name a file that 'fxpar run --dump'",
        "verify {tmp}/trace.txt --level static",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes")
    (path / "plan.yaml").write_text("tp: 2\n")
    (path / "long.yaml").write_text("tensor_parallel: 2\n")
    (path / "odd.yaml").write_text("tp: [2\n")
    assert fxpar("trace", TINY, "--out", str(path / "trace.txt")).status == 0
    return path


@pytest.mark.parametrize("name", LINES)
def test_a_mistake_is_told_in_two_lines_and_the_remedy_works(name: str, small: str, folder: Path) -> None:
    wrong, said, right = LINES[name]
    words = [word.format(small=small, tmp=folder) for word in wrong.split()]
    result = fxpar(*words)
    assert result.status == 2, result.err
    assert result.out == ""
    assert said in result.err
    assert result.err.startswith("error: ")
    assert len(result.err.splitlines()) <= 2
    followed = fxpar(*(word.format(small=small, tmp=folder) for word in right.split()))
    assert followed.status == 0, followed.err


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.fc(x).square().mean()}


def parallel(**options: object) -> object:
    """A parallel module of one rank, but for what options say."""
    arguments = {"plan": package.Plan(), "example": {"x": torch.randn(2, 4)}} | options
    return package.parallelize(Model(), **arguments)  # type: ignore[arg-type]


def step(**batch: torch.Tensor) -> object:
    return parallel().train_step(batch)  # type: ignore[attr-defined]


# The same in a script: what is wrong, a part of what is said, and what follows it.
CALLS: dict[str, tuple[Callable[[], object], str, Callable[[], object]]] = {
    "plan as a mapping": (
        lambda: parallel(plan={"tp": 1}),
        "pass fxpar.Plan(tp=…)",
        lambda: parallel(plan=package.Plan(tp=1)),
    ),
    "half a rank": (lambda: package.Plan(tp=1.5), "must be an integer", lambda: package.Plan(tp=2)),  # type: ignore[arg-type]
    "ranks without torchrun": (
        lambda: parallel(plan=package.Plan(tp=2)),
        "start with torchrun --nproc-per-node 2",
        lambda: parallel(plan=package.Plan(tp=1)),
    ),
    "example of one sample": (
        lambda: parallel(example={"x": torch.randn(1, 4)}),
        "use at least two",
        lambda: parallel(example={"x": torch.randn(2, 4)}),
    ),
    "example by another name": (
        lambda: parallel(example={"y": torch.randn(2, 4)}),
        "choose from x",
        lambda: parallel(example={"x": torch.randn(2, 4)}),
    ),
    "loss by another name": (lambda: parallel(loss="los"), "loss", lambda: parallel(loss="loss")),
    "batch by another name": (lambda: step(y=torch.randn(2, 4)), "x", lambda: step(x=torch.randn(2, 4))),
    "batch of another width": (
        lambda: step(x=torch.randn(2, 5)),
        "see that the plain model runs on this batch",
        lambda: step(x=torch.randn(2, 4)),
    ),
    "timeout of nothing": (lambda: parallel(timeout=0), "pass a positive number", lambda: parallel(timeout=60)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_in_a_script_names_a_remedy_that_works(name: str) -> None:
    wrong, said, right = CALLS[name]
    with pytest.raises(FxparError) as caught:
        wrong()
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2
    assert right() is not None
