"""Units of a step compiled by Inductor, for the shapes of one call.

Enters: functions of tensors that a lowered graph is made of, and fake values of their shapes. Leaves: functions that
take one list of values, which they empty.

A forward and its backward are traced together and cut where least is kept between them: what is cheap is computed again
in the backward (PyTorch's min-cut).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config, ir, lowering
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpu_vec_isa import x86_isa_checker
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler import config as compiler_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fxpar.ir.program import output_node
from fxpar.ops import (
    peer_copies,  # noqa: F401 - defines the operators
    random,
    small_operators,
)
from fxpar.ops.token_chunks import hint, order_in_memory
from fxpar.peer_memory.compiler.allreduce_epilogue_fusion import sums_in_rows
from fxpar.plan.plan import Plan
from fxpar.runtime.calls import Boxed
from fxpar.runtime.graph_modes import opaque

Run = Callable[..., Sequence[Any]]


_PLACED = torch.ops.fxpar.placed_product.default
_EARLY, _LATE = "primals_", "tangents_"  # PyTorch's partitioner goes by these names


@dataclass(frozen=True)
class Pair:
    """A compiled forward, and its backward.

    Attributes:
        forward: gives its results, and then what the backward takes first.
        backward: takes that, and then the late values.
        saved: how many it takes of the forward.
        late: which of the late values it takes.
    """

    forward: Boxed
    backward: Boxed
    saved: int
    late: tuple[int, ...]


class Inductor:
    """Compiles functions of tensors of one plan."""

    def __init__(self, plan: Plan) -> None:
        # A norm's gradients in one kernel leave sums of 512 rows to a kernel each, and no addition fuses with it: two
        # kernels take 75 us where it takes 90, of 8192 rows of 1536 on an H100.
        self._options: dict[str, Any] = {"triton.mix_order_reduction": False}
        if plan.axes:  # Inductor's own order for peak memory would bring weight gradients back in front of collectives
            self._options["reorder_for_peak_memory"] = False

    def alone(self, function: Run, fakes: Sequence[Any], mode: FakeTensorMode, *, backward: bool) -> Boxed:
        """Compiles a function by itself.

        Args:
            function: takes the values one by one.
            fakes: what it takes, of the shapes it is compiled for; symbolic sizes first.
            mode: theirs.
            backward: whether it is one.
        """
        graph = _traced(function, fakes, mode)
        with self._compiling(mode):
            return self._compiled(graph, backward)

    def pair(self, function: Run, fakes: Sequence[Any], mode: FakeTensorMode, early: int, results: int) -> Pair:
        """Compiles a forward and its backward.

        Args:
            function: gives the results of the forward, then those of the backward.
            fakes: what it takes, of the shapes it is compiled for; symbolic sizes first.
            mode: theirs.
            early: how many of these the forward takes; the rest are there in the backward alone.
            results: how many the forward gives.
        """
        graph = _traced(function, fakes, mode)
        _name_inputs(graph.graph, early)
        with self._compiling(mode):
            joint_graph_passes(graph)
            keep_sums(graph.graph, _LATE)
            # From torch 2.14 on the partition merges nothing of the forward with what the backward has: dropout's words
            # would be drawn twice.
            graph.graph = fx_graph_cse(graph.graph)
            count = results + _keep_joined(graph.graph, _LATE, results)
            first, second = min_cut_rematerialization_partition(graph, list(fakes), num_fwd_outputs=count)
            # Names tell which result of the forward an input of the backward is.
            outputs: Any = output_node(first.graph).args[0]
            output_names = [node.name for node in outputs]
            taken = [str(node.target) for node in second.graph.nodes if node.op == "placeholder"]
            # Min-cut drops late values that no result needs, so the positions of what is left are read off the names.
            late = [int(name.removeprefix(_LATE)) for name in taken if name.startswith(_LATE)]
            # From `results` on: a result that is saved too stands at two places under one name.
            order = [output_names.index(name, results) for name in taken if not name.startswith(_LATE)]
            run_first, run_second = self._compiled(first, False), self._compiled(second, True)

        def forward(inputs: list[Any]) -> Sequence[Any]:
            values = run_first(inputs)
            return [*values[:results], *(values[index] for index in order)]

        return Pair(forward, run_second, len(order), tuple(late))

    def _compiled(self, graph: fx.GraphModule, backward: bool) -> Boxed:
        with torch.no_grad():
            changed = sums_in_rows(graph.graph)
        if backward:
            changed += small_operators.place_products(graph.graph, _PLACED)
        if changed:
            graph.recompile()
        fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        # Whoever takes a result was compiled for its strides: none may be padded.
        end = output_node(graph.graph)
        end.meta["user_visible_output_idxs"] = list(range(len(end.args[0])))  # type: ignore[arg-type]
        # Not torch._inductor.standalone_compile: it compiles as inference. Its later passes reorder for locality, which
        # moves each collective's wait in front of the products that were to hide it.
        compiled: Any = compile_fx_inner(graph, fakes, is_backward=backward, is_inference=False)
        return opaque(compiled)

    @contextlib.contextmanager
    def _compiling(self, mode: FakeTensorMode) -> Iterator[None]:
        options = config.patch(self._options)
        tag = compiler_config.patch(cache_key_tag=cache_tag())  # type: ignore[attr-defined]
        with tracing(TracingContext(mode)), V.set_fake_mode(mode), options, tag, V.set_choices_handler(Heuristics()):
            yield


def cache_tag() -> str:
    """Returns what Inductor's cache on disk tells code apart by, after the user's own tag.

    Inductor's key leaves out the processor's vectors: code for those of 8 numbers, loaded where a vector has 16, writes
    after the end of its results. It knows operators by their names alone: code that another version of them led to
    would compute something else.
    """
    return f"{compiler_config.cache_key_tag}{_vectors()}{_fingerprint()}"


def _vectors() -> str:
    """Returns what Inductor chooses the processor's vectors by."""
    return f"{os.environ.get('ATEN_CPU_CAPABILITY')} {x86_isa_checker()} {torch.backends.cpu.get_cpu_capability()} "


