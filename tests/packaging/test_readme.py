"""What README, CONTRIBUTING and docs show is run as it stands, and what they point to is there."""

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import typer
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.capture.capture import capture
from fxpar.cli.main import _application, main
from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES, STEP_PASSES
from fxpar.pipeline.compiler.builtin_schedules import build_schedule
from fxpar.pipeline.compiler.schedules import parse_schedule
from fxpar.pipeline.compiler.simulation import verified
from fxpar.rules import unregister_rule
from fxpar.testing.check import check_operation, sample
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC, verify_static
from tests.loop.trainer_jobs import launched
from tests.runtime.world import World
from tests.samples.scripts import script
from tests.zoo import CASES

_ROOT = Path(__file__).parents[2]


def _blocks(file: str, language: str) -> list[str]:
    text = (_ROOT / file).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_training_program_runs_on_two_processes_with_one_loss(world2: World, tmp_path: Path) -> None:
    (program,) = _blocks("README.md", "python")
    (tmp_path / "train.py").write_text(program)
    texts = world2.run(script, tmp_path / "train.py", (), tmp_path)
    losses = {loss for text in texts for loss in re.findall(r"rank [01]: (loss \d+\.\d{4}, 29 tensors)", text)}
    assert len(losses) == 1, texts
    assert all(f"rank {rank}: loss" in text for rank, text in enumerate(texts))
    assert {folder.name for folder in (tmp_path / "saves").iterdir()} >= {"training-00000003-step-2"}


def test_the_training_of_adapters_runs_on_two_processes(world2: World, tmp_path: Path) -> None:
    (program,) = _blocks("docs/lora.md", "python")
    (tmp_path / "lora.py").write_text(program)
    texts = world2.run(script, tmp_path / "lora.py", (), tmp_path)
    assert len({loss for text in texts for loss in re.findall(r"rank [01]: (loss \d+\.\d{4})", text)}) == 1, texts
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(merged.config)
    ids = torch.arange(64).view(2, 32)
    with torch.no_grad():
        plain = base(ids).logits
        adapted: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        expected = adapted.eval()(ids).logits
        torch.testing.assert_close(merged.eval()(ids).logits, expected)
        assert (plain - expected).abs().max() > 1e-3


def test_the_training_by_trainer_runs_on_two_processes_and_generates(world2: World, tmp_path: Path) -> None:
    program, generation = _blocks("docs/trainer.md", "python")
    (tmp_path / "train.py").write_text(program)
    first, second = world2.run(_launched, tmp_path)
    losses = [re.findall(r"^loss (\d\.\d{4})$", text, flags=re.MULTILINE) for text in (first, second)]
    assert losses[0] == losses[1] != []
    assert (tmp_path / "out" / "checkpoint-3" / "training-00000001-step-3" / "training.json").is_file()
    names: dict[str, Any] = {"torch": torch, "transformers": transformers}
    with contextlib.chdir(tmp_path):
        exec(generation, names)
    assert names["ids"].shape == (1, 8)


def _launched(folder: Path) -> str:
    with launched():
        return script(folder / "train.py", (), folder)


def _commands() -> list[list[str]]:
    """The words of each command line that the documents show."""
    return _lines("docs/cli.md")


def _lines(file: str) -> list[list[str]]:
    """The words behind `fxpar` of each line of a document's blocks that is one of its commands."""
    lines = (line for block in _blocks(file, "sh") for line in block.splitlines())
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fxpar ")]


def _once() -> list[list[str]]:
    """Of each command the last line with the smallest model, or with none."""
    small = [words for words in _commands() if not any(word in ("hf:llama", "hf:mixtral") for word in words)]
    last = {words[0]: words for words in small}
    return [words for words in small if last[words[0]] is words]


@pytest.mark.parametrize("lines", [_once, pytest.param(_commands, marks=pytest.mark.matrix)])
def test_the_commands_of_the_readme_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[list[str]]]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in lines():
        # `diff` says by its status that the two programs differ.
        assert main(words) == (1 if words[0] == "diff" else 0), words


DOCUMENTS = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted((_ROOT / "docs").rglob("*.md"))]
of_each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(_ROOT)))


