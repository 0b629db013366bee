"""localize: global sizes become one rank's sizes."""

from __future__ import annotations

from fxpar.ir.program import Program
from fxpar.ir.properties import Property
from fxpar.manager import register_pass
from fxpar.rewrite.local_sizes import localize_node


@register_pass(
    "localize", requires={Property.COLLECTIVES, Property.RNG, Property.VOCABULARY}, provides={Property.LOCAL}
)
def localize(program: Program) -> Program:
    """Rewrites literals about sharded dimensions to the sizes of one rank.

    Before (tp 2)::

        %v = aten.view.default(%q, [%b, %s, 8, 12]) : f32[b, s, 8, 12] tp:S(2)

    After::

        %v = aten.view.default(%q, [%b, %s, 4, 12]) : f32[b, s, 8, 12] tp:S(2)

    Types in notes stay global; a rank's shape is the type's with its layout applied. Parameters and inputs become
    their shards by layout alone. Every rank gets the same text, because n divides what it cuts. Values stay equal. That
    no size is read off a sharded dimension is a matter of types (`fxpar.verify.types`).
    """
    for node in list(program.graph.nodes):
        if node.op == "call_function":
            localize_node(program, node)
    return program
