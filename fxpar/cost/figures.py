"""The figures of a report, with their titles and how they print.

Enters: numbers. Leaves: frozen records, which turn into plain mappings, and sections of a report, in which runs of
equal rows (layers, ranks) are one row. Bytes are those of one rank unless said otherwise;
formulas are in the sizes of the inputs (`b`, `s`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any

from rich.console import Console, Group

from fxpar.cost.sections import FigureColumn, Section, as_group, columns, listing
from fxpar.cost.stage_cut_points import Received
from fxpar.cost.verdict import CountedStep, PipelineRun, Verdict, fit_text, speed_text, step_text
from fxpar.text.tables import amount, few

_WIDTH = 120
_NUMBER = re.compile(r"\d+")


# ---------------------------------------------------------------------- records


@dataclass(frozen=True)
class PassLine:
    """A pass that ran: wall time, and how many nodes it added, erased and changed."""

    name: Annotated[str, FigureColumn("pass", right=False)]
    seconds: Annotated[float, FigureColumn("time", lambda seconds: f"{1000 * seconds:.0f} ms")]
    added: Annotated[int, FigureColumn("added")]
    erased: Annotated[int, FigureColumn("erased")]
    changed: Annotated[int, FigureColumn("changed")]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a training step.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter or all_to_all.
        axis: mesh axis.
        phase: forward, backward, parameter (value or gradient of what parameters alone make), or recompute (forward
            ones of checkpointed regions, which run again in the backward).
        count: how many.
        bytes: of the whole values (what an all-gather yields, a reduction takes in), all together.
        formula: the same in closed form.
        copied: how many of them are copies between the ranks' memories.
        one_shot: how many of these are one kernel, as nothing is computed alongside them, or as it picks the rows.
        reasons: why the others go through the process group.
        needed: bytes of the copied ones that are expected to travel, where these are tokens for ranks that need them
            alone; 0 where nothing is picked.
    """

    op: Annotated[str, FigureColumn("op", right=False)]
    axis: Annotated[str, FigureColumn("axis", right=False)]
    phase: Annotated[str, FigureColumn("phase", right=False)]
    count: Annotated[int, FigureColumn("count")]
    bytes: Annotated[int, FigureColumn("bytes", "{:,}".format)]
    formula: Annotated[str, FigureColumn("closed form", right=False)]
    copied: Annotated[int, FigureColumn("copies")]
    one_shot: Annotated[int, FigureColumn("one-shot")]
    reasons: tuple[str, ...]
    needed: int

    @property
    def kind(self) -> str:
        """Returns what it is called in sentences."""
        return f"{self.axis} {self.phase} {self.op}"

    @classmethod
    def summed(cls, op: str, axis: str, phase: str, formula: str, parts: Sequence[Traffic]) -> Traffic:
        """Returns the sum of several."""
        count, size, copied, one_shot, needed = (
            sum(getattr(part, name) for part in parts) for name in ("count", "bytes", "copied", "one_shot", "needed")
        )
        reasons = tuple(sorted({reason for part in parts for reason in part.reasons}))
        return cls(op, axis, phase, count, size, formula, copied, one_shot, reasons, needed)


