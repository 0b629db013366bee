"""assign_rng: every random node draws the bits of its own global elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxpar.layout.layout import Layout, R, V
from fxpar.manager import register_pass
from fxpar.ops.random import attention, axis_index, dropout, uniform, uniform_like
from fxpar.passes.draws import DISTRIBUTIONS, RandomEmitter, refuse, without_gradient
from fxpar.program.program import (
    Input,
    Note,
    Program,
    TensorType,
    note,
    operands,
    output_layouts,
    set_note,
    tensor_type,
)
from fxpar.program.properties import Property
from fxpar.rules import bind_arguments

aten = torch.ops.aten
RNG_PATH = "fxpar.rng"


@register_pass("assign_rng", requires={Property.CANONICAL, Property.COLLECTIVES}, provides={Property.RNG})
def assign_rng(program: Program) -> Program:
    """Replaces random operators by ones with a counter generator, keyed by (seed, node, step, microbatch, element).

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
    `fxpar.uniform_like` a value that may be a shard, and what follows from them (`fxpar.passes.draws`). Random
    operators that cannot be had so are refused. Draws that nothing uses go.
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
            with self.program.graph.inserting_before(self._behind_placeholders()):
                node = self.program.graph.create_node(
                    "call_function", axis_index, kwargs={"axis": axis}, name=f"{axis}_index"
                )
            self._indices[axis] = set_note(node, Note(type=TensorType(torch.int64, ()), layout=self._layout(axis)))
        return self._indices[axis]

    def _own_indices(self, x: fx.Node) -> tuple[list[fx.Node], ...]:
        """The last argument of a draw for the elements of `x`, if it has one."""
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
        value = draw.cast(distribution(draw))
        node.replace_all_uses_with(value)
        self.program.graph.erase_node(node)
        value.name = node.name

    def _uniform(self, node: fx.Node, kind: TensorType) -> fx.Node:
        like = next((x for x in operands(node) if tensor_type(x).shape == kind.shape), None)
        graph, layout = self.program.graph, self._layout()
        if like is None and operands(node):
            refuse(node)
        size = bind_arguments(node).get("size", [node.args[0]])
        rng = self.rng
        with graph.inserting_before(node):
            if like is None:
                new = graph.create_node("call_function", uniform, (size, rng, kind.dtype), name="uniform")
            else:
                layout = without_gradient(output_layouts(node)[0])
                args: tuple[Any, ...] = (like, rng, kind.dtype, *self._own_indices(like))
                new = graph.create_node("call_function", uniform_like, args, name="uniform_like")
        return set_note(new, replace(note(node), type=kind, layout=layout))
