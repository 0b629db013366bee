"""annotate: data ranks share out parameters, whose whole is gathered where the plan says."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import Captured, capture
from fxpar.compile import compile_program, compile_step
from fxpar.errors import FxparError, PlanError
from fxpar.ir.program import Program, note, operands
from fxpar.ir.regions import inlined
from fxpar.ir.step import ONCE, PARAMETER, phase_of
from fxpar.ops.collectives import all_gather, reduce_scatter
from fxpar.plan.cost import Cost
from fxpar.plan.plan import SHARDS, Plan
from fxpar.plan.plan_options import CudaGraphs
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.static import verify_static
from fxpar.verify.values import ValueReport, call_inputs, program_state, verify_values
from tests.passes.modules import changed, changed_by, layouts
from tests.zoo import step_of, stirred

BATCH = {name: torch.arange(24).reshape(4, 6) % 15 for name in ("ids", "labels")}


class Tied(nn.Module):
    """A table that is looked up and predicted, two equal matrices, a scale that no ranks divide, a frozen shift."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(15, 6), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """[b, s] twice."""
        hidden = self.down(self.up(self.drop(self.words(ids)))) * self.scale + self.shift
        return functional.cross_entropy(functional.linear(hidden, self.words.weight).flatten(0, 1), labels.flatten())


@cache
def captured() -> tuple[nn.Module, Captured]:
    torch.manual_seed(1)
    module = stirred(Tied().train())
    return module, capture(module, BATCH, Plan())


@cache
def compiled(shard: str, tp: int = 1, dp: int = 2) -> Program:
    return compile_program(captured()[1].program.with_(plan=Plan(dp=dp, tp=tp, shard=shard)))


@cache
def step(shard: str, tp: int = 1) -> str:
    """The text of the whole training step."""
    program = compiled(shard, tp)
    return print_program(inlined(step_of(program, program.outputs)))


def values(program: Program) -> ValueReport:
    module, single = captured()
    state, inputs = program_state(single.program, module), call_inputs(single, module, BATCH)
    return verify_values(single.program, program, state, inputs)


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_golden(shard: str) -> None:
    """The table has 15 rows, so that its columns are cut; what no ranks divide stays.

    What is frozen has neither gradient nor state: its memory alone is there to be shared out.
    """
    single = captured()[1].program
    plans = Plan(dp=2), Plan(dp=2, shard=shard)
    whole, cut = (compile_program(single.with_(plan=plan), until="annotate") for plan in plans)
    frozen = "… 2\n" if shard != "parameters" else '… 1\n%shift = parameter["shift"](frozen) : f32[6] dp:S(0)\n'
    assert changed(whole, cut) == (
        f"{frozen}"
        '%words_weight = parameter["words.weight"] : f32[15, 6] dp:S(1)\n'
        '%up_weight = parameter["up.weight"] : f32[6, 6] dp:S(0)\n'
        '%down_weight = parameter["down.weight"] : f32[6, 6] dp:S(0)\n'
        "… 21\n"
    )


def test_nothing_is_cut_where_the_plan_says_none() -> None:
    text = print_program(compiled("none"))
    assert "shard=" not in text
    assert "all_gather" not in text


def test_some_data_ranks_share_out_and_others_hold_the_same() -> None:
    """Four data ranks divide no dimension, two of them do."""
    program = compile_program(captured()[1].program.with_(plan=Plan(dp=4, dp_shard=2, shard="optimizer")))
    assert layouts(program)["up.weight"] == "dp_out:I dp_in:S(0)"
    assert values(program).ok


def test_what_tensor_parallel_ranks_leave_is_cut() -> None:
    """Three rows a tensor parallel rank are not for two data ranks; of four columns three remain with four ranks."""
    assert layouts(compiled("parameters", tp=2)) == {
        "scale": "dp:I tp:I",
        "shift": "dp:S(0) tp:R",
        "words.weight": "dp:S(1) tp:S(0: 15 ~ 16)",
        "up.weight": "dp:S(1) tp:S(0)",
        "down.weight": "dp:S(0) tp:S(1)",
    }


def test_ranks_that_divide_no_dimension_share_out_nothing() -> None:
    program = captured()[1].program.with_(plan=Plan(dp=4, shard="parameters"))
    assert "all_gather" not in print_program(compile_program(program))


GATHERS = {
    "optimizer": """\
