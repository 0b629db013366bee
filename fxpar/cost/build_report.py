"""Makes reports.

Enters: a program as a rank runs it, sizes and an optimizer's kind. Leaves: a `Report`, of a pipeline joined of those of
its stages, whose steps are of one microbatch. No process group, no values.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import sympy
import torch

from fxpar.cost.buffer_reuse import Reach, why_not_copied
from fxpar.cost.communication import Collective, collectives, in_input_sizes, layer_of, symbol_sizes, value_bytes
from fxpar.cost.figures import (
    RANK_PARTS,
    ModelSize,
    ModuleMemory,
    PassLine,
    RankMemory,
    Report,
    StageLine,
    Traffic,
)
from fxpar.cost.flops import matmul_flops, split_flops
from fxpar.cost.measure import Measured, Measurer, SavedStorage
from fxpar.cost.parameter_memory import (
    OptimizerKind,
    copy_bytes,
    gathered_bytes,
    held_by,
    held_bytes,
    local_elements,
    optimizer_kind,
)
from fxpar.cost.reasons import parameter_cuts, remarks, whole_matrices, without_rule
from fxpar.cost.seconds import step_times
from fxpar.cost.stage_cut_points import stage_shares
from fxpar.cost.verdict import (
    CountedStep,
    RunPipeline,
    machine_of,
    stages_in_flight,
    stored_seconds,
    verdict_notes,
    verdict_of,
)
from fxpar.cost.work import work_of
from fxpar.errors import CheckFailed, InputError, shown
from fxpar.ir.program import Parameter, Program, note, operands, output_types
from fxpar.ir.properties import Property
from fxpar.ir.regions import inlined
from fxpar.ir.stages import received_name
from fxpar.ir.step import RNG_PATH, held_type
from fxpar.ir.symbols import balanced, in_groups_of
from fxpar.layout.symbolic_sizes import Size, evaluate, names, parse_size, product, simplify, symbol
from fxpar.mesh.axes import coordinates
from fxpar.ops.lower import Lowered
from fxpar.ops.operator import alike
from fxpar.plan.plan import Plan

_TOTAL = "all"
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_MOST_BYTES = 2**52  # intermediate results of a step are some times as large, and must stay below 2**63


@dataclass(frozen=True)
class Activations:
    """What autograd keeps, by part of the model: storages and their bytes, and bytes in closed form."""

    tensors: Mapping[str, int]
    bytes: Mapping[str, int]
    formulas: Mapping[str, str]


@dataclass(frozen=True)
class ReportBasis:
    """What a report rests on besides the program.

    Attributes:
        findings: what was checked of the capture, as sentences.
        captured: the program as its author wrote it, whose tokens and FLOPs are those of a step; by default the program
            itself.
        memory: bytes of a rank; those of the machine of the plan's cost by default.
        run_pipeline: runs a pipeline; without it no seconds of one are known.
    """

    findings: tuple[str, ...] = ()
    captured: Program | None = None
    memory: int | None = None
    run_pipeline: RunPipeline | None = None


def make_report(
    program: Program,
    steps: Iterable[tuple[Program, Program, Lowered]],
    *,
    name: str,
    device: torch.device,
    sizes: Mapping[str, int] | None = None,
    optimizer: str = "adamw",
    reach: Reach | None = None,
    basis: ReportBasis = ReportBasis(),
) -> Report:
    """Counts everything; nothing is allocated and nothing communicates.

    Args:
        program: with property `local`, or without mesh axes.
        steps: as of `counted_steps`: all stages of a pipeline, one that is counted alone, or the whole program.
        name: of the model.
        device: whose kernels are assumed.
        sizes: of the inputs by symbol (`b`, `s`); the example's where they are not given.
        optimizer: as `optimizer_kind` takes it.
        reach: which ranks can copy into each other's memory; None where they are not known.
        basis: what the report rests on besides.

    Raises:
        InputError: an unknown symbol or optimizer, a size that the ranks cannot share out, or an operator whose memory
            cannot be counted without values.
        CheckFailed: the step sends other collectives than those that the program lists.
    """
    program = inlined(program)
    optimizer_kind(optimizer)
    if sizes is not None and not isinstance(sizes, Mapping):
        raise InputError(f"must be a mapping, got {shown(sizes)}", where="sizes", remedy='write {"b": 8}')
    all_sizes = input_sizes(program, sizes or {})
    options: dict[str, Any] = {"name": name, "device": device, "sizes": all_sizes, "optimizer": optimizer}
    share = split_flops(program, sizes=all_sizes)
    noted = (*basis.findings, *remarks(program, share))
    measurer = Measurer()
    reports = [
        _figures(program, trained, measurer.of(trained, lowered, device), reach=reach, **options)
        for program, trained, lowered in steps
    ]
    if len(reports) == 1:
        return _with_verdict(replace(reports[0], remarks=noted), program, basis)
    lines = stage_lines(program, reports, all_sizes, basis.run_pipeline)
    report = replace(
        joined(reports, lines, program.plan),
        passes=_passes(program),
        size=replace(_model_size(program, share), rank_elements=most_elements(lines, program.plan)),
        unsplit=whole_matrices(program),
        without_rule=tuple(without_rule(program)) if program.axes else (),
        remarks=noted,
    )
    return _with_verdict(report, program, basis)


def _with_verdict(report: Report, program: Program, basis: ReportBasis) -> Report:
    """Returns the report with what its steps come to on a machine."""
    plan, of_text = program.plan, Property.STEP in program.properties
    author = basis.captured or program
    volume = work_of(author).at(symbol_sizes(author, report.sizes))
    lanes = len({line.rank for line in report.stages}) or 1
    # The ranks of one place in the pipeline stand next to each other, and the first has as much as any.
    firsts = report.ranks[:: len(report.ranks) // lanes]
    moved = [rank.parameters + rank.gradients + rank.optimizer for rank in firsts]
    trains = report.optimizer != "none"
    verdict, run = verdict_of(
        report.steps,
        plan,
        peaks=[rank.peak for rank in report.ranks],
        optimizers=[size / plan.cost.memory if trains else 0.0 for size in moved],
        volume=replace(volume, flops=0.0) if of_text else volume,
        machine=machine_of(plan.cost, basis.memory),
        run_pipeline=basis.run_pipeline,
    )
    products = [kind.dtype for node, _ in matmul_flops(program) for kind in output_types(node)]
    wide = any(dtype.itemsize > 2 for dtype in products)
    notes = verdict_notes(verdict, plan.cost, compiled=plan.compile, wide=wide)
    return replace(report, verdict=verdict, run=run, caveats=tuple(notes))


def _figures(
    program: Program,
    trained: Program,
    measured: Callable[..., Measured],
    *,
    name: str,
    device: torch.device,
    sizes: Mapping[str, int],
    optimizer: str,
    reach: Reach | None,
) -> Report:
    """Returns the report of a program and its step, without remarks."""
    all_sizes, kind = dict(sizes), optimizer_kind(optimizer)
    local = {s.name: all_sizes[s.name] // s.multiple for s in program.symbols}
    step = measured(local)
    listed = collectives(trained, all_sizes)
    _check_counts(listed, step)
    activations = _activations(program, step, local, functools.partial(measured, backward=False))
    share = split_flops(program, sizes=all_sizes)
    inputs = _input_bytes(program, local)
    ranks = _ranks(program, step, kind, inputs)
    return Report(
        name,
        program.plan.to_dict(),
        all_sizes,
        optimizer,
        device.type,
        _passes(program),
        _traffic(listed, trained, why_not_copied(trained, reach)),
        _model_size(program, share),
        ranks,
        _modules(program, step, activations, kind),
        activations.formulas.get(_TOTAL, ""),
        step.peak,
        step.peaks,
        step.largest,
        inputs,
        whole_matrices(program),
        tuple(without_rule(program)) if program.axes else (),
        (),
        copied_into=0 if reach is None else reach.bytes,
        steps=(CountedStep(trained, step_times(trained, all_sizes), stored_seconds(program, all_sizes), step.live),),
        cuts=parameter_cuts(program),
    )


def _passes(program: Program) -> tuple[PassLine, ...]:
    return tuple(PassLine(r.name, r.seconds, len(r.added), len(r.erased), len(r.changed)) for r in program.history)


def input_sizes(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns sizes of the inputs by symbol: those given, else the example's.

    Raises:
        InputError: an unknown symbol, no positive integer, sizes that no tensor has, or one that the ranks cannot share
            out.
    """
    examples = {s.name: s.example * s.multiple for s in program.symbols}
    for name, size in sizes.items():
        if name not in examples:
            known = ", ".join(examples) or "none"
            raise InputError("must be a symbol of the program", where=f"size {name}", remedy=f"choose from {known}")
        if type(size) is not int or size < 1:
            raise InputError(f"must be a positive integer, got {shown(size)}", where=f"size {name}", remedy="give one")
    check_countable(program, sizes)
    for s in program.symbols:
        if sizes.get(s.name, 0) % s.multiple:
            raise InputError(
                f"{sizes[s.name]} cannot be shared out by {s.ranks} ranks" + in_groups_of(s),
                where=f"size {s.name}",
                remedy=f"give a multiple of {s.multiple}",
            )
    return {**examples, **sizes}


