"""What a call of a module does with one batch: a forward, or a forward and a backward.

Enters: a batch in canonical form. Leaves: the outputs of the program that fits it, or what a forward and a backward
leave of the parameters' gradients (`MicrobatchResult`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ir.step import is_buffer, is_counted
from fxpar.rewrite.loss_reduction import COUNT
from fxpar.runtime import batch as calls
from fxpar.runtime.inputs import Inputs, Shapes
from fxpar.runtime.microbatches import Microbatch, MicrobatchResult, weight
from fxpar.runtime.programs import BoundBatch, Programs
from fxpar.runtime.runner import Prepared, Runner


@dataclass(frozen=True)
class Bound:
    """A batch of a training step, bound to its program.

    Attributes:
        loss: name of the output that is differentiated.
        are_equal: whether the ranks' values are equal, where the device has yet to say that.
    """

    call: BoundBatch
    loss: str
    are_equal: Tensor | None

    @property
    def adds(self) -> bool:
        """Whether the loss of a step is the sum of those of its microbatches."""
        return self.call.compiled.program.plan.loss_reduction == "sum"


class ForwardBackward:
    """Runs a module on single batches.

    Args:
        programs: of which each batch takes one.
        inputs: compares the ranks' batches; None where nobody does.
        runner: runs programs.
        loss: what `parallelize` was given.
    """

    def __init__(self, programs: Programs, inputs: Inputs | None, runner: Runner, loss: Any) -> None:
        self._programs, self._inputs, self._runner, self._loss = programs, inputs, runner, loss

    def forward(self, batch: Any) -> tuple[BoundBatch, dict[str, Tensor]]:
        """All outputs of a batch by name, and the call that gave them.

        Raises:
            InputError: the batch does not fit the model, or what pads it matters.
        """
        call, _ = self._bound(batch, False, differentiated=torch.is_grad_enabled())
        call = self._programs.with_all_places(call)
        if call.unproven:
            self._check_padding(call, self._loss_name(call, "call"))
        outputs = call.compiled.program.outputs
        names = tuple(n for n in outputs if n != COUNT and not is_counted(n) and not is_buffer(n))
        return call, self._runner.outputs(call, names)

    def bind(self, batch: Any) -> Bound:
        """The program for a batch whose loss is to be differentiated.

        Raises:
            InputError: the batch does not fit the model, what pads it matters, or there is no loss.
        """
        return self._named(*self._bound(batch, callable(self._loss)))

    def bind_all(self, batches: Sequence[Any]) -> list[Bound]:
        """The programs for the microbatches of a step.

        Raises:
            InputError: as of `bind`.
        """
        return [self.bind(batch) for batch in batches]

    def bind_rows(self, batch: Any, count: int) -> list[Bound]:
        """The programs for the microbatches of a batch, which are of equally many of its rows.

        The ranks' values are compared once, those of the whole batch.

        Raises:
            InputError: as of `bind`, or rows that are no multiple of `count`.
        """
        parts = calls.cut_rows(self._programs.first.program, batch, count)
        if self._inputs is None or count == 1:
            return [self.bind(part) for part in parts]
        moved, are_equal, shapes = self._compared(batch)
        if shapes is not None:
            return [self.bind(part) for part in parts]
        parts = calls.cut_rows(self._programs.first.program, moved, count)
        bound = (self._programs.bound(part, callable(self._loss)) for part in parts)
        return [self._named(call, None if i else are_equal) for i, call in enumerate(bound)]

    def with_all_places(self, bounds: Sequence[Bound]) -> list[Bound]:
        """The same with buffers of as many places as rows may need; compiled on first use, on all ranks."""
        return [replace(bound, call=self._programs.with_all_places(bound.call)) for bound in bounds]

    def prepare(self, bounds: Sequence[Bound]) -> list[Prepared]:
        """What the calls of a step take; of one program the parameters are looked at once.

        Raises:
            InputError: as of `Runner.prepared`.
        """
        first: dict[int, Prepared] = {}
        prepared = []
        for bound in bounds:
            call = bound.call
            if id(call.ready) not in first:
                first[id(call.ready)] = self._runner.prepared(call, True)
            prepared.append(first[id(call.ready)].of(call))
        return prepared

    def train(
        self,
        bound: Bound,
        ready: Prepared,
        state: Callable[[], Tensor],
        microbatch: Microbatch | None,
        scaler: torch.amp.GradScaler | None,
    ) -> MicrobatchResult:
        """Forward and backward of a batch's loss.

        Args:
            ready: what the call takes.
            state: gives the random state of the step.
            scaler: scales what is differentiated.

        Raises:
            InputError: there is nothing to train.
        """
        call, name = bound.call, bound.loss
        weighs = microbatch is not None and COUNT in call.compiled.program.outputs

        def tangent(outputs: Mapping[str, Tensor]) -> Tensor:
            share = torch.ones_like(outputs[name])
            if microbatch is not None:
                share = share * weight(outputs[COUNT] if weighs else None, microbatch)
            return share if scaler is None else scaler.scale(share)

        ran = self._runner.step(call, ready, name, tangent, state, microbatch)
        rows = {output: value for output, value in ran.outputs.items() if is_counted(output)}
        return MicrobatchResult(ran.outputs[name], ran, ran.outputs[COUNT] if weighs else None, rows)

    def _bound(self, batch: Any, with_loss: bool, differentiated: bool = True) -> tuple[BoundBatch, Tensor | None]:
        """The program for a call, and whether the ranks' values are equal, where the device has yet to say that."""
        are_equal, shapes = None, None
        if self._inputs is not None:
            batch, are_equal, shapes = self._compared(batch)
        return self._programs.bound(batch, with_loss, shapes, differentiated), are_equal

    def _compared(self, batch: Any) -> tuple[Any, Tensor | None, Shapes | None]:
        assert self._inputs is not None
        facts = self._programs.facts(batch, sizes=False)
        return self._inputs.compare(batch, facts, self._programs.without_rows)

    def _named(self, call: BoundBatch, are_equal: Tensor | None) -> Bound:
        name = self._loss_name(call, "train_step")
        self._check_padding(call, name)
        return Bound(call, name, are_equal)

    def _check_padding(self, call: BoundBatch, loss: str) -> None:
        if call.unproven:
            assert self._inputs is not None, "only what was compared can be longer elsewhere"
            if self._runner.evaluation is not None:
                raise InputError(
                    "the data ranks bring sequences of other lengths, and through a pipeline nothing shows whether "
                    "what pads them matters",
                    where=f"batch entry {', '.join(sorted(call.unproven))}",
                    remedy="pad them to one length on every data rank",
                )
            check_padding(call, lambda tried: self._runner.gradients(tried, loss), self._inputs.somewhere)

    def _loss_name(self, call: BoundBatch, where: str) -> str:
        name = call.compiled.program.loss
        if not name:
            what = f"{self._loss!r}" if isinstance(self._loss, str) else "or more than one scalar"
            why = ", so that nothing shows whether what pads its sequences matters" if call.unproven else ""
            raise InputError(
                f"the model returns no loss ({what}){why}",
                where=where,
                remedy="pass labels, or name the loss: parallelize(…, loss=…)",
            )
        return name


