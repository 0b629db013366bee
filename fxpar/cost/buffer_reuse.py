"""When a buffer into which ranks copy may be written to again.

Enters: a step with the calls of its regions written out. Leaves: which of its collectives could be copies, and which
of them may share a buffer; after the pass `exchange` why the others are no copies.

A rank copies into the others' memory without asking whether they have read what was there. That they have follows from
the order of the program, which is that of all ranks: each collective over the same ranks is a *handshake*, of which
nobody sees the end before all have begun it. So two uses of a buffer are *apart* where a third collective lies between
them: it needs the result of the one, and the other needs its result. What depends on nothing keeps no order, whoever
schedules the operations.

From call to call the device keeps the order: all of a call runs after all of the one before, whichever parts of a step
they are (a forward, a backward, another microbatch). What *opens* a call, so that no collective lies before it, may
follow what *closed* another. Hence the rule: what opens a call has an odd buffer, what closes one an even buffer, and
what does both has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxpar.cost.communication import collectives
from fxpar.ir.program import Program, note
from fxpar.ir.step import ONCE, PARAMETER, phase_of
from fxpar.ops.operator import Operator


@dataclass(frozen=True)
class Handshakes:
    """Collectives over the same ranks in one part of a step.

    Attributes:
        bits: the nodes in order, each with a bit of its own.
        before: of each the bits of those whose results it needs.
        far: of each the bits of those that one of these needs.
    """

    bits: Mapping[fx.Node, int]
    before: Mapping[fx.Node, int]
    far: Mapping[fx.Node, int]

    def opens(self, node: fx.Node) -> bool:
        """Returns whether none lies before it."""
        return not self.before[node]

    def closes(self, node: fx.Node) -> bool:
        """Returns whether none needs its result."""
        return not any(mask & self.bits[node] for mask in self.before.values())

    def are_apart(self, one: fx.Node, other: fx.Node) -> bool:
        """Returns whether there is one between them, so that they may share a buffer."""
        return bool(self.far[one] & self.bits[other] or self.far[other] & self.bits[one])


def handshakes(program: Program, nodes: Sequence[fx.Node]) -> list[Handshakes]:
    """Returns the collectives by ranks and by part of the step.

    Args:
        program: without calls of regions.
        nodes: those that are handshakes, in order.
    """
    groups: dict[tuple[str, str], list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault((str(node.kwargs["axis"]), note(node).phase), []).append(node)
    return [_of(program, alike) for alike in groups.values()]


def _of(program: Program, nodes: Sequence[fx.Node]) -> Handshakes:
    bits = {node: 1 << i for i, node in enumerate(nodes)}
    before: dict[fx.Node, int] = {}
    needed: dict[fx.Node, int] = {}  # of every node, itself among them
    for node in program.graph.nodes:
        mask = 0
        for read in node.all_input_nodes:
            mask |= needed[read]
        if node in bits:
            before[node] = mask
            mask |= bits[node]
        needed[node] = mask
    far = {}
    for node, mask in before.items():
        far[node] = 0
        for other, bit in bits.items():
            if mask & bit:
                far[node] |= before[other]
    return Handshakes(bits, before, far)


def copyable(program: Program) -> dict[fx.Node, int]:
    """Returns the collectives of each microbatch that could be copies, with the bytes of each.

    Not those whose results nothing returned needs: a compiler may leave them out, and they vouch for nothing.

    Args:
        program: a step, without calls of regions.
    """
    by_name = {node.name: node for node in program.graph.nodes}
    sizes: dict[fx.Node, int] = {}
    alive = _alive(program)
    for sent in collectives(program):
        node = by_name[sent.node]
        target = node.target
        assert isinstance(target, Operator)
        is_once = phase_of(node) in (ONCE, PARAMETER)
        if target.copies and sent.op == target.sends[0] and not is_once and node in alive:
            sizes[node] = sent.bytes
    return sizes


def is_sum(node: fx.Node) -> bool:
    """Returns whether a node is a sum over ranks that can be copies."""
    target = node.target
    return isinstance(target, Operator) and target.copies and target.sends[0] == "all_reduce"


def is_shot(node: fx.Node) -> bool:
    """Returns whether copies of what a node sends are one call in any case."""
    return isinstance(node.target, Operator) and node.target.copies and node.target.one_shot


def _alive(program: Program) -> set[fx.Node]:
    """Returns what is returned, and what that needs."""
    alive: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.op == "output" or node in alive:
            alive.update(node.all_input_nodes)
    return alive


# ---------------------------------------------------------------------- what is not copied, and why


@dataclass(frozen=True)
class Reach:
    """Which ranks can copy into each other's memory.

    Attributes:
        names: of the axes, and of joined ones (`dp-tp`), whose ranks can.
        reasons: by name why those of another cannot.
        bytes: of a rank's memory into which others copy so far.
    """

    names: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    bytes: int = 0


def why_not_copied(program: Program, reach: Reach | None) -> dict[str, str]:
    """Returns why the process group sends a node's value, by name; empty where it is copies.

    Args:
        program: a step, without calls of regions.
        reach: of its ranks; None where these are not known.
    """
    plan, could = program.plan, copyable(program)
    reasons: dict[str, str] = {}
    for node in program.graph.nodes:
        if not isinstance(node.target, Operator) or node.target.traffic is None:
            continue
        axis = str(node.kwargs["axis"])
        if note(node).buffer:
            why = ""
        elif plan.communication.collective_transport == "nccl":
            why = "Communication('nccl')"
        elif node not in could:
            why = "once a step, or of a kind that is not copied"
        elif could[node] < plan.cost.least_copy:
            why = f"less than cost.least_copy, {plan.cost.least_copy:,.0f} bytes"
        elif reach is not None and axis not in reach.names:
            why = reach.reasons.get(axis, "") or "its ranks are no GPUs of one machine"
        elif reach is None and plan.communication.collective_transport == "auto":
            why = "whether ranks can copy is known where they run"
        else:
            why = "what travels beside it leaves no buffer free"
        reasons[node.name] = why
    return reasons
