"""What a trace loses is found in the eager model's autograd graph, and in its values, before a capture is accepted."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxpar
from fxpar.capture import eager
from fxpar.capture.capture import capture
from fxpar.capture.eager import compare, walk
from fxpar.errors import CaptureError, CheckFailed
from fxpar.ops.small_operators import function
from fxpar.verify import faithful as values
from fxpar.verify.values import check_capture
from tests.capture import bound as _bound
from tests.capture import functions as _functions
from tests.capture import unusual
from tests.capture.models import Net, example, faithful, net, seeded

HERE = "test_eager.py:"
bound: Any = _bound  # torch gives `apply` no type
functions: Any = _functions
own: Any = functions.Seven.apply


def by_default(m: Net, x: Tensor, apply: Any = functions.Seven.apply) -> Any:
    return m.down(apply(m.up(x))).sum()


def by_closure() -> Callable[..., Any]:
    inner = functions.Seven.apply
    return lambda m, x: m.down(inner(m.up(x))).sum()


BOUND: dict[str, Callable[[], Net]] = {
    "the module's name": lambda: net(lambda m, x: m.down(own(m.up(x))).sum()),
    "another module's name": lambda: net(lambda m, x: m.down(bound.seven(m.up(x))).sum()),
    "an attribute": lambda: seeded(bound.Own),
    "a default argument": lambda: net(by_default),
    "a closure": lambda: net(by_closure()),
    "a partial": lambda: net(lambda m, x: m.down(bound.product(m.up(x), m.up(x))).sum()),
    "a partial with arguments": lambda: net(
        functools.partial(
            lambda f, m, x: m.down(f(m.up(x))[0]).sum(), lambda v, f=functions.Scaled.apply: f(v, 2.5, True, "scaled")
        )
    ),
    "a dict": lambda: net(lambda m, x: m.down(bound.TABLE["product"](m.up(x), m.up(x))).sum()),
    "map": lambda: net(lambda m, x: m.down(next(map(own, [m.up(x)]))).sum()),
    "a method caller": lambda: net(lambda m, x: m.down(operator.methodcaller("apply", m.up(x))(functions.Seven)).sum()),
    "a checkpoint": lambda: net(lambda m, x: m.down(checkpoint(own, m.up(x), use_reentrant=False)).sum()),
    "a name and a scale by name": lambda: net(lambda m, x: m.down(bound.Named.apply(m.up(x), scale=2.0)).sum()),
    "a default of forward": lambda: net(lambda m, x: m.down(bound.Named.apply(m.up(x))).sum()),
}
if not bound.takes_names():
    del BOUND["a name and a scale by name"]


@pytest.mark.parametrize("how", BOUND)
def test_a_function_bound_before_the_trace_is_recorded(how: str) -> None:
    captured = faithful(BOUND[how](), example())
    assert [n.target for n in captured.program.graph.nodes].count(function) == 1
    assert captured.unwalked == ""


@contextmanager
def unrecorded() -> Iterator[None]:
    """Stands for a torch in which what was bound before cannot be told from the operator itself."""
    with mock.patch("fxpar.capture.patches._applies", return_value=nullcontext()):
        yield


def test_a_function_that_escapes_the_recording_is_refused_with_its_line() -> None:
    with (
        unrecorded(),
        pytest.raises(CaptureError, match=r"functions\.Seven is called where a trace does not see") as error,
    ):
        capture(net(lambda m, x: m.down(own(m.up(x))).sum()), example())
    assert error.value.where.startswith(HERE)


def test_one_call_of_two_that_escapes_is_refused() -> None:
    found = walk(net(lambda m, x: m.down(own(own(m.up(x)))).sum()), example(), None)
    path = "tests.capture.functions.Seven"
    assert found.functions == {path: 2}
    compare(found, {path: 2})
    with pytest.raises(CaptureError, match=path):
        compare(found, {path: 1})


def on_node(m: Any, x: Any) -> Any:
    h = m.up(x)
    h.grad_fn.register_hook(lambda before, after: (before[0] * 2, *before[1:]))
    return m.down(h).sum()


def before_node(m: Any, x: Any) -> Any:
    h = m.up(x)
    h.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return m.down(h).sum()


def by_map(m: Any, x: Any) -> Any:
    h = m.up(x)
    list(map(h.grad_fn.register_hook, [lambda before, after: None]))
    return m.down(h).sum()


def on_the_loss(m: Any, x: Any) -> Any:
    loss = m.down(m.up(x)).sum()
    loss.grad_fn.register_hook(print)
    return loss


def on_accumulation(m: Any, x: Any) -> Any:
    m.up.weight.expand_as(m.up.weight).grad_fn.next_functions[0][0].register_hook(print)
    return m.down(m.up(x)).sum()


def on_tensor(m: Any, x: Any) -> Any:
    h = m.up(x)
    h.register_hook(lambda g: g * 2)
    return m.down(h).sum()


def on_several(m: Any, x: Any) -> Any:
    h = m.up(x)
    torch.autograd.graph.register_multi_grad_hook([h, m.down.weight], lambda gradients: None)
    return m.down(h).sum()


def after_accumulation(m: Any, x: Any) -> Any:
    m.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    return m.down(m.up(x)).sum()


def on_module(m: Any, x: Any) -> Any:
    m.down.register_full_backward_hook(lambda module, before, after: None)
    return m.down(m.up(x)).sum()


def before_module(m: Any, x: Any) -> Any:
    m.down.register_full_backward_pre_hook(lambda module, after: None)
    return m.down(m.up(x)).sum()


def on_all_modules(m: Any, x: Any) -> Any:
    with_hook = nn.modules.module.register_module_full_backward_hook(lambda module, before, after: None)
    result = m.down(m.up(x)).sum()
    with_hook.remove()
    return result


def on_saved(m: Any, x: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda v: v.half(), lambda v: v.double()):
        h = m.up(x).sin()
    return m.down(h).sum()


def on_cpu(m: Any, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        h = m.up(x).sin()
    return m.down(h).sum()


def on_saved_of_node(m: Any, x: Any) -> Any:
    h = m.up(x).sin()
    h.grad_fn._raw_saved_self.register_hooks(lambda v: v * 2, lambda v: v)
    return m.down(h).sum()


def mutation_of_saved(m: Any, x: Any) -> Any:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        h = m.up(x).sin()
    return m.down(h).sum()


HOOKS = [
    *(on_node, before_node, by_map, on_the_loss, on_accumulation, on_tensor, on_several, after_accumulation),
    *(on_module, before_module, on_all_modules, on_saved, on_cpu, on_saved_of_node, mutation_of_saved),
]


@pytest.mark.parametrize("forward", HOOKS, ids=lambda f: f.__name__)
def test_hooks_in_a_forward_are_refused_with_their_line(forward: Callable[..., Any]) -> None:
    model = net(forward)
    with pytest.raises(CaptureError, match="is lost when the forward is traced") as error:
        capture(model, example())
    line = forward.__code__.co_firstlineno
    assert error.value.where in {f"{HERE}{number}" for number in range(line, line + 5)}
    assert not nn.modules.module._global_backward_hooks
    assert not any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())


def test_a_hook_of_a_notebook_is_found() -> None:
    names: dict[str, Any] = {}
    exec("def hook(before, after): return None", names)

    def forward(m: Any, x: Any) -> Any:
        h = m.up(x)
        list(map(h.grad_fn.register_hook, [names["hook"]]))
        return m.down(h).sum()

    with pytest.raises(CaptureError, match=r"^<string>:1: a hook"):
        capture(net(forward), example())


def test_a_hook_in_the_loss_is_found() -> None:
    def loss(output: Any, batch: Any) -> Any:
        output.grad_fn.register_hook(print)
        return output.square().sum()

    with pytest.raises(CaptureError, match="a hook"):
        capture(net(lambda m, x: m.down(m.up(x))), example(), loss=loss)


def test_a_hook_of_a_model_without_values_is_found() -> None:
    with torch.device("meta"):
        model = net(on_node)
    with pytest.raises(CaptureError, match="a hook"):
        capture(model, example())


def test_random_numbers_in_a_backward_are_refused_with_their_line() -> None:
    apply = bound.RandomBackward.apply
    with pytest.raises(CaptureError, match="draws random numbers") as error:
        capture(net(lambda m, x: m.down(apply(m.up(x))).sum()), example())
    assert error.value.where.startswith("bound.py:")


def test_a_backward_that_branches_on_values_is_said_not_to_be_walked() -> None:
    apply = bound.Deciding.apply
    captured = faithful(net(lambda m, x: m.down(apply(m.up(x))).sum()), example())
    assert "DataDependent" in captured.unwalked
    assert "could not be walked" in values.findings(captured.how, captured.unwalked, "")[0]


def test_the_profiler_of_the_process_is_put_back() -> None:
    def profiler(*args: Any) -> None:
        pass

    sys.setprofile(profiler)
    try:
        capture(net(lambda m, x: m.down(own(m.up(x))).sum()), example())
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


class Trained(nn.Module):
    """Dropout, a buffer, a frozen part, and things that a call could leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.5)
        self.norm = nn.LayerNorm(6).eval()
        self.down.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.last: Any = None
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        h = self.drop(self.up(x)) * self.scale
        self.last = h
        self.seen.append(h)
        return self.down(self.norm(h)).square().mean()


