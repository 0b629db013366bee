"""A report as tables of texts, for every medium.

Enters: a `Report`. Leaves: sections: titled tables with notes. Runs of equal rows (layers, ranks) become one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxpar.cost.figures import ModuleMemory, Moment, RankMemory, Report
from fxpar.text.printing import amount

_NUMBER = re.compile(r"\d+")
_FEW = 4


@dataclass(frozen=True)
class Section:
    """A table: rows of texts under columns, those in `right` numbers, and sentences below."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def all_sections(report: Report) -> list[Section]:
    """The whole report."""
    return [
        summary(report),
        *stage_sections(report),
        _passes(report),
        _collectives(report),
        *memory_sections(report),
        *_loads(report),
        *_not_split(report),
    ]


def _loads(report: Report) -> list[Section]:
    """Rows that experts received in the last step; nothing where none was taken."""
    if not report.loads:
        return []
    rows = [
        (
            load.module,
            *(" ".join(map(str, counts)) for counts in (load.experts, load.ranks)),
            *(f"{peak:.2f}" for peak in load.imbalance),
        )
        for load in report.loads
    ]
    columns = ("layer", "of each expert", "of each rank", "experts", "ranks")
    notes = ["Rows that experts received in the last step. The last two columns: the most over the mean."]
    dropped = [f"{load.module} {load.dropped}" for load in report.loads if load.dropped is not None]
    notes += [f"Dropped beyond capacity_factor: {', '.join(dropped)}."] if dropped else []
    return [Section("load of experts", columns, tuple(rows), ("experts", "ranks"), tuple(notes))]


def stage_sections(report: Report) -> list[Section]:
    """The stages of a pipeline and what crosses the cuts between them; nothing without one."""
    return [_stages(report), _cuts(report)] if report.stages else []


def _stages(report: Report) -> Section:
    rows = []
    for line in report.stages:
        sizes = (line.parameters, line.gradients + line.optimizer)
        rows.append(
            (
                str(line.stage),
                str(line.rank),
                line.first,
                line.last,
                f"{line.share:.1%}",
                *map(amount, sizes),
                f"{line.in_flight} × {amount(line.activations)}",
            )
        )
    shares = [line.share for line in report.stages]
    numbers = ("FLOPs", "parameters", "with them", "activations")
    notes = (
        f"Matrix FLOPs of a stage: {max(shares) * len(shares):.3f} of the mean at most."
        if sum(shares)
        else "No matrix products.",
        "With the parameters come gradients and optimizer state. Activations: microbatches in flight at the peak of "
        "1F1B (interleaved where ranks have several stages) times what one keeps, what was received included.",
    )
    return Section("stages", ("stage", "rank", "from", "to", *numbers), tuple(rows), numbers, notes)


def _cuts(report: Report) -> Section:
    rows = [
        (
            str(line.stage),
            f"%{crossing.value}",
            crossing.type,
            amount(crossing.bytes),
            f"{crossing.bytes:,}",
            "comes back" if crossing.returns else "none",
        )
        for line in report.stages
        for crossing in line.received
    ]
    columns = ("in front of stage", "value", "type", "size", "bytes", "gradient")
    note = "Of one microbatch, on a rank; types are those of the whole."
    return Section("what crosses the cuts", columns, tuple(rows), ("size", "bytes"), (note,))


def memory_sections(report: Report) -> list[Section]:
    """Memory by rank and by part of the model."""
    return [_ranks(report), _phases(report), _modules(report), _activations(report)]


