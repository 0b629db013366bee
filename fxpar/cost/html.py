"""A report as one HTML file that needs nothing else.

Enters: a `Report`. Leaves: the text of the file: facts, a bar of what fills a rank's memory, and every table. All text
of a model or plan is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from fxpar.cost.figures import RankMemory, Report, Section, all_sections
from fxpar.text.tables import amount

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f5f6f8; --text: #1c2430; --dim: #647082; --line: #dde1e7;
  --c0: #2f6fde; --c1: #12a594; --c2: #e08a1e; --c3: #b14ed0; --c4: #8d99a8; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --card: #1d232c; --text: #e7ebf0; --dim: #96a1b0;
  --line: #313a46; --c0: #6b9df5; --c1: #3cc7b5; --c2: #f0a94e; --c3: #cf86e8; --c4: #6d7988; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 76rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 1.2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
p { color: var(--dim); margin: .5rem 0; max-width: 62rem; }
p.remark { color: var(--text); border-left: 4px solid var(--c2); padding: .3rem .8rem; background: var(--card); }
dl { display: flex; flex-wrap: wrap; gap: .8rem; margin: 0 0 1rem; }
dl div { flex: 1 1 15rem; background: var(--card); border-radius: .5rem; padding: .6rem .9rem; }
dt { color: var(--dim); font-size: .8rem; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--dim); font-weight: 600; border-bottom: 2px solid var(--line); }
th, td { padding: .35rem .8rem .35rem 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
td.part { padding-left: 1.2rem; color: var(--dim); }
th.right, td.right { text-align: right; white-space: nowrap; }
tr.all td { font-weight: 600; border-top: 2px solid var(--line); }
.bar { display: flex; height: 1.6rem; border-radius: .4rem; overflow: hidden; background: var(--card); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .5rem 0; font-size: .85rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .4rem; }
"""
_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def as_html(report: Report) -> str:
    """Returns the file's text."""
    head, *rest = all_sections(report)
    body = "\n".join([*_head(head), *_bar(report), *[part for section in rest for part in _section(section)]])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.name)} – fxpar report</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _head(section: Section) -> Iterator[str]:
    yield f"<h1>{escape(section.title)}</h1>"
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in section.rows)
    yield f"<dl>{facts}</dl>"
    for note in section.notes:
        yield f'<p class="remark">{escape(note)}</p>'


def _bar(report: Report) -> Iterator[str]:
    """Yields what a rank's memory is made of, on the rank that needs most of it."""
    fullest: RankMemory = max(report.ranks, key=lambda rank: rank.peak)
    sizes = [(part, getattr(fullest, part)) for part in _PARTS]
    total = sum(size for _, size in sizes)
    if not total:
        return
    pieces = "".join(
        f'<div style="width:{100 * size / total:.2f}%;background:var(--c{index})" title="{part}: {amount(size)}"></div>'
        for index, (part, size) in enumerate(sizes)
        if size
    )
    legend = "".join(
        f'<span><i style="background:var(--c{index})"></i>{part} {amount(size)}</span>'
        for index, (part, size) in enumerate(sizes)
    )
    yield f"<h2>a rank: {amount(total)} of state and activations, {amount(fullest.peak)} at the peak of a step</h2>"
    yield f'<div class="bar">{pieces}</div><div class="legend">{legend}</div>'


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    if section.rows:
        kinds = ['class="right"' if column in section.right else "" for column in section.columns]
        head = "".join(f"<th {kind}>{escape(name)}</th>" for name, kind in zip(section.columns, kinds, strict=True))
        yield f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>'
        for row in section.rows:
            marks = ['class="part"' if row[0].startswith(" ") else kinds[0], *kinds[1:]]  # a part of the row above
            cells = "".join(f"<td {mark}>{escape(cell.strip())}</td>" for cell, mark in zip(row, marks, strict=True))
            yield f'<tr class="all">{cells}</tr>' if row[0] == "all" else f"<tr>{cells}</tr>"
        yield "</tbody></table></div>"
    for note in section.notes:
        yield f"<p>{escape(note)}</p>"
