"""Atoms: the refinement of both parts, and what follows from it, against brute force over the ranks."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given

from fxpar.errors import PlanError
from fxpar.mesh.axes import DENSE, EXPERT, Atom, groups_over
from fxpar.mesh.mesh import Mesh
from tests.mesh.meshes import EXAMPLES, by_brute_force, counted, good, parts


def boundaries(sizes: list[tuple[str, int]]) -> set[int]:
    """Ranks after which each axis begins anew."""
    return {math.prod(size for _, size in sizes[:count]) for count in range(len(sizes) + 1)}


def index_on(atoms: Sequence[Atom], place: int) -> int:
    """The number of a rank among all of some atoms, the outermost first."""
    index = 0
    for atom in atoms:
        index = index * atom.size + place // atom.stride % atom.size
    return index


def ranks_of(atoms: Sequence[Atom]) -> int:
    return math.prod(atom.size for atom in atoms)


def factored(options: Mapping[str, Any]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Both parts, tp and cp of the dense one written as their factors."""
    dense, expert = parts(options)
    own: dict[str, list[tuple[str, int]]] = {axis: [(axis, size)] for axis, size in dense}
    if options["kv_heads"] is not None:
        several = math.gcd(options["kv_heads"], options["tp"])
        own["tp"] = [("kv_in", options["tp"] // several), ("kv_out", several)]
    if options["hierarchical_cp"]:
        own["cp"] = [(f"cp{level}", size) for level, size in enumerate(options["hierarchical_cp"], 1)]
    return [factor for axis, _ in dense for factor in own[axis]], expert


def is_refined(options: Mapping[str, Any]) -> bool:
    """Whether of every two boundaries one divides the other."""
    dense, expert = factored(options)
    pairs = itertools.combinations(sorted(boundaries(dense) | boundaries(expert)), 2)
    return all(high % low == 0 for low, high in pairs)


refined = good.filter(is_refined)


def names_of(options: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Every set of axes and factors of one part, as a name, with the axes it is one of."""
    for part in factored(options):
        names = [axis for axis, _ in part]
        for count in range(1, len(names) + 1):
            for some in itertools.combinations(names, count):
                if part is factored(options)[0] or {"etp", "ep", "edp"} & set(some):
                    yield "-".join(some), part


@EXAMPLES
@given(good)
def test_exactly_the_meshes_whose_boundaries_do_not_divide_each_other_have_no_atoms(options: dict[str, Any]) -> None:
    mesh = Mesh(**options)
    assert mesh.groups("tp-pp"), "groups are listed without a refinement too"
    if not is_refined(options):
        with pytest.raises(PlanError, match="no common refinement"):
            mesh.atoms  # noqa: B018 - for what it raises
        return
    dense, expert = factored(options)
    strides = [atom.stride for atom in mesh.atoms]
    assert set(strides) | {len(mesh.ranks)} == boundaries(dense) | boundaries(expert)
    assert strides == sorted(strides)
    assert ranks_of(mesh.atoms) == len(mesh.ranks)
    assert all(atom.size > 1 and atom.end == after for atom, after in zip(mesh.atoms, strides[1:], strict=False))


@EXAMPLES
@given(refined)
def test_groups_of_atoms_are_those_of_every_set_of_axes_and_factors(options: dict[str, Any]) -> None:
    mesh = Mesh(**options)
    for name, part in names_of(options):
        own = mesh.atoms_of(name)
        found = groups_over(own, [atom for atom in mesh.atoms if atom not in own], mesh.rank_offset)
        assert found == mesh.groups(name)
        wanted = by_brute_force(counted(part, mesh.rank_offset), name.split("-"))
        assert {frozenset(group) for group in found} == wanted
        assert ranks_of(own) == len(found[0])


@EXAMPLES
@given(refined)
def test_the_index_on_joined_axes_counts_them_in_nesting_order(options: dict[str, Any]) -> None:
    mesh = Mesh(**options)
    for rank in mesh.ranks:
        index, place = mesh.coordinates(rank), rank - mesh.rank_offset
        for axis, size in mesh.sizes.items():
            assert index_on(mesh.atoms_of(axis), place) == index[axis]
            assert ranks_of(mesh.atoms_of(axis)) == size
        for outer, inner in (("dp", "cp"), ("cp", "tp"), ("dp", "tp"), ("pp", "tp"), ("edp", "ep"), ("ep", "etp")):
            wanted = index[outer] * mesh.sizes[inner] + index[inner]
            assert index_on(mesh.atoms_of(f"{inner}-{outer}"), place) == wanted


@EXAMPLES
@given(refined)
def test_axes_share_atoms_where_ranks_meet_in_groups_of_both(options: dict[str, Any]) -> None:
    mesh = Mesh(**options)
    for names in itertools.combinations(("dp", "cp", "tp", "dp-cp", "edp", "ep", "etp", "edp-ep", "pp"), 2):
        groups = [mesh.groups(name) for name in names]
        meet = any(len(set(one) & set(other)) > 1 for one in groups[0] for other in groups[1])
        assert mesh.sharing(names) == (names if meet else None)
    assert mesh.sharing(["dp", "cp", "tp", "pp"]) is None
    assert mesh.sharing(["edp", "ep", "etp", "pp"]) is None


# ---------------------------------------------------------------------- by hand


def atoms(*pairs: tuple[int, int]) -> tuple[Atom, ...]:
    return tuple(Atom(size, stride) for size, stride in pairs)


def test_experts_are_folded_over_the_atoms_of_the_dense_part() -> None:
    mesh = Mesh(world_size=16, tp=2, cp=2, dp=4, ep=4, etp=1)
    assert mesh.atoms == atoms((2, 1), (2, 2), (4, 4))
    assert mesh.atoms_of("ep") == mesh.atoms_of("cp-tp") == atoms((2, 2), (2, 1))
    assert mesh.atoms_of("edp") == mesh.atoms_of("dp") == atoms((4, 4))
    assert mesh.atoms_of("etp") == mesh.atoms_of("pp") == ()
    assert mesh.sharing(["dp", "tp", "ep"]) == ("tp", "ep")
    mesh = Mesh(world_size=16, tp=2, dp=8, ep=4, etp=2)
    assert mesh.atoms == atoms((2, 1), (4, 2), (2, 8))
    assert mesh.atoms_of("dp") == atoms((2, 8), (4, 2))


def test_factors_are_atoms_of_their_own() -> None:
    mesh = Mesh(tp=8, cp=4, dp=2, pp=2, kv_heads=2, hierarchical_cp=(2, 2))
    assert mesh.atoms == atoms((4, 1), (2, 4), (2, 8), (2, 16), (2, 32), (2, 64))
    assert mesh.atoms_of("tp") == atoms((2, 4), (4, 1))
    assert mesh.atoms_of("kv_out") == atoms((2, 4))
    assert mesh.atoms_of("cp1") == atoms((2, 8))
    assert mesh.atoms_of("tp-pp") == mesh.atoms_of("pp-tp") == atoms((2, 64), (2, 4), (4, 1))
    assert mesh.atoms_of("cp-dp") == atoms((2, 32), (2, 16), (2, 8))


def test_activations_nest_alike_whatever_ranks_are_neighbours() -> None:
    mesh = Mesh(tp=2, cp=3, dp=5, ep=3, order="dp-tp-cp-ep-pp")
    assert mesh.atoms_of("dp-cp-tp") == atoms((5, 1), (3, 10), (2, 5))
    assert list(mesh.nested(DENSE).items()) == [("dp", 5), ("cp", 3), ("tp", 2)]
    assert list(mesh.nested(EXPERT).items()) == [("edp", 5), ("ep", 3), ("etp", 2)]


@pytest.mark.parametrize(
    ("options", "where", "texts"),
    [
        (
            {"tp": 3, "dp": 2, "etp": 1, "ep": 2},
            "ep, tp",
            ("ep = 2 ranks of the expert part", "tp = 3 ranks of the dense part", "2 does not divide 3"),
        ),
        (
            {"tp": 2, "cp": 3, "dp": 2, "etp": 2, "ep": 2},
            "ep, cp",
            ("etp·ep = 4 ranks", "tp·cp = 6 ranks", "4 does not divide 6"),
        ),
        ({"tp": 6, "etp": 2, "dp": 1, "kv_heads": 2}, "etp, kv_in", ("etp = 2", "kv_in = 3 ranks of the dense part")),
    ],
)
def test_sizes_without_a_refinement_are_refused_with_both_numbers(
    options: dict[str, Any], where: str, texts: tuple[str, ...]
) -> None:
    mesh = Mesh(**options)
    for call in (lambda: mesh.atoms, lambda: mesh.atoms_of("tp"), lambda: mesh.sharing(["tp", "dp"])):
        with pytest.raises(PlanError) as caught:
            call()
        assert caught.value.where == where
        assert all(text in caught.value.reason for text in texts), caught.value.reason
        assert "one divides the other" in caught.value.remedy


@pytest.mark.parametrize("name", ["embedding", "xp", "ep-cp", "dp-dp"])
def test_names_without_meaning_have_no_atoms(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        Mesh(tp=2, dp=2).atoms_of(name)