def check_countable(program: Program, sizes: Mapping[str, int]) -> None:
    """Refuses sizes at which a tensor of the program would have more bytes than an address can count.

    Raises:
        InputError: names the value.
    """
    for name, size in sizes.items():
        if size > _MOST_BYTES:
            raise InputError(f"must be a tensor's size, got {shown(size)}", where=f"size {name}", remedy="give less")
    values = symbol_sizes(program, sizes)
    for node in program.graph.nodes:
        for kind in output_types(node) if node.op != "output" else ():
            byte_count = evaluate(product(kind.shape), values) * kind.dtype.itemsize
            if byte_count > _MOST_BYTES:
                raise InputError(
                    f"would have {byte_count:.1e} bytes with {', '.join(f'{n}={v}' for n, v in sizes.items())}",
                    where=f"%{node.name}",
                    remedy="give smaller sizes",
                )


# ---------------------------------------------------------------------- collectives


def _check_counts(listed: Iterable[Collective], step: Measured) -> None:
    expected, measured = Counter((c.op, c.bytes) for c in listed), Counter(step.collectives)
    for op, size in (*(expected - measured), *(measured - expected)):
        raise CheckFailed(
            f"the program lists {expected[op, size]} {op} of {size} bytes, and a step has {measured[op, size]}",
            where="collectives",
            remedy="compare 'fxpar comm' with the operators' backward: an autograd function may return no gradient",
        )


