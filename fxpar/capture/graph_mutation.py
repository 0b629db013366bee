"""Regions and mutation in an exported graph: what must be inlined before the graph is made functional.

Enters: graphs with higher-order operators (`no_grad`, autocast, checkpoints) and in-place operators. Leaves: flat
graphs with the same gradients; errors where functional form would lose a gradient or a changed parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fxpar.capture.places import source_of
from fxpar.errors import CaptureError

aten = torch.ops.aten
_CHANGED = {
    OutputKind.PARAMETER_MUTATION: "parameter",
    OutputKind.USER_INPUT_MUTATION: "input",
}
_REMEDIES = {
    "parameter": "change it outside of the forward",
    "input": "work on a copy",
}


def inline_modes(graph_module: fx.GraphModule, parameters: frozenset[str]) -> None:
    """Inlines `no_grad` regions, whose outputs are detached, before functional form forgets that they were any.

    Args:
        parameters: names of the placeholders of parameters.

    Raises:
        CaptureError: control flow, autocast, or an in-place change that only autograd does not see.
    """
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name = node.target.name()
        if name == "wrap_with_set_grad_enabled":
            _inline(graph_module, node, node.args[1], node.args[2:], parameters, detach=not node.args[0])
        elif name == "wrap_with_autocast" and node.args[2] is False:
            _inline(graph_module, node, node.args[4], node.args[5:], parameters, detach=False)
        elif name == "wrap_with_autocast":
            raise CaptureError(
                "autocast chooses types behind the graph's back",
                where=_first_source(graph_module, node.args[4]),
                remedy="cast where the model needs it; Plan(precision=…) sets the model's type",
            )
        else:
            raise CaptureError(
                f"the higher-order operator {name} is not supported",
                where=source_of(node) or f"%{node.name}",
                remedy="leave control flow and compiled regions out of the model",
            )
    graph_module.graph.lint()
    graph_module.recompile()


def _first_source(graph_module: fx.GraphModule, body: Any) -> str:
    inner = getattr(graph_module, str(body.target))
    return next((source_of(n) for n in inner.graph.nodes if source_of(n)), f"%{body.name}")


def _inline(
    graph_module: fx.GraphModule,
    node: fx.Node,
    body: fx.Node,
    args: Any,
    parameters: frozenset[str],
    detach: bool,
) -> None:
    inner = getattr(graph_module, str(body.target))
    inline_modes(inner, frozenset())
    graph = graph_module.graph
    holders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    mapping = dict(zip(holders, args, strict=True))
    if detach:
        for changed, where in _changes(inner.graph):
            outer = mapping.get(changed)
            # A parameter itself is refused by name, later.
            if outer is not None and outer.name not in parameters and _has_gradient(outer, parameters):
                _refuse_hidden(where)
    with graph.inserting_before(node):
        outputs = graph.graph_copy(inner.graph, mapping)
        if detach:
            copies = [mapping[copied] for copied in inner.graph.nodes if copied in mapping and copied not in holders]
            _detach_writes(copies)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        if detach:
            # What a region returns as it came keeps its gradient: no_grad changes no tensor that was there before.
            outputs = [value if value in args else _detached(graph, value) for value in map(_itself, outputs)]
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise CaptureError(
                "a region's outputs are used as a whole", where=f"%{node.name}", remedy="report this model"
            )
        replacement: Any = outputs[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(replacement)
        graph.erase_node(user)
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)


_DROPOUTS = (aten.dropout, aten.alpha_dropout, aten.feature_dropout, aten.feature_alpha_dropout)


def _itself(value: Any) -> Any:
    """Returns the operand of a dropout that does nothing: in PyTorch it is returned as it came, with its gradient."""
    while isinstance(value, fx.Node) and getattr(value.target, "overloadpacket", None) in _DROPOUTS:
        source, p, training = value.args
        if training and p != 0:
            break
        value = source
    return value


def _detach_writes(nodes: list[Any]) -> None:
    """Detaches what a `no_grad` region writes into memory from outside: it is read there without a gradient."""
    for node in nodes:
        changed = _mutated(node) if isinstance(node, fx.Node) else []
        if not changed:
            continue
        with node.graph.inserting_before(node):
            for operand in [read for read in node.all_input_nodes if read not in changed]:
                detached = _detached(node.graph, operand)
                if detached is not operand:
                    node.replace_input_with(operand, detached)


def _detached(graph: fx.Graph, value: Any) -> Any:
    kind = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(kind, torch.Tensor) or not (kind.dtype.is_floating_point or kind.dtype.is_complex):
        return value
    node = graph.call_function(aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """Returns the value of which the node is a view, or which it has changed in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    arguments = node.target._schema.arguments
    is_view = bool(arguments) and arguments[0].alias_info is not None and isinstance(node.args[0], fx.Node)
    return node.args[0] if is_view else None  # type: ignore[return-value]


