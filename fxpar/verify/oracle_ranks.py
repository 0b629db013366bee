"""Brute force: what n ranks compute of one sample call, and whether that is the call's result and gradient.

Enters: an operator, concrete arguments, placements. Leaves: "" where the ranks together hold the right values and the
right gradients, else what is wrong. Nothing of `fxpar.layout`'s arithmetic is used: which elements a rank holds is
counted out here from the definition of a piece, so that a fault there cannot hide one in a rule.

The values (left) and the gradients (right) that the ranks must hold for a global value x and its gradient g:

=====  ==============================  ========================================================
I      x on every rank                 g on every rank
R      x on every rank                 summands of g
S      the rank's positions of x       the same positions of g; summands where all ranks hold them
P      summands of x                   g on every rank
=====  ==============================  ========================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpar.layout import Placement

# Relative to the largest value. What is wrong is wrong by about that; casts to float32 round.
TOLERANCE = 1e-5
_CANNOT_RUN = (RuntimeError, IndexError, ValueError, TypeError)


@dataclass(frozen=True)
class Sample:
    """One call with concrete arguments.

    Attributes:
        args: arguments by position; tensors are the operands.
        kwargs: arguments by name.
        fixed: indices of float operands that the operation cannot differentiate.
        segments: lengths of the segments of a fused dimension (`(12, 6, 6)`); every dimension of their sum is also
            tried as a shard of some of them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    segments: tuple[tuple[int, ...], ...] = ()
    fixed: tuple[int, ...] = ()


def sample(
    *args: Any, segments: tuple[tuple[int, ...], ...] = (), fixed: tuple[int, ...] = (), **kwargs: Any
) -> Sample:
    """A sample written as the call."""
    return Sample(args, kwargs, segments, fixed)


def shuffled(call: Sample, generator: torch.Generator) -> Sample:
    """The same call on other values: the elements of every operand in another order."""

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.reshape(-1)[torch.randperm(item.numel(), generator=generator)].view(item.shape)
        return type(item)(visit(inner) for inner in item) if isinstance(item, (list, tuple)) else item

    kwargs = {key: visit(value) for key, value in call.kwargs.items()}
    return Sample(visit(call.args), kwargs, call.segments, call.fixed)


def held(placement: Placement, n: int, rank: int) -> list[int]:
    """Positions of the sharded dimension that a rank holds, in the order in which it holds them."""
    found: list[int] = []
    start = 0
    for piece in placement.pieces:
        outer, size = int(piece.outer), int(piece.size)
        block = size // n
        for _ in range(outer):
            first, count = (start + rank * block, block) if piece.sharded else (start, size)
            found.extend(range(first, first + count))
            start += size
    return found


def common(placement: Placement) -> list[int]:
    """Positions of the sharded dimension that all ranks hold: the segments that are not cut."""
    found: list[int] = []
    start = 0
    for piece in placement.pieces:
        length = int(piece.outer) * int(piece.size)
        if not piece.sharded:
            found.extend(range(start, start + length))
        start += length
    return found


def divides(placement: Placement, shape: Sequence[int], n: int) -> bool:
    """Whether the pieces cover the dimension exactly and every run falls into n equal blocks."""
    if not placement.is_shard:
        return True
    total = sum(int(p.outer) * int(p.size) for p in placement.pieces)
    runs = [int(p.size) for p in placement.pieces if p.sharded]
    return 0 <= placement.dim < len(shape) and total == shape[placement.dim] and all(r % n == 0 for r in runs)


def _block(x: torch.Tensor, placement: Placement, n: int, rank: int) -> torch.Tensor:
    return x.index_select(placement.dim, torch.tensor(held(placement, n, rank)))


def _summands(x: torch.Tensor, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    if x.is_floating_point():
        parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(n - 1)]
    else:
        parts = [torch.randint(-9, 9, x.shape, generator=generator, dtype=x.dtype) for _ in range(n - 1)]
    return [*parts, x - sum(parts)]