… 7
%words_weight_all_gather = fxpar.all_gather[dp](%words_weight) : f32[15, 6] dp:S(1)→R {shard=optimizer}
%up_weight_all_gather = fxpar.all_gather[dp](%up_weight) : f32[6, 6] dp:S(0)→R {shard=optimizer}
%down_weight_all_gather = fxpar.all_gather[dp](%down_weight) : f32[6, 6] dp:S(0)→R {shard=optimizer}
""",
    "parameters": """\
… 9
%words_weight_all_gather = fxpar.all_gather[dp](%words_weight) : f32[15, 6] dp:S(1)→R {shard=parameters}
… 2
%up_weight_all_gather = fxpar.all_gather[dp](%up_weight) : f32[6, 6] dp:S(0)→R {shard=parameters}
… 1
%down_weight_all_gather = fxpar.all_gather[dp](%down_weight) : f32[6, 6] dp:S(0)→R {shard=parameters}
… 3
%shift_all_gather = fxpar.all_gather[dp](%shift) : f32[6] dp:S(0)→R {shard=parameters}
… 14
""",
}
GATHERS["gradients"] = GATHERS["optimizer"].replace("optimizer", "gradients")


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_coalesce_marks_the_gathers_and_puts_those_of_a_step_in_front(shard: str) -> None:
    """In the order of use; a tied weight is gathered once for both that read it."""
    text = changed_by("coalesce", captured()[1].program, dp=2, shard=shard)
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("-")]
    assert "".join(lines).startswith(GATHERS[shard])


@pytest.mark.parametrize("shard", SHARDS[1:])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_text_parses_back(shard: str, tp: int) -> None:
    for text in (print_program(compiled(shard, tp)), step(shard, tp)):
        assert text.count(f"shard={shard}") >= 3
        assert print_program(parse_program(text)) == text


@pytest.mark.parametrize(("shard", "phase"), [("optimizer", "parameter"), ("gradients", "backward")])
@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_are_scattered_once_a_step_or_in_each_microbatch(shard: str, phase: str, tp: int) -> None:
    lines = [line for line in step(shard, tp).splitlines() if "reduce_scatter[dp]" in line]
    assert len(lines) == 3
    assert all(f"phase={phase}" in line for line in lines)


@pytest.mark.parametrize("shard", SHARDS[1:])
@pytest.mark.parametrize("tp", [1, 2])
def test_loss_and_gradients_are_those_of_one_device(shard: str, tp: int) -> None:
    for program in (compiled(shard, tp), parse_program(step(shard, tp))):
        report = values(program)
        assert report.ok, report
        assert report.gradients == 4


# Faults in the text of a step, by an edit each.


def edited(text: str, name: str, old: str, new: str) -> str:
    """The text with a part of one node's line replaced."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"%{name} = "))
    assert old in line, line
    return text.replace(line, line.replace(old, new))


def scatter_of(text: str, fqn: str) -> tuple[str, str]:
    """The line that gives a parameter's gradient, and the name of its operand."""
    match = re.search(rf"fxpar\.gradient\.{re.escape(fqn)}=%(\w+)", text)
    assert match is not None
    (line,) = (line for line in text.splitlines() if line.startswith(f"%{match[1]} = "))
    operand = re.search(r"reduce_scatter\[dp\]\(%(\w+)\)", line)
    assert operand is not None, line
    return line, operand[1]


def reader(text: str, gather: str) -> str:
    """The name of the first node of the backward that reads a gather."""
    lines = (line for line in text.splitlines() if "phase=backward" in line)
    return next(line for line in lines if f"%{gather}," in line or f"%{gather})" in line)[1:].split(" ")[0]


def _forgotten(text: str) -> str:
    return edited(text, "linear", "%up_weight_all_gather", "%up_weight")


def _forgotten_in_the_backward(text: str) -> str:
    gather = "up_weight_all_gather_again" if "up_weight_all_gather_again" in text else "up_weight_all_gather"
    return edited(text, reader(text, gather), f"%{gather}", "%up_weight")


def _summed_twice(text: str) -> str:
    line, operand = scatter_of(text, "up.weight")
    name = line.split(" ")[0]
    summed = line.replace(f"{name} =", "%sum =").replace("reduce_scatter", "all_reduce").replace("P→S(0)", "P→R")
    return text.replace(line, f"{summed}\n{line.replace(f'%{operand})', '%sum)')}")


