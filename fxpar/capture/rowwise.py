"""Whether operators that the plan declares row-wise are: all rows at once against parts of them, forward and backward.

Enters: a captured program with its plan, and what is known of parameters and inputs. Leaves: nothing, or an error that
names the operator and what differs.

Each call of such an operator is run by itself on all rows of the example and on parts of them: the halves, and the
first row apart from the rest, for what pairs neighbours keeps halves apart. Outputs and gradients of operands with rows
must follow one another, gradients of operands without rows must add up. Floating operands are random. Integers and
booleans are what the program computes of the example, where that can be computed, else zeros and ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.capture.memory import plain_surrounding
from fxpar.capture.trace import FAILURES
from fxpar.choice.batch import declared
from fxpar.errors import CaptureError
from fxpar.layout.symbols import Size, divide, evaluate
from fxpar.ops.functions import function
from fxpar.program.program import (
    Program,
    ScalarType,
    describe,
    has_note,
    note,
    operands,
    output_types,
    tensor_type,
)
from fxpar.program.rows import batch_size
from fxpar.rules.rows import name_of
from fxpar.signatures.functions import resolve_function
from fxpar.signatures.rows import has_rows

_FAILURES = (*FAILURES, IndexError, ArithmeticError)
# Of the largest value, by the type of the result. Parts round otherwise than the whole, and in float64 an operator may
# compute in float32 inside. What mixes rows differs by the values themselves.
_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
_ALLOWED_IN_HALF = 5e-2


def check_row_wise(program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> None:
    """Runs every call of an operator that the plan declares row-wise on all rows and on parts of them.

    Args:
        program: as captured.
        state: parameters and buffers by name; those of the meta device have no values.
        inputs: the example's, by path.

    Raises:
        CaptureError: an operator mixes rows, or cannot be run.
    """
    row_wise = declared(program)
    nodes = [node for node in program.graph.nodes if row_wise.names(node)]
    if not nodes:
        return
    values = {**state, **program.constants}
    sizes = {s.name: s.example for s in program.symbols}
    with plain_surrounding(), torch.random.fork_rng():
        for node in nodes:
            trial = _Trial(node, batch_size(program), sizes, [*row_wise.rows])
            if trial.has_rows:
                _check(trial, _given(trial, program, values, inputs))


@dataclass(frozen=True)
class _Results:
    """What a run gives.

    Attributes:
        outputs: all tensors that the operator returns.
        gradients: of each floating operand.
    """

    outputs: tuple[Tensor, ...]
    gradients: Mapping[fx.Node, Tensor]


@dataclass(frozen=True)
class _Trial:
    """A call of a declared operator.

    Attributes:
        node: the call.
        rows: the number of rows.
        sizes: the symbols' values in the example.
        axes: those whose ranks share out the rows.
    """

    node: fx.Node
    rows: Size
    sizes: Mapping[str, int]
    axes: Sequence[str]

    @property
    def sources(self) -> list[fx.Node]:
        """The operands, each once."""
        return list(dict.fromkeys(operands(self.node)))

    @property
    def has_rows(self) -> bool:
        """Whether operands have rows, and all outputs too: other calls stay whole, or are refused for their types."""
        kinds = output_types(self.node)
        return any(self.times(source) for source in self.sources) and all(has_rows(kind, self.rows) for kind in kinds)

    @property
    def count(self) -> int:
        """Rows of the example."""
        return evaluate(self.rows, self.sizes)

    def times(self, source: fx.Node) -> int:
        """Elements of dimension 0 for each row; 0 where an operand has none."""
        kind = tensor_type(source)
        size = divide(kind.shape[0], self.rows) if has_rows(kind, self.rows) else None
        return 0 if size is None else evaluate(size, self.sizes)

    def run(self, tensors: Sequence[Tensor], upstream: Sequence[Tensor] | None = None) -> _Results:
        """The operator's results, and gradients from `upstream`, by default from random ones."""
        leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
        given = dict(zip(self.sources, leaves, strict=True))
        with torch.enable_grad():
            results = pytree.tree_leaves(_called(self.node, lambda node: self._value(node, given)))
        outputs = tuple(t for t in results if isinstance(t, Tensor))
        roots = [i for i, output in enumerate(outputs) if output.requires_grad]
        asked = {source: leaf for source, leaf in given.items() if leaf.requires_grad}
        upstream = upstream or [_random(output, 7 + i) for i, output in enumerate(outputs)]
        found: Sequence[Tensor | None] = [None] * len(asked)
        if roots and asked:
            arriving = [upstream[i] for i in roots]
            found = torch.autograd.grad([outputs[i] for i in roots], [*asked.values()], arriving, allow_unused=True)
        gradients = {
            source: torch.zeros_like(leaf) if gradient is None else gradient
            for (source, leaf), gradient in zip(asked.items(), found, strict=True)
        }
        return _Results(tuple(o.detach() for o in outputs), gradients)

    def _value(self, node: fx.Node, given: Mapping[fx.Node, Tensor]) -> Any:
        kind = note(node).type if has_note(node) else None
        # A size of the batch is that of the whole on every rank (`fxpar.size`), so it is on parts too.
        return evaluate(kind.value, self.sizes) if isinstance(kind, ScalarType) else given[node]


