"""The parameters and buffers of a module, found once.

Enters: a module. Leaves: its tensors by first name, and whether anything was exchanged since. `named_parameters` walks
all modules: of a deep model that takes longer than a replay of its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Tensors:
    """Parameters and buffers of a module by their first names.

    Attributes:
        version: a number that changes where a module, parameter or buffer is another object than before.
        parameters: as `named_parameters` gave them at the last look.
        all: buffers too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.version = 0
        self._module = module
        self._slots: list[tuple[Mapping[str, Any], str, Any]] = []
        self.parameters: dict[str, Tensor] = {}
        self.all: dict[str, Tensor] = {}
        self._look()

    def _look(self) -> None:
        self.version += 1
        self.parameters = dict(self._module.named_parameters())
        self.all = {**dict(self._module.named_buffers()), **self.parameters}
        modules = list(self._module.modules())
        tables = (table for each in modules for table in (each._modules, each._parameters, each._buffers))
        self._slots = [(table, name, value) for table in tables for name, value in table.items()]
        self._sizes = [(table, len(table)) for each in modules for table in (each._modules, each._parameters) if table]

    def refresh(self) -> None:
        """Looks whether anything was exchanged."""
        for table, name, value in self._slots:
            if table.get(name) is not value:
                return self._look()
        for table, size in self._sizes:
            if len(table) != size:
                return self._look()
        return None
