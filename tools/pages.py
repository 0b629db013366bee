"""Writes what of docs/ follows from the source: pages of passes, options, commands and errors, and a picture.

    python tools/pages.py    # run it after a change to a contract, a docstring of an option, a flag or an error

`tests/packaging/test_readme.py` fails while a page differs from the source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from fxpar import errors
from fxpar.cli.main import _application, main
from fxpar.cli.output import status_of
from fxpar.cli.plan_flags import _documentation, plan_flags
from fxpar.errors import FxparError
from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES, STEP_PASSES, step_passes
from fxpar.plan.plan import CHOICES, GROUPS, Plan
from fxpar.plan.plan_options import CHOICES as GROUP_CHOICES

_DOCS = Path(__file__).parents[1] / "docs"
_LONGEST = 50  # words of a paragraph of an option's text
_NOTE = "`tools/pages.py` writes this page from the source: do not edit it by hand."

# ---------------------------------------------------------------------- passes

_PASSES_HEAD = f"""\
# The passes

This page lists the passes in the order in which they run, with their contracts.
{_NOTE}

A pass runs only if the program has all properties that it *requires*. Afterwards the program has those that it
*provides*, and no longer those that it *invalidates*. *Preserves* says what stays equal: `dataflow` is the
expression of every output, `values` are loss, outputs and gradients. [Write a pass](write-a-pass.md) says more.

The docstring of each pass shows a program before and after it. `fxpar passes` prints these tables in a terminal.
"""
_FORWARD = """
## The program of a rank

These passes split the captured program. `DEFAULT_PASSES` in `passes/__init__.py` has their order.
"""
_STEP = """
## The training step

These passes make a training step of the program of a rank. `step_passes` in `passes/__init__.py` has their
order. `split_backward` runs only under a schedule whose backward has two parts.
"""


def passes_page() -> str:
    """Returns the page of the passes."""
    # The first pass of `step_passes` is `differentiate` with its arguments bound, which has no docstring.
    steps = (STEP_PASSES[0], *step_passes((), (), (), splits=True)[1:])
    return _PASSES_HEAD + _FORWARD + _passes(DEFAULT_PASSES) + _STEP + _passes(steps)


def _passes(passes: Iterable[Pass]) -> str:
    head = ["", "| pass | what it does | requires | provides | invalidates | preserves |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *_rows(passes)]) + "\n"


def _rows(passes: Iterable[Pass]) -> Iterator[str]:
    for item in passes:
        file = f"passes/{item.run.__module__.rpartition('.')[2]}.py"
        summary = item.summary + (f" Only where {item.condition}." if item.condition else "")
        properties = (", ".join(sorted(names)) for names in (item.requires, item.provides, item.invalidates))
        yield f"| {' | '.join([f'`{file}`', summary, *properties, item.preserves])} |"


# ---------------------------------------------------------------------- options of the plan

_OPTIONS_HEAD = f"""\
# Options of the plan

This page lists the options of `fxpar.Plan` and of its records. {_NOTE}
[Choose a plan](choose-a-plan.md) says where to begin.

A plan is Python, YAML or flags. These three are the same plan:

- `fxpar.Plan(tp=2, recompute=fxpar.Recompute("full"))`
- a file with the lines `tp: 2` and `recompute: {{mode: full}}`, read by `fxpar.Plan.load(file)` or `--plan file`
- the flags `--tp 2 --recompute full` of the [command line](cli.md)
"""


def options_page() -> str:
    """Returns the page of the plan's options."""
    records = [(Plan, ""), *((kind, name) for name, kind in GROUPS.items())]
    return _OPTIONS_HEAD + "".join("\n" + part for kind, name in records for part in _options(kind, name))


def _options(owner: Any, record: str) -> Iterator[str]:
    """Yields the entries of a record's options."""
    texts, hints = _documentation(owner), typing.get_type_hints(owner)
    heading = f"`{record}`: `fxpar.{owner.__name__}`" if record else "`fxpar.Plan`"
    summary, example = _example(owner)
    yield f"## {heading}\n\n{summary}\n\n```py\n{example}\n```\n"
    flags = {(flag.record, flag.field): flag.name for flag in plan_flags()}
    for option in dataclasses.fields(owner):
        name = option.name
        if not record and name in GROUPS:
            continue
        words = (GROUP_CHOICES if record else CHOICES).get(name)
        kind = " or ".join(f"`{word}`" for word in words) if words else f"`{_type_name(hints[name])}`"
        flag = flags.get((record, name)) or f"--{record.replace('_', '-')} {name}=…"
        yield f"### `{f'{record}.' if record else ''}{name}`\n"
        yield f"{kind}, default {_default(owner, name)}, flag `{flag}`\n\n{_entry(texts[name])}\n"


def _example(owner: Any) -> tuple[str, str]:
    """Returns what a record is for, and the example of its docstring."""
    text = inspect.getdoc(owner) or ""
    code = re.search(r"```python\n(.*?)\n\s*```", text, re.DOTALL)
    assert code is not None, f"{owner.__name__} has no example"
    return text.split("\n\n")[0], inspect.cleandoc(code[1])


