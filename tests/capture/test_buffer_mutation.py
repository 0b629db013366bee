"""Buffers that a forward writes: their new values are outputs, those of the author's module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar.capture.capture import capture
from fxpar.errors import CaptureError, PlanError
from fxpar.plan.plan import Plan
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verify.values import check_capture
from tests.capture.models import Net, example, seeded


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


CASES = [
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


@pytest.mark.parametrize(("function", "names"), CASES)
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


REFUSED = [
    (kept_gradient, r"^mean: the forward writes a value with a gradient", "write it under torch.no_grad()"),
    (grown, r"^mean: the forward changes this buffer", ""),
    (shared, r"^mean: the forward changes this buffer", ""),
]


@pytest.mark.parametrize(("function", "reason", "remedy"), REFUSED)
def test_what_no_program_can_write_is_refused(function: Any, reason: str, remedy: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(seeded(Writes, function), example())
    assert remedy in caught.value.remedy


def test_norms_of_a_batch_that_ranks_share_are_refused_by_name() -> None:
    model = seeded(Writes, normed)
    with pytest.raises(
        PlanError, match=r"^norm, test_buffer_mutation.py:\d+: norms by statistics of the batch"
    ) as caught:
        capture(model, example(4, 5, 4), Plan(dp=2))
    assert "batch_norm='global'" in caught.value.remedy
    capture(model, example(4, 5, 4), Plan(dp=2, batch_norm="global"))
    capture(model.eval(), example(4, 5, 4), Plan(dp=2))