@dataclass(frozen=True)
class ModelSize:
    """Parameters of the model as its author wrote it, and of a rank. Tied ones count once.

    Attributes:
        elements: of the model.
        bytes: of the model.
        rank_elements: what a rank holds, padding included.
        split_flops: share of the matrix FLOPs that the ranks divide among them.
    """

    elements: int
    bytes: int
    rank_elements: int
    split_flops: float


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank in a training step. A part whose title is indented is one of `parameters`.

    Attributes:
        shared: key and value heads that are fewer than the ranks.
        padding: elements that are none of the model's.
        copies: of parameters in the program's type, where those are main values in float32 (mixed precision).
        gathered: of parameters, whole for a step, where data ranks share them out between steps.
        buffers: buffers and constants.
        gradients: after the backward.
        optimizer: its state on the device.
        host: its state in the host's memory, which is no part of the peak.
        activations: what autograd keeps between forward and backward.
        peak: the most that is alive at one time in forward, backward and the optimizer's step, all of the above
            included as far as it exists then.
    """

    rank: int
    parameters: Annotated[int, FigureColumn("parameters", amount)]
    whole: Annotated[int, FigureColumn("  whole on every rank", amount)]
    shared: Annotated[int, FigureColumn("  blocks that neighbours hold too", amount)]
    padding: Annotated[int, FigureColumn("  padding", amount)]
    copies: Annotated[int, FigureColumn("copies in half precision", amount)]
    gathered: Annotated[int, FigureColumn("gathered for the step", amount)]
    buffers: Annotated[int, FigureColumn("buffers", amount)]
    gradients: Annotated[int, FigureColumn("gradients", amount)]
    optimizer: Annotated[int, FigureColumn("optimizer", amount)]
    host: Annotated[int, FigureColumn("optimizer, in the host's memory", amount)]
    activations: Annotated[int, FigureColumn("activations", amount)]
    peak: Annotated[int, FigureColumn("peak", amount)]


RANK_PARTS = tuple(entry.name for entry in fields(RankMemory))[1:]


@dataclass(frozen=True)
class ModuleMemory:
    """Bytes of a part of the model: a layer, or a module outside of the layers.

    Attributes:
        module: its name, empty for the model itself (its loss).
        optimizer: state for the gradients.
        activations: what autograd keeps that the module was the first to ask for.
        tensors: how many storages that are.
        formula: `activations` in closed form; empty where there is none.
    """

    module: Annotated[str, FigureColumn("module", right=False)]
    parameters: Annotated[int, FigureColumn("parameters", amount)]
    gradients: Annotated[int, FigureColumn("gradients", amount)]
    optimizer: Annotated[int, FigureColumn("optimizer", amount)]
    activations: Annotated[int, FigureColumn("activations", amount)]
    tensors: Annotated[int, FigureColumn("tensors")]
    formula: Annotated[str, FigureColumn("closed form", lambda formula: formula or "none", right=False)]


@dataclass(frozen=True)
class Moment:
    """When and where: phase (forward, backward, recompute), module (of the forward) and operator, with the bytes."""

    bytes: Annotated[int, FigureColumn("bytes", amount)]
    phase: Annotated[str, FigureColumn("phase", right=False)]
    module: Annotated[str, FigureColumn("of", right=False)]
    operator: Annotated[str, FigureColumn("at", lambda operator: operator.removesuffix(".default"), right=False)]

    def __str__(self) -> str:
        place = f" of {self.module}" if self.module else ""
        return f"{amount(self.bytes)} at {self.operator.removesuffix('.default')} in the {self.phase}{place}"


@dataclass(frozen=True)
class ParameterCut:
    """How the ranks hold a parameter: its type, its layout, and the type of what one of them has."""

    parameter: Annotated[str, FigureColumn("parameter", right=False)]
    type: Annotated[str, FigureColumn("type", right=False)]
    layout: Annotated[str, FigureColumn("layout", right=False)]
    local: Annotated[str, FigureColumn("on a rank", right=False)]


@dataclass(frozen=True)
class Whole:
    """A matrix that every rank holds whole: its bytes and the reason."""

    parameter: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class StageLine:
    """A stage of a pipeline: what it has of the model, and bytes of a rank that holds it.

    Attributes:
        rank: on which rank of the pipeline it is.
        first: the module with which it begins.
        last: the module with which it ends.
        flops: of its matrix products in the forward of a microbatch.
        share: these as a part of all stages'.
        elements: of its parameters; what two stages hold is counted by both.
        optimizer: state for the gradients.
        activations: what a microbatch keeps for its backward, with what the stage received.
        in_flight: microbatches that keep it where its rank keeps most, by the plan's schedule.
        received: what crosses the cut in front of it.
    """

    stage: Annotated[int, FigureColumn("stage", right=False)]
    rank: Annotated[int, FigureColumn("rank", right=False)]
    first: Annotated[str, FigureColumn("from", right=False)]
    last: Annotated[str, FigureColumn("to", right=False)]
    flops: int
    share: Annotated[float, FigureColumn("FLOPs", "{:.1%}".format)]
    elements: int
    parameters: Annotated[int, FigureColumn("parameters", amount)]
    gradients: int
    optimizer: int
    activations: int
    in_flight: int
    received: tuple[Received, ...]


def _spaced(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts))


@dataclass(frozen=True)
class ExpertLoad:
    """Rows that one layer's experts received in the last step, over all its microbatches.

    Attributes:
        experts: of each expert, wherever they are computed.
        ranks: of each rank, in the order of the mesh: ranks that split the same experts have the same rows.
        dropped: how many more went beyond the capacity of experts; None where that has no limit.
        before: what `ranks` would be without replicas; None where the plan has no spare slots.
        replicas: how many slots had an expert, counted in each microbatch; 0 where the plan has none.
    """

    module: Annotated[str, FigureColumn("layer", right=False)]
    experts: Annotated[tuple[int, ...], FigureColumn("of each expert", _spaced, right=False)]
    ranks: Annotated[tuple[int, ...], FigureColumn("of each rank", _spaced, right=False)]
    dropped: int | None
    before: tuple[int, ...] | None = None
    replicas: int = 0

    @property
    def imbalance(self) -> tuple[float, float]:
        """Returns the most over the mean, of experts and of ranks; 1 where all have as many or there are no rows."""
        return _imbalance(self.experts), _imbalance(self.ranks)


def _imbalance(counts: Sequence[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


@dataclass(frozen=True)
class Report:
    """Says what a split program costs, and what is not split and why. `fxpar.cost.make_report` makes it.

    Memory is that of eager execution, counted on tensors; a compiled program keeps at most as much. What kernels use
    inside and the allocator's rounding come on top.

    Attributes:
        name: the model's name.
        plan: the plan, as `Plan.to_dict` returns it.
        sizes: sizes of the inputs by symbol.
        optimizer: the kind of optimizer whose state is counted.
        device: type of the device whose kernels are assumed.
        passes: the passes in order.
        collectives: the collectives by operation, axis and phase.
        copied_into: bytes of a rank's memory into which others copy so far; 0 for a program that does not run.
        size: elements and bytes of the parameters, and the share of FLOPs that is split.
        ranks: memory of each rank.
        modules: memory of a rank by part of the model, which is equal on all ranks.
        activations: closed form of `RankMemory.activations`; empty if there is none.
        peak: when most of a step is alive; its bytes leave out parameters, buffers, inputs and optimizer state.
        phases: when most is alive in each phase; `peak` is the largest of these.
        largest: the largest tensor of a step that is not a parameter, and where it is made.
        inputs: bytes of the batch, which `RankMemory.peak` includes.
        unsplit: matrices that every rank holds whole.
        without_rule: operators that no rule can split.
        remarks: what was checked of the capture, and what the plan wanted and did not get.
        stages: of a pipeline; empty without one. Then `ranks` counts all microbatches in flight, `peak`, `phases` and
            `largest` are those of one microbatch on the stage whose rank holds most, and all else is of one microbatch
            on all stages.
        loads: of experts in the last step of a module that has taken one; empty where no rank holds other experts than
            another, and through a pipeline.
        cuts: how the ranks hold each parameter.
        verdict: whether a step fits, and how long it takes.
        caveats: what its seconds rest on, and what they leave out.
        steps: of each stage, or the one of the whole, for one microbatch; not part of `to_dict`, and nor is `run`.
        run: when the ranks of a pipeline run what.
    """

    name: str
    plan: Mapping[str, Any]
    sizes: Mapping[str, int]
    optimizer: str
    device: str
    passes: tuple[PassLine, ...]
    collectives: tuple[Traffic, ...]
    size: ModelSize
    ranks: tuple[RankMemory, ...]
    modules: tuple[ModuleMemory, ...]
    activations: str
    peak: Moment
    phases: tuple[Moment, ...]
    largest: Moment
    inputs: int
    unsplit: tuple[Whole, ...]
    without_rule: tuple[str, ...]
    remarks: tuple[str, ...]
    stages: tuple[StageLine, ...] = ()
    loads: tuple[ExpertLoad, ...] = ()
    copied_into: int = 0
    cuts: tuple[ParameterCut, ...] = ()
    verdict: Verdict | None = None
    caveats: tuple[str, ...] = ()
    steps: tuple[CountedStep, ...] = field(default=(), repr=False, compare=False)
    run: PipelineRun | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain mappings, lists, numbers and texts."""
        document = asdict(replace(self, steps=(), run=None))
        if self.verdict is not None:
            more = ("fits", "tokens_per_second", "rate", "mfu")
            document["verdict"] |= {name: getattr(self.verdict, name) for name in more}
        left = {key: value for key, value in document.items() if key not in ("steps", "run")}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in left.items()}

    def __rich__(self) -> Group:
        return as_group(all_sections(self))

    def __str__(self) -> str:
        stream = io.StringIO()
        Console(file=stream, markup=False, emoji=False, highlight=False, width=_WIDTH).print(self)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