def _type_name(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return re.sub(r"\b(?:collections\.abc|typing)\.", "", text)


def _default(owner: Any, name: str) -> str:
    value = getattr(owner(), name)
    return "empty" if value in ((), "") or (isinstance(value, Mapping) and not value) else f"`{value}`"


def _entry(text: str) -> str:
    """Returns what is said of an option: words that it takes as a list, the rest in short paragraphs."""
    parts: list[str] = []
    for sentence in re.split(r"(?<=[.;]) (?=[A-Z`0-9])", text[0].upper() + text[1:]):
        if re.match(r"`[\w\"]+`: ", sentence):
            parts.append(f"- {sentence}")
        elif parts and not parts[-1].startswith("- ") and len((parts[-1] + sentence).split()) <= _LONGEST:
            parts[-1] += f" {sentence}"
        else:
            parts.append(sentence)
    return "\n\n".join(parts)


# ---------------------------------------------------------------------- commands

_COMMANDS_HEAD = f"""\
# All commands

This page lists the commands of `fxpar` with their options. {_NOTE}
[The command line](cli.md) shows how to use them.

Commands that take a MODEL also take the [options of the plan](plan-options.md) as flags: `--tp 2`, `--shard optimizer`.
They stand on that page alone.
"""


def commands_page() -> str:
    """Returns the page of the command line."""
    group: Any = typer.main.get_command(_application())
    parts = [_COMMANDS_HEAD]
    plan = {flag.name for flag in plan_flags()}
    for name, command in group.commands.items():
        takes_plan = any(plan & set(option.opts) for option in command.params)
        words = " ".join(option.metavar for option in command.params if option.param_type_name != "option")
        usage = " ".join(word for word in (f"fxpar {name}", words, "[OPTIONS]") if word)
        parts.append(f"\n## fxpar {name}\n\n`{usage}`\n\n{_paragraphs(command.help)}\n")
        rows = [_option(option) for option in command.params if not takes_plan or not plan & set(option.opts)]
        parts.append("\n| option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
        if takes_plan:
            parts.append("\nIt also takes the [options of the plan](plan-options.md).\n")
    return "".join(parts)


def _option(option: Any) -> str:
    metavar = option.metavar or ""
    if option.param_type_name != "option":
        names = f"`{metavar}`"
    else:
        names = " ".join([", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts)), *_code(metavar)])
    return f"| {_cell(names)} | {_cell(option.help or '')} |"


def _code(text: str) -> Iterator[str]:
    if text:
        yield f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _paragraphs(text: str | None) -> str:
    parts = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    return "\n\n".join(" ".join(part.split()) for part in parts)


# ---------------------------------------------------------------------- errors

_ERRORS_HEAD = f"""\
# Errors

Each class of fxpar's errors has an entry here. {_NOTE}
[Troubleshooting](troubleshooting.md) goes from what you see to what you do.

Every error of fxpar has the form `place: reason; remedy`. Its attributes `where`, `reason` and `remedy` have the three
parts. The classes are names of `fxpar`: catch `fxpar.FxparError` for all of them.

The command line prints an error as one line, without a traceback.
"""


def errors_page() -> str:
    """Returns the page of the errors."""
    parts = [_ERRORS_HEAD]
    for kind in error_classes():
        base, status = kind.__mro__[1].__name__, status_of(kind("reason"))
        summary = (inspect.getdoc(kind) or "").split("\n\n")[0]
        facts = f"A subclass of `{base}`. The command line ends with status {status}."
        parts.append(f"\n## `{kind.__name__}`\n\n{' '.join(summary.split())}\n\n{facts}\n")
        if kind.advice:
            parts.append(f"\nWhat to do, where an error does not say it: {kind.advice}.\n")
    return "".join(parts)


def error_classes() -> list[type[FxparError]]:
    """Returns the classes of errors in the order of their file."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FxparError)]


# ---------------------------------------------------------------------- pictures

_LAYER = "hf:gpt2,n_layer=3,n_embd=1536,n_head=16,n_inner=6144,vocab_size=50304,n_positions=1024"
_PLAN = "--tp 2 --sequence-parallel --compile --precision bf16_weights --size b=8 --size s=1024"


def layer_picture() -> str:
    """Returns the forward of a layer as fxpar's report draws it, as a picture by itself."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        page = Path(folder) / "report.html"
        assert main(["report", _LAYER, *_PLAN.split(), "--html", str(page)]) == 0
        text = page.read_text()
    (style,) = re.findall(r"<style>.*?</style>", text, re.DOTALL)
    drawn = re.search(r"<svg xmlns=[^>]*>(.*?)</svg>", text, re.DOTALL)
    assert drawn is not None, "the report draws a layer"
    head, forward, *_ = drawn[1].split("<g transform='translate(")
    boxes = re.findall(r"<rect x='([\d.]+)' y='(\d+)' width='([\d.]+)' height='(\d+)'", forward)
    wide = max(float(x) + float(width) for x, _, width, _ in boxes)
    tall = max(int(y) + int(height) for _, y, _, height in boxes)
    frame = f"x='-12' y='-8' width='{wide + 24:.0f}' height='{tall + 16}'"
    opening = f"<svg xmlns='http://www.w3.org/2000/svg' class='picture' viewBox='-12 -8 {wide + 24:.0f} {tall + 16}'>"
    parts = [opening, style, head.strip(), f"<rect {frame} fill='var(--back)'/>"]
    return "\n".join([*parts, f"<g transform='translate({forward.strip()}", "</svg>", ""])


PAGES: Mapping[Path, Callable[[], str]] = {
    _DOCS / "dev" / "passes.md": passes_page,
    _DOCS / "plan-options.md": options_page,
    _DOCS / "commands.md": commands_page,
    _DOCS / "errors.md": errors_page,
}
PICTURES: Mapping[Path, Callable[[], str]] = {_DOCS / "pictures" / "layer.svg": layer_picture}


if __name__ == "__main__":
    for path, page in {**PAGES, **PICTURES}.items():
        path.write_text(page())
