"""The layers of a forward by structure, and repetitions in any sequence.

Enters: a forward and its storages; or tokens, how long the value of each lives, and what is computed row by row.
Leaves: runs of nodes or tokens that follow each other alike. No name of a module enters, and no number of layers. A cut
is a guess that costs nothing when it is wrong; whether parts are equal is for others to prove.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy
import torch
from torch import fx

from fxpar.cost.measure import Storages
from fxpar.ir.grad_flow import weights_of
from fxpar.ir.program import Program, ScalarType, TensorType, note, operands, output_types
from fxpar.ir.step import is_forward
from fxpar.ops.collectives import copy_to, copy_to_shared, r_to_i
from fxpar.rules.table import rule_of
from fxpar.signatures.pointwise import pointwise_labels

aten = torch.ops.aten

_LEAST = 4  # operations of a layer: query, key and value of one attention are no layers


def layers(program: Program, storages: Storages) -> list[list[fx.Node]]:
    """Returns the layers in order, cut where fewest bytes live.

    Args:
        program: a step, of which the forward is read, or a forward.
        storages: of the forward.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and is_forward(node)]
    position = {node: i for i, node in enumerate(nodes)}
    main = _main(program, nodes)
    ids: dict[str, int] = {}
    tokens = [ids.setdefault(_token(node), len(ids)) for node in main]
    until, sizes = _lives(main, storages)
    layers = []
    for start, stop in parts(tokens, until, sizes=sizes, least=_LEAST):
        first = position[main[start - 1]] + 1 if start else position[main[0]]
        layers.append(nodes[first : position[main[stop - 1]] + 1])
    return layers