# ---------------------------------------------------------------------- sections of a report


def all_sections(report: Report) -> list[Section]:
    """Returns the whole report: the verdict, what is split how, and the rest."""
    notes = () if report.passes else ("The program was read from a text, which does not tell how it came about.",)
    return [
        *_verdict(report),
        replace(_summary(report), title="plan") if report.verdict else _summary(report),
        *_stages(report),
        *_split(report),
        *_not_split(report),
        _collectives(report),
        *_memory(report),
        *_loads(report),
        listing("passes", columns(PassLine, "name seconds added erased changed"), report.passes, notes),
    ]


def memory_sections(report: Report) -> list[Section]:
    """Returns the summary, the stages of a pipeline, and memory by rank, by phase and by part of the model."""
    return [_summary(report), *_stages(report), *_memory(report)]


def _verdict(report: Report) -> list[Section]:
    verdict = report.verdict
    if verdict is None:
        return []
    rows = (("memory", fit_text(verdict)), ("step", step_text(verdict)), ("speed", speed_text(verdict)))
    return [Section(report.name, ("verdict", "is"), rows, notes=report.caveats)]


def _split(report: Report) -> list[Section]:
    """Returns how parameters are cut, equal ones of a run of layers once; nothing where no rank has less than all."""
    cuts = [cut for cut in report.cuts if cut.local != cut.type]
    if not cuts:
        return []
    groups: dict[ParameterCut, list[ParameterCut]] = {}
    for cut in cuts:
        groups.setdefault(replace(cut, parameter=_NUMBER.sub("#", cut.parameter)), []).append(cut)
    rows = [replace(group[0], parameter=_numbered([cut.parameter for cut in group])) for group in groups.values()]
    count = len(report.cuts) - len(cuts)
    notes = (f"{count} more parameter{'s are' if count > 1 else ' is'} whole on every rank.",) if count else ()
    return [listing("what is split", columns(ParameterCut, "parameter type layout local"), rows, notes)]


