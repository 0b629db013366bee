"""What an author's gradient does to layouts: autograd functions and operators whose backward is Python.

Enters: a call of one. Leaves: whether it is element-wise, and whether its backward is linear in the gradient. Both are
proved on the operations that forward and backward make, traced without values, and never by samples of their results:
what cannot be traced is neither.

Element-wise is what makes element-wise operations alone, the same ones at two sizes, and asks no tensor for a size: a
shard would answer with the rank's. Linear is what gives a partial sum for gradients that are one: the gradients are P
and all other values R, and the rules say what becomes of them.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fxpar.errors import InputError, PlanError
from fxpar.ir.program import Note, Program, TensorType, ValueType, describe, operands, set_note, tensor_type
from fxpar.layout.layout import P, Placement, R
from fxpar.layout.symbolic_sizes import evaluate, names
from fxpar.signatures.engine import Refusal, Rule, infer
from fxpar.signatures.op_call import OpCall, call_of
from fxpar.torch_internals import FakeTensorMode, engine_run_backward

# What the author's code may raise on operands that are not the traced ones.
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError, KeyError, InputError)
# Derivatives of element-wise operations.
_DERIVATIVES = frozenset(
    f"aten.{name}_backward.default"
    for name in "elu gelu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish sigmoid silu softplus tanh".split()
) | {"aten.threshold_backward.default"}
_ZEROS = ("aten.zeros_like.default", "aten.zeros.default", "aten.new_zeros.default")
_RANDOM = ("aten.dropout.default", "aten.native_dropout.default")
# Answers that are the same for a whole value and for a rank's part of it.
_HARMLESS = frozenset(
    "requires_grad dtype layout is_leaf ndim is_sparse is_quantized is_nested dim ndimension is_floating_point "
    "is_complex is_signed element_size itemsize is_inference grad_fn is_tensor result_type can_cast".split()
)
_MOST_SUBSETS = 3
# Code of torch that asks for sizes to find out what an operator gives, and that hands a call on.
_INTERNAL = re.compile(
    r"/torch/(_subclasses|_meta_registrations|_prims|_prims_common|_refs|_decomp|_ops|_library|fx)\b"
)
_WRAPPERS = re.compile(r"/torch/(overrides|_tensor|__init__)\.py$")

RuleOf = Callable[[Any], Rule | None]


@dataclass(frozen=True)
class Argument:
    """An argument of a call.

    Attributes:
        name: by the schema, or its position.
        dtype: of a tensor; None for a constant.
        value: the tensor's shape, or the constant.
        kind: of the constant: 1, 1.0 and True are equal.
    """

    name: str
    dtype: torch.dtype | None
    value: Any
    kind: type | None = None


@dataclass(frozen=True)
class Traced:
    """Forward and backward as one graph: operands and gradients of the outputs in, gradients of operands out.

    Attributes:
        graph_module: nodes have notes with types.
        gradients: the placeholders that are gradients.
        reads: what was asked of a tensor besides other tensors, with the place; empty where nothing was.
    """

    graph_module: fx.GraphModule
    gradients: tuple[fx.Node, ...]
    reads: str


class _Reads(TorchFunctionMode):
    """Notes what the author's code asks of tensors that a rank's part would answer in another way."""

    first = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _INTERNAL.search(_asker()):
            return result
        plain = [v for v in pytree.tree_leaves(result) if not isinstance(v, Tensor) and v is not None]
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if plain and name not in _HARMLESS and not isinstance(func, torch._ops.OpOverload):
            self.first = self.first or name
        return result


def _asker() -> str:
    """Returns the file of the code that called a function of torch."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_filename == __file__ or _WRAPPERS.search(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


def resolve_function(path: str) -> Any:
    """Returns the class that a `fxpar.function` node calls.

    Raises:
        InputError: there is no such autograd function.
    """
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        function = None
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise InputError(
            "there is no such autograd function", where=path, remedy="define it at the top level of a module"
        )
    return function


def _flat(value: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]


def _subsets(count: int) -> list[tuple[int, ...]]:
    """Lists which of several ask for a gradient, or get one: all sets of a few, of more the whole and single ones."""
    everything = tuple(range(count))
    if count <= _MOST_SUBSETS:
        return [c for size in range(1, count + 1) for c in itertools.combinations(everything, size)]
    return [everything, *((i,) for i in everything)]


