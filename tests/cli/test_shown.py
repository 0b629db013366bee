"""What commands say besides their figures: versions, sizes, kernels, what stages send, and all of it at any width."""

import io
import re
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

from fxpar.cli.models import with_rows
from fxpar.cost import measure as measuring
from fxpar.errors import PlanError
from fxpar.runtime import world
from fxpar.text.tables import table
from tests.cli.tool import TINY, fxpar

STAGES = ("hf:llama,num_hidden_layers=4,hidden_size=32,attention_dropout=0.1", "--tp", "2", "--pp", "4")


def test_the_version_is_told() -> None:
    result = fxpar("--version")
    assert (result.status, result.out) == (0, "fxpar 0.1.0\n")


def test_the_help_lists_commands_and_flags_in_groups() -> None:
    text = fxpar("--help").out
    for panel in ("See what a plan does", "Prove it", "Count what it costs", "Arrange ranks"):
        assert f"─ {panel} ─" in text
    text = fxpar("memory", "--help").out
    panels = [match.strip(" ─") for match in re.findall(r"╭─ (.*?) ─+╮", text)]
    assert panels[:4] == ["Arguments", "Options", "Ranks", "Plan"]
    assert {"Plan: experts", "Plan: pipeline", "Model and example"} <= set(panels)
    ranks = text.partition("─ Ranks ─")[2].partition("╰")[0]
    assert re.findall(r"--(\w+) ", ranks) == ["tp", "dp", "cp", "pp", "ep", "etp"]


def test_an_error_of_a_pass_names_it_once(small: str) -> None:
    said = fxpar("run", f"{small}:build", "--passes", f"{small}:FAULTY").err
    assert said.count("faulty:") == 1
    assert "raised by" not in said


@pytest.mark.parametrize(
    ("words", "sizes"),
    [(("transformer.wte.weight", "--tp", "2"), "b = 8, s = 1024"), (("cut 1", "--pp", "2"), "b = 3, s = 16")],
)
def test_explain_says_for_what_sizes_times_are(words: tuple[str, ...], sizes: str) -> None:
    model = ("explain", "hf:gpt2,n_layer=2", *words)
    assert sizes in fxpar(*model).out.splitlines()[-1]
    found = fxpar(*model, "--json").document
    said = found["sizes"] if isinstance(found, dict) else found[0]["sizes"]
    assert ", ".join(f"{name} = {size}" for name, size in said.items()) == sizes


def test_explain_suggests_names_that_are_near() -> None:
    said = fxpar("explain", TINY, "transformer.h.0.mlp.c_fx", "--tp", "2").err
    assert "did you mean transformer.h.0.mlp.c_fc or " in said


def test_kernels_are_those_of_the_plans_machine() -> None:
    assert fxpar("memory", TINY, "--json").document["device"] == "cuda"
    assert re.search(r"kernels +of cuda\b", fxpar("memory", TINY).out)
    assert fxpar("memory", TINY, "--cost", "multiprocessors=1", "--json").document["device"] == "cpu"
    assert re.search(r"kernels +of cpu\b", fxpar("report", TINY, "--device", "cpu").out)


def test_what_stages_send_and_equal_ones_are_listed_once() -> None:
    document = fxpar("comm", *STAGES, "--json").document
    size = 3 * 16 * 32 * 4
    there = [(s, s + 1, "forward", size) for s in range(3)]
    back = [(s + 1, s, "backward", size) for s in range(3)]
    found = [(one["stage"], one["to"], one["phase"], one["bytes"]) for one in document["sends"]]
    assert sorted(found) == sorted([*there, *back])
    assert all(one["seconds"] == pytest.approx(5e-6 + size / 320e9) for one in document["sends"])
    whole = document["collectives"]
    assert len(whole) == 4 * 4 + 1 + 3  # of layers, of the embedding, of the loss
    text = fxpar("comm", *STAGES).out
    assert re.search(r"stages 1–2, each: collectives over tp", text)
    assert len(re.findall(r"^forward, model\.layers\.\d", text, re.MULTILINE)) == 3
    sent = text.partition("what stages send for each microbatch")[2]
    assert [line.split()[:3] for line in sent.splitlines() if "ward" in line] == [
        ["0–2", "1–3", "forward"],
        ["1–3", "0–2", "backward"],
    ]


