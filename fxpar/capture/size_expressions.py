"""Sizes that a program can write: polynomials in the sizes of its inputs.

Enters: sizes of a trace. Leaves: nothing, or a `SizeError` as soon as one is none; with fewer symbols it may be a
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fxpar.capture.row_groups import divisors, in_groups
from fxpar.errors import CaptureError, TextError
from fxpar.layout.symbolic_sizes import Size, names, parse_size, product, shape_text, simplify, symbol
from fxpar.program.program import Program, describe, operands, tensor_type
from fxpar.signatures.op_call import bind_arguments


class SizeError(CaptureError):
    """A size that a program cannot write; with fewer symbols it could be a number."""


def written(size: torch.SymInt, groups: Mapping[str, int] = MappingProxyType({})) -> Size:
    """The size in the symbols of the trace.

    Args:
        groups: for symbols that are multiples of a number that number: `b // 4` is `b / 4` then.

    Raises:
        SizeError: it is no polynomial.
    """
    try:
        parsed = parse_size(str(in_groups(size.node.expr, groups)))
    except TextError:
        raise SizeError(
            f"the size {size.node.expr} is no polynomial in the inputs' sizes", remedy="reshape with explicit sizes"
        ) from None
    shares = {symbol(name): symbol(name) / groups[name] for name in names((parsed,)) & groups.keys()}
    return simplify(parsed.subs(shares)) if shares and not isinstance(parsed, int) else parsed


def check_views(program: Program) -> None:
    """Checks that views hold as many elements as what they are of, at all sizes.

    Raises:
        SizeError: an author's number (`reshape(48, 24)`) is that of one batch.
    """
    aten = torch.ops.aten
    for node in program.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            before, after, sizes = tensor_type(operands(node)[0]).shape, tensor_type(node).shape, node.args[1]
            assert isinstance(sizes, (list, tuple))
            # A number where the trace has found that sizes must make it so.
            fixed = any(isinstance(a, int) and a not in (-1, b) for a, b in zip(sizes, after, strict=True))
            if fixed or product(before) != product(after):
                raise SizeError(
                    f"a view of {shape_text(before)} with sizes written as numbers is right for one size alone",
                    where=describe(node),
                    remedy="take sizes from the inputs' shapes",
                )


def check_splits(program: Program) -> None:
    """Checks that tensors are split into as many parts at all sizes.

    Raises:
        SizeError: how many there are is that of one batch (`split(16)` of a size that varies).
    """
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.split.Tensor and isinstance(node.args[1], int):
            shape, dim = tensor_type(operands(node)[0]).shape, bind_arguments(node)["dim"]
            if not isinstance(shape[dim], int):
                raise SizeError(
                    f"a dimension of {shape[dim]} is split into parts of {node.args[1]}, whose number is that of one "
                    "size alone",
                    where=describe(node),
                    remedy="split it into a number of parts (chunk), or give batches of one size",
                )


class SizeChecker:
    """Checks sizes while they arise: a trace that is no use takes long where every size is one of many terms."""

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def check(self, result: Any) -> None:
        """Checks the shapes of what an operation gives.

        Raises:
            SizeError: one is no polynomial.
        """
        for value in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            for size in value.shape if isinstance(value, Tensor) else ():
                if isinstance(size, torch.SymInt) and size.node.expr not in self._known:
                    try:
                        written(size)
                    except SizeError:
                        written(size, divisors(size.node.shape_env))
                    self._known.add(size.node.expr)
