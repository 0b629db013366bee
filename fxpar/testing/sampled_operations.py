"""The operations that traced transformers consist of, with their samples.

Enters: a seed, and whether sizes shall be divisible by 2 and 3. Leaves: `OpSamples`s for the rule oracle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxpar.ops.registry import COMPOSITE_OF, OPERATORS
from fxpar.testing import backward_samples
from fxpar.testing.backward_samples import routed
from fxpar.testing.composite import composite
from fxpar.testing.ranks import Sample
from fxpar.testing.samples import (
    Build,
    Draw,
    attention,
    binary,
    complexes,
    contractions,
    creation,
    indexing,
    losses,
    masked_attention,
    parts,
    products,
    reductions,
    unary,
    views,
    words,
)
from fxpar.testing.trial import Target


@dataclass(frozen=True)
class OpSamples:
    """An operator and its samples.

    Attributes:
        target: the overload, or a graph operator of fxpar.
        samples: calls; none where the operator has no tensor operand.
        exempt: why no sharded signature is asked of it; empty for the others.
    """

    target: Target
    samples: tuple[Sample, ...]
    exempt: str = ""


_BUILDERS: Sequence[Build] = (
    unary,
    binary,
    products,
    contractions,
    attention,
    masked_attention,
    reductions,
    losses,
    views,
    parts,
    indexing,
    creation,
    composite,
    backward_samples.element_wise,
    backward_samples.losses_and_norms,
    backward_samples.places,
    backward_samples.convolutions,
    backward_samples.attention,
    complexes,
    routed,
    backward_samples.elements,
    backward_samples.reduced,
    backward_samples.scans,
    backward_samples.pooled,
    backward_samples.sampled,
    backward_samples.algebra,
)

# What occurs and has no tensor operand, so that nothing can be asked of a rule.
WITHOUT_OPERANDS = (
    *(f"aten.arange.{which}" for which in ("default", "start", "start_step")),
    *(f"aten.{name}.default" for name in ("full", "ones", "zeros")),
)

_NO_VALUES = "the result does not depend on the operand's values"
EXEMPT: Mapping[str, str] = {
    **dict.fromkeys(WITHOUT_OPERANDS, "it has no tensor operand"),
    "fxpar.uniform": "its operand is the generator's state",
    **dict.fromkeys((f"aten.new_{name}.default" for name in ("ones", "zeros", "full")), _NO_VALUES),
}

_WORDS = words("cross_entropy embedding nll_loss log_softmax logsumexp topk")
_SAVING = ("cross_entropy_forward",)

# Operators that the oracle cannot run on one rank alone, or has no freedom to try, and why.
COMMUNICATING: Mapping[str, str] = {
    **dict.fromkeys(
        ("fxpar.shard_over", "fxpar.replicate_over", "fxpar.expand_over", "fxpar.sum_over"),
        "it says what the ranks hold, and gives that: programs with it are checked by value",
    ),
    **dict.fromkeys(
        ("fxpar.take_chunk", "fxpar.join_chunks", "fxpar.add_chunks"),
        "each rank cuts its rows, which are no chunk of all rows: steps with it are checked by value",
    ),
    **dict.fromkeys(
        ("fxpar.split_sizes", "fxpar.send_rows", "fxpar.return_rows"),
        "values decide how many rows travel: programs with it are checked by value",
    ),
    **dict.fromkeys(
        ("fxpar.expand_needed", "fxpar.sum_needed"),
        "it moves tokens between ranks: programs with it are checked by value",
    ),
    **dict.fromkeys(
        ("fxpar.replicate_experts", "fxpar.return_replicas"),
        "it moves weights between ranks: programs with it are checked by value",
    ),
    **dict.fromkeys(
        map(str, COMPOSITE_OF.values()),
        "it communicates inside: its ranks are simulated together, against the whole vocabulary (test_vocabulary)",
    ),
    **dict.fromkeys(
        (f"fxpar.{name}" for name in (*_SAVING, *(f"{name}_backward" for name in _WORDS))),
        "it communicates inside, of a backward: steps are simulated against autograd (tests/rewrite)",
    ),
}

# Legal signatures that the rules leave out, and why.
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        (f"aten.{name}.default" for name in ("linear", "addmm", "baddbmm", "conv1d", "conv2d", "bilinear")),
        "a row-split product with a partial bias: canonicalize separates biases, which are added after the reduction",
    ),
    "aten.native_dropout.default": "linear only where it is switched off",
    "aten.broadcast_tensors.default": "parts of equal size, cut in ways that have nothing to do with each other",
    "fxpar.function": "an author's function that is linear is not known to be",
    "aten.cross_entropy_loss.default": "linear in class weights and probabilities, which no model computes as sums",
    "aten.gather.default": "an index shorter than the values that reaches to the end of one of their runs",
}


def full_name(name: str) -> str:
    """Returns the name in the table of rules: `aten.relu.default` for `relu`, `fxpar.dropout` for itself."""
    if name.startswith("fxpar."):
        return name
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


# The operations with tensor operands in the captured and compiled transformers that fxpar is tried on.
OCCURRING = tuple(
    full_name(name)
    for name in words("""
view _unsafe_view add.Tensor mul.Tensor div.Tensor unsqueeze squeeze.dim addmm mm bmm baddbmm linear matmul
transpose.int permute slice.Tensor select.int split.Tensor split_with_sizes cat expand broadcast_tensors repeat clone
detach layer_norm native_dropout dropout __and__.Tensor pow.Tensor_Scalar pow.Tensor_Tensor tanh gelu silu relu neg
rsqrt cos sin mean.dim softmax.int where.ScalarOther masked_fill.Scalar _to_copy new_ones le.Tensor
bitwise_not index.Tensor gather embedding scaled_dot_product_attention pad tril
cross_entropy_loss mse_loss conv2d fxpar.dropout fxpar.attention fxpar.function
""")
)

# What `torch.export` and `run_decompositions({})` leave of other transformers.
ELSEWHERE = tuple(
    full_name(name)
    for name in words("""
mul.Scalar einsum t chunk unbind.int stack rms_norm pow.Scalar sigmoid sqrt exp log abs sum.dim_IntList
log_softmax.int argmax amax where.self zeros_like ones_like full_like lt.Tensor gt.Tensor ge.Scalar ne.Tensor
logical_not logical_and index_select triu flip roll tensordot inner outer bilinear sub.Tensor eq.Tensor ne.Scalar cumsum
diff
""")
)


def operator_of(name: str) -> Target:
    """Returns the operator of a name in the table of rules: `aten.view.default`, `fxpar.dropout`."""
    if name.removeprefix("fxpar.") in OPERATORS:
        return OPERATORS[name.removeprefix("fxpar.")]
    library, packet, which = name.split(".")
    return getattr(getattr(getattr(torch.ops, library), packet), which)  # type: ignore[no-any-return]


def operations(seed: int, even: bool) -> dict[str, OpSamples]:
    """Samples every operation with samples, by name; those without a tensor operand come last.

    Args:
        seed: of sizes and values.
        even: whether all sizes are divisible by 2 and 3.
    """
    draw = Draw(seed, even)
    by_name: dict[str, list[Sample]] = {}
    for build in _BUILDERS:
        for name, samples in build(draw).items():
            by_name.setdefault(full_name(name), []).extend(samples)
    by_name |= {name: [] for name in WITHOUT_OPERANDS}
    return {
        name: OpSamples(operator_of(name), tuple(samples), EXEMPT.get(name, "")) for name, samples in by_name.items()
    }
