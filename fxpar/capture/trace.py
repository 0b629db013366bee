"""From a module to an exported graph: non-strict `torch.export`, Dynamo where that fails.

Enters: a module, example arguments. Leaves: `Trace`, an `ExportedProgram` in functional form with what was recorded.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._decomp
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpar.capture import patches
from fxpar.capture.branches import Questions, host_numbers
from fxpar.capture.functional import functional_form, normed_batches
from fxpar.capture.graph_mutation import inline_regions, refuse_mutation, replace_copies
from fxpar.capture.input_checks import bound_arguments, check_example, check_loss, check_model, no_host_random, separate
from fxpar.capture.layer_trace_cache import LayerTraceCache, Number
from fxpar.capture.places import Blamed, place_of, source_of
from fxpar.capture.prepared_model import cast_inputs, with_memory
from fxpar.capture.python_state import OtherMemos, check_assignment, nothing_remembered, untouched, watched
from fxpar.capture.recording import RECOMPUTE_KEY, Recorder, UntracedEffectMode, recording
from fxpar.capture.size_expressions import SizeError
from fxpar.errors import CaptureError
from fxpar.experts.compiler.module_forms import refuse_loop
from fxpar.torch_internals import DynamicOutputShapeException

# Dynamo, for models that torch.export alone cannot trace: a graph module that exports like any other.


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
        """Returns those of a tensor, which have two and more elements."""
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
    """Yields what Dynamo sees assigned to modules' attributes, and leaves out of the graph: (module, name, value)."""
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


# What PyTorch says where an operation that is written in C++ is given a symbolic size.
_TAKES_NUMBERS = re.compile(r"expected to contain only concrete integers|Cannot call \w+\(\) on tensor with symbolic")
# Arguments, keyword arguments, and which dimensions are symbolic.
_Call = tuple[tuple[Any, ...], dict[str, Any], Offered]
# Makes a context, anew for each run.
Substitutes = Callable[[], contextlib.AbstractContextManager[None]]
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError, TorchDynamoException)


class WithLoss(nn.Module):
    """A model and a loss `(outputs, batch) → scalar` traced together; returns both."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self._dtype = model, dtype
        self._loss = (loss,)  # in a tuple: a loss that is a module is no part of the model

    def forward(self, batch: Any) -> Any:
        """Returns outputs and loss for one batch."""
        args, kwargs = cast_inputs(arguments(self.model, batch, True), self._dtype)
        outputs = self.model(*args, **kwargs)
        loss = self._loss[0](outputs, batch)
        if not isinstance(loss, Tensor) or loss.dim() > 0 or not loss.is_floating_point():
            kind = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise CaptureError(f"returns {kind}, not a floating scalar", where="loss", remedy="reduce it to one number")
        return {"loss": loss, "outputs": outputs}


class WithKeywords(nn.Module):
    """A model called with one mapping: torch.export loses track of what forward takes as `**kwargs`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, keywords: dict[str, Any]) -> Any:
        """Returns the model's outputs."""
        return self.model(**keywords)


_SIGNATURES: weakref.WeakKeyDictionary[nn.Module, tuple[Any, inspect.Signature]] = weakref.WeakKeyDictionary()


def signature_of(model: nn.Module) -> inspect.Signature:
    """Returns what a model's forward takes, asked once: that takes longer than a small step."""
    forward: Any = model.forward
    function, signature = _SIGNATURES.get(model, (None, None))
    if signature is None or function is not getattr(forward, "__func__", forward):
        signature = inspect.signature(forward)
        _SIGNATURES[model] = (getattr(forward, "__func__", forward), signature)
    return signature


