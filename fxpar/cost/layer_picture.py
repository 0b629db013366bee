"""One layer of a step as a picture: its operations in order, what a rank holds of their results, and its collectives.

Enters: a counted step. Leaves: the rows of a layer, a picture of them in SVG whose colours are those of the page, and
the same in words. What a rank holds is said by a colour, a pattern and a letter; what hides a collective by a bar and
by names.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torch import fx

from fxpar.cost.communication import layer_of
from fxpar.cost.figures import Report
from fxpar.cost.html import Picture, scrolling, table_of
from fxpar.cost.seconds import Travel
from fxpar.cost.sections import FigureColumn, Section, listing
from fxpar.cost.verdict import CountedStep
from fxpar.ir.operators import axes_of
from fxpar.ir.program import ScalarType, note, operands, output_layouts, output_types
from fxpar.layout.layout import Placement
from fxpar.ops.collectives import COERCION_OF
from fxpar.text.printing import layout_text, target_name
from fxpar.text.tables import amount, few, time_text

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class LayerRow:
    """A line of the picture: a product, a node that communicates, or neighbours of one module that are neither.

    Attributes:
        kind: product, collective or other.
        phase: forward or backward.
        nodes: their names, in order.
        operators: theirs, as people call them.
        module: in the layer, empty for the layer itself.
        type: of what the last one gives.
        layout: the same, as the text has it.
        before: the placements of what a node that communicates takes, by axis; empty for others.
        placements: those of what the last one gives.
        start: when it starts, in seconds from the start of the step; None where no time passes.
        seconds: that it takes.
        travels: its collectives.
    """

    kind: str
    phase: str
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    module: str
    type: str
    layout: str
    before: Mapping[str, Placement]
    placements: Mapping[str, Placement]
    start: float | None
    seconds: float
    travels: tuple[Travel, ...]

    @property
    def bytes(self) -> int:
        """Returns the bytes of its collectives."""
        return sum(travel.collective.bytes for travel in self.travels)

    @property
    def exposed(self) -> float:
        """Returns the seconds for which a rank waits for them."""
        return sum(travel.exposed for travel in self.travels)

    @property
    def beside(self) -> tuple[str, ...]:
        """Returns the products that run while they travel."""
        return tuple(dict.fromkeys(name for travel in self.travels for name, _ in travel.beside))

    @property
    def text(self) -> str:
        """Returns what it computes."""
        name = self.module.rpartition(".")[2]
        runs = [(called, len(list(same))) for called, same in itertools.groupby(self.operators)]
        text = " ".join(called if count == 1 else f"{called}×{count}" for called, count in runs)
        return f"{text} {name}" if self.kind == "product" and name else text


def layer_in_the_middle(steps: Sequence[CountedStep]) -> tuple[CountedStep, str] | None:
    """Returns a layer and the step that has all of it; None where no module has a number."""
    counts: dict[str, dict[int, int]] = {}
    for index, step in enumerate(steps):
        for node in _computed(step):
            layer = layer_of(note(node).fqn)
            if layer:
                of_layer = counts.setdefault(layer, {})
                of_layer[index] = of_layer.get(index, 0) + 1
    whole = [layer for layer, of_steps in counts.items() if len(of_steps) == 1] or list(counts)
    if not whole:
        return None
    layer = whole[len(whole) // 2]
    return steps[max(counts[layer], key=lambda index: counts[layer][index])], layer


def _computed(step: CountedStep) -> Iterator[fx.Node]:
    for node in step.program.graph.nodes:
        if node.op == "call_function" and not isinstance(note(node).type, ScalarType):
            yield node


def layer_rows(step: CountedStep, layer: str) -> list[LayerRow]:
    """Returns the rows of a layer, in the order of the step."""
    travels: dict[str, list[Travel]] = {}
    for travel in step.times.travels:
        travels.setdefault(travel.collective.node, []).append(travel)
    nodes = [node for node in _computed(step) if layer_of(note(node).fqn) == layer]
    inside = set(nodes)

    def key(node: fx.Node) -> tuple[str, str, str]:
        noted, source = note(node), node.args[0] if node.args else None
        apart = node.name if node.name in travels or node.name in step.times.products else ""
        # What many parameters are made at once for all layers is taken apart in each.
        taken = node.target is operator.getitem and isinstance(source, fx.Node) and source not in inside
        return noted.phase, "" if taken else noted.fqn, apart

    runs = [(fqn, list(run)) for (_, fqn, _), run in itertools.groupby(nodes, key)]
    modules = [fqn.removeprefix(layer).strip(".") for fqn, _ in runs]
    pairs = zip(modules, (run for _, run in runs), strict=True)
    return [_row(step, module, run, travels.get(run[0].name, [])) for module, run in pairs]


def _row(step: CountedStep, module: str, run: Sequence[fx.Node], travels: Sequence[Travel]) -> LayerRow:
    last, axes = run[-1], step.program.axes
    kinds, layouts = output_types(last), output_layouts(last)
    is_product = last.name in step.times.products
    start, seconds = step.times.products.get(last.name, (None, 0.0))
    before: Mapping[str, Placement] = {}
    if travels:
        start, seconds = travels[0].start, sum(travel.seconds for travel in travels)
        sources = output_layouts(operands(last)[0])[:1] if last.target in COERCION_OF else ()
        taken: dict[str, Placement] = dict(sources[0]) if sources else {}
        before = {axis: placement for axis, placement in taken.items() if axis in axes_of(last)}
    return LayerRow(
        kind="collective" if travels else "product" if is_product else "other",
        phase=BACKWARD if note(last).phase else FORWARD,
        nodes=tuple(node.name for node in run),
        operators=tuple(_short(node) for node in run),
        module=module,
        type=str(kinds[0]) if kinds else "",
        layout=layout_text(layouts[0], kinds[0].shape, axes) if layouts and kinds else "",
        before=before,
        placements=dict(layouts[0]) if layouts else {},
        start=start,
        seconds=seconds,
        travels=tuple(travels),
    )


def _short(node: fx.Node) -> str:
    """Returns an operator's name without its library and its overload: `mm`, `all_gather`, `scaled_dot_product…`."""
    name = target_name(node).partition("[")[0]
    return name.removeprefix("operator.").split(".")[1 if name.startswith(("aten.", "fxpar.", "prims.")) else 0]


