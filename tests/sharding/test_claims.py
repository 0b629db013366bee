"""What is cut where names and sizes tell nothing, and how much of the products that splits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.cli.models import build
from fxpar.ir.program import output_layouts, tensor_type
from fxpar.plan.plan import Plan
from fxpar.text.printing import placement_text
from fxpar.verification import Verification, expect, verify


def split(model: nn.Module, batch: dict[str, Tensor], tp: int = 2) -> tuple[Verification, dict[str, str]]:
    """The proof, and the placement of each parameter."""
    torch.manual_seed(1)
    found = expect(verify(model.train(), batch, Plan(tp=tp)))
    owned = [(p.fqn, found.program.node(p.node)) for p in found.program.parameters if p.kind == "parameter"]
    return found, {
        name: placement_text(output_layouts(node)[0].on("tp"), tensor_type(node).shape) for name, node in owned
    }


def test_experts_are_products_like_others() -> None:
    """Of a layer of mixtral nearly all is what eight experts do; kept whole, they are no split products."""
    built = build("mixtral,num_hidden_layers=1", None, None, 0)
    whole = {"*.experts.*": "replicate"}
    shares = [
        verify(built.model.train(), built.batch, Plan(tp=2, split=split), loss=built.loss, level="static").split_flops
        for split in ({}, whole)
    ]
    assert shares[0] > 0.9
    assert 0.1 < shares[1] < 0.5


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


@pytest.mark.matrix
@pytest.mark.parametrize("tp", [2, 4])
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
