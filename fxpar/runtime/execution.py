"""How a rank's module runs: as it is, or compiled as one graph.

Enters: a lowered module and the plan. Leaves: a callable for each set of shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxpar.ops.lower import Lowered
from fxpar.ops.recompute import apply_recompute
from fxpar.plan.plan import Plan
from fxpar.runtime.overlap import Overlap


@dataclass(frozen=True)
class Executor:
    """Runs a lowered module.

    Compiled, a module is one forward and one backward graph for each set of shapes, without graph breaks: what cannot
    be compiled is an error of torch.compile. It is compiled on its first call with new shapes.

    Attributes:
        lowered: what `lower` made.
        plan: whether to compile.
        made: callables by wanted outputs and, compiled, by all for which there is a graph of its own.
    """

    lowered: Lowered
    plan: Plan
    made: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, shapes: Hashable, wanted: tuple[str, ...], values: Sequence[Tensor]) -> dict[str, Tensor]:
        """The wanted outputs by name.

        Args:
            shapes: equal for calls whose tensors have the same shapes.
            wanted: names of outputs. Of the others nothing is kept: a compiled backward would start from zeros for
                each output that has no gradient.
            values: the module's inputs.
        """
        key: Hashable = wanted
        if self.plan.compile:
            # What torch.compile would compile anew for; of one code it makes few variants, and then refuses.
            trained = tuple(value.requires_grad for value in values)
            key = (wanted, shapes, trained, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if key not in self.made:
            self.made[key] = self._make(wanted)
        return dict(zip(wanted, self.made[key](*values), strict=True))

    def _make(self, wanted: tuple[str, ...]) -> Callable[..., Any]:
        # Each has code of its own: torch.compile counts the variants of one code, and refuses many.
        module = apply_recompute(self.lowered.only(wanted).module)
        if not self.plan.compile:
            return module
        # A compiled graph tells no axis from another: each collective is taken for one of the slowest and largest.
        cost, ranks = self.plan.cost.on(self.plan.axes), max(self.plan.axes.values(), default=1)
        options: dict[str, Any] = {"post_grad_custom_post_pass": Overlap(cost, ranks)}
        if self.plan.axes:
            # Inductor's own order for peak memory would bring weight gradients back in front of collectives.
            options["reorder_for_peak_memory"] = False
        return torch.compile(module, fullgraph=True, dynamic=False, options=options)