def summary(report: Report) -> Section:
    """What was asked for, and the size of it."""
    size, ranks = report.size, len(report.ranks)
    splitting = ranks // max(1, len({line.rank for line in report.stages}))
    plan = ", ".join(f"{key}={value}" for key, value in report.plan.items()) or "one rank"
    rows = [
        ("plan", plan),
        ("sizes", ", ".join(f"{name} = {value}" for name, value in report.sizes.items()) or "fixed"),
        ("parameters", f"{size.elements:,} ({amount(size.bytes)}); {size.rank_elements:,} a rank"),
    ]
    if splitting > 1:
        rows.append(("split", f"{size.split_flops:.1%} of the matrix FLOPs over {splitting} ranks"))
    if report.stages:
        rows.append(("pipeline", f"{len(report.stages)} stages on {ranks // splitting} ranks"))
    return Section(report.name, ("what", "is"), tuple(rows), notes=report.remarks)


def _passes(report: Report) -> Section:
    columns = ("time", "added", "erased", "changed")
    rows = [
        (line.name, f"{1000 * line.seconds:.0f} ms", str(line.added), str(line.erased), str(line.changed))
        for line in report.passes
    ]
    notes = () if rows else ("The program was read from a text, which does not tell how it came about.",)
    return Section("passes", ("pass", *columns), tuple(rows), columns, notes)


def _collectives(report: Report) -> Section:
    rows = [
        (c.axis, c.phase, c.op, *map(str, (c.count, c.copied, c.one_shot)), amount(c.bytes), f"{c.bytes:,}", c.formula)
        for c in report.collectives
    ]
    if not rows:
        return Section("collectives of a step", notes=("None.",))
    count, total = sum(c.count for c in report.collectives), sum(c.bytes for c in report.collectives)
    copied, shots = (sum(counts) for counts in zip(*((c.copied, c.one_shot) for c in report.collectives), strict=True))
    rows.append(("all", "", "", str(count), str(copied), str(shots), amount(total), f"{total:,}", ""))
    columns = ("axis", "phase", "op", "count", "copies", "one-shot", "size", "bytes", "closed form")
    notes = ["Bytes are those of the whole values: what an all-gather yields, a reduction takes in."]
    if copied:
        notes.append(f"Copies go into {amount(report.copied_into)} of each rank's memory.")
    if shots:
        notes.append(
            "Of the copies those in one shot are one kernel each: sums beside which nothing is computed, and tokens of "
            "which it picks those that a rank needs."
        )
    notes += [
        f"Of the bytes of {c.axis} {c.phase} {c.op} those of tokens for experts are the most that may travel; "
        f"of copies {amount(c.needed)} are expected to, if each choice of experts is as likely as any other."
        for c in report.collectives
        if c.needed
    ]
    reasons: dict[str, list[str]] = {}
    for c in report.collectives:
        for reason in c.reasons:
            reasons.setdefault(reason, []).append(f"{c.axis} {c.phase} {c.op}")
    notes += [f"Not copied: {', '.join(kinds)}: {reason}." for reason, kinds in reasons.items()]
    return Section("collectives of a step", columns, tuple(rows), columns[3:8], tuple(notes))


def _ranks(report: Report) -> Section:
    groups = _alike(report.ranks)
    labels = tuple(f"rank {label}" for label, _ in groups)
    rows = []
    for part, title in _PARTS.items():
        sizes = [getattr(rank, part) for _, rank in groups]
        if any(sizes) or title == part:
            rows.append((title, *[amount(size) for size in sizes]))
    notes = [
        f"State of {report.optimizer}; kernels of {report.device}, eager: a compiled program keeps at most as much. "
        "What kernels use inside and the allocator's rounding come on top."
    ]
    peak, largest = report.peak, report.largest
    if peak.bytes:
        notes.append(
            f"Peak: {amount(peak.bytes)} {_where(peak)}, beside parameters, buffers, optimizer and batch. "
            f"The largest tensor: {amount(largest.bytes)} {_where(largest)}. The step starts without gradients: where "
            "they are accumulated, at most their bytes come on top."
        )
    return Section("memory a rank", ("what", *labels), tuple(rows), labels, tuple(notes))


