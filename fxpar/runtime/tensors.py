"""The parameters and buffers of a module, found once.

Enters: a module. Leaves: its tensors by first name, and whether anything was exchanged since. `named_parameters` walks
all modules: of a deep model that takes longer than a replay of its step.
"""

from __future__ import annotations

from collections.abc import Mapping, ValuesView
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from fxpar.checkpoint.sharded import leaf_of


class Tensors:
    """Parameters and buffers of a module by their first names.

    Attributes:
        version: a number that changes where a module, parameter or buffer is another object than before.
        parameters: as `named_parameters` gave them at the last look.
        leaves: of the parameters.
        all: buffers too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.version = 0
        self._module = module
        self._tables: list[Mapping[str, Any]] = []
        self._views: list[ValuesView[Any]] = []
        self._sizes: list[int] = []
        self._names: list[str] = []
        self._objects: list[Any] = []
        self.parameters: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        self.all: dict[str, Tensor] = {}
        self._look()

    def _look(self) -> None:
        self.version += 1
        self.parameters = dict(self._module.named_parameters())
        self.leaves = {name: leaf_of(parameter) for name, parameter in self.parameters.items()}
        self.all = {**dict(self._module.named_buffers()), **self.parameters}
        self._tables = [t for m in self._module.modules() for t in (m._modules, m._parameters, m._buffers) if t]
        self._sizes = list(map(len, self._tables))
        self._names = list(chain.from_iterable(self._tables))
        self._views = [table.values() for table in self._tables]
        self._objects = list(chain.from_iterable(self._views))

    def refresh(self) -> None:
        """Looks whether anything was exchanged."""
        # In one call each, of the thousands of entries that a deep model has: a loop over them is a part of a replay.
        is_same = (
            list(map(len, self._tables)) == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._objects))
            and all(map(is_, chain.from_iterable(self._tables), self._names))
        )
        if not is_same:
            self._look()
