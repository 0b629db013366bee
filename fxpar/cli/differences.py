"""The command diff: what differs between two programs, by kind.

Enters: two texts. Leaves: nodes that one of them has alone, by operator; pairs of equal name, by what of them differs;
and of each kind in which layers they are, with one example. All of them are in the document.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fxpar.cli.output import FAILED, FINE, CommandResult, Ui
from fxpar.errors import InputError
from fxpar.text.tables import few

if TYPE_CHECKING:
    from torch import fx

    from fxpar.ir.program import Program

_NUMBER = re.compile(r"\d+")
# With more kinds than this, nodes that one program has alone are counted without an example.
_KINDS = 20
_STYLES = {"-": "red", "+": "green", "~": "yellow"}
# Fields of a note that are no attributes of a text's line, as people call them.
_FIELDS = {"type": "type", "layout": "layout", "fqn": "module", "source": "source line", "stages": "stage"}


def diff(
    ui: Ui,
    sides: Annotated[
        list[str], typer.Argument(metavar="A B", help="two texts, or a dump folder and two of its passes")
    ],
    every: Annotated[bool, typer.Option("--all", help="print every line that differs, not one for each kind")] = False,
) -> CommandResult:
    """Compares two programs node by node, and groups what differs; exit status 1 where they differ."""
    from fxpar.cli.files import read_text

    paths = _sides(sides)
    before, after = (read_text(path) for path in paths)
    document = _difference(before, after)

    def show(stdout: Console) -> None:
        _show(stdout, document, every=every)

    return CommandResult(document, show, FINE if document["same"] else FAILED)


def _sides(sides: Sequence[str]) -> tuple[Path, Path]:
    from fxpar.cli.files import dumped

    if len(sides) == 2:
        return Path(sides[0]), Path(sides[1])
    if len(sides) != 3:
        raise InputError(f"takes two texts and finds {len(sides)}", where="diff", remedy="see 'fxpar diff --help'")
    texts = {name: path for _, name, path in dumped(Path(sides[0]))}
    for name in sides[1:]:
        if name not in texts:
            raise InputError(
                f"holds no text after pass '{name}'", where=sides[0], remedy=f"choose from {', '.join(texts)}"
            )
    return texts[sides[1]], texts[sides[2]]


@dataclass(frozen=True)
class _Line:
    """A line of a text, and its node."""

    text: str
    node: fx.Node


def _difference(before: Program, after: Program) -> dict[str, Any]:
    """Returns nodes of one program only, those whose lines differ, those that stand elsewhere, and other lines."""
    from fxpar.text.printing import print_program

    old, new = (_lines(program) for program in (before, after))
    headers = [[line for line in print_program(p).splitlines() if not line.startswith("%")] for p in (before, after)]
    common = [[name for name in side if name in old and name in new] for side in (old, new)]
    matcher = difflib.SequenceMatcher(None, common[0], common[1], autojunk=False)
    in_place = {name for a, _, size in matcher.get_matching_blocks() for name in common[0][a : a + size]}
    changed = [name for name in common[1] if old[name].text != new[name].text]
    differences: dict[str, Any] = {
        "erased": [{"node": name, "line": line.text} for name, line in old.items() if name not in new],
        "added": [{"node": name, "line": line.text} for name, line in new.items() if name not in old],
        "changed": [{"node": name, "before": old[name].text, "after": new[name].text} for name in changed],
        "moved": [name for name in common[1] if name not in in_place],
        "header": {
            "erased": [line for line in headers[0] if line not in headers[1]],
            "added": [line for line in headers[1] if line not in headers[0]],
        },
    }
    differs = any(differences[key] for key in ("erased", "added", "changed", "moved")) or headers[0] != headers[1]
    kinds = {
        "erased": [(name, _operator(old[name].node), old[name].node) for name in old if name not in new],
        "added": [(name, _operator(new[name].node), new[name].node) for name in new if name not in old],
        "changed": [(name, _changes(old[name].node, new[name].node), new[name].node) for name in changed],
        "moved": [(name, "stands elsewhere", new[name].node) for name in differences["moved"]],
    }
    groups = [group for key, entries in kinds.items() for group in _groups(key, entries)]
    return {"same": not differs, **differences, "groups": groups}


def _lines(program: Program) -> dict[str, _Line]:
    """Returns the line of each node by its name, of those in a region after the region's."""
    from fxpar.ir.regions import regions
    from fxpar.text.printing import node_text, region_text

    lines: dict[str, _Line] = {}
    for region in regions(program):
        texts = (line for line in region_text(region, program) if line.startswith("%"))
        for node, text in zip((*region.operands, *region.body), texts, strict=True):
            lines[f"{region.name}.{node.name}"] = _Line(f"{region.name}: {text}", node)
    nodes = (node for node in program.graph.nodes if node.op != "output")
    return lines | {node.name: _Line(node_text(node, program), node) for node in nodes}


