"""One sample call on the ranks of a mesh: what they compute, and whether that is the call's result and gradient.

Enters: an operator, concrete arguments, layouts. Leaves: "" where the ranks together hold the right values and the
right gradients, else what is wrong. Each rank makes the call with the literals that its own program would have.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxpar.ir.operators import GraphOperator
from fxpar.layout.layout import Layout, Placement
from fxpar.ops.counter import IndexCut
from fxpar.rules import key_of
from fxpar.signatures.op_call import RESAMPLED
from fxpar.signatures.pointwise import SHAPED, VALUED
from fxpar.testing.composite import KERNELS
from fxpar.testing.ranks import (
    Sample,
    close,
    divides,
    gradient_of,
    is_continuous,
    local_positions,
    padding,
    place,
    place_gradient,
    random_like,
    tensors_of,
    value_of,
    with_tensors,
)

# Brute force over several axes: what the ranks of a mesh hold of a value and of its gradient under a layout.

# A rank's coordinates, in the order of the mesh; a part for each rank.
Coordinates = tuple[int, ...]
Parts = Mapping[Coordinates, torch.Tensor]
_Entries = Sequence[tuple[str, Placement]]
_Place = Callable[[torch.Tensor, Placement, int, torch.Generator], list[torch.Tensor]]
_Join = Callable[[Sequence[torch.Tensor], Placement], torch.Tensor | None]

# Kinds of placement under which all ranks of an axis hold the same: of values, and of their gradients.
_SAME, _SAME_GRADIENT = "IR", "IP"
# Kinds under which their values, or their gradients, are summands.
_SUMS = "PR"


def coordinates(axes: Mapping[str, int]) -> list[Coordinates]:
    """Returns the coordinates of all ranks."""
    return list(itertools.product(*(range(n) for n in axes.values())))


def positions(layout: Layout, dim: int, size: int, axes: Mapping[str, int], rank: Coordinates) -> list[int]:
    """Returns the positions of a dimension that a rank holds, in the order in which it holds them."""
    place_of, local = dict(zip(axes, rank, strict=True)), list(range(size))
    for axis, placement in layout:
        if placement.is_shard and placement.dim == dim:
            local = [local[position] for position in local_positions(placement, axes[axis], place_of[axis])]
    return local


def local_shape(layout: Layout, shape: Sequence[int], axes: Mapping[str, int]) -> list[int]:
    """Returns shape of a rank's part, padding included."""
    seen = list(shape)
    for axis, placement in layout:
        if placement.is_shard:
            n = axes[axis]
            seen[placement.dim] = len(local_positions(placement, n, 0)) + padding(placement, n, 0)
    return seen


def fits(layout: Layout, shape: Sequence[int], axes: Mapping[str, int]) -> bool:
    """Returns whether each axis cuts what outer ones leave into equal blocks; padding is of one axis alone."""
    cuts, seen = [placement for _, placement in layout if placement.is_shard], list(shape)
    for index, (axis, placement) in enumerate(layout):
        if not divides(placement, seen, axes[axis]):
            return False
        seen = local_shape(Layout(tuple(layout)[: index + 1]), shape, axes)
    return all(not cut.is_padded or sum(other.dim == cut.dim for other in cuts) == 1 for cut in cuts)


def spread(x: torch.Tensor, layout: Layout, axes: Mapping[str, int], generator: torch.Generator) -> Parts:
    """Returns what each rank holds of the value x."""
    return _spread(x, layout, axes, generator, place, _SAME)


def spread_gradient(g: torch.Tensor, layout: Layout, axes: Mapping[str, int], generator: torch.Generator) -> Parts:
    """Returns what each rank holds of the gradient of a value so laid out."""
    return _spread(g, layout, axes, generator, place_gradient, _SAME_GRADIENT)


def holds(parts: Parts, layout: Layout, axes: Mapping[str, int], x: torch.Tensor) -> bool:
    """Returns whether the ranks' parts are the value x so laid out."""
    whole = _joined(_listed(parts, axes, layout), list(layout), axes, value_of, _SAME)
    return whole is not None and close(whole, x)


def holds_gradient(parts: Parts, layout: Layout, axes: Mapping[str, int], g: torch.Tensor) -> bool:
    """Returns whether the ranks' parts are the gradient g of a value so laid out."""
    whole = _joined(_listed(parts, axes, layout), list(layout), axes, gradient_of, _SAME_GRADIENT)
    return whole is not None and close(whole, g)


