"""Values: the program of all ranks against the model on one device.

Enters: a captured model and its split program. Leaves: a `ValueReport`, or `CheckFailed` that names the worst tensor.

The reference is the captured graph itself, in float64, in the captured mode with dropout on, on one device. Loss,
outputs and every parameter gradient must agree within 1e-10 of the largest reference gradient (of the largest value
for outputs). Without a loss, gradients are those of all outputs together, from random upstream gradients. That the
captured graph is the model is checked apart, in the model's own types.

Some models make more than that of the rounding of a sum (statistics of few elements, divided by). What a larger
deviation may be is measured then: by the reference itself with its sums rounded otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxpar.capture.capture import Captured, arguments
from fxpar.capture.places import Blamed
from fxpar.capture.prepared_model import cast_inputs, input_dtype, plain_surrounding, swapped
from fxpar.capture.python_state import nothing_remembered, untouched
from fxpar.errors import CheckFailed, InputError
from fxpar.ir.program import Program, output_layouts
from fxpar.ir.properties import Property
from fxpar.ir.step import RNG_PATH, buffer_name, is_excess, module_of_load, written
from fxpar.layout.shards import local_block, without_padding
from fxpar.manager import PassManager
from fxpar.mesh.axes import coordinates
from fxpar.passes import CANONICAL_PASSES
from fxpar.torch_internals import FakeTensor
from fxpar.verify.reference_program import FACTOR, UNITS, OtherOrder, epsilon, promote, reference_program, wide
from fxpar.verify.simulate_ranks import (
    SCALES,
    SimulationResult,
    cotangents,
    run_microbatches,
    run_ranks,
    run_single,
    step_of,
    symbol_values,
    with_other_rows,
)

TOLERANCE = 1e-10
_UNFAITHFUL = (
    "the model does what a trace does not see: keep state, clocks, other generators and questions whether it is traced "
    "out of its forward (masks of transformers ask of position_ids, where no attention_mask is passed)"
)
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError)
_RUNS = 2  # by which rounding is measured
_MOST = 1e-7  # of a deviation that rounding may explain in float64
_Results = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
_Gaps = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class ValueReport:
    """Largest deviations of any rank.

    Attributes:
        loss_error: of the loss, over the reference loss; 0 where the program has none.
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

    @property
    def deviation(self) -> float:
        """Returns the largest of all."""
        return max(self.loss_error, self.output_error, self.max_grad_error)


