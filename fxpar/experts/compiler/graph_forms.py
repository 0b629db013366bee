"""Layers of experts as models write them, as routed rows: rows that a model sorts itself, loops, and pairs.

Enters: a graph, and what its values are of a choice. Leaves: the same, in which what is computed of routed rows is
written with the operators on them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch.utils._pytree as pytree
from torch import fx

from fxpar.experts.compiler.choices import (
    SHAPED,
    ChosenRows,
    argument,
    aten,
    chosen_of,
    fxp,
    is_known,
    is_zero,
    plain,
    untransposed,
)
from fxpar.experts.compiler.routing_facts import (
    ByExpert,
    Facts,
    IndexKind,
    LoopSum,
    PairWeights,
    Picked,
    RoutingIndex,
    kind_of,
    slices_of,
)
from fxpar.experts.compiler.row_writer import Product, RowWriter, SortedRows, product_of, viewed_as, weighed_sums
from fxpar.ir.program import TensorType, is_tensor, operands, tensor_type
from fxpar.layout.symbolic_sizes import Size, product
from fxpar.rules import bind_arguments

# Experts that compute each pair of token and expert with its own matrices.


def write_pairs(graph: fx.Graph, facts: Facts) -> None:
    """Writes products with a matrix for each pair as grouped products of rows."""
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        factors = product_of(node, facts)
        if factors is not None:
            first.setdefault(factors.matrix.choice, node)
    for choice, node in first.items():
        _Pairs(graph, choice, node, facts).write()


class _Pairs(RowWriter):
    """The pairs of one choice, being written as rows.

    Each step is an identity. A value by pair is its rows put back in order. A product with a pair's matrix is the
    grouped product of its row. What is done to each pair by itself commutes with the order. So whatever else reads
    a value by pair, a draw of random bits too, reads the rows put back. What is not known stays as it is.
    """

    def __init__(self, graph: fx.Graph, choice: fx.Node, first: fx.Node, facts: Facts) -> None:
        super().__init__(graph, choice, choice.next, first)
        self.facts = {node: fact for node, fact in facts.items() if fact.choice is choice}
        self.sorted: dict[fx.Node, SortedRows] = {}
        self.put_back: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        """Goes through the graph; what becomes rows is dead where it stood, unless something else reads it."""
        passed = False
        for node in list(self.graph.nodes):
            passed = passed or node is self.choice
            if not passed:
                continue
            if node.op != "call_function":
                self.emit.stand(node)
            else:
                self.emit.like(node)
                if self._write(node):
                    continue
            node.args = fx.map_arg(node.args, self._in_order)
            node.kwargs = fx.map_arg(node.kwargs, self._in_order)

    def _write(self, node: fx.Node) -> bool:
        """Writes a node of pairs; returns whether nothing that it read is to be put back."""
        if kind_of(self.facts.get(node)) is IndexKind.CHOICE or node is self.chosen:
            return True
        factors = product_of(node, self.facts)
        rows = None if factors is None else self._product(node, factors)
        if rows is None and not any(operand in self.sorted for operand in operands(node)):
            return True
        total = self._total(node) if rows is None else None
        if total is not None:
            node.replace_all_uses_with(total)
            return True
        if rows is None:
            rows = self.written(node, self.sorted)
        if rows is None or (is_tensor(node) and not self._can_shape(tensor_type(node).shape)):
            return False
        self.sorted[node] = rows
        return True

    def _in_order(self, node: fx.Node) -> fx.Node:
        """Puts a value by pair back in order."""
        rows = self.sorted.get(node)
        if rows is None or not is_tensor(node):
            return node
        if node not in self.put_back:
            width = product(tensor_type(rows.node).shape[1:])
            flat = self.emit.view(rows.node, [-1, width], (self.rows, width))
            self.put_back[node] = self._shaped(self.put(flat, self.rows, 1), tensor_type(node).shape)
        return self.put_back[node]

    def _shaped(self, flat: fx.Node, shape: tuple[Size, ...]) -> fx.Node:
        """Gives tokens or pairs the author's shape."""
        if sum(not isinstance(size, int) for size in shape) < 2:
            return self.emit.view(flat, [size if isinstance(size, int) else -1 for size in shape], shape)
        lead = tensor_type(self.choice).shape
        known = {size: self.emit.size(self.choice, dim) for dim, size in enumerate(lead) if size in shape}
        return self.emit.view(flat, [known.get(size, size) for size in shape], shape)

    def _can_shape(self, shape: tuple[Size, ...]) -> bool:
        """Returns whether each of several sizes that are no numbers is one of the choice."""
        symbolic = [size for size in shape if not isinstance(size, int)]
        return len(symbolic) < 2 or all(size in tensor_type(self.choice).shape for size in symbolic)

    def aligned(self, operand: fx.Node, shape: tuple[Size, ...], lead: int) -> fx.Node | None:
        """Returns an operand as it is broadcast to rows; its own rows, where it has one for each pair or token."""
        same = super().aligned(operand, shape, lead)
        is_whole = len(tensor_type(operand).shape) == len(shape)
        return self._rows(operand, shape[:lead]) if same is None and is_whole else same

    def _rows(self, value: fx.Node, lead: tuple[Size, ...]) -> fx.Node | None:
        """Takes the rows of a value with those leading dimensions, or with 1 for K: the same for a token's pairs."""
        rows, shape = self.sorted.get(value), tensor_type(value).shape
        if rows is not None:
            return rows.node if shape[: rows.lead] == lead else None
        lead_sizes, trail = shape[: len(lead)], shape[len(lead) :]
        if len(shape) < len(lead) or not is_known(trail):
            return None
        fact = self.facts.get(value)
        if isinstance(fact, ByExpert) and lead_sizes == lead and not fact.turned:
            return self.spread_slices(fact, trail)
        if lead_sizes == lead:
            tokens = self._repeated(plain(value), product(trail))
            return self.rows_of(value, trail, 1) if tokens is None else self.rows_of(tokens, trail, self.k)
        is_by_token = len(lead) > 1 and lead[-1] == self.k and lead_sizes == (*lead[:-1], 1)
        return self.rows_of(value, trail, self.k) if is_by_token else None

    def _repeated(self, value: fx.Node, width: Size) -> fx.Node | None:
        """Returns the tokens [T, width] that a value by pair repeats for each of their experts."""
        if value.target not in (aten.repeat_interleave.self_int, aten.expand.default):
            return None
        source = argument(value, 0)
        sizes, shape = tensor_type(source).shape, tensor_type(value).shape
        if len(sizes) != len(shape):
            return None
        repeated = [dim for dim, size in enumerate(sizes) if size != shape[dim]]
        if len(repeated) != 1:
            return None
        before = product(sizes[: repeated[0] + (value.target is aten.repeat_interleave.self_int)])
        return source if before == self.tokens and product(sizes) == product((before, width)) else None

    def _product(self, node: fx.Node, factors: Product) -> SortedRows | None:
        """Writes a product with a matrix for each pair."""
        vector, lead = factors.vector, factors.matrix.lead
        if not factors.of_tokens:
            rows = self._rows(vector, tensor_type(node).shape[:lead])
        else:
            is_width = is_known(tensor_type(vector).shape[-1:]) and vector not in self.sorted
            rows = self.rows_of(vector, tensor_type(vector).shape[-1:], self.k) if is_width else None
        return None if rows is None else self.multiplied(node, rows, factors, lead)

    def _total(self, node: fx.Node) -> fx.Node | None:
        """Adds up the pairs of each token: [T, K, h], as they are or times [T, K]."""
        args = bind_arguments(node)
        sources: list[tuple[fx.Node, fx.Node | None]] = list(weighed_sums(node))
        if node.target is aten.sum.dim_IntList:
            sources = [(args["self"], None)]
        for source, weights in sources:
            rows, kind = self.sorted.get(source), tensor_type(source)
            if rows is None or rows.lead < 2 or kind.shape[rows.lead - 1] != self.k or weights in self.sorted:
                continue
            if weights is None:
                is_total = [int(dim) % len(kind.shape) for dim in args["dim"] or ()] == [rows.lead - 1]
            else:
                is_total = rows.lead == len(kind.shape) - 1 and tensor_type(weights).dtype == kind.dtype
            if is_total and tensor_type(node).dtype == kind.dtype:
                return self._shaped(self._added(rows, weights, kind), tensor_type(node).shape)
        return None

    def _added(self, rows: SortedRows, weights: fx.Node | None, kind: TensorType) -> fx.Node:
        if weights is not None:
            by_token = self.emit.view(plain(weights), [-1, self.k], (self.tokens, self.k))
            return self.moe_combine(rows.node, by_token, kind.dtype)
        flat = self.with_trail(rows.node, (product(kind.shape[rows.lead :]),))
        weighed = self.weighed(flat)
        return self.put(flat, self.tokens, self.k) if weighed is None else self.moe_combine(*weighed, kind.dtype)


