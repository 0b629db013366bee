"""The passes that split a program over ranks, in order.

Enters: a program in canonical form. Leaves: which passes make the program of a rank of it.
"""

from __future__ import annotations

from fxpar.manager import Pass
from fxpar.passes.annotate import annotate
from fxpar.passes.assign_rng import assign_rng
from fxpar.passes.coalesce import coalesce
from fxpar.passes.dispatch_experts import dispatch_experts
from fxpar.passes.divide_batch import divide_batch
from fxpar.passes.divide_sequence import divide_sequence
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.localize import localize
from fxpar.passes.vocab_parallel import vocab_parallel

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