def _numbered(names: Sequence[str]) -> str:
    """Returns names that differ in their first number alone as one."""
    if len(names) == 1:
        return names[0]
    first = _NUMBER.search(names[0])
    last = _NUMBER.search(names[-1])
    assert first is not None
    assert last is not None
    return f"{names[0][: first.start()]}{first[0]}–{last[0]}{names[0][first.end() :]}"


def _summary(report: Report) -> Section:
    """Returns what was asked for, and the size of it."""
    size, ranks = report.size, len(report.ranks)
    splitting = ranks // max(1, len({line.rank for line in report.stages}))
    plan = ", ".join(f"{key}={value}" for key, value in report.plan.items()) or "one rank"
    rows = [
        ("plan", plan),
        ("sizes", ", ".join(f"{name} = {value}" for name, value in report.sizes.items()) or "fixed"),
        ("kernels", f"of {report.device}"),
        ("parameters", f"{size.elements:,} ({amount(size.bytes)}); {size.rank_elements:,} a rank"),
    ]
    if splitting > 1:
        rows.append(("split", f"{size.split_flops:.1%} of the matrix FLOPs over {splitting} ranks"))
    if report.stages:
        rows.append(("pipeline", f"{len(report.stages)} stages on {ranks // splitting} ranks"))
    return Section(report.name, ("what", "is"), tuple(rows), notes=report.remarks)


