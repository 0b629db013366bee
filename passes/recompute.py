"""recompute: what the forward computed is computed again in the backward, and not kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from fxpar.cost.layers import layers
from fxpar.cost.measure import storages
from fxpar.errors import PlanError
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.program import Program, note, update
from fxpar.ir.properties import Property
from fxpar.ir.step import BACKWARD, is_forward
from fxpar.manager import register_pass
from fxpar.ops.operator import Operator
from fxpar.passes.differentiate import forward_of
from fxpar.rewrite.emit import compute_again, is_repeatable


@register_pass("recompute", requires={Property.STEP}, preserves="dataflow")
def recompute(program: Program) -> Program:
    """Computes checkpointed regions again in the backward, and with `Recompute("full")` every layer.

    Before::

        %h = aten.tanh.default(%x) : f32[b, 8] tp:I {recompute=1}
        %g = aten.tanh_backward.default(%y, %h) : f32[b, 8] tp:R {recompute=1, phase=backward}

    After::

        %h = aten.tanh.default(%x) : f32[b, 8] tp:I {recompute=1}
        %h_again = aten.tanh.default(%x) : f32[b, 8] tp:R {origin="recompute", recompute=1, phase=backward}
        %g = aten.tanh_backward.default(%y, %h_again) : f32[b, 8] tp:R {recompute=1, phase=backward}

    Terms: a *region* is what the author put into one checkpoint; backward nodes belong to the region of what they
    differentiate. A region keeps what enters it; what leaves it is kept where something outside reads it. A *layer* is
    a part of the forward that others follow alike, cut where fewest bytes live; a region that shares nodes with layers
    and these are one. Draws draw the same bits again; collectives inside of a region or layer run again. Values stay
    equal.

    Weights in spare slots of experts are sent again too (`Operator.resent`), but for `Recompute("selective")`.

    Algorithm: copies of what is not kept stand each in front of the first node of the backward that needs it, in the
    order of the forward.
    """
    backward = [node for node in program.graph.nodes if _phase(node) == BACKWARD]
    forward = _forward(program)
    # In a pipeline they are marked before stages are cut, of which one may have one layer alone.
    # A step whose backward reads nothing of the forward, as of a linear loss, has nothing to compute again.
    is_full = program.plan.recompute.mode == "full" and program.plan.pipeline_stages == 1
    if is_full and any(is_forward(read) for n in backward for read in n.all_input_nodes):
        whole, forward = _with_layers(program, forward)
        compute_again(program, {node for part in whole for node in _interior(part)}, backward)
    if program.plan.recompute.mode != "selective":
        compute_again(program, {node for node in forward if is_resent(node)}, backward)
    for region in _regions(forward):
        region_backward = [node for node in backward if note(node).recompute == note(region[0]).recompute]
        compute_again(program, set(region), region_backward)
    return program


def is_resent(node: fx.Node) -> bool:
    """Returns whether what an operator sends is sent again in the backward, unless a budget decides."""
    return isinstance(node.target, Operator) and node.target.resent


def mark_layers(program: Program) -> None:
    """Makes each layer of a forward a region that is computed again, but for what the author put into one.

    Raises:
        PlanError: there are no layers.
    """
    last = max((note(node).recompute for node in program.graph.nodes if node.op == "call_function"), default=0)
    allowed = set(_forward(program))
    for number, part in enumerate(_layers(program, program), last + 1):
        for node in part:
            if node in allowed and not note(node).recompute:
                update(node, recompute=number)


def _layers(program: Program, forward: Program) -> list[list[fx.Node]]:
    parts = layers(program, storages(forward, frozenset()))
    if not parts:
        raise PlanError(
            "finds no layers: nothing in the forward is followed by something like it",
            where="plan: Recompute('full')",
            remedy="choose Recompute('selective'), or put torch.utils.checkpoint around what is to be computed again",
        )
    return parts


def _phase(node: fx.Node) -> str:
    return note(node).phase if node.op == "call_function" else ""


def _forward(program: Program) -> list[fx.Node]:
    """Returns what may be computed again."""
    weights = weights_of(program.graph, [program.node(p.node) for p in program.parameters])
    return [node for node in program.graph.nodes if is_forward(node) and is_repeatable(node) and node not in weights]


def _regions(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Returns those that the author checkpointed."""
    regions: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if note(node).recompute:
            regions.setdefault(note(node).recompute, []).append(node)
    return list(regions.values())


def _with_layers(program: Program, forward: Sequence[fx.Node]) -> tuple[list[list[fx.Node]], list[fx.Node]]:
    """Returns the layers, each with the author's regions that reach into it, as one; and the nodes that are of none."""
    allowed = set(forward)
    parts = _layers(program, forward_of(program))
    owner = {node: i for i, part in enumerate(parts) for node in part}
    for region in _regions(forward):
        touched = sorted({owner[node] for node in region if node in owner})
        if touched:
            first, *others = touched
            parts[first] += [node for other in others for node in parts[other]]
            parts[first] += [node for node in region if node not in owner]
            for other in others:
                parts[other] = []
            owner.update(dict.fromkeys(parts[first], first))
    return [[node for node in part if node in allowed] for part in parts], [n for n in forward if n not in owner]


def _interior(part: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns what nothing of the forward outside reads."""
    inside = {*part, *(user for node in part for user in node.users if user.op != "output" and not is_forward(user))}
    return [node for node in part if inside.issuperset(node.users)]
