"""The operations that traced transformers consist of, with their samples.

Enters: a seed, and whether sizes shall be divisible by 2 and 3. Leaves: `Operation`s for the rule oracle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpar.verify.oracle_moves import creation, indexing, parts, views
from fxpar.verify.oracle_ranks import Sample
from fxpar.verify.oracle_samples import (
    Build,
    Draw,
    attention,
    binary,
    losses,
    masked_attention,
    products,
    reductions,
    unary,
    words,
)


@dataclass(frozen=True)
class Operation:
    """An operator and its samples.

    Attributes:
        target: the overload.
        samples: calls; none where the operator has no tensor operand.
        exempt: why no sharded signature is asked of it; empty for the others.
    """

    target: torch._ops.OpOverload
    samples: tuple[Sample, ...]
    exempt: str = ""


_BUILDERS: Sequence[Build] = (
    unary,
    binary,
    products,
    attention,
    masked_attention,
    reductions,
    losses,
    views,
    parts,
    indexing,
    creation,
)

_NO_VALUES = "the result does not depend on the operand's values"
EXEMPT: Mapping[str, str] = {
    **dict.fromkeys(("aten.arange.default", "aten.full.default", "aten.zeros.default"), "it has no tensor operand"),
    **dict.fromkeys((f"aten.new_{name}.default" for name in ("ones", "zeros", "full")), _NO_VALUES),
}

# Legal signatures that the rules leave out, and why.
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        (f"aten.{name}.default" for name in ("linear", "addmm", "baddbmm", "conv1d", "conv2d")),
        "a row-split product with a partial bias: canonicalize separates biases, which are added after the reduction",
    ),
    **dict.fromkeys(
        ("aten.dropout.default", "aten.native_dropout.default"),
        "linear only where it is switched off; random bits for a partial value are refused",
    ),
    "aten.cross_entropy_loss.default": "linear in class weights and probabilities, which no model computes as sums",
    "aten.gather.default": "an index shorter than the values that reaches to the end of one of their runs",
    "aten.scaled_dot_product_attention.default": "whole kv heads with query heads cut inside each group: "
    "the axis is factored instead",
}

# What `torch.export` and `run_decompositions({})` leave of the transformers that fxpar is tried on.
OCCURRING = tuple(
    f"aten.{name}" if "." in name else f"aten.{name}.default"
    for name in words("""
view _unsafe_view add.Tensor mul.Tensor mul.Scalar sub.Tensor div.Tensor unsqueeze squeeze.dim addmm mm bmm baddbmm
linear matmul transpose.int permute t slice.Tensor select.int split.Tensor split_with_sizes chunk unbind.int cat stack
expand repeat clone detach layer_norm rms_norm arange native_dropout dropout __and__.Tensor pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar tanh gelu silu relu sigmoid neg rsqrt sqrt cos sin exp log abs mean.dim sum.dim_IntList
softmax.int log_softmax.int argmax amax cumsum where.self where.ScalarOther masked_fill.Scalar _to_copy new_ones zeros
full zeros_like ones_like full_like le.Tensor lt.Tensor gt.Tensor eq.Tensor ne.Tensor ge.Scalar logical_not
logical_and bitwise_not index.Tensor gather index_select embedding scaled_dot_product_attention pad tril triu flip
roll cross_entropy_loss conv2d
""")
)


def overload(name: str) -> torch._ops.OpOverload:
    """The operator of a name in the table of rules, `aten.view.default`."""
    _, packet, which = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), which)  # type: ignore[no-any-return]


def operations(seed: int, even: bool) -> dict[str, Operation]:
    """Every operation with samples, by name; those without a tensor operand come last.

    Args:
        seed: of sizes and values.
        even: whether all sizes are divisible by 2 and 3.
    """
    draw = Draw(seed, even)
    found: dict[str, list[Sample]] = {}
    for build in _BUILDERS:
        for name, samples in build(draw).items():
            full = f"aten.{name}" if "." in name else f"aten.{name}.default"
            found.setdefault(full, []).extend(samples)
    for name in EXEMPT:
        found.setdefault(name, [])
    return {name: Operation(overload(name), tuple(samples), EXEMPT.get(name, "")) for name, samples in found.items()}
