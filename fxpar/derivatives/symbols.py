"""Sizes of a program as PyTorch's symbolic integers, and back.

Enters: the symbols of a program. Leaves: a symbolic integer for each of its sizes, and the size that one stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv

from fxpar.layout.symbols import Size, simplify, symbol
from fxpar.program.program import Symbol, TensorType

# Hints are larger than one, so that no size is taken for one that is broadcast; they decide nothing else.
_LEAST = 2


class Sizes:
    """Symbolic integers for the sizes of a program.

    Attributes:
        mode: in which tensors of such sizes are made.
    """

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self._shapes = ShapeEnv()
        # An operation that has no function of shapes is refused, and not run on values that are none.
        self.mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._ours: dict[sympy.Symbol, sympy.Symbol] = {}
        self._theirs: dict[sympy.Symbol, Any] = {}
        for each in symbols:
            source, hint = ConstantSource(each.name), max(each.example, _LEAST)
            made = self._shapes.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            own = symbol(each.name)
            self._theirs[own] = self._shapes.create_symintnode(made, hint=hint, source=source)
            self._ours[made] = own

    def check(self) -> None:
        """Refuses what a trace has assumed of sizes.

        Raises:
            ValueError: it holds for one size alone.
        """
        if self._shapes.replacements:
            fixed = ", ".join(f"{self._ours.get(s, s)} = {e}" for s, e in self._shapes.replacements.items())
            raise ValueError(f"it is traced for one size alone ({fixed})")

    def integer(self, size: Size) -> Any:
        """The size as PyTorch takes it: an int, or a symbolic integer."""
        if isinstance(size, int):
            return size
        names = sorted(size.free_symbols, key=str)
        function = sympy.lambdify(names, size, modules=[{"floor": lambda x: x.__floor__()}])
        return function(*[self._theirs[name] for name in names])

    def size(self, value: Any) -> Size:
        """What an integer of a trace stands for.

        Raises:
            ValueError: it is no arithmetic in the program's symbols.
        """
        if isinstance(value, int):
            return value
        found = value.node.expr.replace(FloorDiv, lambda a, b: sympy.floor(a / b)).subs(self._ours)
        unknown = found.free_symbols - set(self._ours.values())
        if unknown:
            raise ValueError(f"the size {found} is made of values")
        return simplify(found)

    def tensor(self, kind: TensorType, requires_grad: bool) -> torch.Tensor:
        """A tensor of a type, without values. It is on no device, of which one kernel or another would be a guess."""
        with self.mode:
            made = torch.empty([self.integer(size) for size in kind.shape], dtype=kind.dtype, device="meta")
        return made.requires_grad_(requires_grad)

    def type_of(self, value: torch.Tensor) -> TensorType:
        """The type of a tensor of a trace."""
        return TensorType(value.dtype, tuple(self.size(size) for size in value.shape))
