"""Modules of experts that a plan names, as operators on routed rows while a model is captured.

Enters: a model, and the globs of `Experts(expert_modules=…)`. Leaves: a reading of each module that they name, and
a context in which it computes by that in place of its own forward, whose loop depends on the routing.

That a reading is what the module computes is tried: its own forward and the reading run on random weights and tokens,
outputs and gradients must agree, and the forward must leave nothing behind, which a reading would not. It is a trial
and no proof; `fxpar verify` at the level of values compares the whole model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional

from fxpar.errors import PlanError, shown
from fxpar.experts.compiler.choices import picked_rows_error
from fxpar.experts.operators.expert_layer import experts, swiglu
from fxpar.experts.operators.grouped import expand_by_expert, group_sizes, grouped_linear, halves, swiglu_rows
from fxpar.experts.operators.permute import moe_combine, moe_permute, sort_by_expert

# How the weights of a module of experts may be read.

# The first matrices of an expert, and its second one; a gate before what it weighs.
_NAMES = (
    (("gate_up_proj",), "down_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up_proj",), "down_proj"),
    (("w1",), "w2"),
)
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
_GATE = "_apply_gate"


@dataclass(frozen=True)
class Reading:
    """One way to read a module.

    Attributes:
        first: names of the first matrices, [E, n, h].
        down: that of the second ones, [E, h, m].
        transposed: whether they stand [E, h, n] and [E, m, h].
        gated: whether a gate weighs what is made by the first matrices.
        listed: path of the list of experts, each a module with linear layers of these names, "" for the module itself;
            None where weights are stacked.
        experts: E.
        width: h.
    """

    first: tuple[str, ...]
    down: str
    transposed: bool
    gated: bool
    listed: str | None
    experts: int
    width: int

    def compute(self, module: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Returns what the experts make of tokens, in operators on routed rows: [T, h], [T, K], [T, K] → [T, h]."""
        biases = [self._whole(module, name, "bias") for name in (*self.first, self.down)]
        first = [self._whole(module, name) for name in self.first]
        return experts(
            hidden,
            indices,
            weights,
            [matrix for matrix in first if matrix is not None],
            self._needed(module, self.down),
            gate_up_bias=[bias for bias in biases[:-1] if bias is not None] or None,
            down_bias=biases[-1],
            activation=self._activation(module),
            transposed=self.transposed,
            norm=_norm(module),
        )

    def loop(self, module: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Returns the same expert by expert, which needs no memory for more than one."""
        total, activation, norm = torch.zeros_like(hidden), self._activation(module), _norm(module)
        for number in range(self.experts):
            tokens, places = torch.where(indices == number)
            inner = [self._one(module, name, number, hidden[tokens]) for name in self.first]
            outputs = self._one(module, self.down, number, activation(*inner))
            outputs = outputs if norm is None else norm(outputs)
            total = total.index_add(0, tokens, outputs * weights[tokens, places, None])
        return total

    def without_rows(self, module: nn.Module, indices: Tensor) -> set[int]:
        """Returns identities of the parameters that belong to experts alone which none of the indices chooses."""
        if self.listed is None:
            return set()
        by_expert = [{id(p) for p in expert.parameters()} for expert in _list_of(module, self.listed)]
        chosen = set(indices.unique().tolist())
        with_rows = set[int]().union(*(by_expert[number] for number in chosen))
        return set[int]().union(*by_expert) - with_rows

    def _one(self, module: nn.Module, name: str, number: int, rows: Tensor) -> Tensor:
        if self.listed is not None:
            layer: nn.Linear = getattr(_list_of(module, self.listed)[number], name)
            return functional.linear(rows, layer.weight, layer.bias)
        matrix, bias = self._needed(module, name)[number], self._whole(module, name, "bias")
        product = rows @ (matrix if self.transposed else matrix.mT)
        return product if bias is None else product + bias[number]

    def _needed(self, module: nn.Module, name: str) -> Tensor:
        matrices = self._whole(module, name)
        assert matrices is not None, "a reading is made of matrices that are there"
        return matrices

    def _whole(self, module: nn.Module, name: str, kind: str = "weight") -> Tensor | None:
        """Returns the matrices or biases of all experts; None where there are none."""
        if self.listed is None:
            return getattr(module, name if kind == "weight" else f"{name}_bias", None)
        tensors = [getattr(getattr(expert, name), kind) for expert in _list_of(module, self.listed)]
        return None if tensors[0] is None else torch.stack(tensors)

    def _activation(self, module: nn.Module) -> Callable[..., Tensor]:
        owner = module if self.listed is None else _list_of(module, self.listed)[0]
        own_gate = getattr(owner, _GATE, None)
        if self.gated and own_gate is not None and len(self.first) == 1:
            return own_gate  # type: ignore[no-any-return]
        named = (getattr(owner, name, None) for name in _ACTIVATIONS)
        function: Any = next((candidate for candidate in named if callable(candidate)), functional.silu)
        if not self.gated:
            return function  # type: ignore[no-any-return]
        if function is functional.silu or isinstance(function, nn.SiLU):
            return swiglu

        def gated(*inner: Tensor) -> Tensor:
            gate, up = inner if len(inner) > 1 else inner[0].chunk(2, dim=-1)
            return function(gate) * up  # type: ignore[no-any-return]

        return gated


def readings(module: nn.Module) -> Iterator[Reading]:
    """Yields the readings by which a module's weights are those of experts, by names and shapes."""
    transposed = getattr(module, "is_transposed", None)
    ways = (False, True) if transposed is None else (bool(transposed),)
    for first, down in _NAMES:
        matrices = [getattr(module, name, None) for name in (*first, down)]
        if all(isinstance(matrix, Tensor) and matrix.dim() == 3 for matrix in matrices):
            for way in ways:
                yield from _of_shapes(first, down, way, [tuple(matrix.shape) for matrix in matrices], None)  # type: ignore[union-attr]
    for path, listed in _lists(module):
        for first, down in _NAMES:
            layers = [[getattr(expert, name, None) for name in (*first, down)] for expert in listed]
            if all(type(layer) is nn.Linear for of_expert in layers for layer in of_expert) and _alike(layers):
                shapes = [(len(listed), *layer.weight.shape) for layer in layers[0]]  # type: ignore[union-attr]
                yield from _of_shapes(first, down, False, shapes, path)


def _of_shapes(
    first: tuple[str, ...], down: str, transposed: bool, shapes: list[tuple[int, ...]], listed: str | None
) -> Iterator[Reading]:
    turned = [(e, i, o) if transposed else (e, o, i) for e, o, i in shapes]
    count, width, inner = turned[-1]
    if any(shape[::2] != (count, width) for shape in turned[:-1]):
        return
    outs = [shape[1] for shape in turned[:-1]]
    if outs in ([2 * inner], [inner, inner]):
        yield Reading(first, down, transposed, True, listed, count, width)
    elif outs == [inner]:
        yield Reading(first, down, transposed, False, listed, count, width)


def _lists(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yields the module where it is a list, and the lists that it has."""
    for path, child in (("", module), *module.named_children()):
        if isinstance(child, nn.ModuleList) and len(child) > 0:
            yield path, child


def _list_of(module: nn.Module, path: str) -> Any:
    return module.get_submodule(path) if path else module


def _alike(layers: list[list[Any]]) -> bool:
    """Returns whether all experts' layers have the first one's shapes, and biases where it has."""
    facts = [[(layer.weight.shape, layer.bias is None) for layer in of_expert] for of_expert in layers]
    return all(fact == facts[0] for fact in facts)


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Returns what transformers calls the norm of what experts have made."""
    return module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None  # type: ignore[return-value]


_REMEDY = "call fxpar.ops.experts in its forward, or leave it out of expert_modules"
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError)
# Of the largest value, by the type of the trial: in float64 a module may compute in float32 inside; what does not run
# in float64 is tried in float32.
_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
_SCALES = (1.0, 40.0)  # of tokens: what is clamped, is so beyond a threshold
_TOKENS = 11
_MOST = 2**22  # elements of weights that are random each for itself, and whose gradients are compared
_STEPS = (1, 17, 29)  # between neighbours of the last, the second last … dimension, where values are shared
# A context in which a module runs on other tensors, by the identities of its own, and is left as it was.
TrialRun = Callable[[nn.Module, Mapping[int, Tensor]], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class ExpertModule:
    """A module of experts that a plan names.

    Attributes:
        path: in the model.
        module: itself.
        reading: how its weights are read.
    """

    path: str
    module: nn.Module
    reading: Reading


def substitutes(
    model: nn.Module, globs: Sequence[str], trial_run: TrialRun
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context, to be entered anew for each run, in which experts compute on routed rows.

    Raises:
        PlanError: as `named_experts`.
    """
    return functools.partial(routed_experts, named_experts(model, globs, trial_run))


def named_experts(model: nn.Module, globs: Sequence[str], trial_run: TrialRun) -> tuple[ExpertModule, ...]:
    """Returns the modules that the globs of a plan name, each with the reading of which a trial found no difference.

    Raises:
        PlanError: a glob matches nothing, or a module that is no such one; names it, and what differs.
    """
    modules = dict(model.named_modules())
    experts: dict[int, ExpertModule] = {}
    for glob in globs:
        paths = [path for path in modules if fnmatchcase(path, glob)]
        if not paths:
            those = [path for path, module in modules.items() if path and is_named_so(module)]
            looks = f"modules of experts are {', '.join(those[:6])}" if those else _REMEDY
            raise PlanError("matches no module", where=f"experts.expert_modules: {glob!r}", remedy=looks)
        for path in paths:
            if id(modules[path]) not in experts:
                experts[id(modules[path])] = _named(path, modules[path], glob, trial_run)
    return tuple(experts.values())


def is_named_so(module: nn.Module) -> bool:
    """Returns whether a module has the weights and the forward of experts, by their names."""
    return any(readings(module)) and len(_operands(module)) == 3


def refuse_loop(error: BaseException, where: str, model: nn.Module, prefix: str) -> None:
    """Refuses a loop over experts that a trace has failed in.

    Args:
        error: of the trace.
        where: the author's line that raised it.
        model: that was traced.
        prefix: what module paths begin with, apart from the author's names.

    Raises:
        CaptureError: the innermost module of the author's that it was raised in is one of experts.
    """
    if not isinstance(error, GuardOnDataDependentSymNode):
        return
    # By what their attributes are in: a trace may call a module by a proxy that shares them.
    paths = {id(vars(module)): (path, module) for path, module in model.named_modules()}
    entry, innermost = error.__traceback__, None
    while entry is not None:
        receiver = entry.tb_frame.f_locals.get("self")
        innermost = paths.get(id(vars(receiver)), innermost) if isinstance(receiver, nn.Module) else innermost
        entry = entry.tb_next
    if innermost is not None and is_named_so(innermost[1]):
        raise picked_rows_error(where, innermost[0].removeprefix(prefix)) from error


def _refuse(path: str, glob: str, reason: str) -> NoReturn:
    raise PlanError(reason, where=f"experts.expert_modules: {glob!r} names {path or 'the model'}", remedy=_REMEDY)


def _named(path: str, module: nn.Module, glob: str, trial_run: TrialRun) -> ExpertModule:
    if "forward" in vars(module):
        _refuse(path, glob, "its forward was put in the place of that of its class")
    operands = _operands(module)
    if len(operands) != 3:
        _refuse(
            path,
            glob,
            f"its forward takes {', '.join(operands) or 'nothing'}, not hidden_states [T, h], top_k_index [T, K] and "
            "top_k_weights [T, K]",
        )
    tried = list(readings(module))
    if not tried:
        _refuse(
            path,
            glob,
            "it has no weights of experts: gate_up_proj and down_proj, gate_proj, up_proj and down_proj, or w1, w3 and "
            "w2, stacked [E, …, …] or linear layers of a list of experts",
        )
    reasons = []
    for reading in tried:
        reason = _difference(module, reading, trial_run)
        if not reason:
            return ExpertModule(path, module, reading)
        reasons.append(reason)
    _refuse(path, glob, f"its forward is not what experts of these weights compute: {reasons[0]}")


def _operands(module: nn.Module) -> list[str]:
    """Returns names of what a forward must be given."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds][1:]


# ---------------------------------------------------------------------- the trial


def _difference(module: nn.Module, reading: Reading, trial_run: TrialRun) -> str:
    """Returns in what a module's forward and the reading differ on random values; empty where they agree."""
    for dtype in _ALLOWED:
        try:
            return _tried(module, reading, dtype, trial_run)
        except _DoesNotRun as error:
            reason = str(error)
    return reason


class _DoesNotRun(Exception):
    """A forward raises in a trial."""


def _tried(module: nn.Module, reading: Reading, dtype: torch.dtype, trial_run: TrialRun) -> str:
    """Returns the difference in one type.

    Raises:
        _DoesNotRun: the module's own forward raises.
    """
    generator = torch.Generator().manual_seed(0)
    stored = {id(t): t for store in (module.parameters(), module.buffers()) for t in store}
    is_small = sum(t.numel() for t in stored.values()) <= _MOST
    values = {key: _values(t, dtype, is_small, generator) for key, t in stored.items()}
    with trial_run(module, values):
        for scale, indices in _routings(reading.experts, generator):
            hidden = torch.randn(len(indices), reading.width, generator=generator, dtype=dtype) * scale
            weights = torch.randn(indices.shape, generator=generator).to(dtype)
            trained = [t for t in values.values() if t.requires_grad]
            reason = _compared(module, reading, (hidden, indices, weights), trained, is_small)
            if reason:
                return reason
    return ""


def _routings(experts: int, generator: torch.Generator) -> Iterator[tuple[float, Tensor]]:
    """Scales of tokens and their experts: random ones, all experts, and few that get more than a capacity has."""
    for scale in _SCALES:
        for k in dict.fromkeys((min(2, experts), 1, min(3, experts))):
            yield scale, torch.randn(_TOKENS, experts, generator=generator).topk(k).indices
    k = min(2, experts)
    tokens = max(_TOKENS, math.ceil(experts / k))
    yield 1.0, (torch.arange(tokens * k) % experts).view(tokens, k)
    yield 1.0, torch.randperm(experts, generator=generator)[:k].repeat(_TOKENS, 1)


def _compared(
    module: nn.Module, reading: Reading, operands: tuple[Tensor, ...], trained: list[Tensor], is_small: bool
) -> str:
    hidden, indices, weights = (t.requires_grad_(t.is_floating_point()) for t in operands)
    before = _held(module)
    try:
        actual = module.forward(hidden, indices, weights)
    except _FAILURES as error:
        where = f"{hidden.dtype} tokens [{', '.join(map(str, hidden.shape))}]"
        raise _DoesNotRun(f"it raises {type(error).__name__} on {where}: {shown(str(error))}") from None
    left = _changed(before, _held(module))
    if left:
        return f"it changes {left}, which a program of its weights alone does not"
    expected = reading.loop(module, hidden, indices, weights)
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return f"it gives {f'a tensor {list(actual.shape)}' if isinstance(actual, Tensor) else type(actual).__name__}"
    gap, allowed = _gap(actual, expected), _ALLOWED[hidden.dtype]
    if gap > allowed:
        return f"its output differs by {gap:.2g} of the largest value"
    reached, known = _reached(actual), _reached(expected)
    # A loop may leave out experts without rows, whose gradients are zeros here.
    if not reached <= known or not known - reached <= reading.without_rows(module, indices):
        return "other parameters get a gradient"
    upstream, sources = torch.randn_like(expected), [hidden, weights, *(trained if is_small else ())]
    gradients = [
        torch.autograd.grad(t.to(hidden.dtype), sources, upstream, allow_unused=True) for t in (actual, expected)
    ]
    for value, one, other in zip(sources, *gradients, strict=True):
        gap = _gap(*(torch.zeros_like(value) if gradient is None else gradient for gradient in (one, other)))
        if gap > allowed:
            what = {id(hidden): "its tokens", id(weights): "its weights"}.get(id(value), "a parameter")
            return f"the gradient of {what} differs by {gap:.2g} of the largest value"
    return ""


def _held(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Returns what modules keep: attributes, what lists and the like of these hold, and which values tensors have."""
    state = {}
    for path, submodule in module.named_modules():
        for name, value in (*vars(submodule).items(), *submodule._buffers.items(), *submodule._parameters.items()):
            inner: tuple[Any, ...] = ()
            if isinstance(value, Tensor):
                # By `data` values change without a new version; no forward does that to what is trained.
                is_copied = not isinstance(value, nn.Parameter) and value.numel() <= _MOST
                inner = (value._version, value.detach().clone() if is_copied else None)
            elif isinstance(value, dict):
                inner = (*value.keys(), *value.values())
            elif isinstance(value, (list, set, deque)):
                inner = tuple(value)
            state[f"{path}.{name}".removeprefix(".")] = (value, *inner)
    return state


def _changed(before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]) -> str:
    """Returns the first attribute that was changed; empty where none was."""
    for name in (*before, *after):
        one, other = before.get(name, ()), after.get(name, ())
        if len(one) != len(other) or not all(map(_is_same, one, other)):
            return name
    return ""


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one is other or one.is_meta or other.is_meta or one.shape != other.shape:
            return one is other or (one.is_meta and other.is_meta)
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)


def _reached(value: Tensor) -> set[int]:
    """Returns identities of the tensors that a gradient of this one goes to."""
    pending: list[Any] = [value.grad_fn]
    seen, reached = set[Any](), set[int]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        pending.extend(following for following, _ in node.next_functions)
    return reached


def _gap(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    largest = max(float(other.abs().max()), float(one.abs().max()))
    gap = float((one - other).abs().max())
    return math.inf if gap != gap else gap / largest if largest else 0.0


def _values(like: Tensor, dtype: torch.dtype, is_small: bool, generator: torch.Generator) -> Tensor:
    """Returns random values of a shape; of many elements neighbours share them, so that they take no memory."""
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype) if like.is_meta else like.detach().cpu().clone()
    if is_small:
        tensor = torch.randn(like.shape, generator=generator, dtype=dtype) / math.sqrt(max(1, like.shape[-1]))
        return nn.Parameter(tensor) if isinstance(like, nn.Parameter) else tensor
    steps = tuple(_STEPS[min(i, 2)] for i in range(like.dim()))[::-1]
    most = sum(step * (size - 1) for step, size in zip(steps, like.shape, strict=True)) + 1
    pool = torch.randn(most, generator=generator, dtype=dtype) / math.sqrt(max(1, like.shape[-1]))
    tensor = pool.as_strided(like.shape, steps)
    return nn.Parameter(tensor) if isinstance(like, nn.Parameter) else tensor


# ---------------------------------------------------------------------- the context


@contextlib.contextmanager
def computed_as_read(named: Sequence[ExpertModule]) -> Iterator[None]:
    """Has modules that a plan names compute by their readings, while active."""
    # By what their attributes are in: a trace may call a module by a proxy that shares them.
    by_attributes = {id(vars(entry.module)): entry for entry in named}
    with contextlib.ExitStack() as stack:
        for cls in dict.fromkeys(type(entry.module) for entry in named):
            stack.enter_context(mock.patch.object(cls, "forward", _forward(cls.forward, by_attributes)))
        yield


def _forward(original: Callable[..., Any], by_attributes: Mapping[int, ExpertModule]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = by_attributes.get(id(vars(self)))
        if named is None:
            return original(self, *args, **kwargs)
        operands = list(inspect.signature(original).bind(self, *args, **kwargs).arguments.values())[1:]
        kinds = [(t.dim(), t.is_floating_point()) if isinstance(t, Tensor) else None for t in operands]
        if kinds != [(2, True), (2, False), (2, True)]:
            shapes = [f"{t.dtype}{list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__ for t in operands]
            raise PlanError(
                f"it is called with {', '.join(shapes)}, not with hidden_states [T, h], top_k_index [T, K] and "
                "top_k_weights [T, K]",
                where=f"experts.expert_modules: {named.path}",
                remedy=_REMEDY,
            )
        return named.reading.compute(self, *operands)

    return forward


# The experts of transformers' models, as operators on routed rows while a model is captured.

_INTERFACE = "transformers.integrations.moe"
# What torch's two grouped products call their operands.
_OPERANDS = (("mat_a", "self"), ("mat_b", "mat2"))


@contextlib.contextmanager
def routed_experts(named: Sequence[ExpertModule] = ()) -> Iterator[None]:
    """Has modules that transformers dispatches by its `ExpertsInterface` run as `_experts`, while active.

    So do torch's grouped products of rows as `grouped_linear`, which is traced in every type.

    Args:
        named: modules that the plan names, which run by their readings.
    """
    interface = getattr(sys.modules.get(_INTERFACE), "ExpertsInterface", None)
    with contextlib.ExitStack() as stack:
        if interface is not None:
            stack.enter_context(mock.patch.object(interface, "get_interface", _instead))
        for place, name in ((torch, "_grouped_mm"), (functional, "grouped_mm")):
            if hasattr(place, name):
                product = functools.partial(_grouped, getattr(place, name))
                stack.enter_context(mock.patch.object(place, name, product))
        stack.enter_context(computed_as_read(named))
        yield


def _grouped(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Returns a grouped product: of rows [M, i] with the matrices [E, i, o] of their groups, which end at `offs`."""
    arguments = dict(zip(("mat_a", "mat_b", "offs", "bias", "out_dtype"), args, strict=False)) | kwargs
    # `_grouped_mm` calls its operands otherwise.
    rows, matrices = (arguments.pop(name, arguments.pop(other, None)) for name, other in _OPERANDS)
    offs, bias, dtype = (arguments.pop(name, None) for name in ("offs", "bias", "out_dtype"))
    is_ours = isinstance(rows, Tensor) and isinstance(matrices, Tensor) and isinstance(offs, Tensor)
    if not is_ours or rows.dim() != 2 or matrices.dim() != 3 or bias is not None or arguments:
        return original(*args, **kwargs)
    product: Tensor = grouped_linear(rows, matrices, group_sizes(offs), True)
    return product if dtype is None else product.to(dtype)


def _instead(self: Any, implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
    return _experts


def _experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns what `grouped_mm_experts_forward` of transformers computes, whose conventions these are.

    Shapes: hidden [tokens, h], indices and weights [tokens, k]; result [tokens, h].
    """
    module: Any = self
    k = top_k_index.shape[-1]
    order, counts = sort_by_expert(top_k_index, module.num_experts)
    rows = moe_permute(hidden_states, order, k)
    entry = "gate_up_proj" if module.has_gate else "up_proj"
    states = _product(module, entry, rows, counts)
    if module.has_gate:
        states = swiglu_rows(halves(states), counts) if _is_swiglu(module) else module._apply_gate(states)
    else:
        states = module.act_fn(states)
    states = _product(module, "down_proj", states, counts)
    if getattr(module, "has_post_expert_norm", False):
        states = module.post_expert_norm(states)
    return moe_combine(states, top_k_weights, order, hidden_states.dtype)


def _is_swiglu(module: Any) -> bool:
    """Returns whether a module's gate is transformers' own, with SiLU."""
    plain = getattr(sys.modules[_INTERFACE], "_default_apply_gate", None)
    silu = (nn.SiLU, getattr(sys.modules["transformers.activations"], "SiLUActivation", nn.SiLU))
    return type(module)._apply_gate is plain and isinstance(module.act_fn, silu)


def _product(module: Any, name: str, rows: Tensor, counts: Tensor) -> Tensor:
    product: Tensor = grouped_linear(rows, getattr(module, name), counts, module.is_transposed)
    if module.has_bias:
        product = product + expand_by_expert(getattr(module, f"{name}_bias"), counts, rows.shape[0])
    return product
