"""Process groups of a mesh.

Enters: a mesh, and the names of groups as `Mesh.groups` takes them. Leaves: this rank's process groups by name, and
`torch.distributed` device meshes over them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpar.errors import RankError
from fxpar.mesh.axes import Axes, Groups
from fxpar.mesh.mesh import Mesh
from fxpar.ops.process_group import Group
from fxpar.torch_internals import resolve_process_group


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
