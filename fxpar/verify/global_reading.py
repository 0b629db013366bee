"""The whole reading of a localised program: the program of one device that its text is.

Enters: an operation of a localised program. Leaves: the same operation over global shapes.

A text of `localize` says one thing to a rank and to one device, but for the sizes that speak of cut dimensions: those
of views, expansions and splits are what the notes' global shapes give, bounds of slices what `fxpar.rules.local` does.
Every other number, a literal or a size that is read, is the same in both readings. What the static checks prove of a
text is that all ranks together compute its whole reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpar.layout.layout import Placement
from fxpar.program.program import operands, output_layouts
from fxpar.rules import Refusal, bind_arguments, call_of
from fxpar.rules.local import whole_call
from fxpar.signatures.sized import SIZED, name_of_sizes

aten = torch.ops.aten

SPLITS = frozenset({aten.split_with_sizes.default, aten.split.sizes})

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def whole_arguments(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Mapping[str, int], outputs: Sequence[Tensor]
) -> Arguments:
    """The arguments of the operation on one device.

    Args:
        node: of a localised program.
        args: its arguments, values in place of nodes.
        kwargs: the same by name.
        axes: sizes of the mesh axes.
        outputs: of the global shapes that the notes say.

    Raises:
        ValueError: the bounds of a slice are those of no slice of the whole.
    """
    if node.target in SIZED:
        return _sized(node, args, kwargs, outputs)
    if node.target in SPLITS:
        return _split(node, args, kwargs, outputs)
    if node.target is aten.slice.Tensor:
        return _slice(node, args, kwargs, axes)
    return args, kwargs


def _cuts(node: fx.Node) -> list[tuple[str, Placement]]:
    return [(axis, placement) for axis, placement in output_layouts(node)[0] if placement.is_shard]


def _sized(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> Arguments:
    """Sizes of dimensions that are cut are the note's; others, -1 too, stand as they are."""
    target: Any = node.target
    name, at = name_of_sizes(target), SIZED[target]
    cut = {placement.dim for _, placement in _cuts(node)}
    passed = kwargs[name] if name in kwargs else args[at]
    if len(passed) != outputs[0].dim():
        raise ValueError(f"{len(passed)} sizes are given for {outputs[0].dim()} dimensions")
    sizes = [outputs[0].shape[dim] if dim in cut and size != -1 else size for dim, size in enumerate(passed)]
    if name in kwargs:
        return args, {**kwargs, name: sizes}
    return (*args[:at], sizes, *args[at + 1 :]), kwargs


def _split(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> Arguments:
    source, arguments = operands(node)[0], bind_arguments(node)
    rank = outputs[0].dim() if outputs else 1
    dim = int(arguments.get("dim", 0)) % max(rank, 1)
    if all(placement.dim != dim for _, placement in _cuts(source)):
        return args, kwargs
    return (args[0], [output.shape[dim] for output in outputs], dim), {}


def _slice(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Mapping[str, int]) -> Arguments:
    if not _cuts(operands(node)[0]):
        return args, kwargs
    call = call_of(node, 1)
    whole = whole_call(call, output_layouts(operands(node)[0])[0], axes)
    if isinstance(whole, Refusal):
        raise ValueError(whole.reason)
    if whole is call:
        return args, kwargs
    bounds = {name: whole.get(name) for name in ("dim", "start", "end", "step")}
    return args[:1], {**{k: v for k, v in kwargs.items() if k == "self"}, **bounds}
