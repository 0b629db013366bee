"""Which dimension of a batch is cut into microbatches, where no data ranks share it out.

Enters: a captured program. Leaves: nothing where its inputs can be cut by rows, else an error. The proof is that of
data parallel ranks: what may be shared out over two of them may be computed one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpar.compile import compile_program
from fxpar.errors import FxparError, InputError
from fxpar.manager import Pass
from fxpar.passes import insert_collectives
from fxpar.passes.divide_batch import of_all_ranks
from fxpar.program.program import Program


def prove_rows(program: Program, passes: Sequence[Pass]) -> None:
    """Refuses a program whose batch cannot be cut into microbatches.

    Raises:
        InputError: names what takes the rows together, or the inputs that do not say which dimension they are.
    """
    plan = replace(program.plan, virtual_stages=1, stages=(), microbatches=1, schedule="", group_size=None)
    plan = replace(plan, loss_reduction="mean", tp=1, dp=2, pp=1, split={}, sequence_parallel=False)
    try:
        compile_program(of_all_ranks(program.copy().with_(plan=plan)), passes, until=insert_collectives.name)
    except FxparError as error:
        raise InputError(
            f"nothing proves which rows a microbatch may have: {error.where}: {error.reason}",
            where="microbatches",
            remedy="say which dimension of each input is the rows (batch_dims={path: dim}), or set microbatches=1 and "
            "pass train_step a list of microbatches",
        ) from error
