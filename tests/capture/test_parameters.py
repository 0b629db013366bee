"""Parameters, buffers and constants: one placeholder a tensor, under the author's names, with the right gradient."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpar.capture import recording as recording_module
from fxpar.capture.capture import Captured, capture
from fxpar.errors import CaptureError
from fxpar.ir.program import Parameter, note
from fxpar.text.printing import print_program
from tests.capture.models import Net, eager, example, faithful, net, run, seeded


def table(captured: Captured) -> dict[str, Parameter]:
    return {p.fqn: p for p in captured.program.parameters}


class Tied(nn.Module):
    """An embedding that is the head too, and two names of one buffer."""

    scale: Tensor
    again: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("again", self.scale, persistent=False)

    def forward(self, ids: Tensor) -> Any:
        return (self.head(self.embed(ids) * self.scale + self.again) ** 2).sum()


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 7, shape or (3, 5), generator=torch.Generator().manual_seed(3))


def test_tied_tensors_are_one_placeholder_with_one_gradient() -> None:
    torch.manual_seed(1)
    model = Tied()
    captured = capture(model, ids())
    assert {n: p.tied for n, p in table(captured).items()} == {"embed.weight": ("head.weight",), "scale": ("again",)}
    wanted, found = eager(captured, model, ids()).gradients, run(captured, model, ids()).gradients
    assert found.keys() == wanted.keys() == {"embed.weight"}
    torch.testing.assert_close(found["embed.weight"], wanted["embed.weight"])


class Shared(nn.Module):
    """One layer that is called three times, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(self.first(x)).tanh()).sum()


def test_a_layer_used_again_is_one_parameter() -> None:
    captured = faithful(seeded(Shared), example())
    assert {n: p.tied for n, p in table(captured).items()} == {
        "first.weight": ("second.weight",),
        "first.bias": ("second.bias",),
    }
    modules = [note(n).fqn for n in captured.program.graph.nodes if str(n.target) == "aten.linear.default"]
    assert modules == ["first", "first", "second"]


class Assorted(nn.Module):
    """Frozen, extra, unused and oddly named parameters, buffers of all kinds, constants."""

    kept: Tensor
    lost: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 6)
        self.base.weight.requires_grad_(False)
        self.lora = nn.ParameterDict({"A": nn.Parameter(torch.randn(2, 4)), "B": nn.Parameter(torch.randn(6, 2))})
        self.scales = nn.ParameterList([torch.ones(6), torch.ones(6)])
        self.experts = nn.ModuleDict({"0": nn.Linear(6, 6), "up 1": nn.Linear(6, 6)})
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.full((6,), 0.5))
        self.register_buffer("lost", torch.full((6,), 0.25), persistent=False)
        self.constant = torch.arange(6.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        h = self.base(x) + x @ self.lora["A"].t() @ self.lora["B"].t()
        h = h * self.scales[0] + self.scales[1] * self.constant + self.kept * self.lost
        h = h * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=h.dtype)
        return self.experts["0"](self.experts["up 1"](h)).sum()


@pytest.fixture(scope="module")
def assorted() -> Captured:
    return faithful(seeded(Assorted), example())


def test_parameters_have_the_authors_names_and_flags(assorted: Captured) -> None:
    model = seeded(Assorted)
    found = table(assorted)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {n: p.trainable for n, p in found.items() if p.kind == "parameter"} == wanted
    assert not wanted["base.weight"]
    assert "experts.up 1.weight" in wanted
    assert {n for n, p in found.items() if p.kind == "buffer"} == {"kept", "lost"}


def test_frozen_and_unused_parameters_get_no_gradient(assorted: Captured) -> None:
    gradients = run(assorted, seeded(Assorted), example()).gradients
    trainable = {n for n, p in table(assorted).items() if p.trainable}
    assert trainable - gradients.keys() == {"unused"}


def test_constants_of_forward_keep_their_values(assorted: Captured) -> None:
    constants = assorted.program.constants
    assert {n for n, p in table(assorted).items() if p.kind == "constant"} == constants.keys()
    assert sorted(float(value.sum()) for value in constants.values()) == [15.0, 21.0]


def test_source_lines_and_modules_are_the_authors(assorted: Captured) -> None:
    lines = print_program(assorted.program).splitlines()
    base = next(line for line in lines if "(%x, %base_weight" in line)
    odd = next(line for line in lines if "%experts_up_1_weight" in line and "aten" in line)
    scale = next(line for line in lines if "%scales_0)" in line)
    first = inspect.getsourcelines(Assorted.forward)[1] + 1
    assert base.endswith(f"# base test_parameters.py:{first}")
    assert odd.endswith(f'# "experts.up 1" test_parameters.py:{first + 3}')
    assert scale.endswith(f"# - test_parameters.py:{first + 1}")


def test_names_that_are_no_python_names() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 4))).double()
    captured = faithful(model, {"input": example()}, lambda o, b: o.sum())
    assert list(table(captured)) == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
    assert captured.program.parameters[0].node == "p_0_weight"


