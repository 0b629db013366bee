"""What a training step communicates: Megatron's count for each layer, and what is listed is what is executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.compile import compile_program
from fxpar.cost.communication import collectives
from fxpar.ir.program import Program
from fxpar.ir.step import RNG_PATH
from fxpar.ops import process_group as ops
from fxpar.plan.plan import Plan
from fxpar.verify.reference_program import promote, wide
from fxpar.verify.simulate_ranks import run_ranks, step_of, symbol_values
from fxpar.verify.values import call_inputs, program_state, rng_state
from tests.layers import by_layer
from tests.models.variants import Variant, trace
from tests.zoo import CASES

LAYERS = 2
# Reductions of parameters in the whole model: of qwen3's norms on heads, in one bucket.
MODELS = {"gpt2": 0, "bert": 0, "llama": 0, "bloom": 0, "nanogpt": 0, "qwen3": 1}


def compiled(name: str, tp: int = 2, split: Mapping[str, str] | None = None) -> tuple[Program, dict[str, Tensor], Any]:
    """The localised program with weights and inputs, whole and in float64."""
    case = CASES[name]
    model, captured = trace(name, Variant())
    plan = Plan(tp=tp, split=case.split if split is None else split)
    program = captured.program.with_(plan=plan)
    inputs = call_inputs(captured, model, case.example())
    state = {key: wide(value) for key, value in program_state(program, model).items()}
    given = {key: wide(value) for key, value in inputs.items()} | {RNG_PATH: rng_state()}
    return compile_program(program), state, given


@pytest.mark.parametrize(
    "name", [name if name in ("gpt2", "bert") else pytest.param(name, marks=pytest.mark.matrix) for name in MODELS]
)
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(name: str) -> None:
    """Outside of the layers: the lookup's sum, the two of the loss, and the gradient of the head's operand.

    The head of bert has a matrix and a norm in front of the words: it is cut, and gathered for the norm.
    """
    program = compiled(name)[0]
    listed = collectives(program)
    counts = by_layer(program)
    outside = counts.pop("")
    assert list(counts.values()) == [{("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}] * LAYERS
    head = {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1} if name == "bert" else {}
    assert outside == {("all_reduce", "forward"): 3, ("all_reduce", "backward"): 1} | head
    assert sum(c.phase == "parameter" for c in listed) == MODELS[name] + (name == "bert")


def test_without_an_input_gradient_the_first_layer_saves_one() -> None:
    """The encoder's input is data: nothing is upstream of its first q, k and v."""
    assert Counter(c.phase for c in collectives(compiled("encoder")[0])) == {"forward": 4, "backward": 3}


def test_where_weights_are_smaller_than_activations_their_gradients_are_summed() -> None:
    """Before vit's first layer: patches are gathered, two position tables and a norm work on summands of gradients."""
    program = compiled("vit")[0]
    counts = by_layer(program)
    patches = {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1}
    classes = {("all_gather", "backward"): 1, ("all_reduce", "forward"): 1}
    assert counts.pop("") == patches | classes
    assert sum(c.phase == "parameter" for c in collectives(program)) == 1


class Counting:
    """Stands for torch's functional collectives and remembers each call with the elements of the whole value."""

    names: Mapping[str, str] = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        real: Callable[..., Tensor] = getattr(torch.ops._c10d_functional, name)
        if name not in self.names:
            return real

        def call(x: Tensor, *args: Any) -> Tensor:
            result = real(x, *args)
            whole = result if name == "all_gather_into_tensor" else x
            self.calls[self.names[name], whole.numel()] += 1
            return result

        return call


@pytest.mark.parametrize(
    ("name", "tp", "split"),
    [
        ("gpt2", 2, None),
        pytest.param("qwen3", 2, None, marks=pytest.mark.matrix),
        pytest.param("bloom", 2, None, marks=pytest.mark.matrix),
        pytest.param("encoder", 4, None, marks=pytest.mark.matrix),
        ("llama", 4, None),
        # Lines that do not fit together: gathers, scatters and reductions of parameters.
        pytest.param("llama", 2, {"*_proj": "column"}, marks=pytest.mark.matrix),
        ("llama", 2, {"*_proj": "row"}),
        ("gpt2", 4, {"*.c_fc": "column", "*.attn.c_proj": "column"}),
    ],
)
def test_what_is_listed_is_what_the_ranks_execute(
    name: str, tp: int, split: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, state, inputs = compiled(name, tp, split)
    listed = Counter((c.op, c.bytes // 4) for c in collectives(program))
    counting = Counting()
    monkeypatch.setattr(ops, "_c10d", counting)
    run_ranks(promote(step_of(program)), state, inputs, symbol_values(program, inputs))
    assert counting.calls == listed
    assert len(listed) > 0