def _operator(node: fx.Node) -> str:
    from fxpar.text.printing import target_name

    return target_name(node) if node.op == "call_function" else "input or parameter"


def _changes(before: fx.Node, after: fx.Node) -> str:
    """Returns what differs between two nodes of one name: `operands changed, note origin dropped`."""
    from fxpar.ir.program import Note, note
    from fxpar.text.printing import value_text

    changes = []
    if _operator(before) != _operator(after):
        changes.append("operator changed")
    elif [value_text(v) for v in before.args] != [value_text(v) for v in after.args] or (
        {key: value_text(v) for key, v in before.kwargs.items()}
        != {key: value_text(v) for key, v in after.kwargs.items()}
    ):
        changes.append("operands changed")
    old, new = note(before), note(after)
    for entry in dataclasses.fields(Note):
        one, other = getattr(old, entry.name), getattr(new, entry.name)
        if one != other:
            how = "dropped" if other == entry.default else "added" if one == entry.default else "changed"
            changes.append(f"{_FIELDS.get(entry.name) or f'note {entry.name}'} {how}")
    return ", ".join(changes) or "text changed"


def _groups(key: str, entries: Iterable[tuple[str, str, fx.Node]]) -> Iterator[dict[str, Any]]:
    """Yields the kinds of one sort of difference, the most frequent first: how many nodes, where, and which."""
    from fxpar.cost.communication import layer_of
    from fxpar.ir.program import note

    kinds: dict[str, list[tuple[str, fx.Node]]] = {}
    for name, kind, node in entries:
        kinds.setdefault(kind, []).append((name, node))
    for kind, mine in sorted(kinds.items(), key=lambda item: -len(item[1])):
        places = Counter(layer_of(note(node).fqn) or note(node).fqn or "no module" for _, node in mine)
        nodes = [name for name, _ in mine]
        yield {"sort": key, "kind": kind, "count": len(mine), "where": folded(places), "nodes": nodes}


def folded(counts: Mapping[str, int]) -> list[str]:
    """Returns places with how many nodes they have; such as differ in their first number alone are one.

    Args:
        counts: by the name of a layer or module.
    """
    alike: dict[str, list[str]] = {}
    for name in counts:
        alike.setdefault(_NUMBER.sub("#", name, count=1), []).append(name)
    places = []
    for pattern, names in alike.items():
        numbers = sorted(int(number) for name in names for number in _NUMBER.findall(name)[:1])
        whole = len(names) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
        span = f"{numbers[0]}–{numbers[-1]}" if whole else ",".join(map(str, numbers))
        places.append(f"{pattern.replace('#', span, 1)}: {sum(counts[name] for name in names)}")
    return places


def _show(stdout: Console, document: Mapping[str, Any], *, every: bool) -> None:
    if document["same"]:
        stdout.print("the programs are the same")
        return

    def line(sign: str, text: str) -> None:
        stdout.print(Text(f"{sign} {text}", style=_STYLES[sign]), soft_wrap=True)

    for sign, key in (("-", "erased"), ("+", "added")):
        for text in document["header"][key]:
            line(sign, text)
    pairs = {entry["node"]: (entry["before"], entry["after"]) for entry in document["changed"]}
    alone = {entry["node"]: entry["line"] for key in ("erased", "added") for entry in document[key]}
    for group in document["groups"]:
        count = group["count"]
        many = "nodes" if count > 1 else "node"
        kind = f"{group['kind']} {group['sort']}" if group["sort"] in ("erased", "added") else group["kind"]
        stdout.print(Text(f"{count} {many}: {kind} ({few(group['where'], 6)})", style="bold"), soft_wrap=True)
        few_kinds = len(document["groups"]) <= _KINDS or group["sort"] == "changed"
        for name in group["nodes"] if every else group["nodes"][:few_kinds]:
            if group["sort"] == "changed":
                for sign, text in zip("-+", pairs[name], strict=True):
                    line(sign, text)
            elif group["sort"] == "moved":
                line("~", f"%{name} stands elsewhere")
            else:
                line("-" if group["sort"] == "erased" else "+", alone[name])
    counts = ", ".join(f"{len(document[key])} {key}" for key in ("added", "erased", "changed", "moved"))
    hidden = any(group["count"] > 1 for group in document["groups"]) and not every
    stdout.print(f"nodes: {counts}{'; --all prints every line' if hidden else ''}", soft_wrap=True)
