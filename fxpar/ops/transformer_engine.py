"""Transformer Engine, where it is installed.

Enters: what asks for it. Leaves: its parts, or why there are none.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fxpar.errors import InputError


def part(name: str, where: str, otherwise: str) -> Any:
    """A module of it, `transformer_engine.pytorch` for "pytorch".

    Args:
        where: the option that asks for it.
        otherwise: what to set where there is none.

    Raises:
        InputError: it cannot be imported.
    """
    try:
        return importlib.import_module(f"transformer_engine.{name}")
    except (ImportError, OSError) as error:  # a library that it needs is not there, or of another version
        raise InputError(
            f"Transformer Engine cannot be imported: {error}",
            where=where,
            remedy=f"pip install fxpar[te] beside torch's own cuDNN, or set {otherwise}",
        ) from error


def check_device(device: torch.device, does: str, where: str, remedy: str) -> None:
    """Refuses devices that are no GPU.

    Args:
        does: what it is asked for.
        where: the option that asks for it.

    Raises:
        InputError: the ranks run elsewhere.
    """
    if device.type != "cuda":
        reason = f"Transformer Engine {does} on GPUs, and the ranks run on {device.type}"
        raise InputError(reason, where=where, remedy=remedy)
