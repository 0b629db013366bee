"""Reuse of buffers under delays: ranks that run at speeds of their own, each in an order of its own, are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxpar.cost.buffer_reuse import Handshakes
from fxpar.errors import CheckFailed
from fxpar.ir.program import Program, note, update
from fxpar.manager import PassManager
from fxpar.passes.exchange import exchange
from fxpar.text.parsing import parse_program
from fxpar.verify.phases import check_buffers

_KIND = "f32[1000, 1000]"
_HEAD = f"""\
fxpar 2
plan {{"tp": 2, "communication": {{"collective_transport": "copy"}}}}
properties canonical collectives layouts local step
%x = input["x"] : {_KIND} tp:P
"""
# In one phase of one call, a node either sends or takes: (call, node, whether it sends).
Action = tuple[int, fx.Node, bool]


def step_of(random: Random, count: int) -> str:
    """Sums of which each takes what one or two of the last ones gave, in a forward and a backward."""
    lines, made, needed, turn = [], ["x"], set[str](), random.randint(1, count)
    for i in range(count):
        phase = " {phase=backward}" if i >= turn else ""
        read = [random.choice(made[-2:] if random.random() < 0.8 else made) for _ in range(random.choice((1, 1, 2)))]
        needed |= set(read)
        source = read[0]
        if len(read) == 2:
            source = f"p{i}"
            lines.append(f"%{source} = aten.add.Tensor(%{read[0]}, %{read[1]}) : {_KIND} tp:P{phase}")
        lines.append(f"%s{i} = fxpar.all_reduce[tp](%{source}) : {_KIND} tp:P→R{phase}")
        lines.append(f"%a{i} = fxpar.r_to_p[tp](%s{i}) : {_KIND} tp:R→P{phase}")
        made.append(f"a{i}")
    returned = ", ".join(f"y{i}=%{name}" for i, name in enumerate(made[1:]) if name not in needed)
    return _HEAD + "\n".join(lines) + f"\nreturn {returned}\n"


def order_of(nodes: Sequence[fx.Node], call: int, random: Random) -> list[Action]:
    """One order of a phase that follows its dependences, of what has a buffer."""
    own, waits = set(nodes), dict[tuple[fx.Node, bool], list[tuple[fx.Node, bool]]]()
    for node in nodes:
        reads = [(read, False) for read in node.all_input_nodes if read in own]
        waits[node, True] = reads
        waits[node, False] = [(node, True)]
    done: list[tuple[fx.Node, bool]] = []
    late = random.random() < 0.3  # takes as late as may be
    while waits:
        ready = [each for each, reads in waits.items() if all(read in done for read in reads)]
        sends = [each for each in ready if each[1]]
        done.append(random.choice(sends if late and sends else ready))
        del waits[done[-1]]
    return [(call, node, sends) for node, sends in done if note(node).buffer]


def fault(program: Program, calls: Sequence[str], ranks: int, random: Random) -> str:
    """What goes wrong where each rank runs these phases behind each other; empty where nothing does."""
    phases: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            phases.setdefault(note(node).phase, []).append(node)
    todo = [
        [each for call, phase in enumerate(calls) for each in order_of(phases.get(phase, []), call, random)]
        for _ in range(ranks)
    ]
    held: dict[tuple[int, int, int], tuple[fx.Node, int]] = {}  # by reader, buffer and sender
    speeds = [random.random() ** 3 + 1e-6 for _ in range(ranks)]
    while True:
        able = []
        for rank, left in enumerate(todo):
            others = [other for other in range(ranks) if other != rank]
            if left and (left[0][2] or all((rank, note(left[0][1]).buffer, other) in held for other in others)):
                able.append(rank)
        if not able:
            return ""  # all is done, or ranks wait for each other in their different orders: nothing is read wrongly
        rank = random.choices(able, [speeds[each] for each in able])[0]
        call, node, sends = todo[rank].pop(0)
        for other in (other for other in range(ranks) if other != rank):
            buffer = note(node).buffer
            if sends and (other, buffer, rank) in held:
                return f"%{node.name} of call {call} writes over what rank {other} has not read"
            if sends:
                held[other, buffer, rank] = node, call
            elif held.pop((rank, buffer, other)) != (node, call):
                return f"%{node.name} of call {call} reads what another copied"


def faults(program: Program, random: Random) -> list[str]:
    found = []
    for _ in range(8):
        turns = [["", "backward"] * 2, ["", "", "backward", "backward"], ["", ""], ["", "backward"]]
        calls = [phase for _ in range(2) for phase in random.choice(turns)]
        found.append(fault(program, calls, random.choice((2, 3, 4)), random))
    return [each for each in found if each]


@settings(max_examples=20, deadline=None, database=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_written_over_before_it_is_read(seed: int) -> None:
    random = Random(seed)
    program = PassManager([exchange], ()).run(parse_program(step_of(random, random.randint(4, 18))))
    check_buffers(program)
    assert faults(program, random) == []


@settings(max_examples=20, deadline=None, database=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_numbers_the_check_accepts_are_safe(seed: int) -> None:
    random = Random(seed)
    program = PassManager([exchange], ()).run(parse_program(step_of(random, random.randint(4, 18))))
    sums = [node for node in program.graph.nodes if node.name.startswith("s")]
    for node in sums:
        update(node, buffer=random.choice((0, 1, 1, 2, 2, 3, 4)), one_shot=False)
    for _ in range(len(sums)):
        try:
            check_buffers(program)
        except CheckFailed:
            update(random.choice([node for node in sums if note(node).buffer]), buffer=0)
    check_buffers(program)
    assert faults(program, random) == []


@pytest.mark.parametrize("rule", ["are_apart", "opens", "closes"])
def test_the_simulation_sees_what_each_part_of_the_rule_is_for(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule == "are_apart":
        # As if a buffer were free as soon as the next collective needs what was copied.
        near = lambda self, a, b: bool(self.before[a] & self.bits[b] or self.before[b] & self.bits[a])  # noqa: E731
        monkeypatch.setattr(Handshakes, rule, near)
    else:
        monkeypatch.setattr(Handshakes, rule, lambda self, node: False)
    found = []
    for seed in range(60):
        random = Random(seed)
        program = PassManager([exchange], ()).run(parse_program(step_of(random, random.randint(4, 18))))
        found += faults(program, random)
        if found:
            break
    assert found
