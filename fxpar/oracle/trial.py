"""One sample call on n ranks: what they compute, and whether that is the call's result and gradient.

Enters: an operator, concrete arguments, placements. Leaves: "" where the ranks together hold the right values and the
right gradients, else what is wrong. Each rank makes the call with the literals that its own program would have.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxpar.layout.layout import Placement
from fxpar.oracle.composite import KERNELS
from fxpar.oracle.ranks import (
    Sample,
    agree,
    agree_gradient,
    divides,
    held,
    padding,
    place,
    place_gradient,
    tensors_of,
    with_tensors,
)
from fxpar.program.operators import GraphOperator
from fxpar.rules import key_of
from fxpar.signatures.randomness import SHAPED, VALUED

_CANNOT_RUN = (RuntimeError, IndexError, ValueError, TypeError)

# An overload, or a graph operator of fxpar.
Target = torch._ops.OpOverload | Callable[..., Any]
Results = list[torch.Tensor]
Runner = Callable[[Sequence[torch.Tensor]], Results]


def packet_of(target: Target) -> str:
    """`aten::slice` for all overloads of an operator, `fxpar.dropout`."""
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else key_of(target)


def _parameters(target: Target) -> dict[str, Any]:
    """Names of the arguments in order, with defaults."""
    if isinstance(target, torch._ops.OpOverload):
        return {a.name: a.default_value for a in target._schema.arguments}
    takes = target.signature if isinstance(target, GraphOperator) else inspect.signature(target)
    return {p.name: p.default for p in takes.parameters.values()}


class Trial:
    """A sample call on n ranks: its global result, and what the ranks make of it under given placements.

    Args:
        target: the overload, or a graph operator of fxpar that has a kernel.
        sample: the call.
        n: number of ranks.
        generator: source of summands and gradients.
    """

    def __init__(self, target: Target, sample: Sample, n: int, generator: torch.Generator) -> None:
        self.target, self.sample, self.n, self._generator = target, sample, n, generator
        self.operands = [t.detach() for t in tensors_of([*sample.args, *sample.kwargs.values()])]
        self.carries = [t.is_floating_point() and i not in sample.fixed for i, t in enumerate(self.operands)]
        self._kernel = KERNELS.get(target, target)
        self._defaults = _parameters(target)
        self._names = list(self._defaults)
        leaves = self._leaves(self.operands)
        self.outputs = self.run_with(leaves)
        self._gradients = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in self.outputs]
        self._wanted = [self._backward(leaves, o, g) for o, g in zip(self.outputs, self._gradients, strict=True)]
        self._placed: dict[tuple[int, Placement], list[torch.Tensor]] = {}
        self._last: tuple[Any, list[tuple[Results, Results]] | str] = (None, "")

    def argument(self, name: str) -> Any:
        """An argument by its schema name, its default where it was not passed."""
        index = self._names.index(name)
        if index < len(self.sample.args):
            return self.sample.args[index]
        return self.sample.kwargs.get(name, self._defaults[name])

    def fault(self, placements: Sequence[Placement], index: int, out: Placement) -> str:
        """What is wrong with output `index` being `out` for operands so placed; empty where all is right."""
        if not divides(out, self.outputs[index].shape, self.n):
            return f"{out} does not divide {list(self.outputs[index].shape)}"
        ranks = self._ranks(placements, out)
        if isinstance(ranks, str):
            return ranks
        parts = [results[index] for _, results in ranks]
        if not agree(parts, out, self.outputs[index]):
            return "values"
        if not self.outputs[index].requires_grad:
            return ""
        gradients = place_gradient(self._gradients[index].to(parts[0].dtype), out, self.n, self._generator)
        got = [self._backward(leaves, part, g) for (leaves, _), part, g in zip(ranks, parts, gradients, strict=True)]
        for i, (placement, wanted) in enumerate(zip(placements, self._wanted[index], strict=True)):
            if self.carries[i] and not agree_gradient([grads[i] for grads in got], placement, wanted):
                return f"gradient of operand {i}"
        return ""

    def _leaves(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [v.clone().requires_grad_(carries) for v, carries in zip(values, self.carries, strict=True)]

    def _backward(self, leaves: Sequence[torch.Tensor], out: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        """Gradient of every operand, zero where there is none."""
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        if not out.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = iter(torch.autograd.grad(out, asked, g.to(out.dtype), retain_graph=True, materialize_grads=True))
        return [next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]

    def _ranks(self, placements: Sequence[Placement], out: Placement) -> list[tuple[Results, Results]] | str:
        """Operands and results of every rank, or why a rank cannot run. The last answer is kept."""
        shape_matters = packet_of(self.target) in _BY_OUTPUT
        key = (tuple(placements), out if shape_matters else None)
        if self._last[0] != key:
            self._last = (key, self._run(placements, out))
        return self._last[1]

    def _run(self, placements: Sequence[Placement], out: Placement) -> list[tuple[Results, Results]] | str:
        runner = localised(self, placements, out)
        if isinstance(runner, str):
            return runner
        parts = []
        for i, placement in enumerate(placements):
            if (i, placement) not in self._placed:
                self._placed[i, placement] = place(self.operands[i], placement, self.n, self._generator)
            parts.append(self._placed[i, placement])
        ranks = []
        for rank in range(self.n):
            leaves = self._leaves([part[rank] for part in parts])
            try:
                ranks.append((leaves, runner(leaves)))
            except _CANNOT_RUN as error:
                return f"rank {rank} cannot run: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        return ranks

    def run_with(self, leaves: Sequence[torch.Tensor], **changes: Any) -> Results:
        """The call on a rank's operands with some arguments replaced, or added, by name."""
        args, kwargs = with_tensors((list(self.sample.args), dict(self.sample.kwargs)), leaves)
        for name, value in changes.items():
            if name in self._names[: len(args)]:
                args[self._names.index(name)] = value
            else:
                kwargs[name] = value
        return tensors_of(self._kernel(*args, **kwargs))

    def local_positions(self, placement: Placement, dim: int, size: int, rank: int) -> list[int]:
        """The global positions a rank holds of a dimension of the first operand."""
        is_cut = placement.is_shard and placement.dim == dim
        return held(placement, self.n, rank) if is_cut else list(range(size))


