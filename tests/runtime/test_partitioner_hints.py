"""Of a sum that alone is needed again, the sum is kept and not what it is of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import layer_norm

from fxpar.ir.program import output_node
from fxpar.runtime.inductor import keep_sums

ROWS, WIDTH = 64, 32


def behind_a_product(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x + (x @ w + bias), (WIDTH,)).float().square()


def of_one_value(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    y = x @ w
    return layer_norm(y + (y * 3 + bias), (WIDTH,)).float().square()


def product_read_twice(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    y = x @ w
    return layer_norm(x + y, (WIDTH,)).float().square() + (y + bias).float().cos()


def of_half_the_bytes(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x.float() + (x @ w).float(), (WIDTH,)) + bias


def of_what_is_small(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x @ w + bias.expand(ROWS, WIDTH), (WIDTH,)).float().square()


def joint(function: Callable[..., Tensor], symbolic: bool = False) -> torch.fx.GraphModule:
    """A forward, and its backward by autograd, in one graph."""

    def both(primals_0: Tensor, primals_1: Tensor, primals_2: Tensor, tangents_0: Tensor) -> list[Tensor]:
        leaves = [p.detach().requires_grad_() for p in (primals_0, primals_1, primals_2)]
        made = function(*leaves)
        return [made.detach(), *torch.autograd.grad(made, leaves, tangents_0)]

    x, w, bias = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    graph = make_fx(both, tracing_mode="symbolic" if symbolic else "fake")(
        x.bfloat16(), w.bfloat16(), bias.bfloat16(), torch.randn(ROWS, WIDTH)
    )
    for node, name in zip(graph.graph.nodes, ("primals_0", "primals_1", "primals_2", "tangents_0"), strict=False):
        node.target = name
        node._rename(name)
    return graph


def marked(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    keep_sums(graph.graph, "tangents_")
    return [node for node in graph.graph.nodes if node.meta.get("recompute")]


@pytest.mark.parametrize("symbolic", [False, True])
def test_the_sum_is_kept_in_place_of_the_product(symbolic: bool) -> None:
    graph = joint(behind_a_product, symbolic)
    (total,) = marked(graph)
    product = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default)
    if symbolic:
        return
    first, _ = min_cut_rematerialization_partition(graph, None, num_fwd_outputs=1)
    kept = {node.name for node in output_node(first.graph).args[0][1:]}  # type: ignore[union-attr,index]
    assert total.name in kept
    assert product.name not in kept


@pytest.mark.parametrize("function", [of_one_value, product_read_twice, of_half_the_bytes, of_what_is_small])
def test_other_sums_are_left_to_the_cut(function: Callable[..., Tensor]) -> None:
    assert marked(joint(function)) == []
