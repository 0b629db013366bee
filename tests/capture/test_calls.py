"""Calls: arguments of every kind, outputs of every kind, and the loss."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from fxpar.capture.capture import Captured, capture
from fxpar.errors import CaptureError
from tests.capture.models import Net, close, eager, example, faithful, net, run, seeded


class Pair(Net):
    def forward(self, x: Tensor, y: Tensor, scale: float = 2.0, flag: bool = True) -> Any:  # type: ignore[override]
        return self.down(self.up(x) * scale + (self.up(y) if flag else 0)).sum()


def paths(captured: Captured) -> list[str]:
    return [i.path for i in captured.program.inputs]


# ---------------------------------------------------------------- arguments


def test_two_arguments_that_are_one_tensor_stay_two() -> None:
    x, model = example(), seeded(Pair)
    captured = faithful(model, {"x": x, "y": x}, None, {"x": x, "y": x + 1})
    assert paths(captured) == ["x", "y"]


def test_uncloned_they_would_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap itself: the call's second argument is ignored."""
    monkeypatch.setattr(importlib.import_module("fxpar.capture.trace"), "separate", lambda values: values)
    x, model = example(), seeded(Pair)
    captured = capture(model, {"x": x, "y": x})
    other = {"x": x, "y": x + 1}
    with pytest.raises(AssertionError):
        close(eager(captured, model, other), run(captured, model, other))


def test_views_of_one_tensor_stay_apart() -> None:
    x = example(6, 5, 4)
    faithful(seeded(Pair), {"x": x[:3], "y": x[3:]}, None, {"x": example(), "y": example() * 2})


def test_positional_arguments_and_constants() -> None:
    captured = faithful(seeded(Pair), (example(), example() + 1, 3.0, False))
    assert paths(captured) == ["0", "1"]
    assert captured.spec.in_leaves == (("input", "0"), ("input", "1"), ("constant", 3.0), ("constant", False))


def test_keyword_arguments_in_any_order() -> None:
    captured = faithful(seeded(Pair), {"scale": 3, "y": example() + 1, "x": example()})
    assert captured.spec.in_leaves == (("constant", 3), ("input", "y"), ("input", "x"))


class Nested(Net):
    def forward(self, batch: dict[str, Any], name: str | None = None) -> Any:  # type: ignore[override]
        h = self.up(batch["x"]) + sum(self.up(v) for v in batch["many"])
        h = h + self.up(batch["pair"][0]) * batch["pair"][1]
        h = h * 2 if name == "double" else h
        return {"loss": self.down(h).sum(), "more": (h, [h * 2, None, 3, "text"]), "deep": {"mean": h.mean()}}


def nested(name: str | None) -> dict[str, Any]:
    x = example()
    return {"batch": {"x": x, "many": [x + 1, x + 2], "pair": (x + 3, 4)}, "name": name}


@pytest.mark.parametrize("name", ["double", None])
def test_nested_arguments_and_outputs(name: str | None) -> None:
    captured = faithful(seeded(Nested), nested(name))
    assert paths(captured) == ["batch.x", "batch.many.0", "batch.many.1", "batch.pair.0"]
    assert captured.spec.in_leaves[-2:] == (("constant", 4), ("constant", name))
    assert captured.program.outputs == ("loss", "more.0", "more.1.0", "deep.mean")
    constants = [what for kind, what in captured.spec.out_leaves if kind == "constant"]
    assert constants == [None, 3, "text"]


class Variadic(Net):
    def forward(self, *values: Tensor) -> Any:
        return self.down(sum(self.up(v) for v in values)).sum()


class Keywords(Net):
    def forward(self, x: Tensor, **more: Any) -> Any:
        return self.down(self.up(x)).sum() * more.get("factor", 1)


def test_variadic_arguments() -> None:
    captured = faithful(seeded(Variadic), (example(), example() + 1), None, (example(2, 3, 4), example(2, 3, 4)))
    assert (captured.how, paths(captured)) == ("export", ["0", "1"])
    factor = torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    assert paths(capture(seeded(Keywords), {"x": example(), "factor": factor})) == ["x", "factor"]


def test_one_tensor_is_a_batch() -> None:
    assert paths(faithful(net(lambda m, x: m.down(m.up(x)).sum()), example())) == ["0"]


def test_layouts_of_memory_mean_nothing() -> None:
    faithful(seeded(Pair), {"x": example(5, 3, 4).transpose(0, 1), "y": example()})


def test_the_trace_is_that_of_the_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)).double()
    training, evaluation = (faithful(model.train(mode), example(), lambda o, b: o.sum()) for mode in (True, False))
    assert len(training.program.graph.nodes) > len(evaluation.program.graph.nodes)


# ------------------------------------------------------------------ outputs


class Named(NamedTuple):
    loss: Tensor
    hidden: Tensor


@dataclass
class Known:
    loss: Tensor
    hidden: Tensor


@dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    hidden: Tensor | None = None


@dataclass
class Unknown:
    loss: Tensor


