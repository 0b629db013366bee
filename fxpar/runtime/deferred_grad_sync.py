"""Gradients that wait for their sum over the ranks.

Enters: what calls under `no_sync` leave of gradients. Leaves: with the next call that sums, the gradients of all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from fxpar.errors import InputError

Finish = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class Waiting:
    """What calls have left so far.

    Attributes:
        holds: whether calls leave theirs, and get no gradients.
    """

    def __init__(self) -> None:
        self.holds = False
        self._held: dict[str, Tensor] = {}
        self._signature: Hashable = None

    @property
    def is_idle(self) -> bool:
        """Whether a call's gradients are summed by themselves."""
        return not self.holds and not self._held

    @torch.no_grad()
    def finished(self, unsummed: dict[str, Tensor], signature: Hashable, finish: Finish) -> Mapping[str, Tensor]:
        """The gradients of a call and of those that waited; none where this one waits too.

        Args:
            unsummed: what the call leaves.
            signature: of what.
            finish: makes gradients of it. A collective call.

        Raises:
            InputError: what waits is of another program.
        """
        if self.is_idle:
            return finish(unsummed)
        if self._held:
            if signature != self._signature:
                raise InputError(
                    "leaves other gradients than the calls that wait for their sum",
                    where="no_sync",
                    remedy="make calls of one structure, mode and kind of sizes under no_sync and right after it",
                )
            torch._foreach_add_(list(unsummed.values()), [self._held[name] for name in unsummed])
        if self.holds:
            self._held, self._signature = unsummed, signature
            return {}
        self._held = {}
        return finish(unsummed)

    def discard(self) -> None:
        """Forgets what waits."""
        self._held = {}
