"""A schedule: for each rank of a pipeline its actions in order.

Enters: actions. Leaves: a frozen `Schedule`, which says who holds a stage. That it can run is another matter:
`fxpar.schedule.verified`. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from fxpar.schedule.actions import Action, Phase


class Style(StrEnum):
    """Which ranks hold which stages; p is the number of ranks.

    `LOOP`: chunk c of rank r is stage c·p + r (SPEC section 3; Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    `V`: every other chunk runs back, so that the last stage is on rank 0 (Qi et al. 2024, arXiv 2401.10241, section 6).
    """

    LOOP = "loop"
    V = "v"

    def stage(self, rank: int, chunk: int, pp: int) -> int:
        """The stage that is a rank's chunk."""
        back = self is Style.V and chunk % 2 == 1
        return chunk * pp + (pp - 1 - rank if back else rank)

    def rank(self, stage: int, pp: int) -> int:
        """The rank that holds a stage."""
        chunk, place = divmod(stage, pp)
        return pp - 1 - place if self is Style.V and chunk % 2 == 1 else place


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline runs, in which order.

    Attributes:
        name: how it was made; `custom` if it was read from a file.
        ranks: for each rank its actions in order.
        virtual_stages: chunks, that is stages, of each rank.
        microbatches: of a step.
        warmup: for each rank the forwards before the steady state, which starts with a forward.
        style: which ranks hold which stages.
        group_size: microbatches that a rank runs of one chunk before it takes the next; None where that says nothing.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    virtual_stages: int
    microbatches: int
    warmup: tuple[int, ...]
    style: Style = Style.LOOP
    group_size: int | None = None

    @property
    def pp(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """Stages of all ranks."""
        return self.pp * self.virtual_stages

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """For each stage the rank that holds it."""
        return tuple(self.style.rank(stage, self.pp) for stage in range(self.stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, by chunk."""
        return tuple(self.style.stage(rank, chunk, self.pp) for chunk in range(self.virtual_stages))

    @cached_property
    def split_backward(self) -> bool:
        """Whether some backward is run in two parts: its input part and, later, its weight part."""
        return any(action.phase is Phase.BACKWARD_INPUT for actions in self.ranks for action in actions)

    @cached_property
    def forward_only(self) -> bool:
        """Whether there is no backward at all, as in evaluation."""
        return all(action.phase is Phase.FORWARD for actions in self.ranks for action in actions)


def leading_forwards(actions: tuple[Action, ...]) -> int:
    """The warmup of a rank, read off its order: the forwards before the one that its first backward follows.

    Where all forwards come before all backwards, these are all of them.
    """
    first = next((place for place, action in enumerate(actions) if action.phase is not Phase.FORWARD), len(actions))
    forwards = sum(action.phase is Phase.FORWARD for action in actions)
    return first if first == forwards else max(first - 1, 0)
