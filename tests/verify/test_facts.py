"""What a check found sound of a node holds of equal ones alone: a fault of a pass is found as if all were new."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import fx

from fxpar.errors import FxparError
from fxpar.ir.program import Program, TensorType, note, update
from fxpar.layout.layout import Layout, P, R, shard
from fxpar.manager import Pass, PassManager, register_pass
from fxpar.signatures.check_cache import Facts, facts_of, has_same_operations
from fxpar.text.parsing import parse_program
from fxpar.verify.static import STATIC
from tests.verify.cases import sequence

aten = torch.ops.aten

Edit = Callable[[Program, fx.Node], None]


def layout(placement: object) -> Edit:
    def change(program: Program, node: fx.Node) -> None:
        if isinstance(note(node).layout, Layout):
            update(node, layout=Layout.of(dict.fromkeys(program.axes, placement)))  # type: ignore[arg-type]

    return change


def shape(program: Program, node: fx.Node) -> None:
    kind = note(node).type
    if isinstance(kind, TensorType) and kind.shape:
        update(node, type=dataclasses.replace(kind, shape=(kind.shape[-1], *kind.shape[:-1])))


def dtype(program: Program, node: fx.Node) -> None:
    kind = note(node).type
    if isinstance(kind, TensorType):
        update(node, type=dataclasses.replace(kind, dtype=torch.int64))


def operand(program: Program, node: fx.Node) -> None:
    """Reads the first node of the program in place of its last operand."""
    if node.all_input_nodes:
        node.replace_input_with(node.all_input_nodes[-1], next(iter(program.graph.nodes)))


def exchanged(program: Program, node: fx.Node) -> None:
    if len(node.args) > 1 and isinstance(node.args[1], fx.Node):
        node.args = (node.args[1], node.args[0], *node.args[2:])


def literal(program: Program, node: fx.Node) -> None:
    def more(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [more(item) for item in value]
        return value + 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    node.args = tuple(more(item) for item in node.args)


def truth(program: Program, node: fx.Node) -> None:
    """A number becomes one that is equal and of another type."""
    node.args = tuple(float(item) if type(item) is int else item for item in node.args)


def axis(program: Program, node: fx.Node) -> None:
    if "axis" in node.kwargs:
        node.kwargs = {**node.kwargs, "axis": "cp"}


def function(program: Program, node: fx.Node) -> None:
    if node.op == "call_function":
        node.target = aten.cumsum.default


def noted(**changes: object) -> Edit:
    return lambda program, node: void(update(node, **changes))


def void(value: object) -> None:
    """Nothing."""


EDITS: dict[str, Edit] = {
    "partial": layout(P),
    "replicated": layout(R),
    "cut": layout(shard(0, 64)),
    "no layout": noted(layout=None),
    "shape": shape,
    "dtype": dtype,
    "no type": noted(type=None),
    "operand": operand,
    "exchanged": exchanged,
    "literal": literal,
    "truth": truth,
    "axis": axis,
    "function": function,
    "phase": noted(phase="backward"),
    "stage": noted(stages=(1,)),
    "random": noted(random=3),
    "needs": noted(needs=(Layout(),)),
}
# Of these programs every check says the same as before.
HARMLESS = ("truth", "random", "needs")


def changing(edit: Edit, name: str) -> Pass:
    @register_pass("change")
    def run(program: Program) -> Program:
        """Edits one node."""
        edit(program, program.node(name))
        return program

    return run


@register_pass("idle", provides={"idle"})
def idle(program: Program) -> Program:
    """Leaves all nodes as they are."""
    return program


def verdict(facts: Facts) -> str:
    """What the checks say of a program; nothing where it is right."""
    for verifier in STATIC:
        try:
            if verifier.applies(facts.program):
                verifier.judge(facts)
        except FxparError as error:
            return f"{verifier.name}: {error}"
    return ""


@pytest.mark.parametrize("name", EDITS)
def test_a_fault_is_found_as_in_a_program_that_nobody_checked(name: str) -> None:
    program, rejected = sequence(2), 0
    checked = facts_of(program)
    assert not verdict(checked)
    for node in checked.nodes:
        changed = program.copy()
        EDITS[name](changed, changed.node(node))
        wanted = verdict(facts_of(changed))
        found = facts_of(changed, before=checked)
        assert verdict(found) == wanted
        assert verdict(facts_of(changed.copy(), before=found)) == wanted  # what was refused is not remembered
        rejected += bool(wanted)
    assert rejected or name in HARMLESS


def failure(passes: list[Pass]) -> str:
    """The check and the pass that a rejection names."""
    with pytest.raises(FxparError) as caught:
        PassManager(passes, STATIC).run(sequence(2))
    return str(caught.value.__notes__)


@pytest.mark.parametrize(
    ("name", "check"), [("partial", "types"), ("shape", "types"), ("function", "types"), ("phase", "structure")]
)
def test_the_pass_that_makes_a_fault_is_named_behind_others(name: str, check: str) -> None:
    node = next(node.name for node in sequence(2).graph.nodes if node.target is aten.layer_norm.default)
    assert f"found by the check '{check}' after 'change'" in failure([idle, changing(EDITS[name], node), idle])


def test_a_fault_that_a_later_pass_mends_is_found() -> None:
    program = sequence(2)
    name = next(node.name for node in program.graph.nodes if node.target is aten.layer_norm.default)
    mend = changing(noted(layout=note(program.node(name)).layout), name)
    assert "after 'change'" in failure([idle, changing(layout(P), name), dataclasses.replace(mend, name="mend")])


TEXT = """fxpar 2
plan {"tp": 2}
properties
symbol b = x.0 like 3
loss loss
%x = input["x"] : f32[b, 96]
%one = aten.gelu.default(%x) : f32[b, 96]
%two = aten.relu.default(%x) : f32[b, 96]
%sum = aten.add.Tensor(%one, 2) : f32[b, 96]
%loss = aten.sum.default(%sum) : f32[]
return loss=%loss
"""


def numbers(edit: Callable[[Program], None]) -> tuple[dict[str, int], dict[str, int]]:
    """Of each node its number, before and after."""
    program = parse_program(TEXT)
    before = facts_of(program)
    changed = program.copy()
    edit(changed)
    after = facts_of(changed, before=before)
    return tuple({node.name: n for node, n in facts.numbers.items()} for facts in (before, after))  # type: ignore[return-value]


@pytest.mark.parametrize("value", [3, 2.0, True, -2, "2", None])
def test_another_literal_is_another_node(value: object) -> None:
    def change(program: Program) -> None:
        program.node("sum").args = (program.node("one"), value)  # type: ignore[assignment]

    before, after = numbers(change)
    assert {name for name in before if before[name] != after[name]} == {"sum"}


def test_what_reads_another_type_is_another_node() -> None:
    before, after = numbers(lambda program: void(update(program.node("one"), type=TensorType(torch.float64, (96,)))))
    assert {name for name in before if before[name] != after[name]} == {"one", "sum"}


def test_a_node_that_is_printed_as_a_literal_is_none() -> None:
    program = parse_program(TEXT)
    program.node("two").name = "True"
    program.node("sum").args = (program.node("one"), True)
    changed = program.copy()
    changed.node("sum").args = (changed.node("one"), changed.node("True"))
    before = facts_of(program)
    after = facts_of(changed, before=before)
    assert after.numbers[changed.node("sum")] != before.numbers[program.node("sum")]


def test_operands_are_those_of_the_changed_node() -> None:
    program = parse_program(TEXT)
    changed = program.copy()
    changed.node("sum").args = (changed.node("two"), 2)
    after = facts_of(changed, before=facts_of(program))
    assert after.operands[changed.node("sum")] == [changed.node("two")]


def test_what_is_trained_is_asked_of_each_program() -> None:
    program = parse_program(TEXT)
    changed = program.with_(inputs=tuple(dataclasses.replace(entry, carries=True) for entry in program.inputs))
    before = facts_of(program)
    assert not any(any(flags) for flags in before.flags.values())
    after = facts_of(changed, before=before)
    assert all(all(flags) for flags in after.flags.values())


def test_another_plan_is_asked_anew() -> None:
    program = parse_program(TEXT)
    before = facts_of(program)
    after = facts_of(parse_program(TEXT.replace('"tp": 2', '"tp": 4')), before=before)
    assert after.memory is not before.memory


_SMALL = """fxpar 2
plan {{"tp": 2}}
properties canonical
symbol b = x.0 like 3
loss -
%x = input["x"] : f32[b, 8]
{lines}
return y=%y
"""


@pytest.mark.parametrize(
    ("lines", "same"),
    [
        ("%v = aten.exp.default(%x) : f32[b, 8]\n%u = aten.neg.default(%x) : f32[b, 8]", True),
        ("%u = aten.neg.default(%x) : f32[b, 8]\n%v = aten.exp.default(%x) : f32[b, 8]", True),
        ("%u = aten.exp.default(%x) : f32[b, 8]\n%v = aten.exp.default(%x) : f32[b, 8]", False),
        ("%u = aten.neg.default(%x) : f32[b, 8]\n%v = aten.exp.default(%u) : f32[b, 8]", False),
        ("%u = aten.neg.default(%x) : f32[b, 8] {recompute=1}\n%v = aten.exp.default(%x) : f32[b, 8]", False),
        ("%u = aten.neg.default(%x) : f32[b, 8] {random=1}\n%v = aten.exp.default(%x) : f32[b, 8]", False),
    ],
)
def test_programs_have_the_same_operations_in_any_order(lines: str, same: bool) -> None:
    first = "%u = aten.neg.default(%x) : f32[b, 8]\n%v = aten.exp.default(%x) : f32[b, 8]"
    end = "\n%y = aten.sub.Tensor(%u, %v) : f32[b, 8]"
    one, other = (parse_program(_SMALL.format(lines=text + end)) for text in (first, lines))
    facts = facts_of(one)
    assert has_same_operations(facts, facts_of(other, None, facts)) == same
    assert not has_same_operations(facts, facts_of(one))  # numbers of other memories say nothing


def test_copies_name_later_nodes_as_their_graph_does() -> None:
    lines = (
        "%mm = aten.neg.default(%x) : f32[b, 8]\n%mm_3 = aten.exp.default(%mm) : f32[b, 8]\n%_1 = aten.exp.default(%mm)"
    )
    program = parse_program(_SMALL.format(lines=lines + " : f32[b, 8]\n%y = aten.add.Tensor(%_1, %mm_3) : f32[b, 8]"))
    graph = fx.Graph()
    graph.graph_copy(program.graph, {})
    copied = program.copy().graph
    for name in ("mm", "mm_3", "mm", "_1", "y", "neg"):
        made = [each.create_node("call_function", aten.neg.default, (), name=name).name for each in (copied, graph)]
        assert made[0] == made[1]


class Printed:
    """What is no node and is printed as one."""

    def __repr__(self) -> str:
        return "a"


LIKE_NODES: dict[str, Callable[[Program], None]] = {
    "an expression": lambda p: setattr(p.node("v"), "args", (p.node("t"), [sympy.Symbol("b"), 2, 4])),
    "an object": lambda p: setattr(p.node("t"), "args", (Printed(),)),
}


@pytest.mark.parametrize("name", LIKE_NODES)
def test_what_is_printed_as_an_operand_is_none(name: str) -> None:
    @register_pass("like_a_node")
    def like_a_node(program: Program) -> Program:
        """Changes an operation, and has another take what only looks like its operand."""
        program.node("e").target = aten.sin.default
        LIKE_NODES[name](program)
        return program

    with pytest.raises(FxparError):
        PassManager([like_a_node], STATIC).run(parse_program(LOOKALIKES))


LOOKALIKES = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts local rng vocabulary
symbol b = x.0 like 3
loss loss
%up = parameter["up"] : f32[16, 8] tp:S(0)
%x = input["x"] : f32[b, 8] tp:R
%b = aten.sym_size.int(%x, 0) : b
%a = aten.linear.default(%x, %up) : f32[b, 16] tp:S(1)
%t = aten.tanh.default(%a) : f32[b, 16] tp:S(1)
%v = aten.view.default(%t, [%b, 2, 4]) : f32[b, 4, 4] tp:S(1)
%e = aten.exp.default(%v) : f32[b, 4, 4] tp:S(1)
%s = aten.sum.default(%e) : f32[] tp:P
%loss = fxpar.reduce_from[tp](%s) : f32[] tp:P→I
return loss=%loss
"""


def test_what_is_said_to_hold_is_checked_of_operations_that_are_kept() -> None:
    @register_pass("says_local", provides={"local", "rng", "vocabulary"}, preserves="dataflow")
    def says_local(program: Program) -> Program:
        """Says that a program is a rank's, and changes nothing."""
        return program

    text = LOOKALIKES.replace(" local rng vocabulary", "").replace("[%b, 2, 4]", "[%b, 4, 4]")
    with pytest.raises(FxparError, match="rank"):
        PassManager([says_local], STATIC).run(parse_program(text))
