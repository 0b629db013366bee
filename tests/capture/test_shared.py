"""What a model shares: memory between parameters, settings between functions, hooks between all modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError, CheckFailed
from fxpar.plan.plan import Plan
from fxpar.verification import expect, verify
from tests.capture.models import example, net


class Words(nn.Module):
    """A table and a head of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(31, 12), nn.Linear(12, 31)

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s]."""
        logits = self.head(self.words(ids).tanh())
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ids() -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 31, (3, 5), generator=torch.Generator().manual_seed(0))}


def by_data(model: Words) -> None:
    model.head.weight.data = model.words.weight.data


def by_view(model: Words) -> None:
    model.head.weight = nn.Parameter(model.words.weight.detach().view(31, 12))


def by_buffer(model: Words) -> None:
    model.register_buffer("copy", model.words.weight.detach())


def by_part(model: Words) -> None:
    model.head.bias = nn.Parameter(model.words.weight.detach().flatten()[7:38])


def behind_another(model: Words) -> None:
    """The head's bias lies in a frozen table, behind another frozen part of it."""
    flat = torch.randn(31 * 12)
    model.words.weight = nn.Parameter(flat.view(31, 12), requires_grad=False)
    model.register_buffer("part", flat[2:7])
    model.head.bias = nn.Parameter(flat[9:40])


@pytest.mark.parametrize("tie", [by_data, by_view, by_buffer, by_part, behind_another])
def test_parameters_that_lie_in_one_memory_are_refused(tie: Any) -> None:
    model = Words()
    tie(model)
    with pytest.raises(CaptureError, match=r"shares memory with .* and is another tensor"):
        capture(model, ids())


def test_parameters_side_by_side_and_tied_ones_are_accepted() -> None:
    model, flat = Words(), torch.randn(31 * 12 + 31)
    model.head.weight = model.words.weight
    model.head.bias = nn.Parameter(flat[31 * 12 :])
    model.register_buffer("rows", flat[: 31 * 12])
    capture(model, ids())


class Scaled(torch.autograd.Function):
    """Looks at a setting of its class."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Scaled.scale * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return Scaled.scale * gradients[0]


class Moody(torch.autograd.Function):
    """Element-wise, or not: as its class says."""

    rows = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if Moody.rows else 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient - gradient.mean(-1, keepdim=True) if Moody.rows else 2 * gradient


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    Scaled.scale, Moody.rows = 1.0, False


def test_a_setting_that_the_forward_makes_for_a_function_is_missed_by_the_graph() -> None:
    def middle(m: Any, x: Tensor) -> Tensor:
        Scaled.scale = 0.3
        return m.down(Scaled.apply(m.up(x))).square().sum()  # type: ignore[no-any-return, no-untyped-call]

    with pytest.raises(CheckFailed, match="the captured graph deviates from the module"):
        verify(net(middle), example(), Plan(tp=2))
    assert Scaled.scale == 1.0


class Moods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        """[b, 12]."""
        result: Tensor = self.down(Moody.apply(self.up(x)))  # type: ignore[no-untyped-call]
        return result.square().mean()


def test_what_a_function_was_proved_to_be_is_not_remembered() -> None:
    for rows in (False, True):
        Moody.rows = rows
        expect(verify(Moods(), {"x": torch.randn(3, 12)}, Plan(tp=2)))


def test_hooks_of_all_modules_are_refused_by_name() -> None:
    seen = list[Any]()

    def note(module: nn.Module, given: Any, result: Any) -> None:
        seen.append(result)

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        with pytest.raises(CaptureError, match=r"the hook .*note is called for every module of the process"):
            capture(Words(), ids())
    finally:
        handle.remove()
    assert seen == []


def test_weights_that_torch_s_own_hook_makes_are_in_the_trace() -> None:
    model = Words()
    torch.nn.utils.weight_norm(model.head)
    proof = expect(verify(model, ids(), Plan(tp=2)))
    assert {"head.weight_g", "head.weight_v"} <= {p.fqn for p in proof.program.parameters}


def test_gradients_that_parameters_hold_are_none_of_the_trace() -> None:
    model = Words()
    model(**ids()).backward()
    kept = {name: p.grad for name, p in model.named_parameters()}
    assert verify(model, ids(), Plan(tp=2)).ok
    assert all(p.grad is kept[name] for name, p in model.named_parameters())


def test_a_loss_without_a_gradient_is_no_loss_to_train_on() -> None:
    with pytest.raises(CaptureError, match="has no gradient: no trainable parameter reaches it"):
        capture(Words(), ids(), loss=lambda outputs, batch: outputs.detach())
    capture(Words().eval(), ids(), loss=lambda outputs, batch: outputs.detach())


class Measured(Words):
    """Logits, and how sure they are: a number to look at."""

    def forward(self, ids: Tensor) -> Any:
        """[b, s]."""
        logits = self.head(self.words(ids).tanh())
        return {"logits": logits, "sure": logits.detach().softmax(-1).amax(-1).mean()}


def test_a_number_to_look_at_is_no_loss() -> None:
    assert capture(Measured(), ids()).program.loss == ""
    assert verify(Measured(), ids(), Plan(tp=2)).ok
    with pytest.raises(CaptureError, match="loss sure: has no gradient"):
        capture(Measured(), ids(), loss="sure")


def test_sparse_gradients_are_refused() -> None:
    model = Words()
    model.words = nn.Embedding(31, 12, sparse=True)
    with pytest.raises(CaptureError, match="words: makes sparse gradients"):
        capture(model, ids())
