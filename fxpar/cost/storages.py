"""What a rank holds of the values of a program: bytes, and which values are views of one storage.

Enters: a forward as all ranks run it. Leaves: `Storages`. The operators that a rank runs are run on fake tensors, which
have shapes, strides and storages but no elements, so that a view is one exactly where it is one in eager execution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from fxpar.cost.communication import symbol_sizes
from fxpar.errors import InputError
from fxpar.ir.program import Program, output_layouts, tensor_type
from fxpar.layout.nesting import local_shape
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.collectives import Group
from fxpar.ops.lower import lower

_UNCOUNTABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True)
class Storages:
    """Of one rank, by name of the node.

    Attributes:
        of: numbers of the storages in which a value is, without those of parameters and inputs.
        bytes: of each storage.
        sizes: bytes of the values themselves, those of parameters and inputs too.
    """

    of: Mapping[str, frozenset[int]]
    bytes: tuple[int, ...]
    sizes: Mapping[str, int]

    def total(self, storages: Iterable[int]) -> int:
        """Bytes of several storages."""
        return sum(self.bytes[storage] for storage in storages)


class _Run(fx.Interpreter):
    """Runs a lowered forward and remembers its values."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)  # the address of a storage is its own while it lives

    def values(self) -> dict[str, list[Tensor]]:
        """The tensors of each node."""
        leaves = {node.name: pytree.tree_leaves(value) for node, value in self.env.items()}
        return {name: [leaf for leaf in of_node if isinstance(leaf, Tensor)] for name, of_node in leaves.items()}


def storages(forward: Program, owned: frozenset[str]) -> Storages:
    """The storages of a forward, for inputs of the example's sizes.

    Args:
        forward: with property `local`, or without mesh axes.
        owned: names of placeholders that are kept as values of the program are, and not by the caller.

    Raises:
        InputError: a result has a size that only values tell.
    """
    joined = {str(node.kwargs["axis"]) for node in forward.graph.nodes if "axis" in node.kwargs}
    groups = {name: Group(name, len(forward.mesh.groups(name)[0])) for name in (*forward.axes, *sorted(joined))}
    lowered = lower(forward, groups)
    run = _Run(lowered.module)
    try:
        with FakeTensorMode(), torch.no_grad():
            placeholders = _placeholders(forward)
            places = [torch.zeros((), dtype=torch.int64) for _ in lowered.places]
            run.run(*(placeholders[name] for name in lowered.inputs), *places)
    except _UNCOUNTABLE as error:
        raise InputError(
            f"what is kept for the backward cannot be counted without values: {str(error).splitlines()[0]}",
            where="recompute",
            remedy="keep sizes that depend on values out of the model, or choose recompute='none'",
        ) from error
    return _numbered(run.values(), {n.name for n in lowered.module.graph.nodes if n.op == "placeholder"} - owned)


def _placeholders(program: Program) -> dict[str, Tensor]:
    values, tensors = symbol_sizes(program, None), {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            kind, (layout,) = tensor_type(node), output_layouts(node)
            shape = [evaluate(size, values) for size in local_shape(kind.shape, layout, program.axes)]
            tensors[node.name] = torch.empty(shape, dtype=kind.dtype)
    return tensors


def _numbered(values: Mapping[str, list[Tensor]], foreign: set[str]) -> Storages:
    without = {tensor.untyped_storage()._cdata for name in foreign for tensor in values[name]}
    known: dict[int, int] = {}
    size: list[int] = []
    of: dict[str, frozenset[int]] = {}
    for name, tensors in values.items():
        numbers = set()
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key: Any = storage._cdata
            if key not in without:
                if key not in known:
                    known[key] = len(size)
                    size.append(storage.nbytes())
                numbers.add(known[key])
        of[name] = frozenset(numbers)
    return Storages(of, tuple(size), {name: sum(tensor.nbytes for tensor in leaves) for name, leaves in values.items()})
