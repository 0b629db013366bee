"""A localised text run in both its readings: all simulated ranks against the one device that the text speaks of too.

Enters: a localised program, weights and inputs. Leaves: how far the ranks deviate. A fault that is one in both readings
(another number, another operation) is none of the split; what the static checks prove is that the readings agree.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, fx

from fxpar.errors import FxparError
from fxpar.ir.program import Program, TensorType, operands, output_layouts, output_types, update
from fxpar.ir.step import RNG_PATH
from fxpar.layout.layout import Layout
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.ops.collectives import COERCION_OF, sum_gradients
from fxpar.ops.operator import Operator
from fxpar.ops.random import axis_index
from fxpar.verify.reference_program import promote, wide
from fxpar.verify.shapes import whole_arguments
from fxpar.verify.simulate_ranks import SimulationResult, run_ranks, run_single, step_of, symbol_values
from fxpar.verify.values import ValueReport, compare, rng_state

# What an accepted program may still raise when it runs.
RAISED = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True)
class Verdict:
    """What running both readings shows.

    `same`, `differs`, `stuck` where both raise one error, `refused` where a pass or PyTorch has no derivative, or the
    sizes are not a rank's, `undefined` where one device has no finite loss: neither can train something else in
    silence.
    """

    kind: str
    reason: str = ""


def whole_program(program: Program, sizes: Mapping[str, int]) -> Program:
    """The program of one device at given sizes."""
    result, axes = program.copy(), program.axes
    graph = result.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in COERCION_OF:
            _replace(graph, node, operands(node)[0])
        elif node.target is operator.getitem and operands(node)[0].target is sum_gradients:
            _replace(graph, node, operands(operands(node)[0])[int(node.args[1])])
        elif isinstance(node.target, Operator) and node.target.draws:
            names = list(node.target.signature.parameters)
            node.args = node.args[: names.index("indices")] if "indices" in names else node.args
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "indices"}
        elif isinstance(node.target, Operator) and node.target.stands_for:
            node.target = node.target.like
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "axis"}
        else:
            shapes = [[evaluate(size, sizes) for size in kind.shape] for kind in output_types(node)]
            outputs = [torch.empty(shape, device="meta") for shape in shapes]
            node.args, node.kwargs = whole_arguments(node, node.args, dict(node.kwargs), axes, outputs)
    for node in reversed(list(graph.nodes)):
        if node.target in (axis_index, sum_gradients) and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op != "output" and output_layouts(node):
            update(node, layout=tuple(Layout() for _ in output_layouts(node)))
    result.graph_module.recompile()
    plan = replace(program.plan.on_one_rank(), sequence_parallel=False)
    return result.with_(plan=plan, properties=program.properties - {"local"})


def _replace(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _values(kind: TensorType, known: Tensor | None, sizes: Mapping[str, int], seed: int) -> Tensor:
    """The known tensor where it fits the type, else numbers; of integers, words that every table has."""
    shape = tuple(evaluate(size, sizes) for size in kind.shape)
    if known is not None and tuple(known.shape) == shape and known.dtype == kind.dtype:
        return known
    generator = torch.Generator().manual_seed(seed)
    if kind.is_float:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(kind.dtype)


def judge(program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Verdict:
    """Runs both readings, forward and backward, in float64."""
    sizes = {s.name: s.example for s in program.symbols}
    owned = {
        p.fqn: program.constants.get(p.fqn, _values(p.type, state.get(p.fqn), sizes, index))
        for index, p in enumerate(program.parameters)
    }
    given = {i.path: _values(i.type, inputs.get(i.path), sizes, index) for index, i in enumerate(program.inputs)}
    given[RNG_PATH] = rng_state(program.plan.seed)
    owned, given = ({k: wide(v) for k, v in held.items()} for held in (owned, given))
    reference = _attempt(lambda: run_single(promote(whole_program(program, sizes)), owned, given))
    try:
        step = promote(step_of(program))
        ranks = _attempt(lambda: run_ranks(step, owned, given, symbol_values(program, given)))
    except FxparError as error:
        return Verdict("refused", str(error))
    if isinstance(reference, str) or isinstance(ranks, str):
        kind = "stuck" if reference == ranks else "differs"
        return Verdict(kind, f"one device: {_shown(reference)}; ranks: {_shown(ranks)}")
    if program.loss and not (reference.outputs[program.loss].isfinite() and ranks[0].outputs[program.loss].isfinite()):
        return Verdict("undefined", f"the loss is {float(reference.outputs[program.loss])}")
    report: ValueReport = compare(reference, program, ranks, sizes)
    return Verdict("same" if report.ok else "differs", report.worst)


_Result = TypeVar("_Result")

# A word that no table has is told by torch's lookup in its own words, and by that of ranks which have a part of it.
_NO_WORD = re.compile(r"IndexError: index out of range in self|an id is outside of \[")
_OUTSIDE = "an id is outside of its table"


def _attempt(run: Callable[[], _Result]) -> _Result | str:
    try:
        return run()
    except RAISED as error:
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        # Sizes are a rank's here and the whole's there.
        return _OUTSIDE if _NO_WORD.search(text) else re.sub(r"\d+", "…", text)


def _shown(result: SimulationResult | list[SimulationResult] | str) -> str:
    return result if isinstance(result, str) else "runs"
