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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch._decomp
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.multiprocessing.reductions import StorageWeakRef

from fxpar.capture import patches
from fxpar.capture.places import module_of, source_of
from fxpar.rules import rule_of

# Batch and instance norms as operations that say what they change.

aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)


def normed_batches(graph: fx.Graph, prefix: str) -> tuple[str, ...]:
    """Returns the modules, each with its line, that norm by statistics of the batch that is given.

    Args:
        prefix: what module paths begin with besides the author's names.
    """
    nodes = [node for node in graph.nodes if node.target is aten.batch_norm.default and node.args[5]]
    places = ((module_of(node).removeprefix(prefix), source_of(node)) for node in nodes)
    return tuple(", ".join(filter(None, place)) or f"%{n.name}" for place, n in zip(places, nodes, strict=True))


def changes_statistics(node: fx.Node) -> bool:
    """Returns whether a node is a norm that may change statistics that its module keeps."""
    return node.target in (aten.batch_norm.default, aten.instance_norm.default)


def write_norms(graph: fx.Graph) -> None:
    """Puts simpler operations in the place of the norms."""
    sizes = _ElementCounts(graph)
    for node in list(graph.nodes):
        if node.target is aten.batch_norm.default:
            result = _by_batch(_NormEmitter(node, sizes)) if node.args[5] else _by_constants(_NormEmitter(node, sizes))
        elif node.target is aten.instance_norm.default and node.args[5] and isinstance(node.args[3], fx.Node):
            result = _by_instance(_NormEmitter(node, sizes))
        else:
            continue
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _value(node: Any) -> Tensor:
    tensor: Tensor = node.meta["val"]
    return tensor


