"""Batches of all ranks: whether they are the same, and how those of data ranks with other sizes are made to fit.

Enters: the batch of each call and what is known of it on the host (entries, types, sizes, mode). Leaves: nothing where
they are equal on all ranks, else an error that names the entry and the ranks; and a batch with sequences as long as the
longest of any rank, with the rows of all, or an error where the result would depend on how rows lie.

What the host knows is compared before the program runs, on a group of the hosts: programs of other sizes would wait for
each other forever. Values are compared by a checksum that the device computes. On CPUs that is there at once; on other
devices nobody waits for it: the loss of the call is NaN where values differ, and the next call raises the error.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.nn import functional

from fxpar.errors import InputError
from fxpar.ir.operators import axes_of
from fxpar.ir.program import Program, ScalarType, describe, note, operands, output_layouts, output_types
from fxpar.ir.step import batch_rows, batch_symbol
from fxpar.layout.layout import Layout
from fxpar.layout.symbolic_sizes import names
from fxpar.mesh.axes import DENSE, PURPOSES, Cuts
from fxpar.mesh.mesh import Mesh
from fxpar.ops.collectives import COERCION_OF
from fxpar.ops.process_group import Group, process_group
from fxpar.ops.vocabulary import embedding
from fxpar.rewrite.means import CLASS_LOSSES
from fxpar.rules import bind_arguments, rule_of
from fxpar.runtime import batch as calls
from fxpar.runtime.alarm import Met
from fxpar.runtime.bound_batch import Compiled
from fxpar.runtime.world import World
from fxpar.signatures.op_call import SIZED
from fxpar.signatures.pointwise import pointwise_labels

_REMEDY = "pass the same batch on all ranks"
_SHARED = "pass the same on all ranks: it has no rows that they could share out"
_OWN = "pass the same batch on all ranks of one data rank"
# Odd numbers without structure, as splitmix64 mixes with.
_MIX, _STEP = -0x40A7B892E31B1A47, -0x61C8864680B583EB
# Words that are mixed at a time, so that a batch of images needs no memory to speak of.
_CHUNK = 1 << 20
# Sizes for which the factors of the words' places are kept.
_MOST_KEPT = 8
# Calls in training, from the first on, in which data ranks look whether all of them bring the same rows. A loader that
# knows of no ranks shows it at once; after one call with other rows nobody looks any more, so that steps pay nothing.
_LOOKS = 2


# By data rank, the shapes of the tensors of its batch in their order.
Shapes = list[list[tuple[int, ...]]]


class Inputs:
    """Compares the calls of one module over the ranks, which are several."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._devices, self._everyone = _alike(world), _all(dist.group.WORLD)
        places = world.coordinates.items()
        self._party = " ".join(f"{axis} {index}" for axis, index in places if PURPOSES[axis].cuts is Cuts.BATCH)
        # By rank, which part of the batch it is given.
        self._parts = [data_part(world.mesh, rank) for rank in range(world.size)]
        self._steps: dict[int, Tensor] = {}
        self._looks = _LOOKS if self._party else 0
        # What the device has not said yet: when it has, into which memory, and about which batch.
        self._pending: tuple[torch.cuda.Event, Tensor, Any, Any] | None = None

    def compare(
        self, batch: Any, facts: Mapping[str, str], shared: Collection[str] = ()
    ) -> tuple[Any, Tensor | None, Shapes | None]:
        """Returns the batch on the device, whether its values are the same on all ranks, where that is not known yet,
        and the shapes of all data ranks' batches, where they differ.

        Args:
            facts: what the host knows of the call, but the sizes of the batch.
            shared: paths of entries that all data ranks must have alike: they have no rows.

        Raises:
            InputError: this batch differs, or the values of the one before did.
        """
        self._settle()
        device, passed = self._world.device, batch
        batch = pytree.tree_map_only(Tensor, lambda value: value.to(device), batch)
        shapes = [list(value.shape) for _, value in calls.leaves(batch) if isinstance(value, Tensor)]
        known = [_digest(facts), _digest(shapes)]
        values = None if self._devices is None else self.checksum(batch)
        whole = {path: value for path, value in calls.leaves(batch) if path in shared} if self._party else {}
        alike = self.checksum(whole) if whole else None
        is_one = self._devices is not None and self._devices.size == self._world.size
        if device.type == "cpu" and values is not None:
            # Of ranks that are given other batches, all must know where some differ.
            known.append(int(values if is_one else self._odd(values)))
            values = None
        if device.type == "cpu" and alike is not None:
            known.append(int(alike))
            alike = None
        looks = self._looks > 0 and not facts["the mode"].startswith("evaluation")
        rows = self._rows(passed, whole.keys()) if looks else 0
        met, others, n = self._meet("compares the batch", [*known, rows]), None, len(known)
        if looks:
            self._warn_of_equal_rows(met.largest[n] == met.smallest[n])
        most, least = met.largest[:n], met.smallest[:n]
        if most != least:
            if self._party and most[0] == least[0] and most[2:] == least[2:]:
                others = self._shapes(shapes)
            if others is None:
                self._differs(batch, facts, whole)
        words = [] if values is None else [values if is_one else self._odd(values)]
        words += [] if alike is None else [alike]
        if not words:
            return batch, None, others
        extremes = _extremes(torch.cat(words), self._everyone)
        host = torch.empty(extremes.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(extremes, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (event, host, batch, whole)
        return batch, extremes[0].eq(extremes[1].bitwise_not()).all(), others

    def _rows(self, batch: Any, shared: Collection[str]) -> int:
        """Returns a number that follows from the rows of a batch; one of this rank alone where the host has none."""
        rows = [value for path, value in calls.leaves(batch) if isinstance(value, Tensor) and path not in shared]
        if not rows or any(value.device.type != "cpu" for value in rows):  # nobody waits for a device
            return self._world.rank
        return _digest(calls.batch_facts(rows, values=True))

    def _warn_of_equal_rows(self, is_equal: bool) -> None:
        """Warns on rank 0 when all data ranks pass the same rows in each of the first calls."""
        self._looks = self._looks - 1 if is_equal else 0
        if is_equal and not self._looks and self._world.rank == 0:
            warnings.warn(
                "the batch: all data ranks bring the same rows, so that a step learns no more than one rank's; give "
                "each rank its own: DataLoader(dataset, batch_sampler=fxpar.BatchSampler(len(dataset), rows, model)), "
                "or fxpar.shard_batch(batch, model)",
                stacklevel=2,
            )

    def _shapes(self, shapes: list[list[int]]) -> Shapes | None:
        """Returns, by data rank, the shapes of the tensors of its batch; None where ranks of one differ."""
        mine = torch.tensor([size for shape in shapes for size in shape])
        gathered = [torch.empty_like(mine) for _ in range(self._world.size)]
        meeting = self._world.agreement.meeting
        assert meeting is not None, "there are several ranks"
        dist.all_gather(gathered, mine, group=process_group(meeting.group))
        by_part: dict[int, list[int]] = {}
        for part, sizes in zip(self._parts, (sizes.tolist() for sizes in gathered), strict=True):
            if by_part.setdefault(part, sizes) != sizes:
                return None
        split = [[by_part[part].pop(0) for _ in shape] for part in sorted(by_part) for shape in shapes]
        return [[tuple(s) for s in split[i : i + len(shapes)]] for i in range(0, len(split), len(shapes))]

    def _settle(self) -> None:
        """Raises for the call before. Its checksum lies before its program on the device, which has begun by now."""
        if self._pending is None:
            return
        event, host, batch, whole = self._pending
        self._pending = None
        event.synchronize()
        if not _is_equal(host):
            self._differs(batch, {"the call": "the call before this one"}, whole)

    def somewhere(self, is_so: bool) -> bool:
        """Returns whether something is so on any rank. A collective call of the hosts."""
        return bool(self._meet("compares what padding gives", [int(is_so)]).largest[0])

    def _meet(self, place: str, compared: Sequence[int]) -> Met:
        met = self._world.agreement.meet(place, compared)
        assert met is not None, "there are several ranks"
        return met

    def _differs(self, batch: Any, facts: Mapping[str, str], whole: Any) -> None:
        """Finds out what differs, where ranks can say it in words."""
        agree = self._world.agreement.agree
        if not self._party:
            agree({**facts, **calls.batch_facts(batch, values=True)}, _REMEDY)
        else:
            agree(facts, _REMEDY)
            agree(calls.batch_facts(whole, values=True), _SHARED)
            if self._devices is not None:
                agree(calls.batch_facts(batch, values=True), _OWN, self._party)
        raise InputError("differs between ranks", where="the batch", remedy=_REMEDY)

    def _odd(self, values: Tensor) -> Tensor:
        """Returns zero where the ranks of one batch have the same values, else this rank's number from 1 on."""
        assert self._devices is not None
        if self._world.device.type == "cpu":  # on other devices the hosts have met
            self._world.agreement.enter("compares the batch of one part")
        extremes = _extremes(values, self._devices)
        is_same = extremes[0].eq(extremes[1].bitwise_not()).all()
        return torch.where(is_same, 0, self._world.rank + 1).reshape(1)

    def checksum(self, batch: Any) -> Tensor:
        """Returns a number that follows from the bits of all tensors of a batch and from their order; i64[1]."""
        total = torch.zeros(1, dtype=torch.int64, device=self._world.device)
        for _, value in calls.leaves(batch):
            if isinstance(value, Tensor):
                for words in _words(value):
                    total = total * _MIX + self._mixed(words)
        return total

    def _mixed(self, words: Tensor) -> Tensor:
        """Returns a sum in which the place of each word counts, and each of its bits for others."""
        steps = self._steps.get(words.numel())
        if steps is None:
            steps = torch.arange(1, words.numel() + 1, device=words.device) * _STEP
            if len(self._steps) >= _MOST_KEPT:
                self._steps.clear()
            self._steps[words.numel()] = steps
        mixed = (words ^ steps) * _MIX
        mixed ^= mixed >> 29
        mixed *= _STEP
        mixed ^= mixed >> 32
        return mixed.sum()


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(value).encode()).digest()[:8], signed=True)


