"""Which random bits a step draws: its seed and its number.

Enters: the plan's seed and how many steps there were. Leaves: the state that a program takes as an input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fxpar.errors import FxparError, InputError, shown


class RandomState:
    """Seed, step and microbatch, i64[3] on the device; each call that draws is a step of its own.

    Attributes:
        step: the next one's number; may be set.
        device: of the states.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.step = 0
        self._seed, self.device = seed, device
        # The step before which a state was drawn, that state, and what is added to it for the next one.
        self._counted: tuple[int, Tensor] = (-1, torch.empty(0))
        self._one = torch.tensor([0, 1, 0], device=device)

    def draw(self) -> Tensor:
        """Returns the state of the next step, which is counted.

        From one step to the next it is counted on the device: a copy from the host would wait for the device.

        Raises:
            InputError: `step` was set to what is no number of steps.
        """
        self._check()
        known, state = self._counted
        # A new tensor and no addition in place: the state of the step before may still be read by its backward.
        state = state + self._one if known == self.step else self.peek()
        self.step += 1
        self._counted = (self.step, state)
        return state

    @contextmanager
    def of_accepted(self) -> Iterator[None]:
        """Takes back what a refused call has drawn: the next call draws what it would have."""
        before = self.step
        try:
            yield
        except FxparError:
            self.step = before
            raise

    def peek(self) -> Tensor:
        """Returns the state of the next step, which is not counted.

        Raises:
            InputError: as `draw`.
        """
        self._check()
        return torch.tensor([self._seed, self.step, 0], dtype=torch.int64, device=self.device)

    def _check(self) -> None:
        if type(self.step) is not int or not 0 <= self.step < 2**62:
            raise InputError(
                f"must be an integer from 0 on, got {shown(self.step)}", where="step", remedy="set one from 0 on"
            )
