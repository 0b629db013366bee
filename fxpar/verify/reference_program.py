"""The program of one device by which values are judged, in double precision.

Enters: a captured program. Leaves: the same program with every floating type, cast and literal type float64: losses,
norms and rotary tables are float32 even in a model that was cast to double, and would hide errors below 1e-7. Where
experts have a limited capacity, nobody gets the pairs of a token and an expert beyond it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from fxpar.errors import CheckFailed
from fxpar.experts.compiler.routed_rows import routed
from fxpar.ir.program import (
    Note,
    Parameter,
    Program,
    TensorType,
    describe,
    has_note,
    note,
    operands,
    output_types,
    set_note,
    tensor_type,
)
from fxpar.ir.properties import Property
from fxpar.ir.regions import inlined
from fxpar.ir.step import batch_size
from fxpar.manager import PassManager
from fxpar.passes import CANONICAL_PASSES
from fxpar.passes.annotate import annotate
from fxpar.passes.assign_rng import assign_rng
from fxpar.passes.divide_batch import divide_batch
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.plan.plan import Plan
from fxpar.signatures.op_call import write_defaults
from fxpar.torch_internals import TorchDispatchMode

# What rounding may change in the results of a program: of how much a second way to compute the same may deviate.

aten = torch.ops.aten

UNITS = 16
"""Units of the last place by which results of the same operations may differ: kernels of one library."""
FACTOR = 4
"""How many times what was measured is allowed."""
_ADDITIONS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor})


def epsilon(program: Program) -> float:
    """Returns the unit of the last place of the coarsest floating type of any value; 0 where there is none."""
    kinds = {kind.dtype for node in program.graph.nodes if has_note(node) for kind in output_types(node)}
    return max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)


class OtherOrder(TorchDispatchMode):
    """While active, each sum is rounded as one in another order could be.

    Operands of sums, of products of matrices too, are multiplied by 1 ± eps/2·sqrt(1 + log2(terms)): so far the
    rounding of terms that are added in pairs goes. Half precision, which is summed in float32, is multiplied by
    1 ± eps/2. Element-wise operations, and what moves values, give what they give. Whole numbers are added without
    rounding.

    Args:
        seed: of the signs.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator."""
        kwargs = kwargs or {}
        if func in _ADDITIONS:
            # A sum in place writes into its first operand, which a moved copy is not.
            first = args[0] if func._schema.is_mutable else self._moved(args[0], 2)
            return func(first, self._moved(args[1], 2), *args[2:], **kwargs)
        if not _may_sum(func):
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if _is_inexact_tensor(t)]
        terms = max((max(t.shape, default=1) for t in tensors if t.numel()), default=1)
        moved_args, moved_kwargs = pytree.tree_map(lambda value: self._moved(value, terms), (args, kwargs))
        result = func(*moved_args, **moved_kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return result
        # What only moves elements rounds nothing: it is run on the true operands.
        moved = [t for t in pytree.tree_leaves((moved_args, moved_kwargs)) if _is_inexact_tensor(t)]
        return func(*args, **kwargs) if _is_moved(result, moved) else result

    def _moved(self, value: Any, terms: int) -> Any:
        if not _is_inexact_tensor(value) or not value.numel() or not value.dtype.is_floating_point:
            return value
        if bool((value == value.round()).all()):
            return value
        info = torch.finfo(value.dtype)
        size = info.eps / 2 * (1 if info.bits < 32 else math.sqrt(1 + math.log2(terms)))
        signs = torch.randint(0, 2, value.shape, generator=self._generator).to(value.device, value.dtype) * 2 - 1
        other = value * (1 + size * signs)
        return torch.where(other.isfinite(), other, value)


def _is_inexact_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _may_sum(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.is_view or func._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:  # attention alone sums; a second call would draw other numbers
        return "scaled_dot_product" in func._schema.name
    return torch.Tag.pointwise not in func.tags


def _is_moved(result: Any, operands: list[Tensor]) -> bool:
    """Returns whether a result consists of elements of the operands and of zeros, or of no floating numbers."""
    outputs = [t.flatten() for t in pytree.tree_leaves(result) if _is_inexact_tensor(t)]
    if not outputs or not operands:
        return True
    dtype = outputs[0].dtype
    known = torch.cat([outputs[0].new_zeros(1), *(t.flatten().to(dtype) for t in operands)]).unique()

    def is_known(values: Tensor) -> bool:
        places = torch.searchsorted(known, values).clamp(max=len(known) - 1)
        return bool(((known[places] == values) | values.isnan()).all())

    return not dtype.is_complex and all(is_known(values) for values in outputs if values.dtype == dtype)


_WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}


def _double(kind: Any) -> Any:
    if isinstance(kind, TensorType) and kind.dtype in _WIDE:
        return TensorType(_WIDE[kind.dtype], kind.shape)
    if isinstance(kind, tuple):
        return tuple(_double(k) for k in kind)
    return kind


def promote(program: Program) -> Program:
    """Returns the program in float64; integer and boolean values keep their types.

    Numbers that torch would take from a type are those of the program's own types. Floating values that torch makes of
    integers alone (`ids / 7`), in its default type, are cast.

    Raises:
        CheckFailed: the program reads the bits of floating numbers, which are others in float64.
    """
    result = inlined(program.copy())
    write_defaults(result.graph.nodes)
    for node in result.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype):
        _check_bits(node)
    for node in list(result.graph.nodes):
        if node.op == "output":
            continue
        has_default_type = _has_default_type(node)
        noted: Note = note(node)
        set_note(node, Note(**{**vars(noted), "type": _double(noted.type)}))
        node.args = map_aggregate(node.args, _wide)
        node.kwargs = map_aggregate(node.kwargs, _wide)
        if has_default_type:
            _leave_default_type(result.graph, node)
    result.graph_module.recompile()
    return result.with_(
        parameters=tuple(Parameter(**{**vars(p), "type": _double(p.type)}) for p in result.parameters),
        inputs=tuple(replace(i, type=_double(i.type)) for i in result.inputs),
        constants={name: wide(value) for name, value in result.constants.items()},
    )


def _is_inexact(kind: Any) -> bool:
    return isinstance(kind, TensorType) and (kind.dtype.is_floating_point or kind.dtype.is_complex)


def _has_default_type(node: fx.Node) -> bool:
    """Returns whether the result has torch's default type, which neither an operand nor an argument says."""
    if not isinstance(node.target, torch._ops.OpOverload) or not _is_inexact(note(node).type):
        return False
    if any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values())):
        return False
    ignores_operands = node.target._schema.name in ("aten::linspace", "aten::logspace")
    return ignores_operands or not any(_is_inexact(kind) for x in operands(node) for kind in output_types(x))


