"""Layers that repeat are traced once, and nothing in a program says so; layers that do not are traced each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar.capture.capture import Captured, capture
from fxpar.capture.eager import Eager, walk
from fxpar.capture.layer_trace_cache import LayerTraceCache
from fxpar.errors import CaptureError
from fxpar.text.printing import print_program
from tests.capture.functions import Seven
from tests.capture.repeated import MODELS, made
from tests.products import few


def both(make: Callable[[], tuple[nn.Module, Any, Any]]) -> tuple[int, Captured, Captured]:
    """How many layers were copied in a capture, that capture, and one of which no layer was."""
    count, original = itertools.count(), LayerTraceCache._copy

    def copy(self: LayerTraceCache, *args: Any) -> Any:
        found = original(self, *args)
        next(count)
        return found

    def traced(self: LayerTraceCache, original: Any, *call: Any) -> Any:
        return original(*call)

    walked: list[Eager] = []

    def walking(*args: Any) -> Eager:
        walked.append(walk(*args))
        return walked[-1]

    model, batch, loss = make()
    with mock.patch.object(LayerTraceCache, "_copy", copy), mock.patch("fxpar.capture.capture.walk", walking):
        copied = capture(model, batch, loss=loss)
    if walked[0].layers.copied and not is_proven(walked[0]):
        return 0, copied, copied  # it was traced again
    model, batch, loss = make()
    with mock.patch.object(LayerTraceCache, "call", traced):
        plain = capture(model, batch, loss=loss)
    return next(count), copied, plain


def is_proven(eager: Eager) -> bool:
    """Whether the eager model did in all copied layers what the copies say."""
    return not eager.reason and eager.layers.is_proven


def same(make: Callable[[], tuple[nn.Module, Any, Any]]) -> int:
    """How many layers were copied; nothing that is known of a program differs for it."""
    count, copied, plain = both(make)
    assert print_program(copied.program) == print_program(plain.program)
    assert copied.spec == plain.spec
    for mine, other in zip(copied.program.graph.nodes, plain.program.graph.nodes, strict=True):
        assert mine.meta.get("custom") == other.meta.get("custom")
    assert copied.program.constants.keys() == plain.program.constants.keys()
    return count


# Whose layers differ by index, hold constants, or are watched by hooks.
NONE = {"gpt2 scaled by its index", "falcon", "mixtral with router logits", "albert"}


# Each kind of layer once: checkpointed, experts; and in evaluation, where models differ by their dropout alone.
# Plain layers, those that know their index, and shared ones have tests of their own.
FEW = {*((name, True) for name in ("gpt2 checkpointed", "mixtral")), ("encoder", False)}


@pytest.mark.parametrize(("name", "training"), few(itertools.product(MODELS, (True, False)), FEW))
def test_programs_are_those_of_a_trace_of_each_layer(name: str, training: bool) -> None:
    count = same(lambda: made(name, training))
    # Whether others are copied may depend on what else the process holds, which their code could name.
    assert count == 0 or name not in NONE


class Layer(nn.Module):
    """A layer with whatever a test gives it, and a forward of its own."""

    def __init__(self, index: int, function: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.1)
        self.index, self.function = index, function

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.function(self, x, *others)

    def mlp(self, x: Tensor) -> Any:
        return x + self.drop(self.down(self.up(x).tanh()))


def _in_turn(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(
        self, function: Callable[..., Any], count: int = 4, run: Callable[[Any, Tensor], Tensor] = _in_turn
    ) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)  # what comes out of a layer has a gradient, what goes into the first one should
        self.layers = nn.ModuleList(Layer(i, function) for i in range(count))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, torch.relu(self.first(x))).sum()


def stacked(model: nn.Module) -> tuple[nn.Module, Any, Any]:
    return model, torch.randn(3, 5, 4), None


def copied(function: Callable[..., Any], change: Callable[[Any], None] | None = None, **options: Any) -> int:
    """How many layers of a stack were copied, whose program is that of a trace."""

    def make() -> tuple[nn.Module, Any, Any]:
        model = Stack(function, **options)
        if change is not None:
            change(model)
        return stacked(model)

    return same(make)


def plain(m: Layer, x: Tensor, *others: Any) -> Any:
    return m.mlp(x)


def test_equal_layers_are_copied_whatever_they_do_not_read() -> None:
    assert copied(plain) == 3


def each(name: str, value: Callable[[Any, int], Any]) -> Callable[[Any], None]:
    """Returns a change that sets an attribute of each layer, by the model and the layer's number."""

    def change(model: Any) -> None:
        for i, layer in enumerate(model.layers):
            setattr(layer, name, value(model, i))

    return change


