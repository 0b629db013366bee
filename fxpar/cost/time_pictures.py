"""A step over time as pictures: what the ranks of a pipeline run, and how much memory a rank needs.

Enters: a report. Leaves: pictures in SVG whose colours are those of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fxpar.cost.figures import Report
from fxpar.cost.html import Picture, scrolling
from fxpar.cost.verdict import CountedStep, PipelineAction, PipelineRun
from fxpar.ir.step import BACKWARD, ONCE, RECOMPUTE, WEIGHT
from fxpar.text.tables import amount, time_text

_WIDE, _LEFT, _HEIGHT, _AREA = 1160, 64, 26, 150
_RANKS, _BOXES = 32, 4000
WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def pictures_over_time(report: Report) -> Iterator[Picture]:
    """Yields what the ranks of a pipeline run, and the memory of a rank; nothing of a report without steps."""
    if report.run is not None:
        title, phases = "pipeline over time", {action.phase for actions in report.run.ranks for action in actions}
        marks = "".join(f"<li>{letter}: {word}</li>" for letter, word in WORDS.items() if letter in phases)
        caption = "What the ranks of the pipeline run, with the numbers of the microbatches. Gaps are idle time."
        body = f'<ul class="legend">{marks}</ul>{scrolling(title, pipeline_svg(report.run))}'
        yield Picture(title, caption, body)
    if report.steps and (report.run is not None or len(report.steps) == 1):
        title, fixed = "memory over time", "parameters, gradients and" if report.run else "parameters, the batch and"
        caption = f"The dark part is there at all times: {fixed} optimizer state. What stands on it comes and goes."
        caption += " The peak of the tables is a bound: it has all of a step at once." if report.run else ""
        yield Picture(title, caption, scrolling(title, memory_svg(report)))


def _picture(height: int, said: str, body: Sequence[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' role='img' class='picture' viewBox='0 0 {_WIDE} {height}'"
    return "\n".join([f"{head} width='{_WIDE}' height='{height}'>", f"<title>{escape(said)}</title>", *body, "</svg>"])


def pipeline_svg(run: PipelineRun) -> str:
    """Returns a row for each rank: boxes with the number of the microbatch, filled by phase.

    Pipelines of more ranks or actions than there is room for are cut, and the picture says so.
    """
    shown = run.ranks[:_RANKS]
    many = max(_BOXES // len(shown), 1)
    end = max(actions[:many][-1].end for actions in shown)
    scale = (_WIDE - _LEFT) / end
    body = []
    for rank, actions in enumerate(shown):
        y = rank * _HEIGHT + 4
        body.append(f"<text x='0' y='{y + 16}' class='dim'>rank {rank}</text>")
        body.append(f"<rect x='{_LEFT}' y='{y}' width='{_WIDE - _LEFT}' height='{_HEIGHT - 4}' class='lane'/>")
        for action in actions[:many]:
            body += _box(action, y, scale)
    bottom = len(shown) * _HEIGHT + 10
    marks = [f"0 to {time_text(end)}"]
    marks += [f"the first {len(shown)} of {len(run.ranks)} ranks"] if len(shown) < len(run.ranks) else []
    marks += [f"of {time_text(run.seconds)}"] if end < run.seconds else []
    body.append(f"<text x='{_LEFT}' y='{bottom + 12}' class='dim'>{escape(', '.join(marks))}</text>")
    return _picture(bottom + 20, "What each rank of the pipeline runs, over time", body)


def _box(action: PipelineAction, y: int, scale: float) -> Iterator[str]:
    x, wide = _LEFT + action.start * scale, max((action.end - action.start) * scale - 1, 0.5)
    span = f"{time_text(action.start)} to {time_text(action.end)}"
    said = f"{WORDS[action.phase]} of microbatch {action.microbatch}, stage {action.stage}: {span}"
    box = f"x='{x:.1f}' y='{y}' width='{wide:.1f}' height='{_HEIGHT - 4}' rx='2'"
    yield f"<g><title>{said}</title><rect {box} class='phase-{action.phase.lower()}'/>"
    text = f"{action.phase}{action.microbatch}"
    if wide >= 7 * len(text) + 4:
        yield f"<text x='{x + wide / 2:.1f}' y='{y + 15}' text-anchor='middle' class='letter'>{text}</text>"
    yield "</g>"


def memory_svg(report: Report) -> str:
    """Returns the memory of the fullest rank over its step, or of each rank of a pipeline over time."""
    if report.run is not None:
        return _of_pipeline(report, report.run)
    peak = max(rank.peak for rank in report.ranks)
    (step,) = report.steps[:1]
    levels = [size for _, size in step.live]
    fixed = peak - max(levels, default=0)
    body = [*_area([(fixed + size) for size in levels], fixed, peak), *_phases(step)]
    said = f"Memory of a rank while a step runs: {amount(fixed)} at all times, {amount(peak)} at the peak"
    return _picture(_AREA + 62, said, body)


def _area(levels: Sequence[int], fixed: int, peak: int) -> Iterator[str]:
    """Yields what is always there, what comes and goes above it, and the peak."""
    bars, wide, top = _thinned(levels, _WIDE - _LEFT), _WIDE - _LEFT, 22
    scale = _AREA / max(peak, 1)
    points = [f"{_LEFT + wide * i / len(bars):.1f},{top + _AREA - bar * scale:.1f}" for i, bar in enumerate(bars)]
    corners = f"{_LEFT},{top + _AREA} {' '.join(points)} {_WIDE},{top + _AREA}"
    yield f"<polygon points='{corners}' class='live'/>"
    low = fixed * scale
    yield f"<rect x='{_LEFT}' y='{top + _AREA - low:.1f}' width='{wide}' height='{low:.1f}' class='fixed'/>"
    yield f"<path d='M{_LEFT} {top}H{_WIDE}' class='limit'/>"
    at = _LEFT + wide * max(range(len(bars)), key=bars.__getitem__, default=0) / max(len(bars), 1)
    end = "end" if at > _WIDE / 2 else "start"
    yield f"<text x='{at:.1f}' y='{top - 6}' text-anchor='{end}' class='strong'>peak {amount(peak)}</text>"
    yield f"<text x='0' y='{top + 4}' class='small'>{amount(peak)}</text>"
    yield f"<text x='0' y='{top + _AREA - low + 4:.1f}' class='small'>{amount(fixed)}</text>"


def _thinned(levels: Sequence[int], most: int) -> list[int]:
    """Returns the highest of neighbours, so that there are no more than `most`."""
    size = -(-len(levels) // most) or 1
    return [max(levels[i : i + size]) for i in range(0, len(levels), size)]


def _phases(step: CountedStep) -> Iterator[str]:
    """Yields where each phase of a step begins, below the picture."""
    phases = [phase for phase, _ in step.live]
    y, wide = _AREA + 22, _WIDE - _LEFT
    # Where layers are computed again both phases take turns.
    for phase in dict.fromkeys(phases):
        x = _LEFT + wide * phases.index(phase) / len(phases)
        yield f"<path d='M{x:.1f} 22V{y + 6}' class='limit'/>"
        near, anchor = (x - 3, "end") if x > _WIDE - 100 else (x + 3, "start")
        yield f"<text x='{near:.1f}' y='{y + 14}' text-anchor='{anchor}' class='dim'>{escape(phase)} →</text>"
    yield f"<text x='{_WIDE}' y='{y + 30}' text-anchor='end' class='dim'>operations in order</text>"


def _of_pipeline(report: Report, run: PipelineRun) -> str:
    """Returns a row for each rank; each is as high as the peak of the fullest."""
    highest = max(rank.peak for rank in report.ranks)
    across = len(report.ranks) // len(run.ranks)
    body, tall, end = [], 56, run.seconds
    scale, up = (_WIDE - _LEFT) / end, (tall - 16) / highest
    for place in range(min(len(run.ranks), _RANKS)):
        y = place * tall + tall
        body.append(f"<text x='0' y='{y - 14}' class='dim'>rank {place * across}</text>")
        body.append(
            f"<rect x='{_LEFT}' y='{y - tall + 14}' width='{_WIDE - _LEFT}' height='{tall - 14}' class='lane'/>"
        )
        levels = memory_over_time(report, run, place)
        for start, stop, size in levels:
            box = f"x='{_LEFT + start * scale:.1f}' width='{max((stop - start) * scale, 0.5):.1f}'"
            body.append(f"<rect {box} y='{y - size * up:.1f}' height='{size * up:.1f}' class='live'/>")
        top = max(size for *_, size in levels)
        fixed = report.ranks[place * across]
        state = fixed.parameters + fixed.gradients + fixed.optimizer
        bar = f"y='{y - state * up:.1f}' width='{_WIDE - _LEFT}' height='{state * up:.1f}'"
        body.append(f"<rect x='{_LEFT}' {bar} class='fixed'/>")
        body.append(f"<text x='{_LEFT + 4}' y='{y - tall + 12}' class='small'>{amount(top)} at the most</text>")
    height = min(len(run.ranks), _RANKS) * tall + 24
    body.append(f"<text x='{_LEFT}' y='{height - 8}' class='dim'>0 to {time_text(end)}</text>")
    return _picture(height, "Memory of each rank of the pipeline over time", body)


def memory_over_time(report: Report, run: PipelineRun, place: int) -> list[tuple[float, float, int]]:
    """Returns from when to when a rank of a pipeline needs how many bytes at the most.

    Args:
        place: of the rank in the pipeline.
    """
    rank = report.ranks[place * (len(report.ranks) // len(run.ranks))]
    fixed = rank.parameters + rank.copies + rank.gathered + rank.buffers + rank.gradients + rank.optimizer
    fixed += report.inputs
    lines = {line.stage: line for line in report.stages}
    highest = {stage: _highest(report.steps[stage]) for stage in lines}
    saved, levels, now = 0, [], 0.0
    for action in run.ranks[place]:
        line, (forward, backward) = lines[action.stage], highest[action.stage]
        if action.start > now:
            levels.append((now, action.start, fixed + saved))
        if action.phase == "F":
            levels.append((action.start, action.end, fixed + saved + max(forward, line.activations)))
            saved += line.activations
        else:
            # What a backward makes are the gradients too, which are there from the start.
            more = max(backward - line.gradients, line.activations) if action.phase != "W" else line.activations
            levels.append((action.start, action.end, fixed + saved - line.activations + more))
            saved -= line.activations if action.phase in "BW" else 0
        now = action.end
    return levels


def _highest(step: CountedStep) -> tuple[int, int]:
    """Returns the most bytes that are alive in the forward of a microbatch, and in its backward."""
    ahead, back = (
        max((size for phase, size in step.live if phase in of_part), default=0)
        for of_part in (("forward", ONCE), (BACKWARD, WEIGHT, RECOMPUTE))
    )
    return ahead, back