def _traffic(listed: Iterable[Collective], program: Program, why_not: Mapping[str, str]) -> tuple[Traffic, ...]:
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for c in listed:
        groups.setdefault((c.op, c.axis, c.phase), []).append(c)
    return tuple(
        Traffic(
            *kind,
            len(mine),
            sum(c.bytes for c in mine),
            _sum([c.bytes_formula for c in mine]),
            sum(not why_not[c.node] for c in mine),
            sum(note(program.node(c.node)).one_shot for c in mine),
            tuple(sorted({why_not[c.node] for c in mine} - {""})),
            round(sum(c.bytes * c.part for c in mine if c.part < 1 and not why_not[c.node])),
        )
        for kind, mine in groups.items()
    )


# ---------------------------------------------------------------------- memory


def part_of(module: str) -> str:
    """Returns the part of the model that a module belongs to: its layer, or itself outside of the layers."""
    return layer_of(module) or module


def _activations(
    program: Program, step: Measured, sizes: Mapping[str, int], count: Callable[[Mapping[str, int]], Measured]
) -> Activations:
    powers = occurring_powers(program)
    where = sample_sizes(powers, sizes)
    measured = [_by_part(step.saved if point == sizes else count(point).saved) for point in where]
    fitted = fit_polynomials(powers, where, measured)
    formulas = {part: in_input_sizes(program, size) for part, size in fitted.items() if size is not None}
    tensors = Counter(part_of(tensor.module) for tensor in step.saved)
    return Activations(tensors, _by_part(step.saved), formulas)


