"""What README, CONTRIBUTING and docs show is run as it stands, and what they point to is there."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

import fxpar
from fxpar.capture.capture import capture
from fxpar.cli.main import _application, main
from fxpar.manager import Pass, PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.pipeline.compiler.builtin_schedules import build_schedule
from fxpar.pipeline.compiler.schedules import parse_schedule
from fxpar.pipeline.compiler.simulation import verified
from fxpar.rules import unregister_rule
from fxpar.testing.check import check_operation, sample
from fxpar.text.printing import print_program
from fxpar.verification import verify
from fxpar.verify.static import STATIC
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
    assert {folder.name for folder in (tmp_path / "saves").iterdir()} >= {"training-00000003"}


def _commands() -> list[list[str]]:
    """The words of each command line that the documents show."""
    return _lines("docs/cli.md")


def _lines(file: str) -> list[list[str]]:
    (block,) = _blocks(file, "sh")
    lines = [shlex.split(line, comments=True) for line in block.strip().splitlines()]
    assert {line[0] for line in lines} == {"fxpar"}
    return [line[1:] for line in lines]


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


def test_the_commands_of_the_readme_are_among_them() -> None:
    assert [line for line in _lines("README.md") if line not in _commands()] == []


def _documents() -> list[Path]:
    return [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted((_ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", _documents(), ids=lambda path: str(path.relative_to(_ROOT)))
def test_what_documents_point_to_is_there(document: Path) -> None:
    """Links, and the paths of sources."""
    text = document.read_text()
    links = set(re.findall(r"\]\(([\w/.-]+\.md)\b", text))
    assert [link for link in sorted(links) if not (document.parent / link).exists()] == []
    paths = set(re.findall(r"`((?:fxpar|passes|samples|tests|tools)/[\w/.]+)`", text))
    assert [path for path in sorted(paths) if not (_ROOT / path).exists()] == []


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


def test_the_schedule_of_the_contributing_guide_is_the_one_it_is_said_to_be() -> None:
    section = (_ROOT / "CONTRIBUTING.md").read_text().partition("### Schedules")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("    ")]
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


def test_the_pass_of_the_contributing_guide_does_what_it_says() -> None:
    first, _ = _blocks("CONTRIBUTING.md", "python")
    scope: dict[str, object] = {}
    exec(first, scope)
    own = scope["drop_negations"]
    assert isinstance(own, Pass)
    plan = fxpar.Plan(tp=2, split={"up": "column", "down": "row"})
    proof = verify(Negations(), (torch.randn(3, 6),), plan, passes=[DEFAULT_PASSES[0], own, *DEFAULT_PASSES[1:]])
    assert proof.ok
    record = proof.program.history[1]
    assert (record.name, len(record.erased)) == ("drop_negations", 1)


def test_the_rule_of_the_contributing_guide_is_right() -> None:
    _, second = _blocks("CONTRIBUTING.md", "python")
    torch.library.define("mylib::gated_silu", "(Tensor gate, Tensor up) -> Tensor")
    torch.library.impl("mylib::gated_silu", "CompositeImplicitAutograd", lambda gate, up: functional.silu(gate) * up)
    exec(second, {"fxpar": fxpar, "torch": torch})
    operation = torch.ops.mylib.gated_silu.default
    x, y = torch.randn(2, 6, 12, dtype=torch.float64).unbind()
    try:
        found = check_operation(operation, [sample(x, y)])
    finally:
        unregister_rule(operation)
    assert not found.false_accepts
    assert any("S(0)" in signature for signature in found.accepted)