@of_each_document
def test_what_documents_point_to_is_there(document: Path) -> None:
    """Links with their headings, and the paths of sources, which are whole paths."""
    text = document.read_text()
    links = re.findall(r"\]\(([\w/.-]*)#?([\w-]*)\)", re.sub(r"`[^`\n]*`", "", text))
    targets = {(document.parent / file if file else document, heading) for file, heading in links}
    missing = [f"{file}#{heading}" for file, heading in targets if not file.exists() or not _has(file, heading)]
    assert missing == []
    paths = set(re.findall(r"`((?:fxpar|passes|samples|tests|tools|docs)/[\w/.]+)`", text))
    assert [path for path in sorted(paths) if not (_ROOT / path).exists()] == []
    assert re.findall(r"`\w+\.py`", text) == []


@of_each_document
def test_the_blocks_of_documents_have_commands_that_are_run(document: Path) -> None:
    lines = _lines(str(document.relative_to(_ROOT)))
    assert [words for words in lines if words not in _commands()] == []


def _has(file: Path, heading: str) -> bool:
    headings = re.findall(r"^#+ (.*)", file.read_text(), flags=re.MULTILINE)
    return not heading or heading in {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in headings}


def test_every_document_is_linked_from_the_readme_on() -> None:
    known, todo = set[Path](), [_ROOT / "README.md"]
    while todo:
        document = todo.pop()
        known.add(document)
        links = {(document.parent / link).resolve() for link in re.findall(r"\]\(([\w/.-]+\.md)", document.read_text())}
        todo += links - known
    assert [str(document) for document in DOCUMENTS if document not in known] == []


def test_the_map_of_the_source_has_every_room() -> None:
    text = (_ROOT / "docs/dev/layout.md").read_text()
    rooms = {f"fxpar/{path.parent.name}/" for path in (_ROOT / "fxpar").glob("*/__init__.py")} - {"fxpar/passes/"}
    assert sorted(room for room in {*rooms, "passes/"} if f"| `{room}` |" not in text) == []


def _shown(document: Path) -> Iterator[list[str]]:
    """Yields the words of each command that a document shows, in a block, an indented line or within a sentence."""
    text = document.read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += re.findall(r"^    (\w.*)", text, flags=re.MULTILINE)
    lines += re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        if re.match(r"(fxpar|make|python|torchrun) ", line):
            yield shlex.split(line, comments=True)


