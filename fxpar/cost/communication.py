"""What a program communicates.

Enters: a program with coercions in place. Leaves: a list of collectives with bytes in closed form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from torch import fx

from fxpar.ir.grad_flow import carried, reached, weights_of
from fxpar.ir.operators import apart_view, axes_of, inner_view
from fxpar.ir.program import Program, TensorType, note, operands, output_layouts, output_types
from fxpar.ir.properties import Property
from fxpar.ir.step import RECOMPUTE, held_type
from fxpar.ir.symbols import balanced, with_counted
from fxpar.layout.layout import Placement
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import Size, evaluate, simplify, symbol
from fxpar.ops.operator import CollectiveSite, Operator
from fxpar.rules import call_of

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


@dataclass(frozen=True)
class Collective:
    """One collective of a training step.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter or all_to_all.
        axis: mesh axis.
        phase: forward or backward (activations), parameter (value or gradient of what parameters alone make), or
            recompute (one of the forward that a checkpointed region sends again, in a step).
        node: the coercion it belongs to.
        bytes: size of the whole value (what an all-gather yields, a reduction takes in) at the given sizes.
        bytes_formula: the same in closed form, symbols as in the program.
        part: of them what is expected to travel where the ranks copy into each other's memory.
    """

    op: str
    axis: str
    phase: str
    node: str
    bytes: int
    bytes_formula: str
    part: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns a plain mapping."""
        return asdict(self)


def collectives(program: Program, sizes: Mapping[str, int] | None = None) -> list[Collective]:
    """Returns all collectives in program order; of a forward with those of the backward, each after its coercion's.

    Those of a step are what its nodes send. Those of a forward that is yet to be differentiated follow from the
    coercions' conjugates.

    Args:
        sizes: sizes of the inputs by symbol; the example's by default.
    """
    values = symbol_sizes(program, sizes)
    is_step = Property.STEP in program.properties
    differentiated = set[fx.Node]() if is_step else reached(program, carried(program))
    owned = {p.node for p in program.parameters}
    weights = weights_of(
        program.graph, (node for node in program.graph.nodes if node.op == "placeholder" and node.name in owned)
    )
    traffic = []
    forms: dict[Size, str] = {}
    for node in program.graph.nodes:
        if not isinstance(node.target, Operator) or node.target.traffic is None:
            continue
        for sent in node.target.traffic(_crossing(program, node, differentiated, node in weights)):
            size, phase = simplify(sent.bytes), sent.phase
            if note(node).phase:
                phase = RECOMPUTE if note(node).origin == RECOMPUTE else note(node).phase
            where = str(node.kwargs["axis"]), phase, node.name
            if size not in forms:  # equal layers send as much
                forms[size] = in_input_sizes(program, size)
            traffic.append(Collective(sent.collective, *where, evaluate(size, values), forms[size], float(sent.part)))
    return traffic


def _crossing(program: Program, node: fx.Node, differentiated: Set[fx.Node], of_parameters: bool) -> CollectiveSite:
    """Returns the node as its axes see it, over what the other axes leave."""
    names = axes_of(node)
    assert isinstance(node.target, Operator)
    view = apart_view if node.target.apart else inner_view

    def views(value: fx.Node) -> list[tuple[TensorType, Placement]]:
        return [view(value, program.axes, names, index) for index in range(len(output_layouts(value)))]

    before = [view for operand in operands(node) for view in views(operand)]
    after = views(node)
    call = replace(
        call_of(node, prod(program.axes[axis] for axis in names)),
        operands=tuple(kind for kind, _ in before),
        outputs=tuple(kind for kind, _ in after),
    )
    held_types = tuple(held_type(program.plan, kind) for kind in call.outputs)
    takes = tuple(_takes(node, index, differentiated) for index in range(len(after)))
    operand_placements, output_placements = (tuple(placement for _, placement in side) for side in (before, after))
    return CollectiveSite(
        call, operand_placements, output_placements, held_types, of_parameters, note(node).shard, takes
    )


def in_input_sizes(program: Program, size: Size) -> str:
    """Returns a size in closed form, in the sizes of the inputs and not of a rank's share of them."""
    if isinstance(size, int):
        return str(size)
    size = balanced(program.counted, size)
    if isinstance(size, int):
        return str(size)
    shares = {symbol(s.name): symbol(s.name) / s.multiple for s in program.symbols}
    return str(simplify(size.subs(shares, simultaneous=True)))


def symbol_sizes(program: Program, sizes: Mapping[str, int] | None) -> dict[str, int]:
    """Returns the values of the symbols; a size that ranks share out is divided, and rounded up.

    Rows that are counted are those of a balanced load.

    Args:
        sizes: of the inputs; the example's where they are not given.
    """
    input_sizes = dict(sizes or {})
    local_sizes = {
        s.name: -(-input_sizes[s.name] // s.multiple) if s.name in input_sizes else s.example for s in program.symbols
    }
    return with_counted(program.counted, local_sizes)


def value_bytes(program: Program, node: fx.Node, values: Mapping[str, int]) -> int:
    """Returns the bytes that a rank holds of a node's values.

    Args:
        values: of the symbols, as of `symbol_sizes`.
    """
    total, layouts = 0, output_layouts(node)
    for i, kind in enumerate(output_types(node)):
        shape = local_shape(kind.shape, layouts[i], program.axes) if layouts else kind.shape
        total += prod(evaluate(size, values) for size in shape) * kind.dtype.itemsize
    return total


def _takes(node: fx.Node, index: int, differentiated: Set[fx.Node]) -> bool:
    """Returns whether the loss sends a gradient to an output of a node."""
    if not isinstance(note(node).type, tuple):
        return node in differentiated
    return any(user in differentiated and user.args[1] == index for user in node.users)


def layer_of(fqn: str) -> str:
    """Returns the layer of a module: its name up to the first number, `model.layers.0`; empty outside of layers."""
    match = _LAYER.match(fqn)
    return match[0] if match else ""