def passing(argument: Callable[[int, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Returns a run in which each layer gets another argument, by its number and its input."""

    def run(model: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(model.layers):
            x = layer(x, argument(i, x))
        return x

    return run


# Of four layers how many are copied: the layer's forward, what is changed in the model, and how layers are called.
OTHERS: dict[str, tuple[int, Callable[..., Any], dict[str, Any]]] = {
    "a branch on the index": (0, lambda m, x: m.mlp(x) if m.index % 2 else m.mlp(x).sin(), {}),
    "the index in vars": (0, lambda m, x: m.mlp(x) * (vars(m)["index"] + 1), {}),
    "the index in __dict__": (0, lambda m, x: m.mlp(x) * m.__dict__["index"], {}),
    "a number in a namespace": (
        0,
        lambda m, x: m.mlp(x) * m.scale.by,
        {"change": each("scale", lambda model, i: SimpleNamespace(by=1.0 if i < 3 else 2.0))},
    ),
    "one number of layers 0 and 1, another of the others": (
        2,
        lambda m, x: m.mlp(x) * m.scale,
        {"change": each("scale", lambda model, i: 0.5 if i < 2 else 0.25)},
    ),
    "dropout": (0, plain, {"change": each("drop", lambda model, i: nn.Dropout(0.1 * i))}),
    "one in evaluation": (2, plain, {"change": lambda model: model.layers[1].eval()}),
    "one frozen": (2, plain, {"change": lambda model: model.layers[2].up.weight.requires_grad_(False)}),
    "one without a bias": (2, plain, {"change": lambda model: setattr(model.layers[3].up, "bias", None)}),
    "a tensor of its own": (
        0,
        lambda m, x: m.mlp(x) * m.table,
        {"change": each("table", lambda model, i: torch.ones(4))},
    ),
    "a parameter of another layer": (
        0,
        lambda m, x: m.mlp(x) + m.others[0].up.bias.sum(),
        {"change": each("others", lambda model, i: (model.layers[0],))},
    ),
    "its place in the model": (
        0,
        lambda m, x: m.mlp(x) * (2 if m is m.parent[0].layers[1] else 1),
        {"change": each("parent", lambda model, i: (model,))},
    ),
    "a flag": (2, lambda m, x, late: m.mlp(x) if late else m.mlp(x).sin(), {"run": passing(lambda i, x: i > 2)}),
    "one value twice": (
        2,
        lambda m, x, y: m.mlp(x) if x is y else m.mlp(y),
        {"run": passing(lambda i, x: x if i < 3 else x + 1)},
    ),
    "an object": (0, lambda m, x, y: m.mlp(x) * y.by, {"run": passing(lambda i, x: SimpleNamespace(by=i))}),
}


# What others resemble is in the matrix: attributes that are read in another way, and further parts of a layer.
SIMILAR = ("the index in vars", "the index in __dict__", "one without a bias", "a tensor of its own", "an object")
EVERY_TIME = [name for name in OTHERS if name not in SIMILAR]


@pytest.mark.parametrize("name", few(OTHERS, EVERY_TIME))
def test_what_differs_is_traced(name: str) -> None:
    count, function, options = OTHERS[name]
    assert copied(function, **options) == count


def test_state_outside_of_the_layers_is_seen() -> None:
    calls: list[int] = []

    def counting(m: Layer, x: Tensor) -> Any:
        calls.append(1)
        return m.mlp(x) * len(calls)

    assert copied(counting) == 0
    numbers = itertools.count(1)
    with mock.patch.object(itertools, "count", itertools.count):
        first = both(lambda: stacked(Stack(lambda m, x: m.mlp(x) * next(numbers))))
    assert first[0] == 0

    def told(model: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(model.layers):
            model.shared.number = i // 2
            x = layer(x)
        return x

    def share(model: Any) -> None:
        model.shared = SimpleNamespace(number=0)
        for layer in model.layers:
            layer.shared = model.shared

    assert copied(lambda m, x: m.mlp(x) + m.shared.number, share, run=told) == 2  # each other one


def test_what_a_layer_keeps_is_made_by_itself() -> None:
    def keeping(m: Any, x: Tensor) -> Any:
        m.seen = x
        return m.mlp(x)

    assert copied(keeping) == 0

    def listing(m: Any, x: Tensor, seen: list[Tensor]) -> Any:
        seen.append(x)
        return m.mlp(x)

    def run(model: Any, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in model.layers:
            x = layer(x, seen)
        return sum((value.sin() for value in seen), x)

    assert copied(listing, run=run) == 0


def test_tied_weights_and_layers_that_are_called_twice() -> None:
    def tied(model: Any) -> None:
        model.layers[2].up.weight = model.layers[0].up.weight
        model.layers[3].down.weight = model.layers[3].up.weight = nn.Parameter(torch.randn(4, 4))
        model.layers[3].up.bias = nn.Parameter(torch.randn(4))

    assert copied(plain, tied) <= 3

    def twice(model: Any, x: Tensor) -> Tensor:
        for layer in [*model.layers, *model.layers]:
            x = layer(x)
        return x

    assert copied(plain, run=twice) == 7


def test_a_layer_that_knows_which_one_it_is_is_traced() -> None:
    by_layer: dict[Any, float] = {}

    def listed(model: Any) -> None:
        by_layer.clear()
        by_layer.update({layer: 1.0 + i for i, layer in enumerate(model.layers)})

    assert copied(lambda m, x: m.mlp(x) * by_layer[m], listed) == 0

    def special(model: Any) -> None:
        by_layer.clear()
        by_layer[model.layers[0]] = 2.0

    assert copied(lambda m, x: m.mlp(x) * by_layer.get(m, 1.0), special) == 0

    def shared(model: Any) -> None:
        known = SimpleNamespace(first=model.layers[0])
        for layer in model.layers:
            layer.known = known

    assert copied(lambda m, x: m.mlp(x) * (2 if m is m.known.first else 1), shared) == 0

    def numbered(model: Any) -> None:
        by_layer.clear()
        by_layer.update({id(layer): 1.0 + i for i, layer in enumerate(model.layers)})

    assert copied(lambda m, x: m.mlp(x) * by_layer[id(m)], numbered) == 0


def test_changes_in_place_are_those_of_a_trace() -> None:
    def adding(m: Layer, x: Tensor) -> Tensor:
        x += m.mlp(x)
        return x

    assert copied(adding) == 0
    assert copied(lambda m, x: m.mlp(x).mul_(2)) <= 3

    def after(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x)
            x += 1
        return x

    assert copied(plain, run=after) == 3


def test_modes_and_lines_around_a_call() -> None:
    def unrolled(model: Any, x: Tensor) -> Tensor:
        a, b, c, d, e = model.layers
        x = a(x)
        x = b(x)
        with torch.no_grad():
            x = x + c(x)
        return e(d(x))  # type: ignore[no-any-return]

    assert copied(plain, run=unrolled, count=5) == 0

    def partly(model: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(model.layers):
            with torch.set_grad_enabled(i != 3):
                x = layer(x)
        return model.layers[-1](x)  # type: ignore[no-any-return]

    assert copied(plain, run=partly, count=5) == 2  # nor has what goes into the last one a gradient


def test_checkpointed_regions_have_numbers_of_their_own() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    assert copied(plain, run=run) == 3
    assert copied(lambda m, x: checkpoint(m.mlp, x, use_reentrant=False).sin()) == 3


def test_functions_of_the_author_are_kept_in_each_layer() -> None:
    assert copied(lambda m, x: m.mlp(Seven.apply(x))) == 3  # type: ignore[no-untyped-call]


def test_a_hook_on_one_layer_is_seen() -> None:
    def hooked(model: Any) -> None:
        model.layers[2].up.register_forward_hook(lambda module, args, output: output * 2)

    assert copied(plain, hooked) == 2
    model = Stack(plain)
    layer: Any = model.layers[3]
    layer.up.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CaptureError, match="hook"):
        capture(*stacked(model)[:2])


# Copies of layers are proven by what the layers do where the eager model runs.


def test_what_only_runs_can_tell_apart_is_traced() -> None:
    """What no look at attributes and names finds: it is seen in what the layers do."""

    def hidden(m: Layer, x: Tensor) -> Any:
        factor: int = 1 + object.__getattribute__(m, "index")
        return m.mlp(x) * factor

    assert copied(hidden) == 0

    def counting(m: Layer, x: Tensor, box: list[int] = []) -> Any:  # noqa: B006
        box[:] = [len(box) and (box[0] + 1) % 4]
        return m.mlp(x) * (1 + box[0])

    assert copied(counting) == 0


def test_outputs_that_their_caller_changes_or_that_are_parts() -> None:
    def filled(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x).pop("x")
        return x

    def twice(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x, one, other = layer(x)
            one["number"] = 2
            x = x * (1 + len(other))
        return x

    def same_container(m: Layer, x: Tensor) -> Any:
        container: dict[str, int] = {}
        return m.mlp(x), container, container

    assert copied(same_container, run=twice) == 0
    assert copied(lambda m, x: {"x": m.mlp(x)}, run=filled) == 3
    assert copied(lambda m, x: torch.cat([m.mlp(x), x], -1)[..., 4:]) == 0
    assert copied(lambda m, x: m.mlp(x).reshape(x.shape[0], x.shape[1], -1)) == 0
