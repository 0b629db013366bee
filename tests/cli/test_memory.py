"""memory and report at the command line."""

from pathlib import Path

import pytest

from fxpar.layout.symbolic_sizes import evaluate, parse_size
from tests.cli.tool import LOCAL, fxpar

HALVES = ("--tp", "2", "--split", "fc=column", "--split", "proj=row")

LARGE = (
    "hf:llama,hidden_size=4096,intermediate_size=11008,num_hidden_layers=1,num_attention_heads=32,"
    "num_key_value_heads=8,vocab_size=32000,attention_dropout=0.0"
)


@pytest.fixture(scope="module")
def folder(small: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of the small model, split."""
    path = tmp_path_factory.mktemp("memory") / "dump"
    assert fxpar("run", f"{small}:build", *HALVES, "--dump", str(path)).status == 0
    return path


def test_memory_json_has_ranks_and_modules(small: str) -> None:
    found = fxpar(
        "memory", f"{small}:build", *HALVES, "--json", "--size", "b=5", "--optimizer", "sgd-momentum"
    ).document
    assert set(found) == {
        *("name", "plan", "sizes", "optimizer", "device"),
        *("ranks", "modules", "activations", "peak", "phases", "largest", "stages"),
    }
    assert found["sizes"]["b"] == 5
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    # A column of 12 by 20 with its bias, a row, and the whole bias behind the sum.
    weights = (10 * 12 + 10 + 12 * 10 + 12) * 4
    for rank in found["ranks"]:
        assert rank["optimizer"] == rank["gradients"] == rank["parameters"] == weights
        assert rank["activations"] == sum(module["activations"] for module in found["modules"])
        assert rank["activations"] == evaluate(parse_size(found["activations"]), found["sizes"])


def test_memory_prints_tables_that_fit_the_line(folder: Path) -> None:
    result = fxpar("memory", str(folder / LOCAL))
    assert result.status == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "memory a rank" in lines
    assert "what rank 0–1, each" in lines
    assert "parameters 1.0 KiB" in lines
    assert any(line.startswith("proj 528 B 528 B 1.0 KiB") for line in lines)
    assert max(len(line) for line in result.out.splitlines()) <= 80
    assert "peak by phase" in lines
    assert "passes" not in lines


def test_report_of_a_text_is_that_of_its_model(small: str, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "report.html"
    result = fxpar("report", str(folder / LOCAL), "--html", str(page), "--json")
    assert result.status == 0
    text = result.document
    assert text["html"] == str(page)
    assert page.read_text().startswith("<!doctype html>")
    words = (f"{small}:build", *HALVES, "--json")
    model = fxpar("report", *words).document
    assert [entry["name"] for entry in model["passes"]][-1] == "localize"
    assert text["passes"] == []
    for key in ("collectives", "ranks", "modules", "sizes", "unsplit", "activations", "size"):
        assert text[key] == model[key]
    listed = fxpar("comm", *words).document["collectives"]
    assert sum(c["count"] for c in model["collectives"]) == len(listed) == 1
    assert sum(c["bytes"] for c in model["collectives"]) == sum(c["bytes"] for c in listed)


def test_report_prints_all_of_it(folder: Path) -> None:
    result = fxpar("report", str(folder / LOCAL))
    for title in ("passes", "collectives of a step", "memory a rank", "memory by module", "not split"):
        assert f"\n{title}\n" in result.out


def test_a_large_model_needs_no_memory() -> None:
    found = fxpar("memory", LARGE, "--tp", "8", "--precision", "bf16", "--size", "s=8192", "--size", "b=1", "--json")
    assert found.status == 0
    (first, *_) = found.document["ranks"]
    attention, mlp, words, norms = 2 * 4096 * 512 + 2 * 4096 * 128, 3 * 4096 * 1376, 2 * 4096 * 4096, 3 * 4096
    assert first["parameters"] == 4 * (attention + mlp + words + norms)
    assert first["copies"] == first["parameters"] // 2
    assert first["padding"] == 4 * 2 * 96 * 4096
    assert first["activations"] > 2**28  # 8192 tokens, of which the model was traced with 16


def test_memory_of_a_gpu_needs_none() -> None:
    """On GPUs dropout is one kernel, which makes no words of random bits."""
    words = ("memory", "hf:gpt2,n_layer=1,attn_pdrop=0.0", "--tp", "2", "--size", "s=64", "--json")
    on_cpu, on_gpu = (fxpar(*words, "--device", device).document for device in ("cpu", "cuda"))
    assert (on_cpu["device"], on_gpu["device"]) == ("cpu", "cuda")
    assert [moment["phase"] for moment in on_gpu["phases"]] == ["forward", "backward"]
    assert on_gpu["peak"]["bytes"] == max(moment["bytes"] for moment in on_gpu["phases"]) < on_cpu["peak"]["bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("memory", "--device", "tpu"), "--device tpu: is unknown; choose one of cpu, cuda"),
        (("memory", "--optimizer", "lion"), "choose from adamw, sgd, sgd-momentum, muon, none"),
        (("memory", "--optimizer", "adamw+host"), "optimizer 'adamw+host': is unknown; choose from adamw"),
        (("memory", "--optimizer", "adamw+main+main"), "optimizer 'adamw+main+main': is unknown"),
        (("memory", "--memory", "80"), "--memory 80: is no size; write a number with a unit, such as 80GiB"),
        (("memory", "--memory", "0GiB"), "--memory 0GiB: is no size"),
        (("memory", "--memory", "8 gb"), "--memory 8 gb: is no size"),
        (("memory", "--size", "c=3"), "must be a symbol of the program"),
        (("report", "--size", "b=0"), "must be a positive integer"),
        (("report", "--html", "/dev/null/report.html"), "name a place that can be written"),
    ],
)
def test_bad_input_is_told(folder: Path, words: tuple[str, ...], message: str) -> None:
    command, *options = words
    result = fxpar(command, str(folder / LOCAL), *options)
    assert result.status == 2
    assert message in result.err


def test_memory_says_whether_a_plan_fits(small: str) -> None:
    """At exactly the peak it does; state in the host's memory is none of it."""
    words = ("memory", f"{small}:build", "--optimizer", "adamw+main")
    document = fxpar(*words, "--json").document
    assert "fits" not in document
    peak = max(rank["peak"] for rank in document["ranks"])
    limits = ((f"{peak}B", True), (f"{peak - 1}B", False), (f"{peak / 1024 + 1:.0f}KiB", True), ("1KB", False))
    for limit, fits in limits:
        result = fxpar(*words, "--json", "--memory", limit)
        assert result.status == (0 if fits else 1)
        assert result.document["fits"] is fits
    assert "It fits: rank 0 needs" in fxpar(*words, "--memory", "1TB").out
    assert "It does not fit: rank 0 needs" in fxpar(*words, "--memory", "1.5KiB").out


def test_main_weights_and_offloaded_state_are_counted(small: str) -> None:
    words = ("memory", f"{small}:build", "--json", "--precision", "bf16_weights", "--optimizer")
    plain, main, host, both = (
        fxpar(*words, f"adamw{more}").document["ranks"][0] for more in ("", "+main", "+offload", "+main+offload")
    )
    parameters = plain["parameters"]
    # Three tensors in float32 in place of two in bfloat16, and a gradient in float32.
    assert main["optimizer"] - plain["optimizer"] == 6 * parameters - 2 * parameters + 2 * parameters
    assert [rank["host"] for rank in (plain, main, host, both)] == [0, 0, 2 * parameters, 6 * parameters]
    # On its way: one chunk of it, and of gradients.
    assert both["optimizer"] == main["optimizer"]


def test_comm_and_report_count_what_is_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "checkpointed_model.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.utils.checkpoint import checkpoint\n\n\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc, self.proj = nn.Linear(12, 20), nn.Linear(20, 12)\n\n"
        "    def part(self, x):\n"
        "        return self.proj(self.fc(x).relu()).sigmoid()\n\n"
        "    def forward(self, x):\n"
        "        return checkpoint(self.part, x, use_reentrant=False).sum()\n\n\n"
        "def build():\n"
        "    return Model(), (torch.randn(3, 5, 12),)\n"
    )
    words = (f"{path}:build", "--tp", "2", "--split", "fc=column", "--split", "proj=row")
    assert fxpar("comm", *words, "--json").document["totals"]["recompute"]["count"] == 1
    again = [c for c in fxpar("report", *words, "--json").document["collectives"] if c["phase"] == "recompute"]
    assert [(c["op"], c["count"]) for c in again] == [("all_reduce", 1)]


def test_a_report_that_does_not_fit_says_so_and_has_pictures(small: str, tmp_path: Path) -> None:
    page = tmp_path / "sub" / "page.html"
    words = ("report", f"{small}:build", *HALVES, "--html", str(page))
    result = fxpar(*words, "--memory", "1KiB")
    assert result.status == 1
    assert "does not fit: rank 0 needs" in " ".join(result.out.split())
    text = page.read_text()
    assert [title in text for title in ('<h2 id="memory-over-time">', '<h2 id="groups-of-ranks">')] == [True, True]
    assert 'class="misses"' in text
    assert "one layer" not in text  # no module has a number
    fits = fxpar(*words[:-2], "--memory", "1GiB", "--json")
    assert fits.status == 0
    assert fits.document["verdict"]["fits"] is True
    assert fits.document["verdict"]["machine"]["memory"] == 2**30
    refused = fxpar(*words[:-2], "--memory", "much")
    assert refused.status == 2
    assert "is no size" in refused.err
