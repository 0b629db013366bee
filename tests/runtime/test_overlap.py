"""The order of compiled graphs: collectives start early, weight gradients run behind them, waits come late."""

from __future__ import annotations

import torch
from torch import fx

from fxpar.plan.cost import Cost
from fxpar.runtime.overlap import Overlap

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
TOKENS, HIDDEN = 4096, 1024


class Backward:
    """A graph like that of a backward, written in the order in which autograd makes it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def give(self, name: str, *shape: int) -> fx.Node:
        """An input."""
        return self._typed(self.graph.placeholder(name), shape)

    def call(self, name: str, target: object, *args: object) -> fx.Node:
        """An operation, whose shape follows from its arguments."""
        node = self.graph.create_node("call_function", target, args, name=name)  # type: ignore[arg-type]
        shapes = [tuple(n.meta["val"].shape) for n in node.all_input_nodes]
        product = target in (aten.mm.default, aten.addmm.default)
        return self._typed(node, (shapes[-2][0], shapes[-1][1]) if product else shapes[0])

    def _typed(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return node

    def linear(self, name: str, grad: fx.Node, x: fx.Node, w: fx.Node, is_summed: bool) -> tuple[fx.Node, fx.Node]:
        """Gradients of a linear's input, summed over the ranks, and of its weight."""
        dx = self.call(f"{name}_dx", aten.mm.default, grad, w)
        turned = self.call(f"{name}_t", aten.t.default, grad)
        turned.meta["val"] = grad.meta["val"].t()
        dw = self.call(f"{name}_dw", aten.mm.default, turned, x)
        if is_summed:
            start = self.call(f"{name}_sum", c10d.all_reduce.default, dx, "sum", "0")
            dx = self.call(f"{name}_wait", c10d.wait_tensor.default, start)
        return dx, dw

    def order(self, *outputs: fx.Node) -> list[str]:
        """Names after the pass; the graph must still be one."""
        self.graph.output(outputs)
        Overlap(Cost(), 2)(self.graph)
        self.graph.lint()
        return [node.name for node in self.graph.nodes if node.op == "call_function"]


def test_a_weight_gradient_runs_behind_the_collective_of_its_layer() -> None:
    b = Backward()
    grad, x, w = b.give("grad", TOKENS, HIDDEN), b.give("x", TOKENS, HIDDEN), b.give("w", HIDDEN, HIDDEN)
    dx, dw = b.linear("up", grad, x, w, True)
    norm = b.call("norm", aten.relu.default, dx)
    assert b.order(norm, dw) == ["up_dx", "up_t", "up_sum", "up_dw", "up_wait", "norm"]


def test_a_row_weight_s_gradient_waits_for_the_next_collective() -> None:
    b = Backward()
    grad, x, w = b.give("grad", TOKENS, HIDDEN), b.give("x", TOKENS, HIDDEN), b.give("w", HIDDEN, HIDDEN)
    h, down = b.linear("down", grad, x, w, False)
    act = b.call("act", aten.relu.default, h)
    dx, up = b.linear("up", act, x, w, True)
    norm = b.call("norm", aten.relu.default, dx)
    wanted = ["down_dx", "down_t", "act", "up_dx", "up_t", "up_sum", "down_dw", "up_wait", "norm", "up_dw"]
    # One product of this size takes the time of the collective: the other would only keep what it reads.
    cost = Cost(bandwidth=1e12, flops=1e14)
    b.graph.output((norm, down, up))
    Overlap(cost, 2)(b.graph)
    assert [node.name for node in b.graph.nodes if node.op == "call_function"] == wanted


def test_what_is_postponed_is_bounded() -> None:
    """Without collectives that take them, the oldest weight gradients run after two milliseconds' worth of others."""
    b = Backward()
    grad, x, w = b.give("grad", TOKENS, HIDDEN), b.give("x", TOKENS, HIDDEN), b.give("w", HIDDEN, HIDDEN)
    gradients = []
    for layer in range(8):
        grad, dw = b.linear(f"l{layer}", grad, x, w, layer == 7)
        gradients.append(dw)
    b.graph.output((grad, *gradients))
    Overlap(Cost(flops=2 * TOKENS * HIDDEN**2 / 0.6e-3), 2)(b.graph)
    names = [node.name for node in b.graph.nodes if node.op == "call_function"]
    # Four products are more than two milliseconds' worth.
    for layer in range(4):
        assert names.index(f"l{layer + 2}_dx") < names.index(f"l{layer}_dw") < names.index(f"l{layer + 4}_dx")


def test_a_graph_without_collectives_keeps_its_order() -> None:
    b = Backward()
    grad, x, w = b.give("grad", TOKENS, HIDDEN), b.give("x", TOKENS, HIDDEN), b.give("w", HIDDEN, HIDDEN)
    dx, dw = b.linear("up", grad, x, w, False)
    assert b.order(dx, dw) == ["up_dx", "up_t", "up_dw"]


def test_a_tied_weight_s_products_are_not_one_with_their_sum() -> None:
    """The head's weight gradient runs early; fused with the embedding's, it would wait for the end of the graph."""
    b = Backward()
    grad, x, w = b.give("grad", TOKENS, HIDDEN), b.give("x", TOKENS, HIDDEN), b.give("w", HIDDEN, HIDDEN)
    turned = b.call("turned", aten.t.default, grad)
    turned.meta["val"] = grad.meta["val"].t()
    start = b.call("total", c10d.all_reduce.default, b.call("dx", aten.mm.default, grad, w), "sum", "0")
    late = b.call("late", aten.relu.default, b.call("wait", c10d.wait_tensor.default, start))
    table = b.call("table", aten.mm.default, turned, late)
    b.call("both", aten.addmm.default, table, turned, x)
    assert b.order(next(n for n in b.graph.nodes if n.name == "both")) == [
        "turned",
        "dx",
        "total",
        "mm_default",
        "wait",
        "late",
        "table",
        "both",
    ]


def test_the_pass_is_named_by_its_code_and_constants() -> None:
    assert Overlap(Cost(), 2).uuid() == Overlap(Cost(), 2).uuid()
    assert Overlap(Cost(), 2).uuid() != Overlap(Cost(), 4).uuid()


def test_an_operation_whose_arguments_are_all_named_is_postponed_too() -> None:
    """Kernels of one's own have no others; one that reads a postponed product waits with it."""
    b = Backward()
    grad, x, w = b.give("grad", TOKENS, HIDDEN), b.give("x", TOKENS, HIDDEN), b.give("w", HIDDEN, HIDDEN)
    dx, dw = b.linear("up", grad, x, w, True)
    named = b.graph.create_node("call_function", aten.relu.default, (), {"self": dw}, name="named")
    named.meta["val"] = dw.meta["val"]
    norm = b.call("norm", aten.relu.default, dx)
    assert b.order(norm, named) == ["up_dx", "up_t", "up_sum", "up_dw", "named", "up_wait", "norm"]
