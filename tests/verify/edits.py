"""Edits of a program's text: what a kind of fault makes, and the mutant that comes of it.

Enters: the lines of a program. Leaves: edited texts, with the notes behind an edit renamed where that is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fxpar.errors import LayoutError, TextError
from fxpar.ir.grad_flow import carried
from fxpar.ir.program import operands, output_layouts, output_types, update
from fxpar.rules.inference import Context, infer_node
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from tests.verify.lines import Source


@dataclass(frozen=True)
class Mutant:
    """An edited text, the kind of fault and the edit in words."""

    kind: str
    edit: str
    text: str


@dataclass(frozen=True)
class Edit:
    """An edit in words and the lines after it; `behind` names a node whose users' notes are to follow it."""

    what: str
    source: Source
    behind: str = ""

    def text(self) -> str:
        """The mutant's text."""
        return str(renamed(self.source, self.behind) if self.behind else self.source)


Edits = Iterator[Edit]


def sampled(kinds: Mapping[str, Callable[[Source], Edits]], source: Source, seed: int, count: int) -> list[Mutant]:
    """A sample of a program's mutants, all kinds in turn, until there are `count` or no more.

    Args:
        seed: of the choice, and of the order of the kinds.
    """
    generator, found = random.Random(seed), dict[str, list[Edit]]()
    for kind in generator.sample(list(kinds), len(kinds)):
        found[kind] = list(kinds[kind](source))
        generator.shuffle(found[kind])
    chosen: list[Mutant] = []
    while len(chosen) < count and any(found.values()):
        for kind, edits in found.items():
            if edits and len(chosen) < count:
                edit = edits.pop()
                chosen.append(Mutant(kind, edit.what, edit.text()))
    return chosen


def renamed(source: Source, name: str) -> Source:
    """The notes behind a changed node say what follows from it, as far as that is legal."""
    try:
        program = parse_program(str(source))
    except TextError:
        return source
    flags, behind = carried(program), False
    local, is_open = "local" in program.properties, program.properties.isdisjoint({"vocabulary", "local"})
    for node in program.graph.nodes:
        if node.op == "call_function" and behind and output_types(node):
            inputs = operands(node)
            layouts = [layout for o in inputs for layout in output_layouts(o)]
            carries = [flag for o in inputs for flag in flags[o]]
            given = Context(layouts, carries, flags[node], program.axes, local, is_open)
            try:
                found = infer_node(node, given)
            except LayoutError:
                break
            update(node, layout=found if len(found) > 1 else found[0])
        behind |= node.name == name
    return Source.of(print_program(program))
