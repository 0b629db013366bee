"""Process groups of a mesh: the ranks that the mesh says, each group created once."""

from typing import Any

from fxpar.mesh.mesh import Mesh
from tests.ops import meshes
from tests.runtime.world import World


def test_groups_hold_the_ranks_of_the_mesh_and_are_shared(world4: World) -> None:
    mesh = Mesh(tp=2, dp=2)
    names = ("tp", "cp", "dp", "dp-cp", "etp", "edp", "tp-dp", "tp-dp-cp", "pp", "embedding")
    for rank, found in enumerate(world4.run(meshes.groups_of, mesh, names)):
        groups: dict[str, dict[str, Any]] = found["groups"]
        for name in names:
            (ranks,) = (group for group in mesh.groups(name) if rank in group)
            if len(ranks) == 1:
                assert name not in groups
            else:
                assert groups[name]["ranks"] == ranks
                assert groups[name]["size"] == len(ranks)
                assert groups[name]["total"] == sum(ranks)
        assert groups["etp"]["name"] == groups["tp"]["name"]
        assert groups["edp"]["name"] == groups["dp-cp"]["name"] == groups["dp"]["name"]
        assert groups["tp-dp-cp"]["name"] == groups["tp-dp"]["name"] != found["world"]  # it may be ended
        assert len({group["name"] for group in groups.values()}) == 3


def test_ranks_between_the_ends_of_a_pipeline_have_no_embedding_group(world4: World) -> None:
    answers = world4.run(meshes.groups_of, Mesh(pp=4), ("embedding", "pp"))
    assert [found["groups"].get("embedding", {}).get("ranks") for found in answers] == [(0, 3), None, None, (0, 3)]
    assert len({found["groups"]["pp"]["name"] for found in answers}) == 1


def test_device_meshes_use_the_same_groups(world4: World) -> None:
    mesh = Mesh(world_size=4, tp=2, ep=4, etp=1)
    for rank, found in enumerate(world4.run(meshes.device_meshes, mesh)):
        index = mesh.coordinates(rank)
        dense, expert = found["dense"], found["expert"]
        assert dense["names"] == ("dp", "tp")
        assert expert["names"] == ("ep",)
        assert dense["mesh"] == [[0, 1], [2, 3]]
        assert expert["mesh"] == [0, 1, 2, 3]
        for part in (dense, expert):
            assert part["shared"]
            assert part["place"] == {axis: index[axis] for axis in part["names"]}
        assert dense["slices"] == found["torch"]


def test_a_world_that_one_axis_fills_has_one_group_that_may_be_ended(world2: World) -> None:
    assert world2.run(meshes.joined) == [
        {"same": {"tp": False}, "mesh": True, "coordinates": {"tp": rank}, "groups": {"tp": 2}} for rank in range(2)
    ]