@of_each_document
def test_the_commands_of_documents_exist(document: Path) -> None:
    """Commands and options of fxpar, targets of make, files and options of scripts; those of docs/cli.md are run."""
    group: Any = typer.main.get_command(_application())
    for program, *words in _shown(document):
        if program == "make":
            targets = re.findall(r"^([\w-]+):", (_ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            assert set(words) <= {*targets, "-k"}, words
        elif program == "fxpar":
            if words[0].islower():  # no placeholder
                known = {name for option in group.commands[words[0]].params for name in _names(option)}
                assert {word for word in words if word.startswith("--")} <= known, words
        elif words[:2] == ["-m", "pytest"]:
            assert all((_ROOT / word).exists() for word in words if word.startswith("tests/")), words
        else:
            index = next(i for i, word in enumerate(words) if word.endswith(".py"))
            source = (_ROOT / words[index]).read_text()
            assert [word for word in words[index:] if word.startswith("--") and f'"{word}"' not in source] == []


def _names(option: Any) -> list[str]:
    return [*option.opts, *option.secondary_opts]


# Of each document with programs in Python how many there are; each is run by a test of this file, or of its room.
PROGRAMS = {
    "README.md": 1,
    "docs/dev/layouts-and-rules.md": 1,
    "docs/dev/write-a-pass.md": 2,
    "docs/evaluation.md": 2,
    "docs/lora.md": 1,
    "docs/optimizers.md": 2,
    "docs/quickstart.md": 1,
    "docs/trainer.md": 2,
    "docs/training-loop.md": 1,
    "docs/unit-tests.md": 2,
}


@of_each_document
def test_the_programs_of_documents_are_run_here(document: Path) -> None:
    name = str(document.relative_to(_ROOT))
    assert len(_blocks(name, "python")) == PROGRAMS.get(name, 0)


@pytest.mark.parametrize("file", ["README.md", "docs/verify-and-debug.md"])
def test_the_way_of_a_program_is_the_order_of_the_passes(file: str) -> None:
    (way,) = re.findall(r"→ capture →(.*?)→ run$", (_ROOT / file).read_text(), flags=re.DOTALL | re.MULTILINE)
    shown = re.findall(r"(\w+)(?: \(\w+\))?\s*(?:→|$)", way)
    order = [item.name for item in (*DEFAULT_PASSES, *STEP_PASSES)]
    assert shown == [name for name in order if name in shown]
    assert shown[: len(DEFAULT_PASSES)] == order[: len(DEFAULT_PASSES)]


def test_the_options_of_the_readme_are_those_of_the_commands() -> None:
    group: Any = typer.main.get_command(_application())
    for words in _commands():
        name, command, rest = group.resolve_command(group.make_context("fxpar", [words[0]]), words)
        assert command.make_context(name, rest).params


def test_the_lines_of_the_readme_are_those_of_the_program() -> None:
    (block,) = _blocks("README.md", "text")
    case = CASES["gpt2"]
    program = capture(case.model(), case.example(), case.plan(2)).program
    text = print_program(PassManager(DEFAULT_PASSES, STATIC).run(program))
    # Roles, reasons and places are left out there, and how many views came before is another matter of each version.
    lines = {_unnumbered(re.sub(r" \{.*\}|  # .*", "", line)) for line in text.splitlines()}
    assert {_unnumbered(line) for line in block.strip().splitlines()} <= lines


def _unnumbered(line: str) -> str:
    return re.sub(r"%view_\d+", "%view", line)


def test_the_program_that_explains_the_text_form_is_sound() -> None:
    (text,) = _blocks("docs/dev/layouts-and-rules.md", "text")
    program = parse_program(text)
    assert print_program(program) == text
    verify_static(program)


def test_the_schedule_of_the_runtime_page_is_the_one_it_is_said_to_be() -> None:
    text = (_ROOT / "docs/dev/runtime.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    found = verified(parse_schedule("\n".join(lines)))
    assert found.schedule.ranks == build_schedule("1f1b", pp=2, microbatches=3).ranks


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_the_loop_of_the_readme_trains(impl: str) -> None:
    (loop,) = re.findall(r"`(for batch in [^`]*)`", (_ROOT / "docs/cuda-graphs.md").read_text())
    torch.manual_seed(0)
    loader = [(torch.randn(3, 6),) for _ in range(4)]
    model = fxpar.parallelize(Negations(), fxpar.Plan(cuda_graphs=fxpar.CudaGraphs(impl)), loader[0])
    plain = Negations()
    plain.load_state_dict(model.full_state_dict())
    exec(loop, {"fxpar": fxpar, "loader": loader, "model": model})
    for (x,) in loader:
        plain(x).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


class Negations(nn.Module):
    """A layer between two negations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(-(-self.up(x)).tanh())
        return torch.neg(torch.neg(y)).square().mean()


def test_the_pass_of_the_guide_does_what_it_says() -> None:
    scope: dict[str, Any] = {"model": Negations(), "batch": (torch.randn(3, 6),)}
    written, tested = _blocks("docs/dev/write-a-pass.md", "python")
    exec(written, scope)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(tested, scope)
    assert scope["proof"].program.history[1].name == "drop_negations"
    assert text.getvalue().count("aten.neg.default(") == 2


def test_the_rule_of_the_guide_is_right() -> None:
    (block,) = _blocks("docs/dev/layouts-and-rules.md", "python")
    torch.library.define("mylib::gated_silu", "(Tensor gate, Tensor up) -> Tensor")
    torch.library.impl("mylib::gated_silu", "CompositeImplicitAutograd", lambda gate, up: functional.silu(gate) * up)
    exec(block, {"fxpar": fxpar, "torch": torch})
    operation = torch.ops.mylib.gated_silu.default
    x, y = torch.randn(2, 6, 12, dtype=torch.float64).unbind()
    try:
        found = check_operation(operation, [sample(x, y)])
    finally:
        unregister_rule(operation)
    assert not found.false_accepts
    assert any("S(0)" in signature for signature in found.accepted)
