"""From a module to an exported graph: non-strict `torch.export`, Dynamo where that fails.

Enters: a module, example arguments. Leaves: `Trace`, an `ExportedProgram` in functional form with what the guards saw.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpar.capture.guards import Recorder, check_example, check_model, recording, separate
from fxpar.errors import CaptureError

_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError, TorchDynamoException)


class WithLoss(nn.Module):
    """A model and a loss `(outputs, batch) → scalar` traced together; returns both."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Any:
        """Outputs and loss for one batch."""
        args, kwargs = arguments(self.model, batch, True)
        outputs = self.model(*args, **kwargs)
        return {"loss": self.loss(outputs, batch), "outputs": outputs}


def arguments(model: nn.Module, batch: Any, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is passed to a model: a mapping by keyword, a tuple by position, a tensor alone.

    With a loss callable the entries that `forward` does not take (targets) are for the loss only.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        everything = not has_loss or any(p.kind is p.VAR_KEYWORD for p in parameters)
        return (), {k: v for k, v in batch.items() if everything or k in names}
    values = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if has_loss and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        required = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        needed = sum(p.default is p.empty for p in required)
        values = values[: max(needed, 1)]
    return values, {}


@dataclass(frozen=True)
class Trace:
    """An exported program, how it was obtained (`export` or `dynamo`), and what was recorded on the way."""

    exported: ExportedProgram
    how: str
    recorder: Recorder
    prefix: str


def trace(model: nn.Module, batch: Any, loss: Callable[..., Any] | None) -> Trace:
    """Traces the model on a batch, and with `loss` also `loss(outputs, batch)`.

    Every dimension of two or more elements is offered as symbolic; the model may pin it.

    Raises:
        CaptureError: the model cannot be traced into one graph; the text says where and what to do.
    """
    check_model(model)
    check_example(batch)
    batch = separate(batch)
    module, prefix = model, ""
    args, kwargs = arguments(model, batch, loss is not None)
    if loss is not None:
        module, prefix, args, kwargs = WithLoss(model, loss), "model.", (batch,), {}
    with recording() as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported, how = _export(module, args, kwargs)
        _inline_modes(exported.graph_module)
        functional = exported.run_decompositions({})
    _refuse_mutation(functional)
    return Trace(functional, how, recorder, prefix)


def _symbolic(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {i: Dim.AUTO for i, size in enumerate(value.shape) if size > 1}
    return None


def _export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ExportedProgram, str]:
    shapes = pytree.tree_map(_symbolic, (args, kwargs))
    flat = (*shapes[0], *shapes[1].values())

    def export(target: nn.Module) -> ExportedProgram:
        return torch.export.export(target, args, kwargs, dynamic_shapes=_named_shapes(args, kwargs, flat), strict=False)

    try:
        return export(module), "export"
    except CaptureError:
        raise
    except _FAILURES as error:
        first = error
    _explain_now(first)
    try:
        from torch._dynamo.functional_export import dynamo_graph_capture_for_export

        captured = dynamo_graph_capture_for_export(module)(*args, **kwargs)
        return export(captured), "dynamo"
    except _FAILURES as error:
        raise _explained(first, error) from first


def _named_shapes(args: tuple[Any, ...], kwargs: dict[str, Any], flat: tuple[Any, ...]) -> Any:
    """`dynamic_shapes` wants a mapping for keyword calls and a tuple for positional ones."""
    return tuple(flat) if args or not kwargs else dict(zip(kwargs, flat, strict=True))


def _explain_now(error: BaseException) -> None:
    """Raises at once where no other way of tracing can help."""
    text = str(error)
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in text.lower():
        raise CaptureError(
            f"the model branches on values of tensors: {_first_line(text)}",
            where=_place(error),
            remedy="decide with sizes or configuration, or use torch.where",
        ) from error
    if "Cache" in text and "output" in text:
        raise CaptureError(
            f"the model returns a cache: {_first_line(text)}",
            where="model.config.use_cache",
            remedy="set model.config.use_cache = False (caches are for generation)",
        ) from error


def _explained(first: BaseException, second: BaseException) -> CaptureError:
    return CaptureError(
        f"the model cannot be traced: {_first_line(str(first))}; and with Dynamo: {_first_line(str(second))}",
        where=_place(first),
        remedy="make the forward depend on inputs and configuration alone",
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"


def _place(error: BaseException) -> str:
    """The deepest frame of the traceback that is the author's and not torch's."""
    found, entry = "", error.__traceback__
    while entry is not None:
        name = entry.tb_frame.f_code.co_filename
        if "/torch/" not in name and "/fxpar/" not in name and not name.startswith("<"):
            found = f"{name.rsplit('/', 1)[-1]}:{entry.tb_lineno}"
        entry = entry.tb_next
    return found


def _inline_modes(graph_module: fx.GraphModule) -> None:
    """Inlines `no_grad` regions, whose outputs are detached, before decomposition forgets that they were any."""
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name = node.target.name()
        if name == "wrap_with_set_grad_enabled":
            _inline(graph_module, node, node.args[1], node.args[2:], detach=not node.args[0])
        elif name == "wrap_with_autocast" and node.args[2] is False:
            _inline(graph_module, node, node.args[4], node.args[5:], detach=False)
        else:
            raise CaptureError(
                f"the higher-order operator {name} is not supported",
                where=f"%{node.name}",
                remedy="leave control flow, autocast and compiled regions out of the model",
            )
    graph_module.graph.lint()
    graph_module.recompile()


def _inline(graph_module: fx.GraphModule, node: fx.Node, body: fx.Node, args: Any, detach: bool) -> None:
    inner = getattr(graph_module, str(body.target))
    _inline_modes(inner)
    graph = graph_module.graph
    with graph.inserting_before(node):
        holders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        mapping = dict(zip(holders, args, strict=True))
        outputs = graph.graph_copy(inner.graph, mapping)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        if detach:
            outputs = [_detached(graph, value) for value in outputs]
    for user in list(node.users):
        if user.target.__name__ != "getitem":  # type: ignore[union-attr]
            raise CaptureError("a region's outputs are used as a whole", where=f"%{node.name}")
        user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)


def _detached(graph: fx.Graph, value: Any) -> Any:
    kind = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(kind, torch.Tensor) or not kind.dtype.is_floating_point:
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


def _refuse_mutation(exported: ExportedProgram) -> None:
    signature = exported.graph_signature
    for name, target in signature.buffers_to_mutate.items():
        raise CaptureError(
            f"the forward changes the buffer {target} (value {name})",
            where=target,
            remedy="use layers without running statistics (LayerNorm for BatchNorm), or put them in eval mode",
        )
    for target in signature.user_inputs_to_mutate.values():
        raise CaptureError("the forward changes its input in place", where=target, remedy="work on a copy")