def _stages(report: Report) -> list[Section]:
    """Returns the stages of a pipeline and what crosses the cuts between them; nothing without one."""
    if not report.stages:
        return []
    shares = [line.share for line in report.stages]
    shown = [
        *columns(StageLine, "stage rank first last share parameters"),
        FigureColumn("with them", lambda line: amount(line.gradients + line.optimizer)),
        FigureColumn("activations", lambda line: f"{line.in_flight} × {amount(line.activations)}"),
    ]
    notes = (
        f"Matrix FLOPs of a stage: {max(shares) * len(shares):.3f} of the mean at most."
        if sum(shares)
        else "No matrix products.",
        "With the parameters come gradients and optimizer state. Activations: microbatches in flight at the peak of "
        "the schedule times what one keeps, what was received included.",
    )
    crossing = [
        FigureColumn("in front of stage", lambda cut: str(cut[0]), right=False),
        FigureColumn("value", lambda cut: f"%{cut[1].value}", right=False),
        FigureColumn("type", lambda cut: cut[1].type, right=False),
        FigureColumn("size", lambda cut: amount(cut[1].bytes)),
        FigureColumn("bytes", lambda cut: f"{cut[1].bytes:,}"),
        FigureColumn("gradient", lambda cut: "comes back" if cut[1].returns else "none", right=False),
    ]
    cuts = [(line.stage, received) for line in report.stages for received in line.received]
    note = "Of one microbatch, on a rank; types are those of the whole."
    return [
        listing("stages", shown, report.stages, notes),
        listing("what crosses the cuts", crossing, cuts, (note,)),
    ]


def _collectives(report: Report) -> Section:
    if not report.collectives:
        return Section("collectives of a step", notes=("None.",))
    total = Traffic.summed("", "all", "", "", report.collectives)
    notes = ["Bytes are those of the whole values: what an all-gather yields, a reduction takes in."]
    if (count := report.plan.get("microbatches", 1)) > 1:
        notes.append(f"Of one of {count} microbatches, which all send what is not of the phase parameter.")
    if total.copied:
        notes.append(f"Copies go into {amount(report.copied_into)} of each rank's memory.")
    if total.one_shot:
        notes.append(
            "Of the copies those in one shot are one kernel each: sums beside which nothing is computed, and tokens of "
            "which it picks those that a rank needs."
        )
    notes += [
        f"Of the bytes of {c.kind} those of tokens for experts are the most that may travel; "
        f"of copies {amount(c.needed)} are expected to, if each choice of experts is as likely as any other."
        for c in report.collectives
        if c.needed
    ]
    reasons: dict[str, list[str]] = {}
    for c in report.collectives:
        for reason in c.reasons:
            reasons.setdefault(reason, []).append(c.kind)
    notes += [f"Not copied: {', '.join(kinds)}: {reason}." for reason, kinds in reasons.items()]
    shown = columns(Traffic, "axis phase op count copied one_shot bytes formula")
    shown.insert(-2, FigureColumn("size", lambda c: amount(c.bytes)))
    return listing("collectives of a step", shown, (*report.collectives, total), notes)


def _memory(report: Report) -> list[Section]:
    """Returns memory by rank, by phase and by part of the model."""
    phases = columns(Moment, "phase bytes operator module")
    note = "The most that is alive at once, beside parameters, buffers, optimizer and batch, and where it is reached."
    return [
        _ranks(report),
        listing("peak by phase", phases, report.phases, (note,) if report.phases else ()),
        *_modules(report),
    ]


def _ranks(report: Report) -> Section:
    """Returns the parts of the memory of each rank, a column for neighbours that hold the same."""
    groups: list[list[RankMemory]] = []
    for rank in report.ranks:
        if groups and replace(groups[-1][0], rank=rank.rank) == rank:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    labels = tuple(f"rank {_span([str(rank.rank) for rank in group])}" for group in groups)
    rows = []
    for part in RANK_PARTS:
        (column,) = columns(RankMemory, part)
        if any(getattr(rank, part) for rank in report.ranks) or column.title == part:
            rows.append((column.title, *(column.show(group[0]) for group in groups)))
    notes = [
        f"State of {report.optimizer}; kernels of {report.device}, eager: a compiled program keeps at most as much. "
        "What kernels use inside and the allocator's rounding come on top."
    ]
    if report.peak.bytes:
        gradients = "The step starts without gradients: where they are accumulated, at most their bytes come on top."
        if report.plan.get("microbatches", 1) > 1:
            gradients = "All gradients are counted from the start of the step, as earlier microbatches leave them."
        notes.append(
            f"Peak: {report.peak}, beside parameters, buffers, optimizer and batch. "
            f"The largest tensor: {report.largest}. {gradients}"
        )
    return Section("memory a rank", ("what", *labels), tuple(rows), labels, tuple(notes))


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}–{names[-1]}, each"


