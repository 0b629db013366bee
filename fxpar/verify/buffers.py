"""The buffers of a step: no rank copies into one that another still reads.

Enters: a step without calls of regions. Leaves: nothing, or `CheckFailed` that names two collectives and the buffer.
The rule, and why it is enough: `fxpar.analysis.buffer_reuse`.
"""

from __future__ import annotations

import itertools

from fxpar.analysis.buffer_reuse import copyable, handshakes, is_shot, is_sum
from fxpar.errors import CheckFailed
from fxpar.exchange.symmetric_buffer import BUFFERS
from fxpar.program.program import Program, describe, has_note, note

_REMEDY = "give one of them another buffer, or run the pass exchange again"


def check_buffers(program: Program) -> None:
    """Checks all that have a buffer.

    Raises:
        CheckFailed: what has one cannot be copies, or not in one shot, or in no other way; two uses of one may be under
            way at once; or one that opens or closes its part of the step has a buffer that another call may use next to
            it.
    """
    for node in (node for node in program.graph.nodes if has_note(node) and note(node).one_shot):
        if not note(node).buffer or not (is_sum(node) or is_shot(node)):
            reason = "is one_shot and no sum that has a buffer"
            raise CheckFailed(reason, where=describe(node), remedy="leave one_shot out")
    nodes = [node for node in program.graph.nodes if has_note(node) and note(node).buffer]
    if not nodes:
        return
    known = copyable(program)
    for node in nodes:
        if node not in known:
            raise CheckFailed("has a buffer and cannot be copies", where=describe(node), remedy="leave the buffer out")
        if is_shot(node) and not note(node).one_shot:
            reason = "has a buffer and is not one_shot, which its copies are"
            raise CheckFailed(reason, where=describe(node), remedy="run the pass exchange again")
        if not 0 < note(node).buffer < BUFFERS:
            raise CheckFailed(f"has buffer {note(node).buffer} of {BUFFERS - 1}", where=describe(node), remedy=_REMEDY)
    for group in handshakes(program, nodes):
        by_buffer: dict[int, list[int]] = {}
        order = list(group.bits)
        for i, node in enumerate(order):
            by_buffer.setdefault(note(node).buffer, []).append(i)
            is_odd = note(node).buffer % 2 == 1
            if (group.opens(node) and not is_odd) or (group.closes(node) and is_odd):
                what = "opens its part of the step, where an odd" if not is_odd else "closes its part, where an even"
                reason = f"{what} buffer is, and has buffer {note(node).buffer}: a call behind it may use that next"
                raise CheckFailed(reason, where=describe(node), remedy=_REMEDY)
        for buffer, places in by_buffer.items():
            for i, k in itertools.combinations(places, 2):
                if not group.are_apart(order[i], order[k]):
                    raise CheckFailed(
                        f"copies into buffer {buffer}, and nothing says that what {describe(order[i])} copied is read:"
                        " no other collective of these ranks lies between them",
                        where=describe(order[k]),
                        remedy=_REMEDY,
                    )