def _by_part(saved: Iterable[SavedStorage]) -> dict[str, int]:
    sizes: dict[str, int] = {_TOTAL: 0}
    for entry in saved:
        part = part_of(entry.module)
        sizes[part] = sizes.get(part, 0) + entry.bytes
        sizes[_TOTAL] += entry.bytes
    return sizes


def _weights(program: Program) -> list[Parameter]:
    return [p for p in program.parameters if p.kind == "parameter"]


def places(program: Program) -> list[dict[str, int]]:
    """Returns every rank's index on the axes that split the program."""
    return [coordinates(program.axes, rank) for rank in range(prod(program.axes.values()))]


def _ranks(program: Program, step: Measured, kind: OptimizerKind, inputs: int) -> tuple[RankMemory, ...]:
    weights = _weights(program)
    parameters = sum(held_bytes(program, p) for p in weights)
    buffers = sum(held_bytes(program, p) for p in program.parameters if p.kind != "parameter")
    trained = [p for p in weights if p.node in step.gradients]
    gradients = sum(held_bytes(program, p) for p in trained)
    state = sum(kind.bytes(program, p) for p in trained) + kind.staged_bytes(program, trained)
    host = kind.host_bytes(program, trained)
    activations = sum(tensor.bytes for tensor in step.saved)
    copies = sum(copy_bytes(program, p) for p in weights)
    gathered = sum(gathered_bytes(program).values())
    # Gradients that earlier microbatches have left are there from the start.
    earlier = gradients if program.plan.microbatches > 1 else 0
    peak = parameters + copies + gathered + buffers + state + inputs + step.peak.bytes + earlier
    # When the optimizer steps, all gradients and its state are there.
    peak = max(peak, parameters + copies + buffers + gradients + state)
    ranks = []
    for rank, place in enumerate(places(program)):
        mine = [held_by(program, p, place) for p in weights]
        whole, shared, padding = (sum(getattr(h, part) for h in mine) for part in ("whole", "shared", "padding"))
        parts = (whole, shared, padding, copies, gathered, buffers, gradients, state, host, activations, peak)
        ranks.append(RankMemory(rank, parameters, *parts))
    return tuple(ranks)


def _modules(
    program: Program, step: Measured, activations: Activations, kind: OptimizerKind
) -> tuple[ModuleMemory, ...]:
    """Returns the memory by part, in the order in which the model runs."""
    parts: dict[str, list[Parameter]] = {}
    for node in program.graph.nodes:
        parameter = program.parameter(node) if node.op == "placeholder" else None
        if parameter is not None and parameter.kind == "parameter":
            parts.setdefault(part_of(parameter.fqn.rpartition(".")[0]), []).append(parameter)
    for part in activations.bytes:
        if part != _TOTAL:
            parts.setdefault(part, [])
    modules = []
    for part, mine in parts.items():
        trained = [p for p in mine if p.node in step.gradients]
        modules.append(
            ModuleMemory(
                part,
                sum(held_bytes(program, p) for p in mine),
                sum(held_bytes(program, p) for p in trained),
                sum(kind.bytes(program, p) for p in trained),
                activations.bytes.get(part, 0),
                activations.tensors.get(part, 0),
                activations.formulas.get(part, ""),
            )
        )
    return tuple(modules)


def _input_bytes(program: Program, sizes: Mapping[str, int]) -> int:
    # The random state is made for each step, and what a stage receives is kept like an activation.
    batch = [entry for entry in program.inputs if entry.path != RNG_PATH and not received_name(entry.path)]
    return sum(value_bytes(program, program.node(entry.node), sizes) for entry in batch)


def _model_size(program: Program, share: float) -> ModelSize:
    weights = _weights(program)
    elements = [evaluate(product(p.type.shape), {}) for p in weights]
    widths = [held_type(program.plan, p.type).dtype.itemsize for p in weights]
    in_all = sum(count * width for count, width in zip(elements, widths, strict=True))
    return ModelSize(sum(elements), in_all, sum(local_elements(program, p) for p in weights), share)


# ---------------------------------------------------------------------- pipelines


