"""Collectives of a program by layer."""

from __future__ import annotations

from collections import Counter

from fxpar.cost.communication import collectives
from fxpar.ir.program import Program, note


def layer_of(fqn: str) -> str:
    """A module's name up to the first number: `model.layers.0`; empty where it has none."""
    parts = fqn.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def by_layer(program: Program) -> dict[str, dict[tuple[str, str], int]]:
    """Numbers of collectives of activations by operation and phase, for each layer; the key of the rest is empty.

    A loss and a table have their own, embeddings, heads and norms outside of the layers too.
    """
    found: dict[str, Counter[tuple[str, str]]] = {}
    for one in collectives(program):
        if one.phase != "parameter":
            found.setdefault(layer_of(note(program.node(one.node)).fqn), Counter())[one.op, one.phase] += 1
    return {layer: dict(counts) for layer, counts in found.items()}
