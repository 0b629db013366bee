"""split_backward: what the gradients of inputs need first, what only those of weights need after it."""

from __future__ import annotations

import operator

from fxpar.ir.program import Program, note, output_node, update
from fxpar.ir.properties import Property
from fxpar.ir.step import BACKWARD, WEIGHT, is_input_gradient
from fxpar.manager import register_pass


@register_pass("split_backward", requires={Property.STEP}, preserves="dataflow")
def split_backward(program: Program) -> Program:
    """Cuts the backward in two, so that a stage can send the gradients of its inputs early.

    Before::

        %w_gradient = aten.mm.default(%t, %out_gradient) : f32[96, 64] {phase=backward}
        %h_gradient = aten.mm.default(%out_gradient, %w_t) : f32[b, 96] {phase=backward}
        return fxpar.gradient.w=%w_gradient, fxpar.input_gradient.fxpar.received.h=%h_gradient

    After::

        %h_gradient = aten.mm.default(%out_gradient, %w_t) : f32[b, 96] {phase=backward}
        %w_gradient = aten.mm.default(%t, %out_gradient) : f32[96, 64] {phase=weight}

    Algorithm: by dependence. What no gradient of an input depends on is of the phase *weight*, and stands after the
    rest of the backward (Qi et al. 2024, arXiv 2401.10241). A stage that receives nothing has that phase alone.
    """
    end = output_node(program.graph)
    ends = dict(zip(program.outputs, end.args[0], strict=True))  # type: ignore[arg-type]
    needed = {node for name, node in ends.items() if is_input_gradient(name)}
    backward = [n for n in program.graph.nodes if n.op == "call_function" and note(n).phase == BACKWARD]
    for node in reversed(backward):
        if node in needed:
            needed.update(node.all_input_nodes)
    # Parts of a tuple stay with it.
    needed.update(node for node in backward if node.target is operator.getitem and node.args[0] in needed)
    late = [node for node in backward if node not in needed]
    parameter = [n for n in program.graph.nodes if n.op == "call_function" and note(n).phase not in ("", BACKWARD)]
    # In front of the parameter phase, which reads the gradients of weights.
    place = parameter[0] if parameter else end
    for node in late:
        update(node, phase=WEIGHT)
        place.prepend(node)
    return program