def stage_lines(
    program: Program, reports: Sequence[Report], sizes: Mapping[str, int], run_pipeline: RunPipeline | None
) -> tuple[StageLine, ...]:
    """Returns a line for each stage, of which the reports have the figures. ScheduleError as of `stages_in_flight`."""
    lines, places = [], stages_in_flight(program.plan, run_pipeline)
    for share, report in zip(stage_shares(program, sizes), reports, strict=True):
        memory, (rank, flying) = report.ranks[0], places[share.stage]
        received = share.received
        lines.append(
            StageLine(
                share.stage,
                rank,
                share.first,
                share.last,
                share.flops,
                share.share,
                share.elements,
                memory.parameters,
                memory.gradients,
                memory.optimizer,
                memory.activations + sum(crossing.bytes for crossing in received),
                flying,
                received,
            )
        )
    return tuple(lines)


def most_elements(lines: Sequence[StageLine], plan: Plan) -> int:
    """Returns elements of the parameters of the rank that has most."""
    return max(sum(line.elements for line in lines if line.rank == rank) for rank in range(plan.pp))


def joined(reports: Sequence[Report], lines: Sequence[StageLine], plan: Plan) -> Report:
    """Returns the figures of all stages and ranks.

    Args:
        reports: the figures of each stage.
        lines: of each stage.
    """
    ranks: list[RankMemory] = []
    worst: dict[int, int] = {}
    for rank in range(plan.pp):
        stages = [line.stage for line in lines if line.rank == rank]
        # The stage whose step makes the rank's peak.
        top = max(stages, key=lambda stage: _beside_gradients(reports[stage], 0))
        for place in range(len(reports[0].ranks)):
            ranks.append(_rank(len(ranks), place, stages, top, reports, lines))
        worst[top] = ranks[-1].peak
    fullest = reports[max(worst, key=lambda stage: worst[stage])]
    return replace(
        fullest,
        collectives=_joined_traffic(reports),
        ranks=tuple(ranks),
        modules=_joined_modules(reports),
        activations=_sum([report.activations for report in reports if report.ranks[0].activations]),
        inputs=max(report.inputs for report in reports),
        stages=tuple(lines),
        steps=tuple(step for report in reports for step in report.steps),
        cuts=tuple(dict.fromkeys(cut for report in reports for cut in report.cuts)),
    )


_RESIDENT = ("parameters", "copies", "gathered", "buffers", "gradients", "optimizer")


def _rank(
    number: int, place: int, stages: Sequence[int], top: int, reports: Sequence[Report], lines: Sequence[StageLine]
) -> RankMemory:
    """Returns what a rank of the pipeline holds: all its stages, of each the microbatches in flight."""
    parts = [reports[stage].ranks[place] for stage in stages]
    summed = [name for name in RANK_PARTS if name not in ("activations", "peak")]
    sums = {name: sum(getattr(part, name) for part in parts) for name in summed}
    activations = sum(lines[stage].in_flight * lines[stage].activations for stage in stages)
    step = _beside_gradients(reports[top], place) - reports[top].ranks[place].activations
    resident = sum(sums[name] for name in _RESIDENT)
    peak = resident + reports[top].inputs + activations + max(step, 0)
    return RankMemory(rank=number, **sums, activations=activations, peak=peak)


def _beside_gradients(report: Report, place: int) -> int:
    """Returns the most bytes of a microbatch that are alive beside its stage's gradients, with what it keeps."""
    gradients = report.ranks[place].gradients
    return max((m.bytes - (0 if m.phase == "forward" else gradients) for m in report.phases), default=0)


def _joined_traffic(reports: Sequence[Report]) -> tuple[Traffic, ...]:
    groups: dict[tuple[str, str, str], list[Traffic]] = {}
    for report in reports:
        for one in report.collectives:
            groups.setdefault((one.op, one.axis, one.phase), []).append(one)
    return tuple(Traffic.summed(*kind, _sum([one.formula for one in mine]), mine) for kind, mine in groups.items())


def _sum(formulas: Sequence[str]) -> str:
    """Returns the sum in closed form, where each has one."""
    return str(simplify(sum(parse_size(text) for text in formulas))) if formulas and all(formulas) else ""


