"""prune: what no output needs goes."""

from __future__ import annotations

import operator

from torch import fx

from fxpar.ir.program import Program, note, output_layouts, output_types, update
from fxpar.ir.properties import Property
from fxpar.manager import register_pass
from fxpar.ops.collectives import all_reduce_coalesced


@register_pass("prune", requires={Property.STEP}, preserves="dataflow")
def prune(program: Program) -> Program:
    """Removes what no output needs: operations, and gradients from coalesced reductions.

    Before::

        %sums = fxpar.all_reduce_coalesced[tp](%a, %b) : (f32[96] tp:R; f32[64] tp:R) {phase=parameter}
        %a_sum = operator.getitem(%sums, 0) : f32[96] tp:R {phase=parameter}
        return loss=%loss, fxpar.gradient.a=%a_sum

    After::

        %sums = fxpar.all_reduce_coalesced[tp](%a) : (f32[96] tp:R) {phase=parameter}

    A parameter that is frozen, or that the loss does not reach, has no gradient, and nothing of it is computed or sent.
    The outputs stay what they are.
    """
    # In reverse, so that what only a removed node read has no reader when its turn comes.
    for node in reversed(list(program.graph.nodes)):
        if node.op != "call_function":
            continue
        # Not fx's own dead-code elimination: it keeps collectives, which it takes for
        # impure. Here a collective that nobody reads has to go.
        if not node.users and note(node).type is not None:
            program.graph.erase_node(node)
        elif node.target is all_reduce_coalesced:
            shrink(node)
    return program


def shrink(node: fx.Node) -> None:
    """Leaves out of a bucket the gradients whose sum nobody takes."""
    items = {int(user.args[1]): user for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]
    taken = sorted(items)
    if len(taken) == len(node.args):
        return
    types, layouts = output_types(node), output_layouts(node)
    for position, index in enumerate(taken):
        items[index].args = (node, position)
    node.args = tuple(node.args[index] for index in taken)
    update(node, type=tuple(types[i] for i in taken), layout=tuple(layouts[i] for i in taken) if layouts else None)
