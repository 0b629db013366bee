"""Units of a step compiled by Inductor, for the shapes of one call.

Enters: functions of tensors that a lowered graph is made of, and fake values of their shapes. Leaves: functions that
take one list of values, which they empty.

A forward and its backward are traced together and cut where least is kept between them: what is cheap is computed again
in the backward (PyTorch's min-cut).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.ir.program import output_node
from fxpar.ops import (
    dropped,
    products,  # noqa: F401 - defines the operator
)
from fxpar.plan.plan import Plan
from fxpar.runtime.allreduce_epilogue_fusion import sums_in_rows
from fxpar.runtime.graphs.standin import opaque
from fxpar.runtime.inductor_choices import Heuristics
from fxpar.runtime.partitioner_hints import keep_sums

Boxed = Callable[[list[Any]], Sequence[Any]]
Run = Callable[..., Sequence[Any]]


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
            first, second = min_cut_rematerialization_partition(graph, list(fakes), num_fwd_outputs=results)
            # Names tell which result of the forward an input of the backward is.
            outputs: Any = output_node(first.graph).args[0]
            output_names = [node.name for node in outputs]
            taken = [str(node.target) for node in second.graph.nodes if node.op == "placeholder"]
            late = [int(name.removeprefix(_LATE)) for name in taken if name.startswith(_LATE)]
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
            changed += place_products(graph.graph)
        if changed:
            graph.recompile()
        fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        # Whoever takes a result was compiled for its strides: none may be padded.
        end = output_node(graph.graph)
        end.meta["user_visible_output_idxs"] = list(range(len(end.args[0])))  # type: ignore[arg-type]
        compiled: Any = compile_fx_inner(graph, fakes, is_backward=backward, is_inference=False)
        return opaque(compiled)

    @contextlib.contextmanager
    def _compiling(self, mode: FakeTensorMode) -> Iterator[None]:
        options = config.patch(self._options)
        with tracing(TracingContext(mode)), V.set_fake_mode(mode), options, V.set_choices_handler(Heuristics()):
            yield


def _traced(run: Callable[..., Sequence[Any]], fakes: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """The function in the operators that Inductor knows."""
    # Of symbolic sizes some operators know shapes by their functions in Python alone.
    table = {**select_decomp_table(), **dropped.DECOMPOSITIONS}
    with torch.no_grad(), enable_python_dispatcher(), mode:
        return make_fx(run, decomposition_table=table)(*fakes)


def _name_inputs(graph: fx.Graph, early: int) -> None:
    for index, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        name = f"{_EARLY}{index}" if index < early else f"{_LATE}{index - early}"
        node.target = name
        node._rename(name)


_MM = torch.ops.aten.mm.default
_PLACED = torch.ops.fxpar.placed_product.default


def place_products(graph: fx.Graph) -> int:
    """Lets products be written where a call's results are to stay; gives how many."""
    end = output_node(graph)
    placed = 0
    for index, value in enumerate(end.args[0]):  # type: ignore[arg-type]
        if not isinstance(value, fx.Node) or value.target is not _MM or list(value.users) != [end]:
            continue
        if list(end.args[0]).count(value) == 1:  # type: ignore[arg-type]
            value.target, value.args = _PLACED, (*value.args, index)
            placed += 1
    return placed
