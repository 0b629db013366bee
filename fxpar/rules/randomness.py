"""Which operations draw random bits.

Enters: a node, captured or canonical. Leaves: whether its result depends on a random generator.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpar.rules.engine import bind_arguments


def draws_bits(node: fx.Node) -> bool:
    """Whether a node calls an operator of torch that PyTorch tags as seeded; not one that is told to drop nothing."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = bind_arguments(node)
    probability = given.get("p", given.get("dropout_p"))
    idle = given.get("train", given.get("training")) is False
    return not idle and not (isinstance(probability, (int, float)) and probability == 0)
