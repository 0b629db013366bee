"""The phases of a step: what runs in the forward, in the backward, and once behind all microbatches.

Enters: a program and its facts. Leaves: nothing, or `CheckFailed` that names the node.

Of what the phase *parameter* reads the microbatches' values are added up before it runs. That is right where it is
linear in them, and the types say so: on an axis whose ranks are the microbatches, a value of the backward is a summand
(P), a parameter is one value (R), and a value of the forward is neither. The rules of one axis infer the rest.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import NoReturn

from torch import fx

from fxpar.errors import CheckFailed
from fxpar.layout.layout import P, Placement, R
from fxpar.layout.symbolic_sizes import names
from fxpar.ops import alike
from fxpar.ops.coercion_table import COERCION_OF
from fxpar.ops.coercions import all_reduce_coalesced, sum_gradients
from fxpar.program.program import Program, ScalarType, TensorType, describe, note, operands, output_node, output_types
from fxpar.program.properties import Property
from fxpar.program.step import BACKWARD, PARAMETER, PHASES, is_forward, is_gradient, is_input_gradient, output_of
from fxpar.rules.table import inferred
from fxpar.signatures.check_cache import Facts
from fxpar.signatures.op_call import call_of
from fxpar.signatures.rule import Refusal

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
    """Phases hand tensors on, and no tuples."""
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
    """The forward gives the model's outputs, the backward gradients of inputs; those of parameters come of either."""
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
        """What a value is on the axis of the microbatches."""
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
        """Microbatches may have other sizes, which a number of the phase must not be of."""
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