def _modules(report: Report) -> list[Section]:
    """Returns what each part of the model holds, and what it keeps for the backward."""
    modules = _alike_layers(report.modules)
    summed = ("parameters", "gradients", "optimizer", "activations", "tensors")
    sums = {part: sum(getattr(module, part) for module in report.modules) for part in summed}
    total = ModuleMemory(module="all", **sums, formula=report.activations)
    holds = columns(ModuleMemory, "module parameters gradients optimizer activations")
    keeps, keeping = (
        columns(ModuleMemory, "module tensors formula"),
        [module for module in modules if module.activations],
    )
    keeps.insert(-1, FigureColumn("bytes", lambda module: f"{module.activations:,}"))
    note = "A tensor counts where it is first asked for. The closed form holds for sizes of two or more."
    title = "activations kept for the backward"
    return [
        listing("memory by module", holds, (*modules, total)),
        listing(title, keeps, (*keeping, total), (note,)) if keeping else Section(title, notes=("None.",)),
    ]


def _alike_layers(modules: Iterable[ModuleMemory]) -> list[ModuleMemory]:
    """Joins layers in a row that differ in their number alone to one row."""
    groups: list[list[ModuleMemory]] = []
    for module in modules:
        pattern = _NUMBER.sub("#", module.module)
        last = groups[-1][-1] if groups else None
        alike = last is not None and pattern != module.module and _NUMBER.sub("#", last.module) == pattern
        if last is not None and alike and replace(last, module=module.module) == module:
            groups[-1].append(module)
        else:
            groups.append([module])
    return [replace(group[0], module=_layers_text(group)) for group in groups]


def _layers_text(group: Sequence[ModuleMemory]) -> str:
    first = group[0].module or "(the model itself)"
    return first if len(group) == 1 else _span([first, _NUMBER.findall(group[-1].module)[-1]])


def _loads(report: Report) -> list[Section]:
    """Returns rows that experts received in the last step; nothing where none was taken."""
    if not report.loads:
        return []
    shown = [
        *columns(ExpertLoad, "module experts ranks"),
        FigureColumn("experts", lambda load: f"{load.imbalance[0]:.2f}"),
        FigureColumn("ranks", lambda load: f"{load.imbalance[1]:.2f}"),
    ]
    notes = ["Rows that experts received in the last step. The last two columns: the most over the mean."]
    dropped = [f"{load.module} {load.dropped}" for load in report.loads if load.dropped is not None]
    notes += [f"Dropped beyond capacity_factor: {', '.join(dropped)}."] if dropped else []
    even = [f"{load.module} {_imbalance(load.before):.2f} ({load.replicas})" for load in report.loads if load.before]
    notes += [f"Ranks without replicas of experts (and how many there were): {', '.join(even)}."] if even else []
    return [listing("load of experts", shown, report.loads, notes)]


def _not_split(report: Report) -> list[Section]:
    if len(report.ranks) < 2:
        return []
    reasons: dict[str, list[Whole]] = {}
    for whole in report.unsplit:
        reasons.setdefault(whole.reason, []).append(whole)
    rows = [
        (few([whole.parameter for whole in matrices]), amount(sum(whole.bytes for whole in matrices)), reason)
        for reason, matrices in reasons.items()
    ]
    rows += [(name, "", "not known to split: it takes whole operands") for name in report.without_rule]
    notes = () if rows else ("Every matrix is split, and every operator has a rule.",)
    return [Section("not split", ("what", "bytes a rank", "why"), tuple(rows), ("bytes a rank",), notes)]
