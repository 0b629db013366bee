"""Measures the source and fails where a figure is beyond its ceiling; `make lint` runs it.

    python tools/scales.py             # figures beside their ceilings; exit status 1 where one is broken
    python tools/scales.py --lower     # writes lower ceilings where figures have fallen

`tools/ceilings.yaml` has the ceilings. Words, repeated names and shapes may only fall: a figure below its ceiling is an
error too, until the ceiling is lowered. Lines and files rise only with an entry there that says why. Figures are of
what git tracks; words are tokens of the source, without comments and texts.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx
import yaml
from rich.console import Console
from rich.table import Table

SOURCES, TESTS = ("fxpar/*.py", "passes/*.py"), ("tests/*.py",)
DOCUMENTS, PAGES = ("README.md", "CONTRIBUTING.md"), ("docs/*.md",)
CEILINGS = Path("tools/ceilings.yaml")

# Words that say nothing of what a thing is, and others that the field has its own words for.
DIALECT: tuple[str, ...] = (
    "found",
    "own",
    "given",
    "made",
    "each",
    "held",
    "wanted",
    "asked",
    "kept",
    "told",
    "brought",
    "ghost",
)
DIALECT += ("twin", "mains", "settle", "settled", "unsettled", "resting", "at_rest", "keep_first")
# Words that must not take their place.
FILLERS = ("result", "value", "item", "data")

_SMALL, _LONG, _COMPLEX, _PARAMETERS, _EXPERT = 60, 60, 20, 8, 4
# Rooms in which experts are at home.
_EXPERT_ROOMS = ("experts", "passes", "plan")
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Tokens that are no code.
_SPACE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass
class Source:
    """A file of Python source.

    Attributes:
        path: from the project's root.
        lines: number of its lines.
        words: identifiers and keywords, by how often they stand there.
        comments: lines with a comment that is no directive of a tool.
        classes: names of its classes.
        imports: modules and names that it imports, with dots.
        long: functions of more than 60 lines.
        has_private_torch: whether it imports what torch keeps private.
        text: all of it.
    """

    path: Path
    text: str
    lines: int = 0
    comments: int = 0
    long: int = 0
    has_private_torch: bool = False
    words: Counter[str] = field(default_factory=Counter)
    classes: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)

    @property
    def module(self) -> str:
        """Returns its name as an import has it: passes/ stands in the package by a link."""
        name = ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")
        return f"fxpar.{name}" if self.path.parts[0] == "passes" else name

    @property
    def is_package(self) -> bool:
        """Returns whether it stands for its folder."""
        return self.path.name in ("__init__.py", "__main__.py")


def read(path: Path) -> Source:
    """Returns the figures of one file."""
    source = Source(path, path.read_text())
    source.lines = source.text.count("\n")
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.ClassDef):
            source.classes.append(node.name)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            source.long += (node.end_lineno or node.lineno) - node.lineno > _LONG
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [name.name for name in node.names]
            source.imports |= {node.module, *(f"{node.module}.{name}" for name in names)}
            parts = [*node.module.split("."), *names]
            source.has_private_torch |= parts[0] == "torch" and any(part.startswith("_") for part in parts)
        elif isinstance(node, ast.Import):
            source.imports |= {name.name for name in node.names}
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.NAME:
            source.words[token.string] += 1
        elif token.type == tokenize.COMMENT:
            source.comments += not re.match(r"#\s*(noqa|type:|mypy:|pragma)", token.string)
    return source


def tracked(*patterns: str) -> list[Path]:
    """Returns the files that git tracks, without links."""
    listing = subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout
    return [path for path in map(Path, listing.splitlines()) if path.exists() and not path.is_symlink()]


def figures(sources: list[Source], tests: Iterable[Path]) -> dict[str, float]:
    """Returns all figures by name."""
    measured: dict[str, float] = {
        "source lines": sum(source.lines for source in sources),
        "source files": len(sources),
        "test lines": sum(path.read_text().count("\n") for path in tests),
    }
    measured |= _of_files(sources) | _of_names(sources) | _of_imports(sources) | _of_rooms(sources) | _of_ruff()
    measured["functions over 60 lines"] = sum(source.long for source in sources)
    words = sum((source.words for source in sources), Counter[str]())
    measured |= {f"word {word}": words[word] for word in (*DIALECT, *FILLERS)}
    return measured | _of_documents()


def _of_files(sources: list[Source]) -> dict[str, float]:
    lines = [source.lines for source in sources]
    comments = 100 * sum(source.comments for source in sources) / max(1, sum(lines))
    return {
        "lines of the median file": statistics.median(lines),
        "lines of the longest file": max(lines),
        "files under 60 lines": sum(source.lines < _SMALL and not source.is_package for source in sources),
        "comments in a hundred lines": round(comments, 2),
    }


def _of_names(sources: list[Source]) -> dict[str, float]:
    files = Counter(source.path.name for source in sources if source.path.name != "__init__.py")
    classes = Counter(name for source in sources for name in source.classes)
    return {
        "repeated file names": sum(number > 1 for number in files.values()),
        "repeated class names": sum(number > 1 for number in classes.values()),
    }


def _of_imports(sources: list[Source]) -> dict[str, float]:
    by_module = {source.module: source for source in sources}
    graph = networkx.DiGraph()
    for source in sources:
        graph.add_edges_from((source.module, name) for name in source.imports if name in by_module)
    graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    importers = {name: set(graph.predecessors(name)) if name in graph else set() for name in by_module}
    single = [
        name
        for name, those in importers.items()
        if len(those) == 1
        and not by_module[name].is_package
        and by_module[next(iter(those))].path.parent == by_module[name].path.parent
    ]
    circles = [group for group in networkx.strongly_connected_components(graph) if len(group) > 1]
    return {
        "modules with one importer, in their room": len(single),
        "circles of imports": len(circles),
        "most imports of a module": max((degree for _, degree in graph.out_degree), default=0),
        "files that import private torch": sum(source.has_private_torch for source in sources),
    }


def _of_rooms(sources: list[Source]) -> dict[str, float]:
    passes = [source for source in sources if source.path.parts[0] == "passes" and not source.is_package]
    others = [source for source in sources if not set(source.path.parts[:-1]) & set(_EXPERT_ROOMS)]
    return {
        "files of passes/ without one pass": sum(source.text.count("@register_pass(") != 1 for source in passes),
        "files with experts outside their rooms": sum(source.text.count("expert") >= _EXPERT for source in others),
        "custom_op outside the operator's record": sum(
            source.text.count("custom_op(") for source in sources if source.path.name != "operator.py"
        ),
    }


def _of_ruff() -> dict[str, float]:
    """Returns functions that ruff finds too complex, or with too many parameters."""
    limits = [f"lint.mccabe.max-complexity={_COMPLEX}", f"lint.pylint.max-args={_PARAMETERS}"]
    options = [word for limit in limits for word in ("--config", limit)]
    line = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901,PLR0913", *options]
    line += ["--target-version", "py311", "--output-format", "json", "--exit-zero", "--no-cache", "fxpar", "passes"]
    reports = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    codes = Counter(report["code"] for report in reports)
    return {"functions too complex": codes["C901"], "functions over 8 parameters": codes["PLR0913"]}


def _of_documents() -> dict[str, float]:
    """Returns words and the longest paragraph of README and CONTRIBUTING, and the longest paragraph of all pages."""
    measured: dict[str, float] = {}
    for name in DOCUMENTS:
        text = _prose(Path(name)) if Path(name).exists() else ""
        measured |= {f"{name} words": len(text.split()), f"{name} longest paragraph": _longest_paragraph(text)}
    pages = [_longest_paragraph(_prose(path)) for path in tracked(*PAGES)]
    return measured | {"docs longest paragraph": max(pages, default=0)}


def _prose(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.S)


def _longest_paragraph(text: str) -> int:
    """Returns the words of the longest paragraph: no tables, headings or lists."""
    parts = re.split(r"\n\s*\n", text)
    return max((len(part.split()) for part in parts if not re.match(r"\s*([|#-]|\d+\.)", part)), default=0)


# ---------------------------------------------------------------------- ceilings


def problems(measured: Mapping[str, float], ceilings: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong: figures beyond their ceilings, ceilings that can be lower, figures without one."""
    for name, ceiling in ceilings["falls"].items():
        if measured[name] > ceiling:
            yield f"{name}: {measured[name]:g}, and at most {ceiling:g} are allowed: it may only fall"
        elif measured[name] < ceiling:
            yield f"{name}: {measured[name]:g}, below its ceiling of {ceiling:g}: python tools/scales.py --lower"
    for name, ceiling in ceilings["at_most"].items():
        if measured[name] > ceiling:
            yield f"{name}: {measured[name]:g}, and at most {ceiling:g} are allowed"
    for name, floor in ceilings["at_least"].items():
        if measured[name] < floor:
            yield f"{name}: {measured[name]:g}, and at least {floor:g} are needed"
    for name, entries in ceilings["grows"].items():
        ceiling = sum(entry["by"] for entry in entries)
        if measured[name] > ceiling:
            more = measured[name] - ceiling
            yield f"{name}: {measured[name]:g}, {more:g} more than {CEILINGS} explains: add an entry that says why"
    missing = set(measured) - {name for group in ceilings.values() for name in group}
    yield from (f"{name} has no ceiling" for name in sorted(missing))


