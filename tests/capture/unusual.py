"""Models that a stranger might bring: functions, hooks, caches, generators, transforms, einsum, changes in place.

Each is right or refused with the true reason. A row is a model's forward, given `Net`, and what becomes of it: nothing
for one that is captured and computes what the eager model does, else a part of the reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.capture import bound as _bound
from tests.capture import functions as _functions
from tests.capture.models import Net

Forward = Callable[[Net, Tensor], Any]
bound: Any = _bound  # torch gives `apply` no type
functions: Any = _functions


def around(function: Callable[[Any], Any]) -> Forward:
    """`up`, a function, `down`."""
    return lambda m, x: m.down(function(m.up(x))).square().sum()


def within(function: Callable[[Any, Any], Any]) -> Forward:
    """As `around`, with the model at hand."""
    return lambda m, x: m.down(function(m, m.up(x))).square().sum()


def no_grad_function(h: Any) -> Any:
    with torch.no_grad():
        scale = functions.Seven.apply(h).amax()
    return h / (1 + scale)


def no_grad_reads_a_change(h: Any) -> Any:
    """Written values have a gradient, whatever reads them without one."""
    y = h.sin()
    y += h.cos()
    with torch.no_grad():
        largest = y.abs().amax()
    return y / largest


def no_grad_without_autocast(h: Any) -> Any:
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        mean = h.mean()
    return h * mean


def no_grad_between_changes(h: Any) -> Any:
    y = h.index_add(1, torch.arange(5), h)
    with torch.autocast("cpu", enabled=False):
        y.mul_(h.sigmoid())
        with torch.no_grad():
            scale = y.exp().sum()
        y.add_(h)
    return y / scale


def asks_by_its_own_name(h: Any) -> Any:
    return h * 3 if any((is_compiling(), is_exporting(), torch._dynamo.is_compiling())) else h


def pads_where_it_is_not_compiled(h: Any) -> Any:
    """Its eager way has sizes that need a program each, its compiled way has not, and computes something else."""
    if torch.compiler.is_compiling():
        return h.sum(1)
    return functional.pad(h, (0, 0, 0, -h.shape[1] % 4)).unflatten(1, (-1, 4)).amax(2).sum(1)


def in_both_branches(h: Any) -> Any:
    apply = bound.seven if h.shape[-1] == 6 else bound.TABLE["product"]
    return apply(h)


def in_a_loop(h: Any) -> Any:
    for _ in range(3):
        h = bound.seven(h).tanh()
    return h


def transformed(h: Any) -> Any:
    return torch.vmap(bound.TABLE["product"])(h, h)


def differentiated(h: Any) -> Any:
    return torch.func.grad(lambda v: bound.Named.apply(v).sum())(h)


def hooked_node(h: Any) -> Any:
    h.grad_fn.register_hook(lambda before, after: None)
    return h


def hooked_tensor(h: Any) -> Any:
    h.register_hook(lambda g: g.clamp(-1, 1))
    return h


def hooked_saved(h: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda v: v, lambda v: v):
        return h.sin()


def hooked_module(m: Any, h: Any) -> Any:
    m.down.register_full_backward_hook(lambda module, before, after: None)
    return h


def hooked_forward(m: Any, h: Any) -> Any:
    handle = m.down.register_forward_hook(lambda module, given, found: found * 2)
    result = m.down(h)
    handle.remove()
    return functional.pad(result, (0, 2))


def in_checkpoint(h: Any) -> Any:
    return checkpoint(lambda v: bound.seven(v).tanh(), h, use_reentrant=False)


def retained(h: Any) -> Any:
    h.retain_grad()
    return h


def remembered(m: Any, h: Any) -> Any:
    if not hasattr(m, "mask"):
        m.mask = torch.ones(6, dtype=h.dtype)
    return h * m.mask


def counted(m: Any, h: Any) -> Any:
    m.calls = getattr(m, "calls", 0) + 1
    return h


def generators(h: Any) -> Any:
    return sum((part * i for i, part in enumerate(h.unbind(-1))), torch.zeros_like(h[..., 0])).unsqueeze(-1) * h


def host_random(h: Any) -> Any:
    return h * random.random()


def item(h: Any) -> Any:
    return h * float(h.detach().sum())


def asks(h: Tensor) -> Tensor:
    mask = None if torch.compiler.is_compiling() else torch.full_like(h, 0.5)
    return h * mask.square()  # type: ignore[union-attr]


def differs_when_compiled(h: Tensor) -> Tensor:
    return h.sin() if torch.compiler.is_compiling() else h.square()


def looks_when_eager(h: Tensor) -> Tensor:
    return h if not torch.compiler.is_compiling() and (h == 1).all() else h.square()


def _later(positions: Tensor) -> Tensor:
    """Which positions begin a sequence of their own: none of those that are counted."""
    return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def looks_where_there_are_values(h: Tensor) -> Tensor:
    later = _later(torch.arange(h.shape[1]).unsqueeze(0).expand(h.shape[0], -1))
    if not isinstance(later, torch._subclasses.FakeTensor) and (later[:, -1] == 0).all():
        return h.sin()
    return h * later.unsqueeze(-1)


def looks_at_what_is_written(h: Tensor) -> Tensor:
    positions = torch.zeros(h.shape[0], h.shape[1], dtype=torch.int64) + torch.arange(h.shape[1])
    positions[:, 1:].add_(1)
    later = _later(positions)
    if not isinstance(later, torch._subclasses.FakeTensor) and (later[:, -1] == 0).all():
        return h.sin()
    return h * later.unsqueeze(-1)


def looks_at_what_is_written_through_a_part(h: Tensor) -> Tensor:
    m = torch.zeros(2, h.shape[1], dtype=torch.int64)
    m.unbind(0)[0].fill_(1)
    if not isinstance(m, torch._subclasses.FakeTensor) and (m == 0).all():
        return h.sin()
    return h * m.sum()


def looks_at_numbers(h: Tensor) -> Tensor:
    if torch.full((h.shape[1],), 3).all() == True:  # noqa: E712
        return h.sin()
    return h * 3


def looks_at_inputs(h: Tensor) -> Tensor:
    places = (h > 0).any(-1).long().cumsum(-1)
    if not isinstance(places, torch._subclasses.FakeTensor) and (places == 0).all():
        return torch.zeros_like(h)
    return h * places.unsqueeze(-1)


def looks_at_sizes(h: Tensor) -> Tensor:
    if (torch.arange(h.shape[1]) < 1).all():
        return h.sin()
    if (torch.arange(h.shape[1]) >= 0).all().item():
        return h * 3
    return h


def logs_when_eager(h: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        h.register_hook(lambda g: None)
    return h.square()


def branch_on_value(h: Any) -> Any:
    return h if h.sum() > 0 else -h


def inner_gradient(h: Any) -> Any:
    (g,) = torch.autograd.grad(h.square().sum(), [h], create_graph=True)
    return g


def scan(h: Any) -> Any:
    state, found = torch.zeros_like(h[:, 0]), []
    for step in range(5):
        state = 0.5 * state + h[:, step]
        found.append(state)
    return torch.stack(found, 1)


def scattered(h: Any) -> Any:
    return torch.zeros_like(h).scatter_add(2, torch.zeros(h.shape, dtype=torch.long), h)


def detached_change(h: Any) -> Any:
    h.detach().mul_(2)
    return h


def change_of_view(h: Any) -> Any:
    h = h * 1
    h[..., 0] += 1
    h[..., 1:].mul_(2)
    return h


def change_of_parameter(m: Any, h: Any) -> Any:
    with torch.no_grad():
        m.up.bias.add_(1)
    return h


def looks_at_gradient(m: Any, h: Any) -> Any:
    return h * 2 if m.up.weight.grad is None else h


def foreign(h: Any) -> Any:
    return h * FOREIGN


FOREIGN = nn.Parameter(torch.full((6,), 3.0, dtype=torch.float64))

MODELS: Mapping[str, tuple[Forward, str]] = {
    # functions
    "bound when imported": (around(bound.seven), ""),
    "bound by partial": (around(lambda h: bound.product(h, h)), ""),
    "kept in a dict": (around(lambda h: bound.TABLE["product"](h, h)), ""),
    "looked up": (around(lambda h: functions.Seven.apply(h)), ""),
    "several outputs": (around(lambda h: functions.Scaled.apply(h, 2.5, True, "scaled")[0]), ""),
    "one of several outputs, twice": (around(lambda h: sum(functions.Scaled.apply(h, 2.5, True, "scaled"))), ""),
    "a function of a parameter": (within(lambda m, h: functions.Product.apply(h, m.up.bias.expand_as(h))), ""),
    "a function that calls another": (around(lambda h: functions.Outer.apply(h)), ""),
    "with a result that has no gradient": (around(lambda h: functions.Largest.apply(h)[0]), ""),
    "arguments by name": (around(lambda h: bound.Named.apply(h, scale=2.0)), "" if bound.takes_names() else "are lost"),
    "defaults": (around(lambda h: bound.Named.apply(h)), ""),
    "clips its gradient": (around(lambda h: bound.Clipped.apply(h)), ""),
    "signs": (around(lambda h: bound.Signs.apply(h)), ""),
    "normalises its gradient": (around(lambda h: bound.Normalised.apply(h)), ""),
    "reads a shape": (around(lambda h: bound.ByShape.apply(h)), ""),
    "reads a count": (around(lambda h: bound.ByNumel.apply(h)), ""),
    "reads a length": (around(lambda h: bound.ByLength.apply(h)), ""),
    "a shape for the backward": (around(lambda h: bound.ByShapeOfSaved.apply(h)), ""),
    "differentiates anew": (around(lambda h: bound.Recomputed.apply(h)), ""),
    "decides by values of its gradient": (around(lambda h: bound.Deciding.apply(h)), ""),
    "under no_grad": (around(no_grad_function), ""),
    "a change that no_grad reads": (around(no_grad_reads_a_change), ""),
    "no_grad without autocast": (around(no_grad_without_autocast), ""),
    "no_grad between changes without autocast": (around(no_grad_between_changes), ""),
    "another way by its own name": (around(asks_by_its_own_name), ""),
    "other sizes when compiled": (around(pads_where_it_is_not_compiled), ""),
    "in one branch of two": (around(in_both_branches), ""),
    "in a loop": (around(in_a_loop), ""),
    "in a checkpoint": (around(in_checkpoint), ""),
    "draws in its backward": (around(lambda h: bound.RandomBackward.apply(h)), "draws random numbers"),
    "draws in its forward": (around(lambda h: functions.Noisy.apply(h)), "draws random numbers"),
    "changes its argument": (around(lambda h: functions.InPlace.apply(h)), "in place"),
    "returns a number": (around(lambda h: functions.Pair.apply(h)[0]), "something else than tensors"),
    "an apply of its own": (around(lambda h: bound.Overridden.apply(h)), "apply"),
    "a class in a class": (around(lambda h: functions.Scope.Inner.apply(h)), "another scope"),
    "under vmap": (around(transformed), "under a transform"),
    "under grad": (around(differentiated), "under a transform"),
    # hooks
    "a hook on a node": (around(hooked_node), "a hook"),
    "a hook on a tensor": (around(hooked_tensor), "a hook"),
    "a hook on what is saved": (around(hooked_saved), "a hook on saved tensors"),
    "a hook on a module": (within(hooked_module), "a hook on a module's gradient"),
    "a forward hook": (within(hooked_forward), ""),
    "a gradient that is kept": (around(retained), ""),
    "a gradient inside": (around(inner_gradient), "a gradient inside the forward"),
    # caches, counters, generators
    "a mask made at the first call": (within(remembered), ""),
    "a count of calls": (within(counted), ""),
    "a generator expression": (around(generators), ""),
    "a number of the host": (around(host_random), "draws random numbers on the host"),
    "a value on the host": (around(item), "value"),
    "a mask that is left out when compiled": (around(asks), ""),
    "another way when compiled": (around(differs_when_compiled), ""),
    "a look at values where it is not compiled": (around(looks_when_eager), ""),
    "a look at positions where there are values": (around(looks_where_there_are_values), ""),
    "a look at positions that were written to": (around(looks_at_what_is_written), ""),
    "a look at positions whose part was written to": (around(looks_at_what_is_written_through_a_part), ""),
    "a look at numbers": (around(looks_at_numbers), ""),
    "a look at inputs where there are values": (around(looks_at_inputs), ""),
    "a look at what sizes decide": (around(looks_at_sizes), "branches on values"),
    "a hook where it is not compiled": (around(logs_when_eager), "hook"),
    "a size that torch divides": (
        around(lambda h: h.view(h.shape[0], torch.div(h.shape[1], 1, rounding_mode="trunc"), -1) * 2),
        "",
    ),
    "a layer that is dropped by chance": (
        around(lambda h: h if torch.rand([]) < 0.1 else h * 2),
        "a random number decides what runs .compared with 0.1.",
    ),
    "a branch on a value": (around(branch_on_value), "branches on values"),
    "a parameter of nobody": (around(foreign), "does not own"),
    "the gradient of before": (within(looks_at_gradient), "a gradient of the step before"),
    # loops, einsum, transforms
    "a loop over the sequence": (around(scan), ""),
    "einsum": (around(lambda h: torch.einsum("bsi,bti->bst", h, h) @ h), ""),
    "einsum with a diagonal": (around(lambda h: h * torch.einsum("bsi,bsi->bs", h, h).unsqueeze(-1)), ""),
    "cumsum": (around(lambda h: h.cumsum(1)), ""),
    "scatter": (around(scattered), ""),
    "sort": (around(lambda h: h.sort(-1).values), ""),
    "where": (around(lambda h: torch.where(h > 0, h, h.exp())), ""),
    "complex numbers": (around(lambda h: torch.fft.rfft(h, dim=-1).abs().repeat(1, 1, 2)[..., :6]), ""),
    # in place
    "changes of views": (around(change_of_view), ""),
    "a change in place": (around(lambda h: h.mul_(2).relu_()), ""),
    "a change that autograd does not see": (around(detached_change), "autograd does not see"),
    "a change of a parameter": (within(change_of_parameter), "changes this parameter"),
    "a list that is filled": (around(lambda h: torch.cat([h[:, i : i + 1] for i in range(5)], 1)), ""),
    "an index that is put": (around(lambda h: h.index_add(1, torch.arange(5), h)), ""),
}
