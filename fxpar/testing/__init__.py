"""What unit tests need: `simulate` runs all ranks of a split model in one process, `verify` proves them.

The modules of this room prove rules by brute force: every placement of small operands, run on the parts and compared
with the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.capture.capture import check_samples
from fxpar.capture.prepared_model import in_precision
from fxpar.compile import check_arguments, compile_model
from fxpar.ir.program import Program, output_layouts, output_types
from fxpar.ir.stages import stages_of
from fxpar.layout.layout import Layout
from fxpar.layout.shards import local_block
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.manager import Pass
from fxpar.mesh.axes import coordinates
from fxpar.passes import DEFAULT_PASSES
from fxpar.pipeline.compiler.builtin_schedules import local_stages
from fxpar.plan.plan import Plan
from fxpar.verification import expect as expect
from fxpar.verification import need_memory
from fxpar.verification import verify as verify
from fxpar.verify.simulate_ranks import check_world, symbol_values
from fxpar.verify.values import call_inputs, program_state, simulated_run


@dataclass(frozen=True)
class SimulatedStep:
    """Has what the ranks of a split model computed of one batch, forward and backward, in float64.

    Attributes:
        loss: the scalar that was differentiated; None for a model without one.
        outputs: the whole model's outputs, by name.
        gradients: the whole gradients of all parameters that the loss reaches, by the author's names.
        shards: for each parameter the parts of the ranks that hold some of it, by rank.
        program: the program of a rank, with the layout of each value.
    """

    loss: Tensor | None
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    shards: Mapping[str, Mapping[int, Tensor]]
    program: Program


def simulate(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    *,
    loss: Callable[..., Any] | str | None = None,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    step: int = 0,
) -> SimulatedStep:
    """Splits a model and runs one step of all its ranks in this process, without process groups or GPUs.

    The ranks run the operators and collectives of a training. Only the transport is simulated, and the numbers are
    float64. `verify` also compares them with one device.

    Example:
        ```python
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        split = fxpar.testing.simulate(model, torch.randn(3, 6), fxpar.Plan(tp=2, split={"0": "column"}))
        assert split.shards["0.weight"][1].shape == (4, 6)
        assert split.gradients["2.weight"].shape == (4, 8)
        ```

    Args:
        model: has values, and the mode to run. It is left as it is.
        batch: of all data ranks together, as for `parallelize`.
        plan: at most 512 ranks.
        loss: as for `parallelize`. All outputs of a model without a loss are differentiated, by fixed random numbers.
        passes: as for `parallelize`.
        step: selects the masks of dropout, as the number of a training's step does.

    Raises:
        FxparError: capture, a pass or a static check refused the model.
        InputError: the plan has more ranks than one process simulates, or the model has no values.
    """
    check_arguments(model, plan, passes)
    check_samples(batch)
    check_world(prod(plan.axes.values()))
    need_memory(model)
    with in_precision(model, plan):
        compiled = compile_model(model, batch, plan, loss, passes)
        captured, program = compiled.captured, compiled.program
        state, inputs = program_state(program, model), call_inputs(captured, model, batch)
    weights = [name for name, _ in model.named_parameters() if name in state]
    return _simulated(program, state, inputs, weights, step)


def _simulated(
    program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], weights: Sequence[str], step: int
) -> SimulatedStep:
    """Runs the ranks of a program, and puts together what they have."""
    runs, sizes = simulated_run(program, state, inputs, step), symbol_values(program, inputs)
    places = [coordinates(program.axes, rank) for rank in range(len(runs))]

    def joined(parts: Sequence[Tensor], shape: Sequence[int], layout: Layout) -> Tensor:
        numbers = torch.arange(1, prod(shape) + 1).view(tuple(shape))  # of the elements; 0 is padding
        elements = parts[0].new_zeros(prod(shape) + 1)
        for part, place in zip(parts, places, strict=True):
            block = local_block(numbers, layout, program.axes, place, sizes)
            elements[block.flatten()] = part.flatten()
        return elements[1:].view(tuple(shape))

    outputs = {}
    for name, node in program.output_nodes().items():
        if name in runs[0].outputs:
            shape = [evaluate(size, sizes) for size in output_types(node)[0].shape]
            outputs[name] = joined([run.outputs[name] for run in runs], shape, output_layouts(node)[0])
    layouts = {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}
    gradients = {
        name: joined([run.gradients[name] for run in runs], state[name].shape, layouts[name])
        for name in runs[0].gradients
    }
    shards = _shards(program, {name: state[name] for name in weights}, sizes)
    return SimulatedStep(outputs.get(program.loss), outputs, gradients, shards, program)


def _shards(program: Program, weights: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, dict[int, Tensor]]:
    """Returns the parts of the plan's ranks, those of all stages of a pipeline."""
    plan, stages = program.plan, stages_of(program) if program.plan.pp > 1 else [None]
    shards: dict[str, dict[int, Tensor]] = {name: {} for name in weights}
    for rank in plan.mesh.ranks:
        place = plan.mesh.coordinates(rank)
        for stage in (stages[number] for number in local_stages(plan, place["pp"]) or (0,)):
            part = program if stage is None else stage.program
            for parameter in part.parameters:
                name, layout = parameter.fqn, output_layouts(part.node(parameter.node))[0]
                if name in weights:
                    shards[name][rank] = local_block(weights[name], layout, program.axes, place, sizes)
    return shards


def _assembled(parts: Sequence[Tensor], shape: Sequence[int], cut: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
    """Returns the whole of which ranks have parts: `cut` says of the elements' numbers which a rank has."""
    numbers = torch.arange(1, prod(shape) + 1).view(tuple(shape))  # 0 is padding
    elements = parts[0].new_zeros(prod(shape) + 1)
    for part, places in zip(parts, cut(numbers), strict=True):
        elements[places.flatten()] = part.flatten()
    return elements[1:].view(tuple(shape))