def arguments(model: nn.Module, batch: Any, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns how a batch is passed to a model: a mapping by keyword, a tuple by position, a tensor alone.

    With a loss callable the entries that `forward` does not take (targets) are for the loss only.
    """
    parameters = signature_of(model).parameters.values()
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
    """An exported program in functional form and how it came about.

    Attributes:
        exported: the graph with its signature.
        how: `export`; `compiled` where the model was told that it is compiled; or `dynamo`.
        recorder: what was recorded on the way.
        prefix: what module paths begin with besides the author's names.
        originals: where the model has no memory, its tensor for the id of each tensor of `exported`.
        assumptions: branches on sizes that Dynamo took before the export.
        keywords: the model was called with keyword arguments and traced with one mapping of them.
        copied: calls of layers that are copies, each with that which it repeats.
        norms: modules that norm by statistics of the batch, each with its line.
    """

    exported: ExportedProgram
    how: str
    recorder: Recorder
    prefix: str
    originals: Mapping[int, Tensor] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()
    keywords: bool = False
    copied: Mapping[Number, Number] = field(default_factory=dict)
    norms: tuple[str, ...] = ()


def trace(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None,
    offered: Offered,
    others: OtherMemos | None = None,
    *,
    copies: bool = False,
    substitutes: Substitutes = contextlib.nullcontext,
    dtype: torch.dtype | None = None,
) -> Trace:
    """Traces the model on a batch, and with `loss` also `loss(outputs, batch)`.

    Args:
        offered: dimensions that may be symbolic; the model may pin them.
        others: memoised functions of a capture that traces several times.
        copies: whether calls of layers that repeat may be copies of the first one's, which the caller is to prove.
        substitutes: a context in which modules compute by other forwards than their author's.
        dtype: in which the forward takes floating tensors; None for their own.

    Raises:
        CaptureError: the model cannot be traced into one graph; the text says where and what to do.
    """
    check_model(model)
    check_loss(loss)
    check_example(batch)
    bound_arguments(model, *arguments(model, batch, loss is not None))
    safe = separate(batch)
    with quiet(), substitutes(), no_host_random(model), with_memory(model, safe) as (batch, originals):
        call = called(model, batch, loss, dtype)
        with patches.known_counts(), Blamed(_raised):
            traced = _trace(call, offered, originals, others or OtherMemos(), copies)
        return replace(traced, keywords=isinstance(call.module, WithKeywords))


@dataclass(frozen=True)
class Called:
    """What is run for a batch: the model, or a module around it, and its arguments.

    Attributes:
        prefix: what module paths begin with besides the author's names.
    """

    module: nn.Module
    prefix: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def called(model: nn.Module, batch: Any, loss: Callable[..., Any] | None, dtype: torch.dtype | None = None) -> Called:
    """Returns the call of a model, and of `loss(outputs, batch)`; the forward's floating tensors in a type."""
    if loss is not None:
        return Called(WithLoss(model, loss, dtype), "model.", (batch,), {})
    args, kwargs = cast_inputs(arguments(model, batch, False), dtype)
    if any(name not in inspect.signature(model.forward).parameters for name in kwargs):
        return Called(WithKeywords(model), "model.", (kwargs,), {})
    return Called(model, "", args, kwargs)


def _raised(reason: str, place: str) -> CaptureError:
    return CaptureError(
        f"the model cannot be traced, it raises {reason}",
        where=place,
        remedy="make the forward run on one device, with sizes that may vary",
    )


def _trace(run: Called, offered: Offered, originals: Mapping[int, Tensor], others: OtherMemos, copies: bool) -> Trace:
    module, prefix, call = run.module, run.prefix, (run.args, run.kwargs, offered)
    patches.remember_originals()
    refused: CaptureError | None = None
    # What trains by itself is the eager model; where its way depends on values of tensors, its compiled way is taken.
    for as_eager in (True, False):
        questions = Questions(as_eager)
        try:
            with untouched(module), nothing_remembered(module, others), questions:
                # Another way than the eager one is not what the walk of the eager model goes.
                exported, recorder, copied, norms = _functional(module, call, prefix, copies and as_eager)
            how = "export" if as_eager else "compiled"
            return Trace(exported, how, recorder, prefix, originals, copied=copied, norms=norms)
        except (CaptureError, *FAILURES) as error:
            if copies:  # what is wrong with a model shows in a trace of each of its layers
                return _trace(run, offered, originals, others, False)
            if not isinstance(error, CaptureError):
                first = error
            elif isinstance(error, SizeError) and offered.leading != 0:
                raise  # with fewer symbols it may be traced
            elif as_eager and questions.asked:
                refused = error
            elif refused is not None:
                raise refused from error
            else:
                raise
        if not questions.asked:
            break
    if refused is None:
        refuse_loop(first, place_of(first), module, prefix)
        _explain_now(first, module if originals else None)
    try:
        with untouched(module), nothing_remembered(module, others, plain=True):
            graph_module, assumptions = dynamo_graph(module, prefix, *call)
        exported, recorder, _, norms = _functional(graph_module, call, prefix, False)
        return Trace(exported, "dynamo", recorder, prefix, originals, assumptions, norms=norms)
    except FAILURES as error:
        if refused is not None:
            raise refused from error
        raise _explained(first, error) from first


def _functional(
    module: nn.Module, call: _Call, prefix: str, copies: bool
) -> tuple[ExportedProgram, Recorder, Mapping[Number, Number], tuple[str, ...]]:
    """Exports a module in functional form.

    Returns:
        Besides it what was recorded, which calls of layers are copies of which, and the norms of the batch.
    """
    args, kwargs, offered = call
    shapes = pytree.tree_map(lambda value: _dims(value, offered), bound_arguments(module, args, kwargs))
    watch = UntracedEffectMode()
    with recording() as recorder, patches.draws_stay(), patches.small_trials():
        repeats = LayerTraceCache(module, recorder)
        try:
            # It prints the graph of a failed trace.
            with (
                watched(module, prefix, watch.read),
                watch,
                patches.plain_distributions(),
                patches.roots_of_sizes(),
                patches.orders_of_products(),
                patches.recurrent_shapes(),
                patches.autocast_that_is_off_is_none(),
                patches.late_code(),
                patches.bindings_where_there_are_any(),
                host_numbers(),
                patches.calls_of_modules(repeats.call) if copies else contextlib.nullcontext(),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                # Not strict: a strict export, which goes through Dynamo, loses gradients of some models without a word.
                exported = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
        except CaptureError as error:
            if error.where:
                raise
            raise type(error)(error.reason, where=place_of(error), remedy=error.remedy) from error
        with patches.late_code():
            inline_regions(exported, prefix)
        norms = normed_batches(exported.graph, prefix)
        with patches.loss_shapes():
            functional = functional_form(exported)
        refuse_mutation(functional, prefix)
        replace_copies(functional)
    return functional, recorder, repeats.copied, norms


def _dims(value: Any, offered: Offered) -> Any:
    if isinstance(value, Tensor):
        # AUTO lets the model fix a dimension, which then is a number. With DYNAMIC that would be an error.
        return dict.fromkeys(offered.dims(value), Dim.AUTO)
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences logs of graphs and warnings, while active, about what becomes one error here."""
    names = ("fx.experimental.symbolic_shapes", "_dynamo", "_subclasses.fake_tensor", "export")
    loggers = [logging.getLogger(f"torch.{name}") for name in names]
    disabled = [logger.disabled for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger, was in zip(loggers, disabled, strict=True):
                logger.disabled = was


def _explain_now(error: BaseException, without_memory: nn.Module | None) -> None:
    """Raises at once where no other way of tracing can help."""
    text = str(error)
    stray = _meta_attribute(without_memory) if without_memory is not None and "device meta" in text else ""
    if stray:
        raise CaptureError(
            "a tensor of the meta device that is neither parameter nor buffer has no values",
            where=stray,
            remedy="register it as a buffer, or make it in forward",
        ) from error
    if isinstance(error, NotImplementedError) and "/sympy/" in _last_file(error):
        raise SizeError(
            f"a condition on sizes cannot be decided: {_first_line(text)}",
            where=place_of(error),
            remedy="make sizes simple multiples of one another, or of one number",
        ) from error
    if _TAKES_NUMBERS.search(text):
        raise SizeError(
            f"an operation of PyTorch takes sizes that are numbers alone: {_first_line(text)}",
            where=place_of(error),
            remedy="write it with other operations",
        ) from error
    if isinstance(error, DynamicOutputShapeException):
        raise CaptureError(
            f"{error.func} gives shapes that depend on values of tensors (ctc_loss reads lengths on the host)",
            where=place_of(error),
            remedy="return what it takes and call it outside the model, or call it in an operator of your own "
            "(torch.library.custom_op with register_fake and register_autograd)",
        ) from error
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in text.lower():
        raise CaptureError(
            f"the model branches on values of tensors: {_first_line(text)}",
            where=place_of(error),
            remedy="decide with sizes or configuration, or use torch.where",
        ) from error
    if "Cache" in text and "output" in text:
        raise CaptureError(
            f"the model returns a cache: {_first_line(text)}",
            where="model.config.use_cache",
            remedy="set model.config.use_cache = False (caches are for generation)",
        ) from error
    if "unhashable" in text and "Sym" in text:
        raise CaptureError(
            "the model uses a size as a dictionary key, which a trace keeps symbolic",
            where=place_of(error),
            remedy="compute the value in each call",
        ) from error
    # A model that has run eagerly hashes what it hashes: it is torch 2.11 that hashes an unknown output here.
    if ("not a known type" in text and "output" in text) or text.startswith("unhashable type"):
        raise CaptureError(
            f"the model returns an object of an unknown container type: {_first_line(text).split('. ')[0]}",
            where="outputs",
            remedy="return tensors, tuples or dicts; torch.export.register_dataclass makes a dataclass known",
        ) from error


def _last_file(error: BaseException) -> str:
    """Returns where an error was raised."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry.tb_frame.f_code.co_filename if entry is not None else ""


def _meta_attribute(model: nn.Module) -> str:
    """Returns the first tensor attribute that is on the meta device; parameters and buffers are fakes by then."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                return f"{path}.{name}".lstrip(".")
    return ""


def _explained(first: BaseException, second: BaseException) -> CaptureError:
    return CaptureError(
        f"the model cannot be traced: {_first_line(str(first))}; and with Dynamo: {_first_line(str(second))}",
        where=place_of(first),
        remedy="see that the plain model runs on this batch; its forward may depend on inputs and configuration alone",
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
