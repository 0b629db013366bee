"""Products with a matrix for each pair of token and expert, `weight[indices]`, as grouped products of routed rows.

Enters: a graph, and what its values are of a choice. Leaves: the same, in which what is computed of pairs is written
with the operators of `fxpar.experts.operators.permute`.
"""

from __future__ import annotations

from torch import fx

from fxpar.experts.compiler.choices import argument, aten, is_known, plain
from fxpar.experts.compiler.routing_facts import ByExpert, Facts, IndexKind, kind_of
from fxpar.experts.compiler.row_writer import Product, RowWriter, SortedRows, product_of, weighed_sums
from fxpar.ir.program import TensorType, is_tensor, operands, tensor_type
from fxpar.layout.symbolic_sizes import Size, product
from fxpar.rules import bind_arguments


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

    Each step is an identity: a value by pair is its rows put back in order, a product with a pair's matrix is the
    grouped product of its row, and what is done to each pair by itself commutes with the order. So whatever else reads
    a value by pair, a draw of random bits too, reads the rows put back, and what is not known stays as it is.
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
