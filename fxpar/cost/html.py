"""A report as one HTML file that needs nothing else.

Enters: a `Report`, and pictures of it. Leaves: the text of the file: the verdict, what is split, the pictures, and the
other tables. All text of a model or plan is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from fxpar.cost.figures import RankMemory, Report, all_sections
from fxpar.cost.sections import Section
from fxpar.cost.verdict import Verdict
from fxpar.text.tables import amount, time_text

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f3f5f8; --text: #1c2430; --dim: #566173; --line: #d5dae2;
  --good: #0b6b3a; --bad: #b3261e; --c0: #2f6fde; --c1: #12a594; --c2: #e08a1e; --c3: #b14ed0; --c4: #8d99a8;
  --product: #d6e4fb; --collective: #fde3c4; --waits: #f6c9c4; --hidden: #6fbf9a; --live: #8fb8f2; --fixed: #5b6b82; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --card: #1d232c; --text: #e7ebf0; --dim: #a9b4c3;
  --line: #3a4452; --good: #6fd39b; --bad: #ff9d94; --c0: #6b9df5; --c1: #3cc7b5; --c2: #f0a94e; --c3: #cf86e8;
  --c4: #7d899a; --product: #25406b; --collective: #5a3f1c; --waits: #6b2f2a; --hidden: #2f7d59; --live: #3f6fb5;
  --fixed: #8fa0b8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
header, main { margin: 0 auto; padding: 1.5rem 1.5rem 0; max-width: 78rem; }
main { padding-bottom: 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { color: var(--dim); margin: .5rem 0; max-width: 62rem; }
a { color: inherit; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; margin: 1rem 0 0; padding: 0; }
p.remark { color: var(--text); border-left: 4px solid var(--c2); padding: .3rem .8rem; background: var(--card); }
dl { display: flex; flex-wrap: wrap; gap: .8rem; margin: 0 0 1rem; }
dl div { flex: 1 1 15rem; background: var(--card); border-radius: .5rem; padding: .6rem .9rem; }
dl.verdict div { flex-basis: 20rem; border-left: .4rem solid var(--c4); }
dl.verdict .fits { border-color: var(--good); } dl.verdict .misses { border-color: var(--bad); }
dl.verdict .misses dd { color: var(--bad); }
dt { color: var(--dim); font-size: .85rem; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .wide:focus-visible { outline: 2px solid var(--c0); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--dim); font-weight: 600; border-bottom: 2px solid var(--line); }
th, td { padding: .35rem .8rem .35rem 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
td.part { padding-left: 1.2rem; color: var(--dim); }
th.right, td.right { text-align: right; white-space: nowrap; }
tr.all td { font-weight: 600; border-top: 2px solid var(--line); }
.bar { display: flex; height: 1.6rem; border-radius: .4rem; overflow: hidden; background: var(--card); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .5rem 0; padding: 0; font-size: .85rem;
  list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .4rem; }
.legend svg { vertical-align: -4px; margin-right: .4rem; }
figure { margin: .8rem 0; } figcaption { color: var(--dim); margin-bottom: .5rem; max-width: 62rem; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--text); font-weight: 600; }
.picture, .legend svg { font: 11.5px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; fill: var(--text); }
.picture .head { font-weight: 700; font-size: 14px; } .picture .strong { font-weight: 700; }
.picture .dim { fill: var(--dim); } .picture .small, .picture .node { font-size: 10.5px; }
.picture .node { font-weight: 400; fill: var(--dim); } .picture .plain { fill: var(--dim); }
.picture .box { stroke: var(--line); } .picture .other { fill: var(--back); } .picture .lane { fill: var(--card); }
.picture .product { fill: var(--product); } .picture .collective { fill: var(--collective); }
.picture rect.product:not(.box) { fill: var(--c0); } .picture rect.collective:not(.box) { fill: var(--c2); }
.picture .hidden { fill: var(--hidden); } .picture .waits { fill: var(--waits); }
.picture .live { fill: var(--live); } .picture .fixed { fill: var(--fixed); }
.picture .limit { stroke: var(--dim); stroke-dasharray: 3 3; fill: none; }
.mark { fill: #00000059; } .chip { stroke: #00000059; } .letter { fill: #111; font-size: 11px; font-weight: 700; }
.chip.s { fill: #b7ead9; } .part { fill: #4fc39b; } .chip.r { fill: #bcd3fb; } .chip.i { fill: #e2e6ec; }
.chip.p { fill: #ffd9a8; } .chip.v { fill: #e8c9f4; }
.phase-f { fill: #9dc1f7; } .phase-b { fill: #f4c184; } .phase-i { fill: #f4c184; } .phase-w { fill: #c7d98a; }
.groups svg { border-radius: .5rem; }
@media print { .wide { overflow: visible; } }
"""
_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


_SPLIT = ("plan", "what is split", "not split")


@dataclass(frozen=True)
class Picture:
    """A picture of the page: its title, what it shows in a sentence, and the picture or more in HTML."""

    title: str
    caption: str
    body: str


