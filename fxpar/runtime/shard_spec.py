"""Says where a rank's parts of a model's tensors lie in the full ones, and gathers full tensors of parts.

Nothing here knows of programs or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from fxpar.errors import InputError
from fxpar.layout.layout import Layout, Placement, shard
from fxpar.layout.shards import Box, block, boxes, counted, local_block, part_shape, real_part, whole
from fxpar.ops.process_group import Group, process_group
from fxpar.runtime.world import World
from fxpar.torch_internals import disable_current_modes

# Elements of a tensor that its fingerprint is made of.
_SAMPLED = 1024


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or buffer of a model with all its names, in the order of `named_parameters`.

    Attributes:
        names: under which modules hold it; more than one where it is tied.
    """

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def first(self) -> str:
        """Returns the name that stands for it."""
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        """Returns whether it is a parameter, else a buffer."""
        return isinstance(self.tensor, nn.Parameter)


def named_tensors(model: nn.Module) -> list[ModelTensor]:
    """Returns every parameter and buffer of a model once: all parameters before all buffers."""
    entries: dict[int, tuple[Tensor, list[str]]] = {}
    for pairs in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in pairs:
            entries.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [ModelTensor(tuple(names), tensor) for tensor, names in entries.values()]


def fingerprints(model: nn.Module) -> dict[str, str]:
    """Returns a digest of each tensor's type and of up to 1024 of its elements, evenly spread.

    Of meta tensors the type and shape alone: their values follow from the plan's seed.
    """
    digests = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            digests[name] = f"meta {value.dtype}{tuple(value.shape)}"
            continue
        flat = value.detach().reshape(-1)
        # Samples suffice: weights of two initialisations differ nearly everywhere, and a digest of all would read all.
        some = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous().cpu()
        data = some.view(torch.uint8).numpy().tobytes() if some.numel() else b""
        digests[name] = sha256(f"{value.dtype}{tuple(value.shape)}".encode() + data).hexdigest()
    return digests


_FRAME = 512  # bytes: the norms of sixty tensors


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """The parts of one tensor that the ranks hold.

    Attributes:
        name: the author's, for messages.
        shape: of the whole tensor, without padding.
        layout: how it is cut; on no axis if every rank has it whole.
        world: where this rank stands among those that hold parts.
    """

    name: str
    shape: torch.Size
    layout: Layout
    world: World

    @cached_property
    def cuts(self) -> tuple[tuple[str, Placement], ...]:
        """Returns the axes that cut it."""
        return tuple((axis, placement) for axis, placement in self.layout if placement.is_shard)

    @cached_property
    def axes(self) -> Mapping[str, int]:
        """Returns how many ranks each axis has."""
        return {axis: self.world.groups[axis].size for axis in self.world.coordinates}

    @cached_property
    def part_shape(self) -> torch.Size:
        """Returns the shape of what every rank holds, padding included."""
        return torch.Size(part_shape(self.shape, self.layout, self.axes))

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Returns the stride that the full tensor would have."""
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Returns what the part consists of."""
        return tuple(boxes(self.shape, self.layout, self.axes, self.world.coordinates))

    @cached_property
    def is_padded(self) -> bool:
        """Returns whether some rank holds elements that are none of the tensor."""
        return any(placement.is_padded for _, placement in self.cuts)

    def is_like(self, other: ShardSpec) -> bool:
        """Tells whether the ranks hold the same elements of both."""
        if self is other:
            return True
        here, there = self.world, other.world  # two modules have groups of their own, of the same ranks
        same_ranks = here is there or (here.mesh, here.coordinates) == (there.mesh, there.coordinates)
        return same_ranks and self.shape == other.shape and self.layout == other.layout

    def block(self, value: Tensor) -> Tensor:
        """Returns this rank's part of a full tensor."""
        return local_block(value, self.layout, self.axes, self.world.coordinates)

    def cut(self, value: Tensor) -> Tensor:
        """Returns this rank's part of a full tensor, in memory of its own."""
        return self.block(value).clone(memory_format=torch.contiguous_format)

    def gather(self, part: Tensor) -> Tensor:
        """Returns the full tensor on every rank. A collective call.

        Raises:
            InputError: another rank asks for another tensor.
        """
        what = f"the whole of {self.name}"
        # All axes are asked before any is gathered: no rank may wait in a gather that another never joins.
        for axis, _ in self.cuts:
            nothing = torch.empty(0, dtype=torch.uint8, device=part.device)
            check_agreed(bool(exchanged(nothing, self.world.groups[axis], what)[1]), what)
        # The innermost axis first: the blocks of an outer cut are complete only when the inner cuts are undone.
        for axis, placement in reversed(self.cuts):
            part = gathered(part, placement, self.world.groups[axis])
        return part

    def counted(self, part: Tensor) -> list[Tensor]:
        """Returns views of the part that hold, over all ranks together, each element of the full tensor once."""
        if len(self.cuts) > 1:
            return [box.within(part) for box in self.boxes if box.stands]
        ((axis, placement),) = self.cuts
        n, rank = self.axes[axis], self.world.coordinates[axis]
        if placement.is_padded:
            (piece,) = placement.pieces
            return [part.narrow(placement.dim, 0, real_part(piece, n, rank)[1])]
        return counted(part, placement, n, rank)

    def clear_padding(self, part: Tensor) -> None:
        """Zeroes what is padding: 0/0 in it would get from there into the program's sums."""
        for axis, placement in self.cuts:
            for piece in placement.pieces:
                if piece.padded:
                    length = real_part(piece, self.axes[axis], self.world.coordinates[axis])[1]
                    part.narrow(placement.dim, length, part.shape[placement.dim] - length).zero_()

    # ------------------------------------------------------------------ for torch.distributed.tensor

    @property
    def device_mesh(self) -> DeviceMesh:
        """Returns all axes of more than one rank but the pipeline's."""
        return self.world.device_mesh

    @property
    def placements(self) -> tuple[TorchPlacement, ...]:
        """Returns `Shard` of a plain even shard, `IrregularShard` of any other."""
        names = [axis for axis, size in reversed(self.world.mesh.dense.sizes) if size > 1 and axis != "pp"]
        return tuple(self._placement(axis) for axis in names)

    def _placement(self, axis: str) -> TorchPlacement:
        placement = dict(self.cuts).get(axis)
        if placement is None:
            return Replicate()
        if len(self.cuts) == 1 and placement == shard(placement.dim, self.shape[placement.dim]):
            return Shard(placement.dim)
        return IrregularShard(placement, self.world.groups[axis], self.world.coordinates[axis])


