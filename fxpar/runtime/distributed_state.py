"""State for `torch.distributed.checkpoint`: each rank's part, named and placed in the original tensors.

Enters: a `ParallelModule`. Leaves: a state dict that DCP saves and loads in place, whatever the plan it is loaded with.
A plain even shard is a DTensor. Others (fused segments, padded vocabularies, key and value heads that neighbours share)
are a `TensorPart` of several chunks, of which the first rank that holds them writes each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard

from fxpar.errors import CheckpointError, InputError
from fxpar.layout import Layout, shard
from fxpar.runtime.state import check_names, check_saved, check_shape
from fxpar.shards import Box, boxes
from fxpar.weights import named_tensors

if TYPE_CHECKING:
    from fxpar.runtime.module import ParallelModule


class TensorPart(Tensor):
    """A tensor of which this rank holds some boxes; speaks DCP's protocol (`torch.distributed._checkpointable`).

    It has the whole tensor's shape and no operations: it is for checkpoints alone.

    Args:
        part: what the rank holds, padding included.
        shape: of the whole tensor, without padding.
        pieces: where the boxes are.
    """

    part: Tensor
    pieces: tuple[Box, ...]

    @staticmethod
    def __new__(cls, part: Tensor, shape: Sequence[int], pieces: Sequence[Box]) -> TensorPart:
        """A tensor without memory of its own beside the part."""
        made: TensorPart = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=part.dtype, device=part.device)
        made.part, made.pieces = part, tuple(pieces)
        return made

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box in self.pieces
            if box.stands
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for box in self.pieces if torch.Size(box.offsets) == index.offset).within(self.part)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (own,) = args
            return TensorPart(own.part, own.shape, own.pieces)
        raise InputError(
            f"{func} cannot be applied to one rank's part of a tensor",
            where="state_dict()",
            remedy="pass it to torch.distributed.checkpoint's save or load, or use full_state_dict()",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            "one rank's part of a tensor cannot be pickled or copied",
            where="state_dict()",
            remedy="save it with torch.distributed.checkpoint.save, or use full_state_dict()",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TensorPart({list(self.shape)}, {len(self.pieces)} boxes of {list(self.part.shape)})"


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def saved_once(module: ParallelModule) -> dict[str, Tensor]:
    """This rank's tensors that the unsplit model would save, detached, each under the first of its names.

    Raises:
        CheckpointError: the unsplit model's state dict holds something else than parameters and buffers.
    """
    entries = {name: entry for entry in named_tensors(module) for name in entry.names}
    found: dict[str, Tensor] = {}
    done: set[str] = set()
    for name in module.saved_names:
        check_saved(name, entries)
        if entries[name].first not in done:
            done.add(entries[name].first)
            found[name] = entries[name].tensor.detach()
    return found


def state_dict(module: ParallelModule) -> dict[str, Tensor]:
    """This rank's part of what the unsplit model would save; shares memory with the module's tensors.

    Raises:
        CheckpointError: see `saved_once`.
    """
    return {
        name: _entry(module, value, module.shape_of(name), module.layout_of(name))
        for name, value in saved_once(module).items()
    }


def _entry(module: ParallelModule, value: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    cuts = [(axis, placement) for axis, placement in layout if placement.is_shard]
    if not cuts:
        return value
    _, placement = cuts[0]
    if cuts == [("tp", shard(placement.dim, shape[placement.dim]))]:
        return DTensor.from_local(value, module.world.device_mesh["tp"], [Shard(placement.dim)], run_check=False)
    return TensorPart(value, shape, boxes(shape, layout, module.plan.axes, module.world.coordinates))


def load_state_dict(module: ParallelModule, state: Mapping[str, Any]) -> None:
    """Inverse of `state_dict`; what shares memory with the module's tensors is in its place already.

    Raises:
        CheckpointError: a name is missing or unknown, or a tensor is another part; nothing is loaded then.
    """
    own = state_dict(module)
    groups = [entry.names for entry in named_tensors(module)]
    remedy = "load the state dict of the same model and plan; torch.distributed.checkpoint.load fits it to other plans"
    check_names(state, module.saved_names, groups, "state dict", remedy)
    held = {name: own[next(n for n in names if n in own)] for names in groups for name in names if name in state}
    for name, value in state.items():
        if isinstance(value, Tensor):
            check_shape(name, tuple(value.shape), module.shape_of(name))
        if _place_of(value) != _place_of(held[name]):
            raise CheckpointError(
                f"is {_place_of(value)} and must be {_place_of(held[name])}", where=name, remedy=remedy
            )
    with torch.no_grad():
        for name, value in state.items():
            target, source = _local(held[name]), _local(value)
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)


def _place_of(value: Any) -> str:
    """What of a tensor a rank holds, in words; equal for equal parts."""
    if isinstance(value, TensorPart):
        return f"a part of {', '.join(f'{list(b.offsets)}+{list(b.sizes)}' for b in value.pieces) or 'nothing'}"
    if isinstance(value, DTensor):
        return f"a DTensor placed {value.placements} on {value.device_mesh.size()} ranks"
    return "a whole tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _local(value: Tensor) -> Tensor:
    if isinstance(value, TensorPart):
        return value.part
    return value.to_local() if isinstance(value, DTensor) else value
