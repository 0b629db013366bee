"""The operators that the oracle's list of occurring ones names are those of the zoo's programs."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fxpar.capture.capture import capture
from fxpar.ir.program import Program, operands, output_types
from fxpar.manager import PassManager
from fxpar.ops.collectives import COERCION_OF, sum_gradients
from fxpar.ops.random import axis_index
from fxpar.passes import DEFAULT_PASSES
from fxpar.rules import key_of, rules
from fxpar.testing.sampled_operations import COMMUNICATING, OCCURRING, WITHOUT_OPERANDS
from tests.models.variants import Variant, trace
from tests.zoo import CASES

# No rule speaks of them: they choose an output, convert, or name the rank.
_OWN = {operator.getitem, axis_index, sum_gradients, *COERCION_OF}


def shallow(model: nn.Module) -> Any:
    """The model with its first layer alone, which has all operators of the others."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == 2:
                setattr(module, name, child[:1])
    return model


def captured() -> Iterator[tuple[str, Program]]:
    """Each model, and what options bring in: written-out attention with the user's mask and positions, odd sizes."""
    for name, case in CASES.items():
        yield name, capture(shallow(case.model()), case.example(), case.plan(2), case.loss).program
    model, batch = shallow(CASES["gpt2"].model()), CASES["gpt2"].example()
    model.set_attn_implementation("eager")
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :3] = 0
    batch |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    yield "gpt2", capture(model, batch, CASES["gpt2"].plan(2)).program
    # Three heads a rank, which bloom's ALiBi treats in another way.
    yield "bloom", trace("bloom", Variant(odd=True))[1].program


def programs() -> Iterator[Program]:
    """The captured programs, and what each pass makes of them."""
    for name, current in captured():
        current = current.with_(plan=CASES[name].plan(2))
        yield current
        for item in DEFAULT_PASSES:
            current = PassManager([item]).run(current)
            yield current


@pytest.mark.matrix
def test_the_occurring_operators_are_those_of_the_zoo() -> None:
    found: dict[str, bool] = {}
    for program in programs():
        for node in program.graph.nodes:
            if node.op == "call_function" and output_types(node) and node.target not in _OWN:
                name = key_of(node.target)
                found[name] = found.get(name, False) or bool(operands(node))
    assert {name for name, has_operands in found.items() if has_operands} - COMMUNICATING.keys() == set(OCCURRING)
    assert found.keys() >= {"fxpar.embedding", "fxpar.cross_entropy"}
    assert {name for name, has_operands in found.items() if not has_operands} == set(WITHOUT_OPERANDS)
    assert rules().keys() >= set(OCCURRING)
