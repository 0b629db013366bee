"""Parts of a step compiled by Inductor, for the shapes of one call.

Enters: functions of tensors that a lowered graph is made of, and values to tell their shapes. Leaves: functions that
take one list of values, which they empty.

Forward and backward are traced together and cut where least is kept between them: what is cheap is computed again in
the backward (PyTorch's min-cut). A backward whose author said what is computed again is compiled as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxpar.plan.plan import Plan
from fxpar.runtime.overlap import Overlap

Boxed = Callable[[list[Any]], Sequence[Any]]
Run = Callable[..., Sequence[Any]]


class Inductor:
    """Compiles functions of tensors of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._options: dict[str, Any] = {}
        if plan.axes:
            # A compiled graph tells no axis from another: each collective is taken for one of the slowest and largest.
            ranks = max(plan.axes.values())
            self._options["post_grad_custom_post_pass"] = Overlap(plan.cost.on(plan.axes), ranks)
            # Inductor's own order for peak memory would bring weight gradients back in front of collectives.
            self._options["reorder_for_peak_memory"] = False

    def function(self, run: Callable[..., Sequence[Any]], values: Sequence[Tensor], *, backward: bool) -> Boxed:
        """Compiles a function by itself.

        Args:
            run: takes the values one by one.
            values: of the shapes it is compiled for.
            backward: whether it is one.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        graph = _traced(run, _fakes(mode, values))
        with self._compiling(mode):
            return self._compiled(graph, backward)

    def pair(
        self, forward: Run, backward: Run, values: Sequence[Tensor], tangents: Sequence[int]
    ) -> tuple[Boxed, Boxed]:
        """Compiles a forward and its backward.

        Args:
            forward: of values by position.
            backward: of those, what the forward gives, and the tangents.
            values: of the shapes it is compiled for.
            tangents: indices of the forward's results that have one.

        Returns:
            The forward, which gives its results and then, as one list, what the backward takes; the backward, which
            takes that and then the tangents.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        given, count = _fakes(mode, values), len(values)
        with torch.no_grad(), mode:
            shapes = forward(given)
            given += [torch.empty_like(shapes[index]) for index in tangents]
        results = len(shapes)

        def run(*both: Tensor) -> Sequence[Any]:
            found = list(forward(both[:count]))
            return [*found, *backward(both[:count], found, both[count:])]

        graph = _traced(run, given)
        _name_inputs(graph.graph, count)
        with self._compiling(mode):
            joint_graph_passes(graph)
            first, second = min_cut_rematerialization_partition(graph, given, num_fwd_outputs=results)
            # Names tell which result of the forward an input of the backward is.
            end = next(node for node in reversed(first.graph.nodes) if node.op == "output")
            made = [node.name for node in end.args[0]]
            taken = [str(node.target) for node in second.graph.nodes if node.op == "placeholder"]
            upstream = [int(name.removeprefix("tangents_")) for name in taken if name.startswith("tangents_")]
            order = [made.index(name, results) for name in taken if not name.startswith("tangents_")]
            run_first, run_second = self._compiled(first, False), self._compiled(second, True)

        def compiled_forward(inputs: list[Any]) -> Sequence[Any]:
            found = run_first(inputs)
            return [*found[:results], [found[index] for index in order]]

        def compiled_backward(inputs: list[Any]) -> Sequence[Any]:
            upstreams = inputs[len(order) :]
            del inputs[len(order) :]
            inputs += [upstreams[index] for index in upstream]
            return run_second(inputs)

        return compiled_forward, compiled_backward

    def _compiled(self, graph: fx.GraphModule, backward: bool) -> Boxed:
        fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        found: Any = compile_fx_inner(graph, fakes, is_backward=backward, is_inference=False)
        return found  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _compiling(self, mode: FakeTensorMode) -> Iterator[None]:
        with tracing(TracingContext(mode)), V.set_fake_mode(mode), config.patch(self._options):
            yield


def _fakes(mode: FakeTensorMode, values: Sequence[Tensor]) -> list[Tensor]:
    return [mode.from_tensor(value.detach(), static_shapes=True) for value in values]


def _traced(run: Callable[..., Sequence[Any]], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """The function in the operators that Inductor knows."""
    with torch.no_grad():
        return make_fx(run, decomposition_table=select_decomp_table())(*fakes)


def _name_inputs(graph: fx.Graph, values: int) -> None:
    """PyTorch's partitioner goes by these names."""
    for index, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        name = f"primals_{index}" if index < values else f"tangents_{index - values}"
        node.target = name
        node._rename(name)
