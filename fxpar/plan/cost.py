"""The constants of the cost model.

Enters: nothing. Leaves: `Cost`, part of a plan. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fxpar.errors import shown
from fxpar.mesh.axes import PURPOSES
from fxpar.plan.plan_options import OptionGroup

# What an axis may have of its own.
_OF_AXES = ("bandwidth", "latency")
_MAY_BE_ZERO = ("copy_latency", "kernel_latency", "hidden")


@dataclass(frozen=True)
class Cost(OptionGroup):
    """What the layout choice takes a machine for. Only ratios decide a layout; the defaults are of one H200 of eight.

    Example:
        ```python
        plan = fxpar.Plan(tp=8, dp=4, cost=fxpar.Cost(axes={"dp": {"bandwidth": 45e9, "latency": 2e-5}}))
        ```

    Attributes:
        bandwidth: bytes a second that a rank sends in a ring.
        latency: seconds that a collective takes before its first byte.
        flops: multiply-adds a second, times two, of a rank's matrix products, where they fill its multiprocessors.
        memory: bytes a second of a rank's memory.
        least_copy: bytes from which on ranks of one machine copy into each other's memory (`collective_transport`);
            what is smaller they send through their process group, whose latency is less.
        copy_latency: seconds that such a copy takes besides its bytes, until what it brought can be read. A sum next to
            which less is computed is one kernel, however small; with 0 none is.
        multiprocessors: of a rank's GPU, which compute as many tiles of a product at a time; with 1 every product runs
            at the full rate.
        kernel_latency: seconds between two kernels that are queued already, as in a CUDA graph.
        hidden: of what the process group sends, the part that products alongside it can hide. Its kernels need the
            multiprocessors, which products have: on two H200 nothing was hidden alongside a product of one wave. What
            copy engines carry is hidden whole.
        axes: bandwidth and latency, or one of them, of axes whose ranks have other links, by name: where data ranks
            are on different machines, `{"dp": {"bandwidth": 45e9, "latency": 2e-5}}`.
    """

    bandwidth: float = 320e9
    latency: float = 5e-6
    flops: float = 600e12
    memory: float = 4e12
    least_copy: float = 1e6
    copy_latency: float = 3e-5
    multiprocessors: int = 132
    kernel_latency: float = 2e-6
    hidden: float = 0.3
    axes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    __hash__ = OptionGroup.__hash__

    def problems(self) -> Iterator[str]:
        """Implements `OptionGroup.problems`."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "axes" or (entry.name in _MAY_BE_ZERO and value == 0 and not isinstance(value, bool)):
                continue
            wrong = list(_wrong_number(f"cost.{entry.name}", value))
            yield from wrong
            if not wrong and entry.name == "multiprocessors" and not isinstance(value, int):
                yield f"cost.multiprocessors must be an integer, got {shown(value)}"
            if not wrong and entry.name == "hidden" and value > 1:
                yield f"cost.hidden must be a part from 0 to 1, got {shown(value)}"
        yield from self._wrong_axes()

    def _wrong_axes(self) -> Iterator[str]:
        if not isinstance(self.axes, Mapping):
            yield f"cost.axes must be a mapping, as {{'dp': {{'bandwidth': …}}}}, got {shown(self.axes)}"
            return
        for axis, link in self.axes.items():
            if axis not in PURPOSES:
                yield f"cost.axes has the unknown axis {shown(axis)}: choose from {', '.join(PURPOSES)}"
            elif not isinstance(link, Mapping) or not link or not set(link) <= set(_OF_AXES):
                yield f"cost.axes[{axis!r}] must be a mapping of {' and '.join(_OF_AXES)}, or one, got {shown(link)}"
            else:
                for name, value in link.items():
                    yield from _wrong_number(f"cost.axes[{axis!r}].{name}", value)

    def on(self, axes: Iterable[str]) -> Cost:
        """Returns the constants for what some axes communicate: joined ones have the slowest of their links."""
        if not self.axes:
            return self
        links = [self.axes.get(axis) or self.axes.get(axis.partition("_")[0], {}) for axis in axes]  # dp_in is of dp
        return replace(
            self,
            bandwidth=min((link.get("bandwidth", self.bandwidth) for link in links), default=self.bandwidth),
            latency=max((link.get("latency", self.latency) for link in links), default=self.latency),
            axes={},
        )


def _wrong_number(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e100:
        yield f"{name} must be a positive number in SI units, got {shown(value)}"