def _phases(report: Report) -> Section:
    rows = [
        (moment.phase, amount(moment.bytes), moment.operator.removesuffix(".default"), moment.module)
        for moment in report.phases
    ]
    note = "The most that is alive at once, beside parameters, buffers, optimizer and batch, and where it is reached."
    return Section("peak by phase", ("phase", "bytes", "at", "of"), tuple(rows), ("bytes",), (note,) if rows else ())


_PARTS = {
    "parameters": "parameters",
    "whole": "  whole on every rank",
    "shared": "  blocks that neighbours hold too",
    "padding": "  padding",
    "copies": "copies in half precision",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "peak": "peak",
}


def _where(moment: Moment) -> str:
    operator = moment.operator.removesuffix(".default")
    place = f" of {moment.module}" if moment.module else ""
    return f"at {operator} in the {moment.phase}{place}"


def _alike(ranks: Sequence[RankMemory]) -> list[tuple[str, RankMemory]]:
    """Neighbours that hold the same as one row."""
    groups: list[list[RankMemory]] = []
    for rank in ranks:
        if groups and replace(groups[-1][0], rank=rank.rank) == rank:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return [(_span([str(rank.rank) for rank in group]), group[0]) for group in groups]


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}–{names[-1]}, each"


def _modules(report: Report) -> Section:
    numbers = ("parameters", "gradients", "optimizer", "activations")
    rows = [(label, *[amount(getattr(module, part)) for part in numbers]) for label, module in _layers(report.modules)]
    sums = [amount(sum(getattr(module, part) for module in report.modules)) for part in numbers]
    return Section("memory by module", ("module", *numbers), (*rows, ("all", *sums)), numbers)


def _activations(report: Report) -> Section:
    rows = [
        (label, str(module.tensors), f"{module.activations:,}", module.formula or "none")
        for label, module in _layers(report.modules)
        if module.activations
    ]
    if not rows:
        return Section("activations kept for the backward", notes=("None.",))
    tensors, total = (sum(getattr(module, part) for module in report.modules) for part in ("tensors", "activations"))
    rows.append(("all", str(tensors), f"{total:,}", report.activations or "none"))
    numbers = ("tensors", "bytes")
    note = "A tensor counts where it is first asked for. The closed form holds for sizes of two or more."
    return Section(
        "activations kept for the backward", ("module", *numbers, "closed form"), tuple(rows), numbers, (note,)
    )


def _layers(modules: Iterable[ModuleMemory]) -> list[tuple[str, ModuleMemory]]:
    """Layers in a row that differ in their number alone as one row."""
    groups: list[list[ModuleMemory]] = []
    for module in modules:
        pattern = _NUMBER.sub("#", module.module)
        last = groups[-1][-1] if groups else None
        alike = last is not None and pattern != module.module and _NUMBER.sub("#", last.module) == pattern
        if last is not None and alike and replace(last, module=module.module) == module:
            groups[-1].append(module)
        else:
            groups.append([module])
    return [(_modules_text(group), group[0]) for group in groups]


def _modules_text(group: Sequence[ModuleMemory]) -> str:
    first = group[0].module or "(the model itself)"
    if len(group) == 1:
        return first
    numbers = _NUMBER.findall(group[-1].module)
    return f"{first}–{numbers[-1]}, each"


def _not_split(report: Report) -> list[Section]:
    if len(report.ranks) < 2:
        return []
    reasons: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for whole in report.unsplit:
        reasons.setdefault(whole.reason, []).append(whole.parameter)
        sizes[whole.reason] = sizes.get(whole.reason, 0) + whole.bytes
    rows = [(_few(names), amount(sizes[reason]), reason) for reason, names in reasons.items()]
    rows += [(name, "", "not known to split: it takes whole operands") for name in report.without_rule]
    notes = () if rows else ("Every matrix is split, and every operator has a rule.",)
    return [
        Section("not split", ("what", "bytes a rank", "why") if rows else (), tuple(rows), ("bytes a rank",), notes)
    ]


def _few(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + rest