# Loops over experts, each of which computes all tokens or those that are its own.


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
    chosen makes of it, times 0, is left out. So is the infinite number that it may be. All terms must be alike but
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


def write_sorted(graph: fx.Graph, facts: Facts) -> None:
    """Rewrites grouped products of rows that stand sorted, and what takes these rows and adds them up.

    Before::

        %order = aten.argsort.stable(%flat) : i64[2*b*s]
        %tokens = aten.floor_divide.default(%order, 2) : i64[2*b*s]
        %rows = aten.index.Tensor(%x, [%tokens]) : f32[2*b*s, 64]
        %sizes = fxpar.group_sizes.default(%ends) : i64[8]
        %y = fxpar.grouped_linear.default(%rows, %w, %sizes, False) : f32[2*b*s, 128]
        %weighed = aten.mul.Tensor(%y, %weight_of_row) : f32[2*b*s, 128]
        %sum = aten.index_add.default(%zeros, 0, %tokens, %weighed) : f32[b*s, 128]

    After, as `recognize_experts` shows it, products are of the rows and counts of `fxpar.sort_by_expert`.
    """
    sorted_choices: dict[fx.Node, None] = {}
    for node in graph.find_nodes(op="call_function", target=fxp.grouped_linear.default):
        sizes = argument(node, 2)
        match fact := facts.get(sizes):
            case RoutingIndex(kind=IndexKind.SIZES) if tensor_type(sizes).shape[0] == chosen_of(fact.choice):
                sorted_choices[fact.choice] = None
    for choice in sorted_choices:
        _AuthorsRows(graph, choice, facts).write()