def _summed_twice_under_a_claim(text: str) -> str:
    return edited(_summed_twice(text), "sum", "P→R", "P")


def _not_summed(text: str) -> str:
    line, operand = scatter_of(text, "up.weight")
    return text.replace(f"{line}\n", "").replace(line.split(" ")[0], f"%{operand}")


def _cut_and_not_summed(text: str) -> str:
    line, _ = scatter_of(text, "up.weight")
    return text.replace(line, line.replace("reduce_scatter[", "r_to_s["))


def _whole(text: str) -> str:
    line, _ = scatter_of(text, "up.weight")
    return text.replace(line, line.replace("reduce_scatter[", "all_reduce[").replace("P→S(0)", "P→R"))


def _along_the_other_dimension(text: str) -> str:
    line, _ = scatter_of(text, "up.weight")
    return text.replace(line, line.replace("P→S(0)", "P→S(1)"))


def _in_the_forward(text: str) -> str:
    line, _ = scatter_of(text, "up.weight")
    return text.replace(line, re.sub(r" \{phase=\w+\}", "", line))


def _gathered_in_the_backward(text: str) -> str:
    return edited(text, "up_weight_all_gather", "shard=", "phase=backward, shard=")


def _read_before_it_is_gathered(text: str) -> str:
    lines = text.splitlines(keepends=True)
    (gather,) = (line for line in lines if line.startswith("%up_weight_all_gather = "))
    (product,) = (line for line in lines if line.startswith("%linear = "))
    return text.replace(gather, "").replace(product, product + gather)


FAULTS = {
    _forgotten: r"%linear .*operand weight is S\(0\) where R fits",
    _forgotten_in_the_backward: r"operand mat2 is S\(0\) where R fits",
    _summed_twice: r"the operand %sum is R on dp and not P",
    _summed_twice_under_a_claim: r"%sum .*gives R, the note says P",
    _not_summed: r"is dp:P, and the gradient of %up_weight is dp:S\(0\)",
    _cut_and_not_summed: r"is P on dp and not R|takes R and finds P",
    _whole: r"is dp:R, and the gradient of %up_weight is dp:S\(0\)",
    _along_the_other_dimension: r"is dp:S\(1\), and the gradient of %up_weight is dp:S\(0\)",
    _in_the_forward: r"is of the phase forward and reads .*, which is of the phase backward",
    _gathered_in_the_backward: r"%linear .*is of the phase forward and reads %up_weight_all_gather",
    _read_before_it_is_gathered: r"%up_weight_all_gather is not defined",
}


@pytest.mark.parametrize("shard", SHARDS[1:])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_static_checks_reject(fault: object, shard: str) -> None:
    text = step(shard)
    verify_static(parse_program(text))
    mutant = fault(text)  # type: ignore[operator]
    assert mutant != text
    with pytest.raises(FxparError, match=FAULTS[fault]):  # type: ignore[index]
        verify_static(parse_program(mutant))


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_static_checks_reject_another_axis(shard: str) -> None:
    text = step(shard, tp=2)
    line, _ = scatter_of(text, "up.weight")
    assert "dp:P→S(1) tp:S(0)" in line
    gathered = edited(text, "up_weight_all_gather", "[dp]", "[tp]")
    for mutant in (
        edited(gathered, "up_weight_all_gather", "dp:S(1)→R tp:S(0)", "dp:S(1) tp:S(0)→R"),
        text.replace(line, line.replace("[dp]", "[tp]").replace("dp:P→S(1) tp:S(0)", "dp:P tp:P→S(0)")),
    ):
        with pytest.raises(FxparError, match=r"gathers no parameter that data ranks share out|S\(0\) on tp and not P"):
            verify_static(parse_program(mutant))