def forget_proofs() -> None:
    """Forgets proofs of functions, which may read settings of a module or class that have changed since."""
    _traces.cache_clear()


@lru_cache(maxsize=256)
def _traces(target: Any, arguments: tuple[Argument, ...]) -> tuple[Traced, ...] | str:
    """Traces a call for each set of operands that ask for a gradient and of outputs that get one; or says why not.

    Args:
        target: an autograd function's class, or an operator.
        arguments: of the call.
    """
    kinds = [(a.dtype, a.value) for a in arguments if a.dtype is not None]
    run = _call(target, arguments)
    floating = [i for i, (dtype, _) in enumerate(kinds) if dtype.is_floating_point or dtype.is_complex]
    traces = []
    try:
        for asking in _subsets(len(floating)):
            indices = [floating[i] for i in asking]
            with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
                leaves = [torch.empty(s, dtype=d, requires_grad=i in indices) for i, (d, s) in enumerate(kinds)]
                upstream = [torch.empty_like(o).detach() for o in _flat(run(*leaves)) if o.requires_grad]
            for got in _subsets(len(upstream)):
                traces.append(_trace(run, leaves, indices, [upstream[i] for i in got], got))
    except _FAILURES as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return tuple(traces)


def _call(target: Any, arguments: Sequence[Argument]) -> Callable[..., Any]:
    def run(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        by_name = {a.name: next(remaining) if a.dtype is not None else a.value for a in arguments}
        return target(**by_name) if isinstance(target, torch._ops.OpOverload) else target.apply(*by_name.values())

    return run


def _trace(
    run: Callable[..., Any], leaves: list[Tensor], indices: list[int], upstream: list[Tensor], got: tuple[int, ...]
) -> Traced:
    reads = _Reads()
    count = len(leaves)

    def both(*values: Tensor) -> Any:
        with reads:
            outputs = _flat(run(*values[:count]))
        roots = [o for o in outputs if o.requires_grad]
        inputs = tuple(values[i] for i in indices)
        with reads:
            # The public call would switch the mode off while it runs the author's backward.
            gradients = engine_run_backward(
                tuple(roots[i] for i in got),
                tuple(values[count:]),
                False,
                False,
                inputs,
                allow_unreachable=True,
                accumulate_grad=False,
            )
        return [g for g in gradients if g is not None], outputs

    with torch.enable_grad():
        graph_module = make_fx(both, tracing_mode="fake")(*leaves, *upstream)
    holders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = getattr(graph_module, str(node.target))
        set_note(node, Note(type=_type(node.meta.get("val"))))
    return Traced(graph_module, tuple(holders[count:]), reads.first)


def _type(value: Any) -> ValueType:
    if isinstance(value, Tensor):
        return TensorType(value.dtype, tuple(int(size) for size in value.shape))
    if isinstance(value, (tuple, list)):
        return tuple(_type(v) for v in value if isinstance(v, Tensor))  # type: ignore[misc]
    return None


def _calls(traced: Traced) -> list[fx.Node]:
    return [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]


def _not_pointwise(traced: Traced, known: Set[str]) -> str:
    for node in _calls(traced):
        if str(node.target) not in known:
            return f"contains {node.target}"
    for node in traced.graph_module.graph.nodes:
        if node.op == "get_attr" and node.meta["val"].numel() > 1:
            return "contains a tensor of its own"
    return f"asks a tensor for its {traced.reads}" if traced.reads else ""


def impurity(call: OpCall, known: Set[str]) -> str:
    """Returns an empty text where a call's function is element-wise both ways; else what it does besides.

    Args:
        known: names of the element-wise operators.
    """
    rank, texts = len(call.outputs[0].shape), []
    for first in (2, 11):  # what a size decides differs between them
        shape = tuple(range(first, first + rank))
        arguments = _arguments(call)
        target, resized = arguments[0], [replace(a, value=shape) if a.dtype is not None else a for a in arguments[1]]
        traces = _cached(target, resized)
        if isinstance(traces, str):
            return f"cannot be traced ({traces})"
        # Dropout is element-wise, but a rank would draw bits of its own.
        allowed = (known | _DERIVATIVES | set(_ZEROS)) - set(_RANDOM)
        other = next((text for traced in traces if (text := _not_pointwise(traced, allowed))), "")
        if other:
            return other
        texts.append([_text(traced) for traced in traces])
    return "" if texts[0] == texts[1] else "computes with numbers that depend on a size"


def _text(traced: Traced) -> str:
    """Shows what is computed; zeros have the shape of what they stand for."""
    shown = [(n.name, str(n.target), "" if str(n.target) in _ZEROS else (n.args, n.kwargs)) for n in _calls(traced)]
    return str(shown)


def nonlinearity(call: OpCall, rule_of: RuleOf) -> str:
    """Returns an empty text where a call's gradients are known to be linear in those of its results; else why not.

    PyTorch's own operators are differentiated, which is linear. What has a backward of the author's is traced.

    Args:
        call: of any operator.
        rule_of: the rule of an operator.
    """
    is_operator = isinstance(call.target, torch._ops.OpOverload)
    if call.target.namespace in ("aten", "prims", "fxpar") if is_operator else "path" not in call.arguments:
        return ""
    name = str(call.target) if is_operator else str(call.get("path"))
    if set(call.names) & set(call.arguments):
        return f"{name} takes a list of tensors, so its backward is not known to be linear in the gradient"
    traces = _cached(*_arguments(call))
    if isinstance(traces, str):
        return f"the backward of {name} cannot be traced ({traces})"
    for traced in traces:
        other = _not_a_sum(traced, rule_of)
        if other:
            return f"the backward of {name} is not known to be linear in the gradient ({other})"
        if traced.reads:
            return f"{name} asks a tensor for its {traced.reads}, so its backward is known for one size alone"
    return ""


def _cached(target: Any, arguments: Sequence[Argument]) -> tuple[Traced, ...] | str:
    try:
        return _traces(target, tuple(arguments))
    except TypeError as error:  # a constant that cannot be hashed
        return str(error)


def _arguments(call: OpCall) -> tuple[Any, list[Argument]]:
    """Returns what a call calls, and its arguments in order; shapes in numbers."""
    arguments = {k: Argument(k, None, v, type(v)) for k, v in call.arguments.items() if k != "path"}
    for name, kind in zip(call.names, call.operands, strict=True):
        arguments[name] = Argument(name, kind.dtype, _shape(kind))
    if isinstance(call.target, torch._ops.OpOverload):
        return call.target, [arguments[a.name] for a in call.target._schema.arguments if a.name in arguments]
    return resolve_function(str(call.get("path"))), [arguments[name] for name in sorted(arguments, key=int)]


def _shape(kind: TensorType) -> tuple[int, ...]:
    """Returns the shape with a prime for each symbol, so that no two of them are equal."""
    symbols = sorted(names(kind.shape))
    primes = dict(zip(symbols, (101, 103, 107, 109, 113, 127, 131, 137), strict=False))
    return tuple(evaluate(size, {n: primes.get(n, 139) for n in symbols}) for size in kind.shape)


def _not_a_sum(traced: Traced, rule_of: RuleOf) -> str:
    """Returns an empty text where partial gradients (P) give partial gradients; else the operation that does not."""
    placed: dict[fx.Node, Placement] = {}
    zeros: set[fx.Node] = set()  # what a result without gradient has for one: R as well as P
    for node in traced.graph_module.graph.nodes:
        if node.op == "output":
            gradients = [g for g in node.args[0][0] if isinstance(g, fx.Node)]
            fixed = next((g for g in gradients if placed[g] != P and g not in zeros), None)
            return f"{fixed.target} does not depend on it" if fixed is not None else ""
        sources = operands(node) if node.op == "call_function" else []
        placements = [placed[o] for o in sources]
        wide = [P if o in zeros else placed[o] for o in sources]
        if node in traced.gradients or (
            P in placements and P in (_sum(node, placements, rule_of), _sum(node, wide, rule_of))
        ):
            placed[node] = P
        elif P in placements:
            return str(node.target)
        else:
            placed[node] = R
            if str(node.target) in _ZEROS or (P in wide and _sum(node, wide, rule_of) == P):
                zeros.add(node)
    return ""


def _sum(node: fx.Node, placements: Sequence[Placement], rule_of: RuleOf) -> Placement | None:
    """Returns P where the results are sums of what partial operands give; None where they are not known to be."""
    if node.target is operator.getitem:
        return placements[0]
    target: Any = node.target
    is_derivative = isinstance(target, torch._ops.OpOverload) and target._schema.name.endswith("_backward")
    if is_derivative and target.namespace == "aten" and placements.count(P) == 1 and placements[0] == P:
        return P  # torch's own backward is linear in its gradient, which comes first
    outputs = infer(rule_of(target), call_of(node, 2), placements, [True] * len(placements))
    return P if not isinstance(outputs, Refusal) and set(outputs) == {P} else None


_TRIAL_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError, KeyError)
_SIZE = 2  # of symbols, in a trial
_TRIALS = ((0.7, 0), (-3.0, 1))  # values of the loss, and seeds of the gradient that comes in


