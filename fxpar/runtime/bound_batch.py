"""A batch bound to the program that runs it and to the weights that it runs on, and the buffers that it writes.

Every call and every microbatch is one `BoundBatch`. `Programs` makes it, `Runner` adds what the program takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxpar.capture.capture import Captured
from fxpar.cost.work import Volume, Work, work_of
from fxpar.ir.program import Program
from fxpar.ir.step import RNG_PATH, buffer_of, is_buffer
from fxpar.ops.lower import Lowered
from fxpar.passes.differentiate import is_differentiable
from fxpar.runtime.grad_buffers import TensorAddresses
from fxpar.runtime.sharded import leaf_of
from fxpar.runtime.steps import Steps
from fxpar.runtime.world import World


@dataclass(frozen=True)
class Compiled:
    """A program for one mode and one structure of the batch, ready to run.

    Attributes:
        ready: as a rank runs it where all bring as many rows; `uneven` where they do not, made on first use.
        constants: the program's constants on the device.
        indices: the rank's index on each axis, on the device.
        differentiated: whether it was made for steps; `is_differentiable` says whether it is fit for them.
        admitted: sizes at which the trace is known to be the model.
        padded: inputs of which it is known that what pads them does not matter.
        volumes: how much its steps take in and compute, by sizes.
        spare: the same with buffers of as many places as rows may need, where the plan has a budget; made on first use.
    """

    captured: Captured
    program: Program
    ready: Steps
    constants: Mapping[str, Tensor]
    indices: tuple[Tensor, ...]
    differentiated: bool = True
    uneven: list[Steps] = field(default_factory=list)
    admitted: set[tuple[int, ...]] = field(default_factory=set)
    padded: set[str] = field(default_factory=set)
    spare: list[Compiled] = field(default_factory=list)
    volumes: dict[tuple[tuple[str, int], ...], Volume] = field(default_factory=dict)

    @property
    def lowered(self) -> Lowered:
        """Returns the module that runs where all ranks bring as many rows."""
        return self.ready.lowered

    @cached_property
    def random_inputs(self) -> tuple[str, ...]:
        """Returns the names of the placeholders of the random state."""
        return tuple(entry.node for entry in self.program.inputs if entry.path == RNG_PATH)

    @cached_property
    def is_differentiable(self) -> bool:
        """Returns whether its steps are for all sizes that it admits."""
        return self.differentiated or is_differentiable(self.program)

    @cached_property
    def _work(self) -> Work:
        return work_of(self.captured.program)

    def volume(self, totals: Mapping[str, int]) -> Volume:
        """Returns how much a step takes in and computes.

        Args:
            totals: sizes of all data ranks' inputs, by symbol.
        """
        key = tuple(totals.items())
        if key not in self.volumes:
            self.volumes[key] = self._work.at(totals)
        return self.volumes[key]

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether the program is the model for inputs of these sizes."""
        key = tuple(sizes.values())
        if key not in self.admitted:
            conditions = self.captured.program.conditions
            if self.captured.spec.admits(sizes) and all(condition.holds(sizes) for condition in conditions):
                self.admitted.add(key)
        return key in self.admitted