def test_two_captures_have_the_same_text() -> None:
    texts = [print_program(capture(seeded(Assorted), example()).program) for _ in range(2)]
    assert texts[0] == texts[1]


class Dropouts(nn.Module):
    """Several dropouts of one module and of others, one of them switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.off = nn.Linear(4, 6), nn.Dropout(0.5), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Any:
        h = self.off(self.drop(self.drop(self.up(x))))
        h = nn.functional.dropout(nn.functional.dropout(h, 0.1), 0.1)
        return (h * torch.rand_like(h)).sum()


def test_random_nodes_have_identities_of_their_own_and_others_none() -> None:
    captured = faithful(seeded(Dropouts), example())
    found = {n.name: note(n).random for n in captured.program.graph.nodes if n.op == "call_function"}
    drawn = [number for number in found.values() if number]
    assert len(drawn) == len(set(drawn)) == 5
    again = capture(seeded(Dropouts), example()).program
    assert found == {n.name: note(n).random for n in again.graph.nodes if n.op == "call_function"}
    switched_off = capture(seeded(Dropouts).eval(), example()).program
    nodes = [n for n in switched_off.graph.nodes if n.op == "call_function"]
    assert sum(note(n).random != 0 for n in nodes) == 3  # the functions ignore the mode


OUTSIDE = nn.Linear(4, 4).double()


class Unregistered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4).double()]

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(self.layers[0](x))).sum()


def test_parameters_that_the_model_does_not_own_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_parameters.py:\d+: the model uses a parameter that it does not own"):
        capture(seeded(Unregistered), example())
    model = net(lambda m, x: m.down(m.up(x)))
    with pytest.raises(CaptureError, match="does not own"):
        capture(model, example(), loss=lambda outputs, batch: OUTSIDE(outputs).sum())


def penalty(model: nn.Module) -> Any:
    return sum(parameter.pow(2).sum() for parameter in model.parameters())


@pytest.mark.parametrize(
    "term",
    [
        penalty,
        lambda m: m.up.bias.data.sum(),
        lambda m: torch.no_grad()(penalty)(m),
        lambda m: float(m.up.bias[0]),
        lambda m: m.up.bias.tolist()[0],
    ],
)
def test_a_loss_that_reads_the_weights_of_another_model_is_refused(term: Any) -> None:
    other = net(lambda m, x: m.down(m.up(x)))
    model = net(lambda m, x: m.down(m.up(x)))
    with pytest.raises(CaptureError, match=r"test_parameters.py:\d+: .* does not own.*put the term into the model"):
        capture(model, {"x": example()}, loss=lambda outputs, batch: outputs.sum() + term(other))


def test_a_loss_may_read_the_weights_of_the_model_itself_and_the_shapes_of_any() -> None:
    model, other = net(lambda m, x: m.down(m.up(x))), net(lambda m, x: x)
    rows = capture(
        model, {"x": example()}, loss=lambda outputs, batch: outputs.sum() / other.up.weight.shape[0] + penalty(model)
    )
    assert not rows.program.constants
    faithful(model, {"x": example()}, lambda outputs, batch: outputs.sum() / 6 + penalty(model))


def test_unrefused_they_would_be_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap itself: their gradient is gone."""
    monkeypatch.setattr(recording_module, "_is_foreign", lambda value: False)
    captured = capture(seeded(Unregistered), example())
    assert [p.kind for p in captured.program.parameters].count("constant") == 2


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x).transpose(1, 2)).square().sum()


class Counter(Net):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        return self.down(self.up(x)).sum() * self.steps


class Cache(Net):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 1))

    def forward(self, x: Tensor) -> Any:
        if self.mask.shape[0] < x.shape[1]:
            self.mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return self.down(self.up(self.mask @ x)).sum()


class Renormed(Net):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.up.weight.div_(self.up.weight.norm())
        return self.down(self.up(x)).sum()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Cache, r"mask: the forward changes this buffer"),
        (Renormed, r"up\.weight: the forward changes this parameter"),
    ],
)
def test_what_a_forward_changes_is_refused_by_name(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(seeded(kind), example())
    assert caught.value.remedy


def test_a_changed_buffer_has_the_authors_name_under_a_loss_too() -> None:
    captured = capture(seeded(Counter), {"x": example()}, loss=lambda outputs, batch: outputs)
    assert captured.program.outputs[-1] == "fxpar.buffer.steps"


def test_statistics_that_are_fixed_are_no_obstacle() -> None:
    faithful(seeded(Statistics).eval(), example())


def test_an_input_that_is_changed_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="x: the forward changes this input"):
        capture(net(lambda m, x: m.down(m.up(x.mul_(2))).sum()), {"x": example()})


def test_parametrized_weights() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)).double()
    captured = faithful(layer, {"input": example()}, lambda outputs, batch: outputs.square().sum())
    assert "parametrizations.weight.original0" in table(captured)
