"""What the ranks of a test world do with process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxpar.mesh.mesh import Mesh
from fxpar.ops.process_group import Group, create_groups, device_mesh, process_group
from fxpar.plan.plan import Plan
from fxpar.runtime.world import connect, join


def _facts(group: Group) -> dict[str, Any]:
    """Name and ranks of a group, and the sum of its ranks as they add it up."""
    found = process_group(group)
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=found)
    ranks = tuple(dist.get_process_group_ranks(found))
    return {"name": group.name, "size": group.size, "ranks": ranks, "total": total.item()}


def _leave(groups: dict[str, Group]) -> None:
    for name in {group.name for group in groups.values()} - {_world()}:
        dist.destroy_process_group(process_group(Group(name, 0)))


def _world() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def groups_of(mesh: Mesh, names: tuple[str, ...]) -> dict[str, Any]:
    """This rank's groups."""
    groups = create_groups(mesh, names)
    found = {name: _facts(group) for name, group in groups.items()}
    _leave(groups)
    return {"world": _world(), "groups": found}


def device_meshes(mesh: Mesh) -> dict[str, Any]:
    """Both parts as device meshes: the groups they use, and this rank's place."""
    groups = create_groups(mesh, mesh.sizes)
    found = {}
    for part, axes in (("dense", mesh.dense), ("expert", mesh.expert)):
        made = device_mesh(axes, groups, torch.device("cpu"))
        names = made.mesh_dim_names or ()
        found[part] = {
            "names": names,
            "mesh": made.mesh.tolist(),
            "shared": all(made.get_group(axis).group_name == groups[axis].name for axis in names),
            "place": {axis: made.get_local_rank(axis) for axis in names},
            "slices": {axis: tuple(made[axis].mesh.tolist()) for axis in names},
        }
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found["torch"] = {axis: tuple(dist.get_process_group_ranks(own.get_group(axis))) for axis in ("dp", "tp")}
    for axis in ("dp", "tp"):
        dist.destroy_process_group(own.get_group(axis))
    _leave(groups)
    return found


def joined() -> dict[str, Any]:
    """The world of a plan that splits each layer over all ranks."""
    world = join(Plan(tp=dist.get_world_size()), connect(60.0))
    made = world.device_mesh
    return {
        "same": {axis: group is dist.group.WORLD for axis, group in world.process_groups.items()},
        "mesh": made.get_group("tp") is world.process_groups["tp"],
        "coordinates": dict(world.coordinates),
        "groups": {axis: group.size for axis, group in world.groups.items()},
    }
