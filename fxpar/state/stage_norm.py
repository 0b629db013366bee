"""Norms of what one stage of a pipeline holds, which are no norms of the model.

Enters: a norm of one tensor. Leaves: a number to look at; joined with others it would be another number on each stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpar.errors import InputError

JOINING = frozenset((torch.stack, torch.cat, torch.hstack, torch.vstack, torch.concat, torch._foreach_norm))


def refusal() -> InputError:
    """The error for norms that are joined, as `torch.nn.utils.clip_grad_norm_` joins them."""
    return InputError(
        "would be of this stage of the pipeline alone, and differ between ranks: torch.nn.utils.clip_grad_norm_ and "
        "its like see no other stages",
        where="norm of several gradients",
        remedy="call model.clip_grad_norm_(max_norm), which gives the norm too",
    )


class StageNorm(Tensor):
    """The norm of one tensor on one stage. It stays one in what is computed of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in JOINING:
            raise refusal()
        inherited: Any = super().__torch_function__
        return inherited(func, types, args, kwargs or {})
