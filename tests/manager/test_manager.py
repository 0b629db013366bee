"""The pass manager: contracts, history, dumps, copies, and that it stops at the first thing that is wrong."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import fx

from fxpar.errors import CheckFailed, PassError, PlanError
from fxpar.ir.program import Note, PassRecord, Program, TensorType, output_node, set_note, update
from fxpar.manager import Pass, PassManager, Verifier, register_pass
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program

aten = torch.ops.aten

TEXT = """fxpar 2
plan {"tp": 2}
properties
symbol b = x.0 like 3
loss loss
%w = parameter["fc.weight"] : f32[64, 96]
%x = input["x"] : f32[b, 96]
%fc = aten.linear.default(%x, %w) : f32[b, 64]  # fc model.py:7
%gelu = aten.gelu.default(%fc) : f32[b, 64]
%loss = aten.sum.default(%gelu) : f32[]
return loss=%loss
"""


def small() -> Program:
    """One matrix, an activation and a sum."""
    return parse_program(TEXT)


def make_pass(
    change: Callable[[Program], object] = lambda program: None,
    name: str = "change",
    requires: Iterable[str] = (),
    provides: Iterable[str] = (),
    invalidates: Iterable[str] = (),
) -> Pass:
    """A pass that applies `change` to the program it gets."""

    @register_pass(name, requires=requires, provides=provides, invalidates=invalidates)
    def run(program: Program) -> Program:
        """Changes the program."""
        change(program)
        return program

    return run


def to_relu(program: Program) -> None:
    program.node("gelu").target = aten.relu.default


def add_relu(program: Program) -> fx.Node:
    """A node behind %gelu, which everything behind it uses; without a note."""
    gelu = program.node("gelu")
    with program.graph.inserting_after(gelu):
        new = program.graph.create_node("call_function", aten.relu.default, (), name="relu")
    gelu.replace_all_uses_with(new)
    new.args = (gelu,)
    return new


def add_noted_relu(program: Program) -> None:
    set_note(
        add_relu(program), Note(type=TensorType(torch.float32, program.node("gelu").meta["custom"]["fxpar"].type.shape))
    )


def drop_gelu(program: Program) -> None:
    gelu = program.node("gelu")
    gelu.replace_all_uses_with(gelu.args[0])  # type: ignore[arg-type]
    program.graph.erase_node(gelu)


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


# ------------------------------------------------------------------ contracts


def test_properties_follow_from_the_contracts() -> None:
    passes = [
        make_pass(name="a", provides={"p", "q"}),
        make_pass(name="b", requires={"p"}, provides={"r"}, invalidates={"q"}),
    ]
    assert PassManager(passes).run(small()).properties == {"p", "r"}


def test_a_pass_whose_requirement_does_not_hold_is_refused() -> None:
    passes = [make_pass(name="a", provides={"p"}), make_pass(name="b", requires={"p", "q"})]
    with pytest.raises(PassError, match="b: requires q, which does not hold; run the pass that provides it before"):
        PassManager(passes).run(small())


def test_what_a_pass_invalidates_no_longer_serves_later_ones() -> None:
    passes = [
        make_pass(name="a", provides={"p"}),
        make_pass(name="b", invalidates={"p"}),
        make_pass(name="c", requires={"p"}),
    ]
    with pytest.raises(PassError, match="c: requires p"):
        PassManager(passes).run(small())


def test_a_pass_cannot_claim_properties_or_history_by_itself() -> None:
    @register_pass("liar")
    def liar(program: Program) -> Program:
        """Claims too much."""
        return program.with_(properties=frozenset({"layouts"}), history=())

    result = PassManager([make_pass(name="a"), liar]).run(small())
    assert result.properties == frozenset()
    assert [record.name for record in result.history] == ["a", "liar"]


@pytest.mark.parametrize("preserves", ["Values", "", "loss"])
def test_a_pass_says_what_it_preserves(preserves: str) -> None:
    with pytest.raises(PassError, match="write one of dataflow, values, nothing"):

        @register_pass("odd", preserves=preserves)
        def odd(program: Program) -> Program:
            """Does nothing."""
            return program


def test_a_pass_without_a_docstring_is_refused() -> None:
    with pytest.raises(PassError, match="silent: the function has no docstring"):

        @register_pass("silent")
        def silent(program: Program) -> Program:
            return program


def test_a_pass_has_a_summary_and_can_be_called() -> None:
    item = make_pass(to_relu)
    program = small()
    assert item.summary == "Changes the program."
    assert item(program).node("gelu").target is aten.relu.default


# ------------------------------------------------------------------ history, dumps, progress


def test_history_names_what_was_added_erased_and_changed() -> None:
    result = PassManager(
        [make_pass(add_noted_relu, "add"), make_pass(drop_gelu, "drop"), make_pass(to_type, "type")]
    ).run(small())
    add, drop, kind = result.history
    assert (add.name, add.added, add.erased, add.changed) == ("add", ("relu",), (), ("loss",))
    assert (drop.added, drop.erased, drop.changed) == ((), ("gelu",), ("relu",))
    assert (kind.added, kind.erased, kind.changed) == ((), (), ("fc",))
    assert all(record.seconds >= 0 for record in result.history)


def to_type(program: Program) -> None:
    """Only the note of a node changes."""
    update(program.node("fc"), role="column")


def test_a_pass_that_does_nothing_leaves_an_empty_record() -> None:
    (record,) = PassManager([make_pass()]).run(small()).history
    assert (record.added, record.erased, record.changed) == ((), (), ())


def test_dumps_hold_the_program_before_and_after_each_pass(tmp_path: Path) -> None:
    result = PassManager([make_pass(name="a"), make_pass(to_relu, "b")], dump=tmp_path / "new" / "folder").run(small())
    dumps = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new" / "folder").iterdir()}
    assert sorted(dumps) == ["00-capture.txt", "01-a.txt", "02-b.txt"]
    assert dumps["00-capture.txt"] == dumps["01-a.txt"] == print_program(small())
    assert dumps["02-b.txt"] == print_program(result)
    assert "aten.relu.default" in dumps["02-b.txt"]


def test_the_dump_of_a_rejected_program_is_there_to_look_at(tmp_path: Path) -> None:
    manager = PassManager([make_pass(to_relu, "bad")], [no_relu()], dump=tmp_path)
    with pytest.raises(CheckFailed):
        manager.run(small())
    assert "aten.relu.default" in (tmp_path / "01-bad.txt").read_text(encoding="utf-8")


def test_until_stops_behind_the_named_pass() -> None:
    passes = [make_pass(name="a"), make_pass(to_relu, "b"), make_pass(drop_gelu, "c")]
    result = PassManager(passes).run(small(), until="b")
    assert [record.name for record in result.history] == ["a", "b"]
    assert result.node("gelu").target is aten.relu.default


def test_until_a_pass_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(PassError, match="d: there is no such pass; choose from a, b"):
        PassManager([make_pass(name="a"), make_pass(name="b")]).run(small(), until="d")


def test_on_pass_gets_every_record_in_order() -> None:
    seen: list[PassRecord] = []
    result = PassManager([make_pass(name="a"), make_pass(to_relu, "b")], on_pass=seen.append).run(small())
    assert tuple(seen) == result.history


# ------------------------------------------------------------------ fail closed


def test_a_plain_function_is_no_pass() -> None:
    def plain(program: Program) -> Program:
        return program

    with pytest.raises(PassError, match=r"plain.*must be a registered pass; decorate it"):
        PassManager([plain])  # type: ignore[list-item]


@pytest.mark.parametrize("result", [None, "text", TEXT.encode()])
def test_a_pass_that_returns_no_program_is_refused(result: object) -> None:
    @register_pass("lost")
    def lost(program: Program) -> Program:
        """Loses the program."""
        return result  # type: ignore[return-value]

    with pytest.raises(PassError, match=f"lost: returned a {type(result).__name__} and no Program"):
        PassManager([lost]).run(small())


def test_a_node_without_a_note_is_refused() -> None:
    with pytest.raises(PassError, match="change: left node %relu without a note; call set_note"):
        PassManager([make_pass(add_relu)]).run(small())


def test_a_method_call_is_refused() -> None:
    def as_method(program: Program) -> None:
        program.node("gelu").op = "call_method"
        program.node("gelu").target = "relu"

    with pytest.raises(PassError, match="change: left the call_method node %gelu"):
        PassManager([make_pass(as_method)]).run(small())


def test_a_use_before_its_definition_is_refused() -> None:
    def turn(program: Program) -> None:
        program.node("fc").prepend(program.node("gelu"))

    with pytest.raises(PassError, match="change: left an unsound graph"):
        PassManager([make_pass(turn)]).run(small())


def test_a_use_of_another_graph_is_refused() -> None:
    foreign = small()

    def mix(program: Program) -> None:
        program.node("gelu").args = (foreign.node("fc"),)

    with pytest.raises(PassError, match="change: left an unsound graph"):
        PassManager([make_pass(mix)]).run(small())


def no_relu() -> Verifier:
    """A check that relu breaks."""

    def check(program: Program) -> None:
        for node in program.graph.nodes:
            if node.target is aten.relu.default:
                raise CheckFailed("is a relu", where=f"%{node.name}")

    return Verifier("no relu", frozenset(), check)


def test_a_rejection_names_the_check_and_the_pass() -> None:
    passes = [make_pass(name="good"), make_pass(to_relu, "bad"), make_pass(name="never")]
    with pytest.raises(CheckFailed, match="%gelu: is a relu") as caught:
        PassManager(passes, [no_relu()]).run(small())
    assert notes_of(caught.value) == "found by the check 'no relu' after 'bad'"


def test_a_rejection_before_the_first_pass_names_the_capture() -> None:
    program = small()
    to_relu(program)
    with pytest.raises(CheckFailed) as caught:
        PassManager([make_pass()], [no_relu()]).run(program)
    assert notes_of(caught.value) == "found by the check 'no relu' after 'capture'"


def test_an_error_inside_a_pass_names_the_pass() -> None:
    def refuse(program: Program) -> None:
        raise PlanError("cannot be done", where="split")

    with pytest.raises(PlanError, match="split: cannot be done") as caught:
        PassManager([make_pass(refuse, "picky")]).run(small())
    assert notes_of(caught.value) == "raised by the pass 'picky'"


def test_a_check_runs_only_while_its_properties_hold() -> None:
    seen: list[frozenset[str]] = []
    verifier = Verifier("watch", frozenset({"p", "q"}), lambda program: seen.append(program.properties))
    passes = [
        make_pass(name="a", provides={"p"}),
        make_pass(name="b", provides={"q"}),
        make_pass(name="c", invalidates={"p"}),
    ]
    PassManager(passes, [verifier]).run(small())
    assert seen == [frozenset({"p", "q"})]


# ------------------------------------------------------------------ copies


def test_a_pass_works_on_a_copy() -> None:
    program = small()
    result = PassManager([make_pass(drop_gelu), make_pass(to_type)]).run(program)
    assert print_program(program) == TEXT
    assert (program.properties, program.history) == (frozenset(), ())
    assert print_program(result) != TEXT


@pytest.mark.parametrize("change", [drop_gelu, to_type, add_relu, to_relu])
def test_a_pass_that_fails_leaves_its_input_as_it_was(change: Callable[[Program], object]) -> None:
    def fail(program: Program) -> None:
        change(program)
        raise PassError("stopped half-way")

    program = small()
    with pytest.raises(PassError, match="half-way"):
        PassManager([make_pass(fail)]).run(program)
    assert print_program(program) == TEXT


def test_a_constant_of_the_input_stays_when_a_pass_replaces_it() -> None:
    text = TEXT.replace("%x =", '%c = constant["c"]([1.0, 2.0]) : f32[2]\n%x =')

    def replace(program: Program) -> None:
        program.constants["c"] = torch.zeros(2)  # type: ignore[index]

    program = parse_program(text)
    PassManager([make_pass(replace)]).run(program)
    assert program.constants["c"].tolist() == [1.0, 2.0]


def test_the_result_can_run() -> None:
    result = PassManager([make_pass(to_relu)]).run(small())
    w, x = torch.randn(64, 96), torch.randn(3, 96)
    (loss,) = result.graph_module(w, x)
    torch.testing.assert_close(loss, (x @ w.T).relu().sum())
    assert output_node(result.graph).args[0] is not None


def test_a_pass_that_is_left_out_may_be_the_last() -> None:
    @register_pass("never", when=lambda program: False)
    def never(program: Program) -> Program:
        """Is for no program."""
        raise AssertionError

    program = PassManager([make_pass(name="first"), never, make_pass(name="last")]).run(small(), until="never")
    assert [record.name for record in program.history] == ["first"]
    assert never.condition == ""
