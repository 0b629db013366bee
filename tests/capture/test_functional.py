"""The quick way to functional form gives what torch's own gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import capture
from fxpar.ir.program import Program, note
from fxpar.passes import canonicalize
from fxpar.plan.plan import Plan
from fxpar.verification import expect, verify
from tests.zoo import CASES

QUICK = importlib.import_module("fxpar.capture.functional")


def lines(program: Program) -> list[str]:
    """The canonical program with numbers for names, which count other things in a retrace."""
    program = canonicalize(program.copy())
    for index, node in enumerate(program.graph.nodes):
        if node.op == "call_function":
            node.name = f"n{index}"
    return [
        f"{node.target if node.op == 'call_function' else node.op} {node.args} {node.kwargs} "
        f"{note(node) if node.op != 'output' else ''}"
        for node in program.graph.nodes
    ]


@pytest.fixture
def retraced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled, while a graph is made functional, with whether each node is known."""
    taken: list[bool] = []
    known = QUICK._is_known

    def watched(node: torch.fx.Node) -> bool:
        taken.append(known(node))
        return taken[-1]

    monkeypatch.setattr(QUICK, "_is_known", watched)
    return taken


@pytest.mark.parametrize(("name", "train"), [pytest.param("gpt2", False, marks=pytest.mark.matrix), ("llama", True)])
def test_the_graph_is_that_of_a_retrace(
    name: str, train: bool, retraced: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    model = case.model().train(train)
    quick = capture(model, case.example(), loss=case.loss)
    assert all(retraced)
    monkeypatch.setattr(QUICK, "_is_known", lambda node: False)
    slow = capture(model, case.example(), loss=case.loss)
    assert lines(quick.program) == lines(slow.program)
    assert quick.spec.conditions == slow.spec.conditions


class Viewed(nn.Module):
    """Views of what a linear layer gives, by sizes of which some are those of the batch."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.view = nn.Linear(5, 12), view

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, d, 5]."""
        return self.view(self.up(x)).square().sum()


@pytest.mark.parametrize(
    ("view", "known"),
    [
        (lambda h: h.flatten(), True),
        (lambda h: h.flatten(0, -2), True),
        (lambda h: torch.flatten(h, start_dim=1, end_dim=1), True),
        (lambda h: h.transpose(1, -1).flatten(1, 2), True),
        (lambda h: h.sum().flatten(), True),
        (lambda h: h.unflatten(-1, (3, 4)).flatten(2, 3), True),
        (lambda h: h.unflatten(-1, (3, -1)), False),
        (lambda h: functional.pad(h.transpose(1, -1), (0, 3)).flatten(2), False),
        (lambda h: h.chunk(5, -1)[-1], True),
        (lambda h: h.chunk(2, dim=-1)[0] * h.chunk(2, -1)[1], True),
    ],
)
def test_views_are_those_of_a_retrace(
    view: Callable[[Tensor], Tensor], known: bool, retraced: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = Viewed(view), (torch.randn(3, 4, 6, 5),)
    quick = capture(model, example)
    assert all(retraced) is known
    monkeypatch.setattr(QUICK, "_is_known", lambda node: False)
    slow = capture(model, example)
    assert lines(quick.program) == lines(slow.program)
    assert quick.spec.conditions == slow.spec.conditions


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """[b, 8]."""
        h = x * 2
        h += 1
        return h.sum()


class Chunks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """[b, 8]."""
        a, b = x.chunk(2, -1)
        return functional.relu(a * b).sum()


@pytest.mark.parametrize("kind", [InPlace, Chunks])
def test_what_is_not_known_is_retraced(kind: type[nn.Module], retraced: list[bool]) -> None:
    program = capture(kind(), (torch.randn(3, 8),)).program
    assert not all(retraced)
    assert not any("_.Tensor" in str(node.target) or "chunk" in str(node.target) for node in program.graph.nodes)


class Images(nn.Module):
    """Batch norms of pixels and of features, in evaluation mode as a part of what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.features = nn.BatchNorm2d(8), nn.BatchNorm1d(24, affine=False)
        self.patches, self.up, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 24), nn.Linear(24, 5)
        for norm in (self.pixels, self.features):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        self.train()

    def train(self, mode: bool = True) -> Images:
        """The norms stay as they are."""
        super().train(mode)
        self.pixels.eval()
        self.features.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """[b, 3, h, w]."""
        y = self.pixels(self.patches(x)).relu().mean((2, 3))
        result: Tensor = self.head(self.features(self.up(y)).relu())
        return result.square().mean()


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_norms_by_given_statistics_are_split(tp: int) -> None:
    torch.manual_seed(0)
    proof = expect(verify(Images(), {"x": torch.randn(3, 3, 7, 9)}, Plan(tp=tp)))
    assert proof.split_flops > 0.9