@cache
def _fingerprint() -> str:
    digest = sha256()
    for room in ("ops", "experts/operators", "peer_memory", "runtime"):
        for file in sorted((Path(__file__).parents[1] / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return f"fxpar {digest.hexdigest()}"


def _traced(run: Callable[..., Sequence[Any]], fakes: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """Returns the function in the operators that Inductor knows."""
    # Of symbolic sizes some operators know shapes by their functions in Python alone.
    table = {**select_decomp_table(), **random.DECOMPOSITIONS}
    with torch.no_grad(), enable_python_dispatcher(), mode:
        # Decomposed before the cut: min-cut recomputes whole nodes, and of a norm in one node it could not take parts.
        return make_fx(run, decomposition_table=table)(*fakes)


def _name_inputs(graph: fx.Graph, early: int) -> None:
    for index, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        name = f"{_EARLY}{index}" if index < early else f"{_LATE}{index - early}"
        node.target = name
        node._rename(name)


# Sums that a compiled pair keeps for its backward.
#
# Where a backward needs the sum of two values alone, as a norm after a residual connection does, PyTorch's min-cut
# keeps one of them if the other is kept anyway: as many bytes, and more to read for each kernel that adds them again.


aten = torch.ops.aten
_JOINED = torch.ops.fxpar.joined_chunks.default
_LISTS = get_default_op_list()


def keep_sums(graph: fx.Graph, late: str) -> None:
    """Marks sums of two values of one size of which one is read for the sum alone: they are kept in its place.

    Args:
        late: with what the names of inputs begin that the backward alone takes.
    """
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name.startswith(late) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        if node in backward or node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        one, other = node.args
        if not _size(node) or _size(one) != _size(node) or _size(other) != _size(node):
            continue
        if any(_is_only_for(a, node) and _is_dear(b, node) for a, b in ((one, other), (other, one))):
            # The mark of PyTorch's own selective checkpointing: min-cut never recomputes a node that has it.
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _keep_joined(graph: fx.Graph, late: str, results: int) -> int:
    """Lets the forward put chunks together for the backward, which would copy them: here each is written in its place.

    Args:
        late: as of `keep_sums`.
        results: how many the forward gives.

    Returns:
        How many it gives more, after those.
    """
    end, backward = output_node(graph), set[fx.Node]()
    values: Any = end.args[0]
    for node in graph.nodes:
        if node.name.startswith(late) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    forward = {value for value in values[:results] if isinstance(value, fx.Node)}
    for node in reversed(graph.nodes):
        if node in forward:
            forward.update(node.all_input_nodes)
    # What the forward alone reads is free again when it has.
    others = (node for node in graph.nodes if node.target is _JOINED and node not in backward)
    joined = [node for node in others if not forward.issuperset(user for user in node.users if user is not end)]
    end.args = ([*values[:results], *joined, *values[results:]],)
    return len(joined)


def _size(value: Any) -> tuple[Any, ...]:
    """Returns shape and type of a tensor; nothing is asked of symbolic sizes, which would be a guard."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, Tensor):
        return ()
    return (*(size.node.expr if isinstance(size, torch.SymInt) else size for size in tensor.shape), tensor.dtype)


def _is_only_for(value: fx.Node, total: fx.Node) -> bool:
    """Returns whether what a value is made of, from a product or a collective on, is read for the sum alone."""
    while value.op == "call_function" and len(value.users) == 1:
        if _is_root(value):
            return True
        large = [read for read in value.all_input_nodes if _is_large(read, total)]
        if len(large) != 1:
            return False
        value = large[0]
    return False


def _is_dear(value: fx.Node, total: fx.Node) -> bool:
    """Returns whether a value is made of another as large as it, that cannot be computed again in passing."""
    seen: set[fx.Node] = set()
    left = [value]
    while left:
        node = left.pop()
        if _is_large(node, total) and (node.op == "placeholder" or _is_root(node)):
            return True
        left += [read for read in node.all_input_nodes if read not in seen]
        seen.update(node.all_input_nodes)
    return False


def _is_root(node: fx.Node) -> bool:
    """Returns whether a node is a product or what only fxpar knows, of which no kernel is a part."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace not in ("aten", "prims") or _LISTS.is_compute_intensive(node)


def _is_large(node: fx.Node, total: fx.Node) -> bool:
    """Returns whether a value has at least as many bytes as the sum, at the sizes of the example."""
    return _bytes(node) >= _bytes(total) > 0


def _bytes(node: fx.Node) -> int:
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor):
        return 0
    return prod(map(hint, tensor.shape)) * tensor.itemsize


# Which kernels Inductor makes: what it is asked, where its own answer is not the best for a step on several ranks.
#
# - None of two kernels that would wait for more collectives than each of the two does. What reads one value it would
#   compute in one kernel, which starts when the last of what both read is there.
# - Rows of up to 4096 elements are reduced in registers, read once: a norm of 8192 rows of 1536 takes 40 us on an H100
#   where they are read twice.
# - What is sent is one buffer until it is taken: nothing is put there while copy engines read it.
# - What another rank copied is read by the kernel that adds it, and by no other; the sum is computed once.


# Elements of a row that a kernel holds at once.
_ROW = 4096

_ops = torch.ops.fxpar
# Operators that wait for other ranks.
_WAITING = (
    _ops.take_copies.default,
    _ops.arrived.default,
    _ops.one_shot_sum.default,
    _ops.one_shot_rows.default,
    _ops.taken_sum.default,
    _ops.taken_rows.default,
    _ops.gather_needed.default,
    _ops.scatter_needed.default,
)
# Of each graph that is compiled, the names of its waits; and by what a send gives, the name of what it sends.
_WAITS: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
_SENT: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


class Heuristics(InductorChoices):
    """Inductor's own, but for the above."""

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Returns whether two kernels of which neither needs the other may be one."""
        if _awaited(scheduler, node1) != _awaited(scheduler, node2):
            return False
        return bool(InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Returns whether a row is read once."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        is_row = config.triton.persistent_reductions and not cooperative_reduction
        is_row = is_row and features.get_reduction_hint() == ReductionHint.INNER
        return is_row and bool(V.graph.sizevars.statically_known_leq(features.reduction_numel, _ROW))


def _awaited(scheduler: Any, node: Any) -> set[str]:
    """Returns names of the waits for collectives that a kernel depends on."""
    # Inductor asks for each pair of kernels, and a graph has thousands of pairs: its waits are looked up once.
    if scheduler not in _WAITS:
        _WAITS[scheduler] = frozenset(name for name, kernel in scheduler.name_to_node.items() if _is_wait(kernel.node))
    return {name for name in _WAITS[scheduler] if name in node.ancestors}


def _is_wait(node: Any) -> bool:
    return isinstance(node, ir._WaitKernel) or getattr(node, "op_overload", None) in _WAITING


def _extern(op: Any, *args: Any) -> Any:
    return lowering.fallback_handler(op, add_to_fallback_set=False)(*args)


@lowering.register_lowering(_ops.joined_chunks.default, type_promotion_kind=None)
def _joined_chunks(chunks: Sequence[Any], dim: int) -> Any:
    """Lets what computes a chunk write it where the whole has it.

    Inductor's own does so too, but for what a product has read, which has memory of its own by then.
    """
    sizes = [list(chunk.get_size()) for chunk in chunks]
    if prod(sizes[0][:dim]) != 1:
        return lowering.lowerings[aten.cat.default](chunks, dim)
    begins = [*itertools.accumulate((size[dim] for size in sizes), initial=0)]
    whole = [*sizes[0][:dim], begins[-1], *sizes[0][dim + 1 :]]
    order = order_in_memory(V.graph.current_node.meta["val"])
    storages = [_storage_alone(chunk) if order == sorted(order) else None for chunk in chunks]
    strides = ir.FlexibleLayout.fill_ordered(whole, order[::-1])
    layout = ir.FixedLayout(chunks[0].get_device(), chunks[0].get_dtype(), whole, strides)
    kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
    box, parts = ir.StorageBox(kernel), []
    for chunk, storage, begin, end in zip(chunks, storages, begins, begins[1:], strict=False):
        place = ir.SliceView.create(box, dim, begin, end, clamp=False)
        if storage is not None:
            place = ir.View.create(place, storage.get_size())
        parts.append(ir.ConcatKernel.realize_into(chunk if storage is None else storage, place))
    kernel.name = V.graph.register_buffer(kernel)
    kernel.inputs = ir.ConcatKernel.unwrap_storage(parts)
    V.graph.register_operation(kernel)
    return ir.TensorBox(box)


def _storage_alone(chunk: Any) -> Any:
    """Returns the storage of which a chunk is all, in its order, if it may lie elsewhere; else None."""
    chunk.realize()
    if not ir.is_storage_and_layout(chunk):
        return None
    storage, view = ir.as_storage_and_layout(chunk)
    buffer = storage.data
    if not isinstance(buffer, (ir.ComputedBuffer, ir.ExternKernelOut)) or type(buffer.layout) is not ir.FixedLayout:
        return None
    layout = buffer.layout
    if view.offset or layout.offset or not view.is_contiguous() or not layout.is_contiguous():
        return None
    if view.dtype != layout.dtype or prod(view.size) != prod(layout.size):
        return None
    buffer.layout = ir.FlexibleLayout(layout.device, layout.dtype, layout.size)
    return storage


def _held(x: Any) -> Any:
    """Returns a value in memory of its own, contiguous: whoever takes it has the same memory."""
    x.realize()
    return ir.ExternKernel.require_contiguous(x)


@lowering.register_lowering(_ops.send_copies.default, type_promotion_kind=None)
def _send_copies(x: Any, *more: Any) -> Any:
    """Sends what stays as it is until it is taken, which reads the same memory."""
    buffer = _held(x)
    token = _extern(_ops.send_copies.default, buffer, *more)
    _SENT.setdefault(V.graph, {})[token.get_name()] = buffer.get_name()
    return token


def _taken(token: Any, x: Any) -> Any:
    """Returns what was sent, as it was sent."""
    buffer = _held(x)
    sent = _SENT[V.graph][token.get_name()]
    if sent != buffer.get_name():  # two copies were made of it: nothing else reads the first
        V.graph.never_reuse_buffers.add(sent)
    return buffer


def _register_taking(op: Any) -> None:
    def take(token: Any, x: Any, *more: Any) -> Any:
        return _extern(op, token, _taken(token, x), *more)

    lowering.register_lowering(op, type_promotion_kind=None)(take)


for _op in (_ops.take_copies.default, _ops.taken_sum.default, _ops.taken_rows.default):
    _register_taking(_op)


@lowering.register_lowering(_ops.arrived.default, type_promotion_kind=None)
def _arrived(token: Any, x: Any, *more: Any) -> Any:
    """Returns memory into which another rank will write again: nothing else is put there."""
    arrived = _extern(_ops.arrived.default, token, _taken(token, x), *more)
    V.graph.never_reuse_buffers.add(arrived.get_name())
    return arrived


@lowering.register_lowering(_ops.added.default, type_promotion_kind=None)
def _added(x: Any, came: Any, name: str) -> Any:
    """Returns an addition, in a kernel with what reads it; whatever else reads it reads the sum."""
    total = lowering.lowerings[torch.ops.aten.add.Tensor](x, came)
    total.realize()
    return total
