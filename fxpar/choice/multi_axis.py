"""The choice on all axes, from the outermost: the batch's follow from the inputs, the features' are solved.

Enters: a canonical program, its sizes divided. Leaves: for each axis what every node is there, and for solved ones what
was chosen from what. Each axis is placed on what those outside it leave (`fxpar.layout.nesting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxpar.choice.batch_sharding import peel_program, place_batch
from fxpar.choice.choose import Choice, choose
from fxpar.choice.options import Option
from fxpar.choice.overrides import match_lines
from fxpar.errors import PassError
from fxpar.layout.layout import Layout
from fxpar.layout.symbolic_sizes import divide
from fxpar.mesh.purpose import Cuts
from fxpar.program.batch_dim import batch_rows, batch_size
from fxpar.program.program import Program
from fxpar.rules.batchwise_ops import check_declared


@dataclass(frozen=True)
class MultiAxisChoice:
    """What was decided.

    Attributes:
        options: by axis, what each node is.
        choices: by solved axis, what was chosen from what, on `inner`.
        inner: the program as solved axes see it. Its nodes have the names of the program's.
    """

    options: Mapping[str, Mapping[fx.Node, Option]]
    choices: Mapping[str, Choice]
    inner: Program


def place(program: Program, layouts: Mapping[str, Layout]) -> MultiAxisChoice:
    """Places the program on every axis.

    Args:
        layouts: those that parameters have already, by name; they are taken.

    Raises:
        PassError: a size that ranks share out is not divided.
        PlanError: a line of the plan cannot be carried out.
        LayoutError: an operation mixes rows of the batch.
    """
    plan, inner = program.plan, program
    options: dict[str, dict[fx.Node, Option]] = {}
    if not layouts:  # a further program of a module may lack an operator, in evaluation say
        check_declared(program)
    for axis in plan.axes_for(Cuts.BATCH):
        rows = batch_size(inner)
        if divide(rows, plan.axes[axis]) is None:
            raise PassError(f"no pass has divided the batch {rows}", where="annotate", remedy="run divide_batch before")
        placed = place_batch(inner, axis, batch_rows(inner, rows))
        options[axis] = _of(program, placed)
        inner = peel_program(inner, axis, placed)
    lines = match_lines(inner)
    choices = {axis: choose(inner, axis, lines, layouts) for axis in plan.axes_for(Cuts.FEATURES)}
    options |= {axis: _of(program, choice.chosen) for axis, choice in choices.items()}
    return MultiAxisChoice(options, choices, inner)


def _of(program: Program, placed: Mapping[fx.Node, Option]) -> dict[fx.Node, Option]:
    """The options of the program's own nodes: peeling adds some, and copies all."""
    named = {node.name: option for node, option in placed.items()}
    return {node: named[node.name] for node in program.graph.nodes if node.name in named}