def _called(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """What a node computes of the values of others."""
    args: Any = map_arg(node.args, value)
    kwargs: Any = dict(map_arg(node.kwargs, value))
    target: Any = resolve_function(kwargs.pop("path")).apply if node.target is function else node.target
    return target(*args, **kwargs)


def _random(like: Tensor, seed: int, *, positive: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if like.is_complex() else torch.float64
    made = torch.randn(like.shape, dtype=dtype, generator=generator)
    if positive:
        made = 1 + 0.1 * made.abs()
    return made.to(like.device, like.dtype)


# ---------------------------------------------------------------------- operands


def _given(
    trial: _Trial, program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Any]
) -> dict[fx.Node, Tensor]:
    """Operands that are no floating numbers, from the example."""
    found = {}
    for source in trial.sources:
        kind = tensor_type(source)
        if kind.is_float or kind.dtype.is_complex:
            continue
        value = _computed(program, source, state, inputs)
        shape = [evaluate(size, trial.sizes) for size in kind.shape]
        if value is None or list(value.shape) != shape:
            value = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(kind.dtype)
        found[source] = value
    return found


def _computed(
    program: Program, wanted: fx.Node, state: Mapping[str, Tensor], inputs: Mapping[str, Any]
) -> Tensor | None:
    """The value of a node on the example; None where weights or inputs without values go into it, or it fails."""
    needed, pending = set[fx.Node](), [wanted]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    names = {p.node: state.get(p.fqn) for p in program.parameters} | {i.node: inputs[i.path] for i in program.inputs}
    values: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad():
            for node in (node for node in program.graph.nodes if node in needed):
                if node.op == "placeholder":
                    values[node] = names[node.name]
                    if values[node] is None or values[node].is_meta:
                        return None
                    continue
                values[node] = _called(node, values.__getitem__)
    except _FAILURES:
        return None
    return values[wanted] if isinstance(values[wanted], Tensor) else None


def _attempts(trial: _Trial, given: Mapping[fx.Node, Tensor]) -> Iterator[list[Tensor]]:
    """Operands to try, the best first: in float64, else in the program's types; on the CPU, else on a GPU."""
    devices = {value.device for value in given.values()} | {torch.device("cpu")}
    devices |= {torch.device("cuda")} if torch.cuda.is_available() else set()
    for device in sorted(devices, key=str):
        for widened, positive in ((True, False), (True, True), (False, False), (False, True)):
            tensors = []
            for index, source in enumerate(trial.sources):
                kind = tensor_type(source)
                wide = widened and kind.dtype.is_floating_point
                shape = [evaluate(size, trial.sizes) for size in kind.shape]
                like = torch.empty(shape, dtype=torch.float64 if wide else kind.dtype, device=device)
                value = given[source].to(device) if source in given else _random(like, index, positive=positive)
                tensors.append(value)
            yield tensors


# ---------------------------------------------------------------------- parts against the whole


def _check(trial: _Trial, given: Mapping[fx.Node, Tensor]) -> None:
    tensors, whole = _whole(trial, given)
    upstream = [_random(output, 7 + i) for i, output in enumerate(whole.outputs)]
    for cut in dict.fromkeys((trial.count // 2, 1)):
        parts = []
        for first, last in ((0, cut), (cut, trial.count)):
            own = [_rows(t, trial.times(s), first, last) for t, s in zip(tensors, trial.sources, strict=True)]
            arriving = [_rows(u, len(u) // trial.count, first, last) for u in upstream]
            try:
                parts.append(trial.run(own, arriving))
            except _FAILURES as error:
                _refuse(trial, f"raises {_reason(error)} on {last - first} of {trial.count} rows")
        apart = f"of rows {_span(0, cut)} and {_span(cut, trial.count)} by themselves"
        for what, one, other in _pairs(trial, whole, parts):
            gap = _gap(one, other)
            if gap > 0:
                _refuse(
                    trial, f"{what} {apart} differs from that of all rows together by {gap:.2g} of its largest value"
                )


def _whole(trial: _Trial, given: Mapping[fx.Node, Tensor]) -> tuple[list[Tensor], _Results]:
    """Operands with which the operator runs, and its results on all rows."""
    reason = "gives no finite number for random operands"
    for tensors in _attempts(trial, given):
        try:
            found = trial.run(tensors)
        except _FAILURES as error:
            reason = f"raises {_reason(error)} on random operands of the example's shapes"
            continue
        if all(bool(output.isfinite().any()) for output in found.outputs if output.numel()):
            return tensors, found
    _refuse(trial, reason)


def _rows(value: Tensor, times: int, first: int, last: int) -> Tensor:
    return value[first * times : last * times] if times else value


def _pairs(trial: _Trial, whole: _Results, parts: Sequence[_Results]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """What is compared, as the whole has it and as the parts together have it; None where they do not fit together."""
    for index, output in enumerate(whole.outputs):
        yield f"output {index}", output, _joined([part.outputs[index] for part in parts], output)
    for source, gradient in whole.gradients.items():
        found = [part.gradients[source] for part in parts]
        together = _joined(found, gradient) if trial.times(source) else found[0] + found[1]
        yield f"the gradient of %{source.name}", gradient, together


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor | None:
    fits = all(part.dim() and part.shape[1:] == like.shape[1:] and part.dtype == like.dtype for part in parts)
    return torch.cat([*parts]) if fits else None


def _gap(one: Tensor, other: Tensor | None) -> float:
    """How far they are apart, over the largest value; 0 where that is rounding, infinite for other shapes."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    same = (one == other) | ((one != one) & (other != other))
    if bool(same.all()):
        return 0.0
    if not one.is_floating_point() and not one.is_complex():
        return math.inf
    scale = max(float(value[value.isfinite()].abs().max()) for value in (one, other) if bool(value.isfinite().any()))
    gap = float((one - other).abs()[~same].max()) / max(scale, 1e-30)
    return 0.0 if gap <= _ALLOWED.get(one.real.dtype, _ALLOWED_IN_HALF) else gap if gap == gap else math.inf


def _span(first: int, last: int) -> str:
    return str(first) if last - first == 1 else f"{first}…{last - 1}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__} ({(str(error).strip().splitlines() or [''])[0][:200]})"


def _refuse(trial: _Trial, reason: str) -> NoReturn:
    axes = ", ".join(f"{axis}=1" for axis in trial.axes)
    raise CaptureError(
        f"{name_of(trial.node)} is declared row-wise, and {reason}",
        where=describe(trial.node),
        remedy=f"compute each row by itself, or leave it out of row_wise and set {axes}",
    )
