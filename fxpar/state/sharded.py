"""Tensors of which this rank holds a part: gradients, optimizer state, and what parameters are (`ShardedParameter`).

Enters: a rank's part and its `ShardSpec`. Leaves: a tensor of the whole shape that optimizers, gradient clipping and
`torch.distributed.checkpoint` treat as a shard. What each operation does is in `sharded_ops.py`.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from fxpar.errors import InputError
from fxpar.layout.shards import Box
from fxpar.state import sharded_ops
from fxpar.state.place import ShardSpec
from fxpar.state.routing import routed


class Sharded(DTensor):
    """A tensor of the whole's shape of which this rank holds a part.

    It is a DTensor so that torch's state dicts gather and distribute it, and shares nothing else with one: every
    operation, and every conversion, is defined here.

    Args:
        part: what the rank holds, padding included.
        place: where that lies in the whole.
    """

    _local_tensor: Tensor
    place: ShardSpec
    is_in_graph = False  # a parameter's copy, whose gradient goes to the leaf

    @staticmethod
    def __new__(cls, part: Tensor, place: ShardSpec) -> Sharded:
        """A tensor without memory of its own beside the part."""
        tensor: Sharded = Tensor._make_wrapper_subclass(
            cls, place.shape, strides=place.stride, dtype=part.dtype, device=part.device
        )
        tensor._local_tensor, tensor.place = part, place
        return tensor

    def __init__(self, part: Tensor, place: ShardSpec) -> None:
        """Nothing is left to do; DTensor's own would be slow."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with routed(Sharded):
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return sharded_ops.run(func, args, kwargs or {}, Sharded)

    # ------------------------------------------------------------------ whole and part

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's part, padding included; shares memory. `copy_` into it takes a whole tensor too."""
        part: LocalShard = self._local_tensor.detach().as_subclass(LocalShard)
        part.place = self.place
        return part

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, on every rank. A collective call."""
        return self.place.gather(self._local_tensor.detach())

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """The whole tensor as a replicated DTensor, or this one where it is placed so. A collective call.

        Raises:
            InputError: other placements.
        """
        mesh, requested = self.place.device_mesh, placements and tuple(placements)
        if requested == self.placements:
            return self
        if requested is None or all(isinstance(p, Replicate) for p in requested):
            return DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        raise InputError(
            f"cannot be placed as {list(requested)}", where=self.place.name, remedy="use full_tensor() and cut that"
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """All axes of more than one rank."""
        return self.place.device_mesh

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """`Shard` where the part is a plain even shard, else a placement that is fxpar's own."""
        return self.place.placements

    @property
    def _spec(self) -> DTensorSpec:  # type: ignore[override]
        meta = TensorMeta(self.place.shape, self.place.stride, self.dtype)
        return DTensorSpec(self.place.device_mesh, self.place.placements, tensor_meta=meta)

    # ------------------------------------------------------------------ checkpoints

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box in self.place.boxes
            if box.stands
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.place.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunk = next(box for box in self.place.boxes if torch.Size(box.offsets) == index.offset)
        return chunk.within(self._local_tensor.detach())

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        clone = Sharded(copy.deepcopy(self._local_tensor.detach(), memo), self.place)
        memo[id(self)] = clone
        return clone

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            "one rank's part of a tensor cannot be pickled",
            where=self.place.name,
            remedy="save it with torch.distributed.checkpoint.save, or full_state_dict() with torch.save",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = type(self).__name__
        return f"{kind}({list(self.shape)}, {self.place.layout}, part={self._local_tensor.detach()!r})"

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: this rank has not all elements."""
        raise _needs_whole("numpy()", self.place)

    def tolist(self) -> NoReturn:
        """Refused: this rank has not all elements."""
        raise _needs_whole("tolist()", self.place)

    def data_ptr(self) -> int:
        """Of what this rank holds: scripts tell tensors apart by it."""
        return self._local_tensor.data_ptr()

    def share_memory_(self) -> NoReturn:
        """Refused: programs run on this rank's memory."""
        raise InputError(
            "cannot be moved to shared memory: programs run on the memory that it has",
            where=f"{self.place.name}.share_memory_()",
            remedy="share p.to_local().clone()",
        )


class LocalShard(Tensor):
    """What `to_local` returns: a plain tensor, but that `copy_` takes the whole tensor too.

    That is how torch's state dicts hand over a whole tensor, as they can cut even shards alone.
    """

    place: ShardSpec

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.copy_ and isinstance(args[0], LocalShard):
                target, source, *rest = args
                if not isinstance(source, Sharded) and source.shape == target.place.shape:
                    args = (target, target.place.cut(source), *rest)
            return func(*args, **(kwargs or {}))


def local_of(value: Tensor) -> Tensor:
    """What this rank holds, detached: the memory that optimizers change. Of a plain tensor, all of it."""
    return value._local_tensor.detach() if isinstance(value, Sharded) else value.detach()


def whole_of(value: Tensor) -> Tensor:
    """The whole tensor on every rank, detached. A collective call where ranks hold parts."""
    return value.place.gather(local_of(value)) if isinstance(value, Sharded) else value.detach()


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _needs_whole(what: str, place: ShardSpec) -> InputError:
    return InputError(
        "holds a part of the elements on this rank", where=f"{place.name}.{what}", remedy=f"use full_tensor().{what}"
    )
