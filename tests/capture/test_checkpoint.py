"""Checkpointed regions are recorded on their nodes, and do not change values or gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from fxpar.capture.capture import Captured, capture
from fxpar.capture.trace import Offered, trace
from fxpar.ir.program import Program, note
from fxpar.manager import PassManager
from fxpar.passes.canonicalize import canonicalize
from tests.capture.models import Net, close, eager, example, faithful, net, operator_name, run, seeded
from tests.zoo import CASES


def regions(program: Program) -> dict[str, int]:
    """Region number by operator, for operators that occur once."""
    return {operator_name(n): note(n).recompute for n in program.graph.nodes if n.op == "call_function"}


def checked(function: Callable[[Net, Tensor], Any], model: nn.Module | None = None) -> Captured:
    return faithful(model if model is not None else net(function), example())


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_nodes_of_a_region_carry_its_number(reentrant: bool) -> None:
    def forward(m: Net, x: Tensor) -> Any:
        h = checkpoint(lambda v: v.tanh().sin(), m.up(x), use_reentrant=reentrant)
        return m.down(h.cos()).sum()

    captured = checked(forward)
    wanted = {"tanh": 1, "sin": 1, "cos": 0, "sum": 0}
    canonical = PassManager([canonicalize]).run(captured.program)
    for program in (captured.program, canonical):
        found = regions(program)
        assert {name: found[name] for name in wanted} == wanted


def test_regions_are_numbered_apart_and_in_order() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        h = checkpoint(lambda v: m.up(v).tanh(), x, use_reentrant=False)
        return checkpoint(lambda v: m.down(v).sin(), h, use_reentrant=False).sum()

    found = regions(checked(forward).program)
    assert (found["tanh"], found["sin"], found["sum"]) == (1, 2, 0)


def test_torch_export_alone_loses_the_gradient_of_a_region_in_a_region() -> None:
    """The trap itself: the outer region ends with gradients switched off."""

    def forward(m: Net, x: Tensor) -> Any:
        inner = lambda v: checkpoint(lambda u: m.up(u).tanh(), v, use_reentrant=False).sin()  # noqa: E731
        return m.down(checkpoint(inner, x, use_reentrant=False)).sum()

    exported = torch.export.export(net(forward), (example(),), strict=False).module()
    assert not exported(example()).requires_grad
    found = regions(checked(forward).program)
    assert (found["tanh"], found["sin"]) == (2, 1)


def test_keyword_arguments_dropout_and_changes_in_place() -> None:
    def body(m: Net, v: Tensor, scale: float) -> Tensor:
        h = m.up(v).mul_(scale)
        return nn.functional.dropout(h, 0.5).add_(1)

    def forward(m: Net, x: Tensor) -> Any:
        return m.down(checkpoint(body, m, x, scale=2.0, use_reentrant=False)).sum()

    found = regions(checked(forward).program)
    assert found["mul"] == found["native_dropout"] == 1


def test_no_grad_inside_a_region() -> None:
    def body(m: Net, v: Tensor) -> Tensor:
        h = m.up(v)
        with torch.no_grad():
            scale = h.abs().amax()
        return h / scale  # type: ignore[no-any-return]

    faithful(net(lambda m, x: m.down(checkpoint(body, m, x, use_reentrant=False)).sum()), example())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_region_without_an_argument_that_needs_a_gradient_gives_none() -> None:
    """As in eager, which warns about it: `up` is used inside and gets no gradient."""
    model = net(lambda m, x: m.down(checkpoint(m.up, x, use_reentrant=True).tanh()).sum())
    captured = faithful(model, example())
    assert "up.weight" not in run(captured, model, example()).gradients


def test_checkpoint_function_and_sequential() -> None:
    function: Any = CheckpointFunction
    faithful(net(lambda m, x: m.down(function.apply(torch.tanh, True, m.up(x))).sum()), example())
    model = net(
        lambda m, x: checkpoint_sequential(nn.Sequential(m.up, nn.Tanh(), m.down), 2, x, use_reentrant=False).sum()
    )
    assert regions(faithful(model, example()).program)["linear"] == 0  # the last of the sequence is no region


def test_a_selective_region_is_a_region() -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def forward(m: Net, x: Tensor) -> Any:
        return m.down(checkpoint(lambda v: m.up(v).tanh(), x, use_reentrant=False, context_fn=contexts)).sum()

    assert regions(checked(forward).program)["tanh"] == 1


@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.matrix), False])
def test_each_layer_of_a_hugging_face_model_is_a_region(reentrant: bool) -> None:
    case = CASES["gpt2"]
    model = case.model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    captured = capture(model, case.example())
    plain = capture(case.model(), case.example())
    nodes = [n for n in captured.program.graph.nodes if n.op == "call_function"]
    numbers = {note(n).fqn.split(".h.")[-1][:1]: note(n).recompute for n in nodes}
    assert (numbers["0"], numbers["1"]) == (1, 2)
    assert len(captured.program.graph.nodes) == len(plain.program.graph.nodes)
    wanted, found = eager(captured, model, case.example()), run(captured, model, case.example())
    torch.testing.assert_close(dict(found.gradients), dict(wanted.gradients), rtol=1e-4, atol=1e-6)


def test_the_numbers_survive_functional_form() -> None:
    """Without `preserve_node_meta` around the trace every number is lost."""
    traced = trace(
        net(lambda m, x: m.down(checkpoint(m.up, x, use_reentrant=False).relu_()).sum()), example(), None, Offered()
    )
    marks = [n.meta.get("custom", {}).get("fxpar_recompute") for n in traced.exported.graph.nodes]
    assert marks.count(1) == 1
    assert traced.recorder.regions == 1


def test_a_model_in_evaluation_mode_is_as_eager() -> None:
    model = seeded(Net).eval()
    model.function = lambda m, x: m.down(checkpoint(m.up, x, use_reentrant=False)).sum()
    captured = capture(model, example())
    close(eager(captured, model, example()), run(captured, model, example()))
