"""Steps whose experts received more rows than their buffers have places for are run again.

Enters: what the microbatches of a step say of rows without a place. Leaves: whether any rank had some, asked once a
step, on the host, behind the backward and before its gradients count; how many steps were repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from fxpar.ir.step import is_excess
from fxpar.ops.collectives import max_over
from fxpar.plan.plan import Plan
from fxpar.runtime.deferred_grad_sync import Finish
from fxpar.runtime.world import World

Finished = Callable[[dict[str, Tensor], Hashable, Finish], Mapping[str, Tensor]]


class Overflow(Exception):
    """Rows had no place: what was computed of them is not to be used."""


class Budget:
    """The budget of a plan's buffers.

    Attributes:
        steps: that were taken.
        repeated: of these, those that were run again.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        self._group = world.groups["-".join(plan.axes)]
        self.steps = self.repeated = 0

    def checked(self, rows: Sequence[Mapping[str, Tensor]], finished: Finished) -> Finished:
        """What makes gradients of a step that is to be used.

        Args:
            rows: of the microbatches, filled by then.
            finished: makes them.
        """

        def check(local_gradients: dict[str, Tensor], signature: Hashable, finish: Finish) -> Mapping[str, Tensor]:
            self.steps += 1
            excess = [value.flatten() for part in rows for name, value in part.items() if is_excess(name)]
            if excess and max_over(torch.cat(excess).amax(), self._group).item() > 0:
                self.repeated += 1
                raise Overflow
            return finished(local_gradients, signature, finish)

        return check

    def __str__(self) -> str:
        return (
            f"Of {self.steps} steps {self.repeated} were repeated: more rows of experts came than receive_budget has "
            "places for."
        )