def place(x: torch.Tensor, placement: Placement, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """What each rank holds of the value x."""
    if placement.kind == "P":
        return _summands(x, n, generator)
    if placement.is_shard:
        return [_block(x, placement, n, rank) for rank in range(n)]
    return [x] * n


def place_gradient(g: torch.Tensor, placement: Placement, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """What each rank holds of the gradient of a value so placed."""
    if placement.kind in "IP":
        return [g] * n
    parts = _summands(g, n, generator)
    if not placement.is_shard:
        return parts
    own = torch.zeros(g.shape[placement.dim], dtype=torch.bool)
    own[common(placement)] = True
    own = own.view(-1, *(1,) * (g.dim() - placement.dim - 1))
    return [_block(torch.where(own, part, g), placement, n, rank) for rank, part in enumerate(parts)]


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(b.detach().abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * min(scale, 1.0))


def agree(parts: Sequence[torch.Tensor], placement: Placement, x: torch.Tensor) -> bool:
    """Whether the ranks' parts are the value x as placed."""
    n = len(parts)
    if placement.kind == "P":
        return all(p.shape == x.shape for p in parts) and _close(torch.stack(list(parts)).sum(0, dtype=x.dtype), x)
    if placement.is_shard:
        return all(_close(part, _block(x, placement, n, rank)) for rank, part in enumerate(parts))
    return all(_close(part, x) for part in parts)


def agree_gradient(parts: Sequence[torch.Tensor], placement: Placement, g: torch.Tensor) -> bool:
    """Whether the ranks' parts are the gradient g of a value so placed."""
    n = len(parts)
    if placement.kind in "IP":
        return all(_close(part, g) for part in parts)
    if not placement.is_shard:
        return _close(torch.stack(list(parts)).sum(0), g)
    whole = torch.zeros_like(g)
    for rank, part in enumerate(parts):
        whole.index_add_(placement.dim, torch.tensor(held(placement, n, rank)), part)
    return _close(whole, g)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of arguments or results in order, lists flattened."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for item in value for t in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def with_tensors(value: Any, tensors: Sequence[Any]) -> Any:
    """The arguments with other values in place of the tensors, in the order of `tensors_of`."""
    remaining = iter(tensors)

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return next(remaining)
        if isinstance(item, Mapping):
            return {key: visit(inner) for key, inner in item.items()}
        return type(item)(visit(inner) for inner in item) if isinstance(item, (list, tuple)) else item

    return visit(value)


Results = list[torch.Tensor]
Runner = Callable[[Sequence[torch.Tensor]], Results]


class Trial:
    """A sample call on n ranks: its global result, and what the ranks make of it under given placements.

    Args:
        target: the overload.
        sample: the call.
        n: number of ranks.
        generator: source of summands and gradients.
    """

    def __init__(self, target: torch._ops.OpOverload, sample: Sample, n: int, generator: torch.Generator) -> None:
        self.target, self.sample, self.n, self._generator = target, sample, n, generator
        self.operands = [t.detach() for t in tensors_of([*sample.args, *sample.kwargs.values()])]
        self.carries = [t.is_floating_point() and i not in sample.fixed for i, t in enumerate(self.operands)]
        self._names = [a.name for a in target._schema.arguments]
        leaves = self._leaves(self.operands)
        self.outputs = self._plain(leaves)
        self._gradients = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in self.outputs]
        self._wanted = [self._backward(leaves, o, g) for o, g in zip(self.outputs, self._gradients, strict=True)]
        self._placed: dict[tuple[int, Placement], list[torch.Tensor]] = {}
        self._last: tuple[Any, list[tuple[Results, Results]] | str] = (None, "")

    def argument(self, name: str) -> Any:
        """An argument by its schema name, its default where it was not passed."""
        index = self._names.index(name)
        if index < len(self.sample.args):
            return self.sample.args[index]
        return self.sample.kwargs.get(name, self.target._schema.arguments[index].default_value)

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

    def _plain(self, leaves: Sequence[torch.Tensor]) -> Results:
        args, kwargs = with_tensors((list(self.sample.args), dict(self.sample.kwargs)), leaves)
        return tensors_of(self.target(*args, **kwargs))

    def _backward(self, leaves: Sequence[torch.Tensor], out: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        """Gradient of every operand, zero where there is none."""
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        if not out.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = iter(torch.autograd.grad(out, asked, g.to(out.dtype), retain_graph=True, materialize_grads=True))
        return [next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]

    def _ranks(self, placements: Sequence[Placement], out: Placement) -> list[tuple[Results, Results]] | str:
        """Operands and results of every rank, or why a rank cannot run. The last answer is kept."""
        shape_matters = str(self.target._schema.name) in _BY_OUTPUT
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
        """The call on a rank's operands with some arguments replaced, by schema name."""
        args, kwargs = with_tensors((list(self.sample.args), dict(self.sample.kwargs)), leaves)
        for name, value in changes.items():
            index = self._names.index(name)
            if index < len(args):
                args[index] = value
            else:
                kwargs[name] = value
        return tensors_of(self.target(*args, **kwargs))

    def local_positions(self, placement: Placement, dim: int, size: int, rank: int) -> list[int]:
        """The global positions a rank holds of a dimension of the first operand."""
        is_cut = placement.is_shard and placement.dim == dim
        return held(placement, self.n, rank) if is_cut else list(range(size))


def _local_shape(trial: Trial, out: Placement) -> list[int]:
    shape = list(trial.outputs[0].shape)
    if out.is_shard:
        shape[out.dim] = len(held(out, trial.n, 0))
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


# The operations whose arguments hold sizes, which a rank's program has as its own.
_LITERALS: Mapping[str, Callable[[Trial, Sequence[Placement], Placement], Runner | str]] = {
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::expand"), _shaped("size")),
    **dict.fromkeys(("aten::new_ones", "aten::new_zeros", "aten::new_full"), _shaped("size")),
    "aten::reshape": _shaped("shape"),
    "aten::unflatten": _unflatten,
    "aten::slice": _slice,
    **{f"aten::{name}": _split for name in ("split", "split_with_sizes", "chunk")},
}
# Those among them whose literals follow from the placement of the output.
_BY_OUTPUT = frozenset(name for name, literal in _LITERALS.items() if literal not in (_slice, _split))


def localised(trial: Trial, placements: Sequence[Placement], out: Placement) -> Runner | str:
    """The call as a rank makes it, with its own literals; the reason where no literals serve all ranks."""
    literal = _LITERALS.get(str(trial.target._schema.name))
    return trial.run_with if literal is None else literal(trial, placements, out)