def _local_shape(trial: Trial, out: Placement) -> list[int]:
    shape = list(trial.outputs[0].shape)
    if out.is_shard:
        shape[out.dim] = len(held(out, trial.n, 0)) + padding(out, trial.n, 0)
    return shape


def _dim(trial: Trial) -> int:
    return int(trial.argument("dim")) % max(trial.operands[0].dim(), 1)


def _slice(trial: Trial, placements: Sequence[Placement], out: Placement) -> Runner | str:
    """The bounds that pick a rank's part; they stand in the program, so all ranks must have the same."""
    dim, step = _dim(trial), int(trial.argument("step"))
    size = trial.operands[0].shape[dim]
    wanted = set(range(size)[slice(trial.argument("start"), trial.argument("end"), step)])
    bounds = set()
    for rank in range(trial.n):
        mine = trial.local_positions(placements[0], dim, size, rank)
        local = [i for i, position in enumerate(mine) if position in wanted]
        if any(b - a != step for a, b in itertools.pairwise(local)):
            return "no slice picks the rank's part"
        bounds.add((local[0], local[-1] + 1) if local else (0, 0))
    if len(bounds) > 1:
        return "the ranks need different bounds"
    start, end = bounds.pop()
    return lambda leaves: trial.run_with(leaves, start=start, end=end)


def _split(trial: Trial, placements: Sequence[Placement], out: Placement) -> Runner | str:
    """As `_slice`, for the sizes of all parts."""
    dim = _dim(trial)
    size = trial.operands[0].shape[dim]
    bounds, start = [], 0
    for output in trial.outputs:
        bounds.append((start, start + output.shape[dim]))
        start = bounds[-1][1]
    sizes = set()
    for rank in range(trial.n):
        mine = trial.local_positions(placements[0], dim, size, rank)
        sizes.add(tuple(sum(first <= position < last for position in mine) for first, last in bounds))
    if len(sizes) > 1:
        return "the ranks need different sizes"
    local = list(sizes.pop())
    return lambda leaves: list(torch.split(leaves[0], local, dim))


def _unflatten(trial: Trial, placements: Sequence[Placement], out: Placement) -> Runner | str:
    dim = _dim(trial)
    shape = _local_shape(trial, out)[dim : dim + len(trial.argument("sizes"))]
    return lambda leaves: trial.run_with(leaves, sizes=shape)


def _shaped(name: str) -> Callable[[Trial, Sequence[Placement], Placement], Runner | str]:
    def runner(trial: Trial, placements: Sequence[Placement], out: Placement) -> Runner | str:
        shape = _local_shape(trial, out)
        return lambda leaves: trial.run_with(leaves, **{name: shape})

    return runner


def _own_bits(trial: Trial, placements: Sequence[Placement], out: Placement) -> Runner | str:
    """With an index a rank draws as for its block of the first operand, without one as for the whole."""
    first = placements[0]
    varying = [i for i, placement in enumerate(placements) if placement.kind == "V"]
    if varying and len(first.pieces) != 1:
        return "the index says nothing of a whole value, or of several segments"
    outer, copies = (int(first.pieces[0].outer), first.pieces[0].copies) if varying else (1, 1)
    return lambda leaves: trial.run_with(
        leaves, cuts=[(first.dim, outer, trial.n // copies, leaves[i] // copies) for i in varying]
    )


def _bits_of_elements(trial: Trial, placements: Sequence[Placement], out: Placement) -> Runner | str:
    """A shard draws as for its block of the result, and anything else as for the whole."""
    if not out.is_shard:
        return trial.run_with
    if len(out.pieces) != 1:
        return "random bits for a dimension of several segments"
    outer, copies = int(out.pieces[0].outer), out.pieces[0].copies
    blocks = trial.n // copies
    ranks = iter(range(trial.n))
    return lambda leaves: trial.run_with(leaves, cuts=[(out.dim, outer, blocks, torch.tensor(next(ranks) // copies))])


# The operations whose arguments hold sizes, which a rank's program has as its own, and those that take its index.
_LITERALS: Mapping[str, Callable[[Trial, Sequence[Placement], Placement], Runner | str]] = {
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::expand"), _shaped("size")),
    **{f"aten::new_{name}": _shaped("size") for name in ("ones", "zeros", "full")},
    "aten::reshape": _shaped("shape"),
    "aten::unflatten": _unflatten,
    "aten::slice": _slice,
    **{f"aten::{name}": _split for name in ("split", "split_with_sizes", "chunk")},
    **dict.fromkeys(("fxpar.dropout", "fxpar.uniform_like", "fxpar.attention"), _own_bits),
    **{f"aten::{name.partition('.')[0]}": _bits_of_elements for name in (*SHAPED, *VALUED)},
}
# Those among them whose literals follow from the placement of the output.
_BY_OUTPUT = frozenset(name for name, literal in _LITERALS.items() if literal not in (_slice, _split, _own_bits))


def localised(trial: Trial, placements: Sequence[Placement], out: Placement) -> Runner | str:
    """The call as a rank makes it, with its own literals; the reason where no literals serve all ranks."""
    literal = _LITERALS.get(packet_of(trial.target))
    return trial.run_with if literal is None else literal(trial, placements, out)
