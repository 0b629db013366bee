"""exchange: large collectives get buffers, and no two that may be under way at once have the same one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxpar
from fxpar.compile import compile_model, lower_program
from fxpar.cost import make_report
from fxpar.cost.buffer_reuse import Handshakes
from fxpar.errors import CheckFailed
from fxpar.ir.program import Note, Program, note, update
from fxpar.ir.regions import inlined, region_of
from fxpar.manager import PassManager
from fxpar.ops.process_group import Group
from fxpar.passes import counted_steps, step_passes
from fxpar.passes.exchange import exchange, exchange_over
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from fxpar.verify.phases import check_buffers
from fxpar.verify.static import STATIC, verify_static

_KIND = "f32[1000, 1000]"
_HEAD = f"""\
fxpar 2
plan {{"tp": 2, "communication": {{"collective_transport": "copy"}}}}
properties canonical collectives layouts local step
%x = input["x"] : {_KIND} tp:P
"""


def chain(count: int, kind: str = _KIND) -> str:
    """Sums that need each other's results."""
    lines, last = [], "x"
    for i in range(count):
        lines.append(f"%s{i} = fxpar.all_reduce[tp](%{last}) : {kind} tp:P→R {{phase=backward}}")
        lines.append(f"%a{i} = fxpar.r_to_p[tp](%s{i}) : {kind} tp:R→P {{phase=backward}}")
        last = f"a{i}"
    return _HEAD.replace(_KIND, kind) + "\n".join(lines) + f"\nreturn y=%{last}\n"


def sums(text: str) -> list[Note]:
    """Notes of the sums, after the pass, which the manager and the check of buffers look at."""
    found = PassManager([exchange], [each for each in STATIC if each.name == "buffers"]).run(parse_program(text))
    assert print_program(parse_program(print_program(found))) == print_program(found)
    return [note(node) for node in found.graph.nodes if node.name.startswith("s")]


def buffers(text: str) -> list[int]:
    """Of the sums."""
    return [each.buffer for each in sums(text)]


def shots(text: str) -> list[bool]:
    """Of the sums, whether they are one kernel."""
    return [each.one_shot for each in sums(text)]


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(1, [0]), (2, [1, 2]), (3, [1, 2, 4]), (4, [1, 2, 1, 2]), (5, [1, 2, 1, 2, 4]), (6, [1, 2, 1, 2, 1, 2])],
)
def test_a_chain(count: int, wanted: list[int]) -> None:
    assert buffers(chain(count)) == wanted


def test_what_is_small_stays() -> None:
    copies = chain(4, "f32[10, 10]").replace('"copy"}', '"copy"}, "cost": {"copy_latency": 0}')
    assert buffers(copies) == [0, 0, 0, 0]
    assert buffers(copies.replace("[10, 10]", "[1000, 1000]")) == [1, 2, 1, 2]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_small_sums_are_one_kernel(ranks: int) -> None:
    text = chain(4, "f32[10, 10]").replace('"tp": 2', f'"tp": {ranks}')
    assert shots(text) == [True] * 4
    assert buffers(text) == [1, 2, 1, 2]


def test_what_is_beside_each_other_shares_no_buffer() -> None:
    sums = "".join(f"%s{i} = fxpar.all_reduce[tp](%x) : {_KIND} tp:P→R {{phase=backward}}\n" for i in range(2))
    # Both open and close: nothing orders them.
    assert buffers(f"{_HEAD}{sums}return a=%s0, b=%s1\n") == [0, 0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"s1": 1}, "copies into buffer 1"),  # the neighbour's
        ({"s0": 2}, "opens its part of the step"),
        ({"s3": 1}, "closes its part"),
        ({"s2": 2}, "copies into buffer 2"),
        ({"a0": 1}, "cannot be copies"),
        ({"s2": 64}, "buffer 64 of 63"),
    ],
)
def test_wrong_buffers_are_found(changes: dict[str, int], what: str) -> None:
    program = PassManager([exchange], ()).run(parse_program(chain(4)))
    text = print_program(program)
    for name, buffer in changes.items():
        line = next(line for line in text.splitlines() if line.startswith(f"%{name} "))
        known = note(program.node(name)).buffer
        old, new = (f"buffer={known},", f"buffer={buffer},") if known else ("{", f"{{buffer={buffer}, ")
        new = line.replace(old, new)
        assert new != line
        text = text.replace(line, new)
    check = next(each for each in STATIC if each.name == "buffers")
    with pytest.raises(CheckFailed, match=what):
        check.check(parse_program(text))


