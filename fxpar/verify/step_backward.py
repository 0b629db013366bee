"""The backward of a step: that of its own forward.

Enters: a step. Leaves: nothing, or `CheckFailed` that names the gradient and the first operation at which it parts.

The forward part of the text is differentiated again, and what each gradient is computed from is compared: whatever
edits a backward (a collective dropped, doubled or over another axis, another saved value, other bits of a draw that is
made again, a gradient at another parameter) changes an expression. That all collectives of a group have one order on
all ranks needs no check of its own: there is one text for all ranks, which run it from above, and none of its
operations is run on some ranks alone.
"""

from __future__ import annotations

from fxpar.errors import CheckFailed
from fxpar.ops.dataflow import Expressions
from fxpar.passes.differentiate import forward_of, of_outputs
from fxpar.program.program import Program, describe
from fxpar.program.step import model_outputs, output_of


def check_step(program: Program) -> None:
    """Compares the gradients with those that differentiating the forward gives.

    Raises:
        CheckFailed: a gradient is missing, there is one too many, or it is computed in another way.
        FxparError: the forward cannot be differentiated.
    """
    tangents = [output for entry in program.inputs if (output := output_of(entry.path))]
    trained = [p.fqn for p in program.parameters if p.trainable and not p.left_out]
    forward = forward_of(program)
    missing = [name for name in tangents if name not in forward.outputs]
    if missing:
        raise CheckFailed("has a tangent and is not returned", where=f"output {missing[0]}")
    again = of_outputs(tangents, model_outputs(program), trained).run(forward)
    known = Expressions()
    actual, expected = known.outputs(program), known.outputs(again)
    for name in (*expected, *actual):
        if name not in actual:
            raise CheckFailed(
                "is missing, and what is differentiated depends on it",
                where=f"output {name}",
                remedy="return it, or write left_out at the parameter",
            )
        if name not in expected:
            raise CheckFailed("is no gradient of what is differentiated", where=f"output {name}", remedy="remove it")
        if actual[name] != expected[name]:
            node, other = known.parting(program, again), known.parting(again, program)
            at = f": {describe(node)} computes what the derivative of the forward does not" if node is not None else ""
            lacks = f"; it lacks {other.target}" if other is not None else ""
            raise CheckFailed(
                f"is not the gradient of the forward{at}{lacks}",
                where=f"output {name}",
                remedy="undo the edit of the backward, or run the pass differentiate again",
            )
