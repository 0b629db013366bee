"""Modules of experts that a plan names, as operators on routed rows while a model is captured.

Enters: a model, and the globs of `Plan(experts=…)`. Leaves: a reading of each module that they name, and a context in
which it computes by that in place of its own forward, whose loop depends on the routing.

That a reading is what the module computes is tried: its own forward and the reading run on random weights and tokens,
outputs and gradients must agree, and the forward must leave nothing behind, which a reading would not. It is a trial
and no proof; `fxpar verify` at the level of values compares the whole model.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn

from fxpar.capture.expert_readings import Reading, readings
from fxpar.capture.fake_weights import plain_surrounding, swapped
from fxpar.capture.state import untouched
from fxpar.errors import PlanError, shown

_REMEDY = "call fxpar.ops.experts in its forward, or leave it out of experts"
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError)
# Of the largest value, by the type of the trial: in float64 a module may compute in float32 inside; what does not run
# in float64 is tried in float32.
_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
_SCALES = (1.0, 40.0)  # of tokens: what is clamped, is so beyond a threshold
_TOKENS = 11
_MOST = 2**22  # elements of weights that are random each for itself, and whose gradients are compared
_STEPS = (1, 17, 29)  # between neighbours of the last, the second last … dimension, where values are shared


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


def named_experts(model: nn.Module, globs: Sequence[str]) -> tuple[ExpertModule, ...]:
    """The modules that the globs of a plan name, each with the reading of which a trial found no difference.

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
            raise PlanError("matches no module", where=f"experts: {glob!r}", remedy=looks)
        for path in paths:
            if id(modules[path]) not in experts:
                experts[id(modules[path])] = _named(path, modules[path], glob)
    return tuple(experts.values())


def is_named_so(module: nn.Module) -> bool:
    """Whether a module has the weights and the forward of experts, by their names."""
    return any(readings(module)) and len(_operands(module)) == 3


def _refuse(path: str, glob: str, reason: str) -> NoReturn:
    raise PlanError(reason, where=f"experts: {glob!r} names {path or 'the model'}", remedy=_REMEDY)


def _named(path: str, module: nn.Module, glob: str) -> ExpertModule:
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
        reason = _difference(module, reading)
        if not reason:
            return ExpertModule(path, module, reading)
        reasons.append(reason)
    _refuse(path, glob, f"its forward is not what experts of these weights compute: {reasons[0]}")


def _operands(module: nn.Module) -> list[str]:
    """Names of what a forward must be given."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds][1:]


# ---------------------------------------------------------------------- the trial


def _difference(module: nn.Module, reading: Reading) -> str:
    """In what a module's own forward and the reading differ on random values; empty where nothing was found."""
    for dtype in _ALLOWED:
        try:
            return _tried(module, reading, dtype)
        except _DoesNotRun as error:
            reason = str(error)
    return reason


class _DoesNotRun(Exception):
    """A forward raises in a trial."""


def _tried(module: nn.Module, reading: Reading, dtype: torch.dtype) -> str:
    """The same in one type.

    Raises:
        _DoesNotRun: the module's own forward raises.
    """
    generator = torch.Generator().manual_seed(0)
    stored = {id(t): t for store in (module.parameters(), module.buffers()) for t in store}
    is_small = sum(t.numel() for t in stored.values()) <= _MOST
    values = {key: _values(t, dtype, is_small, generator) for key, t in stored.items()}
    with plain_surrounding(), torch.random.fork_rng(devices=[]), untouched(module), swapped(module, values):
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
    """What modules keep: attributes, what lists and the like of these hold, and which values tensors have."""
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
    """The first attribute that was changed; empty where none was."""
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
    """Identities of the tensors that a gradient of this one goes to."""
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
    """Random values of a shape; of many elements neighbours share them, so that they take no memory."""
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
    """While active, the modules that a plan names compute by their readings."""
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
                where=f"experts: {named.path}",
                remedy=_REMEDY,
            )
        return named.reading.compute(self, *operands)

    return forward
