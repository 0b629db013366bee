"""Which values carry a gradient.

Enters: a program. Leaves: for each node whether a gradient flows through it from a trainable parameter, and whether the
loss sends one there. Values that carry none (ids, masks, rotary tables, frozen parameters) are invariant and replicated
at once (DESIGN section 3).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpar.ir.operators import GraphOperator
from fxpar.ir.program import Program, TensorType, note, operands, output_types
from fxpar.ir.step import ONCE, is_forward, phase_of

# Which values of a graph are made from parameters alone, and which are a parameter whose gradients are summed.


def weights_of(graph: fx.Graph, owned: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the placeholders `owned` and all values that are made from them alone."""
    weights = set(owned)
    for node in graph.nodes:
        if node.op == "call_function" and operands(node) and all(other in weights for other in operands(node)):
            weights.add(node)
    return weights


def owner_of(node: fx.Node) -> fx.Node:
    """Returns what `node` is the same value as, before all sums of gradients over axes; without any, itself."""
    source = summed(node)
    return node if source is None else owner_of(source)


def summed(node: fx.Node) -> fx.Node | None:
    """Returns what a sum of gradients, or an item of a bucket of them, gives again; None where a node is neither."""
    source, index = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return None
    is_sum = isinstance(source.target, GraphOperator) and source.target.sums_gradients
    is_item = source is not node or (is_sum and isinstance(note(node).type, TensorType))
    return operands(source)[index] if is_sum and is_item else None


def gathered_parameters(program: Program) -> dict[str, str]:
    """Returns what gathers a parameter once a step, by name of the node, with the name of the parameter."""
    fqns = {p.node: p.fqn for p in program.parameters}
    gathered = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and phase_of(node) == ONCE:
            source = node
            while source.op != "placeholder":
                source = summed(source) or operands(source)[0]
            gathered[node.name] = fqns[source.name]
    return gathered


# Keys by which equal operations are found, whatever their nodes are called and wherever they stand.

_ATOMS = frozenset({int, bool, str, type(None)})


def plain(value: Any, of_node: Callable[[fx.Node], Hashable]) -> Hashable:
    """Returns arguments as a key: equal numbers of other types are others, and so are zeros of other signs.

    Args:
        of_node: what stands for a node.
    """
    kind = type(value)
    if kind in _ATOMS:  # most arguments
        return kind, value
    if isinstance(value, fx.Node):
        return fx.Node, of_node(value)
    if isinstance(value, (list, tuple)):
        # As below and above, without a call for most items: of a node this is asked after each pass.
        return kind, tuple([(type(item), item) if type(item) in _ATOMS else plain(item, of_node) for item in value])
    if isinstance(value, dict):
        return dict, tuple([(name, plain(item, of_node)) for name, item in sorted(value.items())])
    if isinstance(value, slice):
        return slice, plain((value.start, value.stop, value.step), of_node)
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    return kind, value


_aten = torch.ops.aten
# Operations whose derivative is zero: the result ignores the values of the operand or is piecewise constant.
_STOPS: frozenset[object] = frozenset(
    {
        _aten.detach.default,
        _aten.argmax.default,
        _aten.argmin.default,
        _aten.sign.default,
        _aten.new_empty.default,
        _aten.new_full.default,
        _aten.new_ones.default,
        _aten.new_zeros.default,
        _aten.empty_like.default,
        _aten.fill.Scalar,
        _aten.full_like.default,
        _aten.ones_like.default,
        _aten.zeros_like.default,
        _aten.bernoulli.default,
        _aten.bernoulli.p,
        _aten.bernoulli.Tensor,
        _aten.cauchy.default,
        _aten.exponential.default,
        _aten.geometric.default,
        _aten.log_normal.default,
        _aten.normal.Tensor_float,
        _aten.normal.Tensor_Tensor,
        _aten.normal.float_Tensor,
        _aten.normal_functional.default,
        _aten.rand_like.default,
        _aten.randint_like.default,
        _aten.randint_like.low_dtype,
        _aten.randn_like.default,
        _aten.uniform.default,
    }
)


def carried(
    program: Program, inputs: Mapping[fx.Node, Sequence[fx.Node]] | None = None
) -> dict[fx.Node, tuple[bool, ...]]:
    """Returns for each node one flag an output tensor; empty for scalars and effects.

    Args:
        inputs: the tensor operands of each node, where they are known.
    """
    trainable = {p.node for p in program.parameters if p.trainable} | {i.node for i in program.inputs if i.carries}
    flags: dict[fx.Node, tuple[bool, ...]] = {}
    for node in program.graph.nodes:
        kinds = () if node.op == "output" else output_types(node)
        if not is_forward(node):
            flags[node] = (False,) * len(kinds)  # nothing carries a gradient in the backward
        elif node.op == "placeholder":
            flags[node] = tuple(node.name in trainable for _ in kinds)
        else:
            flags[node] = carried_by(node, kinds, flags, None if inputs is None else inputs.get(node))
    return flags


def carried_by(
    node: fx.Node,
    kinds: Sequence[TensorType],
    flags_of: Mapping[fx.Node, tuple[bool, ...]],
    inputs: Sequence[fx.Node] | None = None,
) -> tuple[bool, ...]:
    """Returns the flags of a call in the forward, whose outputs are of these types, by those of its operands.

    Args:
        inputs: its tensor operands, where they are known.
    """
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        flags = flags_of[node.args[0]]
        return (flags[int(node.args[1])],) if flags else ()  # type: ignore[arg-type]
    flows = not _stops(node.target) and any(True in flags_of[o] for o in (operands(node) if inputs is None else inputs))
    return tuple(flows and kind.is_float for kind in kinds)


def _stops(target: object) -> bool:
    return target.stops_gradient if isinstance(target, GraphOperator) else target in _STOPS


def reached(program: Program, flags: Mapping[fx.Node, tuple[bool, ...]]) -> set[fx.Node]:
    """Returns the nodes that get a gradient in the backward of the loss; without a loss, of all outputs.

    Args:
        flags: as of `carried`.
    """
    ends = program.output_nodes()
    roots = [ends[program.loss]] if program.loss else list(ends.values())
    nodes = {node for node in roots if any(flags[node])}
    for node in reversed(program.graph.nodes):
        if any(flags[node]) and any(user in nodes for user in node.users):
            nodes.add(node)
    return nodes
