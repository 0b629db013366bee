"""The passes that make a training step of a program, in order.

Enters: a program after all passes of the forward. Leaves: which passes run on it; `STEP_PASSES` differentiate the loss,
or without one all outputs that carry a gradient, by all parameters that are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from fxpar.ir.program import Program, Property
from fxpar.ir.regions import inlined
from fxpar.ir.stages import stages_of
from fxpar.manager import Pass, PassManager
from fxpar.ops.lower import Lowered
from fxpar.passes.differentiate import differentiable, differentiate, of_outputs
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


def counted_steps(
    program: Program,
    lowering: Callable[[Program], Lowered],
    *,
    of_stage: int | None = None,
    copies: Collection[str] | None = None,
) -> Iterator[tuple[Program, Program, Lowered]]:
    """Yields what a report counts of each stage, or of the whole: its program, its step, and the step lowered.

    A step has the gradients of the loss and of what a stage sends, and returns no other outputs where there are such.
    Calls of regions are written out.

    Args:
        program: after all passes of the forward, or a step.
        lowering: what a rank runs of a program, on the `stand_in` of its device; groups may have any names.
        of_stage: of a pipeline the only stage that is wanted.
        copies: as for `step_passes`.
    """
    program = inlined(program)
    if Property.STEP in program.properties:
        yield program, program, lowering(program)
        return
    if Property.STAGES in program.properties:
        forwards = [(s.program, s.tangents, s.sent) for s in stages_of(program) if of_stage in (None, s.number)]
    else:
        tangents = tuple(name for name in differentiable(program) if not program.loss or name == program.loss)
        forwards = [(program, tangents, ())]
    for forward, tangents, sent in forwards:
        trained = [p.fqn for p in forward.parameters if p.trainable]
        outputs = [name for name in forward.outputs if name in sent or name == forward.loss] or forward.outputs
        step = inlined(PassManager(step_passes(outputs, tangents, trained, copies=copies)).run(forward))
        yield forward, step, lowering(step)
