"""Repetitions in a sequence: where equal parts follow each other.

Enters: a sequence of tokens, how long the value of each lives, and what is computed row by row. Leaves: the parts. A
cut is a guess that costs nothing when it is wrong; whether parts are equal is for others to prove.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy


@dataclass(frozen=True)
class Repetition:
    """Tokens from `start` to `stop`, each of which is equal to the one a period later, where there is one."""

    start: int
    stop: int
    period: int


@dataclass(frozen=True)
class Rows:
    """Which tokens are operations on rows, and what a cut between them costs.

    Attributes:
        inside: of each token whether a cut may be moved behind it.
        near: of each token the last one that reads its value, and that one kernel can compute with it; or itself.
    """

    inside: Sequence[bool]
    near: Sequence[int]

    def split(self, cut: int) -> int:
        """How many values are made in front of a cut and read again behind it."""
        begin = cut
        while begin and self.inside[begin - 1]:
            begin -= 1
        # A run also reads what stands in front of it, a product or a sum.
        return sum(last >= cut for last in self.near[max(begin - 1, 0) : cut])


def longest(tokens: Sequence[int], least: int = 1) -> Repetition | None:
    """The repetition that covers most, of these that of the smallest period, of these the first.

    Args:
        tokens: any numbers; equal ones are alike.
        least: the shortest period.

    Returns:
        None where nothing is repeated without a gap.
    """
    sequence = numpy.asarray(tokens, dtype=numpy.int64)
    best: Repetition | None = None
    for period in range(max(1, least), len(sequence) // 2 + 1):
        alike = numpy.concatenate([[False], sequence[:-period] == sequence[period:], [False]])
        edges = numpy.flatnonzero(alike[1:] != alike[:-1])
        if not len(edges):
            continue
        lengths = edges[1::2] - edges[::2]
        where = int(numpy.argmax(lengths))
        run = int(lengths[where])
        if run >= period and (best is None or run + period > best.stop - best.start):
            start = int(edges[2 * where])
            best = Repetition(start, start + run + period, period)
    return best


def parts(
    tokens: Sequence[int],
    until: Sequence[int],
    *,
    sizes: Sequence[int] | None = None,
    least: int = 1,
    limit: int | None = None,
) -> list[tuple[int, int]]:
    """Start and stop of each part that follows or is followed by one like it, in order.

    The cuts between them are where least lives that was made since the repetition started, the first of these; one
    part may be lost to that. What is repeated inside of a part is cut as well where no more live of those
    made in the part, and so is what it leaves of the part: of five equal layers and another one, twice, come ten parts
    and two.

    Args:
        until: for each token the last one that reads its value, or itself; -1 where it stays with the one before.
        sizes: of the tokens' values; by default values are counted.
        least: of how many tokens a part is that is repeated.
        limit: inside of a part, the most of it that lives at a cut.
    """
    sizes = [1] * len(tokens) if sizes is None else sizes
    repeat = longest(tokens, least)
    if repeat is None:
        return []
    best = _cut(repeat, until, sizes, repeat.start if limit is None else 0)
    if best is None or (limit is not None and best[0] > limit):
        return []
    price, first, count = best
    period, last = repeat.period, first + count * repeat.period
    inside = slice(first, first + period)
    inner = _inside(tokens[inside], _shifted(until, first, first + period), sizes[inside], least, price)
    repeated = [(first + i * period + start, first + i * period + stop) for i in range(count) for start, stop in inner]
    before = parts(tokens[:first], _shifted(until, 0, first), sizes=sizes[:first], least=least, limit=limit)
    after = parts(tokens[last:], _shifted(until, last, len(until)), sizes=sizes[last:], least=least, limit=limit)
    return [*before, *repeated, *((start + last, stop + last) for start, stop in after)]


def _shifted(until: Sequence[int], start: int, stop: int) -> list[int]:
    """As numbers of the tokens from `start` to `stop` alone; what lives longer lives up to the end."""
    return [-1 if last < 0 else min(last, stop) - start for last in until[start:stop]]


def _cut(repeat: Repetition, until: Sequence[int], sizes: Sequence[int], origin: int) -> tuple[int, int, int] | None:
    """How much made from `origin` on lives at most at the cuts, where the first part starts, and how many there are."""
    period, most = repeat.period, (repeat.stop - repeat.start) // repeat.period
    change = [0] * (repeat.stop - origin + 2)
    for i in range(origin, repeat.stop):
        if until[i] > i:
            change[i + 1 - origin] += sizes[i]
            change[min(until[i], repeat.stop) + 1 - origin] -= sizes[i]
    living = list(itertools.accumulate(change))
    best: tuple[int, int, int] | None = None
    for first in range(repeat.start, repeat.start + period):
        count = (repeat.stop - first) // period
        cuts = [first + i * period for i in range(count + 1)]
        if count < max(2, most - 1) or any(cut < len(until) and until[cut] < 0 for cut in cuts):
            continue
        price = max(living[cut - origin] for cut in (cuts[:-1] if origin < repeat.start else cuts[1:-1]))
        if best is None or price < best[0]:
            best = price, first, count
    return best


def _inside(
    tokens: Sequence[int], until: Sequence[int], sizes: Sequence[int], least: int, limit: int
) -> list[tuple[int, int]]:
    """The parts of one period, without gaps: what is repeated in it, and what is not."""
    inner, at = [], 0
    for begin, end in parts(tokens, until, sizes=sizes, least=least, limit=limit):
        inner += [(at, begin)] if begin > at else []
        inner.append((begin, end))
        at = end
    return [*inner, (at, len(tokens))] if at < len(tokens) else inner


def behind_rows(
    spans: Sequence[tuple[int, int]], tokens: Sequence[int], until: Sequence[int], rows: Rows
) -> list[tuple[int, int]]:
    """Parts whose cuts are moved on in their runs of operations on rows.

    Where least lives may be in such a run, as between a residual connection and the norm that reads it. Two kernels
    compute it then, of which one reads again what the other has written. Cuts are moved to where fewest values are
    read again, if these are fewer, and to the first of these places; what else lives there is written in any case, for
    a product or a collective to read it. Parts that touch are moved by one distance, or not at all: each loses in
    front what it gains behind, so that equal ones stay equal and no part is lost.

    Args:
        spans: parts in order.
        until: as for `parts`.
    """
    moved: list[tuple[int, int]] = []
    free = len(tokens)  # where what stands behind begins
    for chain in reversed(_chains(spans)):
        by = _distance([start for start, _ in chain] + [chain[-1][1]], tokens, until, rows, free)
        moved = [(start + by, stop + by) for start, stop in chain] + moved
        free = moved[0][0]
    return moved


def _chains(spans: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Parts that touch."""
    chains: list[list[tuple[int, int]]] = []
    for part in spans:
        if chains and chains[-1][-1][1] == part[0]:
            chains[-1].append(part)
        else:
            chains.append([part])
    return chains


def _distance(cuts: Sequence[int], tokens: Sequence[int], until: Sequence[int], rows: Rows, free: int) -> int:
    """By how much all cuts are moved; the tokens on the way are those behind any of them."""
    inner = cuts[1:-1]
    if not inner:
        return 0
    best, least = 0, max(map(rows.split, inner))
    for by in range(1, len(tokens)):
        passed, at = tokens[cuts[0] + by - 1], [cut + by for cut in cuts]
        is_alike = at[-1] <= free and all(tokens[cut - 1] == passed for cut in at)
        if not least or not is_alike or not all(rows.inside[cut - 1] for cut in at):
            break
        split = max(rows.split(cut + by) for cut in inner)
        if split < least and not any(cut < len(until) and until[cut] < 0 for cut in at):
            best, least = by, split
    return best
