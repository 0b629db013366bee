"""What the options of a node and the conversions of its values cost, in seconds of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import fx

from fxpar.cost.flops import matmul_flops
from fxpar.cost.seconds import access_seconds, collective_seconds, materialised, optimizer_seconds, product_seconds
from fxpar.ir.operators import computed_fraction, held_fraction, shared_fraction
from fxpar.ir.program import Program, TensorType, output_types
from fxpar.ir.step import held_type
from fxpar.ir.symbols import with_counted
from fxpar.layout.layout import I, Placement
from fxpar.layout.symbolic_sizes import evaluate, names, product
from fxpar.ops.collectives import coercion
from fxpar.plan.cost import Cost
from fxpar.sharding.options import AxisOptions, Option, Value

_BATCH, _SEQUENCE, _WIDTH = 8, 1024, 4096

# Ties are broken in favour of less work that is the same on every rank: f late, g early, residual streams invariant.
TIE = {"I": 0.0, "S": 0.0, "R": 1e-9, "P": 4e-9}
TIE_CONVERSION = 1e-9
# A parameter is converted rather than what is made from it, so that the gradients of many are summed together.
TIE_MADE = 2e-8
# Where ranks may share out tokens, a stream that is cut over them is preferred to one that is not.
TIE_WHOLE = 2e-9


@dataclass
class Prices:
    """Prices on one axis.

    Attributes:
        width: what the commonest width is taken for.
    """

    program: Program
    options: AxisOptions
    cost: Cost
    width: int = _WIDTH

    def __post_init__(self) -> None:
        self._symbols = reference_sizes(self.program)
        self._stored = materialised(self.program, self.options.products, self.options.weights)
        self._scale = self.width / common_width(self.program)
        self._flops = {
            node: evaluate(count, self._symbols) * self._scale**2 for node, count in matmul_flops(self.program)
        }

    def bytes_of(self, value: Value) -> float:
        """Returns the size of the whole value at reference sizes."""
        node, index = value
        kind = output_types(node)[index]
        matrix = node in self.options.weights and is_matrix(kind)
        count = evaluate(product(kind.shape), self._symbols)
        widths = 2 if matrix else 1 if kind.shape else 0
        return float(count) * kind.dtype.itemsize * self._scale**widths

    def terms(self, node: fx.Node, option: Option) -> Mapping[str, float]:
        """Returns seconds of a node under an option, by what takes them."""
        n = self.options.n
        terms = {}
        if node in self._flops:
            part = computed_fraction(option.operands, n)
            terms["matrix product"] = product_seconds(self._flops[node], part, self.cost)
        if node in self._stored:
            terms["memory"] = sum(
                self._accesses((node, i), placement)
                for i, (placement, carries) in enumerate(zip(option.outputs, self.options.flags[node], strict=True))
                if carries
            )
        if node.op == "placeholder" and self.options.flags[node][0] and len(output_types(node)[0].shape) > 1:
            kind = output_types(node)[0]
            count = self.bytes_of((node, 0)) / kind.dtype.itemsize
            terms["optimizer"] = optimizer_seconds(count, held_fraction(option.outputs[0], n), self.cost)
        return terms

    def _accesses(self, value: Value, placement: Placement) -> float:
        """Returns seconds in which an activation is stored and read, and its gradient.

        A cut over tokens is the means to save them. One over features saves as much where matrices make it, but is no
        reason to choose it: streams would be cut and gathered again for every norm.
        """
        share = 1 / self.options.n if self.options.is_token_cut(value, placement) else 1.0
        return access_seconds(self.bytes_of(value), share, self.cost)

    def node(self, node: fx.Node, option: Option) -> float:
        """Returns seconds of a node under an option, ties included."""
        seconds = sum(self.terms(node, option).values())
        for index, (placement, carries) in enumerate(zip(option.outputs, self.options.flags[node], strict=True)):
            if carries:
                seconds += TIE[placement.kind]
                if placement == I and self.options.token_cut((node, index)):
                    seconds += TIE_WHOLE
        return seconds

    def told_of(self, node: fx.Node) -> Hashable:
        """Returns all of a node that the prices of its options depend on."""
        is_weight, is_placed = node in self.options.weights, node.op == "placeholder"
        flops, flags = self._flops.get(node), self.options.flags[node]
        return output_types(node), flags, flops, node in self._stored, is_weight, is_placed

    def told(self, value: Value) -> Hashable:
        """Returns all of a value that the price of its conversions depends on."""
        node, index = value
        origin = node in self.options.weights, node in self.options.tables, node.op == "placeholder"
        return output_types(node)[index], self.options.carries(value), origin, value in self.options.demanded

    def conversion(self, value: Value, source: Placement, target: Placement) -> float | None:
        """Returns seconds of a conversion, forward and backward; None where it is not offered.

        Not offered: gathering what a parameter's shards make, or cutting a whole matrix (both belong to sharded
        optimizers); and, but where the program itself demands a cut, shards cut anew and partial sums that become
        shards of anything but tokens.
        """
        carries = self.options.carries(value)
        if source == target:
            return 0.0
        row = coercion(source, target)
        is_asked = value in self.options.demanded
        if row is None or (row.forward and source.is_shard and target.is_shard and not is_asked):
            return None
        if source.kind == "P" and target.is_shard and not is_asked and not self.options.is_token_cut(value, target):
            return None
        whole_matrix = target.is_shard and carries and is_matrix(output_types(value[0])[value[1]])
        is_held = value[0] in self.options.weights or value[0] in self.options.tables
        if is_held and (source.is_shard or whole_matrix) and not source.reduced:
            return None
        # A gradient travels by the conjugate, so a choice that is cheap forward may cost its price again backward.
        collectives = [row.forward] if not carries else [row.forward, row.backward]
        n, size = self.options.n, self.bytes_of(value)
        # Gradients of parameters are summed many at once.
        latency = 0.0 if value[0] in self.options.weights else self.cost.latency
        if row.operator.sums_gradients and value[0] in self.options.weights:
            kind = output_types(value[0])[value[1]]
            size *= held_type(self.program.plan, kind).dtype.itemsize / kind.dtype.itemsize
        if source.reduced:
            part, total = shared_fraction(source)
            size *= part / total
        # Free conversions cost a tie, or one could be made there and back and the choice would not be unique.
        seconds = TIE_CONVERSION
        if value[0] in self.options.weights and value[0].op != "placeholder":
            seconds += TIE_MADE
        if row.forward:  # what it yields is stored as other activations are
            seconds += self._accesses(value, target)
        for collective in filter(None, collectives):
            seconds += collective_seconds(collective, n, size, self.cost, latency)
        return seconds


def is_matrix(kind: TensorType) -> bool:
    """Returns whether a weight has two dimensions or more; those of size 1 do not count."""
    return len([size for size in kind.shape if size != 1]) > 1


def reference_sizes(program: Program) -> dict[str, int]:
    """Returns values of the symbols at which layouts are compared: the first is a batch, others are lengths."""
    sizes = {}
    for index, symbol in enumerate(program.symbols):
        # Fixed, and not the example's: a module's layouts must not depend on the batch that it was made with.
        size = _BATCH if index == 0 and len(program.symbols) > 1 else _SEQUENCE
        sizes[symbol.name] = -(-size // symbol.multiple)
    return with_counted(program.counted, sizes)


def common_width(program: Program) -> int:
    """Returns the commonest size of a dimension of the parameters with two or more."""
    counts: Counter[int] = Counter()
    for parameter in program.parameters:
        shape = parameter.type.shape
        if parameter.kind == "parameter" and len(shape) > 1 and not names(shape):
            counts.update(int(size) for size in shape)
    return max(counts, key=lambda size: (counts[size], size)) if counts else _WIDTH
