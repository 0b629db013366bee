"""The scales measure what they say, and let nothing grow in silence."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import scales

pytest.importorskip("ruff", reason="the scales of complexity are ruff's")

FILES = {
    "fxpar/__init__.py": '"""A package."""\n',
    "fxpar/one.py": '''"""Says found in a text."""
from fxpar.two import Two
import torch._dynamo


class One:  # found in a comment
    found = Two
''',
    "fxpar/two.py": '"""Two."""\n\n\nclass Two:\n    own = 1  # noqa: F401\n    from fxpar.one import One\n',
    "fxpar/room/two.py": "from torch.fx import _pytree\n\n\nclass Two:\n    found, expert, experts = 1, 2, 3\n",
    "passes/fold.py": '@register_pass("fold")\ndef fold(a, b, c, d, e, f, g, h, i):\n    return custom_op(a)\n',
    "passes/helper.py": "from fxpar.passes.fold import fold\n",
    "tests/test_one.py": "def test_one():\n    pass\n",
    "README.md": "# Title\n\none two three\n\n```\nno words here\n```\n\n- a list of many words that count\n",
    "docs/dev/page.md": "one two\n\n1. a list of many words that count\n",
}
LINES = sum(FILES[name].count("\n") for name in FILES if name.startswith(("fxpar", "passes")))
MEASURED = {
    "source lines": LINES,
    "source files": 6,
    "test lines": 2,
    "lines of the longest file": 7,
    "files under 60 lines": 5,
    "repeated file names": 1,
    "repeated class names": 1,
    "circles of imports": 1,
    "modules with one importer, in their room": 3,
    "files that import private torch": 1,
    "files of passes/ without one pass": 1,
    "custom_op outside the operator's record": 1,
    "functions over 8 parameters": 1,
    "word found": 2,
    "word own": 1,
    "README.md words": 13,
    "README.md longest paragraph": 3,
    "docs longest paragraph": 2,
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project that git tracks."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured() -> dict[str, float]:
    sources = [scales.read(path) for path in scales.tracked(*scales.SOURCES)]
    return scales.figures(sources, scales.tracked(*scales.TESTS))


def ceilings(figures: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Ceilings at which the figures are right."""
    grows: dict[str, Any] = {"source lines": [{"by": figures["source lines"], "why": "all of it"}]}
    at_least: dict[str, Any] = {"comments in a hundred lines": 0.0, "lines of the median file": 0.0}
    at_most: dict[str, Any] = {"word value": 3.0, "lines of the longest file": 100.0}
    others = {*grows, *at_least, *at_most}
    falls = {name: number for name, number in figures.items() if name not in others}
    return {"falls": falls, "at_least": at_least, "at_most": at_most, "grows": grows}


def test_figures_are_those_of_the_files(project: Path) -> None:
    figures = measured()
    assert {name: figures[name] for name in MEASURED} == MEASURED


@pytest.mark.parametrize(
    ("file", "more", "reason"),
    [
        ("fxpar/one.py", "found = 1\n", "word found: 3, and at most 2 are allowed"),
        ("fxpar/one.py", "\n", f"source lines: {LINES + 1}, 1 more than tools/ceilings.yaml explains"),
        ("fxpar/one.py", "class Two: pass\n", "repeated class names"),
        ("fxpar/two.py", "value = value = value = value\n", "word value: 4, and at most 3 are allowed"),
        ("README.md", "\nfour words in one\n", "README.md longest paragraph: 4, and at most 3"),
    ],
)
def test_what_grows_is_refused(project: Path, file: str, more: str, reason: str) -> None:
    before = ceilings(measured())
    assert list(scales.problems(measured(), before)) == []
    with (project / file).open("a") as out:
        out.write(more)
    if reason.startswith("repeated"):  # of one class twice, and of another
        (project / "fxpar/two.py").write_text(FILES["fxpar/two.py"] + "class One: pass\n")
    assert any(line.startswith(reason) for line in scales.problems(measured(), before))


def test_lines_grow_with_a_reason(project: Path) -> None:
    before = ceilings(measured())
    (project / "fxpar/one.py").write_text(FILES["fxpar/one.py"] + "\n")
    before["grows"]["source lines"] = [{"by": LINES, "why": "all"}, {"by": 1, "why": "a blank line"}]
    assert list(scales.problems(measured(), before)) == []


def test_ceilings_follow_what_falls(project: Path) -> None:
    text = yaml.safe_dump(ceilings(measured()), sort_keys=False)
    (project / "fxpar/one.py").write_text(FILES["fxpar/one.py"].replace("found = Two", "two = Two"))
    problems = list(scales.problems(measured(), yaml.safe_load(text)))
    assert problems == ["word found: 1, below its ceiling of 2: python tools/scales.py --lower"]
    lower = yaml.safe_load(scales.lowered(measured(), text))
    assert lower["falls"]["word found"] == 1
    assert list(scales.problems(measured(), lower)) == []


def test_what_falls_below_its_floor_is_refused(project: Path) -> None:
    before = ceilings(measured())
    before["at_least"]["lines of the median file"] = 1000
    assert any(line.endswith("and at least 1000 are needed") for line in scales.problems(measured(), before))


def test_a_figure_without_a_ceiling_is_named(project: Path) -> None:
    before = ceilings(measured())
    del before["falls"]["word own"]
    assert list(scales.problems(measured(), before)) == ["word own has no ceiling"]
