"""The constants of the cost model.

Enters: nothing. Leaves: `Cost`, part of a plan. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from fxpar.errors import shown


@dataclass(frozen=True)
class Cost:
    """What the layout choice takes a machine for. Only ratios decide; the defaults are of one H200 of eight.

    Attributes:
        bandwidth: bytes a second that a rank sends in a ring of the tp axis.
        latency: seconds that a collective takes before its first byte.
        flops: multiply-adds a second, times two, of a rank's matrix products.
        memory: bytes a second of a rank's memory.
    """

    bandwidth: float = 320e9
    latency: float = 5e-6
    flops: float = 600e12
    memory: float = 4e12

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e100:
                yield f"cost.{entry.name}={shown(value)} is no positive number: give it in SI units"
