"""Loops over experts, each of which computes all tokens or those that are its own, as routed rows.

Enters: a graph, and what its values are of a choice. Leaves: the same, in which what a loop adds up is written with the
operators of `fxpar.experts.operators.permute`.
"""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import torch.utils._pytree as pytree
from torch import fx

from fxpar.experts.compiler.choices import SHAPED, argument, aten, is_known, is_zero, plain
from fxpar.experts.compiler.routing_facts import ByExpert, Facts, LoopSum, Picked, slices_of
from fxpar.experts.compiler.row_writer import RowWriter, SortedRows, product_of, viewed_as
from fxpar.ir.program import TensorType, is_tensor, tensor_type
from fxpar.layout.symbolic_sizes import Size, product
from fxpar.rules import bind_arguments


def write_loops(graph: fx.Graph, facts: Facts) -> None:
    """Writes sums of all experts' terms as rows, the last sum first: what it adds to may be another one."""
    for node, total in reversed([(node, fact) for node, fact in facts.items() if isinstance(fact, LoopSum)]):
        if total.is_complete:
            _Loop(graph, node, total, facts).write()


# What nodes of the experts are together: rows, slices by expert, or a node that is the same for all.
_LoopValue: TypeAlias = SortedRows | ByExpert | fx.Node


class _Loop(RowWriter):
    """A loop over experts, being written as rows.

    Of the nodes that do the same for each expert the first one's stands for all. What an expert that a token has not
    chosen makes of it, times 0, is left out, and so is the infinite number that it may be. All terms must be alike but
    for their expert, and nothing random may be in them.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, total: LoopSum, facts: Facts) -> None:
        super().__init__(graph, total.choice, node, node)
        self.total, self.base, self.facts = node, total.base, facts
        self.terms = sorted(total.terms, key=lambda term: term.expert)
        self.known: dict[tuple[fx.Node, ...], _LoopValue | None] = {}

    def write(self) -> None:
        """Rewrites the sum, where all terms are alike."""
        rows = self._together(tuple(term.unweighed for term in self.terms))
        kind = tensor_type(self.total)
        if not isinstance(rows, SortedRows) or len(tensor_type(rows.node).shape) != 2:
            return
        weights = self.emit.view(plain(self.terms[0].weights), [-1, self.k], (self.tokens, self.k))
        summed = self.moe_combine(rows.node, weights, kind.dtype)
        width = kind.shape[-1]
        if product(kind.shape[:-1]) != self.tokens or tensor_type(summed).shape[-1] != width:
            return
        if len(kind.shape) > 2:
            lead = [self.emit.size(self.choice, dim) for dim in range(len(kind.shape) - 1)]
            summed = self.emit.view(summed, [*lead, width], kind.shape)
        if self.base is not None and not is_zero(self.base):
            summed = self.emit.call(aten.add.Tensor, (self.base, summed), kind)
        self.total.replace_all_uses_with(summed)

    def _together(self, nodes: tuple[fx.Node, ...]) -> _LoopValue | None:
        """Returns what nodes of the experts, in their order, are together; None where they are not alike."""
        if nodes not in self.known:
            self.known[nodes] = self._shared(nodes[0]) if len(set(nodes)) == 1 else self._alike(nodes)
        return self.known[nodes]

    def _shared(self, node: fx.Node) -> SortedRows | fx.Node | None:
        """Takes rows of tokens where experts compute all of them; what else is the same for all stays as it is."""
        if not is_tensor(node):
            return None
        shape, lead = tensor_type(node).shape, tensor_type(self.choice).shape[:-1]
        if self.terms[0].where is None and shape[: len(lead)] == lead:
            trail = shape[len(lead) :]
            return SortedRows(self.rows_of(node, trail, self.k), len(lead)) if is_known(trail) else None
        return node if is_known(shape) and self.tokens not in shape else None

    def _alike(self, nodes: tuple[fx.Node, ...]) -> _LoopValue | None:
        first = nodes[0]
        slices = self._slices(nodes)
        if slices is not None:
            return slices
        if any(node.op != "call_function" or node.target is not first.target for node in nodes):
            return None
        if isinstance(self._places(first), fx.Node):
            return self._picked(nodes)
        if first.target in SHAPED:
            source = self._together(tuple(argument(node, 0) for node in nodes))
            is_one_view = isinstance(source, SortedRows) and len({viewed_as(node, source.lead) for node in nodes}) == 1
            return self.written(first, {argument(first, 0): source}) if is_one_view else None  # type: ignore[dict-item]
        values = self._operands(nodes)
        if values is None:
            return None
        rows = {operand: known for operand, known in values.items() if not isinstance(known, fx.Node)}
        if len(values) == 1 and isinstance(taken := next(iter(values.values())), ByExpert):
            return slices_of(taken, first)
        factors = product_of(first, rows)
        if factors is None:
            return self.written(first, rows)
        vector = rows.get(factors.vector)
        is_vector = isinstance(vector, SortedRows) and len(tensor_type(vector.node).shape) == 2
        is_by_row = is_vector and len(tensor_type(first).shape) == vector.lead + 1  # type: ignore[union-attr]
        return self.multiplied(first, vector.node, factors, vector.lead) if is_by_row else None  # type: ignore[union-attr]

    def _operands(self, nodes: tuple[fx.Node, ...]) -> dict[fx.Node, _LoopValue] | None:
        """Returns what the operands of the first node stand for; None where the calls differ in anything else."""
        leaves = [pytree.tree_flatten((node.args, dict(node.kwargs))) for node in nodes]
        if any(spec != leaves[0][1] for _, spec in leaves):
            return None
        by_operand: dict[fx.Node, _LoopValue] = {}
        for peers in zip(*(arguments for arguments, _ in leaves), strict=True):
            if not isinstance(peers[0], fx.Node):
                if any(type(peer) is not type(peers[0]) or peer != peers[0] for peer in peers):
                    return None
                continue
            known = self._together(peers) if all(isinstance(peer, fx.Node) for peer in peers) else None
            if known is None or by_operand.setdefault(peers[0], known) != known:
                return None
        return by_operand

    def _slices(self, nodes: tuple[fx.Node, ...]) -> ByExpert | None:
        """Returns the slices of what all experts have in one, or the parameters that each has for itself, stacked."""
        first = nodes[0]
        if all(node.op == "placeholder" for node in nodes):
            kinds = {tensor_type(node) for node in nodes}
            if len(kinds) != 1 or len(set(nodes)) != len(nodes):
                return None
            (kind,) = kinds
            stacked = TensorType(kind.dtype, (self.experts, *kind.shape))
            source = self.emit.call(aten.stack.default, (list(nodes),), stacked)
            return ByExpert(self.choice, source, 0, kind.dtype)
        places = [_slice_place(node) for node in nodes]
        source, dim = places[0][:2]
        is_each = places == [(source, dim, e) for e in range(self.experts)] and dim == 0
        if not is_each or tensor_type(source).shape[0] != self.experts or not tensor_type(first).is_float:
            return None
        return ByExpert(self.choice, source, 0, tensor_type(first).dtype)

    def _places(self, node: fx.Node) -> Any:
        """Returns what picks the rows of an expert, the tokens that a `where` has found."""
        args = bind_arguments(node) if node.target in (aten.index.Tensor, aten.index_select.default) else {}
        places = args["indices"][-1] if "indices" in args else args.get("index")
        return places if isinstance(self.facts.get(places), Picked) else None

    def _picked(self, nodes: tuple[fx.Node, ...]) -> SortedRows | None:
        """Takes the rows of each expert: `x[tokens]`, or `x[None, tokens]`."""
        sources = set[tuple[fx.Node, int, tuple[Size, ...]]]()
        for node, term in zip(nodes, self.terms, strict=True):
            args, shape = bind_arguments(node), tensor_type(argument(node, 0)).shape
            before = args["indices"][:-1] if "indices" in args else [None] * args["dim"]
            places, count = self.facts.get(self._places(node)), len(before)
            is_own = isinstance(places, Picked) and (places.where, places.part) == (term.where, "tokens")
            if not is_own or any(index is not None for index in before):
                return None
            if shape[:count] != (1,) * count or shape[count] != self.tokens or not is_known(shape[count + 1 :]):
                return None
            sources.add((plain(args["self"]), count, shape[count + 1 :]))
        if len(sources) != 1:
            return None
        ((source, count, trail),) = sources
        return SortedRows(self.rows_of(source, trail, self.k), count + 1)


def _slice_place(node: fx.Node) -> tuple[Any, Any, Any]:
    """Returns of what a node is a slice, along which dimension and at which place."""
    if node.target is aten.select.int:
        args = bind_arguments(node)
        return args["self"], args["dim"], args["index"]
    if node.target is operator.getitem and argument(node, 0).target is aten.unbind.int:
        unbound = bind_arguments(argument(node, 0))
        return unbound["self"], unbound.get("dim", 0), argument(node, 1)
    return None, None, None