def in_words(rows: Sequence[LayerRow], layer: str) -> Section:
    """Returns the same as a table."""
    shown = [
        FigureColumn("phase", lambda row: row.phase, right=False),
        FigureColumn("operations", lambda row: row.text, right=False),
        FigureColumn("nodes", lambda row: " ".join(f"%{name}" for name in row.nodes), right=False),
        FigureColumn("type", lambda row: row.type, right=False),
        FigureColumn("layout", lambda row: row.layout, right=False),
        FigureColumn("bytes", lambda row: f"{row.bytes:,}" if row.travels else ""),
        FigureColumn("time", lambda row: time_text(row.seconds) if row.start is not None else ""),
        FigureColumn("beside it", lambda row: _beside(row) if row.travels else "", right=False),
    ]
    return listing(f"{layer} in words", shown, rows)


def _beside(row: LayerRow) -> str:
    """Returns what hides a collective, and for how long a rank waits for it."""
    waits = f"waits {time_text(row.exposed)}" if row.exposed > 1e-9 else "hidden"
    return f"{waits}; beside {few(row.beside, 3)}" if row.beside else f"{waits}; nothing beside it"


# ---------------------------------------------------------------------- SVG

_WIDE, _GAP, _LINE, _LANE = 575, 10, 25, 20
_CHIP, _CHIPS = 46, 2  # width of what says a placement, and how many there is room for
_TYPE, _FIRST_CHIP, _END = 288, 424, 570
_LETTERS = 40  # of what stands in front of the type
# Colours and patterns are those of the page's style sheet; letters say the same.
PATTERNS = (
    "<defs><pattern id='hatch' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
    "<rect width='2' height='6' class='mark'/></pattern>"
    "<pattern id='dots' width='6' height='6' patternUnits='userSpaceOnUse'>"
    "<circle cx='3' cy='3' r='1.2' class='mark'/></pattern></defs>"
)
MEANINGS = {
    "S": "a shard: each rank holds a block of that dimension",
    "R": "replicated: all ranks hold the same, gradients are summands",
    "I": "invariant: all ranks hold the same, gradients too",
    "P": "partial: each rank holds a summand",
    "V": "varying: differs by rank",
}


def layer_svg(rows: Sequence[LayerRow], layer: str, axes: Mapping[str, int]) -> str:
    """Returns the picture: forward and backward next to each other, each with its lanes of time and its rows."""
    parts, height = [], 0
    for column, phase in enumerate((FORWARD, BACKWARD)):
        of_phase = [row for row in rows if row.phase == phase]
        lines, bottom = _column(of_phase, phase, axes)
        parts += [f"<g transform='translate({column * (_WIDE + _GAP)} 0)'>", *lines, "</g>"]
        height = max(height, bottom)
    wide = 2 * _WIDE + _GAP
    said = f"{layer}: operations of a training step in order, with what a rank holds of each result"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' role='img' class='picture' viewBox='0 0 {wide} {height}' "
            f"width='{wide}' height='{height}'>",
            f"<title>{escape(said)}</title>",
            PATTERNS,
            *parts,
            "</svg>",
        ]
    )