def check_padding(
    call: BoundBatch, run: Callable[[BoundBatch], Sequence[Tensor | None]], somewhere: Callable[[bool], bool]
) -> None:
    """Refuses a model whose loss, or a gradient of it or a buffer, depends on what stands behind the end of sequences.

    What a mask leaves out is left out to the last bit: no more than the order of a sum may differ. It is tried once for
    each program and input.

    Args:
        call: its `unproven` are asked about.
        run: the loss of a call, new values of buffers, and this rank's gradients.
        somewhere: whether something is so on any rank. A collective call.

    Raises:
        InputError: it does, on some rank.
    """
    first, second = run(call), run(replace(call, inputs=call.fills))
    if somewhere(any(map(_differ, first, second))):
        a, b = (values[0] for values in (first, second))
        assert a is not None
        assert b is not None
        raise InputError(
            "is as long as the longest of any data rank, and the loss, its gradient or a buffer depends on what pads "
            f"it (losses of {a.item():.8g} and {b.item():.8g})",
            where=f"batch entry {', '.join(sorted(call.unproven))}",
            remedy="pass a mask or labels that leave the end out, pad batches alike on all ranks, or say what stands "
            "there: Plan(padding={path: value})",
        )
    call.compiled.padded.update(call.unproven)


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is not b
    if not a.is_floating_point():
        return not torch.equal(a, b)
    unit = max(1e-6, 2 * torch.finfo(a.dtype).eps) if a.dtype != torch.float64 else 1e-12
    largest = float(a.detach().abs().nan_to_num(0.0).max()) if a.numel() else 0.0
    return not torch.allclose(a, b, rtol=0.0, atol=unit * largest, equal_nan=True)
