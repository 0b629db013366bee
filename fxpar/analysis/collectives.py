"""What a program communicates.

Enters: a program with coercions in place. Leaves: a list of collectives with bytes in closed form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from fxpar.layout.layout import Placement
from fxpar.layout.symbols import Size, evaluate, product, simplify, symbol
from fxpar.program.coercions import shared_fraction
from fxpar.program.gradients import carried, reached
from fxpar.program.mixed import held_type
from fxpar.program.operators import COERCION_OF, all_to_all, copy_to, share, sum_gradients
from fxpar.program.program import Program, TensorType, operands, output_layouts, output_types
from fxpar.program.weights import weights_of
from fxpar.rules import call_of
from fxpar.rules.vocabulary import ATEN_OF, traffic

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


@dataclass(frozen=True)
class Collective:
    """One collective of a training step.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter or all_to_all.
        axis: mesh axis.
        phase: forward or backward (activations), parameter (value or gradient of what parameters alone make), or
            recompute (a forward one that a checkpointed region sends again, which `fxpar.report` finds).
        node: the coercion it belongs to.
        bytes: size of the whole value (what an all-gather yields, a reduction takes in) at the given sizes.
        bytes_formula: the same in closed form, symbols as in the program.
    """

    op: str
    axis: str
    phase: str
    node: str
    bytes: int
    bytes_formula: str

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def collectives(program: Program, sizes: Mapping[str, int] | None = None) -> list[Collective]:
    """All collectives in program order, each coercion's backward behind its forward.

    Args:
        sizes: sizes of the inputs by symbol; the example's by default.
    """
    values = symbol_sizes(program, sizes)
    wanted = reached(program, carried(program))
    owned = {p.node for p in program.parameters}
    weights = weights_of(
        program.graph, (node for node in program.graph.nodes if node.op == "placeholder" and node.name in owned)
    )
    found = []
    for node in program.graph.nodes:
        if node.target in ATEN_OF:
            found += _inside(program, node, node in wanted, values)
        if node.op != "call_function" or node.target not in (*COERCION_OF, sum_gradients):
            continue
        axis = str(node.kwargs["axis"])
        kinds = list(zip(output_types(node), output_layouts(node), strict=True))
        if node.target is sum_gradients:  # it leaves out what the loss does not reach
            kinds = [pair for index, pair in enumerate(kinds) if _takes(node, index, wanted)]
        of_parameter = node in weights
        forward, backward = _operations(node)
        for phase, op in (("forward", forward), ("backward", backward if node in wanted else "")):
            if op:
                cuts = [] if node.target is sum_gradients else _padded_cuts(node, axis, phase)
                if of_parameter and phase == "backward" and node.target in (copy_to, share, sum_gradients):
                    kinds = [(held_type(program.plan, kind), layout) for kind, layout in kinds]
                size = simplify(sum(_bytes(kind, layout.on(axis), cuts) for kind, layout in kinds))
                where = "parameter" if of_parameter else phase
                found.append(
                    Collective(op, axis, where, node.name, evaluate(size, values), in_input_sizes(program, size))
                )
    return found


def in_input_sizes(program: Program, size: Size) -> str:
    """A size in closed form, in the sizes of the inputs and not of a rank's share of them."""
    if isinstance(size, int):
        return str(size)
    own = {symbol(s.name): symbol(s.name) / s.multiple for s in program.symbols}
    return str(simplify(size.subs(own, simultaneous=True)))


def symbol_sizes(program: Program, sizes: Mapping[str, int] | None) -> dict[str, int]:
    """Values of the symbols: a size that ranks share out is divided, rounded up where they do not divide it.

    Args:
        sizes: of the inputs; the example's where they are not given.
    """
    given = dict(sizes or {})
    return {s.name: -(-given[s.name] // s.multiple) if s.name in given else s.example for s in program.symbols}


def _padded_cuts(node: fx.Node, axis: str, phase: str) -> list[Placement]:
    """The cuts of a coercion whose padding travels too."""
    before, after = (output_layouts(n)[0].on(axis) for n in (operands(node)[0], node))
    if node.target is all_to_all and before.dim == after.dim:  # each way by the whole, from the other cut
        return [p for p in (before if phase == "forward" else after,) if p.is_padded]
    return [p for p in (before, after) if p.is_padded]


def _bytes(kind: TensorType, placement: Placement, cuts: Sequence[Placement]) -> Size:
    """Of a whole value with the padding of its cuts; of one of which ranks share a part, of that."""
    shape = list(kind.shape)
    for cut in cuts:
        shape[cut.dim] = cut.pieces[0].padded
    size = simplify(product(shape) * kind.dtype.itemsize)
    if not placement.is_shared:
        return size
    part, total = shared_fraction(placement)
    return int(size) * part // total


def _takes(node: fx.Node, index: int, wanted: Set[fx.Node]) -> bool:
    return any(user in wanted and user.args[1] == index for user in node.users)


def _inside(program: Program, node: fx.Node, is_reached: bool, values: Mapping[str, int]) -> list[Collective]:
    """The collectives of a composite operator."""
    axis, found = str(node.kwargs["axis"]), []
    kind = output_types(operands(node)[0])[0]
    for op, phase, elements in traffic(call_of(node, program.axes[axis])):
        size = simplify(elements * max(kind.dtype.itemsize, 4))  # halves are summed in float32
        if phase == "forward" or is_reached:
            found.append(Collective(op, axis, phase, node.name, evaluate(size, values), in_input_sizes(program, size)))
    return found


def _operations(node: fx.Node) -> tuple[str, str]:
    """The collectives of a coercion, forward and backward; one dimension is cut anew by way of the whole."""
    if node.target is sum_gradients:
        return "", "all_reduce"
    row, axis = COERCION_OF[node.target], str(node.kwargs["axis"])  # type: ignore[index]
    before, after = (output_layouts(n)[0].on(axis) for n in (operands(node)[0], node))
    if row.operator is all_to_all and before.dim == after.dim:
        return "all_gather", "all_gather"
    return row.forward, row.backward


def layer_of(fqn: str) -> str:
    """The layer a module belongs to: its name up to the first number, `model.layers.0`; empty outside of layers."""
    found = _LAYER.match(fqn)
    return found[0] if found else ""
