"""assign_rng: every random node draws the bits of its own global elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpar.errors import PassError
from fxpar.layout import Layout, R, V
from fxpar.manager import register_pass
from fxpar.operators import attention, axis_index, dropout
from fxpar.program import Input, Note, Program, TensorType, note, operands, output_layouts, set_note
from fxpar.rules import bind_arguments
from fxpar.rules.inference import describe

aten = torch.ops.aten
RNG_PATH = "fxpar.rng"


@register_pass("assign_rng", requires={"canonical", "collectives"}, provides={"rng"})
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
    equal to PyTorch's and never the same bits. Random operators other than dropout and attention are refused.
    """
    state = _State(program)
    for node in list(program.graph.nodes):
        if node.op == "call_function" and note(node).random:
            if node.target is aten.dropout.default:
                state.replace(node, dropout, (node.args[0], state.rng, node.args[1]))
            elif node.target is aten.scaled_dot_product_attention.default:
                given = bind_arguments(node)
                ins = (given["query"], given["key"], given["value"], given.get("attn_mask"))
                options = (given["is_causal"], given["scale"], given["enable_gqa"])
                state.replace(node, attention, (*ins, state.rng, given["dropout_p"], *options))
            else:
                raise PassError(
                    f"{node.target} draws random numbers that no rule can split",
                    where=describe(node),
                    remedy="use dropout, or draw the numbers outside the model and pass them in",
                )
    return program if state.input is None else program.with_(inputs=(*program.inputs, state.input))


class _State:
    """The generator's placeholder and one index node for each axis, made on first use."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.input: Input | None = None
        self._rng: fx.Node | None = None
        self._indices: dict[str, fx.Node] = {}

    def _behind_placeholders(self) -> fx.Node:
        found: fx.Node = next(node for node in self.program.graph.nodes if node.op != "placeholder")
        return found

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

    def replace(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        layout = output_layouts(operands(node)[0])[0]
        indices = [self.index(axis) for axis, placement in layout if placement.is_shard]
        node.target, node.args, node.kwargs = target, (*args, indices) if indices else args, {}
