"""What a training step communicates: Megatron's count for each layer, and what is listed is what is executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpar.ops import collectives as ops
from fxpar.passes.assign_rng import RNG_PATH
from fxpar.plan import Plan
from fxpar.program import Program
from fxpar.verify.analysis import collectives
from fxpar.verify.check import compile_program
from fxpar.verify.promote import promote, wide
from fxpar.verify.simulate import run_ranks, symbol_values
from fxpar.verify.values import call_inputs, program_state, rng_state
from tests.models.variants import Variant, trace
from tests.zoo import CASES

LAYERS = 2
# Number of (forward, backward) all-reduces of activations in a layer, and of parameters in the whole model.
PER_LAYER = {
    "gpt2": (2, 2, 0),
    "bert": (2, 2, 0),
    "llama": (2, 2, 0),
    "bloom": (2, 2, 0),
    "nanogpt": (2, 2, 0),
    "qwen3": (2, 2, 2 * LAYERS),
}


def compiled(name: str, tp: int = 2, split: Mapping[str, str] | None = None) -> tuple[Program, dict[str, Tensor], Any]:
    """The localised program with weights and inputs, whole and in float64."""
    case = CASES[name]
    model, captured = trace(name, Variant())
    plan = Plan(tp=tp, split=case.split if split is None else split)
    program = captured.program.with_(plan=plan)
    inputs = call_inputs(captured, model, case.example())
    state = {key: wide(value) for key, value in program_state(program, model).items()}
    given = {key: wide(value) for key, value in inputs.items()} | {RNG_PATH: rng_state()}
    return compile_program(type(captured)(program, captured.spec, captured.how, captured.loss)), state, given


@pytest.mark.parametrize("name", PER_LAYER)
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(name: str) -> None:
    """The norms on the heads of qwen3 are whole weights used on shards: their gradients are summed, listed apart."""
    forward, backward, parameters = PER_LAYER[name]
    listed = collectives(compiled(name)[0])
    assert {c.op for c in listed} == {"all_reduce"}
    assert Counter(c.phase for c in listed) == Counter(
        {"forward": forward * LAYERS, "backward": backward * LAYERS, "parameter": parameters}
    )


def test_without_an_input_gradient_the_first_layer_saves_one() -> None:
    """The encoder's input is data: nothing is upstream of its first q, k and v."""
    assert Counter(c.phase for c in collectives(compiled("encoder")[0])) == {"forward": 4, "backward": 3}


def test_where_weights_are_smaller_than_activations_their_gradients_are_summed() -> None:
    """Before vit's first layer: a patch embedding, two position tables and a norm, against 17 tokens a sample."""
    assert Counter(c.phase for c in collectives(compiled("vit")[0])) == {"forward": 4, "backward": 3, "parameter": 6}


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
        ("qwen3", 2, None),
        ("bloom", 2, None),
        ("encoder", 4, None),
        ("llama", 4, None),
        # Lines that do not fit together: gathers, scatters and reductions of parameters.
        ("llama", 2, {"*_proj": "column"}),
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
    run_ranks(promote(program), state, inputs, symbol_values(program, inputs))
    assert counting.calls == listed
    assert len(listed) > 0
