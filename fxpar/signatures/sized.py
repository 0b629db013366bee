"""Operations that take the shape of their result as an argument: each rank calls them with that of its part.

Enters: nothing. Leaves: for each such operation which of its arguments is the shape, by place and by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

aten = torch.ops.aten

# What gives an image other numbers of pixels.
RESAMPLED = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa
""".split()


def _named(name: str, *targets: torch._ops.OpOverload) -> dict[torch._ops.OpOverload, int]:
    return {target: [argument.name for argument in target._schema.arguments].index(name) for target in targets}


# The place of the shape among the arguments.
SIZED: Mapping[torch._ops.OpOverload, int] = {
    **_named("size", aten.view.default, aten.expand.default),
    **_named("shape", aten.reshape.default),
    **_named("input_size", *(getattr(aten, f"{name}_backward").default for name in RESAMPLED)),
}


def name_of_sizes(target: torch._ops.OpOverload) -> str:
    """Returns the name of the argument that is the shape of the result."""
    return str(target._schema.arguments[SIZED[target]].name)