def _column(rows: Sequence[LayerRow], phase: str, axes: Mapping[str, int]) -> tuple[list[str], int]:
    """Returns one phase, and where it ends."""
    lines = [f"<text x='0' y='14' class='head'>{phase}</text>"]
    strip, y = _lanes(rows)
    lines += strip
    for module, of_module in itertools.groupby(rows, key=lambda row: row.module.partition(".")[0]):
        lines.append(f"<text x='0' y='{y + 15}' class='dim'>{escape(module or 'the layer itself')}</text>")
        y += 21
        for row in of_module:
            tall = _LINE + 15 if row.travels else _LINE
            lines += ["<g class='row'>", *_drawn(row, y, tall - 3, axes), "</g>"]
            y += tall
    return lines, y + 4


def _lanes(rows: Sequence[LayerRow]) -> tuple[list[str], int]:
    """Returns when products and collectives run, a lane for each axis, and where the lanes end."""
    timed = [row for row in rows if row.start is not None]
    if not timed:
        return [], 26
    begin = min(row.start or 0.0 for row in timed)
    end = max((row.start or 0.0) + row.seconds for row in timed)
    scale = (_END - 90) / ((end - begin) or 1.0)
    lanes = {"products": [row for row in timed if row.kind == "product"]}
    for row in timed:
        if row.travels:
            lanes.setdefault(row.travels[0].collective.axis, []).append(row)
    lines, y = [], 24
    for name, of_lane in lanes.items():
        lines.append(f"<text x='0' y='{y + 13}' class='dim'>{escape(name)}</text>")
        lines.append(f"<rect x='86' y='{y + 1}' width='{_END - 86}' height='{_LANE - 4}' class='lane'/>")
        for row in of_lane:
            x, wide = 86 + ((row.start or 0.0) - begin) * scale, max(row.seconds * scale, 1.5)
            box = f"x='{x:.1f}' y='{y + 2}' width='{wide:.1f}' height='{_LANE - 6}'"
            said = f"{row.nodes[-1]}: {time_text(row.seconds)}"
            lines.append(f"<rect {box} class='{row.kind}'><title>{escape(said)}</title></rect>")
        y += _LANE
    lines.append(f"<text x='{_END}' y='{y + 11}' class='dim' text-anchor='end'>{time_text(end - begin)}</text>")
    lines.append(f"<text x='86' y='{y + 11}' class='dim'>time of this layer, by the plan's cost</text>")
    return lines, y + 20


def _drawn(row: LayerRow, y: int, tall: int, axes: Mapping[str, int]) -> Iterator[str]:
    """Yields one row: its box, what it computes, the type and the placements of its result, and its time."""
    said = f"{', '.join('%' + name for name in row.nodes)}: {row.type} {row.layout}"
    yield f"<title>{escape(said)}</title>"
    yield f"<rect x='0' y='{y}' width='{_WIDE}' height='{tall}' rx='4' class='{row.kind} box'/>"
    style = {"product": "strong", "collective": "strong", "other": "plain"}[row.kind]
    name = "" if row.kind == "other" else f"  %{row.nodes[-1]}"
    text = _cut(row.text, max(_LETTERS - len(name), 24))
    name = f"<tspan class='node'>{escape(_cut(name, _LETTERS - len(text)))}</tspan>"
    yield f"<text x='8' y='{y + 15}' class='{style}' xml:space='preserve'>{escape(text)}{name}</text>"
    yield f"<text x='{_TYPE}' y='{y + 15}' class='small'>{escape(_cut(row.type, 21))}</text>"
    chips = list(_chips(row))
    for place, (axis, text, kind) in enumerate(chips[:_CHIPS]):
        yield from _chip(_FIRST_CHIP + place * (_CHIP + 3), y + 3, f"{axis} {text}", kind, axes.get(axis, 1))
    if len(chips) > _CHIPS:
        yield f"<text x='{_FIRST_CHIP + _CHIPS * (_CHIP + 3)}' y='{y + 15}' class='small'>+{len(chips) - _CHIPS}</text>"
    if row.start is not None:
        yield f"<text x='{_END}' y='{y + 15}' text-anchor='end' class='small'>{time_text(row.seconds)}</text>"
    if row.travels:
        text = f"{amount(row.bytes)}; {_beside(row)}"
        yield f"<text x='8' y='{y + 30}' class='small'>{escape(_cut(text, 66))}</text>"
        yield from _hiding(row, y + 22)