class IrregularShard(Partial):
    """The layout of one axis in the terms of `torch.distributed.tensor`, where `Shard` cannot say it.

    For torch it is a kind of `Partial`, the one kind whose conversions from and to a whole tensor are its own; as the
    name of its reduction means nothing to torch's rules, they convert it before they compute.
    """

    cut: tuple[Placement, Group, int]

    def __init__(self, placement: Placement, group: Group, rank: int) -> None:
        super().__init__(f"cut {placement}")
        object.__setattr__(self, "cut", (placement, group, rank))

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        placement, group, _ = self.cut
        return gathered(tensor, placement, group)

    def _reduce_shard_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Any) -> Tensor:
        value = self._reduce_value(tensor, mesh, mesh_dim)
        return value.tensor_split(self.cut[1].size, shard_spec.dim)[self.cut[2]].contiguous()

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        placement, group, rank = self.cut
        return block(tensor, placement, group.size, rank).clone(memory_format=torch.contiguous_format)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IrregularShard) and self.cut == other.cut

    def __hash__(self) -> int:
        return hash(str(self.cut[0]))

    def __repr__(self) -> str:
        return f"IrregularShard({self.cut[0]})"

    __str__ = __repr__


def gathered(part: Tensor, placement: Placement, group: Group) -> Tensor:
    """Gathers what the ranks of one axis hold together. A collective call."""
    blocks = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(blocks, part.contiguous(), group=process_group(group))
    return whole(blocks, placement)


def exchanged(payload: Tensor, group: Group, what: str) -> tuple[Tensor, Tensor]:
    """Gathers bytes of all ranks of a group, one row a rank, and whether all ranks ask for the same.

    What is sent first begins with a mark of what it is, and is always of one size: collectives of ranks that send
    different things meet too, and would wait for ever or read what is none of theirs.

    Args:
        payload: u8[n].

    Raises:
        InputError: on a CPU, where the marks differ. A GPU goes on.
    """
    mark = _mark(what, payload.device)
    sent = torch.cat([mark, payload])
    sent = torch.nn.functional.pad(sent, (0, max(0, _FRAME - len(sent))))
    table = _gathered(sent[:_FRAME], group)
    agree = (table[:, : len(mark)] == mark).all()
    if payload.device.type == "cpu":
        # A GPU asks no host here, so what stands in for its graphs must not refuse the question.
        with disable_current_modes():
            check_agreed(bool(agree), what)
    if len(sent) > _FRAME:
        table = torch.cat([table, _gathered(sent[_FRAME:], group)], 1)
    return table[:, len(mark) : len(mark) + len(payload)], agree


def _gathered(payload: Tensor, group: Group) -> Tensor:
    rows = torch.empty(group.size, len(payload), dtype=payload.dtype, device=payload.device)
    dist.all_gather(list(rows.unbind()), payload, group=process_group(group))
    return rows


@cache
def _mark(what: str, device: torch.device) -> Tensor:
    """Returns eight bytes that stand for a text."""
    with torch.inference_mode(False):
        return torch.frombuffer(bytearray(sha256(what.encode()).digest()[:8]), dtype=torch.uint8).to(device)


def check_agreed(agree: bool, what: str) -> None:
    """Refuses what not all ranks ask for.

    Raises:
        InputError: they do not agree.
    """
    if not agree:
        raise InputError(
            f"this rank asks for {what} while another one asks for something else",
            where="a call that all ranks must make",
            remedy="ask on all ranks and in one order: no `if rank == 0`, and no set of names, whose order is that of "
            "a process",
        )