@dataclass(frozen=True)
class BoundBatch:
    """A batch bound to its program, and from `Runner.prepared` on to the module's weights.

    Attributes:
        ready: what runs.
        inputs: by path, on the device.
        sizes: values of the symbols, of what this rank brings.
        places: the rank's index on each axis and, where ranks bring other numbers of rows, how many all bring and those
            before this one: the last inputs of the module.
        totals: values of the symbols, of what all data ranks bring.
        fills: inputs as they may be as well, where some were made longer, by path; `unproven` are these.
        rows: of each data rank, where they differ.
        loss: name of the output that is differentiated; empty in a plain call.
        are_equal: whether the ranks' values are equal, where the device has yet to say that.
        values: what the program takes, by name of the placeholder, but for the random state.
        leaves: the tensors that require gradients, by name of the parameter.
        others: those of the values that are none of the module's weights.
        addresses: where the weights lie.
    """

    compiled: Compiled
    ready: Steps
    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    places: tuple[Tensor, ...]
    totals: Mapping[str, int] = field(default_factory=dict)
    fills: Mapping[str, Tensor] = field(default_factory=dict)
    unproven: frozenset[str] = frozenset()
    rows: tuple[int, ...] = ()
    loss: str = ""
    are_equal: Tensor | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    addresses: TensorAddresses | None = None

    @property
    def adds(self) -> bool:
        """Returns whether the loss of a step is the sum of those of its microbatches."""
        return self.compiled.program.plan.loss_reduction == "sum"

    @cached_property
    def volume(self) -> Volume:
        """Returns how much all data ranks bring, and compute of it."""
        return self.compiled.volume(self.totals)

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns what the program takes of the call alone, by name of the placeholder, but for the random state."""
        inputs = {e.node: self.inputs[e.path] for e in self.compiled.program.inputs if e.path != RNG_PATH}
        return {**inputs, **dict(zip(self.ready.lowered.places, self.places, strict=True))}

    def drawing(self, state: Callable[[], Tensor]) -> dict[str, Any]:
        """Returns the values with the random state, which is asked for where there are draws."""
        return {**self.values, **{name: state() for name in self.compiled.random_inputs}}


# A backward reads the values that its own forward has read, so nothing is written into a buffer before the last
# backward of a step. A step that fails, or that is run again, has written nothing.


class Written:
    """New values of the buffers of a module, by name."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def read(self, call: BoundBatch) -> BoundBatch:
        """Returns a call with the buffers as they are by now."""
        parameters = call.compiled.program.parameters if self._values else ()
        new = {p.node: self._values[p.fqn] for p in parameters if p.fqn in self._values}
        return replace(call, values={**call.values, **new}) if new else call

    def add(self, outputs: Mapping[str, Tensor]) -> None:
        """Takes new values from the outputs of a call."""
        self._values.update({buffer_of(name): value for name, value in outputs.items() if is_buffer(name)})

    def clear(self) -> None:
        """Forgets all."""
        self._values.clear()

    def share(self, world: World, maker: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Gives all ranks of a pipeline the new values. A collective call.

        Args:
            maker: of each buffer that is written, by name, the place in the pipeline of the rank that computes it.
            tensors: of the module, by name.
        """
        for place in sorted(set(maker.values())):
            names = [name for name, owner in maker.items() if owner == place]
            like = [leaf_of(tensors[name]).detach() for name in names]
            mine = [self._values[name] for name in names] if world.place == place else like
            raw = torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in mine])
            world.broadcast(raw, place)
            parts = raw.split([value.numel() * value.element_size() for value in like])
            for name, part, value in zip(names, parts, like, strict=True):
                self._values[name] = part.clone().view(value.dtype).view(value.shape)

    @torch.no_grad()
    def commit(self, tensors: Mapping[str, Tensor], has_overflowed: Tensor | None = None) -> None:
        """Changes the buffers.

        Args:
            tensors: of the module, by name.
            has_overflowed: a bool scalar on the device; where it is true, the buffers stay as they are.
        """
        new = {leaf_of(tensors[name]): value for name, value in self._values.items()}
        if has_overflowed is not None:
            new = {tensor: tensor.where(has_overflowed, value) for tensor, value in new.items()}
        write(new)
        self.clear()


def write(values: Mapping[Tensor, Tensor]) -> None:
    """Copies values into tensors; what is to be copied may be one of these itself."""
    places = {tensor.untyped_storage().data_ptr() for tensor in values}
    copies = {t: v.clone() if v.untyped_storage().data_ptr() in places else v for t, v in values.items()}
    for tensor, value in copies.items():
        tensor.copy_(value)