def _spread(
    x: torch.Tensor, layout: Layout, axes: Mapping[str, int], generator: torch.Generator, put: _Place, same: str
) -> Parts:
    # Summands are of the whole, so that ranks that share a block hold the same; so is what a value is padded with. Of
    # a gradient every summand has zeros there.
    entries = sorted(layout, key=lambda entry: (entry[1].kind not in _SUMS, entry[1].is_padded != (put is place)))
    order = [axis for axis, _ in entries]

    def parts(value: torch.Tensor, entries: _Entries) -> dict[Coordinates, torch.Tensor]:
        if not entries:
            return {(): value}
        (axis, placement), rest = entries[0], entries[1:]
        if placement.kind in same:  # on every rank the same summands
            inner = parts(value, rest)
            inside = [inner] * axes[axis]
        else:
            inside = [parts(part, rest) for part in put(value, placement, axes[axis], generator)]
        return {(rank, *behind): part for rank, group in enumerate(inside) for behind, part in group.items()}

    ordered_parts = parts(x, entries)
    return {rank: ordered_parts[tuple(rank[list(axes).index(axis)] for axis in order)] for rank in coordinates(axes)}


def _listed(parts: Parts, axes: Mapping[str, int], layout: Layout) -> Parts:
    """Returns the parts by coordinates in the order of the layout."""
    places = [list(axes).index(axis) for axis, _ in layout]
    return {tuple(rank[place] for place in places): part for rank, part in parts.items()}


def _joined(parts: Parts, entries: _Entries, axes: Mapping[str, int], join: _Join, same: str) -> torch.Tensor | None:
    """Returns what the parts are of, from the innermost axis outwards; None where they are of nothing."""
    if not entries:
        return parts[()]
    (axis, placement), rest = entries[0], entries[1:]
    groups = [{key[1:]: part for key, part in parts.items() if key[0] == rank} for rank in range(axes[axis])]
    if placement.kind in same and rest:
        if any(not close(group[key], part) for group in groups[1:] for key, part in groups[0].items()):
            return None
        groups = groups[:1]
        return _joined(groups[0], rest, axes, join, same)
    wholes = [_joined(group, rest, axes, join, same) for group in groups]
    return None if any(whole is None for whole in wholes) else join([w for w in wholes if w is not None], placement)


_CANNOT_RUN = (RuntimeError, IndexError, ValueError, TypeError)

# An overload, or a graph operator of fxpar.
Target = torch._ops.OpOverload | Callable[..., Any]
Results = list[torch.Tensor]
Runner = Callable[[Sequence[torch.Tensor], Coordinates], Results]


def packet_of(target: Target) -> str:
    """Returns `aten::slice` for all overloads of an operator, or `fxpar.dropout`."""
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else key_of(target)


def _parameters(target: Target) -> dict[str, Any]:
    """Returns names of the arguments in order, with defaults."""
    if isinstance(target, torch._ops.OpOverload):
        return {a.name: a.default_value for a in target._schema.arguments}
    takes = target.signature if isinstance(target, GraphOperator) else inspect.signature(target)
    return {p.name: p.default for p in takes.parameters.values()}