def _joined_modules(reports: Sequence[Report]) -> tuple[ModuleMemory, ...]:
    """Returns the parts of all stages; what several have a part of says which."""
    counts = Counter(module.module for report in reports for module in report.modules)
    return tuple(
        replace(module, module=f"{module.module or 'the model'} on stage {stage}")
        if counts[module.module] > 1
        else module
        for stage, report in enumerate(reports)
        for module in report.modules
    )


# Bytes in closed form are the polynomial in the sizes that counts at a few sizes lie on, with exact coefficients. Which
# powers can occur is read from the shapes in the program, downward closed (with b*s**2 also b*s, s, …): for such a set
# of exponents the lattice of the exponents themselves determines the polynomial (Chung and Yao, "On lattices admitting
# unique Lagrange interpolations", SIAM J. Numer. Anal. 1977). Nothing is taken for granted: a point that had no part in
# it must agree.

Powers = tuple[int, ...]


def occurring_powers(program: Program) -> list[Powers]:
    """Returns the powers of the program's symbols, in their order, that sizes of its values are made of, sorted."""
    order = [symbol(s.name) for s in program.symbols]
    shapes = {kind.shape for node in program.graph.nodes if node.op != "output" for kind in output_types(node)}
    for node in program.graph.nodes:
        if alike(node.target) is _ATTENTION:  # its scores are no value of the graph
            query, key = (output_types(operand)[0].shape for operand in operands(node)[:2])
            shapes.add((*query[:-1], key[-2]))
    monomials = {(0,) * len(order)}
    for size in {balanced(program.counted, product(shape)) for shape in shapes if names(shape)}:
        if sympy.sympify(size).is_polynomial(*order):
            for powers in sympy.Poly(size, *order).monoms():
                monomials.update(itertools.product(*[range(power + 1) for power in powers]))
    return sorted(monomials)


def sample_sizes(powers: Sequence[Powers], sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns where to count: one point for each power, the first at `sizes`, and after them one to check.

    Towards smaller sizes where there is room, since models bound their sizes from above. Never below 2: what has one
    row alone is laid out otherwise.
    """
    base = {name: max(size, 2) for name, size in sizes.items()}
    steps = {}
    for index, (name, size) in enumerate(base.items()):
        most = max(power[index] for power in powers)
        steps[name] = -1 if size - most - 1 >= 2 else 1
    lattice = [_moved(base, steps, power) for power in powers]
    farther = [max(power[index] for power in powers) + 1 for index in range(len(base))]
    return [*lattice, _moved(base, steps, farther)]


def _moved(base: Mapping[str, int], steps: Mapping[str, int], by: Sequence[int]) -> dict[str, int]:
    return {name: size + steps[name] * times for (name, size), times in zip(base.items(), by, strict=True)}


def fit_polynomials(
    powers: Sequence[Powers], where: Sequence[Mapping[str, int]], counts: Sequence[Mapping[str, int]]
) -> dict[str, Size | None]:
    """Returns polynomials by name; None where the last point does not lie on the one through the others.

    Args:
        powers: of the symbols, as `occurring_powers` gives them.
        where: as `sample_sizes` gives them.
        counts: what was counted there, by name.
    """
    keys = list(dict.fromkeys(key for count in counts for key in count))
    rows = [
        [prod(size**e for size, e in zip(point.values(), power, strict=True)) for power in powers] for point in where
    ]
    values = [[count.get(key, 0) for key in keys] for count in counts]
    solved = sympy.Matrix(rows[:-1]).LUsolve(sympy.Matrix(values[:-1]))
    predicted = sympy.Matrix([rows[-1]]) * solved
    monomials = [
        prod((symbol(n) ** e for n, e in zip(where[0], power, strict=True)), start=sympy.Integer(1)) for power in powers
    ]
    polynomials: dict[str, Size | None] = {}
    for column, key in enumerate(keys):
        terms = [solved[row, column] * monomial for row, monomial in enumerate(monomials)]
        agrees = predicted[0, column] == values[-1][column]
        polynomials[key] = simplify(sympy.Add(*terms)) if agrees else None
    return polynomials
