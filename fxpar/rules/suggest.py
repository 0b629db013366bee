"""The one coercion that would make an operation legal.

Enters: a judgement (which outputs, if any, an operation gives for placements of its operands) and the placements found.
Leaves: the first coercion of one operand in the order of operands and of SPEC section 2.1's table, preferably one
that gives the outputs the program notes. The search tries every row of the table, so it needs no case for any operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fxpar.layout.layout import Placement, fits, shard
from fxpar.ops.coercion_table import COERCION_OF, Coercion, coercion
from fxpar.program.coercions import unsettled
from fxpar.signatures.calls import Call
from fxpar.signatures.engine import seed_signature
from fxpar.signatures.rule import Refusal, Rule

Judgement = Callable[[Sequence[Placement]], Sequence[Placement] | Refusal]


def suggest(
    judge: Judgement,
    rule: Rule | None,
    call: Call,
    placements: Sequence[Placement],
    expected: Sequence[Placement],
    *,
    exactly: bool = False,
) -> tuple[int, Coercion, Placement] | None:
    """Index of the operand, row of the table and target placement; None where no single coercion helps.

    Args:
        judge: outputs for placements of the operands, written as in notes.
        rule: the operation's rule, which knows the shards that fit those of other operands.
        call: the operation.
        placements: the operands' placements.
        expected: what the note says of the outputs.
        exactly: whether the outputs must be the wanted ones.
    """
    first = None
    for index, placement in enumerate(placements):
        for row in COERCION_OF.values():
            if row.source != placement.kind:
                continue
            for target in _targets(row, rule, call, placements, index):
                if coercion(placement, target) is not row:
                    continue
                outputs = judge([*placements[:index], target, *placements[index + 1 :]])
                if isinstance(outputs, Refusal):
                    continue
                if tuple(outputs) == tuple(expected):
                    return index, row, target
                if first is None and not exactly:
                    first = (index, row, target)
    return first


def _targets(
    row: Coercion, rule: Rule | None, call: Call, placements: Sequence[Placement], index: int
) -> Iterator[Placement]:
    """What a row can make of an operand: the kind itself, or shards that fit the others, then every plain shard."""
    if row.target != "S":
        yield Placement(row.target)
        return
    seen = {placements[index]}
    if placements[index].settled:
        yield unsettled(placements[index])
    for other, placement in enumerate(placements):
        if rule is not None and placement.is_shard and other != index:
            signature = seed_signature(rule, call, other, placement)
            target = None if isinstance(signature, Refusal) else signature.operands[index]
            if target is not None and target.is_shard and target not in seen:
                seen.add(target)
                yield target
    for dim, size in enumerate(call.operands[index].shape):
        target = shard(dim, size)
        if target not in seen and fits(target, call.operands[index].shape, call.n):
            yield target
