"""The passes that make a training step of a program, in order.

Enters: a program after all passes of the forward. Leaves: which passes run on it; `STEP_PASSES` differentiate the loss,
or without one all outputs that carry a gradient, by all parameters that are trained.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fxpar.manager import Pass
from fxpar.passes.differentiate import differentiate, of_outputs
from fxpar.passes.exchange import exchange, exchange_over
from fxpar.passes.mark_regions import mark_regions
from fxpar.passes.outline_layers import outline_layers
from fxpar.passes.overlap import overlap
from fxpar.passes.prune import prune
from fxpar.passes.recompute import recompute
from fxpar.passes.rematerialise import rematerialise
from fxpar.passes.split_backward import split_backward

STEP_PASSES: tuple[Pass, ...] = (
    differentiate,
    recompute,
    rematerialise,
    prune,
    mark_regions,
    outline_layers,
    overlap,
    exchange,
)


def step_passes(
    outputs: Sequence[str],
    tangents: Sequence[str],
    trained: Collection[str],
    *,
    splits: bool = False,
    copies: Collection[str] | None = None,
) -> list[Pass]:
    """`STEP_PASSES` for some outputs.

    Args:
        outputs: of the model, those that the step returns.
        tangents: those that have a gradient.
        trained: parameters whose gradients are wanted.
        splits: whether a schedule runs the backward in two parts.
        copies: axes, and joined ones, whose ranks can copy into each other's memory; as the plan says by default.
    """
    passes = [of_outputs(tangents, outputs, trained), *STEP_PASSES[1:]]
    if splits:
        passes.insert(passes.index(mark_regions), split_backward)
    if copies is not None:
        passes[-1] = exchange_over(copies)
    return passes
