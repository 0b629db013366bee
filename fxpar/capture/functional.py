"""Functional form of an exported graph: no changes in place, and none of the operators that may return their operand.

Enters: an exported program whose regions are inlined. Leaves: one in functional form with the same values, gradients,
order of random nodes and metadata.

torch's own way traces the graph twice more, which takes most of the time of a capture. It is needed where something
changes in place, and where an operator occurs that torch takes apart and this file does not know. Elsewhere a handful
of operators is rewritten as torch would, each by what the trace recorded of its operand and result, and all other
nodes stay as they are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch._decomp
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.multiprocessing.reductions import StorageWeakRef

from fxpar.capture import patches
from fxpar.capture.norms import write_norms
from fxpar.rules import rule_of

aten = torch.ops.aten


def functional_form(exported: ExportedProgram) -> ExportedProgram:
    """The program in functional form; the one that is given may be changed.

    Args:
        exported: a flat graph.
    """
    write_norms(exported.graph)
    nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    if not all(_is_known(node) for node in nodes):
        composed = frozenset(target for target in {node.target for node in nodes} if _is_taken_apart(target))
        _forget_annotations(exported.graph)
        retraced: ExportedProgram = exported.run_decompositions(dict(_decompositions(composed)))
        return retraced
    for node in nodes:
        rewrite = _REWRITES.get(node.target)
        if rewrite is not None:
            node.replace_all_uses_with(rewrite(exported.graph, node))
            exported.graph.erase_node(node)
    exported.graph.eliminate_dead_code()
    _number(exported)
    with patches.late_code():
        exported.graph_module.recompile()
    return exported


def _forget_annotations(graph: fx.Graph) -> None:
    """Takes away what torch notes of its own functions: it takes a node for the buffer of its name, and compares."""
    for node in graph.nodes:
        if "custom" in node.meta:
            custom = node.meta["custom"]
            node.meta["custom"] = {k: v for k, v in custom.items() if not k.startswith("_torchdynamo_disable")}


@functools.cache
def _decompositions(composed: frozenset[Any]) -> dict[Any, Callable[..., Any]]:
    """Returns torch's decompositions of what is taken apart, and of what that consists of where no rule knows it.

    torch looks through all operators for them, so the answer is remembered.
    """
    known = torch.export.default_decompositions()
    if not composed:
        return {}
    targets = [target for target in list(known.keys()) if target in composed or _is_taken_apart(target)]
    return {target: known[target] for target in targets}


@functools.cache
def _is_taken_apart(target: Any) -> bool:
    """Whether torch composes a functional operator of others, and no rule knows it: rules know what it consists of."""
    if target in _TAKEN_APART:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    gives = {str(value.type) for value in target._schema.returns}
    if not gives <= {"Tensor", "List[Tensor]"} or target._schema.name.removeprefix("aten::") in _STAYING:
        return False
    return rule_of(target) is None and _is_composite(target)


def _is_known(node: fx.Node) -> bool:
    """Whether the node can stay as it is, or is one of those that are rewritten."""
    target: Any = node.target
    if getattr(target, "__module__", "").startswith(
        "torch._functorch"
    ):  # a region under vmap, which the trace resolves
        return False
    if target not in _REWRITES and _is_taken_apart(target):
        return False
    if target is aten.chunk.default and not _is_in_equal_steps(node):
        return False
    if target in (aten.flatten.using_ints, aten.unflatten.int) and not _has_sizes_of_inputs(node):
        return False
    if target in _REWRITES or not isinstance(target, torch._ops.OpOverload):
        return target in _REWRITES or not isinstance(target, torch._ops.OperatorBase)
    arguments = target._schema.arguments
    if target._schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in target.tags:
        return False
    is_alias = any(argument.alias_info is not None for argument in arguments)
    # Functional operators stay, however they are composed; a view stays where it is an operator of its own.
    return not (is_alias and _is_composite(target))


def _is_in_equal_steps(node: fx.Node) -> bool:
    """Whether a `chunk` is a `split` into parts of a known size."""
    source, _, *dim = node.args
    size = _value(source).shape[dim[0] if dim else 0]  # type: ignore[index]
    return isinstance(size, int) and size > 0 and not node.kwargs


def _has_sizes_of_inputs(node: fx.Node) -> bool:
    """Whether all sizes of the operand, and those that `unflatten` makes, are numbers or such of the graph's inputs."""
    parts: Any = node.args[2] if node.target is aten.unflatten.int else ()
    if node.target is aten.unflatten.int and node.kwargs:
        return False
    if any(not isinstance(size, int) or size < 0 for size in parts):
        return False
    sizes: list[Any] = [size for size in _value(node.args[0]).shape if isinstance(size, torch.SymInt)]
    return all(_in_placeholders(node.graph, size) is not None for size in sizes)