@dataclass(frozen=True)
class AddedLoss:
    """A loss that a function adds.

    Attributes:
        passed: the operand that the function returns.
        loss: the scalar operand.
        factor: its gradient, where that of the model's loss is 1.
    """

    passed: fx.Node
    loss: fx.Node
    factor: float


def adding_nodes(program: Program) -> list[fx.Node]:
    """Returns the calls of functions that the plan declares to add a loss."""
    globs = program.plan.operators.added_losses
    calls = [node for node in program.graph.nodes if "path" in node.kwargs] if globs else []
    return [node for node in calls if any(fnmatchcase(str(node.kwargs["path"]), glob) for glob in globs)]


def check_added_losses(program: Program) -> None:
    """Checks that each glob of the plan's `added_losses` names a function that the program calls.

    Raises:
        PlanError: one names none.
    """
    called = sorted({str(node.kwargs["path"]) for node in program.graph.nodes if "path" in node.kwargs})
    for glob in program.plan.operators.added_losses:
        if not any(fnmatchcase(path, glob) for path in called):
            remedy = f"autograd functions of the model are {', '.join(called)}" if called else "leave it out"
            raise PlanError("matches no autograd function", where=f"operators.added_losses: {glob!r}", remedy=remedy)


def added_loss(node: fx.Node) -> AddedLoss:
    """Tries what a declared function does, forward and backward.

    Raises:
        PlanError: it is no function that passes its first operand and adds a multiple of its only other one.
    """
    tensors = operands(node)
    if len(tensors) != 2 or node.args[0] is not tensors[0] or not all(tensor_type(t).is_float for t in tensors):
        _refuse(node, "it takes other tensors than the value that it passes, first, and a scalar loss")
    passed, loss = tensors
    if tensor_type(loss).shape:
        _refuse(node, f"its loss is no scalar, but {tensor_type(loss)}")
    factors = {_factor(node, passed, loss, value, seed) for value, seed in _TRIALS}
    if len(factors) > 1:
        _refuse(node, "the gradient of its loss depends on the loss, or on the gradient that comes in")
    return AddedLoss(passed, loss, factors.pop())