class Returns(Net):
    """Returns its loss and hidden state in a container."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.kind(loss=self.down(h).sum(), hidden=h)


@pytest.mark.parametrize("kind", [dict, OrderedDict, Named, Known, Output])
def test_outputs_come_in_the_models_own_type(kind: Any) -> None:
    if kind is Known and Known not in pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(Known)
    model = seeded(Returns, kind)
    captured = faithful(model, example())
    assert captured.program.outputs == ("loss", "hidden")
    rebuilt = pytree.tree_unflatten([name for _, name in captured.spec.out_leaves], captured.spec.out_spec)
    assert type(rebuilt) is type(model(example()))
    assert (rebuilt["hidden"] if isinstance(rebuilt, dict) else rebuilt.hidden) == "hidden"


def test_unknown_containers_are_refused_with_the_remedy() -> None:
    model = net(lambda m, x: Unknown(m.down(m.up(x)).sum()))
    with pytest.raises(CaptureError, match=r"Unknown.*register_dataclass"):
        capture(model, example())


def test_inputs_weights_and_repeated_values_may_be_outputs() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        loss = m.down(m.up(x)).sum()
        return {"loss": loss, "again": loss, "input": x, "weight": m.up.weight}

    captured = faithful(net(forward), example())
    assert captured.program.outputs == ("loss", "again", "input", "weight")


def test_an_output_that_is_a_size_is_refused() -> None:
    with pytest.raises(CaptureError, match="1: an output is a size that varies"):
        capture(net(lambda m, x: (m.down(m.up(x)).sum(), x.shape[0])), example())


# --------------------------------------------------------------------- loss


def two_scalars(m: Net, x: Tensor) -> Any:
    h = m.up(x)
    return m.down(h).sum(), h.square().mean()


def test_several_scalars_need_a_name() -> None:
    with pytest.raises(CaptureError, match=r"several scalars \(0, 1\); name one"):
        capture(net(two_scalars), example())
    captured = faithful(net(two_scalars), example(), "1")
    assert captured.program.loss == "1"
    with pytest.raises(CaptureError, match="loss='7': is not a scalar output"):
        capture(net(two_scalars), example(), loss="7")


def test_an_output_called_loss_is_the_loss() -> None:
    def forward(m: Net, x: Tensor) -> Any:
        h = m.up(x)
        return {"penalty": h.mean(), "loss": m.down(h).sum()}

    assert faithful(net(forward), example()).program.loss == "loss"
    assert faithful(net(forward), example(), "penalty").program.loss == "penalty"


def test_a_model_needs_no_loss() -> None:
    assert faithful(net(lambda m, x: m.down(m.up(x))), example()).program.loss == ""


class Plain(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return self.down(self.up(x) if scale is None else self.up(x) * scale)


def squared(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (outputs - batch["target"]).square().mean()


def test_a_loss_takes_entries_that_the_model_does_not() -> None:
    batch = {"target": example() + 1, "x": example()}
    captured = faithful(seeded(Plain), batch, squared, {"target": example(2, 7, 4), "x": example(2, 7, 4)})
    assert paths(captured) == ["target", "x"]
    assert captured.program.outputs == ("loss", "outputs")
    assert captured.loss is squared


def test_a_loss_of_positional_batches_and_of_one_tensor() -> None:
    faithful(seeded(Plain), (example(), example() + 1), lambda o, b: (o - b[1]).square().mean())
    faithful(seeded(Plain), example(), lambda o, b: (o - b).square().mean())


def test_a_loss_with_constants() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    captured = faithful(seeded(Plain), {"x": example()}, lambda o, b: (o * weights).sum())
    assert [value.tolist() for value in captured.program.constants.values()] == [weights.tolist()]


class WeightedLoss(nn.Module):
    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), trainable)

    def forward(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs * self.weights).sum()


def test_a_loss_that_is_a_module_must_not_learn() -> None:
    captured = faithful(seeded(Plain), {"x": example()}, WeightedLoss(False))
    assert [p.kind for p in captured.program.parameters].count("constant") == 1
    with pytest.raises(CaptureError, match=r"loss\.weights: the loss has a parameter of its own"):
        capture(seeded(Plain), {"x": example()}, loss=WeightedLoss(True))


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda o, b: o, r"torch.float64\["),
        (lambda o, b: o.sum()[None], r"torch.float64\[1\]"),
        (lambda o, b: (o.sum(), o), "tuple"),
        (lambda o, b: o.argmax(), r"torch.int64\[\]"),
    ],
)
def test_a_loss_must_be_one_floating_number(loss: Any, found: str) -> None:
    with pytest.raises(CaptureError, match=f"loss: returns {found}"):
        capture(seeded(Plain), {"x": example()}, loss=loss)


# ----------------------------------------------------------------- refusals


class Casting(Net):
    """Runs whatever numbers it gets, so that only the example is at fault."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return self.down(self.up(x.double())).sum()


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (lambda: {"x": None}, "holds no tensor"),
        (lambda: {"x": example(0, 5, 4)}, r"example\['x'\]: has the empty shape \[0, 5, 4\]"),
        (lambda: {"x": example().requires_grad_()}, r"example\['x'\]: requires a gradient"),
        (lambda: {"x": torch.eye(4).to_sparse()}, r"example\['x'\]: has the layout torch.sparse_coo"),
        (lambda: {"x": example(), "scale": object()}, r"example\['scale'\]: a object can be neither traced"),
        (lambda: {"x": example(), "scale": Unknown(example())}, r"example\['scale'\]: a Unknown can be neither"),
        (lambda: {"x": example(), "colour": 3}, "does not fit the model's forward: .*'colour'"),
        (lambda: {"scale": example()}, "does not fit the model's forward: missing .*'x'"),
        (lambda: {"x": torch.ones(3, 5, 4).to(torch.uint16)}, "x: the element type torch.uint16 is not supported"),
    ],
)
def test_examples_that_cannot_be_traced_are_refused_by_entry(batch: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(seeded(Casting), batch())
    assert caught.value.where


def test_complex_values_are_traced() -> None:
    faithful(
        net(
            lambda m, x: m.down(
                torch.view_as_real(torch.view_as_complex(m.up(x).view(3, 5, 3, 2)) * 1j).reshape(3, 5, 6)
            ).sum()
        ),
        example(),
    )
