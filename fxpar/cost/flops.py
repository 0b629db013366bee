"""The arithmetic of matrix products.

Enters: a program. Leaves: floating point operations of every matrix product and attention, in closed form; the
operators that may hold products of which nothing is known; the share that ranks divide among them. The choice of
layouts and all reports count with these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod

import torch
from torch import fx

from fxpar.cost.communication import symbol_sizes
from fxpar.ir.operators import computed_fraction
from fxpar.ir.program import Program, TensorType, operands, output_layouts
from fxpar.layout.symbolic_sizes import Size, evaluate, product, simplify
from fxpar.mesh.axes import Cuts
from fxpar.ops.attention import attention_backward
from fxpar.ops.operator import TORCH_OPERATORS, Operator, alike
from fxpar.rules.table import key_of, rule_of
from fxpar.signatures.engine import Labelling, Refusal
from fxpar.signatures.matmul import contracted_dims, einsum_steps
from fxpar.signatures.op_call import OpCall, bind_arguments, call_of

Formula = Callable[[OpCall], Size]


def matmul_flops(program: Program) -> Iterator[tuple[fx.Node, Size]]:
    """Yields forward FLOPs (2 a multiply-add) of every matrix product and attention, over global shapes."""
    for node in program.graph.nodes:
        if node.op == "call_function":
            flops = simplify(_flops(node))
            if flops != 0:
                yield node, flops


def attention_backward_flops(program: Program) -> Iterator[tuple[fx.Node, Size]]:
    """Yields FLOPs of every backward of attention, over global shapes: five products, of which a forward has two.

    Kernels leave out what a causal mask hides.
    """
    for node in program.graph.nodes:
        if node.target is attention_backward:
            flops = _attention(call_of(node, 1)) * 5 / 2
            yield node, simplify(flops / 2 if bind_arguments(node)["is_causal"] else flops)


def uncounted(program: Program) -> dict[str, int]:
    """Returns operators that may multiply matrices and that no formula knows, with the number of their calls."""
    return dict(sorted(Counter(name for node in program.graph.nodes if (name := unknown_product(node))).items()))


def _flops(node: fx.Node) -> Size:
    record = node.target if isinstance(node.target, Operator) else TORCH_OPERATORS.get(node.target)
    formula = (record and record.flops) or _FORMULAS.get(key_of(alike(node.target) or node.target))
    if formula is not None:
        return formula(call_of(node, 1))
    return _by_labels(node) if _is_foreign(node) else 0


def _is_foreign(node: fx.Node) -> bool:
    """Returns whether it is an operator of neither torch nor fxpar."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims", "fxpar")


def _by_labels(node: fx.Node) -> Size:
    """Counts by a registered rule: what several operands have in common and the result lacks is summed."""
    rule = rule_of(node.target)
    call = call_of(node, 1)
    labelling = rule.labels(call) if rule is not None and rule.labels is not None and call.outputs else None
    if not isinstance(labelling, Labelling):
        return 0
    sizes = {}
    for label in labelling.summed:
        holding = [
            kind.shape[labels.index(label)]
            for kind, labels in zip(call.operands, labelling.operands, strict=True)
            if label in labels
        ]
        if len(holding) > 1:
            sizes[label] = holding[0]
    return 2 * product((*call.outputs[0].shape, *sizes.values())) if sizes else 0


def _size(call: OpCall) -> Size:
    return product(call.outputs[0].shape)


def _operand(call: OpCall, name: str) -> TensorType:
    return call.operands[call.names.index(name)]


def _contracting(name: str, *, batch: bool = False) -> Formula:
    """Returns the formula of a sum over the last dimension of operand `name`; `batch`: over the first one too."""

    def flops(call: OpCall) -> Size:
        shape = _operand(call, name).shape
        return 2 * _size(call) * shape[-1] * (shape[0] if batch else 1)

    return flops


def _attention(call: OpCall) -> Size:
    rows, columns = product(call.outputs[0].shape[:-1]), _operand(call, "key").shape[-2]
    return 2 * rows * columns * (_operand(call, "query").shape[-1] + _operand(call, "value").shape[-1])


def _convolution(call: OpCall) -> Size:
    """Counts that every element of the result, if transposed of the input, meets the whole kernel."""
    spread = bool(call.get("transposed", "conv_transpose" in key_of(call.target)))
    rows = product(_operand(call, "input").shape) if spread else _size(call)
    return 2 * rows * product(_operand(call, "weight").shape[1:])


def _grouped(call: OpCall) -> Size:
    """Counts groups of rows `[t, k] × [e, k, n]`, columns `[e, m, k] × [k, t]`, or summands `[m, t] × [t, n]`."""
    first, second = (kind.shape for kind in call.operands[:2])
    if len(first) == len(second) == 2:
        return 2 * first[0] * first[1] * second[1]
    return 2 * _size(call) * first[-1]


def _einsum(call: OpCall) -> Size:
    steps = einsum_steps(call)
    if isinstance(steps, Refusal):
        return 0
    return sum(2 * product(list(step.sizes.values())) for step in steps if step.summed and step.operands > 1)


def _tensordot(call: OpCall) -> Size:
    shape, (dims, _) = call.operands[0].shape, contracted_dims(call)
    return 2 * _size(call) * product([shape[d] for d in dims]) if dims else 0


def _bilinear(call: OpCall) -> Size:
    _, i, j = _operand(call, "weight").shape
    return 2 * _size(call) * (i * j + j)


def _recurrent(call: OpCall) -> Size:
    """Counts that every matrix meets every row of the input once."""
    rows = product(call.operands[0].shape[:-1])
    pairs = zip(call.names, call.operands, strict=True)
    return 2 * rows * sum(product(kind.shape) for name, kind in pairs if name == "params" and len(kind.shape) == 2)


