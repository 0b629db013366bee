"""From a module and a batch to a program.

Enters: an unmodified `nn.Module` (on any device, `meta` too), an example batch and a plan. Leaves: the `Program` over
global shapes and the `CallSpec` of its calls. Nothing is computed and no weight is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture.convert import CallSpec, convert
from fxpar.capture.eager import compare, walk
from fxpar.capture.input_checks import check_model, check_samples
from fxpar.capture.prepared_model import cast_inputs, input_dtype, trial_run
from fxpar.capture.python_state import OtherMemos
from fxpar.capture.rowwise import check_row_wise
from fxpar.capture.size_expressions import SizeError, check_splits, check_views, floats_as_tensors
from fxpar.capture.trace import Offered, Trace, arguments, trace
from fxpar.errors import CaptureError, PlanError
from fxpar.experts.compiler.module_forms import substitutes
from fxpar.ir.grad_flow import carried
from fxpar.ir.program import Program, note
from fxpar.ir.step import buffer_of, is_buffer
from fxpar.manager import without_collections
from fxpar.ops.small_operators import function as autograd_function
from fxpar.plan.plan import Plan
from fxpar.signatures.autograd_functions import check_added_losses, forget_proofs
from fxpar.signatures.op_call import write_defaults

# Buffers that a captured forward writes: what no program could write as the author's module does.


def check_written(program: Program, norms: Sequence[str]) -> None:
    """Refuses new values with a gradient, and norms of a batch whose rows data ranks share out.

    Args:
        norms: modules that norm by statistics of the batch, each with its line.

    Raises:
        CaptureError: the next backward would go through this call, whose graph is gone by then.
        PlanError: a norm is one of the whole batch, and the plan does not ask for that.
    """
    flags = carried(program)
    for name, node in program.output_nodes().items():
        if is_buffer(name) and any(flags[node]):
            line = f" ({note(node).source})" if note(node).source else ""
            raise CaptureError(
                f"the forward writes a value with a gradient into this buffer{line}: the backward of the next call "
                "would go through this one",
                where=buffer_of(name),
                remedy="write it under torch.no_grad(), or write value.detach()",
            )
    if norms and program.plan.data_ranks > 1 and program.plan.batch_norm == "refuse":
        raise PlanError(
            f"norms by statistics of the batch, which {program.plan.data_ranks} data ranks share out",
            where=norms[0],
            remedy="set batch_norm='global' for statistics of all ranks' rows, as one device has them (some "
            "small reductions a layer), put it in eval mode, or use a norm of each row (GroupNorm, LayerNorm)",
        )


# What counts in a whole step, which a batch of transformers brings: its loss is divided by that number already.

STEP_COUNT = "num_items_in_batch"


def check_step_count(batch: Any, plan: Plan) -> None:
    """Refuses a batch with a step's count where the plan would divide the losses of microbatches once more.

    Raises:
        PlanError: the plan's loss_reduction is not sum.
    """
    if isinstance(batch, Mapping) and batch.get(STEP_COUNT) is not None and plan.loss_reduction != "sum":
        raise PlanError(
            "divides the loss of each microbatch by what counts in the whole step, and the losses would be averaged "
            f"once more (loss_reduction={plan.loss_reduction})",
            where=f"batch entry {STEP_COUNT}",
            remedy="take Plan(loss_reduction='sum') (--loss-reduction sum), or leave the entry out of the batch",
        )


def with_step_count(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with a step's count as a tensor, which varies; a plain number would be part of the program."""
    count = batch.get(STEP_COUNT)
    return {**batch, STEP_COUNT: torch.tensor(count)} if type(count) in (int, float) else batch


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
    # Proofs of functions hold for the settings that they were made under, which may be others by now.
    forget_proofs()
    function = loss if callable(loss) else None
    name = loss if isinstance(loss, str) else None
    others, forwards = OtherMemos(), substitutes(model, plan.experts.expert_modules, trial_run)

    def traced(copies: bool) -> tuple[Trace, Program, CallSpec]:
        tracing = partial(trace, model, batch, function, others=others, copies=copies, substitutes=forwards)
        parts = _traced(partial(tracing, dtype=input_dtype(plan)), model, batch, plan, name, fixed)
        check_written(parts[1], parts[0].norms)
        return parts[0], _with_trainable_loss(model, parts[1], is_guess=loss is None), parts[2]

    how, program, spec = traced(copies=True)
    eager = walk(model, batch, function, others, how.copied, forwards, input_dtype(plan))
    # A walk that failed proves nothing either: then each layer is traced by itself.
    if how.copied and (eager.reason or not eager.layers.is_proven):
        how, program, spec = traced(copies=False)
    compare(eager, Counter(str(n.kwargs["path"]) for n in program.graph.nodes if n.target is autograd_function))
    if program.loss and model.training:
        check_added_losses(program)
    if plan.operators.batchwise_ops:
        call: Any = ((batch,), {})
        if function is None:
            call = cast_inputs(arguments(model, batch, False), input_dtype(plan))
        check_row_wise(program, {**dict(model.named_buffers()), **dict(model.named_parameters())}, spec.inputs(call))
    return Captured(program, spec, how.how, function, eager.reason, fixed=fixed)


def _traced(
    trace_with: Callable[..., Trace],
    model: nn.Module,
    batch: Any,
    plan: Plan,
    name: str | None,
    fixed: frozenset[tuple[int, int]],
) -> tuple[Trace, Program, CallSpec]:
    """Returns a trace with as many symbolic dimensions as the model takes, and its program.

    Args:
        trace_with: makes a trace with the dimensions that are `offered` as symbols.
    """
    ranks = [value.dim() for value in pytree.tree_leaves(batch) if isinstance(value, Tensor)]
    for symbolic in (None, *(count for count in (2, 1) if count < max(ranks, default=0)), 0):
        try:
            traced = trace_with(offered=Offered(symbolic, fixed))
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
    """Returns the program; without a loss where the only scalar, taken for one, is a number to look at.

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
