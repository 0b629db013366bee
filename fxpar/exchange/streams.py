"""The current stream of a device, asked for hundreds of times a step.

Enters: a device. Leaves: its current stream. `torch.cuda.current_stream` makes an object each time.
"""

from __future__ import annotations

import torch

_KNOWN: dict[tuple[int, int], torch.cuda.Stream] = {}


def raw_stream(device: torch.device) -> int:
    """The handle of a GPU's current stream; the device has a number."""
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """A GPU's current stream; the device has a number."""
    key = device.index, raw_stream(device)
    if key not in _KNOWN:
        _KNOWN[key] = torch.cuda.current_stream(device)
    return _KNOWN[key]
