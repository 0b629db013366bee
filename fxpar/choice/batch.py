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

from torch import fx

from fxpar.choice.options import Option, value_of
from fxpar.errors import LayoutError
from fxpar.layout.layout import I, P, Placement, R, shard
from fxpar.program.coercions import resting
from fxpar.program.gradients import carried
from fxpar.program.program import Program, describe, operands, output_types, tensor_type
from fxpar.rules import Refusal, call_of, inferred, rule_of, seeded
from fxpar.rules.engine import Call, partial_signatures


def place_batch(program: Program, axis: str, rows: Mapping[str, int]) -> dict[fx.Node, Option]:
    """What each node is on an axis that shares out the batch.

    Args:
        rows: for each input, by path, that has them the dimension of the rows.

    Raises:
        LayoutError: an operation needs the rows of other ranks.
    """
    flags, found = carried(program), dict[fx.Node, Option]()
    paths = {entry.node: entry.path for entry in program.inputs}
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not kinds or node.target is operator.getitem:
            continue
        if node.op == "placeholder":
            dim = rows.get(paths.get(node.name, ""))
            whole = resting(I, flags[node][0])
            found[node] = Option((), (whole if dim is None else shard(dim, tensor_type(node).shape[dim]),))
            continue
        values = [value_of(operand) for operand in operands(node)]
        given = [found[maker].outputs[index] for maker, index in values]
        carries = [flags[maker][index] for maker, index in values]
        is_owned = any(program.parameter(maker) is not None and flags[maker][0] for maker, _ in values)
        wanted = _operands(call_of(node, program.axes[axis]), given, carries, is_owned)
        answer = wanted if isinstance(wanted, Refusal) else _outputs(node, program.axes[axis], wanted, carries)
        if isinstance(answer, Refusal):
            raise LayoutError(
                f"on axis {axis}: {answer.reason}",
                where=describe(node),
                remedy=f"rows of the batch are computed apart: write it row by row, or set {axis}=1",
            )
        assert not isinstance(wanted, Refusal)
        outputs = tuple(resting(p, flag) for p, flag in zip(answer, flags[node], strict=True))
        found[node] = Option(tuple(resting(p, flag) for p, flag in zip(wanted, carries, strict=True)), outputs, "batch")
    return found


def _outputs(
    node: fx.Node, n: int, wanted: Sequence[Placement], carries: Sequence[bool]
) -> tuple[Placement, ...] | Refusal:
    settled = [resting(placement, flag) for placement, flag in zip(wanted, carries, strict=True)]
    return inferred(call_of(node, n), settled, carries, composite=False)


def _operands(
    call: Call, given: Sequence[Placement], carries: Sequence[bool], is_owned: bool
) -> Sequence[Placement] | Refusal:
    """What an operation needs its operands to be, for what they are; `is_owned` where one is a parameter."""
    cut = [index for index, placement in enumerate(given) if placement.is_shard]
    sums = {index for index, placement in enumerate(given) if placement.kind == "P"}
    if not cut:
        return _of_sums(call, given, sums, carries, is_owned)
    reason = Refusal("no operand leads")
    for index in cut:
        signature, _ = seeded(call, index, given[index])
        if isinstance(signature, Refusal):
            reason = signature
            continue
        clash = next((i for i in cut if signature.operands[i] != given[i]), None)
        if clash is None:
            return signature.operands
        name = call.names[clash]
        reason = Refusal(f"{name} is {given[clash]} where {signature.operands[clash]} fits its other rows")
    return reason


def _of_sums(
    call: Call, given: Sequence[Placement], sums: set[int], carries: Sequence[bool], is_owned: bool
) -> Sequence[Placement]:
    """Sums stay partial where the operation is linear in them; what has no rows stays whole.

    Parameters are replicated where they enter, so that the reduction of their gradients is of the parameters themselves
    and not of what is made of them.
    """
    rule = rule_of(call.target)
    for signature in partial_signatures(rule, call) if sums and rule is not None else ():
        if {i for i, placement in enumerate(signature.operands) if placement.kind == "P"} == sums:
            return [P if i in sums else R for i in range(len(given))]
    kinds = {"I" if p.kind == "P" else p.kind for p, flag in zip(given, carries, strict=True) if flag}
    return [R if is_owned or "R" in kinds else I for _ in given]


def batch_rows(program: Program, size: object) -> dict[str, int]:
    """For each input, by path, the dimension that is the rows.

    Args:
        size: the number of rows.

    Raises:
        LayoutError: two dimensions of an input are.
    """
    found = {}
    for entry in program.inputs:
        dims = [dim for dim, other in enumerate(entry.type.shape) if other == size]
        if len(dims) > 1:
            raise LayoutError(
                f"dimensions {' and '.join(map(str, dims))} of {entry.type} are both as long as the batch",
                where=f"input {entry.path}",
                remedy="pass it with sizes that differ, or set dp=1",
            )
        if dims:
            found[entry.path] = dims[0]
    return found