class _AuthorsRows(ChosenRows):
    """The rows of one choice that a model has sorted itself, which stand as those of fxpar do."""

    def __init__(self, graph: fx.Graph, choice: fx.Node, facts: Facts) -> None:
        self.facts = {node: fact for node, fact in facts.items() if fact.choice is choice}
        first = next(
            node
            for node, fact in self.facts.items()
            if isinstance(fact, PairWeights) or kind_of(fact) not in (None, IndexKind.CHOICE)
        )
        super().__init__(graph, choice, first, first)

    def write(self) -> None:
        """Rewrites what takes rows, computes with them and adds them up.

        What else reads the author's order reads this one: within an expert that of an unstable sort may differ.
        """
        for node in list(self.graph.nodes):
            if node.target is fxp.grouped_linear.default and self.kind(argument(node, 2)) is IndexKind.SIZES:
                rows, weight, _, transposed = node.args
                matrices, is_turned = untransposed(weight)
                node.args = (rows, matrices, self.counts, transposed != is_turned)
            moved = self._moved(node) if node.target in _MOVES else None
            if moved is not None:
                node.replace_all_uses_with(moved)
                self.graph.erase_node(node)
        for node in list(self.graph.nodes):
            if self.kind(node) is IndexKind.ORDER and node.target is not aten._to_copy.default:
                node.replace_all_uses_with(self.order)

    def kind(self, places: Any) -> IndexKind | None:
        """Returns what places say of the choice."""
        return kind_of(self.facts.get(places))

    def _moved(self, node: fx.Node) -> fx.Node | None:
        """Writes what takes rows at places, or adds to or replaces those at places."""
        (name, added), args = _MOVES[node.target], bind_arguments(node)
        base, (places, *more) = args["self"], args[name] if name == "indices" else [args[name]]
        shape = tensor_type(base).shape
        if more or args.get("dim", 0) % len(shape) != 0 or args.get("alpha", 1) != 1:
            return None
        if node.target in (aten.gather.default, aten.scatter_add.default) and len(shape) > 1:
            # The same place for all of a row.
            column = argument(places, 0) if places.target is aten.expand.default else places
            is_by_row = tensor_type(column).shape == (self.rows, 1) and column.target in SHAPED
            places = argument(column, 0) if is_by_row and tensor_type(places).shape[1:] == shape[1:] else None
        self.emit.like(node)
        if not added:
            return self._taken(base, self.kind(places))
        adds = node.target is not aten.index_put.default or args.get("accumulate", False)
        return self._put(base, self.kind(places), args[added], adds)

    def _taken(self, source: Any, places: IndexKind | None) -> fx.Node | None:
        """Takes rows at places of tokens or of pairs, the slices of experts, or pairs from their rows."""
        kind = tensor_type(source)
        size, is_matrix = kind.shape[:1], len(kind.shape) == 2
        if places is IndexKind.KEYS and size == (self.experts,) and is_matrix:
            return self.spread(source)
        if places is IndexKind.TOKENS and size == (self.tokens,) and is_matrix:
            return self.taken(source, self.k)
        if size != (self.rows,):
            return None
        if places is IndexKind.INVERSE and is_matrix:
            return self.put(source, self.rows, 1)
        if places is not IndexKind.ORDER or is_matrix:
            return self.taken(source, 1) if places is IndexKind.ORDER else None
        if len(kind.shape) > 2 or not kind.dtype.is_floating_point:
            return None
        column = self.taken(self.emit.view(source, [-1, 1], (self.rows, 1)), 1)
        return self.emit.view(column, [-1], (self.rows,))

    def _put(self, base: fx.Node, places: IndexKind | None, rows: Any, adds: bool) -> fx.Node | None:
        """Adds rows up at their tokens, or puts them back at their pairs."""
        if not isinstance(rows, fx.Node) or tensor_type(rows).shape[:1] != (self.rows,):
            return None
        kind = tensor_type(rows)
        if len(kind.shape) != 2 or kind.dtype != tensor_type(base).dtype:
            return None
        is_by_token = places is IndexKind.TOKENS or (places is IndexKind.ORDER and self.k == 1)
        if is_by_token and adds:
            size, k = self.tokens, self.k
        elif places is IndexKind.ORDER and is_zero(base):
            size, k = self.rows, 1
        else:
            return None
        if tensor_type(base).shape != (size, kind.shape[1]):
            return None
        weighed = None
        if (k > 1 or size == self.tokens) and len(rows.users) == 1:  # nothing else reads what is weighed
            weighed = self.weighed(rows)
        placed = self.put(rows, size, k) if weighed is None else self.moe_combine(*weighed, kind.dtype)
        shape = TensorType(kind.dtype, (size, kind.shape[1]))
        return placed if is_zero(base) else self.emit.call(aten.add.Tensor, (base, placed), shape)


# What moves rows: what it calls their places, and what it adds to others or puts in their place.
_MOVES: Mapping[Any, tuple[str, str]] = {
    aten.index.Tensor: ("indices", ""),
    aten.index_select.default: ("index", ""),
    aten.gather.default: ("index", ""),
    aten.scatter_add.default: ("index", "src"),
    aten.index_add.default: ("index", "source"),
    aten.index_put.default: ("indices", "values"),
}
