"""State that a forward keeps by assignment is refused by name; what it makes anew, or sets to what it was, is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError
from fxpar.runtime.meta_model import skeleton_of
from tests.capture.models import Net, example, faithful, net, seeded
from tests.products import product


class Average(Net):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        return self.down(h - self.mean).sum()


class Grows(Average):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        self.mean = torch.cat([self.mean, h.detach().mean((0, 1))])
        return self.down(h - self.mean[-6:]).sum()


class PlainAverage(Average):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.mean = torch.zeros(6, dtype=torch.float64)


class Counts(Net):
    steps = 0

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        return self.down(self.up(x)).sum() / self.steps


class CountsInDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log = {"steps": 0}

    def forward(self, x: Tensor) -> Any:
        self.log["steps"] += 1
        return self.down(self.up(x)).sum() / self.log["steps"]


class Warms(Net):
    def __init__(self) -> None:
        super().__init__()
        self.warm, self.seen = False, 1

    def forward(self, x: Tensor) -> Any:
        self.warm = True
        return self.down(self.up(x)).sum()


class Sizes(Net):
    length = 5

    def forward(self, x: Tensor) -> Any:
        self.length = x.shape[1]
        return self.down(self.up(x)).sum()


class ReplacesWeight(Net):
    def forward(self, x: Tensor) -> Any:
        self.up.weight = nn.Parameter(self.up.weight.detach() * 2)
        return self.down(self.up(x)).sum()


CASES = [
    (Grows, "mean: the forward changes this buffer"),
    (PlainAverage, "mean: the forward changes this attribute"),
    (Counts, "steps: the forward changes this attribute"),
    (CountsInDict, r"log\['steps'\]: the forward changes this entry"),
    (Warms, "warm: the forward changes this attribute"),
    (Sizes, "length: the forward changes this attribute"),
    (ReplacesWeight, r"up\.weight: the forward changes this parameter"),
]


@product(kind__reason=CASES, memory=[True, False])
def test_what_a_forward_reassigns_is_refused_by_name(kind: type[Net], reason: str, memory: bool) -> None:
    model = seeded(kind)
    model = model if memory else skeleton_of(model, None)
    before = {**vars(model), **model._buffers, **model._parameters}
    with pytest.raises(CaptureError, match=rf"^{reason}.* depends on the one before") as caught:
        capture(model, example())
    assert caught.value.remedy
    after = {**vars(model), **model._buffers, **model._parameters}
    assert before.keys() == after.keys()
    assert all(after[name] is value for name, value in before.items())


class Inner(nn.Module):
    """A part that only Dynamo can trace, so that the export says nothing of what follows."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise ValueError("Dynamo only")
        return self.part(x)


# Dynamo of torch 2.11 cannot trace an average.
OLD = TorchVersion(torch.__version__) < "2.12"


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(Average, "mean", marks=pytest.mark.skipif(OLD, reason="needs torch 2.12")), (Counts, "steps")],
)
def test_dynamo_is_watched_too(kind: type[Net], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"^part\.{name}: the forward changes this"):
        capture(Inner(seeded(kind)), example())


def test_names_are_the_authors_under_a_loss() -> None:
    with pytest.raises(CaptureError, match=r"^0\.steps: the forward changes this attribute"):
        capture(nn.Sequential(seeded(Counts)), {"input": example()}, loss=lambda outputs, batch: outputs)


class Caches(Net):
    mask: Tensor | None = None
    length = 5

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.ones(4, dtype=x.dtype).cumsum(0)
        if "odd" not in self.tables:
            self.tables["odd"] = self.mask * 2 + 1
        self.length = 5
        self.latest = x
        return self.down(self.up(self.latest * self.mask + self.tables["odd"])).sum()


def test_caches_and_equal_values_are_no_obstacle() -> None:
    model = seeded(Caches)
    faithful(model, example())
    faithful(model, example())  # the caches are filled, and `latest` is there, but only written


def test_inference_mode_gives_no_gradient() -> None:
    @torch.inference_mode()
    def largest(value: Tensor) -> Tensor:
        return value.abs().amax()

    def forward(m: Net, x: Tensor) -> Any:
        h = m.up(x)
        with torch.inference_mode():
            scale = h.square().mean()
            with torch.inference_mode(False):
                pass
        assert torch.is_grad_enabled()
        return m.down(h / largest(h).clone()).sum() * scale.clone()

    faithful(net(forward), example())


class InferenceUnderDynamo(Net):
    def forward(self, x: Tensor) -> Any:
        with torch.inference_mode():
            scale = self.up(x).amax()
        return self.down(self.up(x)).sum() * scale.clone()


def test_inference_mode_that_dynamo_would_lose_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"inference_mode.*; use torch\.no_grad\(\)"):
        capture(Inner(seeded(InferenceUnderDynamo)), example())
