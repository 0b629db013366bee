"""Buffers that the forwards of a step write, until the step is done.

Enters: what each forward says of the buffers that it writes. Leaves: the next microbatch's values, and at the end the
module's buffers changed in place, once. A backward reads the values that its own forward has read, so nothing is
written into a buffer before the last backward; a step that fails, or that is run again, has written nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ir.step import buffer_of, is_buffer
from fxpar.ops.mesh_process_groups import process_group
from fxpar.runtime.bound_batch import BoundBatch
from fxpar.runtime.sharded import leaf_of
from fxpar.runtime.world import World


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
            # As bytes: not every backend sends every type.
            raw = torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in mine])
            dist.broadcast(raw, world.line[place], process_group(world.groups["pp"]))
            parts = raw.split([value.numel() * value.element_size() for value in like])
            for name, part, value in zip(names, parts, like, strict=True):
                self._values[name] = part.clone().view(value.dtype).view(value.shape)

    @torch.no_grad()
    def commit(self, tensors: Mapping[str, Tensor]) -> None:
        """Changes the buffers.

        Args:
            tensors: of the module, by name.
        """
        write({leaf_of(tensors[name]): value for name, value in self._values.items()})
        self.clear()


def write(values: Mapping[Tensor, Tensor]) -> None:
    """Copies values into tensors; what is to be copied may be one of these itself."""
    places = {tensor.untyped_storage().data_ptr() for tensor in values}
    copies = {t: v.clone() if v.untyped_storage().data_ptr() in places else v for t, v in values.items()}
    for tensor, value in copies.items():
        tensor.copy_(value)
