"""Dynamo, for models that `torch.export` alone cannot trace.

Enters: a module and example arguments. Leaves: a graph module over the module's own parameter objects, which exports
like any other, and the branches on sizes that Dynamo took, which the export does not see any more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export

from fxpar.capture import patches
from fxpar.capture.guards import bound_arguments
from fxpar.capture.places import source_of
from fxpar.capture.python_state import check_assignment
from fxpar.capture.recording import RECOMPUTE_KEY
from fxpar.errors import CaptureError

_CHILD = re.compile(r"\._modules\['([^']+)'\]")


@dataclass(frozen=True)
class Assumption:
    """A relation between sizes of the call's tensors.

    Attributes:
        relation: of Dynamo's symbols.
        sizes: for each symbol the number of the leaf of `(args, kwargs)` and its dimension.
    """

    relation: Any
    sizes: Mapping[Any, tuple[int, int]]


@dataclass(frozen=True)
class Offered:
    """Which dimensions of tensors are offered as symbolic.

    Attributes:
        leading: how many leading dimensions are; None for all.
        fixed: dimensions, and the sizes of theirs that are numbers.
    """

    leading: int | None = None
    fixed: frozenset[tuple[int, int]] = frozenset()

    def dims(self, value: Tensor) -> list[int]:
        """Those of a tensor, which have two and more elements."""
        sizes = enumerate(value.shape[: self.leading])
        return [i for i, size in sizes if size > 1 and (i, size) not in self.fixed]


def dynamo_graph(
    module: nn.Module, prefix: str, args: tuple[Any, ...], kwargs: dict[str, Any], offered: Offered
) -> tuple[fx.GraphModule, tuple[Assumption, ...]]:
    """Traces a module with Dynamo; sizes of two and more stay symbolic where the module lets them.

    Args:
        prefix: what module paths begin with besides the author's names.
        offered: which dimensions.

    Raises:
        TorchDynamoException: Dynamo cannot trace it in one graph.
        CaptureError: the forward keeps state in attributes, or enters `inference_mode`.
    """
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, Tensor):
            for dim in offered.dims(value):
                torch._dynamo.maybe_mark_dynamic(value, dim)
    with patches.functions_in_graph(), _assignments(module) as seen:
        graph_module = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    for owner, name, value in seen:
        check_assignment(module, owner, name, value, prefix)
    for node in graph_module.graph.nodes:
        if getattr(node.target, "__name__", "") == "_enter_inference_mode" and node.args[0]:
            raise CaptureError("inference_mode is lost here", where=source_of(node), remedy="use torch.no_grad()")
    inline_checkpoints(graph_module)
    return graph_module, _assumptions(graph_module, module, args, kwargs)


@contextlib.contextmanager
def _assignments(root: nn.Module) -> Iterator[list[tuple[nn.Module, str, Any]]]:
    """What Dynamo sees assigned to modules' attributes, which it leaves out of the graph: (module, name, value)."""
    seen: list[tuple[nn.Module, str, Any]] = []

    def note(effects: Any) -> None:
        for owner, values in effects.store_attr_mutations.items():
            module = getattr(owner, "value", None)
            if isinstance(module, nn.Module):
                seen.extend((module, name, getattr(value, "value", value)) for name, value in values.items())
        for store in effects._get_modified_vars():
            path = getattr(store.source, "name", "")
            path = str(path() if callable(path) else path)
            if path.endswith(("._buffers", "._parameters")):
                module = root.get_submodule(".".join(_CHILD.findall(path)))
                # What has no source was computed in the forward.
                seen.extend((module, key.vt.value, value) for key, value in store.items.items() if value.source is None)

    with patches.mutations(note):
        yield seen


def inline_checkpoints(graph_module: fx.GraphModule, first: int = 1) -> int:
    """Inlines the checkpointed regions of a graph, their nodes annotated with the region's number.

    Returns:
        The next free number.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or str(node.target) != "tag_activation_checkpoint":
            continue
        number, first = first, first + 1
        body: Any = node.args[0]
        inner = getattr(graph_module, str(body.target))
        first = inline_checkpoints(inner, first)
        holders = (n for n in inner.graph.nodes if n.op == "placeholder")
        mapping: dict[fx.Node, Any] = dict(zip(holders, node.args[1:], strict=True))
        with graph.inserting_before(node):
            outputs: Any = graph.graph_copy(inner.graph, mapping)
        for old, new in mapping.items():
            if old.op not in ("placeholder", "output"):
                new.meta["custom"] = {RECOMPUTE_KEY: number, **new.meta.get("custom", {})}
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
    graph_module.recompile()
    return first


def _assumptions(
    graph_module: fx.GraphModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Assumption, ...]:
    environment = getattr(graph_module.meta.get("fake_mode"), "shape_env", None)
    if environment is None:
        return ()
    leaves = pytree.tree_leaves((args, kwargs))
    numbers = {id(value): i for i, value in enumerate(leaves) if isinstance(value, Tensor)}
    values = {"L": bound_arguments(module, args, kwargs)}
    places: dict[Any, tuple[int, int]] = {}
    for symbol, sources in environment.var_to_sources.items():
        for source in sources:
            base = getattr(source, "base", None)
            if base is None or not hasattr(source, "idx"):
                continue
            # The source is an expression over the arguments by name, as in Dynamo's own guards.
            tensor = eval(base.name() if callable(base.name) else base.name, values)
            if id(tensor) in numbers:
                places.setdefault(symbol, (numbers[id(tensor)], int(source.idx)))
    assumptions = []
    for guard in environment.guards:
        relation = guard.expr.xreplace(environment.replacements)
        symbols = relation.free_symbols
        if symbols and symbols <= places.keys():
            assumptions.append(Assumption(relation, {s: places[s] for s in symbols}))
    return tuple(assumptions)
