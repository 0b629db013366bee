"""Whether it matters what stands behind the end of sequences that were made longer for the sake of other ranks.

Enters: a call some of whose inputs may be filled otherwise as well, and what differentiates it. Leaves: nothing where
loss and gradients stay the same, which the program then keeps as known; else an error that names the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fxpar.errors import InputError
from fxpar.runtime.programs import Call


def check_padding(
    call: Call, run: Callable[[Call], Sequence[Tensor | None]], somewhere: Callable[[bool], bool]
) -> None:
    """Refuses a model whose loss, or a gradient of it or a buffer, depends on what stands behind the end of sequences.

    What a mask leaves out is left out to the last bit: no more than the order of a sum may differ. It is tried once for
    each program and input.

    Args:
        call: its `unproven` are asked about.
        run: the loss of a call, new values of buffers, and this rank's gradients.
        somewhere: whether something is so on any rank. A collective call.

    Raises:
        InputError: it does, on some rank.
    """
    first, second = run(call), run(replace(call, inputs=call.fills))
    if somewhere(any(map(_differ, first, second))):
        a, b = (values[0] for values in (first, second))
        assert a is not None
        assert b is not None
        raise InputError(
            "is as long as the longest of any data rank, and the loss, its gradient or a buffer depends on what pads "
            f"it (losses of {a.item():.8g} and {b.item():.8g})",
            where=f"batch entry {', '.join(sorted(call.unproven))}",
            remedy="pass a mask or labels that leave the end out, pad batches alike on all ranks, or say what stands "
            "there: Plan(padding={path: value})",
        )
    call.compiled.padded.update(call.unproven)


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is not b
    if not a.is_floating_point():
        return not torch.equal(a, b)
    unit = max(1e-6, 2 * torch.finfo(a.dtype).eps) if a.dtype != torch.float64 else 1e-12
    largest = float(a.detach().abs().nan_to_num(0.0).max()) if a.numel() else 0.0
    return not torch.allclose(a, b, rtol=0.0, atol=unit * largest, equal_nan=True)