def test_what_one_stage_sends_is_listed() -> None:
    sent = fxpar("comm", *STAGES, "--of-stage", "1", "--json").document["sends"]
    assert {(one["stage"], one["to"], one["phase"]) for one in sent} == {(1, 2, "forward"), (1, 0, "backward")}


def test_equal_layers_are_listed_once() -> None:
    text = " ".join(fxpar("comm", STAGES[0], "--tp", "2").out.split())
    assert "forward, model.layers.0–3, each" in text
    assert "backward, model.layers.3–0, each" in text
    assert text.count("backward, model.layers") == 1


def test_equal_regions_and_what_ends_them_are_listed_once() -> None:
    words = ("hf:mixtral,num_hidden_layers=4,num_local_experts=2", "--dp", "2", "--ep", "2", "--etp", "1")
    text = fxpar("regions", *words, "--dispatch", "dropless").out
    assert "\n2–4, each" in text
    assert "\nforward: %send_rows (model.layers.0.mlp.experts, " in text
    assert len(re.findall("%send_rows.* and 3 like it sends as many rows", text)) == 2


def test_microbatches_count_a_whole_step() -> None:
    words = ("comm", "hf:gpt2,n_layer=1", "--tp", "2", "--dp", "2", "--json")
    one, three = (fxpar(*words, "--microbatches", str(n)).document["totals"] for n in (1, 3))
    assert "3 microbatches" in three
    once = one["parameter"]
    for key in ("count", "bytes"):
        assert three["3 microbatches"][key] == 3 * (one["all"][key] - once[key]) + once[key]
    assert "Of one of 3 microbatches" in fxpar("report", *words[1:-1], "--microbatches", "3").out


def test_microbatches_limit_what_is_in_flight() -> None:
    def flying(*words: str) -> list[int]:
        return [line["in_flight"] for line in fxpar("memory", *STAGES, *words, "--json").document["stages"]]

    assert flying() == [4, 3, 2, 1]
    assert flying("--microbatches", "2") == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "words", [(), ("--microbatches", "4"), ("--tp", "2"), ("--pp", "2"), ("--optimizer", "adamw+main")]
)
def test_the_peak_is_never_below_its_parts(words: tuple[str, ...]) -> None:
    small = ("--size", "b=2", "--size", "s=2")
    for rank in fxpar("memory", "hf:gpt2,n_layer=2", *words, *small, "--json").document["ranks"]:
        held = rank["parameters"] + rank["copies"] + rank["buffers"] + rank["optimizer"]
        assert rank["peak"] >= held + rank["gradients"]
        assert rank["peak"] >= held + rank["activations"]


def test_a_stage_without_products_is_warned_of() -> None:
    said = fxpar("comm", TINY, "--pp", "6").err
    assert said == "warning: no matrix product in stage 0 of 6; give a smaller --pp, or other --stages\n"
    assert fxpar("comm", TINY, "--pp", "2").err == ""


def test_context_parallel_ranks_are_refused_by_name() -> None:
    for command in ("memory", "comm", "report", "trace", "verify"):  # each in front of the model
        assert "cp=2 is not supported yet: leave cp=1" in fxpar(command, TINY, "--cp", "2").err
    assert "has no --cp" in fxpar("schedule", "--pp", "2", "--microbatches", "2", "--cp", "2").err
    assert "warning: cp is not supported yet" in fxpar("groups", "--world-size", "4", "--cp", "2").err


def test_rows_that_do_not_divide_are_found_before_the_trace(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpar.cli.files.capture_differentiable", None)
    said = fxpar("comm", f"{small}:build", "--dp", "2").err
    assert "has 3 rows, which 2 data ranks (dp=2) cannot share out; give --batch 2 (rows for each data rank)" in said


def test_batch_sizes_the_example_of_a_function(small: str) -> None:
    for words, rows in ((("--batch", "2"), 2), (("--batch", "5"), 5), (("--batch", "2", "--dp", "3"), 6)):
        symbols = fxpar("trace", f"{small}:build", *words, "--json").document["symbols"]
        assert symbols["b"]["example"] == rows
    assert "--batch: 0 is too small" in fxpar("trace", f"{small}:build", "--batch", "0").err


def test_an_error_of_a_launched_process_begins_with_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("Traceback", file=sys.stderr))
    world._say_errors_first.__wrapped__()
    error = PlanError("the plan needs 4 processes", where="world size", remedy="start 4")
    sys.excepthook(PlanError, error, None)
    sys.excepthook(ValueError, ValueError("another"), None)
    said = capsys.readouterr().err.splitlines()
    assert said == ["error: world size: the plan needs 4 processes; start 4", "Traceback", "Traceback"]


