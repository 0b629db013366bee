"""The load of experts in the last step: kept on the device, read when somebody asks.

Enters: what each microbatch's step says of its experts' rows. Leaves: the numbers of all ranks, behind one small
collective a step; nothing waits for them before they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpar.mesh.purpose import Cuts
from fxpar.ops.collectives import arrived, start_gather
from fxpar.plan.plan import Plan
from fxpar.program.loads import is_load, module_of_load
from fxpar.report.loads import ExpertLoad, expert_loads
from fxpar.runtime.world import World


@dataclass(frozen=True)
class Loads:
    """The load of one step.

    Attributes:
        names: of the outputs that say it.
        own: experts of a rank in each of these layers.
        counts: i64 [ranks, experts of a rank in all these layers].
    """

    names: tuple[str, ...]
    own: tuple[int, ...]
    counts: Tensor

    def read(self, plan: Plan) -> tuple[ExpertLoad, ...]:
        """The numbers; waits for the device."""
        layers = [part.tolist() for part in self.counts.cpu().split(list(self.own), dim=1)]
        names = [module_of_load(name) for name in self.names]
        return expert_loads(names, layers, plan.axes, plan.mesh.holders, plan.axes_for(Cuts.BATCH))


def gathered(parts: Sequence[Mapping[str, Tensor]], world: World, plan: Plan) -> Loads | None:
    """The load of a step on all ranks; None where no rank holds other experts than another.

    Args:
        parts: of each microbatch what it says of rows, by name of the output.
    """
    names = tuple(filter(is_load, parts[0])) if parts else ()
    if not names:
        return None
    summed = [torch.stack([part[name].flatten() for part in parts]).sum(0) for name in names]
    group = world.groups["-".join(plan.axes)]
    counts = arrived(start_gather(torch.cat(summed), group))
    return Loads(names, tuple(len(each) for each in summed), counts)
