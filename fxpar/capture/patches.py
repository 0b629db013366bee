"""All that a trace puts in the place of functions of torch, and of the host's generator; nowhere else is anything.

Enters: replacements. Leaves: context managers under which they stand; what was there is back at the end. Where torch's
versions differ in what is replaced is said here too.
"""

from __future__ import annotations

import contextlib
import math
import random
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.external_utils
import torch.export._trace as export_trace
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._decomp import decompositions
from torch._dynamo import trace_rules
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, tracing_state_functions
from torch._export.passes import replace_set_grad_with_hop_pass
from torch._export.utils import _get_shape_env_from_gm
from torch._subclasses import fake_impls
from torch.amp.autocast_mode import _enter_autocast
from torch.autograd.function import FunctionMeta
from torch.utils._sympy.symbol import SymT, symbol_is_type

from fxpar.torch_internals import FakeTensor, FakeTensorMode, ModuleStackTracer, in_kernel_invocation_manager

_OF_DATA = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
_QUESTIONS = ("is_compiling", "is_dynamo_compiling", "is_exporting")

# ---------------------------------------------------------------------- autograd functions, regions, hooks


def apply_of(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Calls `cls.apply` as torch has it, whatever stands in its place."""
    with mock.patch.object(FunctionMeta, "__getattribute__", type.__getattribute__):
        return torch._C._FunctionBase.__dict__["apply"].__get__(None, cls)(*args, **kwargs)


@contextlib.contextmanager
def _applies(apply: Callable[..., Any], is_taken: Callable[[type], bool]) -> Iterator[None]:
    """Takes the calls of `Function.apply`, looked up now or bound before.

    Up to torch 2.14 it is a `classmethod` of Python that calls its base class: so do the methods that were bound
    before, and they look the name up in each call. Later it is in C, and what was bound before stays what it was.
    """
    functions: Any = torch.autograd.function  # of another version than the stubs
    with contextlib.ExitStack() as stack:
        if hasattr(functions.Function.__dict__["apply"], "__func__"):
            stack.enter_context(mock.patch.object(functions._SingleLevelFunction, "apply", classmethod(apply)))
        else:
            undefined = functions._SingleLevelFunction.setup_context

            def by_position(cls: Any, *args: Any, **kwargs: Any) -> Any:
                if type.__getattribute__(cls, "setup_context") != undefined:
                    args, kwargs = functions._bind_default_args(cls.forward, args, kwargs)
                return apply(cls, *args, **kwargs)

            stack.enter_context(mock.patch.object(functions.Function, "apply", classmethod(by_position)))
            stack.enter_context(_bound_applies(by_position, is_taken))
        yield


def _bound_applies(apply: Callable[..., Any], is_taken: Callable[[type], bool]) -> Any:
    """Takes the calls of `apply` in C by what it looks up on the class: `setup_context`, the node's class, `forward`.

    `apply` stands for `forward` then, and its result becomes the function's. torch calls `forward` without gradients,
    which no trace sees: a `no_grad` inside would end where torch's does. Nothing else looks up the node's class.
    """
    plain = type.__getattribute__
    undefined = torch.autograd.function._SingleLevelFunction.setup_context
    called: list[tuple[type, bool]] = []

    def look_up(cls: type, name: str) -> Any:
        if name not in ("setup_context", "_backward_cls", "forward") or not is_taken(cls):
            return plain(cls, name)
        if name == "_backward_cls":
            called.append((cls, torch.is_grad_enabled()))
        elif name == "setup_context" and not torch._C._are_functorch_transforms_active():
            # As if there were none: `forward` is called with all arguments.
            return undefined
        elif name == "forward" and called and called[-1][0] is cls:
            with torch._C.DisableTorchFunction():
                torch._C._set_grad_enabled(called.pop()[1])
            return lambda ctx, *args, **kwargs: apply(cls, *args, **kwargs)
        return plain(cls, name)

    return mock.patch.object(FunctionMeta, "__getattribute__", look_up)


def _checkpoint_generator() -> str:
    """Returns the name of the generator that `checkpoint` goes through, which torch 2.15 has renamed."""
    later = "_checkpoint_without_reentrant_generator_impl"
    return later if hasattr(torch.utils.checkpoint, later) else "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def autograd_functions(
    apply: Callable[..., Any], is_taken: Callable[[type], bool], transformed: Callable[..., Any]
) -> Iterator[None]:
    """Takes the calls of autograd functions.

    Args:
        apply: called with the class and the arguments of its `apply`.
        is_taken: whether those of a class are taken where `apply` was bound before.
        transformed: called as `apply` is, under a transform such as vmap.
    """
    with (
        _applies(apply, is_taken),
        mock.patch.object(torch.autograd.function, "custom_function_call", transformed),
    ):
        yield


def checkpoints(region: Callable[..., Iterator[None]]) -> Any:
    """Runs each checkpointed region inside a generator that yields once."""
    return mock.patch.object(torch.utils.checkpoint, _checkpoint_generator(), region)


def inference_mode(enter: Callable[[Any], None]) -> Any:
    """Enters `torch.inference_mode` by another function, which is given the mode."""
    return mock.patch.object(torch.inference_mode, "__enter__", enter)


def saved_tensors_hooks(push: Callable[..., Any]) -> Any:
    """Takes the hooks on saved tensors that are pushed."""
    return mock.patch.object(torch._C._autograd, "_push_saved_tensors_default_hooks", push)


@contextlib.contextmanager
def module_hooks(register: Callable[..., Any]) -> Iterator[None]:
    """Takes the hooks on gradients that modules are given, each or all of them."""
    with contextlib.ExitStack() as stack:
        for name in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"):
            stack.enter_context(mock.patch.object(nn.Module, name, register))
        for name in ("full_backward_hook", "full_backward_pre_hook", "backward_hook"):
            stack.enter_context(mock.patch.object(nn.modules.module, f"register_module_{name}", register))
        yield


# ---------------------------------------------------------------------- what a trace would get wrong


def plain_distributions() -> Any:
    """Keeps distributions, while active, from checking their parameters, which would branch on values."""
    return mock.patch.object(torch.distributions.Distribution, "_validate_args", False)


def draws_stay() -> Any:
    """Keeps draws that nothing uses from being dead code, while active: draws after them would take their bits."""
    original = torch.fx.Node.is_impure

    def is_impure(node: torch.fx.Node, *args: Any, **kwargs: Any) -> bool:
        tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
        return torch.Tag.nondeterministic_seeded in tags or original(node, *args, **kwargs)

    return mock.patch.object(torch.fx.Node, "is_impure", is_impure)


def roots_of_sizes() -> Any:
    """Makes `math.sqrt` of a size a number of the trace, as `s ** 0.5` is, while active: by itself it fixes sizes."""
    original = math.sqrt

    def sqrt(x: Any, /) -> Any:
        return x**0.5 if isinstance(x, (torch.SymInt, torch.SymFloat)) else original(x)

    return mock.patch.object(math, "sqrt", sqrt)


@contextlib.contextmanager
def orders_of_products() -> Iterator[None]:
    """Takes the order in which `einsum` multiplies from the sizes of the example, while active.

    opt_einsum, where it is installed, finds it by comparing sizes: each comparison would fix them.
    """
    backend = torch.backends.opt_einsum
    original = backend.get_opt_einsum()

    class Orders:
        @staticmethod
        def contract_path(equation: str, *operands: Any, **options: Any) -> Any:
            shapes = [tuple(map(_example, operand.shape)) for operand in operands]
            return original.contract_path(equation, *shapes, shapes=True, **options)

    with mock.patch.object(backend, "get_opt_einsum", return_value=original and Orders):
        yield


def _example(size: Any) -> int:
    """Returns a size in the example; reading it fixes nothing."""
    return size if isinstance(size, int) else int(size.node.hint)


def recurrent_shapes() -> Any:
    """Gives states of an LSTM their shape, while active: torch 2.11 has a dimension of 1 more in a trace."""
    original: Any = decompositions.one_layer_lstm

    def one_layer(*args: Any, **kwargs: Any) -> Any:
        out, states = original(*args, **kwargs)
        return out, tuple(state.squeeze(0) if state.dim() > 2 else state for state in states)

    return mock.patch.object(decompositions, "one_layer_lstm", one_layer)


@contextlib.contextmanager
def loss_shapes() -> Iterator[None]:
    """Gives unreduced losses of symbolic sizes their shape in functional form, while active.

    torch's rule for `nll_loss` reads the positional `reduction` as its old `size_average`: 0 (none) becomes a sum.
    """
    aten = torch.ops.aten

    def nll_loss(
        logits: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: Any = -100
    ) -> Any:
        return aten.nll_loss_forward.default(logits, target, weight, reduction, ignore_index)[0]

    with mock.patch.dict(torch._decomp.decomposition_table, {aten.nll_loss.default: nll_loss}):
        yield


@contextlib.contextmanager
def known_counts() -> Iterator[None]:
    """Makes `bincount` with a `minlength` give as many counts, while active, not as many as its values ask for.

    That no value is larger is for `canonicalize` to find out, which refuses others.
    """
    bincount = torch.ops.aten.bincount.default
    original = fake_impls.op_implementations_dict[bincount]

    def counts(
        mode: FakeTensorMode, target: Any, x: Tensor, weights: Tensor | None = None, minlength: Any = 0
    ) -> Tensor:
        if weights is None and isinstance(minlength, int) and minlength:
            return x.new_empty(minlength, dtype=torch.int64)
        counted: Tensor = original(mode, target, x, weights, minlength)
        return counted

    with mock.patch.dict(fake_impls.op_implementations_dict, {bincount: counts}):
        yield


def late_code() -> Any:
    """Generates the code of a graph module, while active, when it is called or read, which few ever are.

    An export changes its graph in many steps, and would print and compile all of it after each.
    """
    original = fx.GraphModule.recompile

    def recompile(module: fx.GraphModule) -> None:
        codegen = module._graph._codegen
        if isinstance(codegen, fx.graph._PyTreeCodeGen):
            module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        cls: Any = type(module)  # of this module alone

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return generated(self).forward(*args, **kwargs)

        def generated(self: Any) -> Any:
            if "code" in vars(cls):
                del cls.code
            original(self)
            return self

        cls.forward, cls.code = forward, property(lambda self: generated(self).code)

    return mock.patch.object(fx.GraphModule, "recompile", recompile)


@contextlib.contextmanager
def small_trials() -> Iterator[None]:
    """Makes fakes without dimensions, while active, where torch tries what it remembers of an operator's result.

    It makes one as it would out of its memory, asks for its dispatch keys and throws it away. They depend on no size,
    and a tensor of symbolic sizes asks a hundred questions about them when it is made: a fifth of the time of a trace.
    Sizes made out of data may raise there, which torch takes for an answer: it makes all of such a fake.
    """
    original, remembered = FakeTensorMode._get_output_info_for_cache_entry, FakeTensorMode._output_from_cache_entry
    trials = 0

    def info(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        nonlocal trials
        trials += 1
        try:
            return original(mode, *args, **kwargs)
        finally:
            trials -= 1

    def output(mode: FakeTensorMode, state: Any, entry: Any, *args: Any, **kwargs: Any) -> Any:
        kind = entry.output_infos[0].metadata if trials else None
        if kind is None or (mode.shape_env is not None and _has_sizes_of_data(mode.shape_env)):
            return remembered(mode, state, entry, *args, **kwargs)
        with in_kernel_invocation_manager(mode):
            tensor = torch.empty(
                (), dtype=kind.dtype, layout=kind.layout, device="meta", requires_grad=kind.requires_grad
            )
        if kind.is_conj:
            torch._C._set_conj(tensor, True)
        if kind.is_neg:
            torch._C._set_neg(tensor, True)
        return FakeTensor(mode, tensor, kind.device)

    with (
        mock.patch.object(FakeTensorMode, "_get_output_info_for_cache_entry", info),
        mock.patch.object(FakeTensorMode, "_output_from_cache_entry", output),
    ):
        yield


def _has_sizes_of_data(sizes: Any) -> bool:
    return any(symbol_is_type(symbol, _OF_DATA) for symbol in sizes.var_to_range)


def bindings_where_there_are_any() -> Any:
    """Lets an export, while active, look which nodes make sizes out of data only where a trace has some."""
    original = export_trace._replace_unbacked_bindings

    def replace(module: fx.GraphModule) -> None:
        sizes = _get_shape_env_from_gm(module)
        if sizes is None or _has_sizes_of_data(sizes):
            original(module)
            return
        for node in module.graph.nodes:
            node.meta.pop("unbacked_bindings", None)

    return mock.patch.object(export_trace, "_replace_unbacked_bindings", replace)


def autocast_that_is_off_is_none() -> Any:
    """Takes out regions of `autocast(enabled=False)` in front of those of gradients, while active.

    Torch cuts a graph into its regions of gradients, and begins each part in the autocast of the one before: where a
    region without gradients stands inside of one without autocast, its first node is not the one that torch looks for,
    and it is forgotten. Regions without autocast change nothing else, as one with it is refused.
    """
    original = replace_set_grad_with_hop_pass.replace_set_grad_with_hop_pass

    def replace(module: fx.GraphModule, signature: Any) -> Any:
        for node in reversed(list(module.graph.nodes)):
            if node.target is _enter_autocast and node.args[2] is False:
                for end in list(node.users):
                    module.graph.erase_node(end)
                module.graph.erase_node(node)
        return original(module, signature)

    return mock.patch.object(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", replace)


# ---------------------------------------------------------------------- questions and numbers of the host


@contextlib.contextmanager
def questions(answering: Callable[[Callable[[], Any]], Callable[[], Any]]) -> Iterator[None]:
    """Answers whether a run is compiled or exported, by whatever name the question has been imported.

    Args:
        answering: makes the answer of torch's own function; it is called a frame below that function.
    """
    places = [(torch.compiler, name) for name in _QUESTIONS]
    places += [(home, "is_compiling") for home in (torch._dynamo, torch._dynamo.external_utils, torch._utils)]
    functions = {getattr(place, name) for place, name in places if hasattr(place, name)}
    with contextlib.ExitStack() as stack:
        for function in functions:
            stack.enter_context(_answered(function, answering))
        yield


@contextlib.contextmanager
def _answered(
    function: types.FunctionType, answering: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> Iterator[None]:
    """Has a function do something else, where others hold the function itself."""
    code, names = function.__code__, function.__globals__
    original = types.FunctionType(code, names)
    names["_answer_of_fxpar"] = answers = names.get("_answer_of_fxpar", {})
    answers[function.__name__] = answering(original)
    namespace: dict[str, Any] = {}
    exec(f"def asked(): return _answer_of_fxpar[{function.__name__!r}]()", namespace)
    # Code takes the place only of code with as many free variables, so this one has none and finds its answer by name.
    function.__code__ = namespace["asked"].__code__
    try:
        yield
    finally:
        function.__code__ = code
        del answers[function.__name__]
        if not answers:
            del names["_answer_of_fxpar"]


def question_of_fakes(answer: Callable[[Any, bool], bool]) -> Any:
    """Answers whether a tensor is a fake, where that is asked by torch's public name of its class.

    Args:
        answer: given what was asked about, and the true answer.
    """

    class Asked(type(FakeTensor)):  # type: ignore[misc]  # torch's metaclass of tensors
        def __instancecheck__(cls, value: Any) -> bool:
            return answer(value, isinstance(value, FakeTensor))

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, FakeTensor)

        def __eq__(cls, other: object) -> bool:
            return other is FakeTensor or other is cls

        def __hash__(cls) -> int:
            return hash(FakeTensor)

    return mock.patch.object(torch._subclasses, "FakeTensor", Asked("FakeTensor", (FakeTensor,), {}))


@contextlib.contextmanager
def host_random(number: Callable[[], Any], uniform: Callable[[float, float], Any]) -> Iterator[None]:
    """Draws the host's `random.random` and `random.uniform` otherwise."""
    with mock.patch.object(random, "random", number), mock.patch.object(random, "uniform", uniform):
        yield


# ---------------------------------------------------------------------- calls and attributes of modules


def calls_of_modules(call: Callable[..., Any]) -> Any:
    """Takes the calls of modules that an export traces.

    Args:
        call: called with what traces it as it is, the tracer, the module, its forward, arguments and keyword arguments.
    """
    original = ModuleStackTracer.call_module

    def call_module(tracer: Any, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return call(original, tracer, module, forward, args, kwargs)

    return mock.patch.object(ModuleStackTracer, "call_module", call_module)


def eager_calls_of_modules(call: Callable[..., Any]) -> Any:
    """Takes all calls of modules.

    Args:
        call: called with what calls it as it is, the module and the arguments.
    """
    original = nn.Module.__call__

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, *args, **kwargs)

    return mock.patch.object(nn.Module, "__call__", call_module)


@contextlib.contextmanager
def attribute_reads(classes: Iterable[type], seen: Callable[[Any, str], None]) -> Iterator[None]:
    """Shows each look-up of an attribute of an object of some classes, by object and name."""

    def reading(original: Any) -> Callable[[Any, str], Any]:
        def read(self: Any, name: str) -> Any:
            seen(self, name)
            return original(self, name)

        return read

    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.enter_context(mock.patch.object(cls, "__getattribute__", reading(cls.__getattribute__)))
        yield


# ---------------------------------------------------------------------- Dynamo


def remember_originals() -> None:
    """Has Dynamo look up now, before anything is replaced, the functions that it knows by identity.

    It looks them up when it first asks, and again once a process group was made. In a trace it would find the
    replacements, and know torch's own functions no more: neither in this trace nor in the caller's `torch.compile`.
    """
    trace_rules.get_torch_obj_rule_map()
    tracing_state_functions()
    TorchInGraphFunctionVariable._get_handlers()


@contextlib.contextmanager
def functions_in_graph() -> Iterator[None]:
    """Lets Dynamo keep each call of a user's autograd function, which the export then records."""
    added = []
    pending: list[type] = [torch.autograd.Function]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if not cls.__module__.startswith("torch.") and not trace_rules.is_callable_allowed(cls):
            torch.compiler.allow_in_graph(cls)
            added.append(id(cls))
    try:
        yield
    finally:
        for key in added:
            trace_rules._allowed_callable_ids.remove(key)


def mutations(seen: Callable[[Any], None]) -> Any:
    """Shows Dynamo's side effects before it writes code for them."""
    original = SideEffects.codegen_update_mutated

    def update(effects: Any, *args: Any, **kwargs: Any) -> Any:
        seen(effects)
        return original(effects, *args, **kwargs)

    return mock.patch.object(SideEffects, "codegen_update_mutated", update)
