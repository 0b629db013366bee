"""Meshes of all kinds, and what their groups are by counting."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from fxpar.mesh.mesh import ORDER, Mesh

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)


def by_brute_force(indices: Mapping[int, Mapping[str, int]], axes: Sequence[str]) -> set[frozenset[int]]:
    """Ranks that agree on every other axis."""
    found: dict[tuple[int, ...], set[int]] = {}
    for rank, index in indices.items():
        rest = tuple(value for axis, value in index.items() if axis not in axes)
        found.setdefault(rest, set()).add(rank)
    return {frozenset(group) for group in found.values()}


def counted(sizes: Sequence[tuple[str, int]], offset: int) -> dict[int, dict[str, int]]:
    """Every rank's index on each axis, by counting: the first axis turns fastest."""
    turning = itertools.product(*(range(size) for _, size in reversed(sizes)))
    names = [name for name, _ in reversed(sizes)]
    return {offset + rank: dict(zip(names, index, strict=True)) for rank, index in enumerate(turning)}


SIZES = st.sampled_from([1, 1, 2, 2, 3, 4])


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes that fit both parts, with any order."""
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    width = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, width + 1) if width % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, width // etp + 1) if (width // etp) % n == 0]))
    return {
        **{"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp},
        "order": "-".join(draw(st.permutations(ORDER.split("-")))),
        "rank_offset": draw(st.integers(0, 20)),
        "hierarchical_cp": draw(st.sampled_from([(), (cp,), (1, cp), (2, 2) if cp == 4 else (cp, 1)])),
        "kv_heads": draw(st.sampled_from([None, *(k for k in range(1, 9) if k % tp == 0 or tp % k == 0)])),
    }


def parts(options: Mapping[str, Any]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The axes of the dense and of the expert part in the order."""
    width = options["tp"] * options["cp"] * options["dp"]
    sizes = {**options, "edp": width // (options["etp"] * options["ep"])}
    words = options["order"].split("-")
    dense = [(axis, sizes[axis]) for axis in words if axis != "ep"]
    experts = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
    return dense, [(experts[axis], sizes[experts[axis]]) for axis in words if axis != "cp"]


def pipelines_agree(options: Mapping[str, Any]) -> bool:
    dense, expert = (by_brute_force(counted(part, 0), ["pp"]) for part in parts(options))
    return dense == expert


good = configurations().filter(pipelines_agree)
meshes = good.map(lambda options: Mesh(**options))
