"""Whether operators of the plan's batchwise_ops compute rows apart: all rows against parts, forward and backward.

Enters: a captured program with its plan, and what is known of parameters and inputs. Leaves: nothing, or an error that
names the operator and what differs.

Each call of such an operator is run by itself, on as many rows as the example has and on
other numbers of them. All rows are compared with parts: the halves, and the first row apart from the rest, for what
pairs neighbours keeps halves apart. Outputs and gradients of operands with rows must follow one another, gradients of
operands without rows must add up. Then one row becomes far larger than the others, which must not change: what mixes
rows only beyond a threshold, or by so little that half precision hides it, does so now.

No number of runs is a proof: what depends on a number of rows or a value that is not tried goes unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.capture.prepared_model import plain_surrounding
from fxpar.capture.trace import FAILURES
from fxpar.errors import CaptureError
from fxpar.ir.program import Program, ScalarType, describe, has_note, note, operands, output_types, tensor_type
from fxpar.ir.step import batch_size, batch_symbol
from fxpar.layout.symbolic_sizes import Size, divide, evaluate
from fxpar.ops.small_operators import function
from fxpar.rules.table import has_rows, name_of
from fxpar.sharding.batch_sharding import declared
from fxpar.signatures.autograd_functions import resolve_function

# Runs of one operator by itself, for what is declared of its rows (`fxpar.capture.rowwise`).

RAISED = (*FAILURES, IndexError, ArithmeticError)


@dataclass(frozen=True)
class Results:
    """What a run gives.

    Attributes:
        outputs: all tensors that the operator returns.
        gradients: of each floating operand.
    """

    outputs: tuple[Tensor, ...]
    gradients: Mapping[fx.Node, Tensor]


@dataclass(frozen=True)
class RowTrial:
    """A call of a declared operator.

    Attributes:
        node: the call.
        rows: the number of rows.
        batch: name of the symbol in it.
        sizes: the symbols' values.
        axes: those whose ranks share out the rows.
    """

    node: fx.Node
    rows: Size
    batch: str
    sizes: Mapping[str, int]
    axes: Sequence[str]

    @property
    def sources(self) -> list[fx.Node]:
        """Returns the operands, each once."""
        return list(dict.fromkeys(operands(self.node)))

    @property
    def has_rows(self) -> bool:
        """Returns whether operands and all outputs have rows: others stay whole, or are refused for their types."""
        kinds = output_types(self.node)
        return any(self.times(source) for source in self.sources) and all(has_rows(kind, self.rows) for kind in kinds)

    @property
    def count(self) -> int:
        """Returns how many rows there are."""
        return evaluate(self.rows, self.sizes)

    def of_rows(self, count: int) -> RowTrial | None:
        """Returns the same call of another number of rows; None where the symbol cannot give it."""
        sizes = {**self.sizes, self.batch: self.sizes[self.batch] * count // self.count}
        resized = replace(self, sizes=sizes)
        return resized if resized.count == count else None

    def times(self, source: fx.Node) -> int:
        """Returns how many elements of dimension 0 there are for each row; 0 where an operand has none."""
        kind = tensor_type(source)
        size = divide(kind.shape[0], self.rows) if has_rows(kind, self.rows) else None
        return 0 if size is None else evaluate(size, self.sizes)

    def run(self, tensors: Sequence[Tensor], upstream: Sequence[Tensor] | None = None) -> Results:
        """Returns the operator's results, and gradients from `upstream`, by default from random ones."""
        leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
        by_source = dict(zip(self.sources, leaves, strict=True))
        with torch.enable_grad():
            results = pytree.tree_leaves(_called(self.node, lambda node: self._value(node, by_source)))
        outputs = tuple(t for t in results if isinstance(t, Tensor))
        roots = [i for i, output in enumerate(outputs) if output.requires_grad]
        floating = {source: leaf for source, leaf in by_source.items() if leaf.requires_grad}
        upstream = upstream or [random_like(output, 7 + i) for i, output in enumerate(outputs)]
        grads: Sequence[Tensor | None] = [None] * len(floating)
        if roots and floating:
            arriving = [upstream[i] for i in roots]
            grads = torch.autograd.grad([outputs[i] for i in roots], [*floating.values()], arriving, allow_unused=True)
        gradients = {
            source: torch.zeros_like(leaf) if gradient is None else gradient
            for (source, leaf), gradient in zip(floating.items(), grads, strict=True)
        }
        return Results(tuple(o.detach() for o in outputs), gradients)

    def _value(self, node: fx.Node, by_source: Mapping[fx.Node, Tensor]) -> Any:
        kind = note(node).type if has_note(node) else None
        # A size of the batch is that of the whole on every rank (`fxpar.size`), so it is on parts too.
        return evaluate(kind.value, self.sizes) if isinstance(kind, ScalarType) else by_source[node]


