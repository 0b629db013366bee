"""What changes gradients without changing values: no_grad, detach, in-place operators, hooks, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture import graph_mutation as regions_module
from fxpar.capture.capture import capture
from fxpar.errors import CaptureError
from tests.capture.models import Net, calls, close, eager, example, faithful, net, run, written


def forward_no_grad(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    with torch.no_grad():
        scale = h.abs().amax(-1, keepdim=True)
        both = h * scale
    return m.down(h / scale + both).sum()


def forward_set_grad(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    torch.set_grad_enabled(False)
    g = h * 2
    torch.set_grad_enabled(True)
    return m.down(h * g).sum()


@torch.no_grad()
def largest(h: Tensor) -> Tensor:
    return h.abs().amax(-1, keepdim=True)


def forward_enable_inside(m: Net, x: Tensor) -> Any:
    with torch.no_grad():
        h = m.up(x)
        with torch.enable_grad():
            k = m.down(h)
    return (k * k).sum()


def forward_passed_through(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    with torch.no_grad():
        same, view = h, h.view(-1, 6)
    return m.down(same * h).sum() + (view * h.view(-1, 6)).sum()


def forward_detach_in_place(m: Net, x: Tensor) -> Any:
    h, g = m.up(x) * 1, m.up(x) * 2
    same = h.detach_()
    torch.detach_(g)
    return m.down(h * same * g * m.up.bias).sum()


def forward_data(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    return m.down(h * h.data).sum()


UNDIFFERENTIATED: dict[str, Callable[[Net, Tensor], Any]] = {
    "no_grad": forward_no_grad,
    "set_grad_enabled": forward_set_grad,
    "decorator": lambda m, x: (lambda h: m.down(h / largest(h)).sum())(m.up(x)),
    "enable_grad inside": forward_enable_inside,
    "value passed through": forward_passed_through,
    "detach": lambda m, x: (lambda h: m.down(h * h.detach()).sum())(m.up(x)),
    "detach in place": forward_detach_in_place,
    "data": forward_data,
}


# Operators that return their operand where there is nothing to do.
THE_SAME: dict[str, Callable[[Tensor], Any]] = {
    "to": lambda h: h.to(h.dtype),
    "device": lambda h: h.to("cpu"),
    "float": lambda h: h.float(),
    "type_as": lambda h: h.type_as(h),
    "contiguous": lambda h: h.contiguous(),
    "positive": torch.positive,
    "dropout": lambda h: nn.functional.dropout(h, 0.5, training=False),
    "identity": nn.Identity(),
    "resolve": lambda h: h.resolve_conj().resolve_neg(),
    "at least": torch.atleast_2d,
    "of several": lambda h: torch.atleast_2d(h, h * 2)[0],
    "flatten": lambda h: h.flatten(-1),
    "real": torch.real,
}


@pytest.mark.parametrize("name", THE_SAME)
def test_what_no_grad_looks_at_keeps_its_gradient(name: str) -> None:
    def forward(m: Net, x: Tensor) -> Any:
        h = m.up(x)
        with torch.no_grad():
            seen = THE_SAME[name](h)
            weight = THE_SAME[name](m.down.weight)
            scale = seen.abs().amax() + weight.abs().amax()
        return m.down(h * scale * h).sum() + (seen * h).sin().sum() + (weight * m.down.weight).sum()

    faithful(net(forward), example())


@pytest.mark.parametrize("name", UNDIFFERENTIATED)
def test_no_gradient_flows_where_the_author_stops_it(name: str) -> None:
    faithful(net(UNDIFFERENTIATED[name]), example())


def test_without_the_detach_the_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "_detached", lambda graph, value: value)
    model = net(forward_no_grad)
    captured = capture(model, example())
    with pytest.raises(AssertionError):
        close(eager(captured, model, example()), run(captured, model, example()))


def forward_in_place(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    h += 1
    h.mul_(2)
    h[:, 0] = 0
    h[:, 1:3] = h[:, :1].detach() + m.down.weight.sum()
    h[..., 2:4].fill_(3.0)
    h.masked_fill_(x[..., :1] > 0, 0.5)
    return m.down(h).sum()


def forward_copy(m: Net, x: Tensor) -> Any:
    h = torch.zeros(x.shape[0], x.shape[1], 6, dtype=x.dtype)
    h.copy_(m.up(x))
    h[:, 1:] = m.up(x)[:, :1]
    h[0] = m.down.bias.sum()
    kept = torch.zeros(6, dtype=torch.float32)
    kept[2:] = m.up.bias[2:]
    return m.down(h * kept).sum()


def forward_indices(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    h.index_add_(0, torch.tensor([0, 1]), h[:2].detach().clone())
    h.scatter_(2, torch.zeros(3, 5, 1, dtype=torch.long), 0.25)
    h[x[..., 0] > 0] = 0.0
    return m.down(h.clamp_(-2, 2)).sum()


@pytest.mark.parametrize("forward", [forward_in_place, forward_copy, forward_indices])
def test_changes_in_place_are_functional(forward: Callable[[Net, Tensor], Any]) -> None:
    captured = faithful(net(forward), example())
    assert not [name for name in calls(captured) if name.endswith("_") or name == "copy"]


def test_a_mask_may_change_where_autograd_does_not_see_it() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        mask = torch.zeros(x.shape[1], 1, dtype=x.dtype)
        with torch.no_grad():
            mask[2:] = 1
        return m.down(m.up(x) * mask).sum()

    faithful(net(forward), example())


def forward_detached_table(m: Net, x: Tensor) -> Any:
    table = torch.ones(x.shape[1], 6, dtype=x.dtype).cumsum(0).detach()
    table += m.up.bias
    table[:1].mul_(m.up.bias.exp())
    return m.down(m.up(x) * table).sum()


def forward_made_without_gradient(m: Net, x: Tensor) -> Any:
    with torch.no_grad():
        table = torch.ones(x.shape[1], 6, dtype=x.dtype).cumsum(0)
        parts = [torch.zeros_like(table), table * 2]
    parts[0].copy_(m.up.bias.expand(x.shape[1], 6))
    parts[1][0] = m.up.bias
    return m.down(m.up(x) * parts[0] * parts[1]).sum()


def forward_read_before(m: Net, x: Tensor) -> Any:
    table = torch.ones(6, dtype=x.dtype).cumsum(0)
    before = m.down(m.up(x) + table).sum()
    kept = table.detach()
    kept *= m.up.bias
    return before + m.down(m.up(x) * kept).sum()


@pytest.mark.parametrize("forward", [forward_detached_table, forward_made_without_gradient, forward_read_before])
def test_what_is_written_into_a_detached_value_has_its_gradient(forward: Callable[[Net, Tensor], Any]) -> None:
    faithful(net(forward), example())


def read_beside(m: Net, x: Tensor) -> Any:
    table = torch.ones(6, dtype=x.dtype)
    kept = table.detach()
    kept *= m.up.bias
    return m.down(m.up(x) * kept * table.sin()).sum()


def read_between(m: Net, x: Tensor) -> Any:
    first = torch.ones(6, dtype=x.dtype).detach()
    second = first.detach()
    second *= m.up.bias
    return m.down(m.up(x) * second * first.sin()).sum()


def change_under_no_grad(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    with torch.no_grad():
        h.mul_(2)
    return m.down(h * h).sum()


def change_of_detached(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    h.detach().mul_(2)
    return m.down(h.sin()).sum()


def change_of_data(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    h.data[:, 0].fill_(2.0)
    return m.down(h.sin()).sum()


HIDDEN = [change_under_no_grad, change_of_detached, change_of_data, read_beside, read_between]


@pytest.mark.parametrize("forward", HIDDEN)
def test_changes_that_autograd_does_not_see_are_refused(forward: Callable[[Net, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"test_gradients.py:\d+: changes a value in place"):
        capture(written(forward), example())


@pytest.mark.parametrize("forward", HIDDEN)
def test_unrefused_they_would_be_wrong(forward: Callable[[Net, Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "_has_gradient", lambda value, parameters: False)
    model = net(forward)
    captured = capture(model, example())
    with pytest.raises(AssertionError):
        close(eager(captured, model, example()), run(captured, model, example()))


def assigned_data(m: Net, x: Tensor) -> Any:
    h = m.up(x) * 1
    h.data = h.data * 2
    return m.down(h * h).sum()


def hooked(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    h.register_hook(lambda g: g * 2)
    return m.down(h).sum()


def inner_gradient(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    (g,) = torch.autograd.grad(h.sum(), m.up.weight, create_graph=True)
    return m.down(h).sum() + g.sum()


def autocast(m: Net, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.up(x)
    return m.down(h.to(x.dtype)).sum()


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (assigned_data, r"assigns `\.data`.*; compute a new value"),
        (hooked, "a hook on a tensor's gradient is lost"),
        (inner_gradient, "a gradient inside the forward is lost"),
        (autocast, "autocast chooses types"),
    ],
)
def test_what_a_trace_would_drop_is_refused_at_its_line(forward: Callable[[Net, Tensor], Any], reason: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_gradients.py:\d+: {reason}") as caught:
        capture(written(forward), example())
    assert caught.value.remedy


def test_torch_export_alone_drops_a_hook() -> None:
    """The trap itself."""
    model, x = net(hooked), example()
    exported = torch.export.export(model, (x,), strict=False).module()
    (wanted,) = torch.autograd.grad(model(x), [model.up.weight])
    (found,) = torch.autograd.grad(exported(x), [exported.get_parameter("up.weight")])
    torch.testing.assert_close(wanted, found * 2)


def test_autocast_that_is_switched_off_is_no_obstacle() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            h = m.up(x)
        return m.down(h).sum()

    faithful(net(forward), example())


def plain(m: Net, x: Tensor) -> Any:
    return m.down(m.up(x)).sum()


def test_hooks_on_parameters_and_modules_are_refused_by_name() -> None:
    hooked = net(plain)
    hooked.up.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match=r"up\.weight: has hooks on its gradient"):
        capture(hooked, example())
    accumulated = net(plain)
    accumulated.down.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match=r"down\.bias: has hooks on its gradient"):
        capture(accumulated, example())
    backward = net(plain)
    backward.up.register_full_backward_hook(lambda m, i, o: None)
    with pytest.raises(CaptureError, match="up: has backward hooks"):
        capture(backward, example())


def test_hooks_on_the_forward_are_part_of_the_model() -> None:
    model = net(plain)
    model.up.register_forward_hook(lambda m, i, o: o * 2)
    faithful(model, example())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_and_other_forms_of_a_model_are_refused() -> None:
    inside = nn.Sequential(nn.DataParallel(nn.Linear(4, 4)))
    models: tuple[tuple[Any, str], ...] = (
        (inside, "0: DataParallel communicates by itself"),
        (torch.compile(net(plain)), "is compiled already"),
        (torch.jit.trace(nn.Linear(4, 4).double(), example()), "is TorchScript"),
    )
    for model, reason in models:
        with pytest.raises(CaptureError, match=reason) as caught:
            capture(model, example())
        assert caught.value.remedy
