"""The sizes for which a step is compiled: numbers at first, symbols from the second ones on.

Enters: the sizes of calls, by name of the program's symbol. Leaves: what is compiled for a call's sizes. As
torch.compile does by itself: what is compiled first is for its sizes alone; sizes that have changed since are symbolic
in what is compiled next, and stay so. A size of 0 or 1, which operations take for one that is broadcast, is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxpar.layout.symbolic_sizes import Size

Shape = tuple[Size, ...]


class Scope:
    """Sizes of which some are symbols, and the values without memory that have them.

    Attributes:
        mode: in which these values are made.
        names: of the sizes that are symbols.

    Args:
        shapes: of what has sizes that vary, by name of the placeholder.
        sizes: by symbol; what is a symbol of PyTorch's has this one as its hint.
        varying: names of those that are to be symbols; none of them is 0 or 1.
    """

    def __init__(self, shapes: Mapping[str, Shape], sizes: Mapping[str, int], varying: Sequence[str] = ()) -> None:
        self.names, self._shapes, self._env = tuple(varying), shapes, ShapeEnv()
        self._fixed = {name: size for name, size in sizes.items() if name not in varying}
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._integers: dict[str, Any] = dict(self._fixed)
        for name in varying:
            source, hint = ConstantSource(name), sizes[name]
            symbol = self._env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            self._integers[name] = self._env.create_symintnode(symbol, hint=hint, source=source)

    @property
    def integers(self) -> list[Any]:
        """PyTorch's symbolic integers of `names`."""
        return [self._integers[name] for name in self.names]

    def fake(self, name: str, value: Tensor) -> Tensor:
        """A contiguous value without memory, of sizes that are symbols where its own are.

        Args:
            name: of its placeholder.
        """
        shape = self._shapes.get(name, ())
        if not any(str(s) in self.names for size in shape if isinstance(size, sympy.Expr) for s in size.free_symbols):
            return self.mode.from_tensor(value.detach(), static_shapes=True)
        with self.mode:
            return torch.empty([self._integer(size) for size in shape], dtype=value.dtype, device=value.device)

    def _integer(self, size: Size) -> Any:
        if isinstance(size, int):
            return size
        names = sorted(size.free_symbols, key=str)
        return sympy.lambdify(names, size)(*[self._integers[str(name)] for name in names])

    def admits(self, sizes: Mapping[str, int], guards: str | None = None) -> bool:
        """Whether what was compiled is right for other sizes.

        Args:
            guards: those that held when it was compiled; by default all that there are by now.
        """
        if any(sizes[name] != size for name, size in self._fixed.items()):
            return False
        code = self.guards() if guards is None else guards
        return not code or bool(self._env.evaluate_guards_expression(code, [sizes[name] for name in self.names]))

    def guards(self) -> str:
        """What compiling has assumed of the symbols so far, as PyTorch writes it; empty for nothing."""
        return (self._env.produce_guards_expression(self.integers) or "") if self.names else ""


Compiled = TypeVar("Compiled")
Units = TypeVar("Units")


class Scopes(Generic[Units]):
    """What units are compiled in, for all functions of a program.

    Args:
        shapes: as for `Scope`.
        units: makes what compiles and keeps the units of a scope.
    """

    def __init__(self, shapes: Mapping[str, Shape], units: Callable[[Scope], Units]) -> None:
        self._shapes, self._units = shapes, units
        self._symbolic: list[tuple[Scope, Units]] = []

    @cached_property
    def fixed(self) -> Units:
        """For numbers: units are known by their shapes."""
        return self._units(Scope({}, {}))

    def symbolic(self, sizes: Mapping[str, int], varying: Sequence[str]) -> Iterator[tuple[Scope, Units]]:
        """Those in which these sizes are symbols and that fit so far, then a new one."""
        for scope, units in self._symbolic:
            if scope.names == tuple(varying) and scope.admits(sizes):
                yield scope, units
        new_scope = Scope(self._shapes, sizes, varying)
        self._symbolic.append((new_scope, self._units(new_scope)))
        yield self._symbolic[-1]


class Variants(Generic[Units, Compiled]):
    """What is compiled of one function, by sizes."""

    def __init__(self, scopes: Scopes[Units]) -> None:
        self._scopes = scopes
        self._known: dict[tuple[tuple[str, int], ...], Compiled] = {}
        self._symbolic: list[tuple[Scope, str, Compiled]] = []

    def of(self, sizes: Mapping[str, int], make: Callable[[Units], Compiled]) -> Compiled:
        """What is compiled for these sizes; it is made where nothing fits.

        Args:
            make: compiles with the units of a scope.
        """
        key = tuple(sizes.items())
        if key not in self._known:
            fitting = (candidate for scope, guards, candidate in self._symbolic if scope.admits(sizes, guards))
            compiled = next(fitting, None)
            self._known[key] = self._made(sizes, make) if compiled is None else compiled
        return self._known[key]

    def _made(self, sizes: Mapping[str, int], make: Callable[[Units], Compiled]) -> Compiled:
        seen = [dict(key) for key in self._known]
        varying = [name for name, size in sizes.items() if size > 1 and any(one[name] != size for one in seen)]
        if not varying:
            return make(self._scopes.fixed)
        for scope, units in self._scopes.symbolic(sizes, varying):
            compiled = make(units)
            guards = scope.guards()
            if scope.admits(sizes, guards):
                self._symbolic.append((scope, guards, compiled))
                return compiled
        raise AssertionError("what was compiled for these sizes does not admit them")
