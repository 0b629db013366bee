"""Runs a module's programs: finds what each takes among the weights, the call's inputs and the random state.

Enters: a module, and calls that are bound to their programs. Leaves: the outputs by name, to differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.checkpoint.sharded import Sharded, leaf_of
from fxpar.errors import InputError
from fxpar.ir.program import Parameter
from fxpar.ir.step import RNG_PATH, is_buffer, is_copy, is_counted, written
from fxpar.rewrite.loss_reduction import COUNT
from fxpar.runtime.buffer_updates import Written
from fxpar.runtime.evaluation import Evaluation
from fxpar.runtime.grad_buffers import Buffers, Placing, TensorAddresses, Waiting
from fxpar.runtime.microbatches import Microbatch, Ran
from fxpar.runtime.outputs import differentiable
from fxpar.runtime.parameters import Copies, Tensors
from fxpar.runtime.programs import BoundBatch
from fxpar.runtime.random_state import RandomState
from fxpar.runtime.rank_consensus import Agreement


@dataclass(frozen=True)
class _Owned:
    """What a program takes of a module's own, which is looked at again where something was exchanged.

    Attributes:
        values: by name of the placeholder.
        leaves: those that are trained, by name of the parameter.
        seen: the leaf of each value.
        state: of these, where they lie and whether they are trained.
        version: of the module's tensors.
    """

    values: dict[str, Tensor]
    leaves: dict[str, Tensor]
    seen: tuple[Tensor, ...]
    state: TensorAddresses
    version: int

    def holds(self, version: int) -> bool:
        """Whether it is so still."""
        return self.version == version and self.state.holds(self.seen)


@dataclass(frozen=True)
class Prepared:
    """What a call takes.

    Attributes:
        values: by name of the placeholder, but for the random state.
        leaves: the tensors that require gradients, by name of the parameter.
        random: names of the placeholders of the random state.
        others: those of the values that are none of the module's own.
        placed: where its own lie.
    """

    values: dict[str, Any]
    leaves: dict[str, Tensor]
    random: tuple[str, ...]
    others: Mapping[str, Any]
    placed: TensorAddresses

    def of(self, call: BoundBatch) -> Prepared:
        """What another call of the same program takes."""
        inputs = {
            entry.node: call.inputs[entry.path] for entry in call.compiled.program.inputs if entry.path != RNG_PATH
        }
        inputs.update(zip(call.ready.lowered.places, call.places, strict=True))
        return replace(self, values={**self.values, **inputs}, others={**self.others, **inputs})

    def drawing(self, state: Callable[[], Tensor]) -> dict[str, Any]:
        """The values with the random state, which is asked for where there are draws."""
        return {**self.values, **{name: state() for name in self.random}}


class Runner:
    """Runs programs on the weights that a module has at each call.

    Args:
        module: has its parameters and buffers by now.
        shape_of: whole shape of each by name.
        copies: of its main values, on which programs run in mixed precision.
        random: the state of calls that are no microbatch.
        buffers: where gradients of whole steps go.
        foreign: names of the parameters that other ranks of a pipeline hold.
        agreement: of the ranks, who all make the same calls, and run their backwards in the same order.

    Attributes:
        evaluation: runs the stages of a pipeline without a backward; None without one.
    """

    evaluation: Evaluation | None = None

    def __init__(
        self,
        module: nn.Module,
        shape_of: Callable[[str], tuple[int, ...]],
        copies: Copies | None,
        random: RandomState,
        device: torch.device,
        buffers: Buffers,
        foreign: frozenset[str],
        agreement: Agreement,
    ) -> None:
        self._foreign, self._agreement = foreign, agreement
        self._module, self._shape_of, self._copies = module, shape_of, copies
        self._random, self._device, self._buffers = random, device, buffers
        self.tensors = Tensors(module)
        self._cut = frozenset(name for name, value in self.tensors.all.items() if isinstance(value, Sharded))
        self._owned: dict[int, _Owned] = {}
        self._waiting = Waiting()

    @property
    def waiting(self) -> Waiting:
        """Gradients that are not summed over the ranks yet."""
        return self._waiting

    def outputs(self, call: BoundBatch, requested: tuple[str, ...]) -> dict[str, Tensor]:
        """The wanted outputs by name, to be differentiated where gradients are on.

        Raises:
            InputError: autocast is on, a parameter was exchanged or is trainable since, or `step` is no number.
        """
        with self._random.of_accepted():
            return self._outputs(call, requested)

    def _outputs(self, call: BoundBatch, requested: tuple[str, ...]) -> dict[str, Tensor]:
        ready = self.prepared(call, torch.is_grad_enabled())
        every = (*requested, *filter(is_buffer, call.compiled.program.outputs))
        if self.evaluation is not None:
            self.evaluation.check(call, bool(ready.leaves))
            return self._committed(self.evaluation.outputs(call, every, ready.values, self._random.draw))
        values, leaves = ready.drawing(self._random.draw), ready.leaves
        steps, trained, sizes = call.ready, frozenset(leaves), call.sizes
        if not torch.is_grad_enabled() or not leaves or not steps.differentiable:
            with torch.no_grad():
                return self._committed(steps.outputs(sizes, every, values, call.rows))
        with torch.no_grad():
            # The backward is to read what the forward has read.
            values |= {node: values[node].clone() for node in written(call.compiled.program).values()}
            step = steps.step(steps.expected, trained)
            pending = steps.run(sizes, step, values, whole=self._waiting.is_idle, rows=call.rows)
            self._committed(pending.outputs)
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
                ran = steps.run(sizes, step, values, whole=self._waiting.is_idle, rows=call.rows)
            if self._waiting.is_idle:
                return ran.backward(tangents, whole=True)
            local_gradients = ran.backward(tangents, whole=False)
            return self._waiting.finished(local_gradients, ran.step.signature, ran.parameter)

        names = [name for name in steps.differentiable if name in requested]
        outputs = differentiable({name: pending.outputs[name] for name in requested}, names, leaves, backward)
        return {name: outputs[name] for name in requested}

    def _committed(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of a forward, behind which the buffers are what it has made of them."""
        new = Written()
        new.add(outputs)
        new.commit(self.tensors.all)
        return {name: value for name, value in outputs.items() if not is_buffer(name)}

    @torch.no_grad()
    def step(
        self,
        call: BoundBatch,
        ready: Prepared,
        name: str,
        tangent: Callable[[Mapping[str, Tensor]], Tensor],
        state: Callable[[], Tensor],
        microbatch: Microbatch | None = None,
    ) -> Ran:
        """Forward and backward of an output.

        Args:
            ready: what the call takes.
            tangent: the gradient of the output, of the model's outputs.
            state: gives the random state of the step, i64[3].
            microbatch: the call is one of several.

        Raises:
            InputError: nothing that requires a gradient is reached.
        """
        values = ready.drawing(state if microbatch is None else lambda: microbatch.random_state)
        leaves, steps = ready.leaves, call.ready
        if not leaves or name not in steps.differentiable:
            raise InputError(
                "no parameter that the loss reaches requires a gradient", where="train_step", remedy="unfreeze some"
            )
        whole = microbatch is None and self._waiting.is_idle
        names = tuple(n for n in steps.program.outputs if n in (name, COUNT) or is_counted(n) or is_buffer(n))
        step, sizes = steps.step((name,), frozenset(leaves), names), call.sizes
        steps.check_whole(step)
        state_of_gradients = self._buffers.state(leaves) if whole else None
        pending = steps.run(sizes, step, values, whole=whole, gradients=state_of_gradients, rows=call.rows)
        place = Placing(self._buffers, leaves) if whole else None
        gradients = pending.backward({name: tangent(pending.outputs)}, whole=whole, place=place)
        if whole:
            return Ran(pending.outputs, {}, lambda total: gradients, step.signature)
        return Ran(pending.outputs, gradients, pending.parameter, step.signature)

    def gradients(self, call: BoundBatch, name: str) -> list[Tensor | None]:
        """An output, new values of buffers, and what this rank has of gradients, with the bits of no counted step."""
        microbatch = Microbatch(0, 1, self._random.peek())
        ready = self.prepared(call, True)
        if not ready.leaves or name not in call.ready.differentiable:
            with torch.no_grad():
                values = ready.drawing(self._random.peek)
                names = (name, *filter(is_buffer, call.compiled.program.outputs))
                return list(call.ready.outputs(call.sizes, names, values, call.rows).values())
        ran = self.step(
            call, ready, name, lambda outputs: torch.ones_like(outputs[name]), self._random.peek, microbatch
        )
        new = [value for output, value in ran.outputs.items() if is_buffer(output)]
        return [ran.outputs[name], *new, *ran.unfinished.values()]

    def prepared(self, call: BoundBatch, differentiated: bool) -> Prepared:
        """What a call takes.

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
        owned = self._owned.get(id(call.compiled))
        if owned is None or not owned.holds(self.tensors.version):
            owned = self._owned[id(call.compiled)] = self._look(call, tensors)
        random = tuple(entry.node for entry in program.inputs if entry.path == RNG_PATH)
        others: dict[str, Any] = {e.node: call.inputs[e.path] for e in program.inputs if e.path != RNG_PATH}
        if self._copies is not None:
            local = [p for p in program.parameters if p.kind == "parameter" and p.fqn not in self._foreign]
            copied = {p.node: p.fqn for p in local if is_copy(program.plan, p.type)}
            parameters = {fqn: tensors[fqn] for fqn in copied.values()}
            others.update(
                zip(copied, self._copies.current(parameters, self._module.training, differentiated), strict=True)
            )
        others.update(zip(call.ready.lowered.places, call.places, strict=True))
        return Prepared({**owned.values, **others}, owned.leaves, random, others, owned.state)

    def _look(self, call: BoundBatch, tensors: Mapping[str, Tensor]) -> _Owned:
        """What a program takes of the module, and the leaves that are trained."""
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
        return _Owned(values, leaves, tuple(seen), TensorAddresses(seen), self.tensors.version)

    def _held(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A parameter or buffer, if it is the module's own still."""
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
