"""The compiler's passes, one file each, and the order in which they run.

The sources stand in the top-level folder `passes` and are imported as `fxpar.passes`. `DEFAULT_PASSES` make the program
of a rank; `STEP_PASSES` make a training step of it: they differentiate the loss, or without one all outputs that carry
a gradient, by all parameters that are trained.
"""

if __name__ != "fxpar.passes":
    raise ImportError(f"import this package as fxpar.passes, not as {__name__}")

from collections.abc import Callable, Collection, Iterator, Sequence

from fxpar.ir.program import Program
from fxpar.ir.properties import Property
from fxpar.ir.regions import inlined
from fxpar.ir.stages import stages_of
from fxpar.manager import Pass, PassManager
from fxpar.ops.lower import Lowered
from fxpar.passes.annotate import annotate
from fxpar.passes.assign_rng import assign_rng
from fxpar.passes.canonicalize import canonicalize
from fxpar.passes.chunk_tokens import chunk_tokens
from fxpar.passes.coalesce import coalesce
from fxpar.passes.differentiate import differentiable, differentiate, of_outputs
from fxpar.passes.dispatch_experts import dispatch_experts
from fxpar.passes.divide_batch import divide_batch
from fxpar.passes.divide_sequence import divide_sequence
from fxpar.passes.exchange import exchange, exchange_over
from fxpar.passes.fold_masks import fold_masks
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.localize import localize
from fxpar.passes.mark_regions import mark_regions
from fxpar.passes.outline_layers import outline_layers
from fxpar.passes.overlap import overlap
from fxpar.passes.partition_stages import partition_stages
from fxpar.passes.prune import prune
from fxpar.passes.recognize_experts import recognize_experts
from fxpar.passes.recompute import recompute
from fxpar.passes.rematerialise import rematerialise
from fxpar.passes.split_backward import split_backward
from fxpar.passes.vocab_parallel import vocab_parallel

# These write each thing in one way.
CANONICAL_PASSES: tuple[Pass, ...] = (canonicalize, recognize_experts)
# These split a program over ranks.
SPLIT_PASSES: tuple[Pass, ...] = (
    divide_batch,
    divide_sequence,
    dispatch_experts,
    annotate,
    insert_collectives,
    coalesce,
    vocab_parallel,
    assign_rng,
    localize,
)
DEFAULT_PASSES: tuple[Pass, ...] = (*CANONICAL_PASSES, fold_masks, *SPLIT_PASSES, partition_stages)
STEP_PASSES: tuple[Pass, ...] = (
    differentiate,
    recompute,
    rematerialise,
    prune,
    chunk_tokens,
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
    """Returns `STEP_PASSES` for some outputs.

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


__all__ = [
    "CANONICAL_PASSES",
    "DEFAULT_PASSES",
    "SPLIT_PASSES",
    "STEP_PASSES",
    "annotate",
    "assign_rng",
    "canonicalize",
    "chunk_tokens",
    "coalesce",
    "counted_steps",
    "differentiate",
    "dispatch_experts",
    "divide_batch",
    "divide_sequence",
    "exchange",
    "fold_masks",
    "insert_collectives",
    "localize",
    "mark_regions",
    "outline_layers",
    "overlap",
    "partition_stages",
    "prune",
    "recognize_experts",
    "recompute",
    "rematerialise",
    "split_backward",
    "step_passes",
    "vocab_parallel",
]
