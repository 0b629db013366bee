"""assign_rng: every random node draws the bits of its own global elements."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import fx

from fxpar.errors import PassError
from fxpar.ir.program import (
    Input,
    Note,
    Program,
    TensorType,
    describe,
    insert_call,
    note,
    operands,
    output_layouts,
    replace_node,
    set_note,
    tensor_type,
)
from fxpar.ir.properties import Property
from fxpar.ir.step import RNG_PATH
from fxpar.layout.layout import I, Layout, R, V
from fxpar.manager import register_pass
from fxpar.ops.random import attention, axis_index, dropout, uniform, uniform_like
from fxpar.rules import bind_arguments

# Random operators in terms of uniform numbers: what `assign_rng` writes in place of each.

aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)


def refuse(node: fx.Node) -> NoReturn:
    """Refuses a random operator that cannot be had from uniform numbers."""
    raise PassError(
        f"{node.target} draws random numbers that no rule can split",
        where=describe(node),
        remedy="use dropout, uniform, normal or exponential numbers, or draw outside the model and pass them in",
    )


def without_gradient(layout: Layout) -> Layout:
    """Returns how a value that carries no gradient is written."""
    return Layout.of({axis: R if placement == I else placement for axis, placement in layout})


class RandomEmitter:
    """Operations in front of a random node, with its place and layout.

    Args:
        node: the random node.
        uniform: makes uniform numbers of a type, in front of the node.
    """

    def __init__(self, node: fx.Node, uniform: Callable[[TensorType], fx.Node]) -> None:
        self.node, self.given, self.drawn = node, bind_arguments(node), uniform

    @property
    def dtype(self) -> torch.dtype:
        """Returns the element type of the result."""
        return tensor_type(self.node).dtype

    def uniform(self, dtype: torch.dtype | None = None) -> fx.Node:
        """Returns uniform numbers in (0, 1); by default in the result's type, of half precision in float32."""
        float_dtype = self.dtype if self.dtype.is_floating_point else torch.float32
        kind = dtype or (torch.float32 if float_dtype in _NARROW else float_dtype)
        return self.drawn(TensorType(kind, tensor_type(self.node).shape))

    def call(
        self, target: Any, x: fx.Node, *args: Any, dtype: torch.dtype | None = None, flows: bool = False
    ) -> fx.Node:
        """Adds an element-wise operation on `x` and what has its layout; `flows` where a gradient goes through."""
        kind = replace(tensor_type(x), dtype=dtype or tensor_type(x).dtype)
        layout = output_layouts(self.node)[0] if flows else without_gradient(output_layouts(self.node)[0])
        return insert_call(self.node, target, (x, *args), replace(note(self.node), type=kind, layout=layout, random=0))

    def scaled(self, x: fx.Node, factor: Any, offset: Any) -> fx.Node:
        """Returns `x * factor + offset`."""
        if factor != 1:
            x = self.call(aten.mul.Tensor, x, factor)
        return self.call(aten.add.Tensor, x, offset) if isinstance(offset, fx.Node) or offset else x

    def normal(self, mean: Any = 0.0, std: Any = 1.0) -> fx.Node:
        """Returns normal numbers: the inverse of their distribution function at uniform ones."""
        centred = self.scaled(self.uniform(), 2.0, -1.0)
        standard = self.call(aten.mul.Tensor, self.call(aten.erfinv.default, centred), math.sqrt(2.0))
        return self.scaled(standard, std, mean)

    def exponential(self) -> fx.Node:
        """Returns numbers of mean 1, none of them 0."""
        return self.call(aten.neg.default, self.call(aten.log.default, self.uniform()))

    def below(self, p: Any) -> fx.Node:
        """Draws true with probability p, a number or a tensor."""
        target = aten.lt.Tensor if isinstance(p, fx.Node) else aten.lt.Scalar
        return self.call(target, self.uniform(torch.float32), p, dtype=torch.bool)

    def detached(self, x: Any) -> Any:
        """Returns an operand that gets no gradient."""
        if not isinstance(x, fx.Node):
            return x
        noted = replace(note(x), layout=without_gradient(output_layouts(x)[0]), random=0)
        return insert_call(self.node, aten.detach.default, (x,), noted)

    def cast(self, x: fx.Node) -> fx.Node:
        """Returns `x` in the result's type."""
        if tensor_type(x).dtype == self.dtype:
            return x
        new = self.call(aten._to_copy.default, x, dtype=self.dtype)
        new.kwargs = {"dtype": self.dtype}
        return new


def _uniform(draw: RandomEmitter) -> fx.Node:
    low, high = draw.given["from"], draw.given["to"]
    return draw.scaled(draw.uniform(), high - low, low)


def _bernoulli(draw: RandomEmitter) -> fx.Node:
    return draw.below(draw.given.get("p", draw.given["self"]))


