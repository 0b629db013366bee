"""The site builds without a warning, its reference is complete, and what it shows is run and can be read."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import runpy
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
import yaml
from torch import nn

import fxpar
from fxpar.capture.capture import capture
from fxpar.cli.main import _application, main
from fxpar.cli.plan_flags import plan_flags
from fxpar.loop.train_options import TrainOptions
from fxpar.rules import unregister_rule
from tests.runtime.world import World
from tests.samples.scripts import script
from tests.zoo import CASES
from tools import pages

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors, pages that no menu lists: each is a warning, and none is allowed."""
    line = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(line, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    assert "Where to begin" in index
    fetched = re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?:', index)
    assert not fetched, "a page fetches nothing from elsewhere"


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: str(path.name))
def test_written_pages_equal_their_sources(path: Path) -> None:
    assert path.read_text() == pages.PAGES[path](), "run python tools/pages.py"


@pytest.mark.matrix
@pytest.mark.parametrize("path", pages.PICTURES, ids=lambda path: str(path.name))
def test_pictures_are_those_that_fxpar_draws(path: Path) -> None:
    assert path.read_text() == pages.PICTURES[path](), "run python tools/pages.py"


def test_every_option_command_and_error_has_an_entry() -> None:
    options = (_DOCS / "plan-options.md").read_text()
    assert [flag.name for flag in plan_flags() if f"flag `{flag.name}" not in options] == []
    group: Any = typer.main.get_command(_application())
    commands = (_DOCS / "commands.md").read_text()
    assert [name for name in group.commands if f"\n## fxpar {name}\n" not in commands] == []
    errors = (_DOCS / "errors.md").read_text()
    assert [kind.__name__ for kind in pages.error_classes() if f"\n## `{kind.__name__}`\n" not in errors] == []


def test_public_names_are_listed_everywhere() -> None:
    names = set(fxpar.__all__)
    assert {kind.__name__ for kind in pages.error_classes()} <= names
    assert [name for name in names if f"`{name}`" not in (fxpar.__doc__ or "") and name not in ("optim",)] == []
    documented = set(re.findall(r"^::: fxpar\.(\w+)", (_DOCS / "api.md").read_text(), re.MULTILINE))
    errors = {name for name in names if name.endswith("Error") or name == "CheckFailed"}
    assert names - errors - {"ops"} == documented
    assert all(name in dir(fxpar) and getattr(fxpar, name) for name in names)


def _example(name: str) -> str:
    text = getattr(fxpar, name).__doc__ or ""
    found = re.search(r"```python\n(.*?)\n\s*```", text, re.DOTALL)
    assert found is not None, f"{name} has no example"
    lines = found[1].split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)


class Words(nn.Module):
    """A language model of a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.table(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Regression(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.down(self.up(x).relu()).square().mean()
        return loss


# Those whose subclasses say all, and a room of operators.
_WITHOUT = {kind.__name__ for kind in pages.error_classes()} - {"FxparError"} | {"ops", "optim", "testing"}


@pytest.mark.parametrize("name", sorted(set(fxpar.__all__) - _WITHOUT))
def test_examples_of_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    batch, plain = (torch.randn(4, 6),), Regression()
    scope: dict[str, Any] = {"fxpar": fxpar, "torch": torch, "batch": batch, "loader": [batch, batch]}
    scope |= {"dataset": torch.randn(20, 6), "model": plain}
    if name not in ("parallelize", "materialize", "Trainer"):
        scope["model"] = fxpar.parallelize(plain, fxpar.Plan(), example=batch)
        scope["optimizer"] = fxpar.Optimizer(scope["model"], "adamw", lr=1e-3)
    if name in ("perplexity", "cloze_accuracy", "Trainer"):
        scope["language_model"] = Words().train(name == "Trainer")
        scope |= {"rows": [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 8, "transformers": transformers}
    if name == "PassManager":
        case = CASES["gpt2"]
        scope["captured"] = capture(case.model(), case.example(), case.plan(1)).program
    if name == "register_rule":
        torch.library.define("mylib::product", "(Tensor x, Tensor weight) -> Tensor")
        torch.library.impl("mylib::product", "CompositeImplicitAutograd", torch.matmul)
    exec(_example(name), scope)
    if name == "register_rule":
        unregister_rule(torch.ops.mylib.product.default)


def test_the_own_model_of_the_quickstart_trains_on_two_processes(world2: World, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (_DOCS / "quickstart.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(program)
    texts = world2.run(script, tmp_path / "mine.py", (), tmp_path)
    losses = [re.findall(r"step \d: loss (\d+\.\d{6})", text) for text in texts]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5
    assert float(losses[0][-1]) < float(losses[0][0])
    assert "weight tp:S(" in texts[0]
    alone = script_alone(program.replace("fxpar.Plan(tp=2)", "fxpar.Plan()"), tmp_path)
    assert [float(loss) for loss in losses[0]] == pytest.approx(alone, abs=2e-6), "those of one device"
    (line,) = re.findall(r"^    fxpar (verify .*)", (_DOCS / "quickstart.md").read_text(), re.MULTILINE)
    assert main(shlex.split(line.replace("mine.py", str(tmp_path / "mine.py")))) == 0


def script_alone(program: str, folder: Path) -> list[float]:
    """The losses of the page's program on one process."""
    (folder / "alone.py").write_text(program)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(folder / "alone.py"), run_name="__main__")
    return [float(loss) for loss in re.findall(r"step \d: loss (\d+\.\d{6})", out.getvalue())]


