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
from fxpar.program import Program, note
from fxpar.verify.analysis import collectives
from fxpar.verify.check import compile_program
from fxpar.verify.promote import promote, wide
from fxpar.verify.simulate import run_ranks, symbol_values
from fxpar.verify.values import call_inputs, program_state, rng_state
from tests.models.variants import Variant, trace
from tests.zoo import CASES

LAYERS = 2
# What words, head and loss cost besides the layers, and norms on heads or in a head that is split: whole weights that
# are used on shards, whose gradients are summed together.
WORDS_HEAD_LOSS = {("forward", "all_reduce"): 3, ("backward", "all_reduce"): 1}
OUTSIDE = {
    "gpt2": WORDS_HEAD_LOSS,
    # Its head has a matrix of its own, split by column, whose output a norm needs whole.
    "bert": WORDS_HEAD_LOSS
    | {("forward", "all_gather"): 1, ("backward", "reduce_scatter"): 1, ("parameter", "all_reduce"): 1},
    "llama": WORDS_HEAD_LOSS,
    "bloom": WORDS_HEAD_LOSS,
    "nanogpt": WORDS_HEAD_LOSS,
    "qwen3": WORDS_HEAD_LOSS | {("parameter", "all_reduce"): 1},
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


Counts = dict[tuple[str, str], int]


def by_layer(program: Program) -> dict[str, Counts]:
    """Collectives by phase and kind of each layer, by its number, and of what stands in none."""
    found: dict[str, Counts] = {}
    for c in collectives(program):
        numbers = [part for part in note(program.node(c.node)).fqn.split(".") if part.isdecimal()]
        counts = found.setdefault(numbers[0] if numbers else "outside", {})
        counts[c.phase, c.op] = counts.get((c.phase, c.op), 0) + 1
    return found


def reductions(forward: int, backward: int) -> Counts:
    """All-reduces of activations."""
    return {("forward", "all_reduce"): forward, ("backward", "all_reduce"): backward}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(name: str) -> None:
    layers = {str(layer): reductions(2, 2) for layer in range(LAYERS)}
    assert by_layer(compiled(name)[0]) == layers | {"outside": OUTSIDE[name]}


def test_without_an_input_gradient_the_first_layer_saves_one() -> None:
    """The encoder's input is data: nothing is upstream of its first q, k and v."""
    assert by_layer(compiled("encoder")[0]) == {"0": reductions(2, 1), "1": reductions(2, 2)}


def test_where_weights_are_smaller_than_activations_their_gradients_are_summed() -> None:
    """Before vit's first layer: a patch embedding, two position tables and a norm, against 17 tokens a sample."""
    split = CASES["vit"].split | {"vit.embeddings*": "replicate", "classifier": "replicate"}
    found = by_layer(compiled("vit", split=split)[0])
    assert found == {"0": reductions(2, 1), "1": reductions(2, 2), "outside": {("parameter", "all_reduce"): 1}}


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
