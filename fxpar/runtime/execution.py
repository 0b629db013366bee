"""How a rank's module runs: as it is, or compiled as one graph; and with which generator.

Enters: a lowered module and the plan. Leaves: a callable for each set of shapes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpar.plan import Plan
from fxpar.runtime.overlap import Overlap
from fxpar.runtime.recompute import apply_recompute
from fxpar.runtime.world import World


@dataclass(frozen=True)
class Executor:
    """Runs a lowered module.

    Compiled, a module is one forward and one backward graph for each set of shapes, without graph breaks: what cannot
    be compiled is an error of torch.compile. A program is compiled on its first call with new shapes.

    Attributes:
        module: what `lower` made.
        plan: whether to compile.
        compiled: callables by shapes.
    """

    module: fx.GraphModule
    plan: Plan
    compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, shapes: Hashable, *values: Any) -> Any:
        """Outputs of the module.

        Args:
            shapes: equal for calls whose tensors have the same shapes.
            values: the module's inputs.
        """
        key = shapes if self.plan.compile else None
        if key not in self.compiled:
            self.compiled[key] = self._made()
        return self.compiled[key](*values)

    def _made(self) -> Callable[..., Any]:
        # Each has code of its own: torch.compile counts the variants of one code, and refuses many.
        module = apply_recompute(copy.copy(self.module))
        if not self.plan.compile:
            return module
        options: dict[str, Any] = {"post_grad_custom_post_pass": Overlap(self.plan.cost, self.plan.tp)}
        if self.plan.tp > 1:
            # Inductor's own order for peak memory would bring weight gradients back in front of collectives.
            options["reorder_for_peak_memory"] = False
        return torch.compile(module, fullgraph=True, dynamic=False, options=options)


@contextlib.contextmanager
def own_generator(world: World, seed: int, step: int) -> Iterator[None]:
    """Seeds the GPU's generator for this rank and step, and puts it back: for kernels that draw bits of their own."""
    with torch.random.fork_rng([world.device]):
        text = f"{seed} {step} {world.rank}".encode()
        torch.cuda.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1)
        yield
