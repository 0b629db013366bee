"""Whether a captured graph is the model, by a forward and backward of both on a few samples.

Enters: a captured model whose weights are at hand, and its batch. Leaves: nothing, or `CheckFailed` that names the
tensor; where the run would cost too much, the reason why there was none.

It is one step on two samples, cut in length where that would take long; the models and the generators are left as they
were. What it adds to the walk of the eager autograd graph (`fxpar.capture.eager`) is the numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture.capture import Captured
from fxpar.cost.flops import matmul_flops
from fxpar.ir.program import Program
from fxpar.ir.symbols import with_counted
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.text.tables import amount
from fxpar.verify.simulate_ranks import symbol_values
from fxpar.verify.values import call_inputs, check_capture

LARGEST = 2 << 30  # bytes of weights
ON_META = "the model is on the meta device"
_WORK = 3e10  # FLOPs of a forward, of which some ten are run
_ROWS, _LENGTH = 2, 8
_WAYS = {
    "compiled": "The forward goes the way that it has under torch.compile, as its eager one depends on values.",
    "dynamo": "The forward was traced by torch.compile's Dynamo, as Python's own run of it could not be.",
}


def compare(captured: Captured, model: nn.Module, batch: Any, run: bool = True) -> str:
    """Compares values and gradients of the captured graph and the model.

    Args:
        captured: in the model's present mode.
        model: in the plan's precision; is left as it was.
        batch: as it was captured with.
        run: whether this process is the one that runs them; otherwise it is only said whether one can.

    Returns:
        Empty where they are compared; else why not.

    Raises:
        CheckFailed: they differ; names the output, or the parameter whose gradient it is.
        InputError: the model itself raises an error.
    """
    reason_or_sizes = _hindrance(captured, model, batch)
    if isinstance(reason_or_sizes, str):
        return reason_or_sizes
    if run:
        inputs = call_inputs(captured, model, batch, as_given=True)
        check_capture(captured, model, _cut(captured.program, inputs, batch, reason_or_sizes), canonical=False)
    return ""


def compare_filled(
    captured: Captured, skeleton: nn.Module, buffers: Mapping[str, Tensor], batch: Any, run: bool = True
) -> str:
    """Compares as `compare` does, for a model whose weights are elsewhere: with random ones.

    Args:
        skeleton: the model on the meta device.
        buffers: their values by name.
    """
    reason = _hindrance(captured, skeleton, batch, has_values=True)
    return reason if isinstance(reason, str) else compare(captured, _filled(skeleton, buffers), batch) if run else ""


def findings(how: str, unwalked: str, uncompared: str) -> tuple[str, ...]:
    """Returns what was checked of a capture, as sentences.

    Args:
        how: as `Captured` says.
        unwalked: as `Captured` says.
        uncompared: what `compare` returned.
    """
    walked = "Functions and hooks of the model's autograd graph were compared with the captured graph."
    compared = "Values and gradients of the captured graph were compared with the model's."
    if unwalked:
        walked = f"The model's autograd graph could not be walked without values: {unwalked}."
    if uncompared:
        compared = f"Values and gradients were not compared with the model's: {uncompared}."
    return tuple(filter(None, (walked, compared, _WAYS.get(how))))


def _hindrance(captured: Captured, model: nn.Module, batch: Any, has_values: bool = False) -> str | dict[str, int]:
    """Returns why a model is not run; else the sizes to run it at, the best that cost little."""
    tensors = [*model.parameters(), *model.buffers()]
    if not has_values and any(t.is_meta for t in tensors):
        return ON_META
    size = sum(t.numel() * t.element_size() for t in tensors)
    if size >= LARGEST:
        return f"its weights are {amount(size)}"
    whole = symbol_values(captured.program, call_inputs(captured, model, batch))
    for sizes in _smaller(captured, whole):
        if _work(captured.program, sizes) <= _WORK:
            return sizes
    return f"a forward of it takes {_work(captured.program, whole):.1e} FLOPs"


def _smaller(captured: Captured, whole: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields sizes to run at, the best first: few rows of the whole length, of a short one, the example itself."""
    program = captured.program
    rows = {s.name: min(_ROWS, whole[s.name]) if s.dim == 0 else whole[s.name] for s in program.symbols}
    short = {s.name: rows[s.name] if s.dim == 0 else min(_LENGTH, rows[s.name]) for s in program.symbols}
    for sizes in (rows, short, dict(whole)):
        if sizes == whole or captured.spec.admits(sizes):
            yield sizes


def _work(program: Program, sizes: Mapping[str, int]) -> float:
    values = with_counted(program.counted, sizes)
    return math.fsum(evaluate(flops, values) for _, flops in matmul_flops(program))


def _cut(program: Program, inputs: Mapping[str, Tensor], batch: Any, sizes: Mapping[str, int]) -> Any:
    """Returns the batch with its leading elements alone."""
    shapes = {id(inputs[i.path]): [evaluate(size, sizes) for size in i.type.shape] for i in program.inputs}

    def cut(value: Tensor) -> Tensor:
        return value[tuple(slice(size) for size in shapes.get(id(value), value.shape))]

    return pytree.tree_map_only(Tensor, cut, batch)


def _filled(skeleton: nn.Module, buffers: Mapping[str, Tensor]) -> nn.Module:
    """Returns a model with the skeleton's modes and shapes, random weights, and the buffers of a model that has values.

    What it computes means nothing; that two ways of computing it agree does.
    """
    generator = torch.Generator().manual_seed(1)

    def fill(parameter: Tensor) -> nn.Parameter:
        weight = torch.empty(parameter.shape, dtype=parameter.dtype)
        if weight.is_floating_point() or weight.is_complex():
            spread = 0.1 if weight.dim() < 2 else 1 / math.sqrt(max(weight[0].numel(), 1))
            weight.normal_(1.0 if weight.dim() < 2 else 0.0, spread, generator=generator)
        else:
            weight.zero_()
        return nn.Parameter(weight, requires_grad=parameter.requires_grad)

    memo: dict[int, Any] = {id(p): fill(p) for p in skeleton.parameters()}
    memo |= {id(b): buffers[n].detach().cpu().clone() for n, b in skeleton.named_buffers() if n in buffers}
    return copy.deepcopy(skeleton, memo)