class Trial:
    """A sample call on a mesh: its global result, and what the ranks make of it under given layouts.

    Args:
        target: the overload, or a graph operator of fxpar that has a kernel.
        sample: the call.
        axes: sizes of the mesh axes.
        generator: source of summands and gradients.
    """

    def __init__(self, target: Target, sample: Sample, axes: Mapping[str, int], generator: torch.Generator) -> None:
        self.target, self.sample, self.axes, self._generator = target, sample, dict(axes), generator
        self.operands = [t.detach() for t in tensors_of([*sample.args, *sample.kwargs.values()])]
        self.carries = [is_continuous(t) and i not in sample.fixed for i, t in enumerate(self.operands)]
        self._kernel = KERNELS.get(target, target)
        self._defaults = _parameters(target)
        self._names = list(self._defaults)
        leaves = self._leaves(self.operands)
        self.outputs = self.run_with(leaves)
        self._gradients = [random_like(o, generator) for o in self.outputs]
        self._wanted = [self._backward(leaves, o, g) for o, g in zip(self.outputs, self._gradients, strict=True)]
        self._placed: dict[tuple[int, Layout], Parts] = {}
        self._last: tuple[Any, dict[Coordinates, tuple[Results, Results]] | str] = (None, "")

    def argument(self, name: str) -> Any:
        """Returns an argument by its schema name, its default where it was not passed."""
        index = self._names.index(name)
        if index < len(self.sample.args):
            return self.sample.args[index]
        return self.sample.kwargs.get(name, self._defaults[name])

    def fault(self, layouts: Sequence[Layout], index: int, out: Layout) -> str:
        """Returns what is wrong with output `index` being `out` for operands so laid out; empty where all is right."""
        if not fits(out, self.outputs[index].shape, self.axes):
            return f"{out} does not divide {list(self.outputs[index].shape)}"
        ranks = self._ranks(layouts, out)
        if isinstance(ranks, str):
            return ranks
        parts = {rank: results[index] for rank, (_, results) in ranks.items()}
        if not holds(parts, out, self.axes, self.outputs[index]):
            return "values"
        if not self.outputs[index].requires_grad:
            return ""
        dtype = next(iter(parts.values())).dtype
        gradients = spread_gradient(self._gradients[index].to(dtype), out, self.axes, self._generator)
        got = {rank: self._backward(ranks[rank][0], part, gradients[rank]) for rank, part in parts.items()}
        for i, (layout, expected) in enumerate(zip(layouts, self._wanted[index], strict=True)):
            mine = {rank: grads[i] for rank, grads in got.items()}
            if self.carries[i] and not holds_gradient(mine, layout, self.axes, expected):
                return f"gradient of operand {i}"
        return ""

    def _leaves(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [v.clone().requires_grad_(carries) for v, carries in zip(values, self.carries, strict=True)]

    def _backward(self, leaves: Sequence[torch.Tensor], out: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        """Returns gradient of every operand, zero where there is none."""
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        if not out.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        gradients = iter(torch.autograd.grad(out, inputs, g.to(out.dtype), retain_graph=True, materialize_grads=True))
        return [next(gradients) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]

    def _ranks(self, layouts: Sequence[Layout], out: Layout) -> dict[Coordinates, tuple[Results, Results]] | str:
        """Returns operands and results of every rank, or why a rank cannot run. The last answer is kept."""
        shape_matters = packet_of(self.target) in _BY_OUTPUT
        key = (tuple(layouts), out if shape_matters else None)
        if self._last[0] != key:
            self._last = (key, self._run(layouts, out))
        return self._last[1]

    def _run(self, layouts: Sequence[Layout], out: Layout) -> dict[Coordinates, tuple[Results, Results]] | str:
        runner = localised(self, layouts, out)
        if isinstance(runner, str):
            return runner
        parts = []
        for i, layout in enumerate(layouts):
            if (i, layout) not in self._placed:
                self._placed[i, layout] = spread(self.operands[i], layout, self.axes, self._generator)
            parts.append(self._placed[i, layout])
        ranks = {}
        for rank in coordinates(self.axes):
            leaves = self._leaves([part[rank] for part in parts])
            try:
                ranks[rank] = leaves, runner(leaves, rank)
            except _CANNOT_RUN as error:
                named = rank[0] if len(rank) == 1 else rank
                return f"rank {named} cannot run: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        return ranks

    def run_with(self, leaves: Sequence[torch.Tensor], **changes: Any) -> Results:
        """Returns the call on a rank's operands with some arguments replaced, or added, by name."""
        args, kwargs = with_tensors((list(self.sample.args), dict(self.sample.kwargs)), leaves)
        for name, value in changes.items():
            if name in self._names[: len(args)]:
                args[self._names.index(name)] = value
            else:
                kwargs[name] = value
        return tensors_of(self._kernel(*args, **kwargs))


def _dim(trial: Trial) -> int:
    return int(trial.argument("dim")) % max(trial.operands[0].dim(), 1)


def _own_positions(trial: Trial, layout: Layout, dim: int) -> list[list[int]]:
    """Returns the positions of a dimension of the first operand that each rank holds."""
    size = trial.operands[0].shape[dim]
    return [positions(layout, dim, size, trial.axes, rank) for rank in coordinates(trial.axes)]


def _slice(trial: Trial, layouts: Sequence[Layout], out: Layout) -> Runner | str:
    """Returns the bounds that pick a rank's part; they stand in the program, so all ranks must have the same."""
    bounds = local_bounds(trial, layouts[0])
    if isinstance(bounds, str):
        return bounds
    start, end = bounds
    return lambda leaves, rank: trial.run_with(leaves, start=start, end=end)


def local_bounds(trial: Trial, layout: Layout) -> tuple[int, int] | str:
    """Returns start and end of a slice as every rank's own; why there are none."""
    dim, step = _dim(trial), int(trial.argument("step"))
    size = trial.operands[0].shape[dim]
    selected = set(range(size)[slice(trial.argument("start"), trial.argument("end"), step)])
    bounds = set()
    for mine in _own_positions(trial, layout, dim):
        local = [i for i, position in enumerate(mine) if position in selected]
        if any(b - a != step for a, b in itertools.pairwise(local)):
            return "no slice picks the rank's part"
        bounds.add((local[0], local[-1] + 1) if local else (0, 0))
    return "the ranks need different bounds" if len(bounds) > 1 else bounds.pop()


def _split(trial: Trial, layouts: Sequence[Layout], out: Layout) -> Runner | str:
    """Returns what `_slice` does, for the sizes of all parts."""
    dim = _dim(trial)
    bounds, start = [], 0
    for output in trial.outputs:
        bounds.append((start, start + output.shape[dim]))
        start = bounds[-1][1]
    sizes = {
        tuple(sum(first <= position < last for position in mine) for first, last in bounds)
        for mine in _own_positions(trial, layouts[0], dim)
    }
    if len(sizes) > 1:
        return "the ranks need different sizes"
    local = list(sizes.pop())
    return lambda leaves, rank: list(torch.split(leaves[0], local, dim))


def _out_shape(trial: Trial, out: Layout) -> list[int]:
    return local_shape(out, trial.outputs[0].shape, trial.axes)


def _unflatten(trial: Trial, layouts: Sequence[Layout], out: Layout) -> Runner | str:
    dim = _dim(trial)
    shape = _out_shape(trial, out)[dim : dim + len(trial.argument("sizes"))]
    return lambda leaves, rank: trial.run_with(leaves, sizes=shape)


def _shaped(name: str) -> Callable[[Trial, Sequence[Layout], Layout], Runner | str]:
    def runner(trial: Trial, layouts: Sequence[Layout], out: Layout) -> Runner | str:
        shape = _out_shape(trial, out)
        return lambda leaves, rank: trial.run_with(leaves, **{name: shape})

    return runner


def _own_bits(trial: Trial, layouts: Sequence[Layout], out: Layout) -> Runner | str:
    """Draws with an axis' index as for a rank's block of the first operand, without one as for the whole."""
    indexed = {axis for layout in layouts for axis, placement in layout if placement.kind == "V"}
    drawn = [(axis, placement) for axis, placement in layouts[0] if axis in indexed]
    if any(len(placement.pieces) != 1 for _, placement in drawn):
        return "the index says nothing of a whole value, or of several segments"
    return lambda leaves, rank: trial.run_with(leaves, cuts=_index_cuts(trial, drawn, rank))


def _index_cuts(trial: Trial, drawn: Sequence[tuple[str, Placement]], rank: Coordinates) -> list[IndexCut]:
    place_of, cuts = dict(zip(trial.axes, rank, strict=True)), []
    for axis, placement in drawn:
        piece = placement.pieces[0]
        index = torch.tensor(place_of[axis] // piece.copies)
        cuts.append(IndexCut(placement.dim, int(piece.outer), 1, trial.axes[axis] // piece.copies, index))
    return cuts


def _bits_of_elements(trial: Trial, layouts: Sequence[Layout], out: Layout) -> Runner | str:
    """Returns a shard draws as for its block of the result, and anything else as for the whole."""
    drawn = [(axis, placement) for axis, placement in out if placement.is_shard]
    if any(len(placement.pieces) != 1 for _, placement in drawn):
        return "random bits for a dimension of several segments"
    if not drawn:
        return lambda leaves, rank: trial.run_with(leaves)
    return lambda leaves, rank: trial.run_with(leaves, cuts=_index_cuts(trial, drawn, rank))


# The operations whose arguments hold sizes, which a rank's program has as its own, and those that take its index.
_LITERALS: Mapping[str, Callable[[Trial, Sequence[Layout], Layout], Runner | str]] = {
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::expand"), _shaped("size")),
    **{f"aten::new_{name}": _shaped("size") for name in ("ones", "zeros", "full")},
    "aten::reshape": _shaped("shape"),
    **{f"aten::{name}_backward": _shaped("input_size") for name in RESAMPLED},
    "aten::unflatten": _unflatten,
    "aten::slice": _slice,
    **{f"aten::{name}": _split for name in ("split", "split_with_sizes", "chunk")},
    **dict.fromkeys(("fxpar.dropout", "fxpar.uniform_like", "fxpar.attention"), _own_bits),
    **dict.fromkeys(("fxpar.attention_forward", "fxpar.attention_backward"), _own_bits),
    **{f"aten::{name.partition('.')[0]}": _bits_of_elements for name in (*SHAPED, *VALUED)},
}
# Those among them whose literals follow from the layout of the output.
_BY_OUTPUT = frozenset(name for name, literal in _LITERALS.items() if literal not in (_slice, _split, _own_bits))


def localised(trial: Trial, layouts: Sequence[Layout], out: Layout) -> Runner | str:
    """Returns the call as a rank makes it, with its own literals; the reason where no literals serve all ranks."""
    literal = _LITERALS.get(packet_of(trial.target))
    return (lambda leaves, rank: trial.run_with(leaves)) if literal is None else literal(trial, layouts, out)
