"""Which rank orthogonalises which matrix, and how its parts reach that rank and the results return.

Enters: parameters that the ranks of a stage have whole or in parts. Leaves: a `MatrixExchange`. It is computed once, by
every rank alike. Its collectives ask nothing of the host, so that a CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.layout.shards import Box, boxes
from fxpar.ops.process_group import Group, exchange_elements
from fxpar.runtime.shard_spec import ShardSpec, check_agreed, exchanged
from fxpar.runtime.world import World

# Products of so many bytes fill a GPU. Larger stacks would only take more memory.
STACK_BYTES = 2**28


class MatrixParameter(NamedTuple):
    """A parameter that consists of matrices.

    Attributes:
        name: for messages.
        shape: of the whole: [m, n], or [count, m, n] of a stack of matrices.
        spec: where the ranks' parts lie; None of a tensor that this process has for itself.
        group: number of its parameter group, whose matrices are computed alike.
        steps: of Newton–Schulz.
    """

    name: str
    shape: tuple[int, ...]
    spec: ShardSpec | None
    group: int
    steps: int


@dataclass(frozen=True)
class MatrixParts:
    """What the ranks have of one matrix.

    Attributes:
        shape: rows and columns of the whole.
        boxes: by rank; with places in the whole parameter and in the rank's part of it.
    """

    shape: tuple[int, int]
    boxes: tuple[tuple[Box, ...], ...]

    @cached_property
    def regions(self) -> tuple[Mapping[int, Box], ...]:
        """Returns regions that fill the matrix once, as the boxes of the ranks that have them, by rank."""
        regions: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, Box]] = {}
        for rank, local_boxes in enumerate(self.boxes):
            for box in local_boxes:
                regions.setdefault((box.offsets, box.sizes), {})[rank] = box
        filling = tuple(region for region in regions.values() if any(box.stands for box in region.values()))
        assert sum(prod(next(iter(region.values())).sizes) for region in filling) == prod(self.shape)
        return filling

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Returns the ranks that have the whole matrix."""
        sizes = (sum(prod(box.sizes) for box in local_boxes) for local_boxes in self.boxes)
        return tuple(rank for rank, size in enumerate(sizes) if size == prod(self.shape))

    @property
    def flops(self) -> int:
        """Returns those of one step of Newton–Schulz."""
        m, n = sorted(self.shape)
        return 2 * (2 * m * m * n + m**3)


class Matrix(NamedTuple):
    """A parameter of two dimensions, or one matrix of a stack.

    Attributes:
        parameter: number of the parameter.
        parts: what the ranks have of it.
    """

    parameter: int
    parts: MatrixParts


class Stack(NamedTuple):
    """Matrices that this rank orthogonalises at once, [k, m, n] with m ≤ n; tall ones are transposed.

    Attributes:
        group: number of their parameter group.
        shape: m and n.
        matrices: their numbers.
    """

    group: int
    shape: tuple[int, int]
    matrices: tuple[int, ...]


class Transfer(NamedTuple):
    """A box of a matrix that one rank sends to another, or to itself."""

    source: int
    target: int
    matrix: int
    box: Box