def program_state(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """Returns values of the program's parameters, buffers and constants, by name."""
    tensors: dict[str, Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    tensors.update(program.constants)
    return {p.fqn: tensors[p.fqn].detach() for p in program.parameters}


def call_inputs(captured: Captured, model: nn.Module, batch: Any, *, as_given: bool = False) -> dict[str, Tensor]:
    """Returns the program's inputs for a call, by path; with `as_given` the very tensors of the batch."""
    if captured.loss is not None:
        call: Any = ((batch,), {})
    else:
        call = arguments(model, batch, False)
        call = call if as_given else cast_inputs(call, input_dtype(captured.program.plan))
    return captured.spec.inputs(call)


def rng_state(seed: int = 0, step: int = 0, microbatch: int = 0) -> Tensor:
    """Returns the generator's input: i64[3]."""
    return torch.tensor([seed, step, microbatch], dtype=torch.int64)


def reference_run(
    captured: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    step: int = 0,
    microbatch: int = 0,
) -> SimulationResult:
    """Returns what one device computes, in float64; arguments as for `verify_values`.

    Raises:
        CheckFailed: the loss is not finite, or a gradient is NaN everywhere, so that nothing could be compared with it.
    """
    program = reference_program(captured)
    run = run_single(program, wide_state(program, state), given_inputs(program, inputs, step, microbatch))
    if program.loss and not bool(run.outputs[program.loss].isfinite().all()):
        raise CheckFailed(
            f"is {float(run.outputs[program.loss])} on one device",
            where=f"loss {program.loss}",
            remedy="use other inputs",
        )
    for name, gradient in run.gradients.items():
        if gradient.numel() and bool(gradient.isnan().all()):
            raise CheckFailed(
                "is NaN everywhere on one device",
                where=f"gradient of {name}",
                remedy="use other inputs, or other weights",
            )
    return run


def wide_state(program: Program, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what a program owns, in double precision; a pass may have added constants."""
    return {name: wide(value) for name, value in {**program.constants, **state}.items()}


def given_inputs(program: Program, inputs: Mapping[str, Tensor], step: int, microbatch: int = 0) -> dict[str, Tensor]:
    """Returns the inputs of a step in double precision, with the state of the random numbers."""
    wide_inputs = {name: wide(value) for name, value in inputs.items()}
    wide_inputs[RNG_PATH] = rng_state(program.plan.seed, step, microbatch)
    return wide_inputs


def _scale(whole: Tensor) -> float:
    """Returns the largest finite value, by which deviations are measured."""
    is_number = whole.is_floating_point() or whole.is_complex()
    finite = whole[whole.isfinite()].abs() if is_number else torch.ones(1)
    return float(finite.max()) if finite.numel() else 0.0


def relative_gap(mine: Tensor, reference: Tensor, scale: float) -> float:
    """Returns largest difference over `scale`; infinite for other shapes, integers, infinities or NaNs."""
    if mine.shape != reference.shape or mine.dtype != reference.dtype:
        return float("inf")
    # Equal infinities agree, and so do two NaNs, which compare as different.
    same = (mine == reference) | ((mine != mine) & (reference != reference))
    if bool(same.all()):
        return 0.0
    if not mine.is_floating_point() and not mine.is_complex():
        return float("inf")
    gap = float((mine - reference).abs()[~same].max()) / max(scale, 1e-30)
    # A NaN on one side would fail no comparison with a tolerance.
    return gap if gap == gap else float("inf")


def _check_places(ranks: Sequence[SimulationResult]) -> None:
    excess = {name: max(int(run.outputs[name].max()) for run in ranks) for name in ranks[0].outputs if is_excess(name)}
    if any(excess.values()):
        module, count = max(((module_of_load(name), count) for name, count in excess.items()), key=lambda pair: pair[1])
        raise CheckFailed(
            f"receives {count} rows more than the plan's recv_capacity_factor has places for",
            where=f"the experts {module}",
            remedy="give a larger recv_capacity_factor, or other inputs: a training would repeat this step without it",
        )


def compare(
    reference: SimulationResult,
    program: Program,
    ranks: Sequence[SimulationResult],
    sizes: Mapping[str, int],
    again: Callable[[], SimulationResult] | None = None,
) -> ValueReport:
    """Compares every rank's results with its block of the reference's.

    Args:
        reference: of one device.
        program: the localised program, whose layouts say what a rank's block is.
        ranks: what each rank computed.
        sizes: values of the symbols.
        again: computes the reference once more; it is asked where a deviation is above the tolerance and small.

    Raises:
        CheckFailed: more rows of experts came than there are places for, so that nothing could be compared.
    """
    layouts = {p.fqn: output_layouts(program.node(p.node))[0] for p in program.parameters}
    _check_places(ranks)
    nodes = {name: node for name, node in program.output_nodes().items() if name in reference.outputs}
    outputs = {name: output_layouts(node)[0] for name, node in nodes.items()}
    # By the largest of all: some gradients are zero but for rounding, as that of a key's bias in attention.
    largest = max((_scale(g) for g in reference.gradients.values()), default=1.0) or 1.0
    errors = {"loss": 0.0, "output": 0.0, "gradient": 0.0}
    large: dict[tuple[str, str], float] = {}
    worst, peak = "", -1.0
    for rank, run in enumerate(ranks):
        place = coordinates(program.axes, rank)
        odd = sorted(run.gradients.keys() ^ reference.gradients.keys())
        if odd:
            return ValueReport(
                errors["loss"], errors["output"], float("inf"), f"gradients of {', '.join(odd)}", 0, False
            )
        kinds = [("output", name, layout, reference.outputs, run.outputs) for name, layout in outputs.items()]
        kinds += [("gradient", name, layouts[name], reference.gradients, run.gradients) for name in reference.gradients]
        for what, name, layout, whole, mine in kinds:
            expected, actual = local_block(whole[name], layout, program.axes, place, sizes), mine[name]
            if what == "output":  # padding holds anything, but has no gradient
                expected, actual = (without_padding(part, layout, program.axes, place) for part in (expected, actual))
            scale = _scale(whole[name]) if what == "output" else largest
            error = relative_gap(actual, expected, scale)
            errors[what] = max(errors[what], error)
            if error > TOLERANCE:
                key = ("gradient of" if what == "gradient" else what), name
                large[key] = max(large.get(key, 0.0), error)
            if what == "output" and name == program.loss:
                errors["loss"] = max(errors["loss"], error)
            if error > peak:
                worst, peak = f"gradient of {name}" if what == "gradient" else f"output {name}", error
    # The last question takes further runs of the reference, so it is asked only where the others leave it open.
    ok = not large or (again is not None and max(large.values()) <= _MOST and _is_rounding(large, reference, again))
    return ValueReport(errors["loss"], errors["output"], errors["gradient"], worst, len(reference.gradients), ok)


def _is_rounding(large: _Gaps, reference: SimulationResult, again: Callable[[], SimulationResult]) -> bool:
    """Returns whether deviations are such as the reference has from itself where its sums are rounded otherwise."""
    noise = _noise("reference", reference, again)
    return all(gap <= TOLERANCE + FACTOR * noise[key] for key, gap in large.items())


def verify_values(
    captured: Program,
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    step: int = 0,
    reference: SimulationResult | None = None,
) -> ValueReport:
    """Compares a program on all simulated ranks, forward and backward, with the captured one on one device.

    Args:
        captured: the program as it was captured.
        program: the program after `localize`, which is differentiated as a training step is, or a step, of which two
            microbatches are compared.
        state: parameters, buffers and constants by name, whole.
        inputs: by path, whole.
        step: number of the step, which selects the dropout masks.
        reference: the single device's results where they are known (`reference_run` of the same arguments).
    """
    if reference is None:
        reference = reference_run(captured, state, inputs, step=step)
    sizes = symbol_values(program, inputs)
    if Property.STEP in program.properties:
        return _verify_step(captured, program, state, inputs, step, reference)
    program = step_of(program)
    ranks = simulated_run(program, state, inputs, step)
    again = functools.partial(reference_run, captured, state, inputs, step=step)
    return compare(reference, program, ranks, sizes, again)


def simulated_run(
    program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], step: int = 0
) -> list[SimulationResult]:
    """Returns what every rank computes of a localised program, forward and backward, in float64.

    Args:
        program: otherwise as for `verify_values`.
    """
    weights, rows = wide_state(program, state), given_inputs(program, inputs, step)
    return run_ranks(promote(step_of(program)), weights, rows, symbol_values(program, inputs))


def _verify_step(
    captured: Program,
    program: Program,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    step: int,
    reference: SimulationResult,
) -> ValueReport:
    """Compares a step of two microbatches, of other rows, random bits and tangents: outputs, and the sums of gradients.

    Args:
        reference: of the first on one device; otherwise as for `verify_values`.
    """
    sizes, other = symbol_values(program, inputs), with_other_rows(captured, inputs)
    second = functools.partial(reference_run, captured, state, other, step=step, microbatch=1)
    references = [reference, second()]
    microbatches = [given_inputs(program, rows, step, index) for index, rows in enumerate((inputs, other))]
    by_microbatch = run_microbatches(promote(program), wide_state(program, state), microbatches, SCALES, sizes)

    def both(runs: Sequence[SimulationResult]) -> list[SimulationResult]:
        """Returns each with the gradients of the step, which are sums."""
        gradients: dict[str, Tensor] = {}
        for scale, one in zip(SCALES, runs, strict=True):
            for name, value in one.gradients.items():
                gradients[name] = value * scale + gradients[name] if name in gradients else value * scale
        return [SimulationResult(one.outputs, gradients) for one in runs]

    def again(index: int) -> SimulationResult:
        return both([reference_run(captured, state, inputs, step=step), second()])[index]

    reports = [
        compare(one, program, ranks, sizes, functools.partial(again, index))
        for index, (one, ranks) in enumerate(zip(both(references), by_microbatch, strict=True))
    ]
    worst = max(reports, key=lambda report: report.deviation)
    return replace(worst, ok=all(report.ok for report in reports))


def check_capture(captured: Captured, model: nn.Module, batch: Any, canonical: bool = True) -> None:
    """Checks that the captured graph computes what the eager module does, in its own types.

    PyTorch draws the same random bits on both sides, from one seed. Values differ by rounding: gradients are summed in
    another order where a value has several users, the canonical graph adds biases apart, and PyTorch has several
    kernels for what a trace writes in one way. Allowed are some units of the coarsest type in the graph, of the largest
    value, and a multiple of what another order of its sums changes in the graph itself (`OtherOrder`).
    Where that is so much that nothing could be seen, both are compared in float64. Module and generators are left as
    they were.

    Args:
        canonical: whether the canonical graph is compared too.

    Raises:
        CheckFailed: something differs by more, or rounding decides what comes out; names the tensor.
    """
    try:
        _check_capture(captured, model, batch, canonical, lambda program: program)
    except _RoundingDecides as error:
        if input_dtype(captured.program.plan) is not None:  # what the plan casts is of no wider type
            raise
        try:
            with _widened(model):
                _check_capture(captured, model, pytree.tree_map_only(Tensor, wide, batch), canonical, promote)
        except (CheckFailed, InputError):  # such as of types that the forward names
            raise error from None


class _RoundingDecides(CheckFailed):
    """So much of a result is rounding that nothing can be said."""


@contextlib.contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Casts the model to float64 for a while; afterwards it holds the very tensors that it held."""
    saved = [(parameter, parameter.data, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, data, _ in saved:
            parameter.grad = None
            parameter.data = wide(data)
        with swapped(model, {id(b): wide(b) for b in model.buffers()}):
            yield
    finally:
        for parameter, data, gradient in saved:
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient


def _check_capture(
    captured: Captured, model: nn.Module, batch: Any, canonical: bool, typed: Callable[[Program], Program]
) -> None:
    """Checks as `check_capture` does, for graphs that `typed` brings to the types of the model."""
    new = written(captured.program)
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    batch = pytree.tree_map_only(Tensor, lambda t: t.to(device), batch)
    with contextlib.ExitStack() as stack:
        for context in (plain_surrounding(), torch.random.fork_rng(_devices(device)), untouched(model)):
            stack.enter_context(context)
        stack.enter_context(_own_buffers(model))
        _seed(device)
        inputs, state = call_inputs(captured, model, batch), program_state(captured.program, model)
        state = {name: value.clone() if name in new else value for name, value in state.items()}
        with nothing_remembered(model):  # what the forward sets for functions to read is not set where the graph runs
            eager, gradients = _run_eagerly(captured, model, batch)
        state = {name: value.to(device) for name, value in state.items()}
        programs = {"captured": captured.program}
        if canonical:
            programs["canonical"] = PassManager(CANONICAL_PASSES).run(captured.program)

        def graph(label: str, program: Program) -> SimulationResult:
            _seed(device)
            with nothing_remembered(model):
                return _run_graph(label, program, {**state, **program.constants}, inputs)

        for label, original in programs.items():
            program = typed(original)
            run = graph(label, program)
            gaps = _gaps(label, (eager, gradients), (run.outputs, run.gradients))
            _expect(label, gaps, epsilon(program), functools.partial(graph, label, program), run)


def _run_graph(
    label: str, program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> SimulationResult:
    try:
        return run_single(program, state, inputs)
    except _FAILURES as error:
        reason = f"the {label} graph raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise CheckFailed(reason, where=program.loss or "captured graph", remedy=_UNFAITHFUL) from error


def _seed(device: torch.device) -> None:
    """Seeds the CPU's generator and the device's, and no other: `torch.manual_seed` would seed those of all GPUs."""
    torch.default_generator.manual_seed(17)
    for gpu in _devices(device):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(17)


def _devices(device: torch.device) -> list[torch.device]:
    """Returns whose generators a run draws from, besides the CPU's."""
    return [device] if device.type == "cuda" else []


@contextlib.contextmanager
def _own_buffers(model: nn.Module) -> Iterator[None]:
    """Gives the model copies of its buffers: what a forward does to them in place is gone at the end."""
    with swapped(model, {id(b): b.clone() for b in model.buffers()}):
        yield


def _run_eagerly(captured: Captured, model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns outputs by name, new values of buffers too, and gradients of the parameters that outputs reach.

    Buffers are what the forward makes of them: a checkpoint of the author's writes them once more in the backward.
    """
    args, kwargs = arguments(model, batch, captured.loss is not None)
    args, kwargs = cast_inputs((args, kwargs), input_dtype(captured.program.plan))
    with torch.enable_grad(), _eagerly(model):
        outputs = model(*args, **kwargs)
        result: Any = {"loss": captured.loss(outputs, batch), "outputs": outputs} if captured.loss else outputs
    tensors = dict(model.named_buffers())
    new = {buffer_name(fqn): tensors[fqn].detach().clone() for fqn in written(captured.program)}
    leaves = pytree.tree_leaves(result)
    if any(isinstance(leaf, FakeTensor) for leaf in leaves):
        raise InputError(
            "the model itself gives tensors without values: what its forward keeps somewhere was made by a trace",
            where=type(model).__name__,
            remedy="keep caches in attributes of the module, or in none",
        )
    pairs = zip(captured.spec.out_leaves, leaves, strict=True)
    output_leaves = {str(name): leaf for (kind, name), leaf in pairs if kind == "output"}
    upstream = cotangents(captured.program, symbol_values(captured.program, call_inputs(captured, model, batch)))
    roots = {name: output_leaves[name] for name in upstream if output_leaves[name].requires_grad}
    gradients: dict[str, Tensor] = {}
    if roots:
        parameters = dict(model.named_parameters())
        trained = {p.fqn: parameters[p.fqn] for p in captured.program.parameters if p.trainable}
        with _eagerly(model):
            gradients = _gradients(roots, {n: u.to(output_leaves[n].device) for n, u in upstream.items()}, trained)
    return {**{name: leaf.detach() for name, leaf in output_leaves.items()}, **new}, gradients


def _eagerly(model: nn.Module) -> Blamed:
    """Turns what the author's model raises by itself into an `InputError`."""

    def error(reason: str, place: str) -> InputError:
        return InputError(
            f"the model itself, not split, raises {reason}{f' ({place})' if place else ''}",
            where=type(model).__name__,
            remedy="make it train on one device first",
        )

    return Blamed(error)


def _gradients(
    roots: Mapping[str, Tensor], upstream: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns gradients by `backward`, which reentrant checkpoints need; gradients from before are put back."""
    saved = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        torch.autograd.backward([*roots.values()], [upstream[name] for name in roots])
        return {name: p.grad.to_dense() for name, p in parameters.items() if p.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = saved[name]


def _gaps(label: str, expected: _Results, actual: _Results) -> _Gaps:
    """Returns by kind and name how far results are apart, over the largest value.

    Raises:
        CheckFailed: one side alone has a result.
    """
    gaps = {}
    for what, mine, others in (("output", expected[0], actual[0]), ("gradient of", expected[1], actual[1])):
        largest = max((_scale(value) for value in mine.values()), default=0.0)
        for name in sorted(mine.keys() | others.keys()):
            if name not in mine or name not in others:
                owner = "the module" if name in mine else f"the {label} graph"
                raise CheckFailed(f"only {owner} has it", where=f"{what} {name}", remedy=_UNFAITHFUL)
            a, b = mine[name], others[name]
            gaps[what, name] = relative_gap(b, a, _scale(a) if what == "output" else largest)
    return gaps


def _noise(label: str, run: SimulationResult, again: Callable[[], SimulationResult]) -> _Gaps:
    """Returns how far results of a graph are from themselves where its sums are rounded otherwise; as `_gaps`."""
    noise: dict[tuple[str, str], float] = {}
    for seed in range(_RUNS):
        with OtherOrder(seed):
            other = again()
        for key, gap in _gaps(label, (run.outputs, run.gradients), (other.outputs, other.gradients)).items():
            noise[key] = max(noise.get(key, 0.0), gap)
    return noise


def _expect(label: str, gaps: _Gaps, unit: float, again: Callable[[], SimulationResult], run: SimulationResult) -> None:
    """Accepts what rounding explains.

    Args:
        label: of the graph.
        gaps: between the module and the graph.
        unit: of the last place of the coarsest type.
        again: runs the graph once more; it is asked only where kernels of one library do not explain the gaps.
        run: the one that was compared.

    Raises:
        CheckFailed: a gap is larger, or so much of a result is rounding that nothing can be said.
    """
    large = {key: gap for key, gap in gaps.items() if gap > UNITS * unit}
    if not large:
        return
    noise = _noise(label, run, again)
    for (what, name), gap in large.items():
        allowed = UNITS * unit + FACTOR * noise[what, name]
        if gap > allowed:
            reason = f"the {label} graph deviates from the module by {gap:.3g}, and rounding explains {allowed:.3g}"
            raise CheckFailed(reason, where=f"{what} {name}", remedy=_UNFAITHFUL)
        if allowed > max(math.sqrt(unit), UNITS * unit):
            reason = (
                f"the {label} graph deviates from the module by {gap:.3g}, and where its sums are rounded otherwise"
            )
            raise _RoundingDecides(
                f"{reason} from itself by {noise[what, name]:.3g}: whether it is the model cannot be seen",
                where=f"{what} {name}",
                remedy="take other inputs, other initial weights or a wider type, in which the model does not amplify "
                "the rounding of a sum so far",
            )