def _normal(draw: RandomEmitter) -> fx.Node:
    return draw.normal(*(draw.detached(draw.given[name]) for name in ("mean", "std")))


def _integers(draw: RandomEmitter) -> fx.Node:
    low, high = draw.given.get("low", 0), draw.given["high"]
    if not isinstance(low, int) or not isinstance(high, int) or high - low > 2**32:
        refuse(draw.node)
    # float32 has 24 bits, so that large ranges would leave out numbers.
    scaled = draw.call(aten.mul.Tensor, draw.uniform(torch.float64), float(high - low))
    return draw.scaled(draw.call(aten.floor.default, scaled), 1, float(low))


def _geometric(draw: RandomEmitter) -> fx.Node:
    p = draw.given["p"]
    if not 0 < p < 1:
        refuse(draw.node)
    # More than k tries have the probability (1 - p)^k, which is inverted at a uniform number.
    tries = draw.call(aten.mul.Tensor, draw.call(aten.log.default, draw.uniform()), 1 / math.log1p(-p))
    return draw.call(aten.clamp_min.default, draw.call(aten.ceil.default, tries), 1.0)


def _cauchy(draw: RandomEmitter) -> fx.Node:
    # The quantile function: median + sigma · tan(π · (u - 1/2)).
    angle = draw.call(aten.mul.Tensor, draw.scaled(draw.uniform(), 1, -0.5), math.pi)
    return draw.scaled(draw.call(aten.tan.default, angle), draw.given["sigma"], draw.given["median"])


def _leaky(draw: RandomEmitter) -> fx.Node:
    """Draws the slopes of negative values."""
    x, low, high = (draw.given[name] for name in ("self", "lower", "upper"))
    slope = draw.cast(draw.scaled(draw.uniform(), high - low, low))
    positive = draw.call(aten.ge.Scalar, x, 0, dtype=torch.bool)
    leaked = draw.call(aten.mul.Tensor, x, slope, flows=True)
    return draw.call(aten.where.self, positive, x, leaked, dtype=draw.dtype, flows=True)


def _choice(draw: RandomEmitter) -> fx.Node:
    """Draws without replacement: the first of exponential waiting times, whose rates are the weights."""
    weights, count = draw.detached(draw.given["self"]), draw.given["num_samples"]
    if draw.given["replacement"] and count != 1:
        refuse(draw.node)
    kind, chosen = tensor_type(weights), tensor_type(draw.node)
    dtype = torch.float32 if kind.dtype in _NARROW else kind.dtype
    uniform = draw.drawn(TensorType(dtype, kind.shape))
    waiting = draw.call(aten.neg.default, draw.call(aten.log.default, uniform))
    rates = draw.call(aten.div.Tensor, weights, waiting, dtype=dtype)
    layout, noted = output_layouts(draw.node)[0], replace(note(draw.node), random=0)
    both = replace(noted, type=(TensorType(dtype, chosen.shape), chosen), layout=(layout, layout))
    top = insert_call(draw.node, aten.topk.default, (rates, count), both)
    return insert_call(draw.node, operator.getitem, (top, 1), noted)


def _permutation(draw: RandomEmitter) -> fx.Node:
    # Equal keys would be ordered by the sort and not by chance: with float64's bits they are rare.
    return draw.call(aten.argsort.default, draw.uniform(torch.float64), dtype=torch.int64)


Distribution = Callable[[RandomEmitter], fx.Node]
DISTRIBUTIONS: Mapping[Any, Distribution] = {
    **dict.fromkeys((aten.rand.default, aten.rand_like.default), lambda draw: draw.uniform(draw.dtype)),
    **dict.fromkeys((aten.randn.default, aten.randn_like.default), lambda draw: draw.normal()),
    aten.uniform.default: _uniform,
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor), _bernoulli),
    **dict.fromkeys((aten.normal_functional.default, aten.normal.float_float), _normal),
    **dict.fromkeys((aten.normal.Tensor_float, aten.normal.Tensor_Tensor, aten.normal.float_Tensor), _normal),
    **dict.fromkeys((aten.randint.default, aten.randint.low), _integers),
    **dict.fromkeys((aten.randint_like.default, aten.randint_like.low_dtype), _integers),
    aten.randperm.default: _permutation,
    aten.multinomial.default: _choice,
    aten.exponential.default: lambda draw: draw.scaled(draw.exponential(), 1 / draw.given["lambd"], 0),
    aten.log_normal.default: lambda draw: draw.call(aten.exp.default, _normal(draw)),
    aten.geometric.default: _geometric,
    aten.cauchy.default: _cauchy,
    aten.rrelu.default: _leaky,
}