@dataclass(frozen=True)
class Route:
    """An all-to-all of boxes of matrices.

    Attributes:
        sources: matrices and boxes that this rank sends, by the rank to which they go.
        targets: those that it receives, by the rank from which they come.
        sent: elements to each rank.
        received: elements from each rank.
    """

    sources: tuple[tuple[int, Box], ...]
    targets: tuple[tuple[int, Box], ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @staticmethod
    def of(transfers: Iterable[Transfer], rank: int, ranks: int) -> Route:
        """Returns a rank's part in transfers.

        Args:
            transfers: all that this rank takes part in. Between two ranks they stand in the same order on both.
        """
        local = [transfer for transfer in transfers if rank in (transfer.source, transfer.target)]
        sources = sorted((t for t in local if t.source == rank), key=lambda t: t.target)
        targets = sorted((t for t in local if t.target == rank), key=lambda t: t.source)
        sent, received = [0] * ranks, [0] * ranks
        for transfer in sources:
            sent[transfer.target] += prod(transfer.box.sizes)
        for transfer in targets:
            received[transfer.source] += prod(transfer.box.sizes)
        return Route(_pairs(sources), _pairs(targets), tuple(sent), tuple(received))

    def run(self, values: list[Tensor], memory: Tensor, group: Group | None) -> list[Tensor]:
        """Sends and receives. A collective call.

        Args:
            values: of `sources`, each [a, b] and of any type.
            memory: an empty tensor of the type and on the device in which they are sent.
            group: of all ranks; None if there is but one.

        Returns:
            The values of `targets`, each [a, b].
        """
        packed = memory.new_empty(sum(self.sent))
        _copy(_cut(packed, self.sources), values)
        if group is not None:
            packed = exchange_elements(packed, self.received, self.sent, group)
        return _cut(packed, self.targets)


def _pairs(transfers: Iterable[Transfer]) -> tuple[tuple[int, Box], ...]:
    return tuple((transfer.matrix, transfer.box) for transfer in transfers)


def _cut(flat: Tensor, pairs: Sequence[tuple[int, Box]]) -> list[Tensor]:
    """Returns views of a flat tensor, one a box."""
    pieces = flat.split([prod(box.sizes) for _, box in pairs])
    return [piece.view(box.sizes[-2:]) for piece, (_, box) in zip(pieces, pairs, strict=True)] if pairs else []


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


@dataclass(frozen=True)
class MatrixExchange:
    """What a rank does so that all matrices are orthogonalised once.

    Attributes:
        matrices: of all parameters.
        owners: the ranks that orthogonalise them.
        stacks: the matrices of which this rank is the owner.
        collect: brings parts to owners.
        distribute: brings results to all that have a part.
        group: of all ranks of the stage; None if there is but one.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    stacks: tuple[Stack, ...]
    collect: Route
    distribute: Route
    group: Group | None

    def run(
        self, parts: Sequence[Tensor], dtype: torch.dtype, orthogonalise: Callable[[Tensor, int], Tensor]
    ) -> Iterator[tuple[Matrix, Box, Tensor]]:
        """Yields this rank's boxes of all results, with values [a, b]. A collective call.

        Args:
            parts: what this rank has of the parameters.
            dtype: in which matrices travel and are computed.
            orthogonalise: maps matrices [k, m, n], m ≤ n, and the number of a parameter group to the results; it may
                overwrite its argument.
        """
        memory = parts[0].new_empty(0, dtype=dtype)
        stacked = self._collect(parts, memory)
        del parts  # the caller may have left them to this call: stacks take the place of their memory
        for i, stack in enumerate(self.stacks):
            stacked[i] = orthogonalise(stacked[i], stack.group)
        wholes = self._by_matrix(stacked)
        values = [wholes[matrix][box.slices[-2:]] for matrix, box in self.distribute.sources]
        updates = self.distribute.run(values, memory, self.group)
        for (matrix, box), update in zip(self.distribute.targets, updates, strict=True):
            yield self.matrices[matrix], box, update

    def _collect(self, parts: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
        """Returns this rank's stacks of whole matrices."""
        values = [in_part(parts[self.matrices[matrix].parameter], box) for matrix, box in self.collect.sources]
        arrived = self.collect.run(values, memory, self.group)
        stacked = [memory.new_empty(len(stack.matrices), *stack.shape) for stack in self.stacks]
        wholes = self._by_matrix(stacked)
        _copy([wholes[matrix][box.slices[-2:]] for matrix, box in self.collect.targets], arrived)
        return stacked

    def _by_matrix(self, stacked: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns views of the matrices in stacks, by number, with their rows and columns."""
        views = {}
        for stack, values in zip(self.stacks, stacked, strict=True):
            for number, view in zip(stack.matrices, values.unbind(), strict=True):
                views[number] = view if self.matrices[number].parts.shape == stack.shape else view.mT
        return views


def in_part(part: Tensor, box: Box) -> Tensor:
    """Returns the view of a box of a matrix, [a, b], in a rank's part of the parameter."""
    return box.within(part).view(box.sizes[-2:])


# How an exchange is computed.


def plan_exchange(parameters: Sequence[MatrixParameter], dtype: torch.dtype) -> MatrixExchange:
    """Shares out the matrices of parameters over the ranks of a stage. A collective call.

    Args:
        parameters: the same ones in the same order on all ranks.
        dtype: in which matrices are computed.

    Raises:
        InputError: other ranks have other parameters, or the parameters are of several modules.
    """
    world = _world_of(parameters)
    name = "" if world is None else "-".join(world.coordinates)
    group = None if world is None else world.groups.get(name)
    places, rank = list[Mapping[str, int]]([{}]), 0
    if world is not None and group is not None:
        ranks = next(ranks for ranks in world.mesh.groups(name) if world.rank in ranks)
        places, rank = [world.mesh.coordinates(other) for other in ranks], ranks.index(world.rank)
        _check_alike(parameters, world, group)
    kinds: dict[object, list[MatrixParts]] = {}
    matrices: list[Matrix] = []
    for number, parameter in enumerate(parameters):
        kind = parameter.shape, parameter.spec and parameter.spec.layout
        if kind not in kinds:
            kinds[kind] = _parts_of(parameter, places, rank)
        matrices += [Matrix(number, parts) for parts in kinds[kind]]
    return _exchange(matrices, parameters, rank, len(places), group, dtype)


def _world_of(parameters: Sequence[MatrixParameter]) -> World | None:
    specs = [parameter.spec for parameter in parameters if parameter.spec is not None]
    for spec in specs[1:]:
        if spec.world is not specs[0].world:
            raise InputError(
                f"is of another parallel module than {specs[0].name}",
                where=spec.name,
                remedy="make one optimizer for each module",
            )
    return specs[0].world if specs else None


def _check_alike(parameters: Sequence[MatrixParameter], world: World, group: Group) -> None:
    """Checks that all ranks step the same matrices: what they send differs by them."""
    of_modules = [parameter for parameter in parameters if parameter.spec is not None]
    what = f"a step of Muon with {', '.join(f'{p.name} (group {p.group}, {p.steps} steps)' for p in of_modules)}"
    _, agree = exchanged(torch.empty(0, dtype=torch.uint8, device=world.device), group, what)
    check_agreed(bool(agree), what)


def _parts_of(parameter: MatrixParameter, places: Sequence[Mapping[str, int]], rank: int) -> list[MatrixParts]:
    """Returns what the ranks have of the matrices of a parameter.

    Args:
        places: the ranks' coordinates.
        rank: number of this rank among them.
    """
    shape, spec = parameter.shape, parameter.spec
    known: dict[tuple[int, ...], list[list[Box]]] = {}
    by_rank = []
    for number, place in enumerate(places):
        if spec is None:
            whole = Box((0,) * len(shape), (0,) * len(shape), shape, stands=True)
            by_rank.append(_by_matrix([whole] if number == rank else [], shape))
            continue
        key = tuple(place[axis] for axis, _ in spec.cuts)
        if key not in known:
            known[key] = _by_matrix(boxes(shape, spec.layout, spec.axes, place), shape)
        by_rank.append(known[key])
    rows, columns = shape[-2:]
    return [MatrixParts((rows, columns), tuple(map(tuple, some))) for some in zip(*by_rank, strict=True)]


def _by_matrix(local_boxes: Iterable[Box], shape: Sequence[int]) -> list[list[Box]]:
    """Returns a rank's boxes by matrix of a parameter."""
    if len(shape) == 2:
        return [list(local_boxes)]
    layers: list[list[Box]] = [[] for _ in range(shape[0])]
    for box in local_boxes:
        for i in range(box.sizes[0]):
            offsets, local = (box.offsets[0] + i, *box.offsets[1:]), (box.local[0] + i, *box.local[1:])
            layers[offsets[0]].append(Box(offsets, local, (1, *box.sizes[1:]), box.stands))
    return layers


def _exchange(
    matrices: Sequence[Matrix],
    parameters: Sequence[MatrixParameter],
    rank: int,
    ranks: int,
    group: Group | None,
    dtype: torch.dtype,
) -> MatrixExchange:
    # Of tensors that a process has for itself other ranks do not know: they are no part of the work that is shared.
    shared = [number for number, matrix in enumerate(matrices) if parameters[matrix.parameter].spec is not None]
    works = [matrices[n].parts.flops * parameters[matrices[n].parameter].steps for n in shared]
    owners = [rank] * len(matrices)
    for number, owner in zip(shared, share_out(works, [matrices[n].parts.holders for n in shared], ranks), strict=True):
        owners[number] = owner
    groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for number, matrix in enumerate(matrices):
        if owners[number] == rank:
            m, n = sorted(matrix.parts.shape)
            groups.setdefault((parameters[matrix.parameter].group, (m, n)), []).append(number)
    stacks = []
    for (parameter_group, shape), numbers in groups.items():
        count = max(1, STACK_BYTES // max(1, prod(shape) * dtype.itemsize))
        stacks += [Stack(parameter_group, shape, tuple(numbers[i : i + count])) for i in range(0, len(numbers), count)]
    collect = Route.of(_collected(matrices, owners, ranks), rank, ranks)
    distribute = Route.of(_distributed(matrices, owners, rank), rank, ranks)
    return MatrixExchange(tuple(matrices), tuple(owners), tuple(stacks), collect, distribute, group)


def share_out(works: Sequence[int], holders: Sequence[Collection[int]], ranks: int) -> list[int]:
    """Returns a rank for each matrix, so that all ranks have about the same work: the largest first.

    Args:
        works: FLOPs of the matrices.
        holders: ranks that have them whole. One of these takes a matrix while its work stays below the mean: then
            nothing is sent to it.
        ranks: how many there are.
    """
    owners, loads, total = [0] * len(works), [0] * ranks, sum(works)
    for number in sorted(range(len(works)), key=lambda number: -works[number]):
        fitting = [rank for rank in holders[number] if (loads[rank] + works[number]) * ranks <= total]
        owners[number] = min(fitting or range(ranks), key=loads.__getitem__)
        loads[owners[number]] += works[number]
    return owners


def _collected(matrices: Sequence[Matrix], owners: Sequence[int], ranks: int) -> Iterator[Transfer]:
    """Yields what owners receive. Of ranks that have the same region the one sends that has sent least."""
    loads = [0] * ranks
    for number, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        for region in matrix.parts.regions:
            source = owner if owner in region else min(region, key=loads.__getitem__)
            box = region[source]
            loads[source] += 0 if source == owner else prod(box.sizes)
            yield Transfer(source, owner, number, box)


def _distributed(matrices: Sequence[Matrix], owners: Sequence[int], rank: int) -> Iterator[Transfer]:
    """Yields what a rank sends and receives of results, which go to all that have a part."""
    for number, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        for target, local_boxes in enumerate(matrix.parts.boxes):
            if rank in (owner, target):
                yield from (Transfer(owner, target, number, box) for box in local_boxes)
