"""What rounding may change in the results of a program: of how much a second way to compute the same may deviate.

Enters: a program with values. Leaves: bounds, of the largest value.

Two ways to compute one thing take sums in other orders, and kernels differ between machines. How much that shows in a
result depends on how many terms were summed, on types, and on what a rounding error becomes on its way. So it is
measured: the program runs again with the operands of each sum moved by what another order may change in it (backward
error: the sum of moved terms is the sum with its rounding). That is chance, so bounds take a multiple of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.program.program import Program, has_note, output_types

aten = torch.ops.aten

UNITS = 16
"""Units of the last place by which results of the same operations may differ: kernels of one library."""
FACTOR = 4
"""How many times what was measured is allowed."""
_ADDITIONS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor})


def epsilon(program: Program) -> float:
    """Returns the unit of the last place of the coarsest floating type of any value; 0 where there is none."""
    kinds = {kind.dtype for node in program.graph.nodes if has_note(node) for kind in output_types(node)}
    return max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)


class OtherOrder(TorchDispatchMode):
    """While active, each sum is rounded as one in another order could be.

    Operands of sums, of products of matrices too, are multiplied by 1 ± eps/2·sqrt(1 + log2(terms)): so far the
    rounding of terms that are added in pairs goes. Half precision, which is summed in float32, is multiplied by
    1 ± eps/2. Element-wise operations, and what moves values, give what they give. Whole numbers are added without
    rounding.

    Args:
        seed: of the signs.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator."""
        kwargs = kwargs or {}
        if func in _ADDITIONS:
            first = args[0] if func._schema.is_mutable else self._moved(args[0], 2)
            return func(first, self._moved(args[1], 2), *args[2:], **kwargs)
        if not _may_sum(func):
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if _is_inexact_tensor(t)]
        terms = max((max(t.shape, default=1) for t in tensors if t.numel()), default=1)
        moved_args, moved_kwargs = pytree.tree_map(lambda value: self._moved(value, terms), (args, kwargs))
        result = func(*moved_args, **moved_kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return result
        moved = [t for t in pytree.tree_leaves((moved_args, moved_kwargs)) if _is_inexact_tensor(t)]
        return func(*args, **kwargs) if _is_moved(result, moved) else result

    def _moved(self, value: Any, terms: int) -> Any:
        if not _is_inexact_tensor(value) or not value.numel() or not value.dtype.is_floating_point:
            return value
        if bool((value == value.round()).all()):
            return value
        info = torch.finfo(value.dtype)
        size = info.eps / 2 * (1 if info.bits < 32 else math.sqrt(1 + math.log2(terms)))
        signs = torch.randint(0, 2, value.shape, generator=self._generator).to(value.device, value.dtype) * 2 - 1
        other = value * (1 + size * signs)
        return torch.where(other.isfinite(), other, value)


def _is_inexact_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _may_sum(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.is_view or func._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:  # attention alone sums; a second call would draw other numbers
        return "scaled_dot_product" in func._schema.name
    return torch.Tag.pointwise not in func.tags


def _is_moved(result: Any, operands: list[Tensor]) -> bool:
    """Returns whether a result consists of elements of the operands and of zeros, or of no floating numbers."""
    outputs = [t.flatten() for t in pytree.tree_leaves(result) if _is_inexact_tensor(t)]
    if not outputs or not operands:
        return True
    dtype = outputs[0].dtype
    known = torch.cat([outputs[0].new_zeros(1), *(t.flatten().to(dtype) for t in operands)]).unique()

    def is_known(values: Tensor) -> bool:
        places = torch.searchsorted(known, values).clamp(max=len(known) - 1)
        return bool(((known[places] == values) | values.isnan()).all())

    return not dtype.is_complex and all(is_known(values) for values in outputs if values.dtype == dtype)
