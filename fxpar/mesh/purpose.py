"""What the axes of a mesh are for.

Enters: nothing. Leaves: the axes, with what each may cut of a model, and the order in which those of a part nest. Needs
no torch.

Nothing outside `fxpar/mesh` and `fxpar/plan` knows an axis by its name: passes ask a plan for the axes of a purpose.
How fast an axis is depends on the machine and is part of a plan (`fxpar.plan.cost`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

DENSE, EXPERT = "dense", "expert"


class Cuts(StrEnum):
    """What of a model an axis shares out among its ranks."""

    LAYERS = "layers"
    BATCH = "batch"
    SEQUENCE = "sequence"
    FEATURES = "features"
    EXPERTS = "experts"


@dataclass(frozen=True)
class Purpose:
    """What an axis is for.

    Attributes:
        cuts: what its ranks share out.
        meaning: in a few words, for messages.
    """

    cuts: Cuts
    meaning: str


# Those of a part stand in the order in which they nest, the outermost first.
PURPOSES: Mapping[str, Purpose] = {
    "pp": Purpose(Cuts.LAYERS, "pipeline parallel"),
    "dp": Purpose(Cuts.BATCH, "data parallel"),
    "dp_out": Purpose(Cuts.BATCH, "data parallel, of the same experts"),
    "dp_in": Purpose(Cuts.BATCH, "data parallel, of different experts"),
    "cp": Purpose(Cuts.SEQUENCE, "context parallel"),
    "tp": Purpose(Cuts.FEATURES, "tensor parallel"),
    "edp": Purpose(Cuts.BATCH, "data parallel for experts"),
    "ep": Purpose(Cuts.EXPERTS, "expert parallel"),
    "etp": Purpose(Cuts.FEATURES, "tensor parallel within an expert"),
}

# The axes that may stand in a layout of each part. Activations nest in this order, the outermost axis first, whatever
# ranks are neighbours (DESIGN section 3). Layers are no dimension of a value: pp stands in no layout.
NESTING: Mapping[str, tuple[str, ...]] = {DENSE: ("dp", "cp", "tp"), EXPERT: ("edp", "ep", "etp")}


def axis_that(cuts: Cuts) -> str:
    """Name of the dense part's axis whose ranks share that out, by which the plan's option and messages call it."""
    return next(axis for axis in NESTING[DENSE] if PURPOSES[axis].cuts is cuts)


def joined_names(axes: Iterable[str]) -> tuple[str, ...]:
    """The names of all sets of axes that may communicate: `dp`, `tp`, `dp-tp`.

    Args:
        axes: in nesting order.
    """
    names = tuple(axes)
    sets = (combinations(names, count) for count in range(1, len(names) + 1))
    return tuple("-".join(some) for subsets in sets for some in subsets)