class _ElementCounts:
    """Numbers of elements, each made once: sizes are read off inputs where one has them."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._made = graph, dict[Any, fx.Node]()

    def product(self, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> Any:
        """Returns the number of elements of `x` over some dimensions, in front of `node`."""
        number: Any = 1
        rest: list[fx.Node] = []
        for dim in dims:
            size = _value(x).shape[dim]
            if isinstance(size, torch.SymInt):
                rest.append(self._size(node, x, dim))
            else:
                number *= size
        for factor in rest:
            is_one = isinstance(number, int) and number == 1
            number = factor if is_one else self.made(node, operator.mul, factor, number)
        return number

    def made(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Returns a number in front of `node`; the same one as before where it was made."""
        key = (target, args)
        if key not in self._made:
            with self._graph.inserting_before(node):
                new = self._graph.call_function(target, args)
            values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
            new.meta = {**node.meta, "val": target(*values)}
            self._made[key] = new
        return self._made[key]

    def _size(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        length: Any = _value(x).shape[dim]
        expression = length.node.expr
        for place in self._graph.find_nodes(op="placeholder"):
            value = place.meta.get("val")
            for index, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    return self.made(node, aten.sym_size.int, place, index)
        return self.made(node, aten.sym_size.int, x, dim)


class _NormEmitter:
    """Operations in the place of a norm.

    Attributes:
        dtype: in which statistics are computed.
    """

    def __init__(self, node: fx.Node, sizes: _ElementCounts) -> None:
        self.node, self.sizes = node, sizes
        args: tuple[Any, ...] = node.args
        self.x, self.weight, self.bias, self.mean, self.variance, _, self.momentum, self.epsilon, _ = args
        types = {_value(operand).dtype for operand in (self.x, self.mean) if isinstance(operand, fx.Node)} - {*_NARROW}
        self.dtype = torch.float64 if torch.float64 in types else torch.float32
        self._rank = _value(self.x).dim()

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds an operation."""
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.call_function(target, args, kwargs)
        new.meta = dict(self.node.meta)
        values, options = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        new.meta["val"] = target(*values, **options)
        return new

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Returns `x` in a type."""
        return x if _value(x).dtype == dtype else self(aten._to_copy.default, x, dtype=dtype)

    def along(self, value: Any) -> Any:
        """Returns what is of channels, the last dimension, next to a value with dimensions after these."""
        behind = self._rank - 2
        if behind > 0 and _value(value).dim() == 1:
            return self(aten.view.default, value, [-1, *[1] * behind])
        for _ in range(behind):
            value = self(aten.unsqueeze.default, value, -1)
        return value

    def moments(self, dims: Sequence[int]) -> tuple[fx.Node, fx.Node, fx.Node, Any]:
        """Returns what deviates from the mean, the mean, the sum of squares of the former, and the number of elements.

        A mean is a sum over a number, so that ranks that share out what is counted sum both.
        """
        x, count = self.cast(self.x, self.dtype), self.sizes.product(self.node, self.x, dims)
        mean = self(aten.div.Tensor, self(aten.sum.dim_IntList, x, [*dims]), count)
        centered = self(aten.sub.Tensor, x, self.along(mean))
        squares = self(aten.sum.dim_IntList, self(aten.mul.Tensor, centered, centered), [*dims])
        return centered, mean, squares, count

    def scaled(self, centered: fx.Node, variance: Any) -> fx.Node:
        """Returns the norm of what deviates from a mean."""
        scale = self(aten.rsqrt.default, self(aten.add.Tensor, variance, self.epsilon))
        if self.weight is not None:
            scale = self(aten.mul.Tensor, scale, self.weight)
        result = self(aten.mul.Tensor, centered, self.along(scale))
        if self.bias is not None:
            result = self(aten.add.Tensor, result, self.along(self.bias))
        return self.cast(result, _value(self.node).dtype)

    def update(self, mean: fx.Node, variance: fx.Node) -> None:
        """Moves the statistics that are kept towards these, `[C]` each."""
        for statistic, new in ((self.mean, mean), (self.variance, variance)):
            if statistic is not None:
                share = self(aten.mul.Tensor, self(aten.detach.default, new), self.momentum)
                old = self(aten.mul.Tensor, self.cast(statistic, self.dtype), 1 - self.momentum)
                self(aten.copy_.default, statistic, self(aten.add.Tensor, old, share))

    def unbiased(self, squares: fx.Node, count: Any) -> fx.Node:
        """Returns the variance of a sample."""
        less = count - 1 if isinstance(count, int) else self.sizes.made(self.node, operator.sub, count, 1)
        return self(aten.div.Tensor, squares, less)


def _by_batch(call: _NormEmitter) -> fx.Node:
    x, affine = call.x, [call.weight, call.bias]
    if _value(x).dtype in _NARROW:  # statistics are of the weights' type
        x = x if any(affine) else call.cast(x, call.dtype)
        affine = [None if parameter is None else call.cast(parameter, call.dtype) for parameter in affine]
    # torch's own kernel, so that the graph equals the module to the bit. Sums and counts
    # take its place only where data ranks share the batch.
    norm = call(aten._native_batch_norm_legit.no_stats, x, *affine, True, 0.0, call.epsilon)
    result, mean, scale = (call(operator.getitem, norm, index) for index in range(3))
    if call.mean is not None:
        dims = [dim for dim in range(_value(call.x).dim()) if dim != 1]
        count = call.sizes.product(call.node, call.x, dims)
        # The kernel gives 1 / sqrt(variance + epsilon), and statistics want the variance.
        moment = call(aten.reciprocal.default, call(aten.mul.Tensor, scale, scale))
        squares = call(aten.mul.Tensor, call(aten.sub.Tensor, moment, call.epsilon), count)
        call.update(mean, call.unbiased(squares, count))
    return call.cast(result, _value(call.node).dtype)


def _by_constants(call: _NormEmitter) -> fx.Node:
    """Norms with the statistics that are kept: by a product and a sum for each channel."""
    x = call.cast(call.x, _value(call.mean).dtype)
    return call.scaled(call(aten.sub.Tensor, x, call.along(call.mean)), call.variance)


def _by_instance(call: _NormEmitter) -> fx.Node:
    """Norms each row by itself; the statistics that are kept move towards the mean over rows."""
    centered, mean, squares, count = call.moments(range(2, _value(call.x).dim()))
    rows = call.sizes.product(call.node, call.x, [0])
    means = [
        call(aten.div.Tensor, call(aten.sum.dim_IntList, value, [0]), rows)
        for value in (mean, call.unbiased(squares, count))
    ]
    call.update(*means)
    return call.scaled(centered, call(aten.div.Tensor, squares, count))


def functional_form(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program in functional form; the one that is given may be changed.

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
    # Draws that nobody reads are kept (`patches.draws_stay`): without them all later draws would have other bits.
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
    """Returns whether torch composes a functional operator of others, and rules know these alone."""
    if target in _TAKEN_APART:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    gives = {str(value.type) for value in target._schema.returns}
    if not gives <= {"Tensor", "List[Tensor]"} or target._schema.name.removeprefix("aten::") in _STAYING:
        return False
    return rule_of(target) is None and _is_composite(target)


def _is_known(node: fx.Node) -> bool:
    """Returns whether the node can stay as it is, or is one of those that are rewritten."""
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
    """Returns whether a `chunk` is a `split` into parts of a known size."""
    source, _, *dim = node.args
    size = _value(source).shape[dim[0] if dim else 0]  # type: ignore[index]
    return isinstance(size, int) and size > 0 and not node.kwargs


def _has_sizes_of_inputs(node: fx.Node) -> bool:
    """Returns whether all sizes of the operand, and those of `unflatten`, are numbers or sizes of inputs."""
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


def _made(graph: fx.Graph, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Adds a call before `node` with its metadata."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    return new


def _is_same(node: fx.Node) -> bool:
    """Returns whether the result is the operand itself or a view of it."""
    mine, other = (StorageWeakRef(_value(n).untyped_storage()) for n in (node, node.args[0]))
    return bool(mine == other)


def _cast(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Writes `to`: the operand, or a copy in another type."""
    source: Any = node.args[0]
    if _is_same(node):
        return source  # type: ignore[no-any-return]
    options: dict[str, Any] = {"dtype": _value(node).dtype} if _value(node).dtype != _value(source).dtype else {}
    if _value(node).device != _value(source).device:
        options["device"] = _value(node).device
    return _made(graph, node, aten._to_copy.default, source, **options)


def _contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Writes `contiguous`: the operand, or a copy."""
    if _is_same(node):
        return node.args[0]  # type: ignore[return-value]
    return _made(graph, node, aten.clone.default, node.args[0], memory_format=torch.contiguous_format)


def _reshape(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Writes `reshape`: a view, or a view of a copy."""
    if _is_same(node):
        return _made(graph, node, aten.view.default, *node.args[:2])
    copy = _made(graph, node, aten.clone.default, node.args[0], memory_format=torch.contiguous_format)
    copy.meta["val"] = _value(node.args[0])
    return _made(graph, node, aten._unsafe_view.default, copy, node.args[1])


def _flatten(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Writes `flatten`: the operand where there is nothing to merge, or a `reshape`."""
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
    """Returns the first and the last dimension that `flatten` merges."""
    options = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    return options.get("start_dim", 0), options.get("end_dim", -1)  # type: ignore[return-value]


def _unflatten(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Writes `unflatten`: a view."""
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
    """Writes `chunk`: parts of one size, the last one smaller; a result is read by its index."""
    source, count, *dim = node.args
    size = _value(source).shape[dim[0] if dim else 0]  # type: ignore[index]
    return _made(graph, node, aten.split.Tensor, source, -(-size // count), *dim)  # type: ignore[operator]


def _size(graph: fx.Graph, node: fx.Node, dim: int) -> Any:
    """Returns the size of the first operand of `node`: a number, or a node as a trace has it."""
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
    """Returns the first placeholder, and its dimension, of which it is the size."""
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
    """Writes `dropout`: values and mask, or a copy of the operand."""
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
