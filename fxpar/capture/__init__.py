"""From a module and a batch to a program.

Enters: an unmodified `nn.Module` (on any device, `meta` too), an example batch and a plan. Leaves: the `Program` over
global shapes and the `CallSpec` of its calls. Nothing is computed and no weight is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture.buffer_mutation import check_written
from fxpar.capture.convert import CallSpec, convert
from fxpar.capture.eager import compare, walk
from fxpar.capture.expert_modules import named_experts
from fxpar.capture.floats import floats_as_tensors
from fxpar.capture.guards import check_model, check_samples
from fxpar.capture.memo import OtherMemos
from fxpar.capture.precision import cast_inputs, input_dtype
from fxpar.capture.rowwise import check_row_wise
from fxpar.capture.size_expressions import SizeError, check_splits, check_views
from fxpar.capture.step_count import check_step_count
from fxpar.capture.trace import Trace, arguments, trace
from fxpar.errors import CaptureError
from fxpar.ops.functions import function as autograd_function
from fxpar.plan.plan import Plan
from fxpar.program.gc_pause import without_collections
from fxpar.program.grad_flow import carried
from fxpar.program.program import Program
from fxpar.signatures.added_loss_functions import check_added_losses
from fxpar.signatures.autograd_functions import forget_proofs
from fxpar.signatures.defaults import write_defaults

__all__ = ["CallSpec", "Captured", "arguments", "capture", "check_model", "check_samples"]


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        program: one device's program over global shapes.
        spec: how a call maps to the program's inputs and outputs.
        how: `export`; `compiled` where the model was told that it is compiled; `dynamo` where export failed.
        loss: the loss callable that was traced with the model, if any.
        unwalked: why the eager model's autograd graph could not be walked and compared; empty where it was.
        findings: what was checked of it since, as sentences.
        fixed: sizes of the inputs that are numbers and not symbols, since PyTorch differentiates the model for one of
            them at a time: dimensions, and the sizes that they have.
    """

    program: Program
    spec: CallSpec
    how: str
    loss: Callable[..., Any] | None
    unwalked: str = ""
    findings: tuple[str, ...] = ()
    fixed: frozenset[tuple[int, int]] = frozenset()


def capture(
    model: nn.Module,
    batch: Any,
    plan: Plan | None = None,
    loss: Callable[..., Any] | str | None = None,
    fixed: frozenset[tuple[int, int]] = frozenset(),
) -> Captured:
    """Captures a model in its current mode (`train()` or `eval()`).

    Args:
        model: the module as its author wrote it.
        batch: an example: a mapping (keyword arguments), a tuple (positional) or a tensor. Of one sample the program
            is for one sample alone (see `check_samples`).
        plan: stored in the program; default `Plan()`.
        loss: a callable `(outputs, batch) → scalar`, the name of a scalar output, or None: the output `loss`, else
            the only scalar. An empty name asks for none.
        fixed: dimensions and sizes of inputs that are to be numbers.

    Raises:
        CaptureError: the model cannot be captured with the same values and gradients; says where and what to do.
    """
    # A program may be differentiated later: regions of no_grad show where gradients are on around them.
    with without_collections(), torch.enable_grad():
        return _capture(model, batch, plan or Plan(), loss, fixed)


def _capture(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    loss: Callable[..., Any] | str | None,
    fixed: frozenset[tuple[int, int]],
) -> Captured:
    check_step_count(batch, plan)
    forget_proofs()
    function = loss if callable(loss) else None
    name = loss if isinstance(loss, str) else None
    others, experts = OtherMemos(), named_experts(model, plan.experts)

    def traced(copies: bool) -> tuple[Trace, Program, CallSpec]:
        options: dict[str, Any] = {"copies": copies, "experts": experts, "fixed": fixed, "dtype": input_dtype(plan)}
        parts = _traced(partial(trace, model, batch, function, others=others, **options), model, batch, plan, name)
        check_written(parts[1], parts[0].norms)
        return parts[0], _with_trainable_loss(model, parts[1], is_guess=loss is None), parts[2]

    how, program, spec = traced(copies=True)
    eager = walk(model, batch, function, others, how.copied, experts, input_dtype(plan))
    if how.copied and (eager.reason or not eager.layers.is_proven):
        how, program, spec = traced(copies=False)
    compare(eager, Counter(str(n.kwargs["path"]) for n in program.graph.nodes if n.target is autograd_function))
    if program.loss and model.training:
        check_added_losses(program)
    if plan.row_wise:
        call: Any = ((batch,), {})
        if function is None:
            call = cast_inputs(arguments(model, batch, False), input_dtype(plan))
        check_row_wise(program, {**dict(model.named_buffers()), **dict(model.named_parameters())}, spec.inputs(call))
    return Captured(program, spec, how.how, function, eager.reason, fixed=fixed)


def _traced(
    trace_with: Callable[..., Trace], model: nn.Module, batch: Any, plan: Plan, name: str | None
) -> tuple[Trace, Program, CallSpec]:
    """A trace with as many symbolic dimensions as the model takes, and its program.

    Args:
        trace_with: makes a trace with `symbolic` of the leading dimensions as symbols.
    """
    ranks = [value.dim() for value in pytree.tree_leaves(batch) if isinstance(value, Tensor)]
    for symbolic in (None, *(count for count in (2, 1) if count < max(ranks, default=0)), 0):
        try:
            traced = trace_with(symbolic=symbolic)
            program, spec = convert(traced, model, plan, name)
            write_defaults(program.graph.nodes)
            floats_as_tensors(program)
            check_views(program)
            check_splits(program)
        except SizeError:
            if symbolic == 0 or (symbolic == 1 and plan.data_ranks > 1):  # rows that ranks share out are no number
                raise
            continue
        break
    return traced, program, spec


def _with_trainable_loss(model: nn.Module, program: Program, is_guess: bool) -> Program:
    """The program; without a loss where the only scalar, taken for one, is a number to look at.

    Args:
        is_guess: whether nobody called it a loss.

    Raises:
        CaptureError: no trainable parameter reaches the loss.
    """
    trains = model.training and any(p.trainable for p in program.parameters)
    if not trains or not program.loss or any(carried(program)[program.output_nodes()[program.loss]]):
        return program
    if is_guess and program.loss != "loss":
        return program.with_(loss="")
    raise CaptureError(
        "has no gradient: no trainable parameter reaches it",
        where=f"loss {program.loss}",
        remedy="leave detach and no_grad out of it; for a model that does not train call model.eval()",
    )
