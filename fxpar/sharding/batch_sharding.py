"""Where the batch goes: what each value is on an axis whose ranks share out the rows.

Enters: a program, the axis and the dimension of each input that is the batch. Leaves: an `Option` for every node, or an
error that names the operation that mixes rows.

Nothing is chosen here. Inputs are cut over their rows, parameters are whole, and every operation follows its operands
by its rule: what meets a cut value is cut with it or needed replicated, so that the gradients of parameters are
summands. A sum over rows is partial, stays so through what is linear, and is reduced where it must be. Rows are never
gathered: an operation that needs those of other ranks is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from fxpar.errors import LayoutError
from fxpar.ir.grad_flow import carried
from fxpar.ir.operators import canonical_placement
from fxpar.ir.program import (
    Program,
    TensorType,
    ValueType,
    describe,
    insert_call,
    note,
    operands,
    output_layouts,
    output_types,
    tensor_type,
    update,
    with_operands,
)
from fxpar.ir.step import batch_size
from fxpar.ir.symbols import Symbol
from fxpar.layout.layout import I, Layout, P, Placement, R, shard
from fxpar.layout.nesting import local_shape, misfit, peel, spelled
from fxpar.layout.symbolic_sizes import Size, simplify
from fxpar.mesh.axes import Cuts
from fxpar.ops.small_operators import function
from fxpar.rules import Refusal, call_of, inferred, rule_of, seeded
from fxpar.rules.inference import peeled_call, target_on
from fxpar.rules.table import RowWise, lacks_rule, name_of
from fxpar.sharding.options import Option, demanded_by, demands, held_over, value_of, without_demand
from fxpar.signatures.engine import partial_signatures
from fxpar.signatures.op_call import OpCall


def place_batch(program: Program, axis: str, rows: Mapping[str, int]) -> dict[fx.Node, Option]:
    """Returns what each node is on an axis that shares out the batch.

    Args:
        rows: for each input, by path, that has them the dimension of the rows.

    Raises:
        LayoutError: an operation needs the rows of other ranks.
    """
    flags, placed = carried(program), dict[fx.Node, Option]()
    row_wise = RowWise(program.plan.operators.batchwise_ops, {axis: batch_size(program)})
    paths = {entry.node: entry.path for entry in program.inputs}
    held_dims = held_over(program, axis)
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds or node.target is operator.getitem:
            continue
        if node.op == "placeholder":
            dim = rows.get(paths.get(node.name, ""), held_dims.get(node))
            whole = canonical_placement(I, flags[node][0])
            placed[node] = Option((), (whole if dim is None else shard(dim, tensor_type(node).shape[dim]),))
            continue
        if demands(node, axis):
            demanded = demanded_by(node, program.axes[axis])
            placed[node] = Option(demanded.operands, demanded.outputs, "batch")
            continue
        values = [value_of(operand) for operand in operands(node)]
        placements = [placed[maker].outputs[index] for maker, index in values]
        carries = [flags[maker][index] for maker, index in values]
        is_owned = any(program.parameter(maker) is not None and flags[maker][0] for maker, _ in values)
        call = call_of(node, program.axes[axis])
        call = replace(call, target=target_on(node, axis), rows=row_wise.of(node, axis))
        answer = _signature(call, placements, carries, is_owned)
        if isinstance(answer, Refusal):
            remedy = f"rows of the batch are computed apart: {_remedy(node, call)}, or set {axis}=1"
            raise LayoutError(f"on axis {axis}: {answer.reason}", where=describe(node), remedy=remedy)
        needs, produced = answer
        outputs = tuple(canonical_placement(p, flag) for p, flag in zip(produced, flags[node], strict=True))
        placed[node] = Option(
            tuple(canonical_placement(p, flag) for p, flag in zip(needs, carries, strict=True)), outputs, "batch"
        )
    return placed


def _remedy(node: fx.Node, call: OpCall) -> str:
    """Returns what lets an operation have part of the rows."""
    if call.rows is not None or not lacks_rule(node):
        return "write it row by row"
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return "write it with operations that have rules"  # many of torch's own mix rows, and none is declared
    kinds = [tensor_type(operand) for operand in operands(node)]
    adds = node.target is function and len(kinds) == 2 and kinds[1].is_float and not kinds[1].shape
    added = f'if it adds the gradient of a scalar loss declare that, Operators(added_losses=("{name_of(node)}",)), '
    declare = f'Operators(batchwise_ops=("{name_of(node)}",))'
    rows = f"if this operator does so too declare it, {declare}, else write it row by row"
    return (added if adds else "") + rows


def _signature(
    call: OpCall, placements: Sequence[Placement], carries: Sequence[bool], is_owned: bool
) -> tuple[Sequence[Placement], Sequence[Placement]] | Refusal:
    """Returns what an operation needs its operands to be, and what it makes of them; arguments as for `_operands`."""
    needs = _operands(call, placements, carries, is_owned)
    if isinstance(needs, Refusal):
        return needs
    produced = _outputs(call, needs, carries)
    if not isinstance(produced, Refusal):
        return needs, produced
    # What is made of parameters by a backward that takes whole gradients alone: theirs are summed after it.
    whole = [I] * len(placements)
    is_whole = all(placement == I or not flag for placement, flag in zip(placements, carries, strict=True))
    other = _outputs(call, whole, carries) if is_whole and not any(p.is_shard for p in placements) else produced
    return other if isinstance(other, Refusal) else (whole, other)


def _outputs(call: OpCall, needs: Sequence[Placement], carries: Sequence[bool]) -> tuple[Placement, ...] | Refusal:
    canonical = [canonical_placement(placement, flag) for placement, flag in zip(needs, carries, strict=True)]
    return inferred(call, canonical, carries, composite=False)


def _operands(
    call: OpCall, placements: Sequence[Placement], carries: Sequence[bool], is_owned: bool
) -> Sequence[Placement] | Refusal:
    """Returns what an operation needs its operands to be, for what they are; `is_owned` where one is a parameter."""
    cut = [index for index, placement in enumerate(placements) if placement.is_shard]
    sums = {index for index, placement in enumerate(placements) if placement.kind == "P"}
    if not cut:
        return _of_sums(call, placements, sums, carries, is_owned)
    reason = Refusal("no operand leads")
    for index in cut:
        signature, _ = seeded(call, index, placements[index])
        if isinstance(signature, Refusal):
            reason = signature
            continue
        clash = next((i for i in cut if signature.operands[i] != placements[i]), None)
        if clash is None:
            return signature.operands
        name = call.names[clash]
        reason = Refusal(f"{name} is {placements[clash]} where {signature.operands[clash]} fits its other rows")
    return reason


def _of_sums(
    call: OpCall, placements: Sequence[Placement], sums: set[int], carries: Sequence[bool], is_owned: bool
) -> Sequence[Placement]:
    """Sums stay partial where the operation is linear in them; what has no rows stays whole.

    Parameters are replicated where they enter, so that the reduction of their gradients is of the parameters themselves
    and not of what is made of them.
    """
    rule = rule_of(call.target)
    for signature in partial_signatures(rule, call) if sums and rule is not None else ():
        if {i for i, placement in enumerate(signature.operands) if placement.kind == "P"} == sums:
            return [P if i in sums else R for i in range(len(placements))]
    kinds = {"I" if p.kind == "P" else p.kind for p, flag in zip(placements, carries, strict=True) if flag}
    return [R if is_owned or "R" in kinds else I for _ in placements]


def declared(program: Program) -> RowWise:
    """Returns the operators that batchwise_ops names, and the rows as each axis of the batch sees them.

    Raises:
        PlanError: the plan declares some, and no symbolic size is the batch.
    """
    axes, by_axis = program.plan.axes_for(Cuts.BATCH), dict[str, Size]()
    if not program.plan.operators.batchwise_ops or not axes:
        return RowWise()
    rows = batch_size(program)
    for axis, n in axes.items():
        by_axis[axis] = rows
        rows = simplify(rows / n)
    return RowWise(program.plan.operators.batchwise_ops, by_axis)


def peel_program(program: Program, axis: str, placed: Mapping[fx.Node, Option]) -> Program:
    """Returns the program over what one data rank has of each value, as inner axes see it; names stay.

    Args:
        placed: what each node is on the axis.
    """
    n = program.axes[axis]
    inner = program.copy()
    options = {node.name: option for node, option in placed.items()}
    originals = {node.name: node for node in program.graph.nodes}
    for node in list(inner.graph.nodes):
        if node.op == "output" or not output_types(node):
            continue
        if node.target is operator.getitem:
            maker, index = value_of(node)
            update(node, type=_peeled(note(node).type, (options[maker.name].outputs[index],), n))
            continue
        option, old = options[node.name], originals[node.name]
        if node.op == "call_function":
            _peel_operands(node, old, options, option, n)
            if demands(node, axis):  # other axes know nothing of it
                node.target, node.args, node.kwargs = without_demand(node)
        update(node, type=_peeled(note(node).type, option.outputs, n))
    return inner.with_(
        symbols=tuple(_symbol_within(s, program, options, n) for s in program.symbols),
        inputs=tuple(replace(entry, type=tensor_type(inner.node(entry.node))) for entry in program.inputs),
    )


def _peeled(kind: ValueType, placements: Sequence[Placement], n: int) -> ValueType:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    types = tuple(
        replace(item, shape=peel(item.shape, placement, n))
        for item, placement in zip(kinds, placements, strict=True)
        if isinstance(item, TensorType)
    )
    return types if isinstance(kind, tuple) else types[0]


def _peel_operands(node: fx.Node, old: fx.Node, options: Mapping[str, Option], option: Option, n: int) -> None:
    """Slices speak of a rank's part; an operand that is cut for this operation alone is a slice of it."""
    call = peeled_call(call_of(old, n), option.operands, option.outputs)
    if node.target is torch.ops.aten.slice.Tensor:
        bounds = [call.get(name) for name in ("dim", "start", "end", "step")]
        node.args, node.kwargs = (node.args[0], *bounds), {}
    taken: list[fx.Node] = []
    for operand, before, needed in zip(operands(node), operands(old), option.operands, strict=True):
        maker, index = value_of(before)
        current = options[maker.name].outputs[index]
        if needed.is_shard and current.is_shard and needed.dim != current.dim:
            operand = _exchanged(node, operand, current.dim, needed.dim)
        if current.is_shard and not needed.is_shard:
            operand = _gathered(node, operand, current.dim, n)
        if needed.is_shard and not current.is_shard:
            kind = _peeled(tensor_type(operand), (needed,), n)
            assert isinstance(kind, TensorType)
            noted = replace(note(operand), type=kind)
            operand = insert_call(node, torch.ops.aten.slice.Tensor, (operand, needed.dim, 0, None), noted)
        taken.append(operand)
    with_operands(node, taken)