def _called(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """Returns what a node computes of the values of others."""
    args: Any = map_arg(node.args, value)
    kwargs: Any = dict(map_arg(node.kwargs, value))
    target: Any = resolve_function(kwargs.pop("path")).apply if node.target is function else node.target
    return target(*args, **kwargs)


def random_like(like: Tensor, seed: int, *, positive: bool = False) -> Tensor:
    """Returns normal numbers of a tensor's shape and type; positive ones are near 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if like.is_complex() else torch.float64
    numbers = torch.randn(like.shape, dtype=dtype, generator=generator)
    if positive:
        numbers = 1 + 0.1 * numbers.abs()
    return numbers.to(like.device, like.dtype)


def from_example(
    trial: RowTrial, program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Any]
) -> dict[fx.Node, Tensor]:
    """Returns operands that are no floating numbers, from the example."""
    example = {}
    for source in trial.sources:
        kind = tensor_type(source)
        if kind.is_float or kind.dtype.is_complex:
            continue
        value = _computed(program, source, state, inputs)
        shape = [evaluate(size, trial.sizes) for size in kind.shape]
        if value is None or list(value.shape) != shape:
            value = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(kind.dtype)
        example[source] = value
    return example


def _computed(
    program: Program, target: fx.Node, state: Mapping[str, Tensor], inputs: Mapping[str, Any]
) -> Tensor | None:
    """Returns the value of a node on the example; None where values are missing, or it fails."""
    needed, pending = set[fx.Node](), [target]
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
    except RAISED:
        return None
    return values[target] if isinstance(values[target], Tensor) else None


def attempts(trial: RowTrial, example: Mapping[fx.Node, Tensor]) -> Iterator[list[Tensor]]:
    """Yields operands to try, the best first: in float64, else in the program's types; on the CPU, else on a GPU."""
    devices = {value.device for value in example.values()} | {torch.device("cpu")}
    devices |= {torch.device("cuda")} if torch.cuda.is_available() else set()
    for device in sorted(devices, key=str):
        for widened, positive in ((True, False), (True, True), (False, False), (False, True)):
            tensors = []
            for index, source in enumerate(trial.sources):
                kind = tensor_type(source)
                wide = widened and kind.dtype.is_floating_point
                shape = [evaluate(size, trial.sizes) for size in kind.shape]
                like = torch.empty(shape, dtype=torch.float64 if wide else kind.dtype, device=device)
                value = example[source].to(device) if source in example else random_like(like, index, positive=positive)
                tensors.append(value)
            yield tensors


# Of the largest value, by the type of the result. Parts round otherwise than the whole, and in float64 an operator may
# compute in float32 inside. What mixes rows differs by the values themselves.
_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
_ALLOWED_IN_HALF = 5e-2
# Numbers of rows besides the example's: multiples of two, four and eight, and none.
_ROWS = (2, 3, 8, 9, 16)
_SCALES = (1.0, 1e-3, 1e3)
_LARGE = 1e3


def check_row_wise(program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> None:
    """Runs every call of an operator that the plan's batchwise_ops name on all rows and on parts of them.

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
            trial = RowTrial(node, batch_size(program), batch_symbol(program), sizes, [*row_wise.rows])
            if trial.has_rows:
                _check(trial, from_example(trial, program, values, inputs))


def _check(trial: RowTrial, example: Mapping[Any, Tensor]) -> None:
    tensors, whole = _whole(trial, example)
    _check_parts(trial, tensors, whole)
    for count in dict.fromkeys((trial.count, *_ROWS)):
        sized = trial.of_rows(count)
        if sized is None:
            continue
        operands = [
            _of_count(t, trial.times(s), trial.count, count) for t, s in zip(tensors, trial.sources, strict=True)
        ]
        for scale in _SCALES:
            scaled = [_scaled(value, scale) for value in operands]
            results = _finite(sized, scaled)
            if results is not None:
                _check_parts(sized, scaled, results)
        _check_others(sized, operands)


def _check_parts(trial: RowTrial, tensors: Sequence[Tensor], whole: Results) -> None:
    """Checks that all rows at once and parts of them agree."""
    upstream = _upstream(whole)
    for cut in dict.fromkeys((trial.count // 2, 1)):
        parts = []
        for first, last in ((0, cut), (cut, trial.count)):
            operands = [_rows(t, trial.times(s), first, last) for t, s in zip(tensors, trial.sources, strict=True)]
            arriving = [_rows(u, len(u) // trial.count, first, last) for u in upstream]
            try:
                parts.append(trial.run(operands, arriving))
            except RAISED as error:
                _refuse(trial, f"raises {_reason(error)} on {last - first} of {trial.count} rows")
        apart = f"of rows {_span(0, cut)} and {_span(cut, trial.count)} by themselves"
        for what, one, other in _pairs(trial, whole, parts):
            gap = _gap(one, other)
            if gap > 0:
                _refuse(
                    trial, f"{what} {apart} differs from that of all rows together by {gap:.2g} of its largest value"
                )


def _check_others(trial: RowTrial, tensors: Sequence[Tensor]) -> None:
    """Checks that the first rows stay what they are where the last becomes large."""
    count, before = trial.count, _finite(trial, tensors)
    if before is None:
        return
    changed = [_with_last(t, trial.times(s), _LARGE) for t, s in zip(tensors, trial.sources, strict=True)]
    try:
        after = trial.run(changed, _upstream(before))
    except RAISED:
        return  # it does not take such values
    pairs = [(f"output {i}", *both) for i, both in enumerate(zip(before.outputs, after.outputs, strict=True))]
    for source, gradient in before.gradients.items():
        if trial.times(source):
            pairs.append((f"the gradient of %{source.name}", gradient, after.gradients[source]))
    for what, one, other in pairs:
        first = [value[: len(value) // count * (count - 1)] for value in (one, other)]
        gap = _gap(*first)
        if gap > 0:
            reason = f"of {count} rows {what} changes by {gap:.2g} of its largest value in the other rows where one"
            _refuse(trial, f"{reason} becomes {_LARGE:g} times as large")


def _finite(trial: RowTrial, tensors: Sequence[Tensor]) -> Results | None:
    """Returns the results of operands that the operator takes; None where it raises, or gives no finite number."""
    try:
        results = trial.run(tensors)
    except RAISED:
        return None
    return results if all(bool(output.isfinite().any()) for output in results.outputs if output.numel()) else None


def _upstream(whole: Results) -> list[Tensor]:
    return [random_like(output, 7 + i) for i, output in enumerate(whole.outputs)]


def _whole(trial: RowTrial, example: Mapping[Any, Tensor]) -> tuple[list[Tensor], Results]:
    """Returns operands with which the operator runs, and its results on all rows."""
    reason = "gives no finite number for random operands"
    for tensors in attempts(trial, example):
        try:
            results = trial.run(tensors)
        except RAISED as error:
            reason = f"raises {_reason(error)} on random operands of the example's shapes"
            continue
        if all(bool(output.isfinite().any()) for output in results.outputs if output.numel()):
            return tensors, results
    _refuse(trial, reason)


def _of_count(value: Tensor, times: int, rows: int, count: int) -> Tensor:
    """Returns an operand of another number of rows: repeated, floating ones each by a factor of its own."""
    if not times or rows == count:
        return value
    repeated: Tensor = value.unflatten(0, (rows, times))[torch.arange(count, device=value.device) % rows]
    if value.is_floating_point() or value.is_complex():
        # Repeated rows differ by a factor: a mean of equal rows, say, would not show.
        factors = 1 + torch.arange(count, device=value.device).div(rows, rounding_mode="floor") / 8
        repeated = repeated * factors.to(value.dtype).view(-1, *[1] * (repeated.dim() - 1))
    return repeated.flatten(0, 1)


def _scaled(value: Tensor, scale: float) -> Tensor:
    return value * scale if value.is_floating_point() or value.is_complex() else value


def _with_last(value: Tensor, times: int, factor: float) -> Tensor:
    """Returns an operand whose last row is larger than the others; of integers the same as the first."""
    if not times:
        return value
    scaled = value.clone()
    last = scaled[-times:]
    scaled[-times:] = last * factor if value.is_floating_point() or value.is_complex() else scaled[:times]
    return scaled


def _rows(value: Tensor, times: int, first: int, last: int) -> Tensor:
    return value[first * times : last * times] if times else value


def _pairs(trial: RowTrial, whole: Results, parts: Sequence[Results]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yields what is compared, of the whole and of the parts together; None where these do not fit together."""
    for index, output in enumerate(whole.outputs):
        yield f"output {index}", output, _joined([part.outputs[index] for part in parts], output)
    for source, gradient in whole.gradients.items():
        gradients = [part.gradients[source] for part in parts]
        together = _joined(gradients, gradient) if trial.times(source) else gradients[0] + gradients[1]
        yield f"the gradient of %{source.name}", gradient, together


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor | None:
    fits = all(part.dim() and part.shape[1:] == like.shape[1:] and part.dtype == like.dtype for part in parts)
    return torch.cat([*parts]) if fits else None


def _gap(one: Tensor, other: Tensor | None) -> float:
    """Returns how far they are apart, over the largest value; 0 where that is rounding, infinite for other shapes."""
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


def _refuse(trial: RowTrial, reason: str) -> NoReturn:
    axes = ", ".join(f"{axis}=1" for axis in trial.axes)
    raise CaptureError(
        f"{name_of(trial.node)} is declared row-wise, and {reason}",
        where=describe(trial.node),
        remedy=f"compute each row by itself, or leave it out of batchwise_ops and set {axes}",
    )
