"""The passes that make a training step of a program, in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fxpar.manager import Pass
from fxpar.passes.differentiate import of_outputs
from fxpar.passes.outline_layers import outline_layers
from fxpar.passes.prune import prune
from fxpar.passes.recompute import recompute
from fxpar.passes.rematerialise import rematerialise


def step_passes(outputs: Sequence[str], tangents: Sequence[str], trained: Collection[str]) -> list[Pass]:
    """The passes of a step.

    Args:
        outputs: of the model, those that the step returns.
        tangents: those that have a gradient.
        trained: parameters whose gradients are wanted.
    """
    return [of_outputs(tangents, outputs, trained), recompute, rematerialise, prune, outline_layers]
