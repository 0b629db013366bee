"""Runs a module's programs: finds what each takes among the weights, the call's inputs and the random state.

Enters: a module, and calls that are bound to their programs. Leaves: the outputs by name, to differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.ir.program import PRECISION_DTYPES, Parameter, Program
from fxpar.ir.step import is_buffer, is_copy, is_counted, is_mixed, written
from fxpar.plan.plan import Plan
from fxpar.rewrite.loss_reduction import COUNT
from fxpar.runtime import batch as calls
from fxpar.runtime.bound_batch import BoundBatch, Written
from fxpar.runtime.grad_buffers import Buffers, MicrobatchSum, Placing, TensorAddresses, Waiting
from fxpar.runtime.local_model import LocalModel
from fxpar.runtime.microbatches import Microbatch, MicrobatchResult, weight
from fxpar.runtime.outputs import differentiable
from fxpar.runtime.parameters import Copies, GatheredParameters, Tensors
from fxpar.runtime.programs import Programs
from fxpar.runtime.random_state import RandomState
from fxpar.runtime.rank_batches import Inputs, Shapes
from fxpar.runtime.sharded import Sharded, leaf_of
from fxpar.runtime.steps import PeerMemory
from fxpar.runtime.world import World


@dataclass(frozen=True)
class _Weights:
    """Says what a program takes of a module's weights, which is looked at again where something was exchanged.

    Attributes:
        values: by name of the placeholder.
        leaves: those that are trained, by name of the parameter.
        seen: the leaf of each value.
        addresses: of these, where they lie and whether they are trained.
        version: of the module's tensors.
    """

    values: dict[str, Tensor]
    leaves: dict[str, Tensor]
    seen: tuple[Tensor, ...]
    addresses: TensorAddresses
    version: int

    def holds(self, version: int) -> bool:
        """Returns whether the record is still right."""
        return self.version == version and self.addresses.holds(self.seen)


class StageRunner(Protocol):
    """Runs the stages of a pipeline that this rank holds. Making one is a collective call, and so are its methods
    but `prepare`."""

    def check(self, call: BoundBatch, requested: Sequence[str]) -> None:
        """Refuses a forward alone that graphs cannot hold, or that is to be differentiated.

        Args:
            requested: names of its outputs.

        Raises:
            InputError: gradients are on, and some rank trains; or an operation of this rank's stages needs the host.
        """

    def prepare(self, calls: Sequence[BoundBatch]) -> None:
        """Lowers what this rank runs of a step, so that what fails on one rank fails in front of the schedule.

        Raises:
            FxparError: a stage cannot be lowered, or graphs cannot hold it.
        """

    def outputs(self, call: BoundBatch, requested: Sequence[str], state: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Returns the requested outputs of a forward alone, by name.

        Args:
            call: as `Runner.prepared` gave it.
            state: gives the random state; it is asked for on all ranks or on none.
        """

    def step(
        self,
        calls: Sequence[BoundBatch],
        state: Callable[[], Tensor],
        scaler: torch.amp.GradScaler | None,
        new: Written,
        is_recorded: bool,
    ) -> tuple[Tensor, Mapping[str, Tensor], Tensor | None]:
        """Runs forward and backward of all microbatches.

        Args:
            calls: the microbatches, bound to this rank's weights; all ranks of a pipeline have the same.
            state: gives the random state of the step.
            scaler: scales what is differentiated.
            new: takes the values of the buffers that any stage writes.
            is_recorded: whether a graph records the step, so that nothing may be read on the host.

        Returns:
            The loss, this rank's gradients by parameter, and of a recorded step whether rows of experts had no place on
            any rank, a bool scalar on the device; None where all rows have places.

        Raises:
            InputError: microbatches that leave other gradients, or nothing to train.
            Overflow: rows had no place, in a step that no graph records. It has changed nothing.
        """

    def norms(
        self, parameters: Mapping[str, Tensor], order: float, dtype: torch.dtype | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the norm of the gradients of all stages, and of those that count on this rank. A collective call.

        Args:
            parameters: this rank's, by name.
            order: of the norm, greater than 0; the largest element where it is infinite.
            dtype: in which it is counted; None for that of the gradients.
        """

    def join(self, scaler: torch.amp.GradScaler) -> None:
        """Makes a scaler that of all stages."""


# By axis, what makes a stage runner: of the gradients that are not summed over the ranks yet, of the first program
# after all passes, and of the memory through which ranks copy. `fxpar.api` fills it in.
STAGE_RUNNERS: dict[str, Callable[[Plan, World, Waiting, Program, PeerMemory], StageRunner]] = {}


class Runner:
    """Runs programs on the weights that a module has at each call.

    Args:
        module: has its parameters and buffers by now.
        random: the state of calls that are no microbatch.
        is_graphed: whether steps are replayed.

    Attributes:
        tensors: of the module.
        copies: of its main values, on which programs run in mixed precision; None in one precision.
        buffers: where gradients of whole steps go.
        waiting: gradients that are not summed over the ranks yet.
        pipeline: runs the stages of one; None without.
    """

    pipeline: StageRunner | None = None

    def __init__(
        self,
        module: LocalModel,
        random: RandomState,
        *,
        is_graphed: bool,
    ) -> None:
        plan = module.plan
        self._module, self._shape_of, self._random = module, module.shape_of, random
        self._foreign, self._agreement, self._device = module.foreign, module.world.agreement, module.world.device
        self.copies = Copies(PRECISION_DTYPES[plan.precision]) if is_mixed(plan) else None
        self.buffers = Buffers(is_graphed, plan.pp > 1)
        self.waiting = Waiting(is_graphed)
        self.tensors = Tensors(module)
        self._cut = frozenset(name for name, value in self.tensors.all.items() if isinstance(value, Sharded))
        self._weights: dict[int, _Weights] = {}
        self._whole = GatheredParameters()

    def outputs(self, call: BoundBatch, requested: tuple[str, ...]) -> dict[str, Tensor]:
        """Returns the wanted outputs by name, to be differentiated where gradients are on.

        Raises:
            InputError: autocast is on, a parameter was exchanged or is trainable since, or `step` is no number.
        """
        with self._random.of_accepted():
            return self._outputs(call, requested)

    def _outputs(self, call: BoundBatch, requested: tuple[str, ...]) -> dict[str, Tensor]:
        (call,) = self.gathered([self.prepared(call, torch.is_grad_enabled())])
        every = (*requested, *filter(is_buffer, call.compiled.program.outputs))
        if self.pipeline is not None:
            self.pipeline.check(call, every)
            run = partial(self._through_stages, requested=every)
            return self._committed(call.ready.graphs.evaluate(call, run, self._random, every))
        values, leaves = call.drawing(self._random.draw), call.leaves
        steps, trained, sizes = call.ready, frozenset(leaves), call.sizes
        if not torch.is_grad_enabled() or not leaves or not steps.differentiable:
            with torch.no_grad():
                return self._committed(steps.outputs(sizes, every, values, call.rows))
        with torch.no_grad():
            # The backward is to read what the forward has read.
            values |= {node: values[node].clone() for node in written(call.compiled.program).values()}
            step = steps.step(steps.expected, trained)
            pending = steps.run(sizes, step, values, whole=self.waiting.is_idle, rows=call.rows)
            self._committed(pending.outputs)
        # Without autograd's saved tensors nothing else would notice that a weight was changed before its backward.
        versions = {name: leaf._version for name, leaf in leaves.items()}

        def backward(tangents: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            with self._agreement.call("backward"):
                return differentiated(tangents)

        def differentiated(tangents: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            odd = next((name for name, leaf in leaves.items() if leaf._version != versions[name]), None)
            if odd is not None:
                raise InputError(
                    "was modified in place between a call and its backward",
                    where=odd,
                    remedy="step the optimizer behind the backward",
                )
            self._agreement.enter()
            names = tuple(name for name in steps.differentiable if name in tangents)
            ran = pending
            if names != tuple(pending.step.tangents):  # other outputs than last time: the forward has kept too little
                steps.expected = names
                step = steps.step(names, trained)
                ran = steps.run(sizes, step, values, whole=self.waiting.is_idle, rows=call.rows)
            if self.waiting.is_idle:
                return ran.backward(tangents, whole=True)
            local_gradients = ran.backward(tangents, whole=False)
            return self.waiting.finished(local_gradients, ran.step.signature, ran.parameter)

        names = [name for name in steps.differentiable if name in requested]
        outputs = differentiable({name: pending.outputs[name] for name in requested}, names, leaves, backward)
        return {name: outputs[name] for name in requested}

    def _through_stages(
        self, call: BoundBatch, state: Callable[[], Tensor], requested: tuple[str, ...]
    ) -> dict[str, Tensor]:
        assert self.pipeline is not None
        return self.pipeline.outputs(call, requested, state)

    def _committed(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs of a forward, after which the buffers are what it has made of them."""
        new = Written()
        new.add(outputs)
        new.commit(self.tensors.all)
        return {name: value for name, value in outputs.items() if not is_buffer(name)}

    @torch.no_grad()
    def step(
        self,
        call: BoundBatch,
        state: Callable[[], Tensor],
        microbatch: Microbatch | None = None,
        scaler: torch.amp.GradScaler | None = None,
        adds_up: bool = False,
    ) -> MicrobatchResult:
        """Runs forward and backward of a batch's loss.

        Args:
            call: as `prepared` gave it.
            state: gives the random state of the step, i64[3].
            microbatch: the call is one of several.
            scaler: scales what is differentiated.
            adds_up: products may add to what earlier microbatches of the step have left; others leave theirs alone.

        Raises:
            InputError: nothing that requires a gradient is reached.
        """
        values = call.drawing(state if microbatch is None else lambda: microbatch.random_state)
        name, leaves, steps = call.loss, call.leaves, call.ready
        if not leaves or name not in steps.differentiable:
            raise InputError(
                "no parameter that the loss reaches requires a gradient",
                where="train_step",
                remedy="unfreeze some; load an adapter of peft with is_trainable=True",
            )
        whole = microbatch is None and self.waiting.is_idle
        # Other outputs, such as logits, are left out, so that no step holds them to its end.
        names = tuple(n for n in steps.program.outputs if n in (name, COUNT) or is_counted(n) or is_buffer(n))
        step, sizes = steps.step((name,), frozenset(leaves), names), call.sizes
        steps.graphs.check(step.uncaptured)
        place: Placing | MicrobatchSum | None = self.waiting.sum_of(step.signature) if adds_up else None
        state_of_gradients: Hashable = place
        if whole:
            place, state_of_gradients = Placing(self.buffers, leaves), self.buffers.state(leaves)
        pending = steps.run(sizes, step, values, whole=whole, gradients=state_of_gradients, rows=call.rows)
        loss = pending.outputs[name]
        counted = pending.outputs[COUNT] if microbatch is not None and COUNT in names else None
        tangent = torch.ones_like(loss)
        if microbatch is not None:
            tangent = tangent * weight(counted, microbatch)
        if scaler is not None:
            # The tangent is scaled and not the loss: the caller gets the true loss.
            tangent = scaler.scale(tangent)
        gradients = pending.backward({name: tangent}, whole=whole, place=place)
        if whole:
            return MicrobatchResult(loss, pending.outputs, {}, lambda total: gradients, step.signature)
        return MicrobatchResult(loss, pending.outputs, gradients, pending.parameter, step.signature, counted)

    def gradients(self, call: BoundBatch) -> list[Tensor | None]:
        """Returns a loss, new values of buffers, and this rank's gradients, with the bits of no counted step."""
        (call,) = self.gathered([self.prepared(call, True)])
        if not call.leaves or call.loss not in call.ready.differentiable:
            with torch.no_grad():
                values = call.drawing(self._random.peek)
                names = (call.loss, *filter(is_buffer, call.compiled.program.outputs))
                return list(call.ready.outputs(call.sizes, names, values, call.rows).values())
        left = self.step(call, self._random.peek, Microbatch(0, 1, self._random.peek(), adds=True))
        new = [value for output, value in left.outputs.items() if is_buffer(output)]
        return [left.loss, *new, *left.unfinished.values()]

    def all_prepared(self, calls: Sequence[BoundBatch]) -> list[BoundBatch]:
        """Binds the calls of a step to the module's weights; those of one program are looked at once.

        Raises:
            InputError: as of `prepared`.
        """
        first: dict[int, BoundBatch] = {}
        ready = []
        for call in calls:
            # In mixed precision `prepared` casts: M microbatches would cast all weights M times.
            known = first.get(id(call.ready))
            if known is None:
                known = first[id(call.ready)] = self.prepared(call, True)
                ready.append(known)
                continue
            arguments = call.arguments
            values, others = {**known.values, **arguments}, {**known.others, **arguments}
            ready.append(replace(call, values=values, leaves=known.leaves, others=others, addresses=known.addresses))
        return ready

    def prepared(self, call: BoundBatch, differentiated: bool) -> BoundBatch:
        """Binds a call to the module's weights.

        Raises:
            InputError: autocast is on, or a parameter was exchanged or is trainable since.
        """
        program = call.compiled.program
        if torch.is_autocast_enabled(self._device.type):
            raise InputError(
                "would change the element types of the program", where="autocast", remedy="use Plan(precision=…)"
            )
        self.tensors.refresh()
        tensors = self.tensors.all
        weights = self._weights.get(id(call.compiled))
        if weights is None or not weights.holds(self.tensors.version):
            weights = self._weights[id(call.compiled)] = self._look(call, tensors)
        others = call.arguments
        if self.copies is not None:
            local = [p for p in program.parameters if p.kind == "parameter" and p.fqn not in self._foreign]
            copied = {p.node: p.fqn for p in local if is_copy(program.plan, p.type)}
            parameters = {fqn: tensors[fqn] for fqn in copied.values()}
            others.update(
                zip(copied, self.copies.current(parameters, self._module.training, differentiated), strict=True)
            )
        values = {**weights.values, **others}
        return replace(call, values=values, leaves=weights.leaves, others=others, addresses=weights.addresses)

    @torch.no_grad()
    def gathered(self, calls: Sequence[BoundBatch], *, waits: bool = True) -> list[BoundBatch]:
        """Gives the calls of a step the parameters that data ranks share out, whole. A collective call.

        Args:
            calls: as `prepared` gave them.
            waits: whether they are to be there. A step that runs once may wait for each where it is read.
        """
        known: dict[int, dict[str, Tensor]] = {}
        for call in calls:
            if id(call.ready) not in known:
                # Graphs of parts of a step read them where they were recorded.
                keeps = call.ready.graphs.is_on and not call.ready.graphs.holds_steps
                known[id(call.ready)] = whole = dict[str, Tensor]()
                for steps in call.ready.of_rank:
                    if steps.once is not None:
                        steps.enter()
                        names = steps.gathered if keeps else None
                        whole |= self._whole.current(steps.once, call.values, names, waits=waits or keeps)
        return [replace(call, values={**call.values, **known[id(call.ready)]}) for call in calls]

    def _look(self, call: BoundBatch, tensors: Mapping[str, Tensor]) -> _Weights:
        """Returns what a program takes of the module, and the leaves that are trained."""
        values: dict[str, Tensor] = {}
        leaves: dict[str, Tensor] = {}
        seen: list[Tensor] = []
        for parameter in call.compiled.program.parameters:
            if parameter.kind == "parameter" and parameter.fqn in self._foreign:
                continue
            is_constant = parameter.kind == "constant"
            constants = call.compiled.constants
            value = constants[parameter.fqn] if is_constant else self._held(parameter.fqn, tensors)
            _check_frozen(parameter, value)
            leaf = leaf_of(value)
            if leaf.requires_grad:
                leaves[parameter.fqn] = leaf
            values[parameter.node] = leaf.detach()
            seen.append(leaf)
        return _Weights(values, leaves, tuple(seen), TensorAddresses(seen), self.tensors.version)

    def _held(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns a parameter or buffer, if it is the module's own still."""
        value = tensors.get(name)
        if value is None or isinstance(value, Sharded) != (name in self._cut) or value.shape != self._shape_of(name):
            raise InputError(
                "is not the tensor that the module was made with",
                where=name,
                remedy="copy values into it under torch.no_grad(), or change the model before parallelize",
            )
        return value


def _check_frozen(parameter: Parameter, value: Tensor) -> None:
    if value.requires_grad and not parameter.trainable:
        raise InputError(
            "was frozen when the model was split, so the ranks' gradients of it would not be added",
            where=parameter.fqn,
            remedy="parallelize the model with it trainable, and freeze it afterwards",
        )


# What a call of a module does with one batch: a forward, or a forward and a backward.


class ForwardBackward:
    """Runs a module on single batches.

    Args:
        programs: of which each batch takes one.
        inputs: compares the ranks' batches; None where nobody does.
        runner: runs programs.
        loss: what `parallelize` was given.
    """

    def __init__(self, programs: Programs, runner: Runner, loss: Any, inputs: Inputs | None) -> None:
        self._programs, self._runner, self._loss, self._inputs = programs, runner, loss, inputs

    def forward(self, batch: Any) -> tuple[BoundBatch, dict[str, Tensor]]:
        """Returns all outputs of a batch by name, and the call that gave them.

        Raises:
            InputError: the batch does not fit the model, or what pads it matters.
        """
        call, _ = self._bound(batch, False, differentiated=torch.is_grad_enabled())
        call = self._programs.with_all_places(call)
        if call.unproven:
            self._check_padding(replace(call, loss=self._loss_name(call, "call")))
        outputs = call.compiled.program.outputs
        names = tuple(n for n in outputs if n != COUNT and not is_counted(n) and not is_buffer(n))
        return call, self._runner.outputs(call, names)

    def bind(self, batch: Any) -> BoundBatch:
        """Binds a batch whose loss is to be differentiated to its program.

        Raises:
            InputError: the batch does not fit the model, what pads it matters, or there is no loss.
        """
        return self._named(*self._bound(batch, callable(self._loss)))

    def bind_rows(self, batch: Any, count: int) -> list[BoundBatch]:
        """Binds the microbatches of a batch, which are of equally many of its rows, to their programs.

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

    def with_all_places(self, calls: Sequence[BoundBatch]) -> list[BoundBatch]:
        """Returns the same with buffers of as many places as rows may need; compiled on first use, on all ranks."""
        return [self._programs.with_all_places(call) for call in calls]

    def _bound(self, batch: Any, with_loss: bool, differentiated: bool = True) -> tuple[BoundBatch, Tensor | None]:
        """Returns the program for a call, and whether the ranks' values are equal, where the device has yet to say
        that."""
        are_equal, shapes = None, None
        if self._inputs is not None:
            batch, are_equal, shapes = self._compared(batch)
        return self._programs.bound(batch, with_loss, shapes, differentiated), are_equal

    def _compared(self, batch: Any) -> tuple[Any, Tensor | None, Shapes | None]:
        assert self._inputs is not None
        facts = self._programs.facts(batch, sizes=False)
        return self._inputs.compare(batch, facts, self._programs.without_rows)

    def _named(self, call: BoundBatch, are_equal: Tensor | None) -> BoundBatch:
        call = replace(call, loss=self._loss_name(call, "train_step"), are_equal=are_equal)
        self._check_padding(call)
        return call

    def _check_padding(self, call: BoundBatch) -> None:
        if call.unproven:
            assert self._inputs is not None, "only what was compared can be longer elsewhere"
            if self._runner.pipeline is not None:
                raise InputError(
                    "the data ranks bring sequences of other lengths, and through a pipeline nothing shows whether "
                    "what pads them matters",
                    where=f"batch entry {', '.join(sorted(call.unproven))}",
                    remedy="pad them to one length on every data rank",
                )
            check_padding(call, self._runner.gradients, self._inputs.somewhere)

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
    """Refuses a model whose loss, or a gradient of it or a buffer, depends on what stands after the end of sequences.

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
            "there: Plan(pad_values={path: value})",
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