def _factor(node: fx.Node, passed: fx.Node, loss: fx.Node, value: float, seed: int) -> float:
    kind = tensor_type(passed)
    shape = [evaluate(size, dict.fromkeys(names(kind.shape), _SIZE)) for size in kind.shape]
    generator = torch.Generator().manual_seed(seed)
    x, upstream = (torch.randn(shape, generator=generator).to(kind.dtype) for _ in range(2))
    tensors = {passed: x.requires_grad_(), loss: torch.tensor(value, dtype=tensor_type(loss).dtype).requires_grad_()}
    try:
        with torch.enable_grad():
            args = [tensors[a] if isinstance(a, fx.Node) else a for a in node.args]
            result = resolve_function(str(node.kwargs["path"])).apply(*args)
        if not isinstance(result, Tensor) or not torch.equal(result, x):
            _refuse(node, "it does not return its first operand")
        gradients: Sequence[Any] = torch.autograd.grad(result, list(tensors.values()), upstream, allow_unused=True)
    except _TRIAL_FAILURES as error:
        _refuse(node, f"it raises {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}")
    if gradients[0] is None or not torch.equal(gradients[0], upstream):
        _refuse(node, "it does not hand the gradient on to its first operand")
    return 0.0 if gradients[1] is None else float(gradients[1])


def _refuse(node: fx.Node, reason: str) -> NoReturn:
    raise PlanError(
        f"{node.kwargs['path']} is declared to add a loss, and {reason}",
        where=describe(node),
        remedy="leave it out of added_losses, and add the loss to the one that the model returns",
    )
