"""Recomputation of the regions that the author checkpointed.

Enters: a lowered graph whose nodes carry region numbers. Leaves: a module in which each region keeps its inputs only
and runs again in the backward. The counter generator gives the same masks again; nothing has to be saved for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from fxpar.program.program import has_note, note


class _Region(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *values: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.body(*values)
        return checkpoint(self.body, *values, use_reentrant=False, preserve_rng_state=False)


def apply_recompute(module: fx.GraphModule) -> nn.Module:
    """The module with its checkpointed regions; the module itself where there are none."""
    region: dict[str, int] = {}
    current = 0
    for node in module.graph.nodes:
        if node.op == "call_function":
            current = note(node).recompute if has_note(node) else current
            region[node.name] = current
    if not any(region.values()):
        return module
    runs: dict[str, int] = {}
    numbers = [0]
    for name, number in region.items():
        if number != numbers[-1]:
            numbers.append(number)
        runs[name] = len(numbers) - 1
    parts = split_module(module, nn.Module(), lambda node: runs[node.name], keep_original_order=True)
    for index, number in enumerate(numbers):
        name = f"submod_{index}"
        if number and hasattr(parts, name):
            setattr(parts, name, _Region(getattr(parts, name)))
    return parts