def snapshot(model: nn.Module) -> Any:
    return {
        "values": {n: (id(t), t._version, t.tolist()) for n, t in model.state_dict(keep_vars=True).items()},
        "gradients": {
            n: None if p.grad is None else (id(p.grad), p.grad.tolist()) for n, p in model.named_parameters()
        },
        "asking": [p.requires_grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "torch": torch.get_rng_state().tolist(),
        "enabled": torch.is_grad_enabled(),
        "profile": sys.getprofile(),
    }


def test_parallelize_compares_and_leaves_nothing_behind() -> None:
    model = seeded(Trained)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    module = fxpar.parallelize(model, fxpar.Plan(), example=example())
    assert snapshot(model) == before
    assert (model.last, model.seen) == (None, [])
    text = str(module.report())
    assert "Functions and hooks of the model's autograd graph were compared" in text
    assert "Values and gradients of the captured graph were compared with the model's." in text
    with mock.patch.object(values, "check_capture", wraps=check_capture) as checked:
        module.eval()(example())
    assert checked.call_count == 1


def test_parallelize_refuses_what_computes_something_else() -> None:
    """A model that tells a trace by the type of its tensors: only the values tell."""

    def forward(m: Any, x: Any) -> Any:
        factor = 3.0 if is_fake(x) else 2.0
        return m.down(m.up(x) * factor).sum()

    with pytest.raises(CheckFailed, match="deviates from the module"):
        fxpar.parallelize(net(forward), fxpar.Plan(), example=example())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_a_comparison_is_the_same_in_any_surrounding(mode: Callable[[], Any]) -> None:
    model = net(lambda m, x: m.down(own(m.up(x)) * torch.ones(6, dtype=x.dtype)).sum())
    captured = capture(model, example())
    batch = example()
    with mode():
        assert values.compare(captured, model, batch) == ""
        assert walk(model, batch, None).functions == {"tests.capture.functions.Seven": 1}


def test_no_generator_but_the_models_is_seeded() -> None:
    model = seeded(Trained)
    captured = capture(model, example())
    with mock.patch("torch.cuda.manual_seed_all") as everywhere, mock.patch("torch.cuda.manual_seed") as here:
        values.compare(captured, model, example())
    assert not everywhere.called
    assert not here.called


def test_what_would_cost_much_is_not_compared_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(lambda m, x: m.down(m.up(x)).sum())
    captured = capture(model, example())
    assert values.compare(captured, model, example()) == ""
    with monkeypatch.context() as patch:
        patch.setattr(values, "LARGEST", 100)
        assert values.compare(captured, model, example()) == "its weights are 464 B"
    with monkeypatch.context() as patch:
        patch.setattr(values, "_WORK", 10)
        assert "FLOPs" in values.compare(captured, model, example())
    assert values.compare(captured, model.to("meta"), example()) == "the model is on the meta device"
    assert (
        "not compared with the model's: it is far" in values.findings(captured.how, captured.unwalked, "it is far")[1]
    )


def test_a_way_that_only_compiled_models_go_is_told() -> None:
    model = net(lambda m, x: m.down(unusual.looks_when_eager(m.up(x))).sum()).to("meta")
    captured = capture(model, example().to("meta"))
    reason = values.compare(captured, model, example())
    assert values.findings(captured.how, captured.unwalked, reason)[1:] == (
        "Values and gradients were not compared with the model's: the model is on the meta device.",
        "The forward goes the way that it has under torch.compile, as its eager one depends on values.",
    )


def test_few_rows_are_run_and_a_long_sequence_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(lambda m, x: m.down(m.up(x)).sum())
    batch = torch.randn(64, 100, 4, dtype=torch.float64)
    captured = capture(model, batch)
    sizes = []

    def check(captured: Any, model: Any, cut: Any, **options: Any) -> None:
        sizes.append(tuple(cut.shape))
        check_capture(captured, model, cut, **options)

    monkeypatch.setattr(values, "check_capture", check)
    values.compare(captured, model, batch)
    monkeypatch.setattr(values, "_WORK", 5000)
    values.compare(captured, model, batch)
    assert sizes == [(2, 100, 4), (2, 8, 4)]


def test_a_walk_leaves_no_count_of_its_calls() -> None:
    functions.Counting.forwards = functions.Counting.backwards = 0
    found = walk(net(lambda m, x: m.down(functions.Counting.apply(m.up(x))).sum()), example(), None)
    assert found.functions == {"tests.capture.functions.Counting": 1}
    assert (functions.Counting.forwards, functions.Counting.backwards) == (0, 0)


def test_the_capture_says_what_the_walk_found() -> None:
    captured = capture(net(lambda m, x: m.down(m.up(x)).sum()), example())
    assert captured.unwalked == ""
    assert eager.Eager().reason == ""
    assert "could not be walked" in values.findings(captured.how, "an error", "")[0]


# The walk of the eager model has the engine pass the backward, and torch's own nodes compute nothing in it.


class Operators(TorchDispatchMode):
    """Notes what is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def attended(m: Net, x: Tensor) -> Any:
    h = m.up(x).unsqueeze(1)
    return (m.down(nn.functional.scaled_dot_product_attention(h, h, h).squeeze(1)) * 2).sum()


def test_torchs_own_nodes_compute_nothing_in_a_walk() -> None:
    aten, original, operators = torch.ops.aten, eager._passed, Operators()

    def passed(*args: Any) -> bool:
        with operators:
            return original(*args)

    with mock.patch.object(eager, "_passed", passed):
        assert walk(net(attended), example(), None).reason == ""
    assert operators.seen  # of the attention
    assert not {aten.mm.default, aten.mul.Tensor, aten.sum.dim_IntList} & {*operators.seen}


def test_a_hook_behind_an_attention_is_found() -> None:
    def hooked(m: Net, x: Tensor) -> Any:
        h = m.up(x)
        list(map(h.grad_fn.register_hook, [lambda before, after: None]))
        return m.down(nn.functional.scaled_dot_product_attention(h, h, h)).sum()

    with pytest.raises(CaptureError, match="a hook"):
        walk(net(hooked), example(), None)
