"""What the ranks of a ring send.

Enters: a collective's name and the number of ranks. Leaves: bytes a rank, and seconds. By a ring of n ranks, each
sends (n - 1)/n of the whole value's bytes in a round; the whole value is what an all-gather yields and what a reduction
takes in (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009).
"""

from __future__ import annotations

from collections.abc import Mapping

from fxpar.plan.cost import Cost

# An all-reduce is a reduce-scatter and an all-gather.
ROUNDS: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def sent(op: str, n: int) -> float:
    """Bytes that each of n ranks sends for each byte of the whole value."""
    return ROUNDS[op] * (n - 1) / n


def collective_seconds(op: str, n: int, size: float, cost: Cost, latency: float) -> float:
    """Seconds of a collective whose every round starts anew.

    Args:
        size: bytes of the whole value.
        latency: seconds before a round's first byte.
    """
    return ROUNDS[op] * (latency + (n - 1) / n * size / cost.bandwidth)
