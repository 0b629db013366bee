"""Perplexity and accuracy under plans are those of a loop over tokens on one device."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import InputError
from tests.loop.evaluation_jobs import OVERLAP, WINDOW, evaluated, examples, model_of, perplexity_by_token, text
from tests.runtime.world import World

# Length of the text, overlap, windows of a call: a text shorter than a window, a last window of some tokens, one of a
# single token, no overlap, and one window alone.
CASES = [(7, OVERLAP, 8), (45, OVERLAP, 3), (WINDOW + 2, OVERLAP, 8), (40, 0, 1), (WINDOW + 1, WINDOW - 1, 2)]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """By name of the model what the loop over tokens gives."""
    return {name: _reference(name) for name in ("gpt2", "llama")}


def _reference(name: str) -> tuple[list[float], int]:
    model = model_of(name)
    perplexities = [perplexity_by_token(model, text(n), WINDOW, overlap, n // 2) for n, overlap, _ in CASES]
    return perplexities, len(examples(model))


def _check(answers: list[dict[str, Any]], expected: tuple[list[float], int]) -> None:
    perplexities, count = expected
    for answer in answers:
        assert answer["perplexities"] == pytest.approx(perplexities, rel=1e-6)
        assert answer["accuracy"] == (count - 2) / count
        assert answer["steps"][0] == answer["steps"][1]
        assert not answer["grads"]


@pytest.mark.parametrize(
    "plan",
    [fxpar.Plan(tp=2, sequence_parallel=True), fxpar.Plan(dp=2), fxpar.Plan(pp=2, microbatches=2)],
    ids=["tp", "dp", "pp"],
)
def test_two_ranks_evaluate_as_one_device(world2: World, reference: dict[str, Any], plan: fxpar.Plan) -> None:
    _check(world2.run(evaluated, "gpt2", plan, CASES), reference["gpt2"])


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "dp": 2},
        {"tp": 4},
        {"tp": 2, "pp": 2, "microbatches": 2},
        {"dp": 4, "shard": "parameters"},
        {"dp": 2, "pp": 2, "loss_reduction": "local_mean"},
        {"dp": 2, "tp": 2, "loss_reduction": "sum"},
    ],
    ids=str,
)
def test_four_ranks_evaluate_as_one_device(
    world4: World, reference: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    _check(world4.run(evaluated, name, fxpar.Plan(**options), CASES), reference[name])


def test_a_plain_module_is_evaluated_too_and_its_modes_come_back(reference: dict[str, Any]) -> None:
    model = model_of("gpt2")
    model.get_submodule("transformer.drop").eval()
    modes = [module.training for module in model.modules()]
    perplexities = [
        fxpar.perplexity(model, text(n).tolist(), window=WINDOW, overlap=overlap, batch_size=size, words=n // 2)
        for n, overlap, size in CASES
    ]
    assert perplexities == pytest.approx(reference["gpt2"][0], rel=1e-6)
    assert [module.training for module in model.modules()] == modes
    assert fxpar.cloze_accuracy(model.eval(), examples(model), batch_size=2) == 5 / 7


class Uniform(nn.Module):
    """Thinks of all words alike."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input_ids: Tensor, words: int = 8) -> Tensor:
        return torch.zeros(self.shape or (*input_ids.shape, words))


def test_a_perplexity_is_divided_by_the_words_of_the_text() -> None:
    ids = text(9) % 8
    options: dict[str, Any] = {"window": 4, "overlap": 1}
    assert fxpar.perplexity(Uniform(), ids, **options) == pytest.approx(8.0)
    assert fxpar.perplexity(Uniform(), ids, words=4, **options) == pytest.approx(64.0)
    wider = fxpar.perplexity(Uniform(), ids, batch_of=lambda ids: {"input_ids": ids, "words": 16}, **options)
    assert wider == pytest.approx(16.0)
    assert math.isinf(fxpar.perplexity(Uniform(), text(5000) % 8, words=1, **options))


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [3]}, "tokens"),
        ({"tokens": [[1, 2]]}, "tokens"),
        ({"tokens": [0.5, 1.5]}, "tokens"),
        ({"window": 0}, "window"),
        ({"window": 4.0}, "window"),
        ({"overlap": -1}, "overlap"),
        ({"overlap": 4}, "overlap"),
        ({"batch_size": 0}, "batch_size"),
        ({"words": 0}, "words"),
        ({"model": len}, "model"),
        ({"model": Uniform((2, 4))}, "model"),
        ({"model": Uniform((4, 2, 8))}, "model"),
    ],
)
def test_arguments_out_of_range_are_refused(changed: dict[str, Any], where: str) -> None:
    options: dict[str, Any] = {"model": Uniform(), "tokens": [1, 2, 3, 4, 5], "window": 4}
    with pytest.raises(InputError) as error:
        fxpar.perplexity(**options | changed)
    assert error.value.where == where
    assert error.value.remedy


@pytest.mark.parametrize("examples", [[], [([], [1])], [([1], [])]])
def test_examples_without_a_context_or_a_word_are_refused(examples: Any) -> None:
    with pytest.raises(InputError, match="example"):
        fxpar.cloze_accuracy(Uniform(), examples)


def test_the_page_shows_what_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2].joinpath("docs/evaluation.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("held_out.txt").write_text("abc ab abcde")

    class Letters:
        def encode(self, words: str) -> list[int]:
            return [ord(letter) % 8 for letter in words]

    names: dict[str, Any] = {"fxpar": fxpar, "Path": Path, "model": Uniform(), "tokenizer": Letters()}
    names["passages"] = [("likeliest is the first:", "@@"), ("and not another:", "A")]  # of equal words the first
    values = []
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block.replace('" " + ', ""), names)
        values.append(names["value"])
    assert values == pytest.approx([8.0 ** (11 / 3), 0.5])