def _gathered(node: fx.Node, operand: fx.Node, dim: int, n: int) -> fx.Node:
    """Returns what ranks have that give each other all: as much of everyone."""
    kind = tensor_type(operand)
    shape = (*kind.shape[:dim], simplify(kind.shape[dim] * n), *kind.shape[dim + 1 :])
    noted = replace(note(operand), type=TensorType(kind.dtype, shape))
    return insert_call(node, torch.ops.aten.cat.default, ([operand] * n, dim), noted)


def _exchanged(node: fx.Node, operand: fx.Node, source: int, target: int) -> fx.Node:
    """Returns what ranks have that give each other their parts: of two dimensions of their number one is whole then."""
    shape = list(tensor_type(operand).shape)
    shape[source], shape[target] = shape[target], shape[source]
    noted = replace(note(operand), type=TensorType(tensor_type(operand).dtype, tuple(shape)))
    return insert_call(node, torch.ops.aten.transpose.int, (operand, source, target), noted)


def _symbol_within(symbol: Symbol, program: Program, options: Mapping[str, Option], n: int) -> Symbol:
    """Returns the symbol on a rank: n times smaller where the axis shares its size out."""
    entry = next(entry for entry in program.inputs if entry.path == symbol.path)
    (placement,) = options[entry.node].outputs
    is_cut = placement.is_shard and placement.dim == symbol.dim
    return replace(symbol, multiple=symbol.multiple // n) if is_cut else symbol


# What data ranks share out of parameters.


def share_out(program: Program) -> None:
    """Cuts each of `Program.sharded_parameters` over the ranks that share parameters out, as the plan says.

    The cut is that of the first dimension that they divide, after what other axes leave of it: blocks of dimension 0
    are those of `DTensor`'s `Shard(0)`. A parameter that they divide in no dimension stays whole.
    """
    for parameter in program.sharded_parameters:
        node = program.node(parameter.node)
        (layout,) = output_layouts(node)
        for axis in program.plan.sharding_axes:
            if layout.on(axis) in (I, R):  # what is frozen is replicated
                layout = _shared_out(layout, axis, parameter.type, program.axes) or layout
        update(node, layout=layout)


def _shared_out(layout: Layout, axis: str, kind: TensorType, axes: Mapping[str, int]) -> Layout | None:
    rest = tuple((name, placement) for name, placement in layout if name != axis)
    sizes = local_shape(kind.shape, Layout(rest), axes)
    for dim, size in enumerate(sizes if 0 not in sizes else ()):
        cut = Layout((*rest, (axis, shard(dim, size))))
        if not misfit(cut, kind.shape, axes):
            return spelled(cut, axes)
    return None