def _leave_default_type(graph: fx.Graph, node: fx.Node) -> None:
    """Has a node, whose note is float64, give that type: by its argument, or cast after it."""
    dtype = tensor_type(node).dtype
    target: Any = node.target
    if "dtype" in {argument.name for argument in target._schema.arguments}:
        node.update_kwarg("dtype", dtype)
        return
    with graph.inserting_after(node):
        cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    set_note(cast, replace(note(node), random=0))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _check_bits(node: fx.Node) -> None:
    if {tensor_type(node).dtype, tensor_type(node.args[0]).dtype} & _WIDE.keys():  # type: ignore[arg-type]
        raise CheckFailed(
            "reads the bits of floating numbers, which are others in float64",
            where=describe(node),
            remedy="check this program statically (--level static)",
        )


def _wide(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def wide(value: torch.Tensor) -> torch.Tensor:
    """Returns a floating tensor in float64, others as they are."""
    return value.to(_WIDE.get(value.dtype, value.dtype))


def reference_program(captured: Program) -> Program:
    """Returns the captured program on one device with the counter generator's masks, in float64."""
    if captured.loss and captured.plan.loss_reduction != "mean":
        # What the plan takes for the loss is written into the graph; its numbers are those of the whole.
        captured = PassManager([*CANONICAL_PASSES, divide_batch]).run(captured)
    single = captured.with_(plan=captured.plan.on_one_rank())
    program = promote(PassManager([*CANONICAL_PASSES, annotate, insert_collectives, assign_rng]).run(single))
    if captured.plan.experts.capacity_factor is not None and Property.EXPERTS not in captured.properties:
        drop_beyond_capacity(program, captured.plan)
    return program


# Experts of a limited capacity: a loop over pairs of a token and an expert, which drops as ranks do. It has nothing of
# `experts.compiler.expert_capacity`, so that a fault there shows.


def drop_beyond_capacity(program: Program, plan: Plan) -> None:
    """Has each sort of tokens by expert take the pairs that a run of all ranks keeps.

    Args:
        program: on one device; it is changed.
        plan: of all ranks, with a `capacity_factor`.
    """
    for region in routed(program):
        sort, (indices,), weights = region.sort, operands(region.sort), None
        if plan.experts.drop_policy == "probs":
            weights = next(operands(put)[1] for put in region.puts if put.target is torch.ops.fxpar.moe_combine.default)
            _bring_before(weights, sort)
        tensor_ranks = plan.tp if plan.ep > 1 else 1
        with program.graph.inserting_before(sort):
            # Where no row is cut, what a data rank has is as one row.
            rows = _batch(program) if tensor_ranks > 1 else plan.data_ranks
            cuts = rows, plan.data_ranks, tensor_ranks
            args = (indices, weights, region.experts, *cuts, str(plan.experts.capacity_factor))
            limited = program.graph.call_function(kept_pairs, args)
        set_note(limited, note(indices))
        sort.replace_input_with(indices, limited)


def kept_pairs(
    indices: Tensor, weights: Tensor | None, experts: int, rows: int, data_ranks: int, tensor_ranks: int, factor: str
) -> Tensor:
    """Returns the experts of each token, int[T, K]; `experts` for the pairs that are dropped.

    Args:
        indices: int[T, K], of tokens by row of the batch.
        weights: [T, K]; an expert keeps those that weigh most, of equal ones the first. None: the first.
        rows: of the batch, or any number of equal parts of it where `tensor_ranks` is 1.
        data_ranks: that share out rows.
        tensor_ranks: that share out the sequence of each row, the last of them fewer where it does not divide.
        factor: multiple of the rows that each expert of a source would have if all had as many.
    """
    tokens, choices = indices.shape
    length, rows_of_rank = tokens // rows, rows // data_ranks
    part = math.ceil(length / tensor_ranks)
    capacity = math.ceil(Fraction(factor) * rows_of_rank * part * choices / experts)
    pairs: dict[tuple[int, int, int], list[tuple[float, int, int]]] = {}
    weight = [[0.0] * choices] * tokens if weights is None else weights.detach().tolist()
    for token, chosen in enumerate(indices.tolist()):
        row, position = divmod(token, length)
        for choice, expert in enumerate(chosen):
            source = row // rows_of_rank, position // part
            pairs.setdefault((*source, expert), []).append((-weight[token][choice], token, choice))
    limited = torch.full_like(indices, experts)
    for (*_, expert), candidates in pairs.items():
        for _, token, choice in sorted(candidates)[:capacity]:
            limited[token, choice] = expert
    return limited


def _bring_before(node: fx.Node, place: fx.Node) -> None:
    """Moves a node, and what it is made of, in front of a place that it does not depend on."""
    if place < node:
        for operand in node.all_input_nodes:
            _bring_before(operand, place)
        place.prepend(node)


def _batch(program: Program) -> fx.Node | int:
    """Returns how many rows the batch has, as a number, or as a node that reads it off an input."""
    size = batch_size(program)
    if isinstance(size, int):
        return size
    for entry in program.inputs:
        if size in entry.type.shape:
            sizes = program.node(entry.node), entry.type.shape.index(size)
            return program.graph.call_function(torch.ops.aten.sym_size.int, sizes)
    raise AssertionError(f"no input has {size} rows")