def data_part(mesh: Mesh, rank: int) -> int:
    """Returns which part of the batch a rank is given."""
    places, index = mesh.coordinates(rank), 0
    for axis, n in mesh.nested(DENSE).items():
        if PURPOSES[axis].cuts is Cuts.BATCH:
            index = index * n + places[axis]
    return index


def _words(value: Tensor) -> list[Tensor]:
    """Returns the bits of a tensor as numbers, by pieces; the last bytes one by one."""
    data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.storage_offset() * data.element_size() % 8:
        data = data.clone()
    data = data.view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = list(data[:whole].view(torch.int64).split(_CHUNK)) if whole else []
    return [*words, data[whole:].long()] if whole < data.numel() else words


def _extremes(values: Tensor, group: Group) -> Tensor:
    """Returns the largest value over the ranks, and the largest complement."""
    extremes = torch.stack([values, values.bitwise_not()])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=process_group(group))
    return extremes


def _is_equal(extremes: Tensor) -> bool:
    return torch.equal(extremes[0], extremes[1].bitwise_not())


def _alike(world: World) -> Group | None:
    """Returns the group of the ranks that are given the same batch; None where each has its own."""
    names = [axis for axis in world.coordinates if PURPOSES[axis].cuts is not Cuts.BATCH]
    names += ["pp"] if "pp" in world.groups else []
    return world.groups["-".join(names)] if names else None


