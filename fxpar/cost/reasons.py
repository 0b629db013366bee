"""What of a program ranks split, what they hold whole, and why.

Enters: a program with layouts. Leaves: how parameters are cut, and reasons in words.
"""

from __future__ import annotations

import torch

from fxpar.cost.figures import ParameterCut, Whole
from fxpar.cost.flops import uncounted
from fxpar.cost.parameter_memory import local_elements
from fxpar.ir.operators import CHEAPEST, ONLY
from fxpar.ir.program import Program, TensorType, note, operands, output_layouts, output_types
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import Size, names
from fxpar.mesh.axes import Cuts
from fxpar.ops.operator import Operator, alike
from fxpar.rules import call_of, key_of
from fxpar.rules.table import RowWise, lacks_rule
from fxpar.text.printing import layout_text

aten = torch.ops.aten
_SOFTMAX = frozenset({aten.softmax.int, aten._softmax.default})
_IN_WORDS = {
    CHEAPEST: "a step with it cut would take longer (fxpar explain tells by how much)",
    ONLY: "no operation that uses it can take a part of it",
}


def parameter_cuts(program: Program) -> tuple[ParameterCut, ...]:
    """Returns how the ranks hold each parameter."""
    cuts = []
    for parameter in program.parameters:
        kind, layouts = parameter.type, output_layouts(program.node(parameter.node))
        if parameter.kind != "parameter":
            continue
        shape = local_shape(kind.shape, layouts[0], program.axes) if layouts else kind.shape
        layout = layout_text(layouts[0], kind.shape, program.axes) if layouts else "-"
        local = TensorType(kind.dtype, tuple(shape))
        cuts.append(ParameterCut(parameter.fqn, str(kind), layout, str(local)))
    return tuple(cuts)


def whole_matrices(program: Program) -> tuple[Whole, ...]:
    """Returns parameters of two or more dimensions that every rank of tp holds whole."""
    sizes = {p.fqn: local_elements(program, p) * p.type.dtype.itemsize for p in program.parameters}
    return tuple(Whole(name, sizes[name], _IN_WORDS.get(reason, reason)) for name, reason in unsplit(program))


def unsplit(program: Program) -> list[tuple[str, str]]:
    """Returns parameters of two or more dimensions that no axis that splits layers divides, with the reason."""
    axes, matrices = program.plan.axes_for(Cuts.FEATURES), []
    for parameter in program.parameters:
        node = program.node(parameter.node)
        is_matrix = parameter.kind == "parameter" and len(parameter.type.shape) > 1
        if is_matrix and any(not layout.on(axis).is_shard for layout in output_layouts(node) for axis in axes):
            matrices.append((parameter.fqn, note(node).origin or ONLY))
    return matrices


def without_rule(program: Program) -> list[str]:
    """Returns operators of a canonical program that are not known to split: they stay whole on every rank.

    They have no rule, or are functions of the author's that are not known to be element-wise, with the reason. What the
    plan declares row-wise is whole for the ranks that split layers alone.
    """
    operators, declared = set(), RowWise(program.plan.operators.batchwise_ops if program.plan.data_ranks > 1 else ())
    splits_layers = bool(program.plan.axes_for(Cuts.FEATURES))
    for node in program.graph.nodes:
        if not lacks_rule(node) or (declared.names(node) and not splits_layers):
            continue
        known = isinstance(node.target, Operator) and node.target.whole is not None
        text = f"{node.target}: {node.target.whole(call_of(node, 2))}" if known else key_of(node.target)
        operators.add(f"{text} (of its rank's rows, as batchwise_ops says)" if declared.names(node) else text)
    return sorted(operators)


def remarks(program: Program, split_flops: float) -> tuple[str, ...]:
    """Returns what the plan asked for and did not get, and what the figures leave out."""
    sentences = []
    if program.axes and split_flops == 0:
        sentences.append("No matrix product is split: every rank computes everything.")
    if unknown := uncounted(program):
        calls = ", ".join(f"{name} ({count})" for name, count in unknown.items())
        sentences.append(f"Not counted as matrix FLOPs, for what they multiply is not known: {calls}.")
    if program.plan.sequence_parallel and program.axes:
        sentences += [f"sequence_parallel cut nothing: {reason}." for reason in _uncut_sequence(program)]
    return tuple(sentences)


def _uncut_sequence(program: Program) -> list[str]:
    shared = {s.name for s in program.symbols if s.ranks > 1}
    if not shared:
        lengths = sorted({int(size) for size in _lengths(program) if not names((size,))})
        if not lengths:
            return ["no input has a sequence length that may vary"]
        tokens = " and ".join(str(length) for length in lengths)
        return [f"attention runs over {tokens} tokens, a number fixed by the model that no input's size gives"]
    for node in program.graph.nodes:
        for layout in output_layouts(node) if node.op == "call_function" else ():
            cuts = [piece for _, placement in layout for piece in placement.pieces if piece.sharded]
            if any(not names((piece.size,)).isdisjoint(shared) for piece in cuts):
                return []
    return ["values that are whole over the sequence make the step shorter, or no operation between matrices allows it"]


def _lengths(program: Program) -> set[Size]:
    """Returns sizes over which attention runs."""
    lengths: set[Size] = set()
    for node in program.graph.nodes:
        if alike(node.target) is aten.scaled_dot_product_attention.default:
            lengths |= {output_types(operand)[0].shape[-2] for operand in operands(node)[:2]}
        elif node.target in _SOFTMAX and output_types(node)[0].shape:
            lengths.add(output_types(node)[0].shape[-1])
    return lengths