def _main(program: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns what inputs and parameters make: masks and rotary tables are in the layer that reads them first."""
    owned = {program.node(p.node) for p in program.parameters}
    trained = {program.node(p.node) for p in program.parameters if p.kind == "parameter"}
    weights = weights_of(program.graph, owned)
    reached = set(trained)
    computed = []
    for node in nodes:
        if any(read in reached for read in operands(node)):
            reached.add(node)
            if node not in weights and all(kind.is_float for kind in output_types(node)):
                computed.append(node)
    return computed


def _token(node: fx.Node) -> str:
    """Returns an operation without its operands."""
    # Operands have other names in each layer, and would make all tokens different.
    args = fx.node.map_arg((node.args, node.kwargs), lambda operand: "%")
    kind = note(node).type
    types = str(kind) if isinstance(kind, TensorType) else " ".join(map(str, output_types(node)))
    return f"{node.target} {args} {types}"


def _lives(main: Sequence[fx.Node], storages: Storages) -> tuple[list[int], list[int]]:
    """Returns of each node the last one that reads a storage that it makes, and the bytes of what it makes."""
    place = {node: i for i, node in enumerate(main)}
    maker: dict[int, int] = {}
    until, sizes = list(range(len(main))), [0] * len(main)
    for i, node in enumerate(main):
        last = max((place[user] for user in node.users if user in place), default=i)
        for storage in storages.of.get(node.name, ()):
            if storage not in maker:
                maker[storage] = i
                sizes[i] += storages.bytes[storage]
            until[maker[storage]] = max(until[maker[storage]], last)
    # A cut in front of a getitem would part a tuple from its elements.
    return [-1 if node.target is operator.getitem else until[i] for i, node in enumerate(main)], sizes


# ---------------------------------------------------------------------- repetitions in a sequence


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
        inside: of each token whether a cut may be moved after it.
        near: of each token the last one that reads its value, and that one kernel can compute with it; or itself.
    """

    inside: Sequence[bool]
    near: Sequence[int]

    def split(self, cut: int) -> int:
        """Returns how many values are made in front of a cut and read again after it."""
        begin = cut
        while begin and self.inside[begin - 1]:
            begin -= 1
        # A run also reads what stands in front of it, a product or a sum.
        return sum(last >= cut for last in self.near[max(begin - 1, 0) : cut])


def longest(tokens: Sequence[int], least: int = 1) -> Repetition | None:
    """Returns the repetition that covers most, of these that of the smallest period, of these the first.

    Args:
        tokens: any numbers; equal ones are alike.
        least: the shortest period.

    Returns:
        None where nothing is repeated without a gap.
    """
    sequence = numpy.asarray(tokens, dtype=numpy.int64)
    best: Repetition | None = None
    # Every period is tried, each by comparisons of whole arrays: half a second for 6000 nodes.
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
    """Returns start and stop of each part that follows or is followed by one like it, in order.

    The cuts between them are where least lives that was made since the repetition started, the first of these; one
    part may be lost to that. What is repeated inside of a part is cut as well where no more live of those
    made in the part, and so is what it leaves of the part: of five equal layers and another one, twice, come ten parts
    and two.

    Args:
        until: for each token the last one that reads its value, or itself; its complement (`~`) where the token stays
            with the one before.
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
    """Returns numbers of the tokens from `start` to `stop` alone; what lives longer lives up to the end."""
    shifted = (max(min(_last(last), stop) - start, 0) for last in until[start:stop])
    return [~new if last < 0 else new for new, last in zip(shifted, until[start:stop], strict=True)]


def _last(until: int) -> int:
    """Returns the last token that reads a value, whether or not its own stays with the one before."""
    return until if until >= 0 else ~until


def _cut(repeat: Repetition, until: Sequence[int], sizes: Sequence[int], origin: int) -> tuple[int, int, int] | None:
    """Returns how much made from `origin` on lives at the cuts, where the first part starts, and the count."""
    period, most = repeat.period, (repeat.stop - repeat.start) // repeat.period
    change = [0] * (repeat.stop - origin + 2)
    for i in range(origin, repeat.stop):
        if _last(until[i]) > i:
            change[i + 1 - origin] += sizes[i]
            change[min(_last(until[i]), repeat.stop) + 1 - origin] -= sizes[i]
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
    """Returns the parts of one period, without gaps: what is repeated in it, and what is not."""
    inner, at = [], 0
    for begin, end in parts(tokens, until, sizes=sizes, least=least, limit=limit):
        inner += [(at, begin)] if begin > at else []
        inner.append((begin, end))
        at = end
    return [*inner, (at, len(tokens))] if at < len(tokens) else inner


def behind_rows(
    spans: Sequence[tuple[int, int]], tokens: Sequence[int], until: Sequence[int], rows: Rows
) -> list[tuple[int, int]]:
    """Returns parts whose cuts are moved on in their runs of operations on rows.

    Where least lives may be in such a run, as between a residual connection and the norm that reads it. Two kernels
    compute it then, of which one reads again what the other has written. Cuts are moved to where fewest values are
    read again, if these are fewer, and to the first of these places; what else lives there is written in any case, for
    a product or a collective to read it. Parts that touch are moved by one distance, or not at all: each loses in
    front what it gains at the back, so that equal ones stay equal and no part is lost.

    Args:
        spans: parts in order.
        until: as for `parts`.
    """
    moved: list[tuple[int, int]] = []
    free = len(tokens)  # where what comes after begins
    for chain in reversed(_chains(spans)):
        by = _distance([start for start, _ in chain] + [chain[-1][1]], tokens, until, rows, free)
        moved = [(start + by, stop + by) for start, stop in chain] + moved
        free = moved[0][0]
    return moved


def behind_gathers(
    spans: Sequence[tuple[int, int]], tokens: Sequence[int], gathers: Sequence[bool]
) -> list[tuple[int, int]]:
    """Returns parts that end with a gather where they began with it: gradients of their weights can hide it.

    Args:
        spans: parts in order; those that touch are moved together, or not at all.
        gathers: which tokens are gathers.
    """
    moved: list[tuple[int, int]] = []
    free = len(tokens)
    for chain in reversed(_chains(spans)):
        cuts = [start for start, _ in chain] + [chain[-1][1]]
        by = int(cuts[-1] < free and all(gathers[cut] and tokens[cut] == tokens[cuts[0]] for cut in cuts))
        moved = [(start + by, stop + by) for start, stop in chain] + moved
        free = moved[0][0]
    return moved


def _chains(spans: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Returns parts that touch."""
    chains: list[list[tuple[int, int]]] = []
    for part in spans:
        if chains and chains[-1][-1][1] == part[0]:
            chains[-1].append(part)
        else:
            chains.append([part])
    return chains


def _distance(cuts: Sequence[int], tokens: Sequence[int], until: Sequence[int], rows: Rows, free: int) -> int:
    """Returns by how much all cuts are moved; the tokens on the way are those after any of them."""
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


# What stands between a product or a collective and the next one, and which of it one kernel can compute with what it
# reads: a cut between the two would have a value read again.


_NORMS = frozenset(
    (
        aten.layer_norm.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.rms_norm.default,
    )
)
_REDUCTIONS = frozenset(
    (
        aten.amax.default,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.var.correction,
        aten.var_mean.correction,
    )
)
# A rank has their operands as they are.
_IDENTITIES = (copy_to, r_to_i, copy_to_shared)


class _RowRole(Enum):
    """What a node is to the run in which it stands."""

    ROW = "computed row by row"
    SAME = "its operand in other words, or a part of a tuple"
    BESIDE = "a sum over rows: no kernel of rows has it, and nothing of the run waits for it"
    END = "all else"


def row_runs(nodes: Sequence[fx.Node]) -> Rows:
    """Returns where the runs are, and what of each one is read in it.

    An operation on rows is one on each element, a norm, or a reduction along the last dimension; none that draws, whose
    bits are kept with what drew them. A run ends at everything else but views and sums over rows.
    """
    kinds = [_kind(node) for node in nodes]
    position = {node: i for i, node in enumerate(nodes)}
    ends, end = [0] * len(nodes), len(nodes)
    for i in reversed(range(len(nodes))):
        ends[i] = end  # of the run in which what reads the node is near
        end = i if kinds[i] is _RowRole.END else end
    near = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        if kinds[i] is not _RowRole.ROW:
            continue
        for read in node.all_input_nodes:
            maker = _made(read, position, kinds)
            if maker is not None and i < ends[maker]:
                near[maker] = i
    return Rows(tuple(kind is not _RowRole.END for kind in kinds), tuple(near))


def _made(value: fx.Node, position: dict[fx.Node, int], kinds: Sequence[_RowRole]) -> int | None:
    """Returns position of the node that makes a value, which may be a view of it; None of what is made elsewhere."""
    while value in position and kinds[position[value]] is _RowRole.SAME and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return position.get(value)


def _kind(node: fx.Node) -> _RowRole:
    noted, target = note(node), node.target
    if isinstance(noted.type, ScalarType):
        return _RowRole.SAME
    if noted.random or noted.uncaptured:
        return _RowRole.END
    is_view = isinstance(target, torch._ops.OpOverload) and target.is_view
    if is_view or target is operator.getitem or target in _IDENTITIES:
        return _RowRole.SAME
    if target in _REDUCTIONS:
        return _RowRole.ROW if _is_along_rows(node) else _RowRole.BESIDE
    rule = rule_of(target)
    is_pointwise = rule is not None and rule.labels is pointwise_labels
    return _RowRole.ROW if is_pointwise or target in _NORMS else _RowRole.END


def _is_along_rows(node: fx.Node) -> bool:
    """Returns whether a reduction is one along the last dimension."""
    dims = node.args[1] if len(node.args) > 1 else None
    rank = len(output_types(node.all_input_nodes[0])[0].shape)
    return isinstance(dims, (list, tuple)) and len(dims) == 1 and int(dims[0]) % max(rank, 1) == rank - 1  # type: ignore[arg-type]
