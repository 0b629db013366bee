"""The order of a compiled graph: collectives travel while weight gradients are computed.

Enters: a graph of aten operations with functional collectives, as torch.compile hands it to its last passes. Leaves:
the same graph in another order.

A forward has little that does not wait for its collectives. A backward has: the gradient of a weight is needed by
nobody but the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fxpar.analysis import ring
from fxpar.plan.cost import Cost

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default
# The second matrix is their last argument.
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default})
_COLLECTIVES: Mapping[Any, str] = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_to_all_single.default: "all_to_all",
}
# Seconds of postponed work that may wait for a collective: what it reads stays in memory for so long.
_BACKLOG = 2e-3


class Overlap(CustomGraphPass):
    """Reorders a graph in place; values stay equal.

    Before::

        %dx = mm(%dy, %w)
        %dw = mm(%x, %dy)
        %sum = all_reduce(%dx)
        %wait = wait_tensor(%sum)

    After::

        %dx = mm(%dy, %w)
        %sum = all_reduce(%dx)
        %dw = mm(%x, %dy)
        %wait = wait_tensor(%sum)

    Algorithm: nodes keep their order but for waits, each of which goes before the first node that needs it, and for
    products to which no collective listens (weight gradients) with what follows from them. Those are postponed, first
    in first out: as many of them follow a collective's start as take its time, by FLOPs and bytes; of what is postponed
    beyond two milliseconds, the oldest run at once.

    Args:
        cost: rates of matrix products and of the ring.
        ranks: of the axis.
    """

    def __init__(self, cost: Cost, ranks: int) -> None:
        self.cost, self.ranks = cost, ranks

    def uuid(self) -> Any:
        """Names this code and its constants in torch.compile's cache."""
        return get_hash_for_files((str(Path(__file__)), str(ring.__file__)), repr((self.cost, self.ranks)))

    def __call__(self, graph: fx.Graph) -> None:
        """Reorders `graph`; one without collectives keeps its order."""
        for node in list(graph.nodes):
            if node.target is _aten.addmm.default:
                _separate(graph, node)
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        if not any(node.target in _COLLECTIVES for node in nodes):
            return
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for node in self.order(nodes):
            last.append(node)
            last = node

    def order(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes of a graph besides its inputs and outputs, in the order in which they shall run."""
        listened = _listened(nodes)
        placed: dict[fx.Node, None] = {}
        postponed: dict[fx.Node, float] = {}

        def place(node: fx.Node) -> None:
            stack = [node]
            while stack:
                missing = [n for n in stack[-1].all_input_nodes if n.op != "placeholder" and n not in placed]
                if missing:
                    stack += missing
                else:
                    placed[stack.pop()] = None

        def run_postponed(seconds: float) -> None:
            while postponed and seconds > 0:
                node = next(iter(postponed))
                seconds -= postponed.pop(node)
                place(node)

        for node in nodes:
            if node.target is _WAIT or node in placed:
                continue
            if node not in listened and (_is_product(node) or any(n in postponed for n in node.all_input_nodes)):
                postponed[node] = self._seconds(node)
                run_postponed(sum(postponed.values()) - _BACKLOG)
            else:
                place(node)
                if node.target in _COLLECTIVES:
                    run_postponed(self._seconds(node))
        for node in (*postponed, *nodes):
            place(node)
        return list(placed)

    def _seconds(self, node: fx.Node) -> float:
        """Of a collective or of a matrix product; anything else takes next to nothing."""
        if node.target in _COLLECTIVES:
            op = _COLLECTIVES[node.target]
            operand: Tensor = node.all_input_nodes[0].meta["val"]
            whole = operand.numel() * operand.element_size() * (self.ranks if op == "all_gather" else 1)
            return self.cost.latency + whole * ring.sent(op, self.ranks) / self.cost.bandwidth
        if not _is_product(node):
            return 0.0
        summed: int = node.args[-1].meta["val"].shape[-2]  # type: ignore[union-attr]
        return 2.0 * int(node.meta["val"].numel()) * summed / self.cost.flops


def _separate(graph: fx.Graph, node: fx.Node) -> None:
    """A product and a sum in place of both in one, where the summand is no bias.

    It is the gradient of a weight that is used twice, an embedding table and an output head: the head's product would
    wait for the table's, and the gradient of the logits with it.
    """
    summand, a, b = node.all_input_nodes[0], *node.args[1:]
    if summand.meta["val"].shape != node.meta["val"].shape or node.kwargs:
        return
    known = {a, b}
    before = next(n for n in reversed(graph.nodes) if n in known or n.op == "placeholder").next
    with graph.inserting_before(before):
        product = graph.call_function(_aten.mm.default, (a, b))
        product.meta = {"val": node.meta["val"]}
    node.target, node.args = _aten.add.Tensor, (product, summand)


def _is_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS


def _listened(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Collectives and what they need."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.target in _COLLECTIVES or any(user in found for user in node.users):
            found.add(node)
    return found