def _cell(call: OpCall) -> Size:
    rows = product(call.operands[0].shape[:-1])
    return 2 * rows * (product(_operand(call, "w_ih").shape) + product(_operand(call, "w_hh").shape))


def _formulas() -> dict[str, Formula]:
    aten = {
        **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "vdot", "inner", "_scaled_mm", "_int_mm"), "self"),
        "linear": "input",
        **dict.fromkeys(("addmm", "_addmm_activation"), "mat1"),
        "addmv": "mat",
        "baddbmm": "batch1",
    }
    formulas = {f"aten.{name}.default": _contracting(operand) for name, operand in aten.items()}
    for which in ("default", "padding"):
        formulas |= dict.fromkeys((f"aten.conv{d}d.{which}" for d in (1, 2, 3)), _convolution)
    kernels = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "attention_math")
    return {
        **formulas,
        "aten.addbmm.default": _contracting("batch1", batch=True),
        "aten.conv_transpose1d.default": _convolution,
        **dict.fromkeys(("aten.conv_transpose2d.input", "aten.conv_transpose3d.input"), _convolution),
        **dict.fromkeys(("aten.convolution.default", "aten._convolution.default"), _convolution),
        **dict.fromkeys(("aten.scaled_dot_product_attention.default", "fxpar.attention_forward"), _attention),
        **dict.fromkeys((f"aten._scaled_dot_product_{name}.default" for name in kernels), _attention),
        **dict.fromkeys(("aten._grouped_mm.default", "aten._scaled_grouped_mm.default"), _grouped),
        "transformers.grouped_mm_fallback.default": _grouped,
        "aten.einsum.default": _einsum,
        "aten.tensordot.default": _tensordot,
        "aten.bilinear.default": _bilinear,
        **dict.fromkeys((f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")), _recurrent),
        **dict.fromkeys(
            (f"aten.{name}.default" for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")), _cell
        ),
    }


_FORMULAS: Mapping[str, Formula] = _formulas()

# Operators of torch that take several floating tensors, have no rule, and multiply no matrices.
_NO_PRODUCTS = (
    "scatter index masked_scatter slice_scatter select_scatter diagonal_scatter as_strided_scatter put batch_norm "
    "instance_norm native_batch_norm cudnn_batch_norm native_group_norm grid_sampler take cross dist pairwise_distance "
    "cosine_similarity embedding_bag quantize bucketize searchsorted where cat stack block_diag cartesian_prod hstack "
    "vstack dstack column_stack meshgrid broadcast copy fill isclose allclose equal kron ger outer heaviside hypot "
    "fmax fmin complex polar nextafter ldexp copysign rnn_pad lerp addr trapezoid renorm normal bernoulli poisson"
).split()
# Those that multiply matrices of one operand.
_OF_ONE = ("linalg_", "matrix_", "cov", "corrcoef", "inverse", "pinverse", "pdist", "cdist", "chain_matmul")

# What begins like these and multiplies no matrices.
_NORMS = ("linalg_vector_norm", "linalg_norm", "linalg_cross", "linalg_diagonal", "linalg_vecdot")


def unknown_product(node: fx.Node) -> str:
    """Returns the name of an operator that may multiply matrices and that no formula knows; empty for others."""
    if node.op != "call_function":
        return ""
    call = call_of(node, 1)
    if not any(kind.is_float for kind in call.outputs) or not any(kind.is_float for kind in call.operands):
        return ""
    if isinstance(node.target, Operator):
        return node.target.uncounted(call) if node.target.uncounted is not None else ""
    return key_of(node.target) if _is_unknown(node, call) else ""


def _is_unknown(node: fx.Node, call: OpCall) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or key_of(node.target) in _FORMULAS:
        return False
    name = node.target._schema.name.partition("::")[2].lstrip("_")
    if node.target.namespace in ("aten", "prims") and name.startswith(_OF_ONE) and name not in _NORMS:
        return True  # a rule says how matrices are shared out, and not what one costs
    if rule_of(node.target) is not None:
        return False
    if node.target.namespace not in ("aten", "prims"):
        return True
    is_elementwise = torch.Tag.pointwise in node.target.tags
    several = sum(kind.is_float for kind in call.operands) > 1
    return several and not is_elementwise and not name.startswith(tuple(_NO_PRODUCTS))


# ---------------------------------------------------------------------- what ranks divide


def split_flops(program: Program, sizes: Mapping[str, int] | None = None) -> float:
    """Returns the share of the matrix FLOPs that ranks which split layers divide among them; 1 where there are none.

    Of a product that c of n ranks compute alike, that is (1 - c/n) / (1 - 1/n). It is a share of what can be counted:
    `uncounted` lists the rest.
    """
    axes = program.plan.axes_for(Cuts.FEATURES)
    n = prod(axes.values())
    if n == 1:
        return 1.0
    values = symbol_sizes(program, sizes)
    total, split = 0, 0.0
    for node, flops in matmul_flops(program):
        amount = evaluate(flops, values)
        total += amount
        split += amount * (1 - computed_part(node, axes)) / (1 - 1 / n)
    return split / total if total else 0.0


def computed_part(node: fx.Node, axes: Mapping[str, int]) -> float:
    """Returns what part of a product a rank computes.

    Args:
        axes: those that count, with their sizes.
    """
    layouts = [layout for o in operands(node) for layout in output_layouts(o)]
    return prod(computed_fraction([layout.on(axis) for layout in layouts], n) for axis, n in axes.items())