def test_equal_stages_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those of stages that are measured one by one."""
    whole, calls = measuring.measure, list[int]()

    def counted(*args: object, **options: object) -> object:
        calls.append(1)
        return whole(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "measure", counted)
    shared = fxpar("memory", *STAGES, "--json").document
    few = len(calls)
    monkeypatch.setattr(measuring, "_form", lambda program, lowered: (object(), ("",)))
    assert fxpar("memory", *STAGES, "--json").document == shared
    assert few * 4 == (len(calls) - few) * 3  # of four stages two are equal
    assert {module["module"] for module in shared["modules"]} >= {f"model.layers.{n}" for n in range(4)}


class Consoles:
    """Print the same at several widths."""

    def __init__(self) -> None:
        self.of = {
            width: Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
            for width in (40, 80, 200)
        }

    def print(self, *args: Any, **options: Any) -> None:
        for console in self.of.values():
            console.print(*args, **options)

    def text(self, width: int) -> str:
        file = self.of[width].file
        assert isinstance(file, io.StringIO)
        return file.getvalue()


# A command with tables, and lines that may be longer, which terminals fold.
COMMANDS = {
    "stages": (("memory", *STAGES), "^$"),
    "collectives": (("comm", *STAGES), "collectives over|constants of|send for"),
    "passes": (("passes",), "^$"),
    "report": (("report", TINY, "--tp", "2"), "^$"),
}
NUMBERS = re.compile(r"\d[\d.,]* (?:[KMGT]iB|B|µs)|\d+\.\d%")


@pytest.mark.parametrize("name", COMMANDS)
def test_tables_are_read_at_any_width(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut or folded inside: the amounts of the widest table stand in the others."""
    consoles, (words, longer) = Consoles(), COMMANDS[name]
    monkeypatch.setattr("fxpar.cli.plan_flags.console", lambda stream: consoles)
    assert fxpar(*words).status == 0
    wide = set(NUMBERS.findall(consoles.text(200)))
    assert len(wide) > 5 or name == "passes"
    for width in (40, 80):
        lines = [line.rstrip() for line in consoles.text(width).splitlines() if not re.search(longer, line)]
        assert wide <= set(NUMBERS.findall(consoles.text(width))), width
        assert max(map(len, lines)) <= width


def test_columns_beyond_the_width_follow_with_the_first_again() -> None:
    rows = table("what", *(f"rank {n}" for n in range(8)), right=tuple(f"rank {n}" for n in range(8)))
    rows.add_row("parameters", *("100.5 MiB" for _ in range(8)))
    rows.add_row("  whole on every rank", *(f"{n} B" for n in range(8)))
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(rows)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert [line.split()[0] for line in lines if line.startswith(("what", "parameters"))] == ["what", "parameters"] * 2
    assert max(map(len, lines)) <= 60
    for n in range(8):
        assert sum(f"{n} B" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("model.layers.10.input_layernorm", ["model.", "layers.10.", "input_", "layernorm"]),
        ("1.5 MiB of 12.25", ["1.5 MiB of", "12.25"]),
        ("all the words", ["all the", "words"]),
    ],
)
def test_names_break_at_their_signs_and_numbers_never(text: str, lines: list[str]) -> None:
    rows = table("n")
    rows.add_row(text)
    console = Console(width=11, record=True, file=io.StringIO())
    console.print(rows)
    assert [line.rstrip() for line in console.export_text().splitlines()][2:] == lines


def test_examples_of_functions_keep_scalars() -> None:
    batch = {"x": torch.arange(3), "scale": torch.tensor(2.0), "name": "a"}
    found = with_rows(batch, 5, "here")
    assert found["x"].tolist() == [0, 1, 2, 0, 1]
    assert (found["scale"].item(), found["name"]) == (2.0, "a")