@register_pass("assign_rng", requires={Property.CANONICAL, Property.COLLECTIVES}, provides={Property.RNG})
def assign_rng(program: Program) -> Program:
    """Replaces random operators by counter generators, keyed by (seed, node, step, microbatch, element).

    Before::

        %o = aten.dropout.default(%y, 0.1, True) : f32[b, 8, s, s] tp:S(1) {random=17}

    After::

        %rng = input["fxpar.rng"] : i64[3] tp:R
        %tp_index = fxpar.axis_index[tp]() : i64[] tp:V
        %o = fxpar.dropout(%y, %rng, 0.1, [%tp_index]) : f32[b, 8, s, s] tp:S(1) {random=17}

    On an axis over which the value is a shard the node gets the rank's index, so that each rank draws the bits of its
    own elements; on the others it gets none and all ranks draw the same (SPEC section 2.4), which drops the same
    elements of each summand of a partial value. The masks are therefore those of the single device, in distribution
    equal to PyTorch's and never the same bits. Uniform, normal and other numbers become `fxpar.uniform`, or
    `fxpar.uniform_like` a value that may be a shard, and what follows from them. Random operators that
    cannot be had so are refused. Draws that nothing uses go.
    """
    state = _State(program)
    for node in list(program.graph.nodes):
        if node.op == "call_function" and note(node).random:
            if not node.users:
                program.graph.erase_node(node)
            elif node.target is aten.dropout.default:
                state.replace(node, dropout, (node.args[0], state.rng, node.args[1]))
            elif node.target is aten.scaled_dot_product_attention.default:
                arguments = bind_arguments(node)
                ins = (arguments["query"], arguments["key"], arguments["value"], arguments.get("attn_mask"))
                options = (arguments["is_causal"], arguments["scale"], arguments["enable_gqa"])
                state.replace(node, attention, (*ins, state.rng, arguments["dropout_p"], *options))
            else:
                state.distribute(node)
    return program if state.input is None else program.with_(inputs=(*program.inputs, state.input))


class _State:
    """The generator's placeholder and one index node for each axis, made on first use."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.input: Input | None = None
        self._rng: fx.Node | None = None
        self._indices: dict[str, fx.Node] = {}

    def _behind_placeholders(self) -> fx.Node:
        first: fx.Node = next(node for node in self.program.graph.nodes if node.op != "placeholder")
        return first

    def _layout(self, axis: str = "") -> Layout:
        return Layout.of({name: V if name == axis else R for name in self.program.axes})

    @property
    def rng(self) -> fx.Node:
        if self._rng is None:
            kind = TensorType(torch.int64, (3,))
            with self.program.graph.inserting_before(self._behind_placeholders()):
                self._rng = self.program.graph.create_node("placeholder", "rng", name="rng")
            set_note(self._rng, Note(type=kind, layout=self._layout()))
            self.input = Input(RNG_PATH, self._rng.name, kind)
        return self._rng

    def index(self, axis: str) -> fx.Node:
        if axis not in self._indices:
            noted = Note(type=TensorType(torch.int64, ()), layout=self._layout(axis))
            place = self._behind_placeholders()
            self._indices[axis] = insert_call(place, axis_index, (), noted, f"{axis}_index", axis=axis)
        return self._indices[axis]

    def _own_indices(self, x: fx.Node) -> tuple[list[fx.Node], ...]:
        """Returns the last argument of a draw for the elements of `x`, if it has one."""
        # An index for shards alone. Where all ranks have the value they must draw the same
        # bits, and a summand's dropout is linear only then.
        indices = [self.index(axis) for axis, placement in output_layouts(x)[0] if placement.is_shard]
        return (indices,) if indices else ()

    def replace(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        node.target, node.args, node.kwargs = target, (*args, *self._own_indices(operands(node)[0])), {}

    def distribute(self, node: fx.Node) -> None:
        """Writes a random node in terms of uniform numbers; the last of them has its name."""
        distribution = DISTRIBUTIONS.get(node.target)
        if distribution is None:
            refuse(node)
        draw = RandomEmitter(node, lambda kind: self._uniform(node, kind))
        replace_node(node, draw.cast(distribution(draw)))

    def _uniform(self, node: fx.Node, kind: TensorType) -> fx.Node:
        like = next((x for x in operands(node) if tensor_type(x).shape == kind.shape), None)
        if like is not None:
            noted = replace(note(node), type=kind, layout=without_gradient(output_layouts(node)[0]))
            args = (like, self.rng, kind.dtype, *self._own_indices(like))
            return insert_call(node, uniform_like, args, noted, "uniform_like")
        if operands(node):
            refuse(node)
        size, noted = bind_arguments(node).get("size", [node.args[0]]), replace(note(node), type=kind)
        drawn = (size, self.rng, kind.dtype)
        return insert_call(node, uniform, drawn, replace(noted, layout=self._layout()), "uniform")
