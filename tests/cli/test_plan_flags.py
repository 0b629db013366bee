"""Every field of the plan is an option of the command line, says what it does there, and is refused beside a text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fxpar import Communication, Cost, CudaGraphs, Experts, Operators, Pipeline, Plan, Recompute
from fxpar.cli.output import CommandResult, Ui
from fxpar.cli.plan_flags import Request, command, plan_flags
from tests.cli.tool import TINY, fxpar

# Records that have a flag for each of their options.
RECORDS: dict[str, Any] = {
    kind.__name__.lower(): kind for kind in (Experts, Pipeline, Recompute, Communication, Operators)
}
# By the name of a flag the record of its option, and the option.
OPTIONS = {field.name: ("", field.name) for field in dataclasses.fields(Plan) if field.name not in RECORDS} | {
    record if field.name == "mode" else field.name: (record, field.name)
    for record, kind in RECORDS.items()
    for field in dataclasses.fields(kind)
}

sizes = st.integers(1, 64)
names = st.text("abz_.*019", min_size=1, max_size=8)
globs = st.lists(names, min_size=1, max_size=3).map(tuple)
parts = st.floats(0.01, 50, allow_nan=False).map(lambda x: float(f"{x:.4f}"))
pipeline: Mapping[str, Any] = {"pp": 2, "microbatches": 8}
experts: Mapping[str, Any] = {"tp": 2, "ep": 2, "etp": 1}


def words(*choices: str) -> st.SearchStrategy[str]:
    return st.sampled_from(choices)


def one(field: str, values: st.SearchStrategy[Any], **more: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Options of a plan by flag: one, and others that it needs."""
    return values.map(lambda value: {**more, field: value})


PLANS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    **{axis: one(axis, sizes) for axis in ("tp", "dp", "pp")},
    "cp": st.just({"cp": 1}),
    "ep": one("ep", words("4", "8").map(int), tp=4, dp=2, etp=1),
    "etp": one("etp", words("1", "2").map(int), tp=2, dp=2, ep=2),
    "virtual_stages": one("virtual_stages", sizes, **pipeline),
    "microbatches": one("microbatches", sizes),
    "schedule": one("schedule", words("1f1b", "gpipe"), **pipeline),
    "split": one("split", st.dictionaries(names, words("column", "row", "head", "vocab", "replicate"), min_size=1)),
    "batch_dims": one("batch_dims", st.dictionaries(names, st.integers(-3, 3), min_size=1)),
    "pad_values": one(
        "pad_values", st.dictionaries(names, st.one_of(st.integers(-100, 9), parts, st.booleans()), min_size=1)
    ),
    "loss_reduction": one("loss_reduction", words("mean", "token", "local_mean", "sum")),
    "batch_norm": one("batch_norm", words("refuse", "global")),
    **{field: one(field, globs) for field in ("batchwise_ops", "added_losses", "expert_modules")},
    **{field: one(field, st.booleans()) for field in ("sequence_parallel", "cast_inputs", "compile")},
    "shard": one("shard", words("optimizer", "gradients", "parameters"), dp=2),
    "dp_shard": one("dp_shard", words("2", "4", "8").map(int), dp=8, shard="optimizer"),
    "seed": one("seed", st.integers(0, 2**62)),
    "precision": one("precision", words("as_is", "fp32", "bf16", "fp16", "bf16_weights")),
    "recompute": one("recompute", words("none", "selective", "full")),
    "activation_memory_budget": one("activation_memory_budget", st.one_of(st.just(0.5), sizes), recompute="selective"),
    "collective_transport": one("collective_transport", words("auto", "nccl", "copy")),
    "token_chunks": one("token_chunks", st.one_of(sizes, st.just("auto"))),
    "stages": one("stages", st.one_of(st.just({"h.1": 1}), st.just((3, 1))), pp=2),
    "group_size": one("group_size", st.just(4), **pipeline, virtual_stages=2, schedule="interleaved_1f1b"),
    "dispatch": one("dispatch", words("static", "allgather", "alltoall", "dropless"), **experts),
    "recv_capacity_factor": one("recv_capacity_factor", parts.map(lambda x: 1 + x), **experts),
    "capacity_factor": one("capacity_factor", st.one_of(parts, sizes)),
    "drop_policy": one("drop_policy", words("probs", "position"), capacity_factor=1.25),
    "pad_to_capacity": one("pad_to_capacity", st.booleans(), capacity_factor=1.25),
    "spare_experts": one("spare_experts", sizes, **experts),
    "expert_loads": one("expert_loads", st.just("a.json"), **experts, spare_experts="auto"),
    "min_gain": one("min_gain", parts, **experts, spare_experts=1),
    "size_programs": one("size_programs", sizes),
    "cuda_graphs": one("cuda_graphs", st.builds(CudaGraphs, st.just("partial"), st.just(("attn", "mlp")), sizes)),
    "cost": one("cost", st.builds(Cost, parts, hidden=st.just(0.25), axes=st.just({"dp": {"latency": 2e-5}}))),
}


def plan_of(options: Mapping[str, Any]) -> Plan:
    """The plan with these options, by flag."""
    flat: dict[str, Any] = {}
    records: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        record, option = OPTIONS[name]
        (records.setdefault(record, {}) if record else flat)[option] = value
    return Plan(**flat, **{record: RECORDS[record](**values) for record, values in records.items()})


def command_line(options: Mapping[str, Any]) -> list[str]:
    """The flags that say what a plan's options are."""
    return [word for field, value in options.items() for word in flag_words("--" + field.replace("_", "-"), value)]


def flag_words(flag: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from (flag, f"{name}={json.dumps(entry) if not isinstance(entry, str) else entry}")
    elif isinstance(value, tuple):
        for entry in value:
            yield from (flag, str(entry))
    elif isinstance(value, (CudaGraphs, Cost)):
        yield from flag_words(flag, value.to_dict())
    else:
        yield from (flag, str(value))


def request_of(*line: str) -> Request:
    """What a command gets of a command line."""
    requests: list[Request] = []

    def keep(ui: Ui, request: Request) -> CommandResult:
        """Keeps its request."""
        requests.append(request)
        return CommandResult({}, lambda _: None)

    app = typer.Typer()
    command(app, keep)
    result = CliRunner().invoke(app, ["model", *line])
    assert result.exit_code == 0, result.output
    return requests[0]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a program's text."""
    folder = tmp_path_factory.mktemp("dump")
    assert fxpar("run", TINY, "--dump", str(folder)).status == 0
    return str(next(folder.glob("*-annotate.txt")))


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_field_is_an_option(name: str, text: str, data: st.DataObject) -> None:
    options = data.draw(PLANS[name])
    line = command_line(options)
    request = request_of(*line)
    assert request.plan == plan_of(options)
    flags = {"--" + name.replace("_", "-") for name in options}
    assert set(request.flags) == flags
    refused = fxpar("run", text, *line)
    assert refused.status == 2
    named, _, reason = refused.err.removeprefix(f"error: {text}: ").partition(": ")
    assert set(named.split(", ")) == flags
    assert reason.startswith("the plan stands in the text")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_its_help(name: str) -> None:
    flag = next(flag for flag in plan_flags() if (flag.record, flag.field) == OPTIONS[name])
    text = next(option.help for option in flag.annotation.__metadata__)
    assert len(text.split()) > 2


def test_there_are_no_other_flags() -> None:
    assert sorted(flag.key for flag in plan_flags()) == sorted(OPTIONS)
