"""The phases of a step: what runs in the forward, in the backward, and once after all microbatches.

Enters: a program and its facts. Leaves: nothing, or `CheckFailed` that names the node.

Of what the phase *parameter* reads the microbatches' values are added up before it runs. That is right where it is
linear in them, and the types say so: on an axis whose ranks are the microbatches, a value of the backward is a summand
(P), a parameter is one value (R), and a value of the forward is neither. The rules of one axis infer the rest.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from typing import NoReturn

from torch import fx

from fxpar.cost.buffer_reuse import copyable, handshakes, is_shot, is_sum
from fxpar.errors import CheckFailed
from fxpar.ir.program import (
    Program,
    ScalarType,
    TensorType,
    describe,
    has_note,
    note,
    operands,
    output_node,
    output_types,
)
from fxpar.ir.properties import Property
from fxpar.ir.step import (
    BACKWARD,
    PARAMETER,
    PHASES,
    batch_symbol,
    is_forward,
    is_gradient,
    is_input_gradient,
    model_outputs,
    output_of,
)
from fxpar.layout.layout import P, Placement, R
from fxpar.layout.symbolic_sizes import names, symbol
from fxpar.manager import Expressions
from fxpar.ops.collectives import COERCION_OF, all_reduce_coalesced, sum_gradients
from fxpar.ops.operator import alike
from fxpar.ops.token_chunks import merged
from fxpar.passes.differentiate import forward_of, of_outputs
from fxpar.peer_memory.compiler.symmetric_buffer import BUFFERS
from fxpar.rewrite.row_cuts import RowCuts
from fxpar.rules.table import inferred
from fxpar.signatures.check_cache import Facts
from fxpar.signatures.engine import Refusal
from fxpar.signatures.op_call import call_of

# The chunks of a step: what is computed of each are its rows of the whole.


def check_chunks(program: Program) -> None:
    """Checks that all chunks compute the same, in order, and only what treats rows apart.

    Raises:
        CheckFailed: names the node.
    """
    whole, chunked = merged(program)
    if not chunked:
        return
    rules = RowCuts(whole, symbol(batch_symbol(program)), 2)
    for node, (needs, outputs) in chunked.items():
        known: dict[fx.Node, list[int | None]] = {}
        places = iter(needs)
        for read in operands(node):
            known[read] = [next(places) for _ in output_types(read)]
        cut = rules.of(node, known)
        if cut is None or cut.operands != needs or cut.outputs != outputs:
            raise CheckFailed(
                "is computed in chunks of rows, which it does not treat apart",
                where=describe(node),
                remedy="join_chunks of what it reads",
            )


# The backward of a step: that of its own forward.


def check_step(program: Program) -> None:
    """Compares the gradients with those that differentiating the forward gives.

    Raises:
        CheckFailed: a gradient is missing, there is one too many, or it is computed in another way.
        FxparError: the forward cannot be differentiated.
    """
    program, _ = merged(program)
    tangents = [output for entry in program.inputs if (output := output_of(entry.path))]
    trained = [p.fqn for p in program.parameters if p.trainable and not p.left_out]
    forward = forward_of(program)
    missing = [name for name in tangents if name not in forward.outputs]
    if missing:
        raise CheckFailed("has a tangent and is not returned", where=f"output {missing[0]}")
    again = of_outputs(tangents, model_outputs(program), trained).run(forward)
    # Gradients are added in the order of the forward, of which that of chunks differs.
    known = Expressions(associative=True)
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


# The buffers of a step: no rank copies into one that another still reads.

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


# They give each of their operands again, summed over ranks or as it is.
_ITEM_BY_ITEM = frozenset({sum_gradients, all_reduce_coalesced})
_MICROBATCHES = 2
_FORWARD = "the forward, which differs from microbatch to microbatch"


def check_phases(program: Program, facts: Facts) -> None:
    """Checks the phase of each node.

    The forward reads nothing of the backward, and that nothing of the parameter phase. Tangents are of the backward,
    parts of a tuple are where it is, each output is of a phase that gives it. What the parameter phase gives is linear
    in what the backward leaves.

    Raises:
        CheckFailed: names the node and what it reads, or the output.
    """
    if _check_order(program, facts):
        _check_tuples(program)
        _check_ends(program)
        _ParameterPhase(program).check()


def _check_order(program: Program, facts: Facts) -> bool:
    """Says whether the program has several phases."""
    known: dict[int, int] = facts.known("phases")
    ranks: dict[fx.Node, int] = {}
    for node, number in facts.numbers.items():
        if number not in known:
            known[number] = PHASES.index(note(node).phase)
        ranks[node] = known[number]
    has_several = any(ranks.values())
    for node, rank in ranks.items() if has_several else ():
        later = next((read for read in facts.reads[node] if ranks[read] > rank), None)
        if later is not None:
            phases = [note(end).phase or "forward" for end in (node, later)]
            raise CheckFailed(
                f"is of the phase {phases[0]} and reads %{later.name}, which is of the phase {phases[1]}",
                where=describe(node),
            )
        if rank and Property.STEP not in program.properties:
            raise CheckFailed(
                f"is of the phase {note(node).phase}",
                where=describe(node),
                remedy="differentiate: the program is no step",
            )
    paths = {entry.node: entry.path for entry in program.inputs}
    for node in program.graph.nodes:
        phase = BACKWARD if output_of(paths.get(node.name, "")) else ""
        if node.op == "placeholder" and note(node).phase != phase:
            raise CheckFailed("is a tangent in the forward, or an input in the backward", where=describe(node))
    return has_several


def _check_tuples(program: Program) -> None:
    """Checks that phases hand tensors on, and no tuples."""
    for node in program.graph.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and note(source).phase != note(node).phase:
            phases = [note(end).phase or "forward" for end in (node, source)]
            raise CheckFailed(
                f"is of the phase {phases[0]}, and its tuple %{source.name} of the phase {phases[1]}",
                where=describe(node),
                remedy="write one phase at both",
            )


def _check_ends(program: Program) -> None:
    """Checks that the forward gives outputs, the backward gradients of inputs, and either those of parameters."""
    for name, value in zip(program.outputs, output_node(program.graph).args[0], strict=True):  # type: ignore[arg-type]
        if not isinstance(value, fx.Node):
            continue  # which another check says
        phase = note(value).phase
        if is_gradient(name):
            is_wrong = phase != BACKWARD if is_input_gradient(name) else phase == ""
            expected = "the backward" if is_input_gradient(name) else "the backward or of what follows it"
        else:
            is_wrong, expected = phase != "", "the forward"
        if is_wrong:
            raise CheckFailed(
                f"is returned as {name}, and is of the phase {phase or 'forward'}, not of {expected}",
                where=describe(value),
                remedy="run the pass differentiate again, or undo the edit of the phase",
            )


class _ParameterPhase:
    """What the phase *parameter* makes of the sums of what the backward has left.

    Attributes:
        found: of each of its nodes, whether its outputs are linear in these sums (P) or the same in all microbatches.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.constant = {p.node for p in program.parameters if p.kind != "buffer"}
        self.found: dict[fx.Node, tuple[Placement, ...]] = {}

    def check(self) -> None:
        """Judges its nodes, and the gradients that it gives.

        Raises:
            CheckFailed: names the node that is not linear, or reads what it must not.
        """
        for node in self.program.graph.nodes:
            if node.op == "call_function" and note(node).phase == PARAMETER:
                if isinstance(note(node).type, ScalarType):
                    self._check_number(node)
                else:
                    self.found[node] = self._judge(node)
        for name, node in self.program.output_nodes().items():
            if R in self.found.get(node, ()):
                raise CheckFailed(
                    f"is returned as {name}, and is made of no gradient: it is the same for any number of microbatches",
                    where=describe(node),
                    remedy="return what the backward gives",
                )

    def _judge(self, node: fx.Node) -> tuple[Placement, ...]:
        for read in node.all_input_nodes:
            if isinstance(note(read).type, ScalarType) and note(read).phase != PARAMETER:
                self._check_number(read, node)
        placements = tuple(placement for read in operands(node) for placement in self._read(node, read))
        if node.target is operator.getitem:
            number = int(node.args[1])  # type: ignore[arg-type]
            if not 0 <= number < len(placements):
                raise CheckFailed(
                    f"takes item {number} of {len(placements)}",
                    where=describe(node),
                    remedy="take an item that is there",
                )
            return (placements[number],)
        if P not in placements:
            return (R,) * len(output_types(node))
        if node.target in _ITEM_BY_ITEM or node.target in COERCION_OF:
            return placements
        call = call_of(node, _MICROBATCHES)
        answer = inferred(
            replace(call, target=alike(call.target)), placements, [False] * len(placements), composite=False
        )
        if isinstance(answer, Refusal):
            reads = ", ".join(f"%{read.name}" for read in operands(node))
            raise CheckFailed(
                f"is of the phase parameter and not linear in what it reads ({reads}): the backward's values are added "
                "up over the microbatches before it runs",
                where=describe(node),
                remedy=f"write phase={BACKWARD}",
            )
        return answer

    def _read(self, node: fx.Node, read: fx.Node) -> tuple[Placement, ...]:
        """Returns what a value is on the axis of the microbatches."""
        if read in self.found:
            return self.found[read]
        if read.op == "placeholder" and read.name in self.constant:
            return (R,)
        kind = note(read).type
        if is_forward(read):
            self._refuse(node, read, f"of {_FORWARD}")
        if not isinstance(kind, TensorType):
            self._refuse(node, read, f"{kind}, which microbatches cannot add up")
        if not kind.is_float:
            self._refuse(node, read, f"{kind}, and no gradient")
        return (P,)

    def _check_number(self, number: fx.Node, reader: fx.Node | None = None) -> None:
        """Refuses numbers of sizes, which microbatches may have others of."""
        kind = note(number).type
        assert isinstance(kind, ScalarType)
        if names([kind.value]):
            self._refuse(reader or number, number, f"a size of {_FORWARD}")

    def _refuse(self, node: fx.Node, read: fx.Node, reason: str) -> NoReturn:
        raise CheckFailed(
            f"is of the phase parameter, which runs once behind all microbatches, and %{read.name} is {reason}",
            where=describe(node),
            remedy=f"write phase={BACKWARD}: only what is linear in gradients, with parameters and numbers, may wait",
        )