def _base(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Returns the value whose memory the node is a view of, and the `detach` nodes that lie between."""
    detached = []
    while (viewed := _viewed(node)) is not None:
        if node.target is aten.detach.default:
            detached.append(node)
        node = viewed
    return node, detached


def _mutated(node: fx.Node) -> list[fx.Node]:
    """Returns the operands that a node changes in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    pairs = zip(schema.arguments, node.args, strict=False)
    return [v for a, v in pairs if isinstance(v, fx.Node) and a.alias_info is not None and a.alias_info.is_write]


def _changes(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """Returns every value that is changed in place, itself or through a view, and where."""
    return [(_base(value)[0], source_of(node)) for node in graph.nodes for value in _mutated(node)]


def _has_gradient(value: Any, parameters: frozenset[str]) -> bool:
    """Returns whether a parameter reaches the value, or what is written into its memory, on a way without `detach`."""
    seen: set[fx.Node] = set()
    pending = [value] if isinstance(value, fx.Node) else []
    while pending:
        node = pending.pop()
        if node in seen or node.target is aten.detach.default:
            continue
        seen.add(node)
        if node.op == "placeholder" and node.name in parameters:
            return True
        pending.extend(node.all_input_nodes)
        pending.extend(user for user in node.users if _viewed(user) is node and _is_written(user))
    return False


def _is_written(view: fx.Node) -> bool:
    """Returns whether the node changes the memory in place, or something does through it."""
    return bool(_mutated(view)) or any(_mutated(user) for _, user in _reads(view))


def _refuse_hidden(where: str) -> NoReturn:
    raise CaptureError(
        "changes a value in place where autograd does not see it, so that its gradient belongs to the old value",
        where=where,
        remedy="compute a new value, or change it outside of no_grad and detach",
    )


def inline_regions(exported: ExportedProgram, prefix: str) -> None:
    """Inlines the regions of an exported graph and refuses changes in place that functional form would get wrong.

    Args:
        prefix: what names begin with besides the author's.

    Raises:
        CaptureError: names the line, or the parameter that changes.
    """
    specs = {s.arg.name: s for s in exported.graph_signature.input_specs}
    parameters = frozenset(name for name, s in specs.items() if s.kind is InputKind.PARAMETER)
    for module in exported.graph_module.modules():
        _note_readers(module)
    inline_modes(exported.graph_module, parameters)
    _free(exported.graph, parameters)
    for node in exported.graph.nodes:
        for value in _mutated(node):
            base, detached = _base(value)
            if detached and _has_gradient(base, parameters):
                _refuse_hidden(source_of(node))
            if base.op == "placeholder" and specs[base.name].kind is InputKind.PARAMETER:
                name = str(specs[base.name].target).removeprefix(prefix)
                _refuse_change("parameter", name, source_of(node))


def _note_readers(module: nn.Module) -> None:
    """Notes who reads each value: where torch inlines the part between two regions that has one result
    (`torch._export.utils.node_inline_`), it forgets who reads that result within the part.
    """
    if isinstance(module, fx.GraphModule):
        for node in module.graph.nodes:
            for operand in node.all_input_nodes:
                operand.users.setdefault(node)


def _free(graph: fx.Graph, parameters: frozenset[str]) -> None:
    """Takes away each `detach` of a value without gradient into whose memory one with a gradient is written later.

    Autograd follows the detached tensor from then on. Functional form computes it anew as the `detach` of the changed
    value, which would stop the gradient.

    Raises:
        CaptureError: the value is read afterwards next to the detached tensor, where autograd has no gradient for it.
    """
    for node in list(graph.nodes):
        for value in _mutated(node):
            base, detached = _base(value)
            written = [operand for operand in node.all_input_nodes if operand is not value]
            if not detached or _has_gradient(base, parameters):
                continue
            if not any(_has_gradient(operand, parameters) for operand in written):
                continue
            followed = detached[0]  # the tensor that autograd follows, with its views
            if any(user > node and followed not in (user, *_base(view)[1]) for view, user in _reads(base)):
                _refuse_hidden(source_of(node))
            for stop in detached:
                stop.replace_all_uses_with(stop.args[0])  # type: ignore[arg-type]
                graph.erase_node(stop)


def _reads(base: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields every view of a value, itself too, with each of its users."""
    pending = [base]
    while pending:
        view = pending.pop()
        for user in view.users:
            yield view, user
            if _viewed(user) is view:
                pending.append(user)


def _refuse_change(kind: str, name: str, source: str) -> NoReturn:
    line = f" ({source})" if source else ""
    raise CaptureError(f"the forward changes this {kind}{line}", where=name, remedy=_REMEDIES[kind])


def refuse_mutation(exported: ExportedProgram, prefix: str) -> None:
    """Refuses a functional program that returns new values of parameters or inputs; arguments as for `inline_regions`.

    Raises:
        CaptureError: names the parameter or input.
    """
    for spec in exported.graph_signature.output_specs:
        if spec.kind in _CHANGED:
            _refuse_change(_CHANGED[spec.kind], str(spec.target).removeprefix(prefix), "")


def replace_copies(exported: ExportedProgram) -> None:
    """Writes `copy(target, source)` as its source in the target's type and shape: the former has no derivative."""
    graph = exported.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.copy.default:
            continue
        target, source = node.args[0], node.args[1]
        with graph.inserting_before(node):
            if target.meta["val"].dtype != source.meta["val"].dtype:
                source = _like(graph, node, aten._to_copy.default, source, dtype=target.meta["val"].dtype)
            if tuple(target.meta["val"].shape) != tuple(source.meta["val"].shape):
                source = _like(graph, node, aten.expand_as.default, source, target)
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _like(graph: fx.Graph, node: fx.Node, target: Any, source: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    new = graph.call_function(target, (source, *args), kwargs)
    new.meta = dict(node.meta)
    if target is aten._to_copy.default:
        new.meta["val"] = source.meta["val"].to(kwargs["dtype"])
    return new