def _hiding(row: LayerRow, y: int) -> Iterator[str]:
    """Yields a bar: full as long as products hide the collective, hatched as long as a rank waits."""
    wide = _END - _FIRST_CHIP
    hidden = wide * max(0.0, 1 - row.exposed / row.seconds) if row.seconds else 0.0
    yield f"<rect x='{_FIRST_CHIP}' y='{y}' width='{hidden:.1f}' height='9' class='hidden'/>"
    rest = f"x='{_FIRST_CHIP + hidden:.1f}' y='{y}' width='{wide - hidden:.1f}' height='9'"
    yield f"<rect {rest} class='waits'/><rect {rest} fill='url(#hatch)'/>"


def _chips(row: LayerRow) -> Iterator[tuple[str, str, str]]:
    """Yields axis, text and kind of each placement; of a coercion what it was before too."""
    for axis, placement in row.placements.items():
        text = _letter(placement)
        if axis in row.before:
            text = f"{_letter(row.before[axis])}→{text}"
        yield axis, text, placement.kind


def _letter(placement: Placement) -> str:
    return f"S{placement.dim}" if placement.is_shard else placement.kind


def _chip(x: int, y: int, text: str, kind: str, ranks: int) -> Iterator[str]:
    """Yields a placement; of a shard the part that the first rank holds is darker."""
    box = f"x='{x}' y='{y}' width='{_CHIP}' height='16' rx='3'"
    yield f"<rect {box} class='chip {kind.lower()}'/>"
    if kind == "S":
        part = max(_CHIP / max(ranks, 1), 3.0)
        yield f"<rect x='{x}' y='{y}' width='{part:.1f}' height='16' rx='3' class='part'/>"
    elif kind in "PV":
        yield f"<rect {box} fill='url(#{'hatch' if kind == 'P' else 'dots'})'/>"
    size = " textLength='42' lengthAdjust='spacingAndGlyphs'" if len(text) > 7 else ""
    yield f"<text x='{x + _CHIP // 2}' y='{y + 12}' text-anchor='middle' class='letter'{size}>{escape(text)}</text>"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# ---------------------------------------------------------------------- the picture on its page


def picture_of_layer(report: Report) -> list[Picture]:
    """Returns a layer of the middle, drawn and in words; nothing of a report without steps or numbered modules."""
    chosen = layer_in_the_middle(report.steps)
    if chosen is None:
        return []
    step, layer = chosen
    rows = layer_rows(step, layer)
    caption = (
        f"{layer}, of a step of one microbatch. Operations stand in order, with the type of the whole result and what "
        "a rank holds of it on each axis. Neighbours that are neither products nor collectives share a line."
    )
    drawn = scrolling(f"picture of {layer}", layer_svg(rows, layer, step.program.axes))
    words = [
        f"<details><summary>{escape(layer)} in words</summary>",
        *table_of(in_words(rows, layer), "h3"),
        "</details>",
    ]
    return [Picture("one layer", caption, "\n".join([*_layer_legend(), drawn, *words]))]


def _layer_legend() -> Iterator[str]:
    """Yields what colours, patterns and letters mean."""
    yield '<ul class="legend">'
    for kind, words in MEANINGS.items():
        over = {"P": "url(#hatch)", "V": "url(#dots)"}.get(kind)
        drawn = f"<rect width='22' height='16' rx='3' class='chip {kind.lower()}'/>"
        drawn += "<rect width='7' height='16' rx='3' class='part'/>" if kind == "S" else ""
        drawn += f"<rect width='22' height='16' rx='3' fill='{over}'/>" if over else ""
        text = f"<text x='11' y='12' text-anchor='middle' class='letter'>{kind}</text>"
        yield f"<li><svg width='22' height='16' aria-hidden='true'>{drawn}{text}</svg>{words}</li>"
    parts = "<rect width='22' height='10' class='hidden'/>"
    for look in ("class='waits'", "fill='url(#hatch)'"):
        parts += f"<rect x='22' width='22' height='10' {look}/>"
    yield f"<li><svg width='44' height='10' aria-hidden='true' class='picture'>{parts}</svg>"
    yield "of a collective: hidden by products, and waited for</li></ul>"
