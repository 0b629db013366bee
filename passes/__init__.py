"""The compiler's passes, one file each, and the order in which they run.

The sources stand in the top-level folder `passes` and are imported as `fxpar.passes`.
"""

if __name__ != "fxpar.passes":
    raise ImportError(f"import this package as fxpar.passes, not as {__name__}")

from fxpar.manager import Pass
from fxpar.passes.annotate import annotate
from fxpar.passes.assign_rng import assign_rng
from fxpar.passes.canonicalize import canonicalize
from fxpar.passes.coalesce import coalesce
from fxpar.passes.dispatch_experts import dispatch_experts
from fxpar.passes.divide_batch import divide_batch
from fxpar.passes.divide_sequence import divide_sequence
from fxpar.passes.fold_masks import fold_masks
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.localize import localize
from fxpar.passes.partition_stages import partition_stages
from fxpar.passes.recognize_experts import recognize_experts
from fxpar.passes.split import SPLIT_PASSES
from fxpar.passes.vocab_parallel import vocab_parallel

# These write each thing in one way.
CANONICAL_PASSES: tuple[Pass, ...] = (canonicalize, recognize_experts)
DEFAULT_PASSES: tuple[Pass, ...] = (*CANONICAL_PASSES, fold_masks, *SPLIT_PASSES, partition_stages)

__all__ = [
    "CANONICAL_PASSES",
    "DEFAULT_PASSES",
    "annotate",
    "assign_rng",
    "canonicalize",
    "coalesce",
    "dispatch_experts",
    "divide_batch",
    "divide_sequence",
    "fold_masks",
    "insert_collectives",
    "localize",
    "partition_stages",
    "recognize_experts",
    "vocab_parallel",
]
