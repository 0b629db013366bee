"""The properties of programs that fxpar's own passes and checks go by.

Enters: nothing. Leaves: their names, which are the words of a text's `properties` line. A property is any word, and a
user's pass may name others. What one rests on is said by the contract of the pass that provides it.
"""

from __future__ import annotations

from enum import StrEnum


class Property(StrEnum):
    """What holds of a program.

    Attributes:
        CANONICAL: each operation is written in one way.
        MASKS: masks that sizes alone decide are folded.
        SEQUENCE: ranks share out the lengths that they can.
        EXPERTS: rows of experts go to the ranks that hold these.
        LAYOUTS: every value has a layout.
        COLLECTIVES: what converts one layout to another stands in the graph.
        COALESCED: gradients of many parameters are summed at once.
        VOCABULARY: operations over a vocabulary that is cut are their composites.
        RNG: random bits are those of the counter generator.
        LOCAL: sizes in the graph are those of a rank.
        STAGES: each node belongs to a stage of the pipeline.
        STEP: the graph is that of a training step, forward and backward.
        REGIONS: equal layers are regions.
    """

    CANONICAL = "canonical"
    MASKS = "masks"
    SEQUENCE = "sequence"
    EXPERTS = "experts"
    LAYOUTS = "layouts"
    COLLECTIVES = "collectives"
    COALESCED = "coalesced"
    VOCABULARY = "vocabulary"
    RNG = "rng"
    LOCAL = "local"
    STAGES = "stages"
    STEP = "step"
    REGIONS = "regions"
