"""What is said of a program's products, and what is cut where names and sizes tell nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fxpar.analysis.flops import matmul_flops, uncounted
from fxpar.capture import capture
from fxpar.cli.hf import build
from fxpar.layout.symbols import evaluate
from fxpar.plan.plan import Plan
from fxpar.program.program import output_layouts, tensor_type
from fxpar.text.printing import placement_text
from fxpar.verification import Verification, verify


class Calls(nn.Module):
    """One call of its weights and the input, [3, 5, 12]."""

    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList([torch.randn(shape) * 0.3 for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.weights).square().mean()


def alone(x: Tensor, *weights: Tensor) -> Tensor:
    """Attention of three samples with two heads, causal."""
    q, k, v = (functional.linear(x, w).view(3, 5, 2, 8).transpose(1, 2) for w in weights)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


COUNTED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda x, w, b: functional.linear(x, w, b), ((24, 12), (24,))),
    "two linears": (lambda x, w, v: functional.linear(functional.linear(x, w).relu(), v), ((24, 12), (7, 24))),
    "batches": (lambda x, w: x @ w, ((3, 12, 4),)),
    "sum with a product": (lambda x, b, w: torch.addmm(b, x.flatten(0, 1), w), ((24,), (12, 24))),
    "convolution": (lambda x, w, b: functional.conv1d(x.transpose(1, 2), w, b, padding=1), ((8, 12, 3), (8,))),
    "labels": (lambda x, w: torch.einsum("bsd,hde->bhse", x, w), ((2, 12, 8),)),
    "three operands": (lambda x, w, v: torch.einsum("bsd,de,ef->bsf", x, w, v), ((12, 9), (9, 7))),
    "an ellipsis": (lambda x, w: torch.einsum("...d,ed->...e", x, w), ((8, 12),)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2], [1])), ((9, 12),)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    torch.manual_seed(0)
    call, shapes = COUNTED[name]
    model, x = Calls(call, *shapes), torch.randn(3, 5, 12)
    with FlopCounterMode(display=False) as counter:
        model(x)
    program = capture(model, {"x": x}).program
    sizes = {s.name: s.example for s in program.symbols}
    assert sum(evaluate(flops, sizes) for _, flops in matmul_flops(program)) == counter.get_total_flops() > 0
    assert uncounted(program) == {}


def test_attention_counts_two_products() -> None:
    """torch's counter does not know the CPU's kernel: of 3 × 2 heads the 5 × 5 scores over 8, and as much again."""
    program = capture(Calls(alone, (16, 12), (16, 12), (16, 12)), {"x": torch.randn(3, 5, 12)}).program
    counts = [evaluate(flops, {s.name: s.example for s in program.symbols}) for _, flops in matmul_flops(program)]
    assert counts == [2 * 15 * 12 * 16] * 3 + [2 * 6 * 25 * 8 * 2]


def test_products_that_no_formula_knows_are_listed() -> None:
    model = Calls(lambda x, w: x @ torch.linalg.inv(w + 9 * torch.eye(12)), (12, 12))
    assert uncounted(capture(model, {"x": torch.randn(3, 5, 12)}).program) == {"aten.linalg_inv.default": 1}


def split(model: nn.Module, batch: dict[str, Tensor], tp: int = 2) -> tuple[Verification, dict[str, str]]:
    """The proof, and the placement of each parameter."""
    torch.manual_seed(1)
    found = verify(model.train(), batch, Plan(tp=tp))
    assert found.ok, found.values
    owned = [(p.fqn, found.program.node(p.node)) for p in found.program.parameters if p.kind == "parameter"]
    return found, {
        name: placement_text(output_layouts(node)[0].on("tp"), tensor_type(node).shape) for name, node in owned
    }


def test_whole_experts_are_no_split_products() -> None:
    """Of two layers of mixtral attention and head are split: all that eight experts do is done by every rank."""
    built = build("mixtral", None, None, 0)
    found = verify(built.model.train(), built.batch, Plan(tp=2), loss=built.loss)
    experts = [p for p in found.program.parameters if ".experts." in p.fqn]
    assert experts
    assert found.ok
    assert 0.1 < found.split_flops < 0.5


class Labelled(nn.Module):
    """Attention whose matrices are einsums over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(8, 24, 6) * 0.2) for _ in range(3))
        self.out, self.head = nn.Parameter(torch.randn(8, 6, 24) * 0.2), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, 24]."""
        q, k, v = (torch.einsum("bsd,hde->bhse", x, w) for w in (self.query, self.key, self.value))
        weights = torch.einsum("bhse,bhte->bhst", q, k).softmax(-1)
        mixed = torch.einsum("bhst,bhte->bhse", weights, v)
        result: Tensor = self.head(x + torch.einsum("bhse,hed->bsd", mixed, self.out))
        return result.square().mean()


@pytest.mark.parametrize("tp", [2, 4])
def test_matrices_of_einsums_are_cut_between_heads(tp: int) -> None:
    found, layouts = split(Labelled(), {"x": torch.randn(3, 7, 24)}, tp)
    assert [layouts[name] for name in ("query", "key", "value", "out")] == ["S(0)"] * 4
    assert found.split_flops > 0.95


class Fused(nn.Module):
    """[q | k | v | gate | up] in one matrix: three parts of 48 and two of 80."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out, self.down = nn.Linear(24, 304), nn.Linear(48, 24), nn.Linear(80, 24)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, 24]."""
        b, s, _ = x.shape
        q, k, v, gate, up = self.fused(x).split([48, 48, 48, 80, 80], -1)
        q, k, v = (t.view(b, s, 4, 12).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, 48)
        result: Tensor = x + self.out(mixed) + self.down(functional.silu(gate) * up)
        return result.square().mean()


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_a_fused_matrix_is_cut_in_each_of_its_parts(tp: int) -> None:
    found, layouts = split(Fused(), {"x": torch.randn(3, 7, 24)}, tp)
    assert layouts["fused.weight"] == "S(0: 3 x 48 | 2 x 80)"
    assert found.split_flops > 0.95


class Queries(nn.Module):
    """Six learned queries look at an image of nine patches: both numbers are fixed, and one is that of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.places = nn.Parameter(torch.randn(6, 24)), nn.Parameter(torch.randn(1, 9, 24))
        self.query, self.key, self.value, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.up, self.down = nn.Linear(24, 36), nn.Linear(36, 24)

    def forward(self, x: Tensor) -> Tensor:
        """[b, 9, 24]."""
        x = x + self.places
        seen = self.queries.expand(x.shape[0], -1, -1)
        q, k, v = (
            layer(value).unflatten(-1, (6, 4)).transpose(1, 2)
            for layer, value in ((self.query, seen), (self.key, x), (self.value, x))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = seen + self.out(mixed)
        result: Tensor = hidden + self.down(self.up(hidden).relu())
        return result.square().mean()


@pytest.mark.parametrize("tp", [2, 3])
def test_tokens_of_a_fixed_number_stay_together(tp: int) -> None:
    found, layouts = split(Queries(), {"x": torch.randn(3, 9, 24)}, tp)
    assert layouts["queries"] == layouts["places"] == "I"
    assert [layouts[f"{name}.weight"] for name in ("query", "key", "value", "up")] == ["S(0)"] * 4
    assert [layouts[f"{name}.weight"] for name in ("out", "down")] == ["S(1)"] * 2
    assert found.split_flops > 0.95
