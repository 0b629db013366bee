"""vocab_parallel: embeddings and losses over a vocabulary that is cut."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import fx

from fxpar.errors import PassError
from fxpar.ir.operators import inner_view
from fxpar.ir.program import Program, describe, operands, output_layouts, update
from fxpar.ir.properties import Property
from fxpar.manager import register_pass
from fxpar.ops.registry import COMPOSITE_OF
from fxpar.rules import Refusal, bind_arguments, call_of, seed_signature
from fxpar.rules.table import rule_of


@register_pass("vocab_parallel", requires={Property.CANONICAL, Property.COLLECTIVES}, provides={Property.VOCABULARY})
def vocab_parallel(program: Program) -> Program:
    """Replaces operations over a cut vocabulary by their composite operators.

    Before::

        %x = aten.embedding.default(%wte, %ids) : f32[b, s, 96] tp:P
        %loss = aten.cross_entropy_loss.default(%logits, %labels) : f32[] tp:I

    After::

        %x = fxpar.embedding[tp](%wte, %ids) : f32[b, s, 96] tp:P
        %loss = fxpar.cross_entropy[tp](%logits, %labels) : f32[] tp:I

    Terms: a *vocabulary* is the dimension that words index: the rows of a table, the classes of a loss, what argmax and
    topk search. A composite operator needs its rank's block only and communicates one value for each row (SPEC section
    2.3); operations whose vocabulary is whole stay as they are. Values and gradients stay equal. The layouts are those
    that `annotate` chose, padded so that every rank has as many words (SPEC section 2.2).
    """
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in COMPOSITE_OF:
            axes = [axis for axis in program.axes if _is_cut(program, node, axis)]
            # The composite operators name one group, over which they find the maximum, the target and the sum.
            if len(axes) > 1:
                raise PassError(f"several axes ({', '.join(axes)}) cut the vocabulary", where=describe(node))
            if axes:
                _replace(node, axes[0])
    return program


def _is_cut(program: Program, node: fx.Node, axis: str) -> bool:
    """Returns whether an operand is a shard that the operation's own rule refuses."""
    rule = rule_of(node.target)
    assert rule is not None
    views = [
        inner_view(operand, program.axes, [axis], index)
        for operand in operands(node)
        for index in range(len(output_layouts(operand)))
    ]
    outputs = tuple(inner_view(node, program.axes, [axis], index)[0] for index in range(len(output_layouts(node))))
    call = call_of(node, program.axes[axis])
    call = replace(call, operands=tuple(kind for kind, _ in views), outputs=outputs)
    return any(
        placement.is_shard and isinstance(seed_signature(rule, call, index, placement), Refusal)
        for index, (_, placement) in enumerate(views)
    )


def _replace(node: fx.Node, axis: str) -> None:
    target = COMPOSITE_OF[node.target]
    takes = {name: p.default for name, p in target.signature.parameters.items() if name != "axis"}
    bound: dict[str, Any] = {name: value for name, value in bind_arguments(node).items() if name in takes}
    defaults = {name: value for name, value in takes.items() if value is not inspect.Parameter.empty}
    names = list(takes)
    while names and names[-1] in defaults and bound.get(names[-1], defaults[names[-1]]) == defaults[names[-1]]:
        names = names[:-1]
    node.args, node.kwargs = tuple(bound.get(name, defaults.get(name)) for name in names), {"axis": axis}
    node.target = target
    update(node, role="vocab")
