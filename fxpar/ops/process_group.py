"""The coercions as plain functions of tensors, numbers and a group's name: what a lowered graph calls.

Arguments: the rank's tensor; where there is a cut, its dimension and pieces; the group's name and size; the rank's
index. What communicates is two calls, so that others may stand between them: `start_…` sends, and the other takes what
that gives, when it is there.

Behind them, `create_groups` makes this rank's process groups of a mesh, and `device_mesh` torch's meshes over these.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from fxpar.errors import RankError
from fxpar.mesh.axes import Axes, Groups
from fxpar.mesh.mesh import Mesh
from fxpar.torch_internals import resolve_process_group

_c10d = torch.ops._c10d_functional

# Bytes of gradients that are sent at once: large enough for bandwidth, small enough to start early.
BUCKET = 64 * 2**20


@dataclass(frozen=True)
class Group:
    """The ranks of one axis: name and size of their process group, and the symmetric buffer, if any."""

    name: str
    size: int
    symmetric_buffer: str = ""


# A cut: the dimension and its sharded pieces as (outer, run) in global elements; run is None for "all that is there",
# and (size, padded) where the ranks' blocks of a single run are padded.
Run = int | tuple[int, int] | None
Cut = tuple[int, Sequence[tuple[int, Run]]]
Pieces = Sequence[tuple[int, Run]]


# ---------------------------------------------------------------------- cuts


def _padding(cut: Cut) -> tuple[int, int] | None:
    """Returns size and padded size of a cut whose blocks are padded; None for other cuts."""
    run = cut[1][0][1]
    return run if isinstance(run, tuple) else None


def _runs(x: Tensor, cut: Cut, share: int) -> list[Tensor]:
    """Returns the pieces along the cut dimension; `share` is n for a rank's tensor and 1 for a whole one."""
    dim, pieces = cut
    if len(pieces) == 1:
        return [x]
    return list(x.split([outer * run // share for outer, run in pieces if isinstance(run, int)], dim))


def spread(x: Tensor, cut: Cut, n: int) -> Tensor:
    """Maps a whole tensor → [n, …]: the ranks' parts stacked, padding zero."""
    dim, pieces = cut
    padding = _padding(cut)
    if padding is not None:
        size, padded = padding
        share = -(-size // n)
        x = _lengthened(x, dim, share * n - size).unflatten(dim, (n, share)).movedim(dim, 0)
        return _lengthened(x, dim + 1, padded // n - share)
    parts = []
    for part, (outer, _) in zip(_runs(x, cut, 1), pieces, strict=True):
        blocks = part.unflatten(dim, (outer, n, part.shape[dim] // (outer * n)))
        parts.append(blocks.movedim(dim + 1, 0).flatten(dim + 1, dim + 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim + 1)


def _lengthened(x: Tensor, dim: int, count: int) -> Tensor:
    """Returns the tensor with `count` zeros more at the dimension's end."""
    return functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, count]) if count else x


def put_together(stacked: Tensor, cut: Cut) -> Tensor:
    """Maps [n, …] → a whole tensor: the inverse of `spread`."""
    dim, pieces = cut
    n = stacked.shape[0]
    padding = _padding(cut)
    if padding is not None:
        size = padding[0]
        return stacked.narrow(dim + 1, 0, -(-size // n)).movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size)
    parts = []
    moved = (dim + 1, pieces)
    for part, (outer, _) in zip(_runs(stacked, moved, n), pieces, strict=True):
        blocks = part.unflatten(dim + 1, (outer, part.shape[dim + 1] // outer))
        parts.append(blocks.movedim(0, dim + 1).flatten(dim, dim + 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# ---------------------------------------------------------------------- what a lowered graph calls


def same(x: Tensor) -> Tensor:
    """Returns the value as it is: such a coercion changes only the gradient's way."""
    return x


def start_sum(x: Tensor, group: str) -> Tensor:
    """Starts P → I, P → R."""
    return _c10d.all_reduce(x.contiguous(), "sum", group)  # type: ignore[no-any-return]


def arrived(started: Tensor) -> Tensor:
    """Waits for what `start_sum` sent, and returns it."""
    return _c10d.wait_tensor(started)  # type: ignore[no-any-return]


def start_gather(x: Tensor, group: str, size: int) -> Tensor:
    """Starts S → R, S → I: the ranks' tensors stacked, [n, …]."""
    return _alone(_c10d.all_gather_into_tensor(x.contiguous().unsqueeze(0), size, group))


def start_gathers(values: Sequence[Tensor], group: str, size: int) -> list[Tensor]:
    """Starts several gathers at once, each as `start_gather` does."""
    started = _c10d.all_gather_into_tensor_coalesced([value.contiguous().unsqueeze(0) for value in values], size, group)
    return [_alone(value) for value in started]


def _alone(started: Tensor) -> Tensor:
    """Waits for a gather on CPUs: gathers of gloo that run at the same time corrupt memory (torch 2.11 and 2.13)."""
    return arrived(started) if started.is_cpu else started


def put_in_places(started: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """Returns the global tensor: of `start_gather` by the cut, of `start_exchange` by the source's cut."""
    return put_together(arrived(started), (dim, pieces))


def start_scatter(x: Tensor, dim: int, pieces: Pieces, group: str, size: int) -> Tensor:
    """Starts P → S: the rank's shard of the sum, [1, …]."""
    stacked = spread(x, (dim, pieces), size).contiguous()
    return _c10d.reduce_scatter_tensor(stacked, "sum", size, group)  # type: ignore[no-any-return]


def start_scatters(values: Sequence[Tensor], cuts: Sequence[Cut], group: str, size: int) -> list[Tensor]:
    """Starts several scatters at once, each as `start_scatter` does."""
    stacked = [spread(value, cut, size).contiguous() for value, cut in zip(values, cuts, strict=True)]
    return _c10d.reduce_scatter_tensor_coalesced(stacked, "sum", size, group)  # type: ignore[no-any-return]


def scattered(started: Tensor) -> Tensor:
    """Waits for the shard of `start_scatter`, and returns it."""
    return arrived(started).squeeze(0)


def take(x: Tensor, dim: int, pieces: Pieces, size: int, index: Tensor) -> Tensor:
    """Takes a rank's shard of a global tensor: I → S, R → S."""
    # The index is a tensor, not a number: one graph, and one compiled kernel, serves all ranks.
    return spread(x, (dim, pieces), size).index_select(0, index.reshape(1)).squeeze(0)


def pad(x: Tensor, dim: int, pieces: Pieces, size: int, index: Tensor) -> Tensor:
    """Pads S → P: a global tensor with a rank's shard in its place and zeros elsewhere."""
    ranks = torch.arange(size, device=x.device).view(-1, *[1] * x.dim())
    return put_together(torch.where(ranks == index, x.unsqueeze(0), x.new_zeros(())), (dim, pieces))


def first_only(x: Tensor, index: Tensor) -> Tensor:
    """Keeps the value on rank 0 and returns zeros on the others: I → P, R → P."""
    # A choice and no product: zero times infinity would be NaN.
    return torch.where(index == 0, x, x.new_zeros(()))


def start_exchange(x: Tensor, dim: int, pieces: Pieces, group: str, size: int) -> Tensor:
    """Starts S(i) → S(j), by the target's cut: from each rank the part that is this one's, [n, …]."""
    counts = [1] * size
    stacked = spread(x, (dim, pieces), size).contiguous()
    return _c10d.all_to_all_single(stacked, counts, counts, group)  # type: ignore[no-any-return]


def recut(started: Tensor, source: tuple[int, Pieces], target: tuple[int, Pieces], size: int, index: Tensor) -> Tensor:
    """Cuts S(i) → S(i) by another factor, of `start_gather`.

    What two ranks exchange differs from pair to pair, so that an all-to-all would need other sizes on every rank.
    """
    return take(put_in_places(started, *source), *target, size, index)


# ---------------------------------------------------------------------- the same at once


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Sums over the ranks of a group by an all-reduce."""
    return arrived(start_sum(x, group.name))


def max_over(x: Tensor, group: Group) -> Tensor:
    """Returns the largest values over the ranks of a group, by an all-reduce; it has no derivative."""
    return arrived(_c10d.all_reduce(x.contiguous(), "max", group.name))


def broadcast(x: Tensor, sender: int, group: Group) -> None:
    """Writes the tensor of a rank of a group, which is contiguous, into those of all its ranks."""
    arrived(_c10d.broadcast_(x, sender, group.name))


def exchange_elements(x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """Returns what all ranks of a group send to this one, in their order, by an all-to-all.

    Args:
        x: [n], contiguous: what this rank sends, in the order of ranks.
        received: elements from each rank.
        sent: elements to each rank.

    Raises:
        RankError: a module whose group it is has failed.
    """
    process_group(group)
    # As bytes: not every backend sends every type.
    counts = [[number * x.element_size() for number in numbers] for numbers in (received, sent)]
    return arrived(_c10d.all_to_all_single(x.view(torch.uint8), *counts, group.name)).view(x.dtype)


def gather_whole(x: Tensor, cut: Cut, group: Group) -> Tensor:
    """Gathers the whole of a shard by an all-gather."""
    return put_in_places(start_gather(x, group.name, group.size), *cut)


# Shards whose blocks several ranks hold need no sub-groups: the ranks' summands of shared blocks travel as one tensor
# in which each rank fills its own block and leaves zeros elsewhere, over the whole axis.


@dataclass(frozen=True)
class SharedSegment:
    """One piece of a cut in a rank's tensor.

    Attributes:
        length: elements along the dimension; None for all that there are.
        outer: repetitions of the run.
        copies: ranks that hold the same block: 1 of a plain piece, all of a whole segment.
        parts: how many parts of a block `split_shared` makes, of which a rank keeps one.
    """

    length: int | None
    outer: int
    copies: int
    parts: int = 1


SharedSegments = Sequence[SharedSegment]


def _segments(x: Tensor, dim: int, lengths: Sequence[int | None]) -> list[Tensor]:
    return [x] if len(lengths) == 1 else list(x.split([length for length in lengths if length is not None], dim))


def _placed(x: Tensor, dim: int, outer: int, count: int, position: Tensor) -> Tensor:
    """Returns a tensor in which each run of `x` is the one at `position` of `count`, the others zero."""
    runs = x.unflatten(dim, (outer, x.shape[dim] // outer)).unsqueeze(dim + 1)
    places = torch.arange(count, device=x.device).view(-1, *[1] * (x.dim() - dim))
    return torch.where(places == position, runs, x.new_zeros(())).flatten(dim, dim + 2)


def _picked(x: Tensor, dim: int, outer: int, count: int, position: Tensor) -> Tensor:
    """Inverts `_placed`."""
    runs: Tensor = x.unflatten(dim, (outer, count, x.shape[dim] // (outer * count)))
    return runs.index_select(dim + 1, position.reshape(1)).flatten(dim, dim + 2)


def summand(grad: Tensor, dim: int, pieces: SharedSegments, n: int, index: Tensor) -> Tensor:
    """Returns a rank's summand of the gradients of the shared blocks: its own in their places, zeros elsewhere."""
    parts = []
    for piece, part in zip(pieces, _segments(grad, dim, [piece.length for piece in pieces]), strict=True):
        if piece.copies > 1:
            parts.append(_placed(part, dim, piece.outer, n // piece.copies, index // piece.copies))
    return torch.cat(parts, dim)


def restored(grad: Tensor, total: Tensor, dim: int, pieces: SharedSegments, n: int, index: Tensor) -> Tensor:
    """Returns a rank's gradient with the sums of the shared blocks in place of its own."""
    parts = _segments(grad, dim, [piece.length for piece in pieces])
    shared = [i for i, piece in enumerate(pieces) if piece.copies > 1]
    sizes = [parts[i].shape[dim] * (n // pieces[i].copies) for i in shared]
    for i, whole in zip(shared, total.split(sizes, dim), strict=True):
        piece = pieces[i]
        parts[i] = _picked(whole, dim, piece.outer, n // piece.copies, index // piece.copies)
    return torch.cat(parts, dim)


def _part(index: Tensor, piece: SharedSegment) -> Tensor:
    """Returns which part of its block a rank keeps: neighbours that share the part count as one."""
    return index % piece.copies // (piece.copies // piece.parts)


def split_shared(x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], index: Tensor) -> Tensor:
    """Computes `fxpar.split_shared`: a rank's part of its blocks; pieces as tuples of `SharedSegment`'s fields."""
    shared = [SharedSegment(*p) for p in pieces]
    parts = []
    for piece, part in zip(shared, _segments(x, dim, [piece.length for piece in shared]), strict=True):
        parts.append(part if piece.parts == 1 else _picked(part, dim, piece.outer, piece.parts, _part(index, piece)))
    return torch.cat(parts, dim)


def pad_shared(x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], index: Tensor) -> Tensor:
    """Computes `fxpar.pad_shared`; pieces are those of the result, as tuples of `SharedSegment`'s fields."""
    shared = [SharedSegment(*p) for p in pieces]
    lengths = [None if piece.length is None else piece.length // piece.parts for piece in shared]
    parts = []
    for piece, part in zip(shared, _segments(x, dim, lengths), strict=True):
        parts.append(part if piece.parts == 1 else _placed(part, dim, piece.outer, piece.parts, _part(index, piece)))
    return torch.cat(parts, dim)


def start_reduce_from_shared(
    x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], group: str, size: int, index: Tensor
) -> Tensor:
    """Starts `fxpar.reduce_from_shared`; pieces as tuples of `SharedSegment`'s fields."""
    return start_sum(summand(x, dim, [SharedSegment(*p) for p in pieces], size, index), group)


def reduce_from_shared(
    started: Tensor, x: Tensor, dim: int, pieces: Sequence[Sequence[Any]], size: int, index: Tensor
) -> Tensor:
    """Waits for `start_reduce_from_shared`, and returns the gradient with the sums in place of the rank's own."""
    return restored(x, arrived(started), dim, [SharedSegment(*p) for p in pieces], size, index)


# The groups of a mesh.

# Seconds by which the watchdog of NCCL waits longer than ranks do. Where it is first, it sleeps for a minute and then
# aborts the process. Ranks that miss another abort its communicators by themselves, and say who is missing.
WATCHDOG = 60.0


def create_groups(mesh: Mesh, names: Iterable[str], timeout: timedelta | None = None) -> dict[str, Group]:
    """Creates process groups. A collective call: every process of the world makes it with the same mesh and names.

    Names of the same ranks share one group. A group of all processes is the one that is there already, on GPUs: a
    communicator costs memory there and time to set up. On CPUs it is a new one, whose connections are nobody else's and
    may be ended.

    Args:
        mesh: its world is that of the processes.
        names: as `Mesh.groups` takes them.
        timeout: of the collectives in groups that are new; None for torch's own.

    Returns:
        This rank's group by name, without those of one rank and those that the rank is not in.

    Raises:
        PlanError: a name has no meaning.
    """
    created: dict[Groups, Group | None] = {}
    groups = {}
    for name in names:
        ranks = mesh.groups(name)
        if ranks not in created:
            created[ranks] = _create(ranks, name, timeout)
        group = created[ranks]
        if group is not None:
            groups[name] = group
    return groups


def _create(ranks: Groups, name: str, timeout: timedelta | None) -> Group | None:
    several = [list(group) for group in ranks if len(group) > 1]
    if not several:
        return None
    communicator, limit = dist.group.WORLD, limit_of_cpus()
    is_all = several == [list(range(dist.get_world_size()))]
    if not is_all or limit is not None:
        limit = limit if is_all else timeout
        if limit is not None and not is_all and limit_of_cpus() is None:
            limit += timedelta(seconds=WATCHDOG)
        communicator, _ = dist.new_subgroups_by_enumeration(several, timeout=limit, group_desc=name)
    return None if communicator is None else Group(communicator.group_name, communicator.size())


def limit_of_cpus() -> timedelta | None:
    """Returns how long a collective of all processes waits, where they communicate by gloo alone; None otherwise."""
    if dist.get_backend() != "gloo":
        return None
    options: Any = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    limit: timedelta = options._timeout
    return limit


# Why nothing can be sent over a group any more.
_REFUSED: weakref.WeakKeyDictionary[dist.ProcessGroup, RankError] = weakref.WeakKeyDictionary()


def process_group(group: Group) -> dist.ProcessGroup:
    """Returns the group itself. Do not keep it: a group whose threads outlive the process's exit handlers aborts it.

    Raises:
        RankError: a module whose group it is has failed.
    """
    name: Any = group.name  # newer versions of torch want a type of their own, which is a text
    resolved = resolve_process_group(name)
    error = _REFUSED.get(resolved)
    if error is not None:
        raise RankError(error.reason, where=error.where, remedy=error.remedy)
    return resolved


def refuse_group(group: Group, error: RankError) -> None:
    """Has every further use of a group raise an error; one that is destroyed has none."""
    name: Any = group.name
    with contextlib.suppress(RuntimeError, ValueError, LookupError):
        _REFUSED[resolve_process_group(name)] = error


# Who may still send something over groups of gloo that fxpar made.
_HOLDERS: weakref.WeakKeyDictionary[dist.ProcessGroup, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def hold(holder: object, groups: Iterable[Group]) -> None:
    """Keeps groups from being closed as long as an object lives; those that torch.distributed made are never closed."""
    for group in groups:
        name: Any = group.name
        resolved = resolve_process_group(name)
        if resolved is not dist.group.WORLD and resolved.name() == "gloo":
            _HOLDERS.setdefault(resolved, []).append(weakref.ref(holder))


def close_abandoned() -> None:
    """Ends groups that nobody holds any more: each has connections, threads and a loop that wakes up all the time.

    All ranks call it where nothing is under way between them, as a connection that closes takes with it what was sent.
    Communicators of NCCL stay: graphs may have recorded them.
    """
    for group, holders in list(_HOLDERS.items()):
        if all(holder() is None for holder in holders):
            del _HOLDERS[group]
            with contextlib.suppress(ValueError):  # the user has destroyed it
                dist.destroy_process_group(group)


def device_mesh(
    axes: Axes, groups: Mapping[str, Group], device: torch.device, at: Mapping[str, int] | None = None
) -> DeviceMesh:
    """Returns the device mesh of the axes of more than one rank, the slowest first, over groups that exist.

    `init_device_mesh` would create groups of its own, and those of the same ranks twice.

    Args:
        axes: a part of a mesh; this rank is among its ranks and at least one axis has more than one.
        groups: what `create_groups` made for at least these axes.
        device: of this rank.
        at: this rank's index on axes that are not to be part of it.
    """
    at = at or {}
    wide = [(axis, size) for axis, size in reversed(axes.sizes) if size > 1]
    ranks = torch.tensor(axes.ranks).view([size for _, size in wide])
    for dim, (axis, _) in reversed([*enumerate(wide)]):
        ranks = ranks.select(dim, at[axis]) if axis in at else ranks
    names = tuple(axis for axis, _ in wide if axis not in at)
    process_groups = [process_group(groups[axis]) for axis in names]
    mesh = DeviceMesh.from_group(process_groups, device.type, mesh=ranks, mesh_dim_names=names)
    hold(mesh, [groups[axis] for axis in names])
    return mesh