@pytest.mark.parametrize("shard", SHARDS[1:])
@pytest.mark.parametrize("name", ["linear", "scale_copy_to", "product"])
def test_static_checks_reject_a_mark_of_what_gathers_no_parameter(shard: str, name: str) -> None:
    """An activation, what sums a parameter's gradient, a product of the backward."""
    text = step(shard)
    lines = [line for line in text.splitlines() if "phase=backward" in line and "aten.mm" in line]
    node = lines[-1][1:].split(" ")[0] if name == "product" else name
    (line,) = (line for line in text.splitlines() if line.startswith(f"%{node} = "))
    mark = f"{{shard={shard}, " if "{" in line else f" {{shard={shard}}}  #"
    mutant = text.replace(line, line.replace("{" if "{" in line else "  #", mark))
    with pytest.raises(FxparError, match=f"is marked shard={shard}, and gathers no parameter"):
        verify_static(parse_program(mutant))


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_static_checks_reject_a_mark_of_another_plan(shard: str) -> None:
    for other in SHARDS[1:]:
        mutant = edited(step(shard), "up_weight_all_gather", f"shard={shard}", f"shard={other}")
        if other != shard:
            with pytest.raises(FxparError, match=f"is marked shard={other}"):
                verify_static(parse_program(mutant))


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_static_checks_reject_a_gather_without_its_mark(shard: str) -> None:
    """It would run in each microbatch, and sums of its gradients would be in half precision where the program is."""
    mutant = edited(step(shard), "up_weight_all_gather", f", shard={shard}", "")
    with pytest.raises(FxparError, match="does not say how long the whole lives"):
        verify_static(parse_program(mutant))


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_values_tell_a_gather_of_another_parameter(shard: str) -> None:
    """Of the same shape and layout, so that no type tells it; in the forward, or in the backward alone."""
    text = step(shard)
    again = "_again" if shard == "parameters" else ""
    backward = reader(text, f"up_weight_all_gather{again}")
    for mutant in (
        edited(text, "linear", "%up_weight_all_gather", "%down_weight_all_gather"),
        edited(text, backward, f"%up_weight_all_gather{again}", f"%down_weight_all_gather{again}"),
        edited(text, f"up_weight_all_gather{again}", "(%up_weight)", "(%down_weight)"),
    ):
        try:
            program = parse_program(mutant)
            verify_static(program)
        except FxparError:
            continue
        assert not values(program).ok


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_no_copies_stand_for_what_is_sent_once_a_step(shard: str) -> None:
    """They would vouch for buffers of microbatches, in which they are not sent."""
    program = compiled(shard)
    program = program.with_(plan=program.plan.replace(cost=Cost(least_copy=1, copy_latency=1e-12)))
    trained = [p.fqn for p in program.parameters if p.trainable]
    whole = inlined(compile_step(program, program.outputs, (program.loss,), trained, copies=("dp",)))
    sent = {node.name: note(node).buffer for node in whole.graph.nodes if node.target in (all_gather, reduce_scatter)}
    once = [name for name in sent if phase_of(whole.node(name)) in (ONCE, PARAMETER)]
    assert not any(sent[name] for name in once)
    assert bool(once) == (shard != "parameters")
    assert any(sent.values()) == (shard == "parameters")


def test_whole_gradients_do_not_wait_for_all_others() -> None:
    """Each is sent right behind what makes it, but those of one phase behind all backwards."""
    for shard, is_at_once in (("optimizer", False), ("gradients", True)):
        program = parse_program(step(shard))
        scatters = [node for node in program.graph.nodes if node.target is reduce_scatter]
        assert all((node.prev is operands(node)[0]) == is_at_once for node in scatters)


class Odd(nn.Module):
    """A parameter without elements, which any number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 8))
        self.matrix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.matrix(x) + self.none.sum(), torch.zeros_like(x))


def test_a_parameter_without_elements_stays_whole() -> None:
    module, batch = Odd(), {"x": torch.randn(4, 8)}
    program = compile_program(capture(module, batch, Plan()).program.with_(plan=Plan(dp=2, shard="optimizer")))
    assert layouts(program)["none"] == "dp:I"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dp_shard": 0}, "dp_shard must be"),
        ({"dp_shard": True}, "dp_shard must be"),
        ({"dp_shard": 3}, "does not divide dp=8"),
        ({"dp_shard": 1}, "shares out nothing"),
        ({"dp_shard": 4, "ep": 2}, "give 2 or 8"),
        ({"shard": "none", "dp_shard": 4}, "is of a shard"),
        ({"dp": 1}, "is of data ranks"),
        ({"shard": "weights"}, "choose one of none, optimizer, gradients, parameters"),
        ({"cuda_graphs": CudaGraphs("transformer_engine")}, "gathers parameters"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_in_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said) as raised:
        Plan(**{"dp": 8, "shard": "optimizer", **options})
    assert ";" not in raised.value.reason.replace("; help", "")