def test_help_names_passes_and_lists_the_options_of_a_training() -> None:
    assert "= (canonicalize, recognize_experts, fold_masks, " in str(inspect.signature(fxpar.parallelize))
    words = set(re.findall(r"\w+", fxpar.train.__doc__ or ""))
    assert [option.name for option in dataclasses.fields(TrainOptions) if option.name not in words] == []


def test_the_programs_of_the_page_of_unit_tests_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", (_DOCS / "unit-tests.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        exec(program, {})


def test_texts_of_the_troubleshooting_page_are_those_of_errors() -> None:
    shown = re.findall(r"^\| `([^`]+)`", (_DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(shown) > 25
    texts: list[str] = []
    for path in (*(_ROOT / "fxpar").rglob("*.py"), *(_ROOT / "passes").glob("*.py")):
        constants = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        texts += [node.value for node in constants if isinstance(node.value, str)]
    everything = "\n".join(texts)
    assert [text for text in shown if text not in everything] == []


PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(_ROOT)) for p in _DOCS.rglob("*.md"))]


def test_pages_can_be_read() -> None:
    """No paragraph over 90 words; sentences of 20 at most, on average over each page."""
    long: dict[str, float] = {}
    for page in PAGES:
        text = re.sub(r"```.*?```", "", (_ROOT / page).read_text(), flags=re.DOTALL)
        parts = [part for part in re.split(r"\n\s*\n", text) if not re.match(r"\s*([|#]|:::)|    ", part)]
        words = [len(part.split()) for part in parts]
        assert max(words) <= 90, (page, parts[words.index(max(words))])
        parts = [item for part in parts for item in re.split(r"\n(?=[-*] |\d+\. )", part)]
        sentences = [s for part in parts for s in re.split(r"(?<=[.!?])\s", part) if len(s.split()) > 2]
        mean = statistics.mean(len(sentence.split()) for sentence in sentences)
        if mean > 20:
            long[page] = mean
    assert long == {}


@pytest.mark.matrix
def test_the_large_model_fits_as_the_page_of_plans_says() -> None:
    (line,) = re.findall(r"^    fxpar (memory hf:llama.*)", (_DOCS / "choose-a-plan.md").read_text(), re.MULTILINE)
    assert main(shlex.split(line)) == 1
    assert main([*shlex.split(line), "--recompute", "full"]) == 0


def test_programs_that_are_shown_are_run() -> None:
    """Those of the page of options are examples of docstrings; all others are `python` blocks."""
    unrun = [page for page in PAGES if "```py\n" in (_ROOT / page).read_text()]
    assert unrun == ["docs/plan-options.md"]


def test_every_page_is_in_the_menu() -> None:
    menu = yaml.safe_load(re.sub(r"!!\S+", "", (_ROOT / "mkdocs.yml").read_text()))["nav"]
    listed = {page for section in menu for entries in section.values() for page in entries}
    assert listed == {str(path.relative_to(_DOCS)) for path in _DOCS.rglob("*.md")}
