"""What the axes of a mesh are for.

Enters: nothing. Leaves: the axes in nesting order, with what each may cut of a model. Needs no torch.

Nothing outside `fxpar/mesh` and `fxpar/plan` knows an axis by its name: passes ask a plan for the axes of a purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations


class Cuts(StrEnum):
    """What of a model an axis shares out among its ranks."""

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


# Activations nest in this order, the outermost axis first, whatever ranks are neighbours (DESIGN section 3).
PURPOSES: Mapping[str, Purpose] = {
    "dp": Purpose(Cuts.BATCH, "data parallel"),
    "cp": Purpose(Cuts.SEQUENCE, "context parallel"),
    "ep": Purpose(Cuts.EXPERTS, "expert parallel"),
    "tp": Purpose(Cuts.FEATURES, "tensor parallel"),
}


def joined_names(axes: Iterable[str]) -> tuple[str, ...]:
    """The names of all sets of axes that may communicate: `dp`, `tp`, `dp-tp`.

    Args:
        axes: in nesting order.
    """
    names = tuple(axes)
    sets = (combinations(names, count) for count in range(1, len(names) + 1))
    return tuple("-".join(some) for found in sets for some in found)
