"""What a rank holds of parameters, and what an optimizer adds.

Enters: a program with layouts. Leaves: bytes of each parameter on each rank, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from fxpar.errors import InputError, shown
from fxpar.ir.grad_flow import gathered_parameters
from fxpar.ir.program import Parameter, Program, output_layouts, tensor_type
from fxpar.ir.step import MAIN, held_type, is_copy
from fxpar.layout.layout import Layout, Placement, share_of
from fxpar.layout.nesting import local_shape
from fxpar.layout.shards import real_part


@dataclass(frozen=True)
class OptimizerKind:
    """What an optimizer keeps for a parameter with a gradient.

    Attributes:
        copies: tensors like the parameter.
        extra: further bytes (Adam counts its steps in one float32).
        main_weights: whether these are in float32, with one more of main weights, where the parameter is not.
        is_offloaded: whether the host has all but `extra`.
    """

    copies: int
    extra: int = 0
    main_weights: bool = False
    is_offloaded: bool = False

    def tensors(self, elements: int, itemsize: int) -> int:
        """Returns the bytes of what is like a parameter of so many elements of so many bytes."""
        if self.main_weights and itemsize < MAIN.itemsize:
            return (self.copies + 1) * elements * MAIN.itemsize
        return self.copies * elements * itemsize

    def bytes(self, program: Program, parameter: Parameter) -> int:
        """Returns the bytes of a parameter's state on the device."""
        return self.extra + (0 if self.is_offloaded else self._state(program, parameter))

    def host_bytes(self, program: Program, parameters: Sequence[Parameter]) -> int:
        """Returns the bytes of parameters' state in the host's memory."""
        return sum(self._state(program, p) for p in parameters) if self.is_offloaded else 0

    def staged_bytes(self, program: Program, parameters: Sequence[Parameter]) -> int:
        """Returns the bytes on the device of chunks: of state that the host has, and of gradients in float32."""
        elements: dict[torch.dtype, int] = {}
        for parameter in parameters:
            dtype = held_type(program.plan, parameter.type).dtype
            elements[dtype] = elements.get(dtype, 0) + local_elements(program, parameter)
        staged = 0
        for dtype, count in elements.items():
            chunk = min(count, CHUNK)
            places = min(CHUNKS, -(-count // CHUNK)) * self.tensors(chunk, dtype.itemsize) if self.is_offloaded else 0
            casts = self.main_weights and dtype.itemsize < MAIN.itemsize
            staged = max(staged, places + (chunk * MAIN.itemsize if casts else 0))
        return staged

    def _state(self, program: Program, parameter: Parameter) -> int:
        itemsize = held_type(program.plan, parameter.type).dtype.itemsize
        return self.tensors(local_elements(program, parameter), itemsize)


# Of an optimizer that steps parameters a chunk at a time: elements of one, 128 MiB in float32, and how many are on the
# device at a time: one is computed while the next one comes and the last one leaves.
CHUNK = 2**25
CHUNKS = 3


OPTIMIZERS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        "adamw": OptimizerKind(2, 4),
        "sgd": OptimizerKind(0),
        "sgd-momentum": OptimizerKind(1),
        "muon": OptimizerKind(1),
        "none": OptimizerKind(0),
    }
)
_MORE = {"main": "main_weights", "offload": "is_offloaded"}


def optimizer_kind(text: Any) -> OptimizerKind:
    """Returns what `adamw`, or `adamw+main+offload`, keeps.

    Raises:
        InputError: it is unknown.
    """
    name, *more = text.split("+") if isinstance(text, str) else [""]
    if name not in OPTIMIZERS or len(set(more)) < len(more) or not all(word in _MORE for word in more):
        remedy = f"choose from {', '.join(OPTIMIZERS)}, with +main for main weights, +offload for state on the host"
        raise InputError("is unknown", where=f"optimizer {shown(text)}", remedy=remedy)
    return replace(OPTIMIZERS[name], **{_MORE[word]: True for word in more})


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one parameter on one rank; the last three are parts of the first."""

    bytes: int
    whole: int
    shared: int
    padding: int


def local_elements(program: Program, parameter: Parameter) -> int:
    """Returns the elements that a rank holds, padding included: equally many on every rank."""
    layout = output_layouts(program.node(parameter.node))[0]
    return prod(int(size) for size in local_shape(parameter.type.shape, layout, program.axes))


def held_bytes(program: Program, parameter: Parameter) -> int:
    """Returns the bytes of a parameter as the module holds it."""
    return local_elements(program, parameter) * held_type(program.plan, parameter.type).dtype.itemsize


def copy_bytes(program: Program, parameter: Parameter) -> int:
    """Returns the bytes of the copy that the program runs on, where the module holds main values."""
    kind = parameter.type
    return local_elements(program, parameter) * kind.dtype.itemsize if is_copy(program.plan, kind) else 0


def gathered_bytes(program: Program) -> dict[str, int]:
    """Returns the bytes of what gathers parameters once a step, by name of the node."""
    sizes = {}
    for name in gathered_parameters(program):
        kind, layout = tensor_type(program.node(name)), output_layouts(program.node(name))[0]
        sizes[name] = prod(int(size) for size in local_shape(kind.shape, layout, program.axes)) * kind.dtype.itemsize
    return sizes


def held_by(program: Program, parameter: Parameter, place: Mapping[str, int]) -> ParameterBytes:
    """Returns what the rank at a place holds."""
    layout = output_layouts(program.node(parameter.node))[0]
    size, elements = held_type(program.plan, parameter.type).dtype.itemsize, local_elements(program, parameter)
    cuts = [(axis, placement) for axis, placement in layout if placement.is_shard]
    if not cuts:
        return ParameterBytes(elements * size, elements * size, 0, 0)
    shared, padding = 0, 0
    for axis, placement in cuts:
        row = elements // _length(program, parameter, layout, placement)
        shared = max(shared, row * _shared(placement, program.axes[axis]))
        padding += row * _padding(placement, program.axes[axis], place[axis])
    return ParameterBytes(elements * size, 0, shared * size, padding * size)


def _length(program: Program, parameter: Parameter, layout: Layout, placement: Placement) -> int:
    return int(local_shape(parameter.type.shape, layout, program.axes)[placement.dim])


def _shared(placement: Placement, n: int) -> int:
    """Returns how many elements of a rank's part of the dimension another rank holds too."""
    return sum(int(share_of(p, n) or 0) for p in placement.pieces if not p.sharded or p.copies > 1)


def _padding(placement: Placement, n: int, rank: int) -> int:
    return sum(p.padded // n - real_part(p, n, rank)[1] for p in placement.pieces if p.padded)
