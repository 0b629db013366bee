"""Data parallel ranks, beside tensor and sequence parallel ones: what one device computes on all their rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture.capture import Captured, capture
from fxpar.cli.models import load_model
from fxpar.compile import compile_program
from fxpar.cost.communication import collectives
from fxpar.ir.program import Program, output_layouts
from fxpar.plan.plan import Plan
from fxpar.verify.values import call_inputs, program_state, reference_run, verify_values

ROWS = 12  # that 2, 3 and 4 ranks can share out
MODELS = ("gpt2", "llama", "bert", "t5", "gpt_neox", "bloom", "encoder")
SHAPES = ((2, 2), (1, 2), (1, 4), (2, 3))
FEW = {("gpt2", 2, 2, True)}


class Encoder(nn.Module):
    """torch's encoder over tokens, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 37)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean over the words that count."""
        logits = self.head(self.layers(self.words(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rows(value: Any) -> Any:
    """As many rows as all ranks share out, in another order each time; the first ones count few words."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    generator = torch.Generator().manual_seed(3)
    order = [torch.randperm(len(value), generator=generator) for _ in range(ROWS)]
    return value[torch.cat(order)[:ROWS]].clone()


@cache
def loaded(name: str) -> tuple[nn.Module, Any, Captured]:
    """A tiny model in training mode, a batch of all ranks, and its capture."""
    if name == "encoder":
        torch.manual_seed(0)
        model: nn.Module = Encoder()
        batch: Any = {key: torch.randint(0, 37, (ROWS, 10)) for key in ("input_ids", "labels")}
        loss = None
    else:
        found = load_model(f"hf:{name}", None, None, 0, True)
        model, loss = found.model, found.loss
        batch = {key: rows(value) for key, value in found.batch.items()}
    if "labels" in batch:
        batch["labels"][:2, 1:] = -100
        batch["labels"][5, :4] = -100
    return model, batch, capture(model, batch, Plan(), loss)


@cache
def reference(name: str) -> Any:
    """What one device computes, with the weights and the inputs."""
    model, batch, captured = loaded(name)
    state, inputs = program_state(captured.program, model), call_inputs(captured, model, batch)
    return state, inputs, reference_run(captured.program, state, inputs)


def compiled(name: str, plan: Plan) -> Program:
    return compile_program(loaded(name)[2].program.with_(plan=plan))


@pytest.mark.parametrize(
    ("name", "tp", "dp", "sequence"),
    [
        pytest.param(name, tp, dp, sequence, marks=[] if (name, tp, dp, sequence) in FEW else [pytest.mark.matrix])
        for name in MODELS
        for tp, dp in SHAPES
        for sequence in ((False, True) if tp > 1 else (False,))
    ],
)
def test_loss_outputs_and_gradients_are_those_of_one_device(name: str, tp: int, dp: int, sequence: bool) -> None:
    if name == "encoder" and tp == 3:
        pytest.skip("its heads are four")
    program = compiled(name, Plan(tp=tp, dp=dp, sequence_parallel=sequence))
    state, inputs, wanted = reference(name)
    report = verify_values(loaded(name)[2].program, program, state, inputs, reference=wanted)
    assert report.ok, report
    assert report.gradients == len(wanted.gradients)


def test_parameters_are_whole_on_the_data_axis_and_reduced_once() -> None:
    program = compiled("llama", Plan(tp=2, dp=2))
    for parameter in program.parameters:
        (layout,) = output_layouts(program.node(parameter.node))
        assert not layout.on("dp").is_shard
    over_dp = [c for c in collectives(program) if c.axis == "dp"]
    assert [(c.op, c.phase) for c in over_dp if c.phase == "parameter"] == [("all_reduce", "parameter")]
    # The loss and its count, a number each; nothing of the activations travels.
    assert sum(c.bytes for c in over_dp if c.phase != "parameter") <= 16


def test_few_kv_heads_are_summed_over_their_ranks_and_then_with_all_others() -> None:
    """Two ranks hold each key and value: one bucket over them, which one over data ranks follows; one for the rest."""
    found = collectives(compiled("llama,num_key_value_heads=2", Plan(tp=4, dp=2)))
    assert sorted(c.axis for c in found if c.phase == "parameter") == ["dp", "dp", "tp"]


def test_what_changes_on_both_axes_is_reduced_over_both_at_once() -> None:
    """A norm's weight is used on some rows and some tokens: one bucket of the joined group."""
    found = collectives(compiled("llama", Plan(tp=2, dp=2, sequence_parallel=True)))
    assert [c.axis for c in found if c.phase == "parameter"].count("dp-tp") == 1
    assert [c.axis for c in found if c.phase == "parameter"].count("dp") == 1


def test_a_plan_of_one_data_rank_costs_nothing() -> None:
    from fxpar.text.printing import print_program

    text = print_program(compiled("gpt2", Plan(tp=2)))
    assert "dp" not in text.replace("_dp", "")
