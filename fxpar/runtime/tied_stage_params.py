"""Parameters that several stages of a pipeline hold: one value, whose gradients are summed.

Enters: for each parameter the ranks of a pipeline that hold it. Leaves: gradients that are the whole's on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.ops.collectives import Group
from fxpar.ops.mesh_process_groups import hold, process_group
from fxpar.runtime.world import World


class TiedStageParams:
    """The groups of ranks that hold parameters together. Making one is a collective call.

    Args:
        ranks: by name of the parameter, places in the pipeline.

    Attributes:
        counted: names of the parameters that count on this rank where each is to count once: those of which it is the
            first to hold them.
    """

    def __init__(self, world: World, ranks: Mapping[str, Collection[int]]) -> None:
        lines = world.mesh.groups("pp")
        place = world.mesh.coordinates(world.rank)["pp"]
        self.counted = frozenset(name for name, holders in ranks.items() if min(holders) == place)
        self._groups: dict[str, Group] = {}
        several = sorted({tuple(sorted(holders)) for holders in ranks.values() if len(holders) > 1})
        for places in several:
            timeout = timedelta(seconds=world.agreement.seconds)
            members = [[line[i] for i in places] for line in lines]
            with world.agreement.alarm.opening():
                subgroup, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
            if subgroup is not None:
                group = Group(subgroup.group_name, subgroup.size())
                hold(self, [group])
                self._groups |= {name: group for name, holders in ranks.items() if tuple(sorted(holders)) == places}

    def summed(
        self, gradients: Mapping[str, Tensor], trained: Collection[str], zeros: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Gradients of this rank's parameters, of which those that others hold too are summed. A collective call.

        Args:
            trained: names of the parameters to which some stage gives a gradient, the same on all ranks.
            zeros: a gradient of a parameter to which no stage of this rank gives one.
        """
        summed = dict(gradients)
        for name in sorted(self._groups):
            if name in trained:
                # Of one order in memory on all ranks: that of a transposed use is transposed.
                local = summed[name] if name in summed else zeros(name)
                total = local.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(total, group=process_group(self._groups[name]))
                summed[name] = total
        return summed