def as_html(report: Report, pictures: Sequence[Picture] = ()) -> str:
    """Returns the file's text.

    Args:
        pictures: what comes after the tables of the plan and of what is split.
    """
    sections = all_sections(report)
    head = [f"<h1>{escape(report.name)}</h1>"]
    if report.verdict is not None:
        head += _verdict(report.verdict, sections.pop(0))
    # Next to the plan and what is split come the pictures, and then all other tables.
    split = 1 + max((i for i, section in enumerate(sections) if section.title in _SPLIT), default=0)
    body = [part for section in sections[:split] for part in table_of(section)]
    body += [part for picture in pictures for part in _figure(picture)]
    body += [*_bar(report), *[part for section in sections[split:] for part in table_of(section)]]
    titles = [section.title for section in sections[:split]] + [picture.title for picture in pictures]
    titles += [_BAR, *(section.title for section in sections[split:])]
    links = "".join(f'<li><a href="#{_anchor(title)}">{escape(title)}</a></li>' for title in titles)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.name)} – fxpar report</title>\n<style>{_STYLE}</style>\n</head>\n"
        f'<body>\n<header>\n{_lines(head)}\n<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n'
        f"<main>\n{_lines(body)}\n</main>\n</body>\n</html>\n"
    )


def _lines(parts: Sequence[str]) -> str:
    return "\n".join(parts)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


def _verdict(verdict: Verdict, section: Section) -> Iterator[str]:
    """Yields a card for each line of the verdict, and of what the seconds of a step consist."""
    mark = {True: "fits", False: "misses", None: ""}[verdict.fits]
    cards = "".join(
        f'<div class="{mark if name == "memory" else ""}"><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>'
        for name, text in section.rows
    )
    yield f'<dl class="verdict">{cards}</dl>'
    if verdict.seconds:
        names = ("products", "waits", "stored", "optimizer", "idle")
        yield from _pieces("seconds of a step", [(name, getattr(verdict, name)) for name in names], time_text)
    for note in section.notes:
        yield f"<p>{escape(note)}</p>"


def _pieces(what: str, sizes: Sequence[tuple[str, float]], shown: Callable[[float], str]) -> Iterator[str]:
    """Yields a bar of parts, and which is which."""
    total = sum(size for _, size in sizes)
    pieces = "".join(
        f'<div style="width:{100 * size / total:.2f}%;background:var(--c{index})"></div>'
        for index, (_, size) in enumerate(sizes)
        if size
    )
    legend = "".join(
        f'<li><i style="background:var(--c{index})"></i>{part} {shown(size)}</li>'
        for index, (part, size) in enumerate(sizes)
    )
    parts = ", ".join(f"{part} {shown(size)}" for part, size in sizes)
    yield f'<div class="bar" role="img" aria-label="{escape(what)}: {parts}">{pieces}</div>'
    yield f'<ul class="legend">{legend}</ul>'


_BAR = "what fills a rank"


def _bar(report: Report) -> Iterator[str]:
    """Yields what a rank's memory is made of, on the rank that needs most of it."""
    fullest: RankMemory = max(report.ranks, key=lambda rank: rank.peak)
    sizes = [(part, getattr(fullest, part)) for part in _PARTS]
    total = sum(size for _, size in sizes)
    yield f'<h2 id="{_anchor(_BAR)}">{_BAR}</h2>'
    yield f"<p>{amount(total)} of state and activations, {amount(fullest.peak)} at the peak of a step.</p>"
    if total:
        yield from _pieces("memory of a rank", sizes, amount)


def table_of(section: Section, heading: str = "h2") -> Iterator[str]:
    """Yields a table under its title, and the sentences below it."""
    yield f'<{heading} id="{_anchor(section.title)}">{escape(section.title)}</{heading}>'
    if section.rows:
        kinds = ['class="right"' if column in section.right else "" for column in section.columns]
        pairs = zip(section.columns, kinds, strict=True)
        head = "".join(f'<th scope="col" {kind}>{escape(name)}</th>' for name, kind in pairs)
        rows = []
        for row in section.rows:
            marks = ['class="part"' if row[0].startswith(" ") else kinds[0], *kinds[1:]]  # a part of the row above
            cells = "".join(f"<td {mark}>{escape(cell.strip())}</td>" for cell, mark in zip(row, marks, strict=True))
            rows.append(f'<tr class="all">{cells}</tr>' if row[0] == "all" else f"<tr>{cells}</tr>")
        body = f"<table><thead><tr>{head}</tr></thead><tbody>{_lines(rows)}</tbody></table>"
        yield scrolling(section.title, body)
    for note in section.notes:
        yield f"<p>{escape(note)}</p>"


def scrolling(title: str, body: str) -> str:
    """Returns what scrolls by itself where the screen is narrow; a keyboard can reach it."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{escape(title)}">\n{body}\n</div>'


def _figure(picture: Picture) -> Iterator[str]:
    yield f'<h2 id="{_anchor(picture.title)}">{escape(picture.title)}</h2>'
    yield f"<figure><figcaption>{escape(picture.caption)}</figcaption>"
    yield picture.body
    yield "</figure>"
