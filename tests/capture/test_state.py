"""State that a forward keeps by assignment is refused by name; what it makes anew, or sets to what it was, is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from fxpar.capture.capture import capture
from fxpar.capture.prepared_model import skeleton_of
from fxpar.errors import CaptureError, PlanError
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.values import check_capture
from tests.capture.models import Net, example, faithful, net, seeded
from tests.products import few, product


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


# Buffers that a forward writes: their new values are outputs, those of the author's module.


class Writes(Net):
    """Two layers and buffers, of which `function` writes some of what is between the layers."""

    def __init__(self, function: Callable[[Writes, Tensor], Any]) -> None:
        super().__init__()
        self.write = function
        self.norm, self.instance = nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True)
        for name in ("mean", "other"):
            self.register_buffer(name, torch.linspace(0, 1, 6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("counts", torch.zeros(6, dtype=torch.int32))

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        found = self.write(self, h)
        return self.down(h if found is None else found).square().sum()


def counter(net: Any, h: Tensor) -> Any:
    net.steps += 1
    return h * net.steps


def average(net: Any, h: Tensor) -> Any:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return h - net.mean


def lerped(net: Any, h: Tensor) -> Any:
    net.mean.lerp_(h.detach().mean((0, 1)), 0.1)


def assigned(net: Any, h: Tensor) -> Any:
    net.mean = 0.9 * net.mean + 0.1 * h.detach().mean((0, 1))
    return h - net.mean


def through_data(net: Any, h: Tensor) -> Any:
    old = h * net.mean.clone()
    net.mean.data.copy_(net.mean * 0.5 + h.detach().mean((0, 1)))
    return old + net.mean


def through_view(net: Any, h: Tensor) -> Any:
    net.mean[1:3].mul_(2)
    net.mean[0] = h.detach().sum()


def twice(net: Any, h: Tensor) -> Any:
    net.mean.add_(1)
    first = h * net.mean.clone()
    net.mean.add_(h.detach().amax((0, 1)))
    return first + net.mean


def swapped(net: Any, h: Tensor) -> Any:
    kept = net.mean.clone()
    net.mean.copy_(net.other)
    net.other.copy_(kept)
    return h + net.mean * 2 + net.other


def counted(net: Any, h: Tensor) -> Any:
    net.counts.scatter_add_(0, h.argmax(-1).flatten(), torch.ones_like(h[..., 0].flatten(), dtype=torch.int32))


def normed(net: Any, h: Tensor) -> Any:
    return net.norm(h.transpose(1, 2)).transpose(1, 2)


def normed_twice(net: Any, h: Tensor) -> Any:
    return net.norm(net.norm(h.flatten(0, 1)) * 2).view_as(h)


def normed_again(net: Any, h: Tensor) -> Any:
    """The author's checkpoint runs the norm once more in the backward, which is no further batch."""
    return checkpoint(net.norm, h.transpose(1, 2), use_reentrant=False).transpose(1, 2)


def instances(net: Any, h: Tensor) -> Any:
    return net.instance(h.transpose(1, 2)).transpose(1, 2)


WRITING = [
    (counter, {"steps"}),
    (average, {"mean"}),
    (lerped, {"mean"}),
    (assigned, {"mean"}),
    (through_data, {"mean"}),
    (through_view, {"mean"}),
    (twice, {"mean"}),
    (swapped, {"mean", "other"}),
    (counted, {"counts"}),
    (normed, {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}),
    (normed_twice, {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}),
    (normed_again, {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}),
    (instances, {"instance.running_mean", "instance.running_var"}),
]


@pytest.mark.parametrize(("function", "names"), few(WRITING, WRITING[::2]))
def test_new_values_are_outputs_and_those_of_the_module(function: Any, names: set[str]) -> None:
    model = seeded(Writes, function)
    before = {name: value.clone() for name, value in model.named_buffers()}
    captured = capture(model, example())
    outputs = {name for name in captured.program.outputs if name.startswith("fxpar.buffer.")}
    assert outputs == {f"fxpar.buffer.{name}" for name in names}
    assert captured.program.loss == "output"
    text = print_program(captured.program)
    assert print_program(parse_program(text)) == text
    check_capture(captured, model, example())
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_an_evaluation_writes_what_the_module_writes_in_it() -> None:
    model = seeded(Writes, lambda net, h: (counter(net, h), normed(net, h))[1]).eval()
    assert capture(model, example()).program.outputs == ("output", "fxpar.buffer.steps")


def kept_gradient(net: Any, h: Tensor) -> Any:
    net.mean.copy_(h.mean((0, 1)))


def grown(net: Any, h: Tensor) -> Any:
    net.mean = torch.cat([net.mean, net.mean])


def shared(net: Any, h: Tensor) -> Any:
    net.mean = net.other


UNWRITABLE = [
    (kept_gradient, r"^mean: the forward writes a value with a gradient", "write it under torch.no_grad()"),
    (grown, r"^mean: the forward changes this buffer", ""),
    (shared, r"^mean: the forward changes this buffer", ""),
]


@pytest.mark.parametrize(("function", "reason", "remedy"), UNWRITABLE)
def test_what_no_program_can_write_is_refused(function: Any, reason: str, remedy: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(seeded(Writes, function), example())
    assert remedy in caught.value.remedy


def test_norms_of_a_batch_that_ranks_share_are_refused_by_name() -> None:
    model = seeded(Writes, normed)
    with pytest.raises(PlanError, match=r"^norm, test_state.py:\d+: norms by statistics of the batch") as caught:
        capture(model, example(4, 5, 4), Plan(dp=2))
    assert "batch_norm='global'" in caught.value.remedy
    capture(model, example(4, 5, 4), Plan(dp=2, batch_norm="global"))
    capture(model.eval(), example(4, 5, 4), Plan(dp=2))