def _all(group: Any) -> Group:
    return Group(group.group_name, group.size())


# Data ranks with batches of other sizes: what a step computes is that of their padded concatenation. Ranks wait for the
# one with the longest sequences in any case, so that padding on the others costs no time. Rows are never padded: a mean
# over them is a sum over a count.

aten = torch.ops.aten

# What leads from an input to the targets of a loss.
_MOVING = frozenset(
    {
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.alias.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.contiguous.default,
        aten.flatten.using_ints,
        aten.pad.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.to.dtype,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
# What makes equal rows, and what makes of each row one of its own; besides what is element-wise.
_REPEATING = frozenset(
    {
        aten.expand.default,
        aten.full.default,
        aten.new_full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.ones.default,
        aten.zeros.default,
    }
)
_APART = frozenset({aten.embedding.default, embedding, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default})


@dataclass(frozen=True)
class FittedBatch:
    """A rank's batch, made to fit those of the others.

    Attributes:
        batch: its sequences are as long as the longest of all.
        unproven: paths of the entries in which nobody said what stands after the end.
        fills: the batch with other values there; None where all is said.
        rows: of each data rank, where they differ.
        places: the rows of all, and those before this rank's, i64 scalars; where they differ.
    """

    batch: Any
    unproven: frozenset[str]
    fills: Any
    rows: tuple[int, ...]
    places: tuple[Tensor, ...]


def largest(batch: Any, shapes: Shapes) -> Any:
    """Returns a batch with the largest size of any rank in each dimension: the same shapes on all ranks.

    What is added repeats the last of what is there.
    """
    sizes = iter([tuple(map(max, *of_ranks)) for of_ranks in zip(*shapes, strict=True)])

    def grown(value: Tensor) -> Tensor:
        for dim, size in enumerate(next(sizes)):
            value = value.index_select(dim, torch.arange(size, device=value.device).clamp(max=value.shape[dim] - 1))
        return value

    return pytree.tree_map_only(Tensor, grown, batch)


def fit_batch(compiled: Compiled, batch: Any, shapes: Shapes, world: World) -> FittedBatch:
    """Makes a batch fit those of the other data ranks.

    Args:
        compiled: the program for the largest sizes.
        shapes: of the tensors of each data rank's batch.

    Raises:
        InputError: sizes differ that may not; names the entry, or what the program does with rows.
    """
    program = compiled.program
    name = batch_symbol(program)
    rows_dim = batch_rows(program, next(s.size for s in program.symbols if s.name == name))
    entries = {entry.path: entry for entry in calls.user_inputs(program)}
    values, fills = dict[int, Tensor](), dict[int, Tensor]()
    rows, unproven = (), set[str]()
    tensors = [(path, value) for path, value in calls.leaves(batch) if isinstance(value, Tensor)]
    _check_alike(program, [path for path, _ in tensors], shapes)
    for index, (path, value) in enumerate(tensors):
        if path not in entries:
            continue
        sizes = list(zip(*(shape[index] for shape in shapes), strict=True))
        lengths = dict[int, int]()
        for dim, of_ranks in enumerate(sizes):
            if dim == rows_dim.get(path):
                rows = of_ranks
            elif len(set(of_ranks)) > 1:
                lengths[dim] = max(of_ranks)
        if lengths:
            fill, other = _filling(compiled, path, value.dtype)
            values[index] = _padded(value, lengths, fill)
            if other is not None and path not in compiled.padded:
                unproven.add(path)
                fills[index] = _padded(value, lengths, other)
    longer = _with(batch, values)
    others = _with(longer, fills) if fills else None
    if len(set(rows)) < 2:
        return FittedBatch(longer, frozenset(unproven), others, (), ())
    _check_rows(program, name, rows)
    before = sum(rows[: data_part(world.mesh, world.rank)])
    places = tuple(torch.tensor(n, device=world.device) for n in (sum(rows), before))
    return FittedBatch(longer, frozenset(unproven), others, rows, places)


def _check_alike(program: Program, paths: Sequence[str], shapes: Shapes) -> None:
    """Refuses batches in which sizes differ that are one size in the program; the same on all ranks.

    Raises:
        InputError: names the entry and the data rank.
    """
    kinds = {entry.path: entry.type for entry in calls.user_inputs(program)}
    for rank, of_rank in enumerate(shapes):
        known = dict[Any, tuple[int, str]]()
        for path, shape in zip(paths, of_rank, strict=True):
            for dim, size in enumerate(kinds[path].shape if path in kinds else ()):
                # A number is one size where it is in one dimension, as of symbols (`Notes.declare`).
                key = (dim, size) if isinstance(size, int) else size
                first, place = known.setdefault(key, (shape[dim], f"{path} dimension {dim}"))
                if first != shape[dim]:
                    raise InputError(
                        f"has size {shape[dim]} in dimension {dim} on data rank {rank}, but {place} has {first}; the "
                        "example had equal sizes",
                        where=f"batch entry {path}",
                        remedy="pass equal sizes, or parallelize with an example in which they differ",
                    )


def _with(batch: Any, values: dict[int, Tensor]) -> Any:
    index = count()
    return pytree.tree_map_only(Tensor, lambda value: values.get(next(index), value), batch)


# ---------------------------------------------------------------------- lengths


def _padded(value: Tensor, lengths: dict[int, int], fill: float | bool) -> Tensor:
    ends = [(0, lengths.get(dim, size) - size) for dim, size in enumerate(value.shape)]
    pairs = [number for pair in reversed(ends) for number in pair]
    return functional.pad(value, pairs, value=fill)


def _filling(compiled: Compiled, path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns what stands after the end of an input and, where nobody said so, something else that may as well."""
    said = compiled.program.plan.pad_values
    if path in said:
        return said[path], None
    ignored = ignored_targets(compiled.captured.program).get(path)
    if ignored is not None:
        return ignored, None
    last = path.rpartition(".")[2]
    if last.endswith("key_padding_mask"):  # of torch.nn: what is True, or -inf, does not count
        return (float("-inf") if dtype.is_floating_point else True), None
    return (0, None) if last.endswith("attention_mask") else (0, 1)


def ignored_targets(program: Program) -> dict[str, int]:
    """Returns the inputs that are targets of a loss over classes, and what this leaves out."""
    paths, ignored = {entry.node: entry.path for entry in program.inputs}, dict[str, int]()
    for node in program.graph.nodes:
        if node.target not in CLASS_LOSSES:
            continue
        source = operands(node)[1]
        while source.target in _MOVING:
            source = operands(source)[0]
        if source.name in paths:
            ignored[paths[source.name]] = bind_arguments(node).get("ignore_index", -100)
    return ignored


# ---------------------------------------------------------------------- rows


def _check_rows(program: Program, name: str, rows: tuple[int, ...]) -> None:
    """Refuses programs that are right for equal numbers of rows alone.

    Raises:
        InputError: names the operation.
    """
    for node, reason in _needs_equal_rows(program, name):
        raise InputError(
            f"{reason}, and the data ranks bring {', '.join(map(str, rows))}",
            where=describe(node),
            remedy="pass as many rows on each data rank",
        )


def _takes_rows(node: fx.Node, name: str) -> bool:
    """Returns whether an operation is given the number of rows otherwise than as a size of what it makes."""
    args = [*node.args, *node.kwargs.values()]
    if node.target in SIZED.keys() | _REPEATING:
        args = [value for value in args if isinstance(value, fx.Node)]
    nodes: list[fx.Node] = []
    fx.map_arg(args, nodes.append)
    values = [note(x).type for x in nodes]
    return any(name in names((kind.value,)) for kind in values if isinstance(kind, ScalarType))


def _is_repeated(node: fx.Node, name: str, same: set[fx.Node]) -> bool:
    """Returns whether all rows of a value are the same: it is made without any, or of such, row by row."""
    varying = [x for x in operands(node) if any(name in names(kind.shape) for kind in output_types(x))]
    if not varying:
        return node.target in _REPEATING
    rule = rule_of(node.target)
    is_apart = node.target in _APART or (rule is not None and rule.labels is pointwise_labels and not note(node).random)
    return is_apart and same.issuperset(varying)


def _needs_equal_rows(program: Program, name: str) -> Iterator[tuple[fx.Node, str]]:
    """Yields operations that are right for equal numbers of rows alone, and why.

    A rank that makes rows which are all the same makes n times its own, of which it keeps as many as it has: these are
    right whatever the others have. A parameter that data ranks share out has no rows.
    """
    axes, same = program.plan.axes_for(Cuts.BATCH), set[fx.Node]()

    def is_cut(layout: Layout) -> bool:
        return any(axis in axes and placement.is_shard for axis, placement in layout)

    for node in program.graph.nodes:
        if node.op == "output":
            continue
        pairs = zip(output_types(node), output_layouts(node), strict=True)
        if any(name in names(kind.shape) and not is_cut(layout) for kind, layout in pairs):
            if not _is_repeated(node, name, same):
                yield node, "every rank holds the rows of all"
            same.add(node)
        row = COERCION_OF.get(node.target)
        moved = row is not None and "S" in (row.source, row.target) and set(axes_of(node)) & axes.keys()
        is_local = row is not None and not row.forward + row.backward and same.issuperset(operands(node))
        cuts = (is_cut(layout) for neighbour in (node, *operands(node)) for layout in output_layouts(neighbour))
        if moved and not is_local and not note(node).shard and any(cuts):
            yield node, "moves equal parts of the rows"
        if node not in same and not is_local and not same.isdisjoint(operands(node)):
            yield node, "takes together rows that every rank makes for all"
        if not isinstance(note(node).type, ScalarType) and _takes_rows(node, name):
            yield node, "takes the number of rows as a number"
