"""Models that `torch.export` cannot trace and Dynamo can: numpy in the forward, as in position tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpar.capture.capture import Captured, capture
from fxpar.errors import CaptureError
from fxpar.ir.program import note
from fxpar.layout.symbolic_sizes import symbol
from fxpar.ops.small_operators import function
from fxpar.text.printing import print_program
from tests.capture.functions import Seven
from tests.capture.models import Net, example, faithful, net, operator_name, seeded


def lower(values: Tensor) -> Tensor:
    """Numpy on a tensor: export refuses it, Dynamo translates it."""
    return torch.from_numpy(np.tril(values.numpy()))


class Mixed(nn.Module):
    """Lists, dictionaries, tied and frozen weights around numpy."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.heads = nn.ModuleDict({"0": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.heads["0"].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.full((4,), 0.5))

    def forward(self, x: Tensor, mask: Tensor, factor: int = 2) -> Any:
        h = x * lower(mask).sum() + self.shift
        for layer in self.layers:
            h = layer(h).tanh() * factor
        with torch.no_grad():
            g = h * self.scale
        return {"loss": (self.heads["b"](self.heads["0"](h) * self.scale) * g).sum(), "hidden": h}


def mixed_batch(b: int = 3, s: int = 5) -> dict[str, Any]:
    return {"x": example(b, s, 4), "mask": torch.ones(6, 6, dtype=torch.float64), "factor": 3}


@pytest.fixture(scope="module")
def mixed() -> Captured:
    return faithful(seeded(Mixed), mixed_batch(), None, mixed_batch(2, 7), mixed_batch(1, 4))


def test_values_and_gradients_are_eager_at_every_size(mixed: Captured) -> None:
    assert mixed.how == "dynamo"
    assert [s.name for s in mixed.program.symbols] == ["b", "s", "b2", "s2"]


def test_parameters_have_the_authors_names(mixed: Captured) -> None:
    found = {p.fqn: (p.trainable, p.tied) for p in mixed.program.parameters}
    assert found == {
        "layers.0.weight": (True, ("heads.0.weight",)),
        "layers.0.bias": (True, ()),
        "layers.1.weight": (True, ()),
        "layers.1.bias": (False, ()),
        "heads.0.bias": (True, ()),
        "heads.b.weight": (True, ()),
        "heads.b.bias": (True, ()),
        "scale": (True, ()),
        "shift": (False, ()),
    }


def test_modules_lines_and_constants_are_the_authors(mixed: Captured) -> None:
    linear = [n for n in mixed.program.graph.nodes if n.op == "call_function" and operator_name(n) == "linear"]
    assert [note(n).fqn for n in linear] == ["layers.0", "layers.1", "heads.0", "heads.b"]
    assert all(note(n).source.startswith("test_dynamo.py:") for n in linear)
    assert mixed.spec.in_leaves[-1] == ("constant", 3)
    assert mixed.program.outputs == ("loss", "hidden")


def test_the_text_is_stable(mixed: Captured) -> None:
    assert print_program(capture(seeded(Mixed), mixed_batch()).program) == print_program(mixed.program)


class Sized(Net):
    """A size in arithmetic and in a branch: a trace with fixed sizes would keep the example's."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        h = self.up(x) * lower(mask).sum() / x.shape[1]
        if x.shape[1] > 4:
            h = h * 2
        return self.down(h).sum()


def test_sizes_and_the_branches_on_them_are_recorded() -> None:
    mask = torch.ones(6, 6, dtype=torch.float64)
    batches = [{"x": example(b, s, 4), "mask": mask} for b, s in ((3, 5), (2, 9))]
    captured = faithful(seeded(Sized), batches[0], None, batches[1])
    assert captured.how == "dynamo"
    assert sympy.Gt(symbol("s"), 4) in captured.spec.conditions


class Recorded(Net):
    """An autograd function and checkpointed regions where only Dynamo can trace."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        h = checkpoint(lambda v: torch.tanh(v).sin(), self.up(x) * lower(mask).sum(), use_reentrant=False)
        h = checkpoint(lambda v: Seven.apply(v), h, use_reentrant=True)  # type: ignore[no-untyped-call]
        return self.down(h.cos()).sum()


def test_functions_and_regions_are_recorded() -> None:
    batch = {"x": example(), "mask": torch.ones(6, 6, dtype=torch.float64)}
    captured = faithful(seeded(Recorded), batch)
    assert captured.how == "dynamo"
    nodes = [n for n in captured.program.graph.nodes if n.op == "call_function"]
    numbers = {operator_name(n): note(n).recompute for n in nodes}
    assert (numbers["tanh"], numbers["sin"], numbers["function"], numbers["cos"]) == (1, 1, 2, 0)
    assert [n.kwargs["path"] for n in nodes if n.target is function] == ["tests.capture.functions.Seven"]


def test_a_loss_is_traced_with_the_model() -> None:
    batch = {"x": example(), "mask": torch.ones(6, 6, dtype=torch.float64), "target": example(3, 5, 4)}
    model = seeded(Mixed)
    captured = faithful(model, batch, lambda outputs, b: (outputs["hidden"] - b["target"]).square().mean())
    assert (captured.how, captured.program.loss) == ("dynamo", "loss")
    assert "layers.0.weight" in {p.fqn for p in captured.program.parameters}


def test_models_without_memory() -> None:
    model = seeded(Mixed).to("meta")
    model.heads["0"].weight = model.layers[0].weight
    found = capture(model, {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in mixed_batch().items()})
    assert found.how == "dynamo"
    assert print_program(found.program) == print_program(capture(seeded(Mixed), mixed_batch()).program)


class Borrowed(Net):
    """Calls a layer of its own by way of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.borrowed = [self.up]

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return self.down(self.borrowed[0](x)).sum() * lower(mask).sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_are_known_by_identity(device: str) -> None:
    batch = {"x": example(), "mask": torch.ones(6, 6, dtype=torch.float64)}
    captured = capture(seeded(Borrowed).to(device), {k: v.to(device) for k, v in batch.items()})
    assert captured.how == "dynamo"
    assert [p.fqn for p in captured.program.parameters] == ["up.weight", "up.bias", "down.weight", "down.bias"]


def test_dynamo_leaves_nothing_behind() -> None:
    faithful(seeded(Sized), {"x": example(), "mask": torch.ones(6, 6, dtype=torch.float64)})
    assert not torch._dynamo.trace_rules.is_callable_allowed(Seven)


def test_a_layer_that_the_model_does_not_own_is_refused() -> None:
    outside = nn.Linear(4, 4).double()

    class Borrowing(Net):
        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            return self.down(self.up(outside(x))).sum() * lower(mask).sum()

    with pytest.raises(CaptureError, match="does not own"):
        capture(seeded(Borrowing), {"x": example(), "mask": torch.ones(6, 6, dtype=torch.float64)})


def test_export_comes_first() -> None:
    assert capture(net(lambda m, x: m.down(m.up(x)).sum()), example()).how == "export"
