"""The rank generator: reference groups, refusals, and every set of axes against brute force."""

import itertools
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.errors import PlanError
from fxpar.mesh.axes import Axes, Groups
from fxpar.mesh.mesh import DENSE_AXES, EXPERT_AXES, Mesh
from tests.mesh.meshes import EXAMPLES, by_brute_force, configurations, counted, good, meshes, parts, pipelines_agree

ROOT = Path(__file__).resolve().parents[2]


def ranks(text: str) -> Groups:
    """`[0-2],[3,5]` as groups."""
    found = []
    for group in re.findall(r"\[([^]]*)\]", text):
        parts = [list(map(int, part.split("-"))) for part in group.split(",")]
        found.append(tuple(rank for part in parts for rank in range(part[0], part[-1] + 1)))
    return tuple(found)


def alone(count: int) -> Groups:
    return tuple((rank,) for rank in range(count))


# ---------------------------------------------------------------------- SPEC section 1

PAIRS_2 = "[0,2],[1,3],[4,6],[5,7]"
PAIRS_4 = "[0,4],[1,5],[2,6],[3,7]"
A_DP = "[0,4],[1,5],[2,6],[3,7],[8,12],[9,13],[10,14],[11,15]"

CASES: dict[str, tuple[dict[str, Any], dict[str, str | Groups]]] = {
    "A": (
        {"world_size": 16, "tp": 4, "pp": 2, "ep": 4, "etp": 1},
        {
            "tp": "[0-3],[4-7],[8-11],[12-15]",
            "ep": "[0-3],[4-7],[8-11],[12-15]",
            "dp": A_DP,
            "edp": A_DP,
            "pp": tuple((rank, rank + 8) for rank in range(8)),
            "tp-pp": "[0,1,2,3,8,9,10,11],[4,5,6,7,12,13,14,15]",
        },
    ),
    "B": (
        {"world_size": 8, "tp": 2, "cp": 2, "ep": 8, "etp": 1},
        {
            "tp": "[0,1],[2,3],[4,5],[6,7]",
            "cp": PAIRS_2,
            "dp": PAIRS_4,
            "dp-cp": "[0,2,4,6],[1,3,5,7]",
            "ep": "[0-7]",
            "edp": alone(8),
        },
    ),
    "C": (
        {"world_size": 8, "tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1},
        {
            "cp": PAIRS_2,
            "dp": alone(8),
            "pp": PAIRS_4,
            "tp-pp": "[0,1,4,5],[2,3,6,7]",
            "ep": "[0-3],[4-7]",
            "tp-ep-pp": "[0-7]",
        },
    ),
    "D": (
        {"world_size": 8, "tp": 2, "pp": 2, "ep": 2, "etp": 2},
        {"dp": PAIRS_2, "ep": PAIRS_2, "edp": alone(8), "tp-ep": "[0-3],[4-7]"},
    ),
    "E": (
        {"world_size": 8, "tp": 2, "pp": 2, "ep": 2, "etp": 2, "order": "tp-cp-pp-ep-dp"},
        {"dp": PAIRS_4, "pp": PAIRS_2, "ep": PAIRS_4},
    ),
    "G": ({"tp": 2, "dp": 2, "rank_offset": 8}, {"dp": "[8,10],[9,11]"}),
    "H": ({"world_size": 8, "cp": 8, "ep": 8}, {"cp": "[0-7]", "ep": "[0-7]"}),
    "I": (
        {"world_size": 16, "cp": 16, "hierarchical_cp": (2, 2, 4)},
        {
            "cp1": tuple((rank, rank + 1) for rank in range(0, 16, 2)),
            "cp2": "[0,2],[1,3],[4,6],[5,7],[8,10],[9,11],[12,14],[13,15]",
            "cp3": "[0,4,8,12],[1,5,9,13],[2,6,10,14],[3,7,11,15]",
            "cp": "[0-15]",
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reference_groups(case: str) -> None:
    options, wanted = CASES[case]
    mesh = Mesh(**options)
    for name, groups in wanted.items():
        assert mesh.groups(name) == (ranks(groups) if isinstance(groups, str) else groups), name


def test_reference_groups_of_three_axes() -> None:
    axes = Axes((("first", 2), ("second", 3), ("third", 4)))
    over_second = "[0,2,4],[1,3,5],[6,8,10],[7,9,11],[12,14,16],[13,15,17],[18,20,22],[19,21,23]"
    assert axes.groups(["second"]) == ranks(over_second)
    over_both = "[0,1,6,7,12,13,18,19],[2,3,8,9,14,15,20,21],[4,5,10,11,16,17,22,23]"
    assert axes.groups(["third", "first"]) == ranks(over_both)


# ---------------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "case F": (
        {"world_size": 16, "tp": 2, "pp": 2, "ep": 2, "etp": 1, "order": "tp-cp-pp-ep-dp"},
        "pp",
        ("[0, 2], [1, 3], …", "[0, 1], [2, 3], …", "tp·cp = 2 ranks", "etp = 1 in the other"),
    ),
    "dense world": ({"world_size": 16, "tp": 3, "etp": 1}, "dp", ("world size 16", "tp·cp·pp = 3·1·1 = 3")),
    "expert world": (
        {"world_size": 16, "tp": 2, "pp": 2, "ep": 3},
        "edp",
        ("world size 16", "etp·ep·pp = 2·3·2 = 12"),
    ),
    "small world": ({"world_size": 2, "tp": 4, "etp": 1}, "dp", ("world size 2", "= 4")),
    "dp": ({"world_size": 16, "tp": 2, "cp": 2, "dp": 3}, "dp", ("dp=3", "16 / (tp·cp·pp = 2·2·1 = 4) = 4")),
    "unknown axis": ({"tp": 2, "order": "tp-sp"}, "order", ("'sp'", "place 2")),
    "expert axis": ({"tp": 2, "order": "tp-etp"}, "order", ("'etp'", "place 2")),
    "no axis": ({"order": ""}, "order", ("unknown axis ''",)),
    "twice": ({"tp": 2, "order": "tp-cp-tp"}, "tp", ("places 1 and 3",)),
    "lacks tp": ({"tp": 2, "order": "cp-ep-dp-pp"}, "tp", ("lacks tp", "tp=2")),
    "lacks cp": ({"cp": 2, "order": "tp-ep-dp-pp"}, "cp", ("lacks cp", "cp=2")),
    "lacks pp": ({"pp": 4, "order": "tp-cp-ep-dp"}, "pp", ("lacks pp", "pp=4")),
    "lacks ep": ({"world_size": 8, "ep": 8, "order": "tp-cp-dp-pp"}, "ep", ("lacks ep", "ep=8")),
    "lacks dp for experts": ({"tp": 4, "etp": 1, "order": "tp-pp"}, "dp", ("lacks dp", "edp=4")),
    "lacks tp for experts": ({"dp": 4, "etp": 2, "order": "dp-pp"}, "tp", ("lacks tp", "etp=2")),
    "virtual": ({"tp": 2, "virtual": 2}, "pp", ("virtual=2", "pp=1")),
    "levels": ({"cp": 16, "hierarchical_cp": (2, 2)}, "cp", ("cp=16", "2·2 = 4")),
    "kv heads": ({"tp": 4, "kv_heads": 6}, "tp", ("tp=4", "6 key and value heads")),
    "zero": ({"tp": 0}, "tp", ("tp must", "got 0")),
    "no integer": ({"pp": True}, "pp", ("pp must", "got True")),
    "no size": ({"cp": 2, "hierarchical_cp": (2, -1)}, "hierarchical_cp[1]", ("got -1",)),
    "no levels": ({"cp": 2, "hierarchical_cp": 2}, "cp", ("hierarchical_cp must", "got 2")),
    "no text": ({"order": None}, "order", ("order must", "got None")),
    "too many": ({"tp": 2, "world_size": 100_000_000}, "world size", ("100000000", "131072")),
    "offset": ({"rank_offset": -1}, "rank_offset", ("rank_offset must", "got -1")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_with_axis_and_numbers(case: str) -> None:
    options, where, texts = REFUSED[case]
    with pytest.raises(PlanError) as caught:
        Mesh(**options)
    assert caught.value.where == where
    assert all(text in caught.value.reason for text in texts), caught.value.reason
    assert caught.value.remedy


def test_one_error_lists_what_is_wrong() -> None:
    with pytest.raises(PlanError) as caught:
        Mesh(world_size=16, tp=3, pp=1, virtual=4)
    assert caught.value.where == "dp, edp, pp"
    assert all(text in caught.value.reason for text in ("tp·cp·pp", "etp·ep·pp", "virtual=4"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ep-cp", "'cp' is not an axis of the expert part"),
        ("kv_out-ep", "'kv_out' is not an axis of the expert part"),
        ("tp-xp", "'xp' is not an axis of the dense part"),
        ("", "'' is not an axis of the dense part"),
        ("embedding-tp", "'embedding' is not an axis of the dense part"),
        ("cp1", "'cp1' is not an axis of the dense part"),
        ("dp-dp", "has dp 2 times"),
        ("tp-ep-etp", "has etp 2 times"),
        ("dp-ep-edp", "has edp 2 times"),
        ("kv_in-tp", "has kv_in 2 times"),
    ],
)
def test_groups_without_meaning_are_refused(name: str, text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(text)):
        Mesh(world_size=16, tp=4, pp=2, ep=2, kv_heads=2).groups(name)


def test_axes_refuse_what_they_lack() -> None:
    axes = Axes((("tp", 4),), offset=8)
    with pytest.raises(PlanError, match="cp: there is no such axis"):
        axes.stride("cp")
    with pytest.raises(PlanError, match="rank must be one of 8–11, got 7"):
        axes.coordinates(7)
    with pytest.raises(PlanError, match="tp=4 and the product of its factors 2·3 = 6 differ"):
        axes.factored("tp", [("in", 2), ("out", 3)])


# ---------------------------------------------------------------------- properties


@EXAMPLES
@given(configurations())
def test_exactly_the_meshes_whose_pipelines_disagree_are_refused(options: dict[str, Any]) -> None:
    if pipelines_agree(options):
        assert Mesh(**options).sizes["pp"] == options["pp"]
    else:
        with pytest.raises(PlanError, match="pipeline groups of the dense part") as caught:
            Mesh(**options)
        assert caught.value.where == "pp"


@EXAMPLES
@given(good, st.randoms())
def test_groups_of_every_set_of_axes_are_those_of_brute_force(options: dict[str, Any], random: Any) -> None:
    mesh = Mesh(**options)
    dense, expert = parts(options)
    for sizes in (dense, expert):
        indices = counted(sizes, mesh.rank_offset)
        assert list(indices) == list(mesh.ranks)
        names = [axis for axis, _ in sizes]
        for count in range(1, len(names) + 1):
            for axes in itertools.combinations(names, count):
                if sizes is expert and not {"etp", "ep", "edp"} & set(axes):
                    continue  # a name of the dense part
                name = "-".join(random.sample(axes, count))
                groups = mesh.groups(name)
                assert {frozenset(group) for group in groups} == by_brute_force(indices, axes)
                assert all(list(group) == sorted(group) for group in groups)
                assert list(groups) == sorted(groups)


@EXAMPLES
@given(meshes)
def test_both_parts_have_the_same_ranks_and_pipelines(mesh: Mesh) -> None:
    assert mesh.dense.ranks == mesh.expert.ranks == mesh.ranks
    assert mesh.dense.groups(["pp"]) == mesh.expert.groups(["pp"])
    for part in (mesh.dense, mesh.expert):
        assert math.prod(size for _, size in part.sizes) == len(mesh.ranks)
    for rank in mesh.ranks:
        index = mesh.coordinates(rank)
        for axes in (DENSE_AXES, EXPERT_AXES):
            part = mesh.dense if axes is DENSE_AXES else mesh.expert
            assert mesh.rank_offset + sum(index[axis] * part.stride(axis) for axis in axes) == rank


@EXAMPLES
@given(meshes)
def test_factors_divide_the_groups_of_their_axis(mesh: Mesh) -> None:
    for axis, factors in mesh.factors.items():
        assert mesh.groups("-".join(name for name, _ in factors)) == mesh.groups(axis)
        for group in mesh.groups(axis):
            indices = counted(factors, 0)
            for name, size in factors:
                inner = [part for part in mesh.groups(name) if set(part) <= set(group)]
                assert {len(part) for part in inner} == {size}
                wanted = by_brute_force({group[i]: index for i, index in indices.items()}, [name])
                assert {frozenset(part) for part in inner} == wanted


# ---------------------------------------------------------------------- the rest


def test_few_kv_heads_are_shared_by_neighbours() -> None:
    mesh = Mesh(tp=8, kv_heads=2)
    assert mesh.groups("kv_in") == ranks("[0-3],[4-7]")
    assert mesh.groups("kv_out") == ranks("[0,4],[1,5],[2,6],[3,7]")
    assert Mesh(tp=4, kv_heads=8).groups("kv_in") == alone(4)
    assert Mesh(tp=4, kv_heads=1).groups("kv_out") == alone(4)


def test_embedding_groups_are_first_and_last_stages() -> None:
    assert Mesh(tp=2, pp=4).groups("embedding") == ((0, 6), (1, 7))
    assert Mesh(tp=2, pp=2, dp=2).groups("embedding") == ranks("[0,4],[1,5],[2,6],[3,7]")
    assert Mesh(tp=2, dp=2).groups("embedding") == alone(4)


def test_stages_of_a_rank() -> None:
    mesh = Mesh(tp=2, pp=4, virtual=3)
    assert mesh.stages(5) == (2, 6, 10)
    assert Mesh(tp=2).stages(1) == (0,)


def test_sizes_are_derived() -> None:
    mesh = Mesh(world_size=16, tp=4, pp=2, ep=4, etp=1)
    assert mesh.sizes == {"tp": 4, "cp": 1, "dp": 2, "pp": 2, "etp": 1, "ep": 4, "edp": 2}
    assert Mesh(tp=2, dp=4).sizes["edp"] == 4
    assert Mesh(world_size=8, tp=2).sizes["etp"] == 2
    assert Mesh(cp=2, hierarchical_cp=[2]) == Mesh(cp=2, hierarchical_cp=(2,))  # type: ignore[arg-type]


def test_a_mesh_is_a_value() -> None:
    mesh = Mesh(world_size=16, tp=4, pp=2)
    assert mesh.groups("dp-cp") == mesh.groups("cp-dp")
    assert pickle.loads(pickle.dumps(mesh)) == mesh == Mesh(world_size=16, tp=4, pp=2)
    assert hash(mesh) == hash(Mesh(world_size=16, tp=4, pp=2))


def test_a_large_world() -> None:
    mesh = Mesh(world_size=16384, tp=8, cp=2, pp=16, ep=64, etp=1)
    assert mesh.sizes["dp"] == 64
    for name in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-ep-pp", "ep", "edp", "embedding"):
        groups = mesh.groups(name)
        members = {rank for group in groups for rank in group}
        stages = 2 if name == "embedding" else 16
        assert len(members) == sum(map(len, groups)) == 16384 // 16 * stages
    assert mesh.groups("dp-cp")[9] == tuple(range(1025, 2048, 8))
    assert mesh.groups("ep")[3] == tuple(range(192, 256))


def test_meshes_need_no_torch() -> None:
    code = "from fxpar.mesh.mesh import Mesh; Mesh(tp=2).groups('tp')"
    code = f"{code}; import sys; print({{'torch', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
