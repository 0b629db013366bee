"""Buffers that a captured forward writes: what no program could write as the author's module does.

Enters: a captured program. Leaves: nothing, or an error that names the buffer, or the norm of a batch that ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpar.errors import CaptureError, PlanError
from fxpar.program.buffer_outputs import buffer_of, is_buffer
from fxpar.program.grad_flow import carried
from fxpar.program.program import Program, note


def check_written(program: Program, norms: Sequence[str]) -> None:
    """Refuses new values with a gradient, and norms of a batch whose rows data ranks share out.

    Args:
        norms: modules that norm by statistics of the batch, each with its line.

    Raises:
        CaptureError: the next backward would go through this call, whose graph is gone by then.
        PlanError: a norm is one of the whole batch, and the plan does not ask for that.
    """
    flags = carried(program)
    for name, node in program.output_nodes().items():
        if is_buffer(name) and any(flags[node]):
            line = f" ({note(node).source})" if note(node).source else ""
            raise CaptureError(
                f"the forward writes a value with a gradient into this buffer{line}: the backward of the next call "
                "would go through this one",
                where=buffer_of(name),
                remedy="write it under torch.no_grad(), or write value.detach()",
            )
    if norms and program.plan.data_ranks > 1 and program.plan.batch_norm == "refuse":
        raise PlanError(
            f"norms by statistics of the batch, which {program.plan.data_ranks} data ranks share out",
            where=norms[0],
            remedy="set batch_norm='global' for statistics of all ranks' rows, as one device has them (some "
            "small reductions a layer), put it in eval mode, or use a norm of each row (GroupNorm, LayerNorm)",
        )