def lowered(measured: Mapping[str, float], text: str) -> str:
    """Returns the text of the ceilings with those of today, where figures have fallen that may only fall."""
    for name, ceiling in yaml.safe_load(text)["falls"].items():
        number = min(measured[name], ceiling)
        text = re.sub(rf"^(  {re.escape(name)}: )[\d.]+$", rf"\g<1>{number:g}", text, flags=re.M)
    return text


def show(measured: Mapping[str, float], ceilings: Mapping[str, Any]) -> None:
    """Prints the figures beside their ceilings."""
    table = Table("figure", "is", "may be")
    limits = {name: f"{number:g}" for kind in ("falls", "at_most") for name, number in ceilings[kind].items()}
    limits |= {name: f"from {number:g}" for name, number in ceilings["at_least"].items()}
    limits |= {name: f"{sum(entry['by'] for entry in entries):g}" for name, entries in ceilings["grows"].items()}
    for name, number in measured.items():
        table.add_row(name, f"{number:g}", limits.get(name, "-"))
    Console().print(table)


def main() -> int:
    """Prints the figures, and what is wrong with them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lower", action="store_true", help="write lower ceilings where figures have fallen")
    measured = figures([read(path) for path in tracked(*SOURCES)], tracked(*TESTS))
    if options.parse_args().lower:
        CEILINGS.write_text(lowered(measured, CEILINGS.read_text()))
    ceilings = defaultdict(dict, yaml.safe_load(CEILINGS.read_text()))
    show(measured, ceilings)
    wrong = list(problems(measured, ceilings))
    for line in wrong:
        print(line)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
