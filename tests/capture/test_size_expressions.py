"""Symbolic sizes: what varies, what is pinned, what is shared, and what was assumed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import Captured, capture
from fxpar.capture.size_expressions import SizeError
from fxpar.ir.program import ScalarType, TensorType, note
from fxpar.ir.symbols import Symbol
from fxpar.layout.symbolic_sizes import symbol
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from fxpar.verification import expect, verify
from tests.capture.models import Net, close, eager, example, faithful, net, run, seeded
from tests.products import few
from tests.zoo import CASES, VOCABULARY


def symbols(captured: Captured) -> dict[str, tuple[str, int]]:
    return {s.name: (s.path, s.dim) for s in captured.program.symbols}


class Attention(nn.Module):
    """Positions, a causal mask and heads: sizes in views, factories and arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.positions = nn.Embedding(32, 4)

    def forward(self, x: Tensor) -> Any:
        b, s, h = x.shape
        x = x + self.positions(torch.arange(s))
        q, k, v = (t.view(b, s, 2, h // 2).transpose(1, 2) for t in self.qkv(x).split(h, -1))
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        weights = (q @ k.transpose(2, 3)).masked_fill(~mask, float("-inf")).softmax(-1)
        y = self.out((weights @ v).transpose(1, 2).reshape(b, s, h))
        return y.square().sum() / (b * s)


def test_batch_and_sequence_vary_down_to_a_batch_of_one() -> None:
    others = [example(*shape) for shape in ((1, 5, 4), (7, 5, 4), (3, 11, 4), (1, 2, 4))]
    captured = faithful(seeded(Attention), example(), None, *others)
    assert symbols(captured) == {"b": ("0", 0), "s": ("0", 1)}
    assert captured.program.symbols[0] == Symbol("b", "0", 0, 3)


@pytest.mark.parametrize("name", few(("nanogpt", "llama", "bert"), ["nanogpt"]))
def test_language_models_run_at_other_sizes(name: str) -> None:
    case = CASES[name]
    model = case.model().eval()
    captured = capture(model, case.example(), loss=case.loss)
    generator = torch.Generator().manual_seed(5)
    for b, s in ((1, 16), (2, 9)):
        batch = {k: torch.randint(0, VOCABULARY, (b, s), generator=generator) for k in case.example()}
        wanted, found = eager(captured, model, batch), run(captured, model, batch)
        torch.testing.assert_close(dict(found.outputs), dict(wanted.outputs), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dict(found.gradients), dict(wanted.gradients), rtol=1e-3, atol=1e-6)


class TwoInputs(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.down(self.up(x)).sum() + y.square().sum()


def test_inputs_of_equal_sizes_share_symbols() -> None:
    captured = capture(seeded(TwoInputs), {"x": example(), "y": example(3, 5, 9)})
    assert symbols(captured) == {"b": ("x", 0), "s": ("x", 1), "d2": ("y", 2)}
    shapes = {i.path: i.type.shape for i in captured.program.inputs}
    assert shapes["x"][:2] == shapes["y"][:2] == (symbol("b"), symbol("s"))


def test_inputs_of_other_sizes_have_symbols_of_their_own() -> None:
    captured = faithful(seeded(TwoInputs), {"x": example(), "y": example(2, 8, 9)})
    assert symbols(captured) == {"b": ("x", 0), "s": ("x", 1), "b2": ("y", 0), "s2": ("y", 1), "d2": ("y", 2)}


class Shifted(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.down(self.up(x[:, 1:]) * y).sum()


def test_a_size_that_follows_from_another_is_written_in_it() -> None:
    batch = {"x": example(), "y": example(3, 4, 6)}
    captured = faithful(seeded(Shifted), batch, None, {"x": example(2, 9, 4), "y": example(2, 8, 6)})
    x = next(i for i in captured.program.inputs if i.path == "x")
    assert x.type.shape[1] == symbol("s") + 1


def test_sizes_of_one_stay_one() -> None:
    captured = capture(seeded(TwoInputs), {"x": example(), "y": example(3, 1, 4)})
    y = next(i for i in captured.program.inputs if i.path == "y")
    assert y.type.shape[1] == 1


class Layers(Net):
    def forward(self, x: Tensor) -> Any:
        state: Any = 0
        for step in range(x.shape[1]):
            state = self.up(x[:, step]) + state
        return self.down(state).sum()


def test_a_loop_over_a_dimension_pins_it() -> None:
    captured = faithful(seeded(Layers), example(), None, example(4, 5, 4))
    assert symbols(captured) == {"b": ("0", 0)}
    assert captured.program.inputs[0].type.shape == (symbol("b"), 5, 4)


class Images(nn.Module):
    """Patches of an image: sizes that are no polynomials in its height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 4, 4, 4), nn.Linear(4, 2)

    def forward(self, pixels: Tensor) -> Any:
        return self.head(self.patches(pixels).flatten(2).transpose(1, 2)).sum()


def test_images_have_one_size_where_sizes_are_no_polynomials() -> None:
    captured = faithful(seeded(Images), example(3, 3, 8, 12), None, example(1, 3, 8, 12))
    assert captured.program.inputs[0].type.shape == (symbol("b"), 3, 8, 12)


class Folded(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h.reshape(h.shape[0], h.shape[1] // 2, 2, 6)).sum()


def test_a_sequence_is_pinned_where_its_parts_are_no_polynomials() -> None:
    captured = faithful(seeded(Folded), example(3, 8, 4))
    assert captured.program.inputs[0].type.shape == (symbol("b"), 8, 4)


class Branches(Net):
    """Branches on sizes."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        if x.shape[1] > 4:
            h = h * 2
        if x.shape[0] != 7:
            h = h.sin()
        return self.down(h).sum()


def test_branches_on_sizes_are_conditions_of_the_call() -> None:
    model = seeded(Branches)
    captured = faithful(model, example(), None, example(2, 9, 4))
    assert set(captured.spec.conditions) == {symbol("s") > 4, sympy.Ne(symbol("b"), 7)}
    short = example(3, 3, 4)
    with pytest.raises(AssertionError):  # what the condition keeps from happening
        close(eager(captured, model, short), run(captured, model, short))


def test_a_model_without_branches_has_no_conditions() -> None:
    assert capture(net(lambda m, x: m.down(m.up(x)).sum()), example()).spec.conditions == ()


def test_integers_in_the_graph_are_sizes() -> None:
    captured = capture(seeded(Attention), example())
    values = [note(n).type for n in captured.program.graph.nodes if str(n.target) == "aten.sym_size.int"]
    assert values
    assert {str(v) for v in values if isinstance(v, ScalarType)} <= {"b", "s"}
    assert len(values) == sum(isinstance(v, ScalarType) for v in values)


def test_products_of_sizes_are_polynomials() -> None:
    captured = capture(net(lambda m, x: m.down(m.up(x).flatten(0, 1)).sum()), example())
    kinds = [note(n).type for n in captured.program.graph.nodes if str(n.target) == "aten.linear.default"]
    assert isinstance(kinds[1], TensorType)
    assert kinds[1].shape == (symbol("b") * symbol("s"), 4)


def test_losses_without_reduction_keep_their_symbolic_shape() -> None:
    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        flat = functional.cross_entropy(outputs.view(-1, 4), labels.view(-1), reduction="none")
        rows = functional.nll_loss(outputs.transpose(1, 2), labels, reduction="none").mean(1)
        return flat.sum() / (labels != 1).sum() + (flat.view(labels.shape).mean(1) * rows).sum()

    def batch(*shape: int) -> dict[str, Tensor]:
        labels = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(3))
        return {"x": example(*shape, 4), "labels": labels}

    operator = torch.ops.aten.nll_loss.default
    before = torch._decomp.decomposition_table[operator]
    faithful(net(lambda m, x: m.down(m.up(x))), batch(3, 5), loss, batch(2, 7), batch(5, 3))
    assert torch._decomp.decomposition_table[operator] is before


class Numbered(nn.Module):
    """Its author wrote down how many tokens a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(31, 12), nn.Linear(12, 24), nn.Linear(24, 31)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """[3, 16] twice."""
        hidden = self.up(self.words(ids)).reshape(48, 24).relu()
        return functional.cross_entropy(self.down(hidden), labels.reshape(48))


def test_numbers_of_tokens_that_the_author_wrote_are_those_of_the_program() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 31, (3, 16))
    proof = expect(verify(Numbered(), {"ids": ids, "labels": ids.roll(1, 1)}, Plan(tp=2)))
    assert proof.program.symbols == ()


class Undecided(nn.Module):
    """A condition on the length that sympy cannot solve while it is a symbol, as torch asks it behind the scenes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[b, 3, 32]."""
        if isinstance(x.shape[-1], torch.SymInt):
            size = x.shape[-1].node.expr
            sympy.reduce_inequalities(sympy.Eq(32 * sympy.floor(size / 32) - 32, 0), size)
        result: Tensor = self.head(x)
        return result.square().mean()


def test_conditions_on_sizes_that_sympy_cannot_solve_pin_them() -> None:
    captured = capture(Undecided(), {"x": torch.randn(3, 3, 32)})
    assert {(s.path, s.dim) for s in captured.program.symbols} == {("x", 0), ("x", 1)}
    assert captured.how == "export"


class Chunked(nn.Module):
    """A loss in parts of eight tokens, however many those are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.words(x).flatten(0, 1).split(8), x.flatten(0, 1).split(8), strict=True)
        losses = [functional.cross_entropy(self.head(h), t, reduction="sum") for h, t in parts]
        return torch.stack(losses).sum() / x.numel()


def test_parts_whose_number_depends_on_a_size_pin_it() -> None:
    batch = {"x": torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(0))}
    found = expect(verify(seeded(Chunked), batch, Plan(tp=2)))
    assert not found.program.symbols


# Floating numbers of sizes: Python's in the model, tensors in the program, the same values at every size.


Forward = Callable[[Any, Tensor], Tensor]
NUMBERS: dict[str, Forward] = {
    "one over the rows": lambda m, x: m.up(x).sum() * (1.0 / x.shape[0]),
    "over a root": lambda m, x: (m.up(x) / x.shape[0] ** 0.5).square().sum(),
    "over math's root": lambda m, x: (m.up(x) / math.sqrt(x.shape[1])).square().sum(),
    "a negative power": lambda m, x: (m.up(x) * x.shape[1] ** -0.5).square().sum(),
    "half": lambda m, x: m.up(x).sum() / (x.shape[0] / 2),
    "a number cast": lambda m, x: m.up(x).sum() / torch.sym_float(x.shape[0]),
    "all elements": lambda m, x: m.up(x).square().sum() / (0.5 * x.numel()),
    "arithmetic": lambda m, x: (m.up(x) * (7 - abs(-(x.shape[1] / 3)) + (x.shape[0] / 3) % 2.0 - x.shape[0])).sum(),
    "a base": lambda m, x: (m.up(x) * 0.5 ** (x.shape[1] / 2)).sum(),
    "the larger": lambda m, x: m.up(x).sum() / max(x.shape[0] / 2, 0.5) + m.up(x).sum() * min(x.shape[0] / 2, 9.5),
    "added": lambda m, x: (m.up(x) + 1 / x.shape[0] - x.shape[1] / 3).square().sum(),
    "taken from": lambda m, x: (1 / x.shape[0] - m.up(x)).square().sum(),
    "divided by values": lambda m, x: ((x.shape[0] / 2) / m.up(x).exp()).sum(),
    "an exponent": lambda m, x: (m.up(x).abs() ** (1 / x.shape[1])).sum(),
    "powers of it": lambda m, x: ((x.shape[1] / 2) ** m.up(x)).sum(),
    "a remainder": lambda m, x: m.up(x).remainder(x.shape[1] / 7).sum(),
    "bounds": lambda m, x: m.up(x).clamp(-1 / x.shape[0], 0.5).sum() + m.up(x).clamp_max(1 / x.shape[0]).sum(),
    "a fill": lambda m, x: m.up(x).masked_fill(m.up(x) > 0, 1 / x.shape[0]).square().sum(),
    "a choice": lambda m, x: torch.where(m.up(x) > 0, m.up(x), 1 / x.shape[0]).square().sum(),
    "a threshold": lambda m, x: torch.where(m.up(x) > 1 / x.shape[0], m.up(x), 0).sum(),
    "a scale of a sum": lambda m, x: torch.add(m.up(x), m.up(x).exp(), alpha=1 / x.shape[0]).sum(),
    "filled": lambda m, x: (torch.full((6,), 1 / x.shape[0], dtype=x.dtype) * m.up(x)).sum(),
    "filled alike": lambda m, x: (torch.full_like(m.up(x), x.shape[1] / 3) * m.up(x)).sum(),
    "a tensor": lambda m, x: (torch.tensor(1 / x.shape[0]) * m.up(x)).sum(),
    "integers meet it": lambda m, x: (torch.arange(6) * (1 / x.shape[0]) * m.up(x)).sum(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_sizes_are_those_of_every_size(name: str) -> None:
    others = [example(*shape) for shape in ((7, 5, 4), (2, 3, 4), (4, 9, 4))]
    captured = faithful(net(NUMBERS[name]), example(), None, *others)
    assert [s.name for s in captured.program.symbols] == ["b", "s"]
    kinds = [note(n).type for n in captured.program.graph.nodes if n.op == "call_function" and n.users]
    assert all(isinstance(kind, (TensorType, ScalarType)) for kind in kinds)


def test_a_number_is_a_tensor_in_double_precision_until_it_meets_another() -> None:
    captured = capture(Net(NUMBERS["half"]).float(), example().float())
    lines = [line.split("  #")[0] for line in print_program(captured.program).splitlines()]
    assert lines[-6:] == [
        "%sum_1 = aten.sum.default(%linear) : f32[]",
        "%truediv_size = aten.scalar_tensor.default(%sym_size_int, dtype=dtype.f64) : f64[]",
        "%truediv = aten.div.Tensor(%truediv_size, 2) : f64[]",
        "%div_number = aten._to_copy.default(%truediv, dtype=dtype.f32) : f32[]",
        "%div = aten.div.Tensor(%sum_1, %div_number) : f32[]",
        "return output=%div",
    ]


TYPES = (torch.float32, torch.bfloat16, torch.float16)


OF_ALL_TYPES = [name for name in NUMBERS if name not in ("a tensor", "a remainder")]
# Numbers have a test of all of them in float64.
EVERY_TIME = [*zip(OF_ALL_TYPES[::3], itertools.cycle(TYPES), strict=False)]


@pytest.mark.parametrize(("name", "dtype"), few(itertools.product(OF_ALL_TYPES, TYPES), EVERY_TIME))
def test_numbers_leave_element_types_and_roundings_as_they_are(name: str, dtype: torch.dtype) -> None:
    model, batch = net(NUMBERS[name]).to(dtype), example().to(dtype)
    captured = capture(model, batch)
    wanted, found = eager(captured, model, batch), run(captured, model, batch)
    # One rounding more or less where the backward multiplies by what the forward had before it was rounded.
    torch.testing.assert_close(dict(found.outputs), dict(wanted.outputs), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    for key, gradient in wanted.gradients.items():
        unit = 4 * torch.finfo(dtype).eps * float(gradient.abs().max())
        torch.testing.assert_close(found.gradients[key], gradient, rtol=0.0, atol=unit)


ALONE: dict[str, Forward] = {
    "steps": lambda m, x: (torch.linspace(0, 1 / x.shape[1], 6, dtype=x.dtype) * m.up(x)).sum(),
    "a size": lambda m, x: m.up(x)[:, : round(x.shape[1] / 2)].sum(),
    "an integer": lambda m, x: (torch.full((6,), x.shape[1] / 2, dtype=torch.long) * m.up(x)).sum(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_takes_numbers_alone_fixes_the_size(name: str) -> None:
    captured = faithful(net(ALONE[name]), example(), None, example(2, 5, 4))
    assert [s.name for s in captured.program.symbols] == ["b"]


def test_what_fixes_the_rows_is_refused_where_ranks_share_them_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        scaled: Tensor = torch.linspace(0, 1 / x.shape[0], 6, dtype=x.dtype) * m.up(x)
        return scaled.sum()

    reason = r"takes %truediv, a floating number that depends on sizes, as no tensor"
    with pytest.raises(SizeError, match=rf"%linspace \(.*test_size_expressions.py:\d+\): {reason}"):
        capture(net(forward), example(4, 5, 4), Plan(dp=2))
    faithful(net(forward), example())
