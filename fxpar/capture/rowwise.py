"""Whether operators that the plan declares row-wise are: all rows at once against parts of them, forward and backward.

Enters: a captured program with its plan, and what is known of parameters and inputs. Leaves: nothing, or an error that
names the operator and what differs.

Each call of such an operator is run by itself (`fxpar.capture.trials`), on as many rows as the example has and on other
numbers of them. All rows are compared with parts: the halves, and the first row apart from the rest, for what pairs
neighbours keeps halves apart. Outputs and gradients of operands with rows must follow one another, gradients of
operands without rows must add up. Then one row becomes far larger than the others, which must not change: what mixes
rows only beyond a threshold, or by so little that half precision hides it, does so now.

No number of runs is a proof: what depends on a number of rows or a value that is not tried goes unseen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxpar.capture.fake_weights import plain_surrounding
from fxpar.capture.trials import RAISED, Results, RowTrial, attempts, from_example, random_like
from fxpar.choice.batch_sharding import declared
from fxpar.errors import CaptureError
from fxpar.program.batch_dim import batch_size, batch_symbol
from fxpar.program.program import Program, describe
from fxpar.rules.batchwise_ops import name_of

# Of the largest value, by the type of the result. Parts round otherwise than the whole, and in float64 an operator may
# compute in float32 inside. What mixes rows differs by the values themselves.
_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
_ALLOWED_IN_HALF = 5e-2
# Numbers of rows besides the example's: multiples of two, four and eight, and none.
_ROWS = (2, 3, 8, 9, 16)
_SCALES = (1.0, 1e-3, 1e3)
_LARGE = 1e3


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
    """All rows at once and parts of them agree."""
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
    """The first rows stay what they are where the last becomes large."""
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
    """The results of operands that the operator takes; None where it raises, or gives no finite number."""
    try:
        results = trial.run(tensors)
    except RAISED:
        return None
    return results if all(bool(output.isfinite().any()) for output in results.outputs if output.numel()) else None


def _upstream(whole: Results) -> list[Tensor]:
    return [random_like(output, 7 + i) for i, output in enumerate(whole.outputs)]


def _whole(trial: RowTrial, example: Mapping[Any, Tensor]) -> tuple[list[Tensor], Results]:
    """Operands with which the operator runs, and its results on all rows."""
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
    """An operand of another number of rows: the same over and over, floating ones each by a factor of its own."""
    if not times or rows == count:
        return value
    repeated: Tensor = value.unflatten(0, (rows, times))[torch.arange(count, device=value.device) % rows]
    if value.is_floating_point() or value.is_complex():
        factors = 1 + torch.arange(count, device=value.device).div(rows, rounding_mode="floor") / 8
        repeated = repeated * factors.to(value.dtype).view(-1, *[1] * (repeated.dim() - 1))
    return repeated.flatten(0, 1)


def _scaled(value: Tensor, scale: float) -> Tensor:
    return value * scale if value.is_floating_point() or value.is_complex() else value


def _with_last(value: Tensor, times: int, factor: float) -> Tensor:
    """An operand whose last row is larger than the others; of integers the same as the first."""
    if not times:
        return value
    scaled = value.clone()
    last = scaled[-times:]
    scaled[-times:] = last * factor if value.is_floating_point() or value.is_complex() else scaled[:times]
    return scaled


def _rows(value: Tensor, times: int, first: int, last: int) -> Tensor:
    return value[first * times : last * times] if times else value


def _pairs(trial: RowTrial, whole: Results, parts: Sequence[Results]) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """What is compared, as the whole has it and as the parts together have it; None where they do not fit together."""
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


def _refuse(trial: RowTrial, reason: str) -> NoReturn:
    axes = ", ".join(f"{axis}=1" for axis in trial.axes)
    raise CaptureError(
        f"{name_of(trial.node)} is declared row-wise, and {reason}",
        where=describe(trial.node),
        remedy=f"compute each row by itself, or leave it out of row_wise and set {axes}",
    )
