"""Initial weights of meta models: the authors' distributions, one module at a time, from names and a seed alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.checkpoint.initial import initialised
from fxpar.errors import InputError
from fxpar.runtime.shard_spec import named_tensors
from tests.checkpoint.live import LiveBytes
from tests.zoo import CASES


def meta(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("name", [n for n in CASES if n != "nanogpt"])  # its constructor initialises two tables
def test_the_distribution_is_the_author_s(name: str) -> None:
    torch.manual_seed(4)
    wanted = CASES[name].build()
    found = fxpar.materialize(meta(CASES[name].build), 1)
    assert {n: b.tolist() for n, b in found.named_buffers()} == {n: b.tolist() for n, b in wanted.named_buffers()}
    for (fqn, mine), theirs in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad
        if not theirs.any() or bool((theirs == 1).all()):
            assert torch.equal(mine, theirs), fqn
            continue
        # Six standard errors of the difference of two sample deviations, and of the means.
        error = 6 * float(theirs.detach().std()) / math.sqrt(theirs.numel())
        assert abs(float(mine.detach().std() - theirs.detach().std())) < error, fqn
        assert abs(float(mine.detach().mean() - theirs.detach().mean())) < 1.5 * error, fqn


def test_residual_projections_of_gpt2_are_scaled() -> None:
    found = fxpar.materialize(meta(CASES["gpt2"].build))
    for name in ("attn.c_proj", "mlp.c_proj"):
        weight = found.get_parameter(f"transformer.h.1.{name}.weight").detach()
        assert abs(float(weight.std()) / (0.02 / math.sqrt(2 * 2)) - 1) < 0.05
    assert abs(float(found.get_parameter("transformer.h.1.attn.c_attn.weight").detach().std()) / 0.02 - 1) < 0.05


def test_only_the_seed_and_the_names_count() -> None:
    build = CASES["bert"].build
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    first = fxpar.materialize(meta(build), 3).state_dict()
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])
    torch.manual_seed(99)
    again = fxpar.materialize(meta(build), 3).state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)
    # A part of them alone, the last first.
    model, name = meta(build), "cls.predictions.transform.dense.weight"
    (only,) = initialised(model, 3, torch.device("cpu"), {name})
    assert only.keys() == {name}
    assert torch.equal(only[name], first[name])
    assert all(entry.tensor.is_meta for entry in named_tensors(model))
    other = fxpar.materialize(model, 4).state_dict()
    assert not torch.equal(other[name], first[name])
    layers = [first[f"bert.encoder.layer.{i}.output.dense.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)


def test_tied_weights_stay_one() -> None:
    found = fxpar.materialize(meta(CASES["gpt2"].build))
    assert found.lm_head.weight is found.transformer.wte.weight  # type: ignore[union-attr]
    assert not found.transformer.wte.weight.is_meta  # type: ignore[union-attr]


def test_one_module_has_memory_at_a_time() -> None:
    model = meta(CASES["gpt2"].build)
    sizes: dict[str, int] = {}
    for entry in named_tensors(model):
        owner = entry.first.rpartition(".")[0]
        sizes[owner] = sizes.get(owner, 0) + entry.tensor.numel() * entry.tensor.element_size()
    with LiveBytes() as live:
        for values in initialised(model, 0, torch.device("cpu")):
            values.clear()
    # Besides the module, a byte an element for the check that all are written, and the generator's state.
    assert max(sizes.values()) <= live.peak <= 1.25 * max(sizes.values()) + 3 * torch.get_rng_state().nbytes


class Half(nn.Module):
    """A parameter and a buffer of its own; what fills them is a subclass's matter."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.own  # type: ignore[no-any-return]


class Filled(Half):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.own)
        self.get_buffer("table").copy_(torch.arange(4))


class Authored(Filled):
    """A method as many write it: for linear layers alone, on the data."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(0.5)


class Replacing(Filled):
    """Assigns a new parameter."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.own = nn.Parameter(torch.full((3,), 2.0))


class Drawing(Filled):
    """Uses the generators of Python and numpy."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.own.fill_(random.random() + np.random.rand())


def test_what_init_weights_leaves_alone_comes_from_reset_parameters() -> None:
    found = fxpar.materialize(meta(Authored))
    assert torch.equal(found.inner.weight, torch.full((3, 3), 0.5))  # type: ignore[union-attr, arg-type]
    assert float(found.inner.bias.detach().abs().max()) <= 1 / math.sqrt(3)  # type: ignore[union-attr, operator]
    assert torch.equal(found.own, torch.ones(3))  # type: ignore[arg-type]
    assert found.table.tolist() == [0, 1, 2, 3]  # type: ignore[operator]


def test_initialisers_may_assign_and_draw_as_they_like() -> None:
    assert torch.equal(fxpar.materialize(meta(Replacing)).own, torch.full((3,), 2.0))  # type: ignore[arg-type]
    first, second = (fxpar.materialize(meta(Drawing), seed) for seed in (0, 0))
    assert torch.equal(first.own, second.own)  # type: ignore[arg-type]
    assert not torch.equal(first.own, fxpar.materialize(meta(Drawing), 1).own)  # type: ignore[arg-type]


class Bytes(nn.Module):
    """A buffer of single bytes, of which one is the pattern of what is unfilled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(256, dtype=torch.uint8))

    def reset_parameters(self) -> None:
        self.table = torch.arange(256, dtype=torch.uint8)


def test_single_bytes_may_have_any_value() -> None:
    assert fxpar.materialize(meta(Bytes)).table.tolist() == list(range(256))  # type: ignore[operator]


def test_tensors_that_have_values_keep_them() -> None:
    model = meta(Filled)
    model.own = nn.Parameter(torch.full((3,), 7.0))
    model.table = torch.arange(4) * 2
    fxpar.materialize(model)
    assert model.own.tolist() == [7.0, 7.0, 7.0]
    assert model.table.tolist() == [0, 2, 4, 6]
    assert not model.inner.weight.is_meta


class Attribute(Filled):
    def __init__(self) -> None:
        super().__init__()
        self.stray = torch.ones(2)


class Reading(Filled):
    def reset_parameters(self) -> None:
        self.own.fill_(self.inner.weight.mean().item())


class Partly(Filled):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.own = nn.Parameter(self.own.index_fill(0, torch.tensor([0]), float("nan")))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool).tril(), persistent=False)


@pytest.mark.parametrize(
    ("kind", "where", "reason", "remedy"),
    [
        (Half, "own", "is a parameter of a Half, which has no initialiser", "Half.reset_parameters()"),
        (Buffered, "mask", "is a buffer of a Buffered, which has no initialiser", "Buffered.reset_parameters()"),
        (Partly, "own", "is a parameter of a Partly", "give it values before"),
        (Attribute, "stray", "neither parameter nor buffer", "register it as a buffer"),
        (Reading, "Reading", "its initialiser cannot run where", "load a checkpoint"),
    ],
)
def test_what_cannot_be_initialised_is_named(kind: type[nn.Module], where: str, reason: str, remedy: str) -> None:
    model = meta(kind)
    with pytest.raises(InputError) as caught:
        fxpar.materialize(model)
    assert caught.value.where == where
    assert reason in caught.value.reason
    assert remedy in caught.value.remedy
    assert all(entry.tensor.is_meta for entry in named_tensors(model))
