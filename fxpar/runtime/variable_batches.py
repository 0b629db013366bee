"""Data ranks that bring batches of other sizes: what a step computes is that of their padded concatenation.

Enters: a rank's batch and the shapes of all. Leaves: the batch with sequences as long as the longest of any rank, and
how many rows the others bring; or an error where the result would depend on how rows lie.

Ranks wait for the one with the longest sequences in any case, so that padding on the others costs no time. Rows are
never padded: a mean over them is a sum over a count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.nn import functional

from fxpar.errors import InputError
from fxpar.ir.operators import axes_of
from fxpar.ir.program import Program, ScalarType, describe, note, operands, output_layouts, output_types
from fxpar.ir.step import batch_rows, batch_symbol
from fxpar.layout.layout import Layout
from fxpar.layout.symbolic_sizes import names
from fxpar.mesh.axes import Cuts
from fxpar.ops.collectives import COERCION_OF
from fxpar.ops.vocabulary import embedding
from fxpar.rewrite.means import CLASS_LOSSES
from fxpar.rules import bind_arguments, rule_of
from fxpar.runtime import batch as calls
from fxpar.runtime.bound_batch import Compiled
from fxpar.runtime.inputs import Shapes, data_part
from fxpar.runtime.world import World
from fxpar.signatures.op_call import SIZED
from fxpar.signatures.pointwise import pointwise_labels

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
# What makes equal rows, and what makes of each row one of its own; beside what is element-wise.
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
        unproven: paths of the entries in which nobody said what stands behind the end.
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
    """A batch with the largest size of any rank in each dimension: the same shapes on all ranks.

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
    """What stands behind the end of an input and, where nobody said so, something else that may as well."""
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
    """The inputs that are targets of a loss over classes, and what this leaves out."""
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
    """Whether an operation is given the number of rows otherwise than as a size of what it makes."""
    args = [*node.args, *node.kwargs.values()]
    if node.target in SIZED.keys() | _REPEATING:
        args = [value for value in args if isinstance(value, fx.Node)]
    nodes: list[fx.Node] = []
    fx.map_arg(args, nodes.append)
    values = [note(x).type for x in nodes]
    return any(name in names((kind.value,)) for kind in values if isinstance(kind, ScalarType))


def _is_repeated(node: fx.Node, name: str, same: set[fx.Node]) -> bool:
    """Whether all rows of a value are the same: it is made without any, or of such, row by row."""
    varying = [x for x in operands(node) if any(name in names(kind.shape) for kind in output_types(x))]
    if not varying:
        return node.target in _REPEATING
    rule = rule_of(node.target)
    is_apart = node.target in _APART or (rule is not None and rule.labels is pointwise_labels and not note(node).random)
    return is_apart and same.issuperset(varying)


def _needs_equal_rows(program: Program, name: str) -> Iterator[tuple[fx.Node, str]]:
    """Operations that are right for equal numbers of rows alone, and why.

    A rank that makes rows which are all the same makes n times its own, of which it keeps as many as it has: these are
    right whatever the others have.
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
        if moved and not is_local and any(cuts):
            yield node, "moves equal parts of the rows"
        if node not in same and not is_local and not same.isdisjoint(operands(node)):
            yield node, "takes together rows that every rank makes for all"
        if not isinstance(note(node).type, ScalarType) and _takes_rows(node, name):
            yield node, "takes the number of rows as a number"