def test_what_has_nothing_beside_it_is_one_kernel() -> None:
    assert shots(chain(4)) == [True] * 4
    # Two microseconds, at 600 TFLOP/s.
    product = f"%p = aten.mm.default(%w, %w) : {_KIND} tp:R {{phase=backward}}\n"
    head = _HEAD.replace("%x =", f'%w = input["w"] : {_KIND} tp:R\n%x =')
    lines = chain(4).removeprefix(_HEAD).splitlines(keepends=True)
    beside = head + lines[0] + product + "".join(lines[1:]).replace("return y", "return p=%p, y")
    assert shots(beside) == [True] * 4
    cost = '{"tp": 2, "communication": {"collective_transport": "copy"}, "cost": {"copy_latency": 1e-6}}'
    assert shots(beside.replace('{"tp": 2, "communication": {"collective_transport": "copy"}}', cost)) == [
        False,
        True,
        True,
        True,
    ]
    assert (
        shots(beside.replace('{"tp": 2, "communication": {"collective_transport": "copy"}}', cost.replace("1e-6", "0")))
        == [False] * 4
    )


@pytest.mark.parametrize(
    ("line", "marked"),
    [
        ("%s0 = fxpar.all_reduce[tp](%x)", "{one_shot=true, "),  # without a buffer
        ("%a0 = fxpar.r_to_p[tp](%s0)", "{one_shot=true, "),  # no sum
    ],
)
def test_what_cannot_be_one_kernel_is_found(line: str, marked: str) -> None:
    text = "".join(
        each.replace("{", marked, 1) if each.startswith(line) else each for each in chain(4).splitlines(keepends=True)
    )
    assert text != chain(4)
    check = next(each for each in STATIC if each.name == "buffers")
    with pytest.raises(CheckFailed, match="one_shot and no sum that has a buffer"):
        check.check(parse_program(text))


def test_what_nobody_needs_vouches_for_nothing() -> None:
    text = chain(5).replace("return y=%a4", "return y=%a3")
    assert buffers(text) == [1, 2, 1, 2, 0]


def test_axes_that_cannot_are_left_alone() -> None:
    for axes in ((), ("dp",)):
        nodes = PassManager([exchange_over(axes)], ()).run(parse_program(chain(4))).graph.nodes
        assert not any(note(node).buffer for node in nodes if node.op == "call_function")


# Every sum of a small model is copied.
COPIES = fxpar.Plan(
    tp=2, communication=fxpar.Communication("copy"), cost=fxpar.Cost(least_copy=1.0, copy_latency=1e-12)
)


def gpt2(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a batch."""
    config = transformers.GPT2Config(n_layer=layers, n_embd=32, n_head=4, vocab_size=64, use_cache=False)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def test_every_call_of_a_region_has_the_same_buffers() -> None:
    program = compile_model(*gpt2(2), COPIES).program
    trained = [p.fqn for p in program.parameters if p.trainable]
    step = PassManager(step_passes((program.loss,), (program.loss,), trained), STATIC).run(program)
    assert any(region_of(node) is not None for node in step.graph.nodes)
    whole = inlined(step)
    held = [note(node).buffer for node in whole.graph.nodes if node.op == "call_function" and note(node).buffer]
    assert len(held) == 2 + 2 * 4  # behind the embedding and in front of the head; two a layer, each way
    assert len(set(held)) <= 4
    assert "buffers" in verify_static(step)


def test_counts_and_simulated_ranks_take_a_step_with_buffers() -> None:
    model, batch = gpt2(1)
    expect(verify(model, batch, COPIES))
    lowering = partial(lower_program, groups={"tp": Group("tp", 2)})  # nothing is sent
    counted = []
    for each in (COPIES, COPIES.replace(communication=fxpar.Communication("nccl"))):
        program = compile_model(model, batch, each).program
        counted.append(
            make_report(program, counted_steps(program, lowering), name="gpt2", device=torch.device("cpu")).ranks
        )
    assert counted[0] == counted[1]


# Reuse of buffers under delays: ranks that run at speeds of their own, each in an order of its own, are simulated.


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
    own, waits = set(nodes), dict[tuple[fx.Node, bool], set[tuple[fx.Node, bool]]]()
    for node in nodes:
        waits[node, True] = {(read, False) for read in node.all_input_nodes if read in own}
        waits[node, False] = {(node, True)}
    done: list[tuple[fx.Node, bool]] = []
    late = random.random() < 0.3  # takes as late as may be
    while waits:
        ready = [each for each, reads in waits.items() if not reads]
        sends = [each for each in ready if each[1]]
        done.append(random.choice(sends if late and sends else ready))
        del waits[done[-1]]
        for reads in waits.values():
            reads.discard(done[-1])
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