def _is_composite(target: torch._ops.OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in target.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


def _number(exported: ExportedProgram) -> None:
    """Names nodes by operator, counted in the order of the graph, as a trace would."""
    free = fx.Graph()._graph_namespace
    for node in exported.graph.nodes:
        target: Any = node.target
        is_call = isinstance(target, torch._ops.OpOverload)
        base = exported.graph._target_to_str(target.overloadpacket.__name__) if is_call else node.name
        if target is aten.sym_size.int:  # whose names say how often a trace asked
            base = "sym_size_int"
        name = free.create_name(base, None)
        if name != node.name:
            node.name = name
    returned: Any = next(node for node in reversed(exported.graph.nodes) if node.op == "output").args[0]
    for spec, value in zip(exported.graph_signature.output_specs, returned, strict=True):
        if isinstance(value, fx.Node):
            spec.arg.name = value.name


def _value(node: Any) -> Tensor:
    tensor: Tensor = node.meta["val"]
    return tensor


def _made(graph: fx.Graph, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call before `node` with its metadata."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    return new


def _is_same(node: fx.Node) -> bool:
    """Whether the result is the operand itself or a view of it."""
    mine, other = (StorageWeakRef(_value(n).untyped_storage()) for n in (node, node.args[0]))
    return bool(mine == other)


def _cast(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`to`: the operand, or a copy in another type."""
    source: Any = node.args[0]
    if _is_same(node):
        return source  # type: ignore[no-any-return]
    options: dict[str, Any] = {"dtype": _value(node).dtype} if _value(node).dtype != _value(source).dtype else {}
    if _value(node).device != _value(source).device:
        options["device"] = _value(node).device
    return _made(graph, node, aten._to_copy.default, source, **options)


def _contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`contiguous`: the operand, or a copy."""
    if _is_same(node):
        return node.args[0]  # type: ignore[return-value]
    return _made(graph, node, aten.clone.default, node.args[0], memory_format=torch.contiguous_format)


def _reshape(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`reshape`: a view, or a view of a copy."""
    if _is_same(node):
        return _made(graph, node, aten.view.default, *node.args[:2])
    copy = _made(graph, node, aten.clone.default, node.args[0], memory_format=torch.contiguous_format)
    copy.meta["val"] = _value(node.args[0])
    return _made(graph, node, aten._unsafe_view.default, copy, node.args[1])


def _flatten(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`flatten`: the operand where there is nothing to merge, or a `reshape`."""
    source: Any = node.args[0]
    dims = _value(source).dim()
    if dims == 0:
        return _reshape(graph, _made(graph, node, node.target, source, [1]))
    first, last = (place % dims for place in _places(node))
    if first == last:
        return source  # type: ignore[no-any-return]
    sizes = [_size(graph, node, dim) for dim in range(dims)]
    merged = functools.reduce(lambda a, b: _product(graph, node, a, b), sizes[first : last + 1])
    return _reshape(graph, _made(graph, node, node.target, source, [*sizes[:first], merged, *sizes[last + 1 :]]))


def _places(node: fx.Node) -> tuple[int, int]:
    """The first and the last dimension that `flatten` merges."""
    options = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    return options.get("start_dim", 0), options.get("end_dim", -1)  # type: ignore[return-value]


def _unflatten(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`unflatten`: a view."""
    source, position, parts = node.args
    dims, dim = _value(source).dim(), cast(int, position)
    before, behind = range(dim % dims), range(dim % dims + 1, dims)
    sizes = [
        *(_size(graph, node, d) for d in before),
        *cast(list[int], parts),
        *(_size(graph, node, d) for d in behind),
    ]
    return _made(graph, node, aten.view.default, source, sizes)


def _chunk(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`chunk`: parts of one size, the last one smaller; a result is read by its index."""
    source, count, *dim = node.args
    size = _value(source).shape[dim[0] if dim else 0]  # type: ignore[index]
    return _made(graph, node, aten.split.Tensor, source, -(-size // count), *dim)  # type: ignore[operator]


def _size(graph: fx.Graph, node: fx.Node, dim: int) -> Any:
    """The size of the first operand of `node`: a number, or a node behind the placeholders, as a trace has it."""
    size = _value(node.args[0]).shape[dim]
    if not isinstance(size, torch.SymInt):
        return size
    source = _in_placeholders(graph, size)
    assert source is not None
    places = graph.find_nodes(op="placeholder")
    order = places.index(source[0]), source[1]
    for other in graph.nodes:
        if other.op == "placeholder":
            continue
        if other.target is aten.sym_size.int and other.args == source:
            return other
        if other.target is not aten.sym_size.int or (places.index(other.args[0]), other.args[1]) > order:
            break
    with graph.inserting_before(other):
        new = graph.call_function(aten.sym_size.int, source)
    new.meta = {"val": size}
    return new


def _in_placeholders(graph: fx.Graph, size: torch.SymInt) -> tuple[fx.Node, int] | None:
    """The first placeholder, and its dimension, of which it is the size."""
    for place in graph.find_nodes(op="placeholder"):
        value = place.meta.get("val")
        for dim, extent in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(extent, torch.SymInt) and extent.node.expr == size.node.expr:
                return place, dim
    return None


def _product(graph: fx.Graph, node: fx.Node, a: Any, b: Any) -> Any:
    if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
        return a * b
    product = _made(graph, node, operator.mul, a, b)
    values = [value.meta["val"] if isinstance(value, fx.Node) else value for value in (a, b)]
    product.meta["val"] = values[0] * values[1]
    return product


def _dropout(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`dropout`: values and mask, or a copy of the operand."""
    source, p, training = node.args
    if not training or p == 0:
        return _made(graph, node, aten.clone.default, source)
    new = _made(graph, node, aten.native_dropout.default, source, p, True)
    value = _value(node)
    new.meta["val"] = (value, torch.empty_like(value, dtype=torch.bool))
    with graph.inserting_before(node):
        item = graph.call_function(operator.getitem, (new, 0))
    item.meta = dict(node.meta)
    return item


_Rewrite = Callable[[fx.Graph, fx.Node], fx.Node]
_REWRITES: Mapping[Any, _Rewrite] = {
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.device: _cast,
    aten.to.other: _cast,
    aten.contiguous.default: _contiguous,
    aten.reshape.default: _reshape,
    aten.dropout.default: _dropout,
    aten.flatten.using_ints: _flatten,
    aten.unflatten.int: _unflatten,
    aten.chunk.default: _chunk,
}
# Operators whose result and operand are compared: are they one?
COMPARED = frozenset(_REWRITES)
# Composites without a rule that stay: others read how many places they find, or torch composes a loop of them.
_STAYING = frozenset({"where", "nonzero_numpy", "batch_norm", "lstm", "gru", "rnn_tanh", "rnn_relu"})
# What torch composes of operations that have rules: means of losses become those of `aten.mean`.
_TAKEN_APART = frozenset(
    {
        aten.cosine_embedding_loss.default,
        aten.hinge_embedding_loss.default,
        aten.margin_ranking_loss.default,
        aten.pairwise_distance.default,
        aten.poisson_nll_loss.default,
        aten.triplet_margin_loss.default,
    }
)
