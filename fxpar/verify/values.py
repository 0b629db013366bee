"""Values: the program of all ranks against the model on one device.

Enters: a captured model and its split program. Leaves: a `ValueReport`, or `CheckFailed` that names the worst tensor.

The reference is the captured graph itself, in float64, in the captured mode with dropout on, on one device. Loss,
outputs and every parameter gradient must agree within 1e-10 of the largest reference gradient (of the largest value
for outputs). That the captured graph is the model is checked apart, in the model's own types and bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture import Captured, arguments
from fxpar.errors import CheckFailed
from fxpar.layout import Layout
from fxpar.manager import PassManager
from fxpar.passes.annotate import annotate
from fxpar.passes.assign_rng import RNG_PATH, assign_rng
from fxpar.passes.canonicalize import canonicalize
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.program import Program, output_layouts
from fxpar.shards import local_block
from fxpar.verify.promote import promote, wide
from fxpar.verify.simulate import Run, coordinates, run_ranks, run_single

TOLERANCE = 1e-10


@dataclass(frozen=True)
class ValueReport:
    """Largest deviations of any rank.

    Attributes:
        loss_error: absolute, of the loss, over the reference loss.
        output_error: of any output, over the largest reference value of that output.
        max_grad_error: of any parameter gradient, over the largest reference gradient of all.
        worst: the parameter or output that deviates most.
        gradients: how many parameter gradients were compared, on each rank.
        ok: all within tolerance.
    """

    loss_error: float
    output_error: float
    max_grad_error: float
    worst: str
    gradients: int
    ok: bool


def program_state(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """Values of the program's parameters, buffers and constants, by name."""
    tensors: dict[str, Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    tensors.update(program.constants)
    return {p.fqn: tensors[p.fqn].detach() for p in program.parameters}


def call_inputs(captured: Captured, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The program's inputs for a call, by path."""
    if captured.loss is not None:
        call: Any = ((batch,), {})
    else:
        call = arguments(model, batch, False)
    leaves, spec = pytree.tree_flatten(call)
    if spec != captured.spec.in_spec:
        raise CheckFailed("the batch has another structure than the example", where="batch")
    pairs = zip(captured.spec.in_leaves, leaves, strict=True)
    return {str(what): value for (kind, what), value in pairs if kind == "input"}


def symbol_values(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Values of the program's symbols for given inputs."""
    return {s.name: inputs[s.path].shape[s.dim] for s in program.symbols}


def reference_program(captured: Program) -> Program:
    """The captured program on one device with the counter generator's masks, in float64."""
    single = captured.with_(plan=replace(captured.plan, tp=1, split={}))
    return promote(PassManager([canonicalize, annotate, insert_collectives, assign_rng]).run(single))


def rng_state(seed: int = 0, step: int = 0, microbatch: int = 0) -> Tensor:
    """The generator's input: i64[3]."""
    return torch.tensor([seed, step, microbatch], dtype=torch.int64)


def compare(reference: Run, program: Program, ranks: list[Run], sizes: Mapping[str, int]) -> ValueReport:
    """Compares every rank's results with its block of the reference's."""
    layouts = {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}
    outputs = {name: output_layouts(node)[0] for name, node in program.output_nodes().items()}
    largest = max((float(g.abs().max()) for g in reference.gradients.values() if g.numel()), default=1.0) or 1.0
    loss_error = output_error = grad_error = 0.0
    worst, peak = "", -1.0

    def deviation(mine: Tensor, whole: Tensor, layout: Layout, rank: int, scale: float) -> float:
        own = local_block(whole, layout, program.axes, coordinates(program.axes, rank), sizes)
        if mine.shape != own.shape:
            return float("inf")
        if not mine.is_floating_point():
            return 0.0 if bool((mine == own).all()) else float("inf")
        gap = float((mine - own).abs().max()) / scale if mine.numel() else 0.0
        return gap if gap == gap else float("inf")

    for rank, run in enumerate(ranks):
        for name, layout in outputs.items():
            whole = reference.outputs[name]
            scale = max(float(whole.abs().max()) if whole.numel() and whole.is_floating_point() else 1.0, 1e-30)
            error = deviation(run.outputs[name], whole, layout, rank, scale)
            loss_error = max(loss_error, error) if name == program.loss else loss_error
            output_error = max(output_error, error)
            worst, peak = (f"output {name}", error) if error > peak else (worst, peak)
        if run.gradients.keys() != reference.gradients.keys():
            odd = sorted(run.gradients.keys() ^ reference.gradients.keys())
            return ValueReport(loss_error, output_error, float("inf"), f"gradients of {', '.join(odd)}", 0, False)
        for name, gradient in reference.gradients.items():
            error = deviation(run.gradients[name], gradient, layouts[name], rank, largest)
            grad_error = max(grad_error, error)
            worst, peak = (f"gradient of {name}", error) if error > peak else (worst, peak)
    ok = max(loss_error, output_error, grad_error) <= TOLERANCE
    return ValueReport(loss_error, output_error, grad_error, worst, len(reference.gradients), ok)


def verify_values(
    captured: Program, program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], *, step: int = 0
) -> ValueReport:
    """Compares a localised program on all simulated ranks with the captured one on one device.

    Args:
        captured: the program as it was captured.
        program: the program after `localize`.
        state: parameters, buffers and constants by name, whole.
        inputs: by path, whole.
        step: number of the step, which selects the dropout masks.
    """
    reference = reference_program(captured)
    sizes = symbol_values(program, inputs)
    given = {name: wide(value) for name, value in inputs.items()}
    given[RNG_PATH] = rng_state(program.plan.seed, step)
    weights = {name: wide(value) for name, value in state.items()}
    single = run_single(reference, weights, given)
    return compare(single, program, run_ranks(promote(program), weights, given, sizes), sizes)


def check_capture(captured: Captured, model: nn.Module, batch: Any) -> None:
    """Checks that the captured graph computes what the eager module does, bit for bit in its own types.

    Loss, outputs and all parameter gradients, with PyTorch's own random bits from one seed on both sides. The
    canonical graph must give the same too.

    Raises:
        CheckFailed: something differs; names the tensor.
    """
    args, kwargs = arguments(model, batch, captured.loss is not None)
    parameters = dict(model.named_parameters())
    torch.manual_seed(17)
    with torch.enable_grad():
        outputs = model(*args, **kwargs)
        result: Any = {"loss": captured.loss(outputs, batch), "outputs": outputs} if captured.loss else outputs
    leaves = pytree.tree_leaves(result)
    eager = {
        str(what): leaf.detach()
        for (kind, what), leaf in zip(captured.spec.out_leaves, leaves, strict=True)
        if kind == "output"
    }
    gradients: dict[str, Tensor] = {}
    if captured.program.loss:
        names = [p.fqn for p in captured.program.parameters if p.trainable]
        index = [str(w) for k, w in captured.spec.out_leaves].index(captured.program.loss)
        found = torch.autograd.grad(leaves[index], [parameters[n] for n in names], allow_unused=True)
        gradients = {n: g for n, g in zip(names, found, strict=True) if g is not None}
    canonical = PassManager([canonicalize]).run(captured.program)
    inputs = call_inputs(captured, model, batch)
    for label, program in (("captured", captured.program), ("canonical", canonical)):
        torch.manual_seed(17)
        run = run_single(program, program_state(program, model), inputs)
        _expect(label, "output", eager, run.outputs)
        _expect(label, "gradient of", gradients, run.gradients)


def _expect(label: str, what: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name in wanted.keys() | found.keys():
        if name not in wanted or name not in found:
            raise CheckFailed(f"the {label} graph and the module disagree on whether there is a", where=f"{what} {name}")
        a, b = wanted[name], found[name]
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise CheckFailed(f"the {label} graph gives another value than the module", where=f"{what} {name}")
